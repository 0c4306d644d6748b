"""Batches of random sizes under one budget: every step is within it, and plans are made once a rung, not for shapes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide
import lowtide.ladder
from harness import freeze
from lowtide.demo.memory import measure_memory
from lowtide.demo.model import GPT, GPTShape
from lowtide.graph import StepGraph
from lowtide.ladder import FRACTIONS, Ladder
from lowtide.planning import Planner

ROWS, LENGTH, WORDS = 8, 64, 96
STEPS = 30


def model_and_batches() -> tuple[GPT, list[Tensor]]:
    """A small GPT and batches of tokens, the largest first, then of random rows and lengths."""
    torch.manual_seed(0)
    model = GPT(GPTShape(WORDS, LENGTH, width=64, blocks=4, heads=4))
    draw = random.Random(5)
    sizes = [(ROWS, LENGTH), *((draw.randint(3, ROWS), draw.randint(8, LENGTH)) for _ in range(STEPS))]
    return model, [torch.randint(WORDS, size) for size in sizes]


def step(model: GPT, tokens: Tensor) -> tuple[int, dict[str, object]]:
    """Peak bytes of a step with all that is there all the time, and its gradients bit for bit."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)

    def forward() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    peak = measure_memory(forward, Tensor.backward).peak_bytes
    resident = tokens.nbytes + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return peak + resident, {name: freeze(p.grad) for name, p in model.named_parameters()}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[StepGraph]:
    """The steps that planners were made for."""
    seen: list[StepGraph] = []

    class Counted(Planner):
        def __init__(self, graph: StepGraph, *args: Any, **kwargs: Any) -> None:
            seen.append(graph)
            super().__init__(graph, *args, **kwargs)

    monkeypatch.setattr(lowtide.ladder, "Planner", Counted)
    return seen


@pytest.mark.parametrize("share", [0.5, 0.65])
def test_batches_of_random_sizes_stay_within_one_budget(share: float, planned: list[StepGraph]) -> None:
    model, batches = model_and_batches()
    plain = [step(model, tokens) for tokens in batches]
    budget = int(max(peak for peak, _ in plain) * share)
    assert sum(peak > budget for peak, _ in plain) >= 5
    with lowtide.attach(model, budget=budget) as handle:
        step(model, batches[0])  # is watched
        plans = []
        for tokens, (_, gradients) in zip(batches, plain, strict=True):
            peak, ours = step(model, tokens)
            assert peak <= budget, tuple(tokens.shape)
            assert ours == gradients
            plans.append(handle.plan)
        made = len(planned)
        for tokens, (_, gradients) in zip(batches, plain, strict=True):
            peak, ours = step(model, tokens)
            assert peak <= budget, tuple(tokens.shape)
            assert ours == gradients
    assert len(planned) == made <= len(FRACTIONS)
    assert len({plan.recompute for plan in plans if plan is not None}) > 1


def test_a_lower_rung_is_no_slower_and_the_lowest_keep_everything() -> None:
    model, batches = model_and_batches()
    tokens = batches[0]
    graph = lowtide.trace(lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), model, fake=True)
    ladder = Ladder(graph, int(lowtide.simulate(graph, ()).peak_bytes * 0.6))
    extra = []
    for fraction in FRACTIONS:
        prediction = ladder.choose(fraction).prediction
        assert prediction is not None
        extra.append(prediction.step_seconds / prediction.plain_seconds)
    assert extra == sorted(extra, reverse=True)
    assert extra[0] > 1
    assert extra[-1] == 1
