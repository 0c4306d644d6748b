"""Every choice there is: the oracle that tests hold the solvers against. Only for steps of a dozen operations.

Simulates all 2^n sets of operations to recompute, each at depth 0, and keeps those that no other one beats in both
peak and seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations

from lowtide.graph import StepGraph
from lowtide.simulation import Timeline, simulate
from lowtide.solvers.moments import Decisions

Found = tuple[frozenset[int], Timeline]
"""Operations to recompute, and what ``simulate`` says of that."""


@dataclass(frozen=True)
class ExhaustiveSolver:
    """Settings: the most operations to decide about; each doubles the time."""

    largest: int = 14

    def front(self, graph: StepGraph, keep: Collection[int] = ()) -> list[Found]:
        """The Pareto front of (peak bytes, step seconds): peaks fall, seconds rise.

        Args:
            graph: the step.
            keep: operations that are not recomputed in any choice.

        Raises:
            ValueError: there are more operations to decide about than ``largest``.
        """
        ops = [i for i in Decisions(graph).ops if i not in keep]
        if len(ops) > self.largest:
            raise ValueError(f"{len(ops)} operations make 2^{len(ops)} choices; at most {self.largest} are tried")
        choices = (frozenset(some) for n in range(len(ops) + 1) for some in combinations(ops, n))
        tried = [(chosen, simulate(graph, chosen, trail=False)) for chosen in choices]
        tried.sort(key=lambda found: (found[1].step_seconds, found[1].peak_bytes))
        front: list[Found] = []
        for found in tried:
            if not front or found[1].peak_bytes < front[-1][1].peak_bytes:
                front.append(found)
        return front


def fastest(front: list[Found], budget: float) -> Found | None:
    """The fastest of ``front`` whose peak is within ``budget`` bytes; None if none is."""
    return next((found for found in front if found[1].peak_bytes <= budget), None)
