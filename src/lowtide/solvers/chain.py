"""Plans for chains: a menu for each kind of segment, and a dynamic programme over the segments under a byte limit.

While segment i runs backward, what earlier segments keep is still there:

    own_i(choice_i) + sum of kept_j(choice_j) for j < i  <=  budget

so the best seconds for every amount of bytes kept so far is found segment by segment. own, kept and seconds are read
off simulations of the whole step in which every segment takes its n-th choice, so they contain all that the judge
counts: gradients filling up, the transient of the replay, the head's logits. The programme is exact for a chain with
given menus, up to the rounding of bytes to quanta.

Where no such choices fit, menus go one level deeper: what a replay passes through and backward will ask for later is
dropped once more, so that it does not lie beside what backward works on now.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import numpy as np

from lowtide.graph import StepGraph
from lowtide.simulation import Timeline, _dropped, simulate
from lowtide.solvers.menu import Facts, Menu
from lowtide.solvers.segmentation import Chain, Segment, chain_of


@dataclass(frozen=True)
class Choice:
    """One way to treat one segment, and what it costs there."""

    recompute: Mapping[int, int]
    """Operations, as offsets from the segment's first, with their depths."""
    kept: float
    own: float
    seconds: float


@dataclass(frozen=True)
class ChainSolver:
    """Settings: into how many quanta the budget is divided, and how the menus are made."""

    quanta: int = 1500
    menu: Menu = field(default_factory=Menu)

    def prepare(self, graph: StepGraph, progress: Callable[[int, int], object] | None = None) -> Tables:
        """Menus and their costs, for any budget."""
        chain = chain_of(graph)
        facts = Facts.of(graph, chain)
        menus: dict[int, list[Mapping[int, int]]] = {}
        for segment in chain.segments:
            if segment.kind not in menus:
                menus[segment.kind] = [dict.fromkeys(pick, 0) for pick in self.menu.choices(facts, segment)]
        rounds = max(len(menu) for menu in menus.values())
        rows: list[list[Choice]] = [[] for _ in chain.segments]
        for n in range(rounds):
            picks = [menus[s.kind][min(n, len(menus[s.kind]) - 1)] for s in chain.segments]
            timeline = simulate(graph, _ops(chain, picks), live=False)
            for i, choice in enumerate(_costs(graph, chain, picks, timeline)):
                if n < len(menus[chain.segments[i].kind]):
                    rows[i].append(choice)
            if progress is not None:
                progress(n + 1, rounds)
        return Tables(graph, chain, [_pareto(row) for row in rows], self.quanta)


def _deepened(graph: StepGraph, chain: Chain, rows: list[list[Choice]]) -> list[list[Choice]]:
    """By segment, choices with two levels that take less than the least of ``rows``, found greedily."""
    found: list[list[Choice]] = [[] for _ in chain.segments]
    members: dict[int, list[int]] = {}
    for i, segment in enumerate(chain.segments):
        members.setdefault(segment.kind, []).append(i)
    for order in (attrgetter("own", "kept"), attrgetter("kept", "own")):
        least = [min(row, key=order) for row in rows]
        now = {kind: least[some[0]].recompute for kind, some in members.items()}
        own = dict.fromkeys(members, float("inf"))
        passed = {kind: _passed(graph, chain.segments[some[0]], now[kind]) for kind, some in members.items()}
        for trial in range(-1, max(map(len, passed.values()))):
            tried = now.copy()
            if trial >= 0:
                deep = {kind: more for kind in members for more in passed[kind][trial : trial + 1]}
                tried |= {kind: {**now[kind], **dict.fromkeys(more, 1)} for kind, more in deep.items()}
            picks = [tried[segment.kind] for segment in chain.segments]
            choices = _costs(graph, chain, picks, simulate(graph, _ops(chain, picks), live=False))
            for kind, some in members.items():
                most = max(choices[i].own for i in some)
                if most < own[kind]:
                    own[kind], now[kind] = most, tried[kind]
                    for i in some if trial >= 0 else ():
                        found[i].append(choices[i])
    return found


_TRIALS = 10
"""Operations of a segment that are tried at a second level, the largest."""


def _passed(graph: StepGraph, segment: Segment, pick: Mapping[int, int]) -> list[set[int]]:
    """What replays of ``segment`` make on their way to something else and backward asks for later, largest first.

    Each with the operations that lead to it alone: what a replay drops again, it must be able to start over. Fused
    attention is never computed more than once more.
    """
    saved = set(graph.saves)
    readers: dict[int, set[int]] = {}
    results: dict[int, list[int]] = {}
    for offset in pick:
        op = graph.ops[segment.first + offset]
        results[offset] = [*op.makes, *(new for _, new in op.writes)]
        for read in op.reads:
            readers.setdefault(read, set()).add(offset)
    sizes = {}
    for offset, made in results.items():
        asked = [b for b in made if b in saved and b in readers]
        if asked:
            sizes[offset] = sum(graph.storages[graph.buffers[b].storage].bytes for b in asked)
    largest = sorted(sizes, key=lambda offset: -sizes[offset])[:_TRIALS]
    groups = [_with_what_leads_to(offset, results, readers, saved) for offset in largest]
    fused = {offset for offset in results if "attention" in graph.ops[segment.first + offset].name}
    return [group for group in groups if fused.isdisjoint(group)]


def _with_what_leads_to(
    offset: int, results: dict[int, list[int]], readers: dict[int, set[int]], saved: set[int]
) -> set[int]:
    found = {offset}
    for before in sorted((other for other in results if other < offset), reverse=True):
        read = [b for b in results[before] if b in readers]
        if read and saved.isdisjoint(results[before]) and all(readers[b] <= found for b in read):
            found.add(before)
    return found


class Tables:
    """The choices of every segment with their costs; answers any budget."""

    def __init__(self, graph: StepGraph, chain: Chain, rows: list[list[Choice]], quanta: int) -> None:
        self.graph = graph
        self.chain = chain
        self.rows = rows
        self.quanta = quanta
        self.base = [min(choice.kept for choice in row) for row in rows]
        self.before = np.concatenate([[0.0], np.cumsum(self.base)])

    @cached_property
    def deeper(self) -> list[list[Choice]]:
        """The choices with those that have two levels."""
        found = _deepened(self.graph, self.chain, self.rows)
        return [_pareto([*row, *more]) for row, more in zip(self.rows, found, strict=True)]

    def smallest(self) -> float:
        """No choice of these menus peaks below this."""
        return float(max(min(c.own for c in row) + self.before[i] for i, row in enumerate(self.deeper)))

    def extremes(self) -> list[dict[int, int]]:
        """The choices that take least of all in every segment: one of them may peak below what the programme finds,
        whose costs are those of segments that all choose alike."""
        found = []
        for rows in (self.rows, self.deeper):
            for least in (
                attrgetter("own", "kept"),
                attrgetter("kept", "own"),
                lambda choice: choice.own + choice.kept,
            ):
                found.append(_ops(self.chain, [min(row, key=least).recompute for row in rows]))
        return found

    def best(self, budget: float) -> dict[int, int] | None:
        """The fastest choices whose peak is within ``budget`` by these costs, as operations with their depths; None if
        there are none. Two levels are for where one does not fit."""
        found = self._best(self.rows, budget)
        return self._best(self.deeper, budget) if found is None else found

    def _best(self, rows: list[list[Choice]], budget: float) -> dict[int, int] | None:
        spread = sum(max(c.kept for c in row) - low for row, low in zip(rows, self.base, strict=True))
        room = min(spread, budget - min(self.before)) if spread else 0.0
        quantum = max(1.0, room / self.quanta)
        size = self.quanta + 1
        best = np.full(size, np.inf)
        best[0] = 0.0
        parents: list[tuple[np.ndarray, np.ndarray]] = []
        for i, row in enumerate(rows):
            after = np.full(size, np.inf)
            pick = np.full(size, -1, dtype=np.int32)
            origin = np.zeros(size, dtype=np.int32)
            for n, choice in enumerate(row):
                limit = int((budget - choice.own - self.before[i]) // quantum)
                shift = int(np.ceil((choice.kept - self.base[i]) / quantum))
                top = min(limit, size - 1 - shift)
                if top < 0:
                    continue
                value = best[: top + 1] + choice.seconds
                better = value < after[shift : shift + top + 1]
                where = np.nonzero(better)[0]
                after[where + shift] = value[where]
                pick[where + shift] = n
                origin[where + shift] = where
            best = after
            parents.append((pick, origin))
        state = int(np.argmin(best))
        if not np.isfinite(best[state]):
            return None
        picks: list[Mapping[int, int]] = []
        for i in range(len(rows) - 1, -1, -1):
            pick, origin = parents[i]
            picks.append(rows[i][pick[state]].recompute)
            state = int(origin[state])
        return _ops(self.chain, picks[::-1])


def _ops(chain: Chain, picks: Iterable[Mapping[int, int]]) -> dict[int, int]:
    return {
        segment.first + offset: depth
        for segment, pick in zip(chain.segments, picks, strict=True)
        for offset, depth in pick.items()
    }


def _costs(graph: StepGraph, chain: Chain, picks: list[Mapping[int, int]], timeline: Timeline) -> list[Choice]:
    """What each segment's choice costs in a simulated step."""
    count = len(chain.segments)
    trail = timeline.bytes
    edges = [trail[start - 1] if start else graph.resident_bytes for start in chain.starts]
    edges.append(trail[chain.seal - 1])
    kept = [edges[i + 1] - edges[i] for i in range(count)]
    own = np.zeros(count, dtype=np.int64)
    np.maximum.at(own, np.array(chain.owner), np.array(timeline.highs))
    seconds = [0.0] * count
    firsts = [segment.first for segment in chain.segments]
    for op in timeline.replays:
        seconds[bisect_right(firsts, op) - 1] += graph.ops[op].again_seconds + graph.host_seconds
    if graph.host_seconds:
        chosen = _ops(chain, picks)
        dropped = _dropped(graph, chosen)
        for op in chosen:
            row = graph.ops[op]
            recorded = any(dropped[b] for b in (*row.makes, *(new for _, new in row.writes)))
            seconds[bisect_right(firsts, op) - 1] += graph.host_seconds if recorded else 0.0
    below = np.concatenate([[0], np.cumsum(kept)])
    return [Choice(picks[i], kept[i], float(own[i] - below[i]), seconds[i]) for i in range(count)]


def _pareto(row: list[Choice]) -> list[Choice]:
    """Without choices that another one beats in everything."""
    front: list[Choice] = []
    for choice in sorted(row, key=lambda c: (c.seconds, c.kept, c.own)):
        if not any(c.kept <= choice.kept and c.own <= choice.own for c in front):
            front.append(choice)
    return front
