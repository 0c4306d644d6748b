"""solve and frontier: the fastest plan within a budget, and all the best plans from "keep everything" down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.budget import budget_bytes
from lowtide.errors import InfeasibleBudget
from lowtide.graph import StepGraph
from lowtide.hand import plan_of
from lowtide.plan import Plan
from lowtide.simulation import Timeline, simulate
from lowtide.solvers.bounds import LowerBound
from lowtide.solvers.chain import ChainSolver, Tables
from lowtide.solvers.milp import MilpSolver, Programme
from lowtide.solvers.moments import Decisions
from lowtide.solvers.revolve import Revolve
from lowtide.tape.policy import Op, Policy
from lowtide.units import format_bytes

Progress = Callable[[int, int], object]

_WIDE = 0.01  # gaps above this are looked at more closely
_RUNGS = 1024  # limits that the chain is asked for
_DEEP = 16  # segments from which on more than one level is tried
_EXACT = {"auto": MilpSolver(largest=40, seconds=2.0), "milp": MilpSolver(seconds=60.0), "chain": None}


def solve(
    graph: StepGraph,
    budget: int | str | None = None,
    *,
    policy: Policy | Callable[[Op], bool] | None = None,
    solver: str = "auto",
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest plan whose peak is within ``budget``, or write a hand policy down as a plan.

    Args:
        graph: what the step computes, from ``lowtide.trace``.
        budget: int bytes, ``"12 GiB"``, ``"80%"`` (of the peak when everything is kept). It counts everything:
            parameters, buffers, gradients, optimizer states, inputs, activations, temporaries.
        policy: a hand policy instead of a budget.
        solver: ``"chain"``, a dynamic programme over the model's blocks; ``"milp"``, the optimum, for small steps;
            ``"auto"`` takes the second where it takes no more than two seconds. ``Plan.solver`` says which it was.
        progress: called with (done, total) while menus are made.

    Raises:
        ValueError: there is no such solver, or it is not for steps of this size.
        InfeasibleBudget: no plan fits; the message names the smallest budget that one fits and what fills it.
        UnitError: the budget is not an amount of bytes.

    Example:
        >>> plan = lowtide.solve(graph, budget="12 GiB")  # doctest: +SKIP
    """
    if (budget is None) == (policy is None):
        raise TypeError("solve needs a budget or a policy, and not both")
    if policy is not None:
        return plan_of(graph, policy)
    assert budget is not None
    return Planner(graph, progress, solver).solve(budget_bytes(budget, graph))


def frontier(graph: StepGraph, *, points: int = 24, progress: Progress | None = None) -> list[Plan]:
    """The best plans from keeping everything (first) to the least memory (last): peak falls, time rises.

    Args:
        graph: what the step computes.
        points: how many budgets to solve for.
        progress: called with (done, total), first while menus are made, then for budgets.

    Example:
        >>> for plan in lowtide.frontier(graph):  # doctest: +SKIP
        ...     print(plan)
    """
    return Planner(graph, progress).frontier(points)


@dataclass(frozen=True)
class Candidate:
    """Operations to recompute with their depths, what the judge says of them, and who proposed them."""

    chosen: Mapping[int, int]
    timeline: Timeline
    solver: str

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.timeline.peak_bytes

    @property
    def seconds(self) -> float:
        """Step seconds."""
        return self.timeline.step_seconds


class Planner:
    """Solves for many budgets on one graph; the menus are made once."""

    def __init__(self, graph: StepGraph, progress: Progress | None = None, solver: str = "auto") -> None:
        if solver not in _EXACT:
            raise ValueError(f"there is no solver {solver!r}; there are {', '.join(_EXACT)}")
        self.graph = graph
        self.progress = progress
        self.solver = solver
        self.proofs: dict[int, float] = {}  # budget: seconds that no choice goes below
        self._rungs: dict[int, Candidate] = {}  # the chain's answers so far
        self.tables: Tables = ChainSolver().prepare(graph, progress)
        self.plain = self._judge({}, "keep all")

    def solve(self, budget: int) -> Plan:
        """The fastest plan within ``budget`` bytes."""
        if self.plain.peak <= budget:
            return self.plan(self.plain, budget)
        found = self._fastest(budget)
        if found is None:
            raise InfeasibleBudget(self._too_small(budget))
        return self.plan(found, budget)

    def frontier(self, points: int) -> list[Plan]:
        """The best plans at ``points`` budgets between the least peak and the peak of keeping everything."""
        low, high = self.lowest.peak, self.plain.peak
        budgets = (low + (high - low) * n // points for n in range(points))
        found = [self.plain, self.lowest, *self.deep]
        for done, budget in enumerate(budgets, 1):
            found += [one for one in (self._fastest(budget),) if one is not None]
            if self.progress is not None:
                self.progress(done, points)
        best: list[Candidate] = []
        for one in sorted(found, key=lambda c: (c.peak, c.seconds)):
            if not best or one.seconds < best[-1].seconds:
                best.append(one)
        return [self.plan(one, one.peak) for one in reversed(best)]

    def plan(self, found: Candidate, budget: int) -> Plan:
        """``found`` as a plan, with what it was predicted to cost and how good that is."""
        graph = self.graph
        whatever = self.programme is not None or any(found.chosen.values())
        recording = graph.recording_seconds if found.chosen else 0.0
        least = graph.seconds + recording + self.bound(budget, any_plan=whatever)
        if found.seconds > (1 + _WIDE) * least and not whatever:
            least = max(least, graph.seconds + recording + self._closer(budget))
        gap = max(0.0, found.seconds / least - 1) if least > 0 else 0.0
        return Plan(
            recompute=frozenset(graph.ops[i].site for i in found.chosen),
            fingerprint=graph.fingerprint,
            structure=graph.structure,
            solver=found.solver if found is self.plain else found.solver + self._remark,
            budget_bytes=budget,
            hardware=graph.hardware,
            prediction=replace(
                found.timeline.prediction,
                bound_seconds=least,
                gap=gap,
                plain_seconds=self.plain.seconds,
                plain_peak_bytes=self.plain.peak,
            ),
            depths=tuple(sorted((graph.ops[i].site, depth) for i, depth in found.chosen.items() if depth)),
        )

    def bound(self, budget: int, *, any_plan: bool = False) -> float:
        """No plan within ``budget`` recomputes for fewer seconds; unless ``any_plan``, of those that keep what
        segments hand on."""
        if budget >= self.plain.peak:
            return 0.0
        seconds = (self._any_bounds if any_plan else self._bounds).seconds(budget)
        proofs = (bound for limit, bound in self.proofs.items() if limit >= budget)  # less room is never faster
        return max(0.0 if seconds == float("inf") else seconds, *proofs, 0.0)

    def _closer(self, budget: int) -> float:
        """Like ``bound``, with more work."""
        seconds = self._closer_bounds.seconds(budget) if budget < self.plain.peak else 0.0
        return 0.0 if seconds == float("inf") else seconds

    @cached_property
    def _closer_bounds(self) -> LowerBound:
        return LowerBound(self.graph, self.tables.chain, rebuilt=True)

    @cached_property
    def _bounds(self) -> LowerBound:
        return LowerBound(self.graph, self.tables.chain)

    @cached_property
    def _any_bounds(self) -> LowerBound:
        return LowerBound(self.graph, self.tables.chain, any_plan=True)

    @property
    def lowest(self) -> Candidate:
        """The candidate with the least peak."""
        return min((self._lowest, *self._rungs.values()), key=lambda c: c.peak)

    @cached_property
    def _lowest(self) -> Candidate:
        self._within(0)  # judges the chain's answers for the smallest limits
        extremes = [self._judge(chosen, "chain") for chosen in self.tables.extremes()]
        best = min((self.plain, *self._rungs.values(), *extremes, *self.deep), key=lambda c: c.peak)
        if self.programme is not None:
            found = self.programme.least(_level(best)).found
            if found is not None and found[1].peak_bytes < best.peak:
                return Candidate(dict.fromkeys(found[0], 0), found[1], "milp, least peak")
        return best

    @cached_property
    def programme(self) -> Programme | None:
        """The programme for the optimum, where the step is small enough for it."""
        settings = _EXACT[self.solver]
        if settings is None:
            return None
        programme = settings.prepare(self.graph)
        if programme is None and self.solver == "milp":
            raise ValueError(f"milp decides about at most {settings.largest} operations; take solver='chain' here")
        return programme

    @cached_property
    def deep(self) -> tuple[Candidate, ...]:
        """Candidates with more than one level, for chains long enough to need them."""
        return tuple(self._judge(depths, f"revolve with {room} states") for room, depths in self._schedules.items())

    @cached_property
    def _schedules(self) -> dict[int, dict[int, int]]:
        """What each of ``deep`` recomputes, by how many states it has room for."""
        count = len(self.tables.chain.segments)
        if count < _DEEP:
            return {}
        rooms = sorted({2, 3, 4, 6, 8, 12, count // 8, count // 4, count // 2, 3 * count // 4} & set(range(2, count)))
        return {room: Revolve(room).solve(self.graph, self.tables.chain) for room in rooms}

    @cached_property
    def _least_deep(self) -> float:
        """None of ``deep`` makes a faster step: each runs all that it recomputes once more, at least."""
        again = (sum(self.graph.ops[op].again_seconds for op in depths) for depths in self._schedules.values())
        return self.graph.seconds + min(again, default=float("inf"))

    @cached_property
    def _remark(self) -> str:
        """Why ``"auto"`` did not look for the optimum."""
        if self.solver != "auto" or self.programme is not None:
            return ""
        return f", {len(Decisions(self.graph).ops)} operations are too many for milp"

    def _fastest(self, budget: int) -> Candidate | None:
        """The fastest candidate within ``budget``; None if there is none."""
        best = self._within(budget)
        if best is None or best.seconds > self._least_deep:
            fits = [c for c in (best, *self.deep) if c is not None and c.peak <= budget]
            best = min(fits, key=lambda c: c.seconds, default=None)
        if self.programme is not None:
            best = self._optimum(self.programme, budget, best)
        if best is None and self.lowest.peak <= budget:
            return self.lowest
        return best

    def _optimum(self, programme: Programme, budget: int, best: Candidate | None) -> Candidate | None:
        """The optimum, or the best that there was time to find, and what that proves about ``budget``."""
        answer = programme.best(budget, _level(best))
        self.proofs[budget] = answer.bound if answer.bound < float("inf") else 0.0
        how = "proven optimal by milp" if answer.proven else "milp stopped before a proof"
        found = answer.found
        if found is None or (best is not None and best.seconds <= found[1].step_seconds):
            return None if best is None else replace(best, solver=f"{best.solver}, {how}")
        return Candidate(dict.fromkeys(found[0], 0), found[1], f"milp, {how}")

    def _judge(self, chosen: Mapping[int, int], solver: str) -> Candidate:
        return Candidate(chosen, simulate(self.graph, chosen, trail=False), solver)

    def _within(self, budget: int) -> Candidate | None:
        """The fastest of the chain's answers that the judge lets pass.

        The chain is asked for limits from a fixed ladder, which the judge's peaks follow up to some bytes: bisection
        gives a larger budget no lower a rung. What was judged for other budgets counts too.
        """
        fits, above = self._floor, _RUNGS + 1
        if self._rung(fits).peak > budget:
            above = fits
        while above - fits > 1:
            middle = (fits + above) // 2
            if self._rung(middle).peak <= budget:
                fits = middle
            else:
                above = middle
        passed = [found for found in self._rungs.values() if found.peak <= budget]
        return min(passed, key=lambda found: found.seconds, default=None)

    def _rung(self, number: int) -> Candidate:
        """The chain's answer for one limit of the ladder, judged."""
        if number not in self._rungs:
            chosen = self.tables.best(self._limit(number))
            self._rungs[number] = self.plain if chosen is None else self._judge(chosen, "chain")
        return self._rungs[number]

    def _limit(self, number: int) -> float:
        low = self.tables.smallest()
        return low + (1.1 * max(0.0, self.plain.peak - low) + 1) * number / _RUNGS

    @cached_property
    def _floor(self) -> int:
        """The first rung for which the chain has an answer; the last one for all that keep nothing."""
        low, high = -1, _RUNGS
        while high - low > 1:
            middle = (low + high) // 2
            if self.tables.best(self._limit(middle)) is None:
                low = middle
            else:
                high = middle
        return high

    def _too_small(self, budget: int) -> str:
        timeline = simulate(self.graph, self.lowest.chosen)
        graph = self.graph
        kinds: dict[str, int] = {"optimizer states": graph.optimizer_bytes}
        for storage in set(timeline.live_at_peak):
            kind = _PLURALS.get(graph.storages[storage].kind, graph.storages[storage].kind)
            kinds[kind] = kinds.get(kind, 0) + graph.storages[storage].bytes
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(kinds.items(), key=_by_size) if size)
        return (
            f"a budget of {format_bytes(budget)} is too small: the smallest that a plan fits is "
            f"{format_bytes(timeline.peak_bytes)} ({timeline.peak_bytes} bytes), reached {timeline.peak_where}. "
            f"It is filled by {parts}. A smaller batch, mixed precision, or sharding make the rest smaller."
        )


def _level(found: Candidate | None) -> tuple[frozenset[int], Timeline] | None:
    """``found`` as a start for the programme, which knows one level of recomputation."""
    return None if found is None or any(found.chosen.values()) else (frozenset(found.chosen), found.timeline)


_PLURALS = {"parameter": "parameters", "gradient": "gradients", "activation": "activations",
            "temporary": "temporaries", "buffer": "buffers", "input": "inputs"}  # fmt: skip


def _by_size(item: tuple[str, int]) -> int:
    return -item[1]
