"""StepGraph: what one training step computes, as a frozen value without tensors.

ops       every operation of forward and backward, in order, with its site
buffers   one version of one storage's contents each; an in-place operation makes a new version
storages  the memory: bytes, kind, owner
saves     what autograd keeps for backward, each a buffer
events    the step as it happened: operations, saves, what backward asks for and lets go of, memory dying
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import GraphError

if TYPE_CHECKING:
    from lowtide.memory_table import MemoryTable
    from lowtide.plan import Plan

SCHEMA = 3
"""1: without workspaces and random states. 2: without ``replay_seconds``."""


class Event(IntEnum):
    """What happens at one moment of a step; each event carries one index."""

    RUN = 0  # an operation runs (index: op)
    SAVE = 1  # autograd saves a tensor (save)
    UNPACK = 2  # backward asks for it (save)
    RELEASE = 3  # backward lets go of it (save)
    FREE = 4  # the program lets go of memory (storage)
    SEAL = 5  # the forward pass is over (0)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation and where in the program it sits."""

    name: str
    """Namespace, name and overload, such as ``aten.addmm.default``."""
    module: str
    """Path of the module whose forward ran it; in backward, of the module that backward is in."""
    call: int
    """Which call of that module, from 0."""
    index: int
    """Which operation of this name in that call, from 0."""
    backward: bool
    reads: tuple[int, ...]
    """Buffers it reads."""
    makes: tuple[int, ...]
    """Buffers it makes in new memory."""
    writes: tuple[tuple[int, int], ...]
    """(old, new) versions of memory it writes in place."""
    seconds: float
    flops: int
    bytes: int
    """Bytes it reads and writes."""
    keep: str = ""
    """Why its results cannot be recomputed; empty if they can."""
    dtype: str = "float32"
    """Of its results, for rates of arithmetic."""
    workspace_bytes: int = 0
    """What its kernel takes while it runs, on top of what it makes."""
    state_bytes: int = 0
    """What its recipe holds of chance: random state, or what it drew in bits."""
    replay_seconds: float = -1.0
    """Of running it again and of what that takes in forward, where known to differ from ``seconds``; else -1."""

    @property
    def again_seconds(self) -> float:
        """Seconds of running it again."""
        return self.seconds if self.replay_seconds < 0 else self.replay_seconds

    @property
    def site(self) -> str:
        """Where the operation sits; the same for every batch size and sequence length."""
        return f"{self.module}/{self.call}:{self.name}/{self.index}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One version of one storage's contents."""

    storage: int
    maker: int
    """The operation that made it, -1 for memory that was there."""
    droppable: bool
    """Whether it can be made again."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory."""

    bytes: int
    kind: str
    """parameter, buffer, input, activation, gradient or temporary."""
    owner: str
    """Name of the parameter, or path of the module that made it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module: operations ``first`` to before ``last``, and the buffers of its outputs."""

    path: str
    call: int
    first: int
    last: int
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class StepGraph:
    """What one training step computes. Save with ``save``, load with ``StepGraph.load``."""

    ops: tuple[Operation, ...]
    buffers: tuple[Buffer, ...]
    storages: tuple[Storage, ...]
    saves: tuple[int, ...]
    """The buffer that each save refers to."""
    events: tuple[tuple[int, int], ...]
    calls: tuple[Call, ...] = ()
    """Module calls, in the order in which they ended."""
    structure: tuple[tuple[str, str], ...] = ()
    """Paths and classes of the model's modules."""
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    """Bytes of gradients that were there before the step and that it does not touch; others are storages."""
    hardware: str = ""
    measured: bool = False
    """Whether seconds were measured; otherwise they are a roofline's."""
    torch_version: str = ""
    host_seconds: float = field(default=0.0)
    """The tape's cost of recording one operation, and of replaying one, on top of the operation."""
    recording_seconds: float = 0.0
    """The tape's cost of a step under any plan that recomputes something: of comparing calls and saved tensors."""
    outside_seconds: float = 0.0
    """Of the plain step outside of its operations: Python, modules, autograd."""
    workspaces: bool = False
    """Whether workspaces were measured. On fake tensors nobody knows them, and they count nothing."""

    def __repr__(self) -> str:
        forward = sum(not op.backward for op in self.ops)
        return (
            f"StepGraph({forward} forward and {len(self.ops) - forward} backward operations, "
            f"{len(self.saves)} saved tensors)"
        )

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the model's structure: the same for every batch size and sequence length."""
        return structure_fingerprint(self.structure)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes that are there from the first to the last moment: parameters, buffers, inputs, optimizer states."""
        roots = {buffer.storage for buffer in self.buffers if buffer.maker < 0}
        return sum(self.storages[i].bytes for i in roots) + self.optimizer_bytes + self.gradient_bytes

    @cached_property
    def asked(self) -> frozenset[int]:
        """Buffers that backward asks for."""
        return frozenset(self.saves[index] for kind, index in self.events if kind == Event.UNPACK)

    @cached_property
    def seconds(self) -> float:
        """Seconds of the plain step: its operations, and what is outside of them."""
        return sum(op.seconds for op in self.ops) + self.outside_seconds

    def forward_ops(self) -> Iterator[tuple[int, Operation]]:
        """The operations of the forward pass with their indices."""
        return ((i, op) for i, op in enumerate(self.ops) if not op.backward)

    def memory_table(self, plan: Plan | None = None) -> MemoryTable:
        """Say who holds what at the peak of the step under ``plan``, or of the plain step.

        Example:
            >>> print(graph.memory_table())  # doctest: +SKIP
        """
        from lowtide.memory_table import memory_table

        return memory_table(self, plan)

    def _repr_html_(self) -> str:
        from lowtide.reports import html_of

        return html_of(repr(self)) + self.memory_table()._repr_html_()

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), separators=(",", ":")))

    def to_json(self) -> dict[str, Any]:
        """The graph as plain lists and dictionaries; names are written once."""
        names: dict[str, int] = {}

        def number(text: str) -> int:
            return names.setdefault(text, len(names))

        body = {
            "ops": [_flat(op, number) for op in self.ops],
            "buffers": [_flat(buffer, number) for buffer in self.buffers],
            "storages": [_flat(storage, number) for storage in self.storages],
            "saves": list(self.saves),
            "events": [item for event in self.events for item in event],
            "calls": [_flat(call, number) for call in self.calls],
            "structure": [[number(path), number(kind)] for path, kind in self.structure],
        }
        scalars = {f.name: getattr(self, f.name) for f in fields(self) if f.name in _SCALARS}
        return {"kind": "lowtide.StepGraph", "schema": SCHEMA, **scalars, "names": list(names), **body}

    @staticmethod
    def load(path: str | Path) -> StepGraph:
        """Read a graph that ``save`` wrote.

        Raises:
            GraphError: the file is no graph, is broken, or was written by a newer version.
        """
        try:
            data = json.loads(Path(path).read_text())
        except ValueError as error:
            raise GraphError(f"{path} is not a lowtide graph: {error}") from None
        return StepGraph.from_json(data, str(path))

    @staticmethod
    def from_json(data: Any, source: str = "this data") -> StepGraph:
        """The graph that ``to_json`` described."""
        check_schema(data, "lowtide.StepGraph", SCHEMA, source)
        try:
            names = data["names"]
            flat = data["events"]
            return StepGraph(
                ops=tuple(_operation(row, names) for row in data["ops"]),
                buffers=tuple(Buffer(s, m, bool(d)) for s, m, d in data["buffers"]),
                storages=tuple(Storage(size, names[kind], names[owner]) for size, kind, owner in data["storages"]),
                saves=tuple(data["saves"]),
                events=tuple(zip(flat[::2], flat[1::2], strict=True)),
                calls=tuple(Call(names[path], c, f, end, tuple(out)) for path, c, f, end, out in data["calls"]),
                structure=tuple((names[path], names[kind]) for path, kind in data["structure"]),
                **{name: data[name] for name in _SCALARS if data["schema"] > 1 or name not in _SINCE_2},
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise GraphError(f"{source} is a broken lowtide graph: {type(error).__name__} {error}") from None


_SCALARS = (
    "optimizer_bytes",
    "gradient_bytes",
    "hardware",
    "measured",
    "torch_version",
    "host_seconds",
    "workspaces",
    "outside_seconds",
    "recording_seconds",
)
_SINCE_2 = ("workspaces", "outside_seconds", "recording_seconds")


def _flat(item: Any, number: Any) -> list[Any]:
    row: list[Any] = []
    for f in fields(item):
        value = getattr(item, f.name)
        if isinstance(value, bool):
            value = int(value)
        elif isinstance(value, str):
            value = number(value)
        elif isinstance(value, tuple):
            value = [list(v) if isinstance(v, tuple) else v for v in value]
        row.append(value)
    return row


def _operation(row: list[Any], names: list[str]) -> Operation:
    name, module, call, index, backward, reads, makes, writes, seconds, flops, size, keep, dtype, *since_2 = row
    return Operation(
        names[name], names[module], call, index, bool(backward), tuple(reads), tuple(makes),
        tuple((old, new) for old, new in writes), seconds, flops, size, names[keep], names[dtype],
        *since_2,
    )  # fmt: skip


def check_schema(data: Any, kind: str, schema: int, source: str) -> None:
    """Refuse data of another kind or of a newer version, saying which."""
    if not isinstance(data, dict) or data.get("kind") != kind:
        found = data.get("kind") if isinstance(data, dict) else type(data).__name__
        raise GraphError(f"{source} is not a {kind} (found {found!r})")
    found = data.get("schema")
    if not isinstance(found, int) or found > schema:
        raise GraphError(
            f"{source} has schema {found!r}; this version of lowtide reads up to {schema}. Upgrade lowtide, or make "
            "the file again with this version."
        )


def structure_fingerprint(structure: Iterable[tuple[str, str]]) -> str:
    """A short hash of module paths and classes."""
    return hashlib.sha256(json.dumps(list(structure)).encode()).hexdigest()[:16]
