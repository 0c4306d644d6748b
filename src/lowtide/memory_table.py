"""Who holds what when a step needs most memory: by module, by kind, by the operation that made it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.graph import Event, StepGraph
from lowtide.plan_text import short
from lowtide.repetition import Indices, Pattern, first_numbers, labels, lists_in, split
from lowtide.simulation import Timeline, simulate

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowtide.plan import Plan

MODEL = "(model)"
SAVED = "saved activations"
TEMPORARY = "temporaries"
_KINDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "input": "inputs",
    "gradient": "gradients",
    "activation": SAVED,
    "temporary": TEMPORARY,
}
_REPLAYED = "recomputation"
"""Stands for the operation where memory is that of a replay in progress, or of recipes."""
_INSIDE = "inside"
"""Before the name of an operation whose kernel takes memory while it runs."""


@dataclass(frozen=True)
class MemoryRow:
    """Memory of one kind that one module holds, repeated blocks together."""

    module: str
    """Path with ranges, such as ``layers.0-31``; empty for what belongs to no module."""
    kind: str
    """parameters, buffers, inputs, gradients, optimizer states, saved activations or temporaries."""
    op: str
    """The operation that made it; empty for what was there before the step."""
    bytes: int
    count: int
    """How many pieces of memory."""


@dataclass(frozen=True)
class MemoryTable:
    """What fills the peak of a step: the bytes of the rows add up to it exactly."""

    rows: tuple[MemoryRow, ...]
    """Largest first."""
    total_bytes: int
    where: str
    """Phase and module of the peak."""

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        """Bytes by kind, largest first."""
        return _largest_first((row.kind, row.bytes) for row in self.rows)

    @property
    def modules(self) -> tuple[tuple[str, int], ...]:
        """Bytes by module, largest first; what belongs to no module by its kind or as the model's own."""
        return _largest_first((row.module or (MODEL if row.op else f"({row.kind})"), row.bytes) for row in self.rows)

    def ops(self, kind: str) -> tuple[tuple[str, int], ...]:
        """Bytes of one kind by the operation that made them, largest first."""
        return _largest_first((row.op, row.bytes) for row in self.rows if row.kind == kind)

    def __str__(self) -> str:
        from lowtide.reports import text_of

        return text_of(self.__rich__())

    def __rich__(self) -> RenderableType:
        from lowtide.reports import render_memory

        return render_memory(self)

    def _repr_html_(self) -> str:
        from lowtide.reports import html_of

        return html_of(self.__rich__())


def memory_table(graph: StepGraph, plan: Plan | None = None) -> MemoryTable:
    """Say who holds what at the peak of the step under ``plan``, or of the plain step.

    Memory that several tensors share counts once, as the parameter or module that it belongs to first.

    Args:
        graph: what the step computes, from ``lowtide.trace``.
        plan: a plan; without one everything is kept.

    Example:
        >>> print(graph.memory_table(plan))  # doctest: +SKIP
    """
    timeline = simulate(graph, frozenset() if plan is None else plan)
    amounts: dict[tuple[Pattern, str, str], _Amount] = {}
    for module, kind, op, size in _pieces(graph, plan, timeline):
        amount = amounts.setdefault((module[0], kind, op), _Amount())
        amount.points.add(module[1])
        amount.bytes += size
        amount.count += 1
    return MemoryTable(_rows(amounts), timeline.peak_bytes, timeline.peak_where)


class _Amount:
    def __init__(self) -> None:
        self.points: set[Indices] = set()
        self.bytes = 0
        self.count = 0


def _rows(amounts: dict[tuple[Pattern, str, str], _Amount]) -> tuple[MemoryRow, ...]:
    blocks: dict[Pattern, set[Indices]] = {}
    for (pattern, _, _), amount in amounts.items():
        blocks.setdefault(pattern, set()).update(amount.points)
    rows = [
        MemoryRow(labels(pattern, blocks[pattern]), kind, op, amount.bytes, amount.count)
        for (pattern, kind, op), amount in amounts.items()
        if amount.bytes
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.module, row.kind, row.op)))


Piece = tuple[tuple[Pattern, Indices], str, str, int]
"""Module as pattern and numbers, kind, operation, bytes."""


def _pieces(graph: StepGraph, plan: Plan | None, timeline: Timeline) -> Iterator[Piece]:
    """Everything that lives at the peak."""
    depth = _Depth(graph)
    made = _makers(graph)
    needed = _needed(graph, plan)
    there = timeline.live_at_peak or sorted({b.storage for b in graph.buffers if b.maker < 0})
    rest = timeline.peak_bytes
    for number in there:
        storage = graph.storages[number]
        kind = _KINDS.get(storage.kind, storage.kind)
        if kind == SAVED and number not in needed:
            kind = TEMPORARY
        owned = kind in ("parameters", "buffers", "gradients")
        owner = storage.owner.rpartition(".")[0] if owned else storage.owner
        yield depth.of(owner or storage.owner), kind, "" if owned else made.get(number, ""), storage.bytes
        rest -= storage.bytes
    for kind, size in (("optimizer states", graph.optimizer_bytes), ("gradients", graph.gradient_bytes)):
        if size:
            yield ((), ()), kind, "", size
            rest -= size
    event, index = graph.events[timeline.peak_event] if graph.events else (Event.SEAL, 0)
    if event == Event.RUN and (scratch := graph.ops[index].workspace_bytes):
        op = graph.ops[index]
        yield depth.of(op.module), TEMPORARY, f"{_INSIDE} {short(op.name)}", scratch
        rest -= scratch
    if rest:
        yield depth.of(_replayed_module(graph, timeline)), TEMPORARY, _REPLAYED, rest


class _Depth:
    """How far down modules are told apart: as far as there are lists of repeated blocks below."""

    def __init__(self, graph: StepGraph) -> None:
        paths = [storage.owner for storage in graph.storages]
        self.lists = lists_in(graph.structure) if graph.structure else first_numbers(paths)
        self.above = {".".join(p.split(".")[:i]) for p in self.lists if p for i in range(1, len(p.split(".")) + 1)}

    def of(self, path: str) -> tuple[Pattern, Indices]:
        """The module that ``path`` counts as."""
        names = path.split(".")
        end = 1
        while end < len(names) and ".".join(names[:end]) in self.above:
            end += 1
        pattern, indices = split(".".join(names[:end]), self.lists)
        return pattern, indices


def _makers(graph: StepGraph) -> dict[int, str]:
    """The operation that made each storage, or the first that wrote it where it was made empty."""
    made: dict[int, str] = {}
    empty: set[int] = set()
    for op in graph.ops:
        name = short(op.name)
        for storage in {graph.buffers[new].storage for _, new in op.writes} & empty:
            made[storage] = name
            empty.discard(storage)
        for buffer in op.makes:
            storage = graph.buffers[buffer].storage
            made[storage] = name
            if name.startswith(("empty", "new_empty")):
                empty.add(storage)
    return made


def _needed(graph: StepGraph, plan: Plan | None) -> set[int]:
    """Storages that hold something for backward: saved by autograd, or read by what is recomputed."""
    sites: Any = () if plan is None else plan.recompute
    buffers = {
        *graph.saves,
        *(read for _, op in graph.forward_ops() if op.site in sites for read in op.reads),
    }
    return {graph.buffers[buffer].storage for buffer in buffers}


def _replayed_module(graph: StepGraph, timeline: Timeline) -> str:
    """The module whose results are made again at the peak."""
    kind, index = graph.events[timeline.peak_event]
    maker = graph.buffers[graph.saves[index]].maker if kind == Event.UNPACK else -1
    return graph.ops[maker].module if maker >= 0 else ""


def _largest_first(items: Iterator[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for name, size in items:
        sums[name] = sums.get(name, 0) + size
    return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
