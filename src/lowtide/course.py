"""The course of a step's memory: bytes by kind over the seconds of the step, without a plan or under one."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.graph import StepGraph
from lowtide.plan import Plan
from lowtide.simulated_step import SimulatedStep
from lowtide.simulation import _dropped, depths_of

WEIGHTS, STATES, GRADIENTS = "weights", "optimizer states", "gradients"
ACTIVATIONS, TEMPORARIES, RECOMPUTED, OTHER = "activations", "temporaries", "recomputed", "inputs and buffers"
KINDS = (WEIGHTS, STATES, OTHER, GRADIENTS, ACTIVATIONS, RECOMPUTED, TEMPORARIES)
"""From the bottom of a stack to its top."""
_KINDS = {
    "parameter": WEIGHTS,
    "gradient": GRADIENTS,
    "activation": ACTIVATIONS,
    "temporary": TEMPORARIES,
}


@dataclass(frozen=True)
class Moment:
    """Bytes by kind, in the order of ``KINDS``, at one moment of the step."""

    seconds: float
    bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """All kinds together."""
        return sum(self.bytes)


def course(graph: StepGraph, plan: Plan | None = None, *, points: int = 160) -> tuple[Moment, ...]:
    """The highest moment of each of ``points`` stretches of the step; the peak is among them."""
    chosen = depths_of(graph, frozenset() if plan is None else plan)
    dropped = _dropped(graph, chosen)
    first = _Watched(graph, chosen, dropped, frozenset())
    first.go(trail=False)
    highest = _highest(first.totals, points)
    second = _Watched(graph, chosen, dropped, highest)
    second.go(trail=False)
    return tuple(second.moments)


def _highest(totals: list[tuple[float, int]], points: int) -> frozenset[int]:
    """The index of the highest total in each stretch of equal time, and the first and the last."""
    end = totals[-1][0] if totals else 0.0
    best: dict[int, int] = {}
    for index, (seconds, total) in enumerate(totals):
        stretch = int(points * seconds / end) if end else index
        if stretch not in best or total > totals[best[stretch]][1]:
            best[stretch] = index
    return frozenset({*best.values(), 0, len(totals) - 1})


class _Watched(SimulatedStep):
    """A step on paper that writes down what is there at some of its moments."""

    def __init__(self, graph: StepGraph, chosen: dict[int, int], dropped: list[bool], wanted: frozenset[int]) -> None:
        super().__init__(graph, chosen, dropped)
        self.seconds = 0.0
        self.wanted_moments = wanted
        self.totals: list[tuple[float, int]] = []
        self.moments: list[Moment] = []

    def _run(self, index: int) -> None:
        self.seconds += self.graph.ops[index].seconds
        super()._run(index)

    def _rerun(self, recipe: int) -> None:
        self.seconds += self.graph.ops[recipe].again_seconds
        super()._rerun(recipe)

    def _pass(self, recipe: int, wanted: set[int]) -> None:
        self.seconds += self.graph.ops[recipe].again_seconds
        super()._pass(recipe, wanted)

    def _rise(self, more: int) -> None:
        super()._rise(more)
        total = self.memory + more
        if len(self.totals) in self.wanted_moments:
            self.moments.append(Moment(self.seconds, self._by_kind(total)))
        self.totals.append((self.seconds, total))

    def _by_kind(self, total: int) -> tuple[int, ...]:
        graph = self.graph
        sizes = dict.fromkeys(KINDS, 0)
        sizes[STATES] += graph.optimizer_bytes
        sizes[GRADIENTS] += graph.gradient_bytes
        for number, storage in enumerate(graph.storages):
            if self.user[number] or self.refs[number]:
                sizes[_KINDS.get(storage.kind, OTHER)] += storage.bytes
        rest = total - sum(sizes.values())
        sizes[RECOMPUTED if rest >= 0 else TEMPORARIES] += rest
        return tuple(sizes.values())
