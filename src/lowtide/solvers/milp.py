"""The optimum on small graphs: a mixed integer programme that grows where the judge finds it too optimistic.

    minimise    sum of seconds_i * again_i    over keep_i in {0, 1}, with the rows of ``moments``
    subject to  bytes(moment)  <=  budget     for the moments that are in the programme so far

    solve -> simulate -> within the budget?   yes: the optimum
       ^                 no: add the moments at which it is above it; if they are there, forbid this one choice
       '---------------------'

Every such programme leaves constraints out, so its optimum bounds all plans in which no operation runs again twice,
whatever they keep; when its choice passes the judge, that is the best there is. (Adding what a solution violates:
Dantzig, Fulkerson and Johnson, 1954.) Time grows fast with the number of operations: beyond some dozens the time
limit decides how much is proven.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import highspy
import numpy as np

from lowtide.graph import Event, StepGraph
from lowtide.simulation import Timeline, simulate
from lowtide.solvers.highs import silent
from lowtide.solvers.moments import Decisions, Moments, Terms, state_before

Found = tuple[frozenset[int], Timeline]
"""Operations to recompute, and what ``simulate`` says of that."""

_PEAK = -1  # the column of the peak, before those of ``moments``
_CLOSE = 1e-6  # HiGHS's tolerances; amounts are scaled to about 1


@dataclass(frozen=True)
class Answer:
    """The best choice that was found, and what is proven about all others."""

    found: Found | None
    """None if there is no choice within the budget, or none was found in time."""
    bound: float
    """Nothing is below: seconds on top of the plain step, or bytes of the peak; infinity if nothing fits."""
    proven: bool
    """Whether nothing better exists, up to the solver's gap."""


@dataclass(frozen=True)
class MilpSolver:
    """Settings: the largest graph to try, how long to try, and how close to the bound is close enough."""

    largest: int = 150
    """Operations to decide about."""
    seconds: float = 10.0
    """For one budget."""
    gap: float = 1e-5
    """Between the answer and the bound, as a fraction."""
    at_once: int = 3
    """Moments to add after a solution that is above the budget."""

    def prepare(self, graph: StepGraph) -> Programme | None:
        """The programme of ``graph`` for any budget; None if there is too much to decide, or nothing."""
        decisions = Decisions(graph)
        return Programme(decisions, self) if 0 < len(decisions.ops) <= self.largest else None


class Programme:
    """The programme of one graph; what is learned at one budget stays for the next."""

    def __init__(self, decisions: Decisions, settings: MilpSolver) -> None:
        self.decisions = decisions
        self.graph = decisions.graph
        self.settings = settings
        self.moments = Moments(decisions)
        self.known: set[tuple[int, int]] = set()  # moments that have a row: event, running operation
        self.forbidden: list[tuple[int, float, Found]] = []  # row, its lower bound, the choice that it forbids
        self.sent = (0, 0)  # rows and columns of ``moments`` that the solver has
        ends = [frozenset[int](), frozenset(decisions.ops)]
        timelines = [simulate(self.graph, end) for end in ends]
        self.peak_unit = float(timelines[0].peak_bytes) or 1.0
        self.second_unit = sum(t.step_seconds for t in timelines) - 2 * self.graph.seconds or 1.0
        self.solver = silent()
        self.solver.setOptionValue("mip_rel_gap", settings.gap)
        self.solver.addVar(0.0, 1.0)  # column 0 is the peak; column n + 1 is column n of ``moments``
        self._send()
        count = len(decisions.ops)
        whole = np.full(count, int(highspy.HighsVarType.kInteger), dtype=np.uint8)
        self.solver.changeColsIntegrality(count, np.arange(1, count + 1, dtype=np.int32), whole)
        self.cutoff = self._add_row(-highspy.kHighsInf, self._seconds())  # upper bound
        for found in zip(ends, timelines, strict=True):
            self._learn(found, 0.0)

    def best(self, budget: float, start: Found | None = None) -> Answer:
        """The fewest seconds on top of the plain step within ``budget`` bytes.

        Args:
            budget: the limit on the peak.
            start: a choice within the budget; only faster ones are looked for.
        """
        constant = self.graph.host_seconds * len(self.decisions.ops) / self.second_unit
        self._minimise(self._seconds(), constant)
        self.solver.changeColBounds(0, 0.0, budget / self.peak_unit)
        most = highspy.kHighsInf
        if start is not None:
            most = self._extra(start[1]) / self.second_unit * (1 - _CLOSE) - constant
        self.solver.changeRowBounds(self.cutoff, -highspy.kHighsInf, most)
        for row, low, (_, timeline) in self.forbidden:
            self.solver.changeRowBounds(
                row, low if timeline.peak_bytes > budget else -highspy.kHighsInf, highspy.kHighsInf
            )
        return self._search(start, budget)

    def least(self, start: Found | None = None) -> Answer:
        """The smallest peak that any choice has; only peaks below that of ``start`` are looked for."""
        self._minimise({_PEAK: 1.0}, 0.0)
        self.solver.changeRowBounds(self.cutoff, -highspy.kHighsInf, highspy.kHighsInf)
        for row, low, found in self.forbidden:
            self.solver.changeRowBounds(row, low, highspy.kHighsInf)
            start = found if start is None else min(start, found, key=lambda f: f[1].peak_bytes)
        most = 1.0 if start is None else (start[1].peak_bytes - 1) / self.peak_unit
        self.solver.changeColBounds(0, 0.0, most)
        return self._search(start, None)

    def _search(self, best: Found | None, budget: float | None) -> Answer:
        """Solve, judge and learn until the judge agrees. Without a budget it is the peak that is minimised."""
        unit = self.peak_unit if budget is None else self.second_unit

        def cost(found: Found) -> float:
            return float(found[1].peak_bytes) if budget is None else self._extra(found[1])

        end = time.monotonic() + self.settings.seconds
        bound = 0.0
        while (left := end - time.monotonic()) > 0:
            status = self._solve(left)
            if status == highspy.HighsModelStatus.kInfeasible:
                return Answer(best, float("inf") if best is None else cost(best), True)
            info = self.solver.getInfo()
            bound = max(bound, info.mip_dual_bound * unit)
            if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
                break
            chosen = self._chosen()
            found = chosen, simulate(self.graph, chosen)
            allowed = info.objective_function_value * unit * (1 + _CLOSE) if budget is None else budget
            agreed = found[1].peak_bytes <= allowed
            if (agreed or budget is None) and (best is None or cost(found) < cost(best)):
                best = found
            if status != highspy.HighsModelStatus.kOptimal:
                break
            if agreed:
                return Answer(best, bound, True)
            if not self._learn(found, allowed):
                self._forbid(found)
        return Answer(best, bound, False)

    def _extra(self, timeline: Timeline) -> float:
        """Seconds on top of the plain step and of recording at all."""
        return max(0.0, timeline.step_seconds - self.graph.seconds - self.graph.recording_seconds)

    def _seconds(self) -> Terms:
        """Seconds on top of the plain step, less the host's for recording every operation."""
        graph, unit = self.graph, self.second_unit
        again = {c: (graph.ops[i].again_seconds + graph.host_seconds) / unit for i, c in self.moments.again.items()}
        return again | dict.fromkeys(self.decisions.column.values(), -graph.host_seconds / unit)

    # ---- the solver -----------------------------------------------------------------------------------------

    def _minimise(self, terms: Terms, constant: float) -> None:
        costs = np.zeros(self.sent[1] + 1)
        for column, value in terms.items():
            costs[column + 1] = value
        self.solver.changeColsCost(len(costs), np.arange(len(costs), dtype=np.int32), costs)
        self.solver.changeObjectiveOffset(constant)

    def _solve(self, seconds: float) -> highspy.HighsModelStatus:
        self._send()
        self.solver.setOptionValue("time_limit", self.solver.getRunTime() + seconds)
        self.solver.run()
        return self.solver.getModelStatus()

    def _chosen(self) -> frozenset[int]:
        values = self.solver.getSolution().col_value
        return frozenset(i for i, column in self.decisions.column.items() if values[column + 1] < 0.5)

    def _send(self) -> None:
        """Give the solver the rows and columns that it does not have yet."""
        rows = self.moments.rows
        first, columns = self.sent
        new = rows.columns - columns
        self.solver.addVars(new, np.zeros(new), np.ones(new))
        for low, terms in zip(rows.low[first:], rows.terms[first:], strict=True):
            self._add_row(low, terms)
        self.sent = len(rows.low), rows.columns

    def _add_row(self, low: float, terms: Terms) -> int:
        index = np.array([column + 1 for column in terms], dtype=np.int32)
        self.solver.addRow(low, highspy.kHighsInf, len(index), index, np.array(list(terms.values())))
        return int(self.solver.getNumRow()) - 1

    # ---- what a solution teaches ----------------------------------------------------------------------------

    def _learn(self, found: Found, allowed: float) -> bool:
        """Add the worst moments of a choice that is above ``allowed`` bytes; False if all of them are known."""
        highs = found[1].highs
        worst: dict[int, int] = {}  # the worst event after each unpack
        unpacks = 0
        for event, (kind, _) in enumerate(self.graph.events):
            unpacks += kind == Event.UNPACK
            if kind in (Event.RUN, Event.UNPACK) and highs[event] > max(allowed, highs[worst.get(unpacks, event)] - 1):
                worst[unpacks] = event
        added = 0
        for event in sorted(worst.values(), key=lambda e: -highs[e]):
            moment = event, self._running(found, event)
            if moment not in self.known:
                self.known.add(moment)
                constant, terms = self.moments.bytes_at(*moment)
                self._send()
                row = {c: -size / self.peak_unit for c, size in terms.items() if size}
                self._add_row(constant / self.peak_unit, row | {_PEAK: 1.0})
                added += 1
            if added == self.settings.at_once:
                break
        return added > 0

    def _running(self, found: Found, event: int) -> int:
        """The operation whose running again makes the most bytes of ``event``, -1 if none does."""
        kind, index = self.graph.events[event]
        state = state_before(self.graph, event)
        if kind != Event.UNPACK or not state.asks(self.graph, self.graph.saves[index]):
            return -1
        scratch = Moments(self.decisions)
        rows = scratch.rows
        decisions = [float(i not in found[0]) for i in self.decisions.ops]
        before = scratch.done_after(len(state.asked))
        after = scratch.done_after(len(state.asked) + 1)
        values = rows.least(decisions)
        again = [i for i, c in after.items() if values[c] > 0.5 and (i not in before or values[before[i]] < 0.5)]
        mark = len(rows.low), rows.columns
        for i in again:
            constant, terms = scratch.bytes_at(event, i)
            values = rows.least(decisions)
            if constant + sum(size * values[c] for c, size in terms.items()) == found[1].highs[event]:
                return i
            scratch.forget(*mark)
        return -1

    def _forbid(self, found: Found) -> None:
        """Leave out one choice: at least one decision must be another."""
        chosen = found[0]
        terms = {c: 1.0 if i in chosen else -1.0 for i, c in self.decisions.column.items()}
        low = 1.0 - (len(terms) - len(chosen))
        self.forbidden.append((self._add_row(low, terms), low, found))
