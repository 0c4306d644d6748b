"""Cut a step into a chain of segments: the model's repeated blocks where it has them, small cuts elsewhere.

    forward    | pre | block 0 | block 1 | ... | block n | post |
    backward   | pre | block 0 | block 1 | ... | block n | post |   run from right to left

A buffer made in one segment and read in another is a boundary: it is kept. Names only say where to cut; what
segments have in common is found by comparing their operations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from lowtide.graph import Event, StepGraph
from lowtide.structure import repeated_blocks

_LARGEST = 90  # operations in a segment that is not a block, before it is cut


@dataclass(frozen=True)
class Segment:
    """Operations ``first`` to before ``last`` of the forward pass."""

    first: int
    last: int
    kind: int
    """Segments of one kind have the same operations on the same sizes."""


@dataclass(frozen=True)
class Chain:
    """The segments of a step, and which of them each event belongs to."""

    segments: tuple[Segment, ...]
    starts: tuple[int, ...]
    """The event with which the forward pass enters each segment."""
    seal: int
    """The event with which the forward pass ends."""
    owner: tuple[int, ...]
    """The segment that each event belongs to."""
    boundaries: frozenset[int]
    """Operations whose results other segments read."""


def chain_of(graph: StepGraph) -> Chain:
    """Cut ``graph`` into a chain."""
    cuts = _cuts(graph)
    ranges = [(a, b) for a, b in pairwise(cuts) if b > a]
    kinds: dict[object, int] = {}
    segments = tuple(Segment(a, b, kinds.setdefault(_shape(graph, a, b), len(kinds))) for a, b in ranges)
    firsts = [segment.first for segment in segments]
    starts, seal, owner = _events(graph, firsts)
    boundaries = set()
    for index, op in graph.forward_ops():
        here = bisect_right(firsts, index) - 1
        for read in op.reads:
            maker = graph.buffers[read].maker
            if maker >= 0 and not graph.ops[maker].backward and bisect_right(firsts, maker) - 1 != here:
                boundaries.add(maker)
    return Chain(segments, starts, seal, owner, frozenset(boundaries))


def overwritten(graph: StepGraph) -> set[int]:
    """Operations whose every result is overwritten in place and saved nowhere: there is nothing of them to keep."""
    gone = {old for _, op in graph.forward_ops() for old, _ in op.writes} - set(graph.saves)
    made = ((i, (*op.makes, *(new for _, new in op.writes))) for i, op in graph.forward_ops())
    return {i for i, results in made if results and gone.issuperset(results)}


def _cuts(graph: StepGraph) -> list[int]:
    total = sum(not op.backward for op in graph.ops)
    blocks = set(repeated_blocks(graph.structure))
    spans = sorted((call.first, call.last) for call in graph.calls if call.path in blocks and call.last > call.first)
    cuts = {0, total}
    end = 0
    for first, last in spans:
        if first >= end:  # a block inside another does not count
            cuts |= {first, last}
            end = last
    inside = {a for a, _ in spans}
    ordered = sorted(cuts)
    for a, b in pairwise(ordered):
        if a not in inside and b - a > _LARGEST:
            cuts |= set(_small_cuts(graph, a, b))
    return sorted(cuts)


def _small_cuts(graph: StepGraph, first: int, last: int) -> Iterable[int]:
    """Where to cut a long stretch: in each part of about equal length, where the fewest bytes cross."""
    crossing = [0] * (last - first + 1)
    reads: dict[int, int] = {}
    for index in range(first, last):
        for read in graph.ops[index].reads:
            reads[read] = index
    for read, until in reads.items():
        maker = graph.buffers[read].maker
        if maker >= first and graph.buffers[read].droppable:
            size = graph.storages[graph.buffers[read].storage].bytes
            for position in range(maker + 1, until + 1):
                crossing[position - first] += size
    parts = max(2, min(400, (last - first) // 30))
    step = (last - first) / parts
    for part in range(1, parts):
        middle = first + round(part * step)
        reach = int(step / 2) - 1
        window = range(max(first + 1, middle - reach), min(last - 1, middle + reach) + 1)
        yield min(window, key=lambda position: (crossing[position - first], abs(position - middle)))


def _shape(graph: StepGraph, first: int, last: int) -> object:
    """What a segment computes, position-free: segments that compare equal share a menu."""
    saved = set(graph.saves)
    rows = []
    for index in range(first, last):
        op = graph.ops[index]
        inputs = tuple(graph.buffers[r].maker - first if graph.buffers[r].maker >= first else -1 for r in op.reads)
        results = (*op.makes, *(new for _, new in op.writes))
        sizes = tuple((graph.storages[graph.buffers[b].storage].bytes, b in saved) for b in results)
        rows.append((op.name, inputs, sizes, op.keep))
    return tuple(rows)


def _events(graph: StepGraph, firsts: list[int]) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Where segments begin in the event list, and the owner of every event."""
    starts = [0]
    owner: list[int] = []
    save_owner: dict[int, int] = {}
    current = 0
    seal = len(graph.events)
    for event, (kind, index) in enumerate(graph.events):
        if kind == Event.SEAL:
            seal = event
        elif event < seal and kind == Event.RUN and not graph.ops[index].backward:
            while current + 1 < len(firsts) and index >= firsts[current + 1]:
                current += 1
                starts.append(_before_saves(graph, event))
        elif kind == Event.SAVE:
            save_owner[index] = current
        elif kind == Event.UNPACK:
            current = save_owner.get(index, current)
        owner.append(current)
    return tuple(starts), seal, tuple(owner)


def _before_saves(graph: StepGraph, event: int) -> int:
    """The event before which the saves of an operation's inputs begin."""
    while event > 0 and graph.events[event - 1][0] == Event.SAVE:
        event -= 1
    return event
