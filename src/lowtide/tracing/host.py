"""What the host adds to operations: Python and autograd in a plain step, the tape in a recorded one.

A small step is taken plainly, recorded, and replayed, in turn, and what its operations take by themselves is left
out. That is done once a process, in a thread of its own: modes, hooks, autocast and profiles belong to threads.
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
from lowtide.policies import keep_all, recompute_all
from lowtide.recording import begin, end, record
from lowtide.simulation import simulate
from lowtide.tape.policy import Policy
from lowtide.tracing.tracer import Tracer

LAYERS, WIDTH = 12, 8
"""Of the small step: enough that the end of a step weighs little, so narrow that arithmetic does too."""
ROUNDS = 9


@dataclass(frozen=True)
class HostCosts:
    """Seconds on top of the operations themselves, for one operation each."""

    outside_seconds: float = 0.0
    """Of a plain step: Python, modules, autograd."""
    recording_seconds: float = 0.0
    """Of a recorded forward pass, whatever is done about it."""
    tape_seconds: float = 0.0
    """That is dropped, and again when it is replayed."""


@cache
def host_costs() -> HostCosts:
    """Measure what this machine's Python adds, in a tenth of a second."""
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


def _measure() -> HostCosts:
    generator = torch.Generator().manual_seed(0)
    layers = [Layer(generator) for _ in range(LAYERS)]
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

    graph = _traced(forward)
    count = sum(not op.backward for op in graph.ops)
    timeline = simulate(graph, frozenset(range(count)))
    plain, kept, dropped = _in_turn(forward, under(keep_all), under(recompute_all))
    return HostCosts(
        max(0.0, plain - graph.seconds) / len(graph.ops),
        max(0.0, kept - plain) / count,
        max(0.0, dropped - kept - timeline.recompute_seconds) / (count + len(timeline.replays)),
    )


def _traced(forward: Callable[[], Tensor]) -> StepGraph:
    tracer = Tracer(repeats=5)
    begin(tracer)
    try:
        loss = forward()
    finally:
        end(tracer)
    with tracer:
        _backward(loss)
    return StepGraph(**tracer.rows())


def _in_turn(*forwards: Callable[[], Tensor]) -> list[float]:
    """Median seconds of a step with each of ``forwards``."""
    seconds: list[list[float]] = [[] for _ in forwards]
    for _ in range(ROUNDS + 2):
        for own, forward in zip(seconds, forwards, strict=True):
            start = time.thread_time()
            _backward(forward())
            own.append(time.thread_time() - start)
    return [median(own[2:]) for own in seconds]


def _backward(loss: Tensor) -> None:
    """Not by ``torch.autograd``: others may look on there."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
