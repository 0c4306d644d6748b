"""Ladder: plans for steps of smaller shapes than the one that was traced, made once.

Activations of a batch with a fraction f of the elements take at most f of the bytes (attention scores less), so a
rung solved on the graph scaled by f fits every step of at most that size. Each step takes the lowest rung that holds
it; a step larger than the traced one has no rung.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lowtide.graph import Event, StepGraph
from lowtide.plan import Plan
from lowtide.planning import Planner

FRACTIONS = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.12)


@dataclass(frozen=True)
class Ladder:
    """Plans by the fraction of the traced step's size that they are for, largest first."""

    rungs: tuple[tuple[float, Plan], ...]

    def choose(self, fraction: float) -> Plan | None:
        """The plan for a step with this fraction of the traced elements; None if it is larger than any."""
        fitting = [plan for size, plan in self.rungs if size >= fraction - 1e-9]
        return fitting[-1] if fitting else None


def ladder(graph: StepGraph, budget: int, fractions: tuple[float, ...] = FRACTIONS) -> Ladder:
    """Plans within ``budget`` bytes for steps of up to each fraction of ``graph``'s size.

    Raises:
        InfeasibleBudget: the traced step itself does not fit.
    """
    rungs: list[tuple[float, Plan]] = []
    for fraction in sorted(fractions, reverse=True):
        plan = Planner(scaled(graph, fraction)).solve(budget)
        rungs.append((fraction, plan))
        if not plan.recompute:
            break  # everything is kept: smaller steps need no plan of their own
    return Ladder(tuple(rungs))


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
    ops = tuple(replace(op, seconds=op.seconds * fraction) for op in graph.ops)
    return replace(graph, storages=storages, ops=ops)


def accumulating(graph: StepGraph) -> StepGraph:
    """``graph`` as it is when gradients are there already: new ones are added to them and freed."""
    gradients = {i for i, s in enumerate(graph.storages) if s.kind == "gradient"}
    if not gradients:
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
    size = sum(graph.storages[i].bytes for i in gradients)
    return replace(graph, events=tuple(events), gradient_bytes=size)
