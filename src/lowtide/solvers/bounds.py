"""A lower bound: no plan that keeps what segments hand on can recompute for fewer seconds within the budget.

The linear programme of all operations at once, in fractions: k_i of an operation's result kept, r_i of it replayed.

    minimise  sum seconds_i * r_i
    subject to  k_i + r_i >= 1       for every result that autograd saved
                k_j + r_j >= r_i     for every operation i that reads a result of j
                k_i = 0              for results that are overwritten in place, k_i = 1 for those handed on
                there(t) + sum of bytes_i * k_i for results still needed at t  <=  budget, at chosen moments t

there(t) is what is in memory at t whatever the plan is: parameters, gradients so far, backward's own temporaries,
what cannot be dropped, and the saved results that backward is using at t. A saved result is needed until backward
lets go of it; one that only replays read, until backward reaches its segment. Every plan that keeps the boundaries of
the chain is a solution, so the optimum bounds them all.

What replays have made again is left out there, and it is what matters at the smallest budgets. On request, d_i is
added for two moments of each segment: operation i was run again before.

    d_i + k_i >= 1      for every result that backward has asked for
    d_j + k_j >= d_i    for every operation i that reads a result of j;  r_i >= d_i
    there(t) + sum of bytes_i * (k_i + d_i) for results still needed at t  <=  budget

That holds where nothing is run again twice.
"""

from __future__ import annotations

import highspy
import numpy as np

from lowtide.graph import Event, StepGraph
from lowtide.simulation import simulate
from lowtide.solvers.highs import silent
from lowtide.solvers.menu import again_seconds
from lowtide.solvers.segmentation import Chain, Segment, overwritten

_MOMENTS = 8  # of each segment's backward, at most
_BUSIEST = 2  # of each segment's backward, at which what was made again is counted
_ROWS = 320  # of all segments' moments, about; each segment has two at least


class LowerBound:
    """The programme for one graph; answers any budget, hot-started from the last."""

    def __init__(self, graph: StepGraph, chain: Chain, *, any_plan: bool = False, rebuilt: bool = False) -> None:
        """``any_plan``: bound plans that drop the boundaries too, more weakly; ``rebuilt``: count what replays made."""
        self.any_plan = any_plan
        self.counts_rebuilt = rebuilt and not any_plan
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
        seconds = np.array([again_seconds(graph, i) for i in self.free])
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
        count = min(_MOMENTS, max(2, _ROWS // max(1, len(most))))
        for rows in most.values():
            moments |= {event for _, event in sorted(rows)[-count:]}
        unsaved = [] if self.any_plan else self._unsaved(reached)
        busiest = self._busiest() if self.counts_rebuilt else set()
        asked: set[int] = set()  # makers of what backward has asked for and that the program no longer had
        versions = {old for op in graph.ops for old, _ in op.writes}
        walk = _Walk(graph)
        for event, (kind, index) in enumerate(graph.events):
            walk.step(kind, index)
            if kind == Event.UNPACK and event > chain.seal:
                row = graph.buffers[graph.saves[index]]
                if row.droppable and row.storage not in walk.user and graph.saves[index] not in versions:
                    asked.add(row.maker)
            if event in moments or event in busiest:
                sizes, fixed = walk.split()
                columns = {self.column[op]: float(size) for op, size in sizes.items()}
                if event in busiest:
                    done = self._done(self.chain.segments[chain.owner[event]], asked)
                    columns |= {column: float(sizes[op]) for op, column in done.items() if op in sizes}
                columns |= {self.column[op]: float(size) for op, size, until in unsaved if event < until}
                self._add_moment(columns, walk.memory + fixed)

    def _busiest(self) -> set[int]:
        """The moments of each segment's backward at which most is there when all but the boundaries is dropped."""
        graph, chain = self.graph, self.chain
        chosen = [op for op in self.free if op not in chain.boundaries]
        highs = simulate(graph, chosen, live=False).highs
        most: dict[int, list[tuple[int, int]]] = {}
        for event in range(chain.seal + 1, len(graph.events)):
            if graph.events[event][0] in (Event.RUN, Event.UNPACK):
                most.setdefault(chain.owner[event], []).append((highs[event], event))
        return {event for rows in most.values() for _, event in sorted(rows)[-_BUSIEST:]}

    def _done(self, segment: Segment, asked: set[int]) -> dict[int, int]:
        """Columns of "it was run again before the moment" by operation of the segment."""
        graph, highs, n = self.graph, self.solver, len(self.free)
        ops = [i for i in range(segment.first, segment.last) if i in self.column and i not in self.chain.boundaries]
        first = highs.getNumCol()
        done = {op: first + number for number, op in enumerate(ops)}
        highs.addVars(len(ops), np.zeros(len(ops)), np.ones(len(ops)))
        for op, column in done.items():
            kept = self.column[op]
            self._add_row(0.0, [n + kept, column], [1.0, -1.0])
            if op in asked:
                self._add_row(1.0, [kept, column], [1.0, 1.0])
            for read in graph.ops[op].reads:
                maker = graph.buffers[read].maker
                if maker in done and graph.buffers[read].droppable:
                    self._add_row(0.0, [self.column[maker], done[maker], column], [1.0, 1.0, -1.0])
        return done

    def _add_row(self, low: float, columns: list[int], values: list[float]) -> None:
        index = np.array(columns, dtype=np.int32)
        self.solver.addRow(low, highspy.kHighsInf, len(columns), index, np.array(values))
        self.rows += 1

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

    def _add_moment(self, sizes: dict[int, float], there: int) -> None:
        columns = np.array(list(sizes), dtype=np.int32)
        values = np.array(list(sizes.values()), dtype=float)
        self.solver.addRow(-highspy.kHighsInf, highspy.kHighsInf, len(columns), columns, values)
        self.rooms.append((self.rows, float(there)))
        self.rows += 1


def _results(graph: StepGraph, op: int) -> list[int]:
    row = graph.ops[op]
    return [*row.makes, *(new for _, new in row.writes)]


def _gathered(graph: StepGraph, buffer: int) -> bool:
    """Whether the buffer's memory is given back whoever has saved it."""
    return graph.storages[graph.buffers[buffer].storage].kind == "gathered"


class _Walk:
    """Follows the events and knows what is in memory whatever the plan is."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.user = {b.storage for b in graph.buffers if b.maker < 0}
        self.saves: dict[int, int] = {}  # outstanding saves: buffer; not of what is given back whoever has saved it
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
            if not _gathered(graph, graph.saves[index]):
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
        if kind in (Event.SAVE, Event.RELEASE) and not _gathered(graph, graph.saves[index]):
            storage = graph.buffers[graph.saves[index]].storage
            before = counts.get(storage, 0)
            counts[storage] = before + (1 if kind == Event.SAVE else -1)
            size = graph.storages[storage].bytes
            saved += size * ((before == 0) - (before == 1 and kind == Event.RELEASE))
        totals.append(walk.memory + saved)
    return totals
