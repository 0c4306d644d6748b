"""Distributed steps under lowtide: the same bits on every rank, and not one collective more."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from distributed_steps import STEPS, local
from ranks import Collectives, on_ranks

import lowtide

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

WANTED: dict[str, dict[str, Any]] = {
    "recompute_all": {"policy": lowtide.policies.recompute_all},
    "segments": {"policy": lowtide.policies.segments(keep_last=False)},
    "keep_matmuls": {"policy": lowtide.policies.keep_matmuls},
    "a budget": {"budget": "85%"},
}
FAMILIES = sorted({name.partition(":")[0] for name in STEPS})
COUNT = 3


def train(name: str, wanted: dict[str, Any] | None) -> tuple[list[list[torch.Tensor]], dict[str, int], int]:
    """Losses, gradients and buffers of some steps on this rank; collectives; how many calls went under a plan."""
    torch.manual_seed(0)
    setup = STEPS[name]()
    optimizer = torch.optim.SGD([p for p in setup.wrapped.parameters() if p.requires_grad], 0.1)
    handle = lowtide.attach(setup.planned, **wanted) if wanted is not None else None
    seen = []
    torch.manual_seed(7)
    with Collectives() as sent:
        for number in range(COUNT):
            step = setup.run(number)
            step += [local(p.grad) for p in setup.wrapped.parameters() if p.grad is not None]
            step += [local(b) for b in setup.wrapped.buffers()]
            seen.append(step)
            optimizer.step()
            optimizer.zero_grad()
    planned = 0
    if handle is not None:
        planned = handle.report().planned_calls
        handle.detach()
    return seen, sent.counts, planned


def compare(names: list[str], ways: list[str]) -> dict[tuple[str, str], str]:
    """What is wrong with each step under each way, "" if nothing is."""
    found = {}
    for name in names:
        plain, sent, _ = train(name, None)
        assert sum(len(step) for step in plain) > COUNT
        for way in ways:
            try:
                ours, ours_sent, planned = train(name, WANTED[way])
            except Exception as error:
                found[name, way] = f"{type(error).__name__}: {error}"
                raise
            wrong = [n for n, (a, b) in enumerate(zip(plain, ours, strict=True)) if not same(a, b)]
            found[name, way] = f"steps {wrong} differ" if wrong else ""
            if sent != ours_sent:
                found[name, way] += f" sent {ours_sent} instead of {sent}"
            if not planned:
                found[name, way] += " nothing was planned"
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@functools.cache
def results(family: str) -> list[dict[tuple[str, str], str]]:
    return on_ranks(compare, [name for name in STEPS if name.partition(":")[0] == family], list(WANTED))


@pytest.mark.parametrize("way", WANTED)
@pytest.mark.parametrize("name", STEPS)
def test_a_distributed_step_is_the_same_and_sends_the_same(name: str, way: str) -> None:
    for rank in results(name.partition(":")[0]):
        assert not rank[name, way]
