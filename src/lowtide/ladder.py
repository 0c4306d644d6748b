"""Ladder: plans for one watched step and for smaller ones like it, each made when it is first needed.

Activations of a batch with a fraction f of the elements take at most f of the bytes (attention scores less), so a
rung solved on the graph scaled by f fits every step of at most that size. Each step takes the lowest rung that holds
it; a step larger than the watched one has no rung.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lowtide.agreement import same_for_all
from lowtide.errors import InfeasibleBudget
from lowtide.graph import Event, Operation, StepGraph
from lowtide.hand import plan_of
from lowtide.plan import Plan
from lowtide.planning import Candidate, Planner
from lowtide.policies import recompute_all, segments
from lowtide.simulation import depths_of, simulate

FRACTIONS = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.12)


class Ladder:
    """Plans within ``budget`` bytes for steps of up to each fraction of ``graph``'s size."""

    def __init__(self, graph: StepGraph, budget: int, fractions: tuple[float, ...] = FRACTIONS) -> None:
        self.graph = graph
        self.budget = budget
        self.fractions = tuple(sorted(fractions))
        self.plans: dict[float, Plan] = {}
        self._planner: Planner | None = None

    def choose(self, fraction: float) -> Plan:
        """The plan for a step with this fraction of the watched elements.

        Raises:
            InfeasibleBudget: it does not fit.
        """
        rung = next(size for size in self.fractions if size >= fraction - 1e-9)
        for size, plan in self.plans.items():
            if size >= rung and not plan.recompute:
                return plan  # a larger step fits with everything kept
        if rung not in self.plans:
            planner = self._planner_for(rung)
            self.plans[rung] = same_for_all(self._solve(planner), planner.graph, self.budget)
        return self.plans[rung]

    def _solve(self, planner: Planner) -> Plan:
        try:
            return planner.solve(self.budget)
        except InfeasibleBudget:
            fits = [one for one in by_hand(planner) if one.peak <= self.budget]
            if not fits:
                raise
            return planner.plan(min(fits, key=lambda one: one.seconds), self.budget)

    @property
    def planner(self) -> Planner:
        """For the whole step."""
        if self._planner is None:
            self._planner = Planner(self.graph)
        return self._planner

    def lowest(self, rung: float = 1.0) -> int:
        """The smallest budget in bytes that a plan for the whole step fits, or for this part of it."""
        planner = self._planner_for(rung)
        return min(one.peak for one in (planner.lowest, *by_hand(planner)))

    def _planner_for(self, rung: float) -> Planner:
        return self.planner if rung == 1.0 else Planner(scaled(self.graph, rung))


def by_hand(planner: Planner) -> list[Candidate]:
    """What hand policies give: where backward passes come in another order than the calls, solvers may do worse."""
    graph = planner.graph
    plans = ((policy, plan_of(graph, policy)) for policy in (segments(keep_last=False), segments(), recompute_all))
    chosen = ((repr(policy), depths_of(graph, plan)) for policy, plan in plans)
    return [Candidate(one, simulate(graph, one, trail=False), name) for name, one in chosen]


def scaled(graph: StepGraph, fraction: float) -> StepGraph:
    """``graph`` with the bytes and times of everything that depends on the batch scaled by ``fraction``."""
    if fraction == 1.0:
        return graph
    fixed = {"parameter", "buffer", "gradient"}
    weights = {s.bytes for s in graph.storages if s.kind == "parameter"}
    storages = tuple(
        s if s.kind in fixed or (s.kind == "temporary" and s.bytes in weights) else
        replace(s, bytes=math.ceil(s.bytes * fraction))
        for s in graph.storages
    )  # fmt: skip
    return replace(graph, storages=storages, ops=tuple(_scaled(op, fraction) for op in graph.ops))


def _scaled(op: Operation, fraction: float) -> Operation:
    return replace(
        op,
        seconds=op.seconds * fraction,
        replay_seconds=op.replay_seconds * fraction if op.replay_seconds > 0 else op.replay_seconds,
        state_bytes=math.ceil(op.state_bytes * max(1.0, fraction)),  # bits of what was drawn, if not random state
    )


def accumulating(graph: StepGraph) -> StepGraph:
    """``graph`` as it is when gradients are there already: new ones are added to them and freed."""
    gradients = {i for i, s in enumerate(graph.storages) if s.kind == "gradient"}
    fresh = {i for i in gradients if any(b.storage == i and b.maker >= 0 for b in graph.buffers)}
    there = {b.storage for b in graph.buffers if b.maker < 0}
    if not fresh - there:
        return graph
    made: list[int] = []
    events: list[tuple[int, int]] = []
    for kind, index in graph.events:
        if kind == Event.RUN and made:
            events += [(int(Event.FREE), storage) for storage in made]
            made = []
        events.append((kind, index))
        if kind == Event.RUN:
            made = [graph.buffers[b].storage for b in graph.ops[index].makes]
            made = [storage for storage in made if storage in gradients]
    events += [(int(Event.FREE), storage) for storage in made]
    size = sum(graph.storages[i].bytes for i in gradients - there)
    return replace(graph, events=tuple(events), gradient_bytes=graph.gradient_bytes + size)
