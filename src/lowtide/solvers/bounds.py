"""A lower bound: no plan that keeps what segments hand on can recompute for fewer seconds within the budget.

The linear programme of all operations at once, in fractions: k_i of an operation's result kept, r_i of it replayed.

    minimise  sum seconds_i * r_i
    subject to  k_i + r_i >= 1       for every result that autograd saved
                k_j + r_j >= r_i     for every operation i that reads a result of j
                k_i = 0              for results that are overwritten in place, k_i = 1 for those handed on
                there(t) + sum of bytes_i * k_i for results still needed at t  <=  budget, at chosen moments t

there(t) is what is in memory at t whatever the plan is: parameters, gradients so far, backward's own temporaries,
what cannot be dropped, and the saved results that backward is using at t. A saved result is needed until backward
lets go of it; one that only replays read, until backward reaches its segment. Replays' transients are left out.
Every plan that keeps the boundaries of the chain is a solution, so the optimum bounds them all.
"""

from __future__ import annotations

import highspy
import numpy as np

from lowtide.graph import Event, StepGraph
from lowtide.solvers.highs import silent
from lowtide.solvers.segmentation import Chain, overwritten

_MOMENTS = 8  # of each segment's backward


class LowerBound:
    """The programme for one graph; answers any budget, hot-started from the last."""

    def __init__(self, graph: StepGraph, chain: Chain, *, any_plan: bool = False) -> None:
        """``any_plan``: bound plans that drop the boundaries too, more weakly."""
        self.any_plan = any_plan
        self.graph = graph
        self.free = [i for i, op in graph.forward_ops() if any(graph.buffers[b].droppable for b in _results(graph, i))]
        self.column = {op: n for n, op in enumerate(self.free)}
        self.chain = chain
        self.rooms: list[tuple[int, float]] = []  # rows of byte constraints and what is there anyway
        self.solver = silent()
        self._closure()
        self._moments()

    def seconds(self, budget: float) -> float:
        """Least seconds of recomputation within ``budget`` bytes; infinity if not even fractions fit."""
        for row, there in self.rooms:
            self.solver.changeRowBounds(row, -highspy.kHighsInf, budget - there)
        self.solver.run()
        if self.solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return float("inf")
        return float(self.solver.getObjectiveValue())

    def _closure(self) -> None:
        graph, highs, n = self.graph, self.solver, len(self.free)
        saved = set(graph.saves)
        highs.addVars(2 * n, np.zeros(2 * n), np.ones(2 * n))
        seconds = np.array([graph.ops[i].seconds + graph.host_seconds for i in self.free])
        highs.changeColsCost(n, np.arange(n, 2 * n, dtype=np.int32), seconds)
        gone = overwritten(graph)
        for column, op in enumerate(self.free):
            if op in self.chain.boundaries and not self.any_plan:
                highs.changeColBounds(column, 1.0, 1.0)
            elif op in gone:
                highs.changeColBounds(column, 0.0, 0.0)
        rows: list[tuple[float, list[int], list[float]]] = []
        for column, op in enumerate(self.free):
            if any(b in saved and graph.buffers[b].droppable for b in _results(graph, op)):
                rows.append((1.0, [column, n + column], [1.0, 1.0]))
            for read in graph.ops[op].reads:
                maker = self.column.get(graph.buffers[read].maker)
                if maker is not None and graph.buffers[read].droppable:
                    rows.append((0.0, [maker, n + maker, n + column], [1.0, 1.0, -1.0]))
        starts = np.cumsum([0, *(len(index) for _, index, _ in rows)])[:-1].astype(np.int32)
        highs.addRows(
            len(rows),
            np.array([low for low, _, _ in rows]),
            np.full(len(rows), highspy.kHighsInf),
            int(sum(len(index) for _, index, _ in rows)),
            starts,
            np.array([i for _, index, _ in rows for i in index], dtype=np.int32),
            np.array([v for _, _, values in rows for v in values]),
        )
        self.rows = len(rows)

    def _moments(self) -> None:
        """Byte constraints at the moments of each segment's backward at which most is there."""
        graph, chain = self.graph, self.chain
        most: dict[int, list[tuple[int, int]]] = {}
        reached: dict[int, int] = {}
        for event, total in enumerate(_keeping_all(graph)):
            if event >= chain.seal:
                reached.setdefault(chain.owner[event], event)
                if graph.events[event][0] == Event.RUN:
                    most.setdefault(chain.owner[event], []).append((total, event))
        moments = {chain.seal}
        for rows in most.values():
            moments |= {event for _, event in sorted(rows)[-_MOMENTS:]}
        unsaved = [] if self.any_plan else self._unsaved(reached)
        walk = _Walk(graph)
        for event, (kind, index) in enumerate(graph.events):
            walk.step(kind, index)
            if event in moments:
                sizes, fixed = walk.split()
                sizes |= {op: size for op, size, until in unsaved if event < until}
                self._add_moment(sizes, walk.memory + fixed)

    def _unsaved(self, reached: dict[int, int]) -> list[tuple[int, int, int]]:
        """Results that only replays read: operation, bytes, and the event at which backward reaches its segment."""
        graph = self.graph
        saved = {graph.buffers[b].storage for b in graph.saves}
        found = []
        for number, segment in enumerate(self.chain.segments):
            for op in range(segment.first, segment.last):
                storages = {graph.buffers[b].storage for b in graph.ops[op].makes if graph.buffers[b].droppable}
                if op in self.column and storages and not storages & saved:
                    size = sum(graph.storages[s].bytes for s in storages)
                    found.append((op, size, reached.get(number, 0)))
        return found

    def _add_moment(self, sizes: dict[int, int], there: int) -> None:
        columns = np.array([self.column[op] for op in sizes], dtype=np.int32)
        values = np.array(list(sizes.values()), dtype=float)
        self.solver.addRow(-highspy.kHighsInf, highspy.kHighsInf, len(columns), columns, values)
        self.rooms.append((self.rows, float(there)))
        self.rows += 1


def _results(graph: StepGraph, op: int) -> list[int]:
    row = graph.ops[op]
    return [*row.makes, *(new for _, new in row.writes)]


class _Walk:
    """Follows the events and knows what is in memory whatever the plan is."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.user = {b.storage for b in graph.buffers if b.maker < 0}
        self.saves: dict[int, int] = {}  # outstanding saves: buffer
        self.unpacked: set[int] = set()
        self.memory = graph.resident_bytes

    def step(self, kind: int, index: int) -> None:
        """Take in one event."""
        graph = self.graph
        if kind == Event.RUN:
            for buffer in graph.ops[index].makes:
                storage = graph.buffers[buffer].storage
                if storage not in self.user:
                    self.user.add(storage)
                    self.memory += graph.storages[storage].bytes
        elif kind == Event.FREE:
            if index in self.user:
                self.user.discard(index)
                self.memory -= graph.storages[index].bytes
        elif kind == Event.SAVE:
            self.saves[index] = graph.saves[index]
        elif kind == Event.UNPACK:
            self.unpacked.add(index)
        elif kind == Event.RELEASE:
            self.saves.pop(index, None)
            self.unpacked.discard(index)

    def split(self) -> tuple[dict[int, int], int]:
        """Bytes of outstanding droppable saves by maker, and bytes there anyway because backward uses them."""
        graph = self.graph
        using = {graph.buffers[self.saves[s]].storage for s in self.unpacked if s in self.saves} - self.user
        sizes: dict[int, int] = {}
        fixed = using
        seen: set[int] = set()
        for buffer in self.saves.values():
            row = graph.buffers[buffer]
            if row.storage in self.user or row.storage in fixed or row.storage in seen:
                continue
            seen.add(row.storage)
            size = graph.storages[row.storage].bytes
            if row.droppable:
                sizes[row.maker] = sizes.get(row.maker, 0) + size
            else:
                fixed = fixed | {row.storage}
        return sizes, sum(graph.storages[s].bytes for s in fixed)


def _keeping_all(graph: StepGraph) -> list[int]:
    """About how many bytes are there after each event when everything is kept."""
    walk = _Walk(graph)
    totals = []
    counts: dict[int, int] = {}
    saved = 0
    for kind, index in graph.events:
        walk.step(kind, index)
        if kind in (Event.SAVE, Event.RELEASE):
            storage = graph.buffers[graph.saves[index]].storage
            before = counts.get(storage, 0)
            counts[storage] = before + (1 if kind == Event.SAVE else -1)
            size = graph.storages[storage].bytes
            saved += size * ((before == 0) - (before == 1 and kind == Event.RELEASE))
        totals.append(walk.memory + saved)
    return totals
