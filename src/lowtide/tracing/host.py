"""What the host adds to operations: Python and autograd in a plain step, the tape in a recorded one.

Two small steps of different depth are taken plainly and under two policies, in turn, and what their operations take by
themselves is left out:

    plain             operations + outside
    one dropped       the same + step + recording x (calls + saved)
    all dropped       the same + tape x (dropped + replayed)

That is done once a process, in a thread of its own: modes, hooks, autocast and profiles belong to threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lowtide.graph import StepGraph
from lowtide.policies import recompute_all
from lowtide.recording import begin, end, record
from lowtide.simulation import simulate
from lowtide.tape.policy import Op, Policy, as_policy
from lowtide.tracing.counting import CallCount
from lowtide.tracing.tracer import Tracer

LAYERS, WIDTH = (6, 18), 8
"""Of two small steps, so narrow that arithmetic weighs little: their difference is free of what a step costs once."""
ROUNDS, UNTIMED = 9, 6
"""The first steps are recorded, later ones are followed."""


@dataclass(frozen=True)
class HostCosts:
    """Seconds on top of the operations themselves."""

    outside_seconds: float = 0.0
    """Python, modules and autograd, for each operation or view of a plain step."""
    step_seconds: float = 0.0
    """Of a step in which anything is dropped, once."""
    recording_seconds: float = 0.0
    """Of its forward pass, for each call of a torch function and each saved tensor, whatever is done about it."""
    tape_seconds: float = 0.0
    """For each operation that is dropped, and again when it is replayed."""


@cache
def host_costs() -> HostCosts:
    """Measure what this machine's Python adds, in some tenths of a second."""
    found: list[HostCosts] = []
    thread = threading.Thread(target=lambda: found.append(_measure()), name="lowtide host costs")
    thread.start()
    thread.join()
    return found[0] if found else HostCosts()


class Layer(nn.Module):
    """An activation after a matrix product."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))

    def forward(self, hidden: Tensor) -> Tensor:
        """Rows of ``WIDTH`` numbers."""
        return F.gelu(F.linear(hidden, self.weight))


@dataclass(frozen=True)
class _Costs:
    """Of a small step: seconds outside of its operations, seconds that policies add, and counts of operations."""

    outside: float
    least: float
    most: float
    dispatched: int
    recorded: int
    handled: int


def _measure() -> HostCosts:
    small, large = map(_costs, LAYERS)
    outside = (large.outside - small.outside) / (large.dispatched - small.dispatched)
    recording = max(0.0, (large.least - small.least) / (large.recorded - small.recorded))
    tape = max(0.0, (large.most - large.least) / large.handled)
    return HostCosts(outside, max(0.0, small.least - recording * small.recorded), recording, tape)


def _drops_one(op: Op) -> bool:
    return op.name != "aten.sum"


def _costs(depth: int) -> _Costs:
    generator = torch.Generator().manual_seed(0)
    layers = [Layer(generator) for _ in range(depth)]
    batch = torch.randn(4, WIDTH, generator=generator)
    calls = [layer.forward if _has_any_global_hook() else layer for layer in layers]  # nobody's hooks see these

    def forward() -> Tensor:
        hidden = batch
        for call in calls:
            hidden = call(hidden)
        return hidden.sum()

    def under(policy: Policy) -> Callable[[], Tensor]:
        recording = record(policy, check="never")

        def recorded() -> Tensor:
            with recording:
                return forward()

        return recorded

    graph, dispatched = _traced(forward)
    with CallCount() as counter:
        forward()
    count = sum(not op.backward for op in graph.ops)
    every = simulate(graph, frozenset(range(count)))
    plain, least, most = _in_turn(forward, under(as_policy(_drops_one)), under(recompute_all))
    return _Costs(
        outside=plain - graph.seconds,
        least=least - plain,
        most=most - plain - every.recompute_seconds,
        dispatched=sum(dispatched),
        recorded=counter.calls + len(graph.saves),
        handled=count + len(every.replays),
    )


def _traced(forward: Callable[[], Tensor]) -> tuple[StepGraph, list[int]]:
    tracer = Tracer(repeats=5)
    begin(tracer)
    try:
        loss = forward()
    finally:
        end(tracer)
    with tracer:
        _backward(loss)
    return StepGraph(**tracer.rows()), tracer.dispatched


def _in_turn(*forwards: Callable[[], Tensor]) -> list[float]:
    """Median seconds of a step with each of ``forwards``."""
    seconds: list[list[float]] = [[] for _ in forwards]
    for _ in range(UNTIMED + ROUNDS):
        for own, forward in zip(seconds, forwards, strict=True):
            start = time.thread_time()
            _backward(forward())
            own.append(time.thread_time() - start)
    return [median(own[UNTIMED:]) for own in seconds]


def _backward(loss: Tensor) -> None:
    """Not by ``torch.autograd``: others may look on there."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
