"""Attention is what a plan recomputes last: its results and their log-sum-exp are kept where that is cheaper."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide import Plan, StepGraph

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
WIDTH, HEADS, LENGTH, BLOCKS = 64, 4, 256, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.other_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Runs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by name, those of replays too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func._schema.name).replace("::", ".")] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def traced() -> tuple[Transformer, Tensor, StepGraph]:
    torch.manual_seed(0)
    model = Transformer()
    x = torch.randn(4, LENGTH, WIDTH)
    return model, x, lowtide.trace(lambda: model(x), model)


def step(model: Transformer, x: Tensor, plan: Plan | None = None) -> tuple[Counter[str], list[Tensor]]:
    """What ran in one step, forward, replays and backward; loss and gradients."""
    model.zero_grad()
    with Runs() as runs:
        if plan is None:
            loss = model(x)
        else:
            with lowtide.record(plan, check="never"):
                loss = model(x)
        loss.backward()
    return runs.counts, [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def attention(graph: StepGraph, plan: Plan) -> int:
    """How many attentions the plan recomputes."""
    return sum(op.site in plan.recompute for op in graph.ops if op.name.startswith(FLASH) and not op.backward)


def test_at_a_middle_budget_attention_is_kept_and_runs_once(traced: tuple[Transformer, Tensor, StepGraph]) -> None:
    model, x, graph = traced
    plan = lowtide.solve(graph, budget="75%")
    assert plan.recompute
    assert attention(graph, plan) == 0
    plain, wanted = step(model, x)
    runs, found = step(model, x, plan)
    assert plain[FLASH] == runs[FLASH] == BLOCKS
    assert sum(runs.values()) > sum(plain.values())
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_at_the_lowest_budget_it_may_be_recomputed_and_runs_twice_at_most(
    traced: tuple[Transformer, Tensor, StepGraph],
) -> None:
    model, x, graph = traced
    plan = lowtide.frontier(graph, points=1)[-1]
    recomputed = attention(graph, plan)
    assert recomputed > 0
    _, wanted = step(model, x)
    runs, found = step(model, x, plan)
    assert BLOCKS < runs[FLASH] <= BLOCKS + recomputed
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
