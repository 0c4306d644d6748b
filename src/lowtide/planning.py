"""solve and frontier: the fastest plan within a budget, and all the best plans from "keep everything" down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowtide.budget import budget_bytes
from lowtide.errors import InfeasibleBudget
from lowtide.graph import StepGraph
from lowtide.hand import plan_of
from lowtide.plan import Plan
from lowtide.simulation import Timeline, simulate
from lowtide.solvers.bounds import LowerBound
from lowtide.solvers.chain import ChainSolver, Tables
from lowtide.tape.policy import Op, Policy
from lowtide.units import format_bytes

Progress = Callable[[int, int], None]


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
        solver: ``"auto"`` or ``"chain"``.
        progress: called with (done, total).

    Raises:
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
    return Planner(graph, progress).solve(budget_bytes(budget, graph))


def frontier(graph: StepGraph, *, points: int = 24, progress: Progress | None = None) -> list[Plan]:
    """The best plans from keeping everything (first) to the least memory (last): peak falls, time rises.

    Args:
        graph: what the step computes.
        points: how many budgets to solve for.
        progress: called with (done, total).

    Example:
        >>> for plan in lowtide.frontier(graph):  # doctest: +SKIP
        ...     print(plan)
    """
    return Planner(graph, progress).frontier(points)


class Planner:
    """Solves for many budgets on one graph; the menus are made once."""

    def __init__(self, graph: StepGraph, progress: Progress | None = None) -> None:
        self.graph = graph
        self.tables: Tables = ChainSolver().prepare(graph, progress)
        self.plain = simulate(graph, frozenset(), trail=False)
        self._bound: LowerBound | None = None
        self._lowest: tuple[frozenset[int], Timeline] | None = None

    def solve(self, budget: int) -> Plan:
        """The fastest plan within ``budget`` bytes."""
        if self.plain.peak_bytes <= budget:
            return self.plan(frozenset(), self.plain, budget)
        found = self._within(budget)
        if found is None:
            chosen, least = self.lowest()
            if least.peak_bytes > budget:
                raise InfeasibleBudget(self._too_small(budget, chosen))
            found = chosen, least
        return self.plan(*found, budget)

    def frontier(self, points: int) -> list[Plan]:
        """The best plans at ``points`` budgets between the least peak and the peak of keeping everything."""
        chosen, least = self.lowest()
        low, high = least.peak_bytes, self.plain.peak_bytes
        found = [(frozenset(), self.plain), (chosen, least)]
        for n in range(1, points):
            one = self._within(low + (high - low) * n // points)
            if one is not None:
                found.append(one)
        found.sort(key=lambda item: (item[1].peak_bytes, item[1].step_seconds))
        best: list[tuple[frozenset[int], Timeline]] = []
        for item in found:
            if not best or item[1].step_seconds < best[-1][1].step_seconds:
                if best and best[-1][1].peak_bytes == item[1].peak_bytes:
                    best.pop()
                best.append(item)
        return [self.plan(ops, timeline, timeline.peak_bytes) for ops, timeline in reversed(best)]

    def plan(self, chosen: frozenset[int], timeline: Timeline, budget: int) -> Plan:
        """The plan that recomputes ``chosen``, with what it was predicted to cost and how good that is."""
        graph = self.graph
        least = graph.seconds + self.bound(budget)
        gap = max(0.0, timeline.step_seconds / least - 1) if least > 0 else 0.0
        return Plan(
            recompute=frozenset(graph.ops[i].site for i in chosen),
            fingerprint=graph.fingerprint,
            structure=graph.structure,
            solver="chain" if chosen else "keep all",
            budget_bytes=budget,
            hardware=graph.hardware,
            prediction=replace(timeline.prediction, bound_seconds=least, gap=gap),
        )

    def bound(self, budget: int) -> float:
        """No plan within ``budget`` recomputes for fewer seconds."""
        if budget >= self.plain.peak_bytes:
            return 0.0
        if self._bound is None:
            self._bound = LowerBound(self.graph, self.tables.chain)
        return self._bound.seconds(budget)

    def lowest(self) -> tuple[frozenset[int], Timeline]:
        """The choices with the least peak."""
        if self._lowest is None:
            low, high = self.tables.smallest(), float(self.plain.peak_bytes)
            best = frozenset(), self.plain
            for _ in range(12):
                middle = (low + high) / 2 if self.tables.best(low) is None else low
                chosen = self.tables.best(middle)
                if chosen is None:
                    low = middle
                    continue
                timeline = simulate(self.graph, chosen, trail=False)
                if timeline.peak_bytes < best[1].peak_bytes:
                    best = chosen, timeline
                if middle == low:
                    break
                high = middle
            self._lowest = best
        return self._lowest

    def _within(self, budget: int) -> tuple[frozenset[int], Timeline] | None:
        """The programme's answer, tightened until the judge agrees, then loosened while it does."""
        best: tuple[frozenset[int], Timeline] | None = None
        target = float(budget)
        for _ in range(8):
            chosen = self.tables.best(target)
            if chosen is None:
                break
            timeline = simulate(self.graph, chosen, trail=False)
            over = timeline.peak_bytes - budget
            if over <= 0 and (best is None or timeline.step_seconds < best[1].step_seconds):
                slack = -over
                best = chosen, timeline
                if slack < 0.002 * budget:
                    break
                target += 0.8 * slack
            elif best is not None:
                break
            else:
                target -= max(over, 1)
        return best

    def _too_small(self, budget: int, chosen: frozenset[int]) -> str:
        timeline = simulate(self.graph, chosen)
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


_PLURALS = {"parameter": "parameters", "gradient": "gradients", "activation": "activations",
            "temporary": "temporaries", "buffer": "buffers", "input": "inputs"}  # fmt: skip


def _by_size(item: tuple[str, int]) -> int:
    return -item[1]
