"""What the host adds to a step is measured in a real trace on the CPU, and counted by simulate and by solvers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from graphs import blocks, chain, random_graph
from lowtide.planning import Planner
from lowtide.simulation import simulate
from lowtide.solvers.exhaustive import ExhaustiveSolver, fastest
from lowtide.tracing.host import host_costs
from tiny import TINY

COSTS = {"host_seconds": 0.5, "recording_seconds": 8.0, "outside_seconds": 16.0}


@pytest.fixture
def unmeasured() -> Iterator[None]:
    host_costs.cache_clear()
    yield
    host_costs.cache_clear()


def test_each_cost_is_added_where_it_arises() -> None:
    plain = chain(4)
    graph = replace(plain, **COSTS)
    assert graph.seconds == plain.seconds + 16
    assert simulate(graph, ()).step_seconds == plain.seconds + 16  # nothing is recorded
    timeline = simulate(graph, {0, 1})
    assert timeline.replays == (0, 1)
    assert timeline.step_seconds == plain.seconds + 16 + 8 + timeline.recompute_seconds + 0.5 * (2 + 2)


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_that_of_an_exhaustive_search(seed: int) -> None:
    graph = replace(random_graph(seed, 9), **COSTS)
    front = ExhaustiveSolver().front(graph)
    planner = Planner(graph, solver="milp")
    low, high = front[-1][1].peak_bytes, front[0][1].peak_bytes
    for budget in (low, (low + high) // 2, high):
        best = fastest(front, budget)
        prediction = planner.solve(budget).prediction
        assert best is not None
        assert prediction is not None
        assert prediction.step_seconds == pytest.approx(best[1].step_seconds, rel=1e-4)
        assert prediction.gap < 1e-3


def test_a_bound_has_what_recording_costs_in_it() -> None:
    graph = replace(blocks(6), **COSTS)
    for plan in lowtide.frontier(graph, points=4)[1:]:
        assert plan.prediction is not None
        assert plan.prediction.bound_seconds >= graph.seconds + graph.recording_seconds
        assert plan.prediction.bound_seconds <= plan.prediction.step_seconds * (1 + 1e-6)


def test_a_real_trace_measures_them_and_no_other_does() -> None:
    tiny = TINY["perceptron"]()
    measured = tiny.trace(fake=False, repeats=1)
    assert 0 < measured.host_seconds + measured.recording_seconds < 1
    assert 0 < measured.seconds < 1
    for graph in (tiny.trace(fake=True), tiny.trace(fake=False, repeats=0)):
        assert graph.host_seconds == graph.recording_seconds == graph.outside_seconds == 0


def test_the_plain_step_is_timed_as_a_whole_where_that_is_asked_for() -> None:
    calls = 0
    tiny = TINY["perceptron"]()

    def step() -> torch.Tensor:
        nonlocal calls
        calls += 1
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return tiny.step()

    state = torch.get_rng_state()
    graph = lowtide.trace(step, tiny.model, repeats=1, plain_steps=2)
    assert calls == 1 + 2 + 1
    assert graph.outside_seconds > 0.01
    assert graph.seconds > 0.02
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in tiny.model.parameters())


def test_measuring_is_seen_by_nobody(unmeasured: None) -> None:
    seen: list[object] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    hook = register_module_forward_hook(lambda *_: seen.append("hook"))
    state = torch.get_rng_state()
    try:
        with Watch(), torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t), lambda t: t):
            host_costs()
    finally:
        hook.remove()
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)
    assert "lowtide host costs" not in {thread.name for thread in threading.enumerate()}
    with torch.no_grad():
        assert host_costs() is host_costs()
