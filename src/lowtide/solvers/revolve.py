"""Deep chains: more than one level of recomputation, by the binomial schedule.

Griewank and Walther, "Algorithm 799: revolve" (2000): to reverse l equal steps with room for s states at once, keep
the state after the first m steps, reverse the rest with s - 1, then the first m again with s. The best total of step
evaluations is t(l, s) = r*l - C(s+r, r-1) where C(s+r-1, s) < l <= C(s+r, s): optimal for equal steps and states.
Unequal steps are treated as if they were equal; ``simulate`` says what that costs.

    steps        0 1 2 3 4 5 6 7 8 9          the first split of all steps, then of the right part, ... are kept
    depth of       4 2 4 1 . 2 . . . .        in forward ("."); splits of left parts are remade by replays, which
    the splits                                leave them on the way: the deeper the recursion, the higher the depth
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb

from lowtide.graph import StepGraph
from lowtide.solvers.segmentation import Chain


def evaluations(steps: int, states: int) -> int:
    """Least step evaluations to reverse ``steps`` equal steps with room for ``states`` states, the first included."""
    if steps <= 1:
        return 0
    repeats = 1
    while comb(states + repeats, states) < steps:
        repeats += 1
    return repeats * steps - comb(states + repeats, repeats - 1)


@cache
def split(steps: int, states: int) -> int:
    """After how many steps the best schedule keeps the next state."""
    if states <= 1:
        return 0
    best = min(range(1, steps), key=lambda m: m + evaluations(steps - m, states - 1) + evaluations(m, states))
    return best


def schedule(steps: int, states: int) -> dict[int, int]:
    """Depths of the states after step 1, 2, ... in the best schedule: 0 is kept in forward, others on the way.

    States that are not in the result are never kept.
    """
    depths: dict[int, int] = {}
    stack = [(0, steps, states, 0, True)]
    while stack:
        first, last, room, depth, spine = stack.pop()
        if last - first <= 1 or room <= 1:
            continue
        middle = first + split(last - first, room)
        depths[middle] = 0 if spine else depth + 1
        stack.append((middle, last, room - 1, depth + 1, spine))
        stack.append((first, middle, room, depth + 1, False))
    return depths


@dataclass(frozen=True)
class Revolve:
    """Keep ``states`` segment boundaries at once and remake everything else, however often."""

    states: int

    def solve(self, graph: StepGraph, chain: Chain) -> dict[int, int]:
        """Operations to recompute, with their depths."""
        count = len(chain.segments)
        depths = schedule(count, self.states)
        # A state that is never kept stays only for its own segment: the depth falls from one to the next.
        never = max(depths.values(), default=0)
        inside = never + count + 1
        passing = passing_boundaries(graph, chain)
        chosen: dict[int, int] = {}
        for number, segment in enumerate(chain.segments[:-1]):  # the last one is needed first: it is kept whole
            for op in range(segment.first, segment.last):
                if op not in chain.boundaries:
                    chosen[op] = inside
                elif op in passing:
                    depth = depths.get(number + 1, never + count - number)
                    if depth:
                        chosen[op] = depth
        return {op: depth for op, depth in chosen.items() if _droppable(graph, op)}


def passing_boundaries(graph: StepGraph, chain: Chain) -> set[int]:
    """Boundaries that only the next segment reads: states of the chain, not tables that everybody uses."""
    owner = {op: n for n, segment in enumerate(chain.segments) for op in range(segment.first, segment.last)}
    far: dict[int, int] = {}
    for index, op in graph.forward_ops():
        for read in op.reads:
            maker = graph.buffers[read].maker
            if maker in chain.boundaries:
                far[maker] = max(far.get(maker, 0), owner[index] - owner[maker])
    return {op for op, distance in far.items() if distance == 1}


def _droppable(graph: StepGraph, op: int) -> bool:
    row = graph.ops[op]
    return any(graph.buffers[b].droppable for b in (*row.makes, *(new for _, new in row.writes)))
