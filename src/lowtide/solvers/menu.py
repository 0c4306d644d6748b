"""A segment's menu: the choices of what to recompute that are worth considering, by minimum cuts.

For prices lam per kept byte and mu per rebuilt byte, choose which operations' results to keep (k) and which to
replay (r) so that everything backward needs is there:

    minimise  sum lam * bytes_i * k_i + sum (seconds_i + mu * bytes_i) * r_i      seconds_i: those of ``again_seconds``
    subject to  k_i + r_i >= 1      for every operation whose result autograd saved
                k_j + r_j >= r_i    for every operation i that reads a result of j

The constraints are those of a closure (a minimum cut), so the linear programme has an integral optimum and HiGHS
solves it by simplex, hot-started from price to price. A sweep of lam gives the corners of the lower convex hull of
(kept bytes, seconds); mu, and forcing a middle of the segment to be kept, find choices between the corners that
lower the transient of the replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from lowtide.graph import Event, StepGraph
from lowtide.solvers.highs import silent
from lowtide.solvers.moments import Decisions
from lowtide.solvers.segmentation import Chain, Segment, overwritten


def again_seconds(graph: StepGraph, op: int) -> float:
    """What it takes to run ``op`` once more: its own seconds, and the host's for recording it and for replaying it."""
    return graph.ops[op].again_seconds + 2 * graph.host_seconds


@dataclass(frozen=True)
class Menu:
    """Prices to sweep, relative to the segment's own seconds per byte."""

    prices: tuple[float, ...] = tuple(float(x) for x in np.geomspace(1e-3, 1e3, 22))
    rebuilt: tuple[float, ...] = (0.0, 0.03, 0.3)

    def choices(self, facts: Facts, segment: Segment) -> list[frozenset[int]]:
        """Sets of operations to recompute, as offsets from the segment's first operation; the empty set first."""
        cut = Cut(facts, segment)
        found: dict[frozenset[int], None] = {frozenset(): None}
        if not cut.free:
            return list(found)
        scale = cut.total_seconds / max(1, cut.total_bytes)
        for forced in (None, *cut.middles()):
            cut.force(forced)
            for mu in self.rebuilt:
                for lam in self.prices:
                    found.setdefault(cut.solve(lam * scale, mu * scale))
        return list(found)


@dataclass(frozen=True)
class Facts:
    """What cuts of all segments of a step need to know."""

    graph: StepGraph
    boundaries: frozenset[int]
    droppable: Sequence[bool]
    """By buffer."""
    saved: frozenset[int]
    """Buffers that backward needs and that the program does not hold until then."""
    overwritten: frozenset[int]
    """Operations of whose results nothing can be kept."""

    @staticmethod
    def of(graph: StepGraph, chain: Chain) -> Facts:
        """Those of ``graph``."""
        saved = frozenset(graph.saves) - _held(graph)
        return Facts(graph, chain.boundaries, Decisions(graph).can, saved, frozenset(overwritten(graph)))


def _held(graph: StepGraph) -> set[int]:
    """Saved buffers that the program still holds whenever backward asks for them, such as a model's outputs."""
    freed: dict[int, int] = {}
    asked: dict[int, int] = {}
    for event, (kind, index) in enumerate(graph.events):
        if kind == Event.FREE:
            freed[index] = event
        elif kind == Event.UNPACK:
            asked[graph.saves[index]] = event
    gone = {old for op in graph.ops for old, _ in op.writes}
    last = len(graph.events)
    return {b for b, event in asked.items() if b not in gone and freed.get(graph.buffers[b].storage, last) > event}


class Cut:
    """The linear programme of one segment."""

    def __init__(self, facts: Facts, segment: Segment) -> None:
        self.graph = graph = facts.graph
        self.segment = segment
        self.can = facts.droppable
        self.saved = facts.saved
        self.ops = list(range(segment.first, segment.last))
        self.free = [i for i in self.ops if self._droppable(i) and i not in facts.boundaries]
        self.column = {op: n for n, op in enumerate(self.free)}
        self.bytes = np.array([self._kept_bytes(i) for i in self.free], dtype=float)
        self.made = np.array([self._made_bytes(i) for i in self.free], dtype=float)
        self.seconds = np.array([again_seconds(graph, i) for i in self.free], dtype=float)
        self.total_bytes = float(self.bytes.sum())
        self.total_seconds = float(self.seconds.sum()) or 1.0
        self.never = {self.column[i] for i in facts.overwritten if i in self.column}
        self.solver = silent()
        self._build()

    def _results(self, op: int) -> list[int]:
        row = self.graph.ops[op]
        return [*row.makes, *(new for _, new in row.writes)]

    def _droppable(self, op: int) -> bool:
        return any(self.can[b] for b in self._results(op))

    def _size(self, buffer: int) -> int:
        return self.graph.storages[self.graph.buffers[buffer].storage].bytes

    def _kept_bytes(self, op: int) -> int:
        results = [b for b in self._results(op) if self.can[b]]
        wanted = [b for b in results if b in self.saved]
        return sum(self._size(b) for b in wanted or results)

    def _made_bytes(self, op: int) -> int:
        return sum(self._size(b) for b in self._results(op))

    def _build(self) -> None:
        n = len(self.free)
        highs = self.solver
        for _ in range(2 * n):  # k_0 .. k_n-1, r_0 .. r_n-1
            highs.addVar(0.0, 1.0)
        for column in self.never:  # overwritten in place: what it held is gone
            highs.changeColBounds(column, 0.0, 0.0)
        one, inf = 1.0, highspy.kHighsInf
        for column, op in enumerate(self.free):
            if any(b in self.saved and self.can[b] for b in self._results(op)):
                highs.addRow(one, inf, 2, np.array([column, n + column]), np.array([one, one]))
            for read in self.graph.ops[op].reads:
                maker = self.column.get(self.graph.buffers[read].maker)
                if maker is not None and self.can[read]:
                    index = np.array([maker, n + maker, n + column])
                    highs.addRow(0.0, inf, 3, index, np.array([one, one, -one]))
        self.columns = np.arange(2 * n, dtype=np.int32)

    def force(self, op: int | None) -> None:
        """Keep the results of ``op`` in every solution from now on; None lifts that."""
        for column in range(len(self.free)):
            if column not in self.never:
                low = 1.0 if op is not None and self.free[column] == op else 0.0
                self.solver.changeColBounds(column, low, 1.0)

    def solve(self, lam: float, mu: float) -> frozenset[int]:
        """The cheapest operations to recompute at these prices, as offsets into the segment."""
        n = len(self.free)
        tiny = 1e-9 * self.total_seconds / n
        cost = np.concatenate([lam * self.bytes + tiny, self.seconds + mu * self.made + tiny])
        scale = 1.0 / max(cost.max(), 1e-300)
        self.solver.changeColsCost(2 * n, self.columns, cost * scale)
        self.solver.run()
        again = np.array(self.solver.getSolution().col_value[n:]) > 0.5  # recording what is never replayed costs too
        return frozenset(self.free[i] - self.segment.first for i in range(n) if again[i])

    def middles(self) -> list[int]:
        """Operations at which a single droppable result crosses: natural restore points inside the segment."""
        last_read: dict[int, int] = {}
        for i in self.ops:
            for read in self.graph.ops[i].reads:
                maker = self.graph.buffers[read].maker
                if maker in self.column:
                    last_read[maker] = i
        lone = []
        for i in self.free[1:-1]:
            crossing = [m for m, until in last_read.items() if m <= i < until]
            if crossing == [i]:
                lone.append(i)
        middle = (self.segment.first + self.segment.last) / 2
        return sorted(lone, key=lambda i: abs(i - middle))[:2]
