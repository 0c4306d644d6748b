"""Steps drawn by hand or by dice, as StepGraphs without torch.

forward    a saved input is saved before its operation runs, a saved result after it; the program lets go of a
           result after the last operation that reads it, unless it is told to hold it
backward   the operations from last to first: saved tensors are asked for, gradients are made, saved tensors are
           let go of, the gradients of results are let go of
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lowtide.graph import Buffer, Call, Event, Operation, StepGraph, Storage

KILO = 1024


@dataclass
class Row:
    """One forward operation as it was drawn."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]
    saves: tuple[int, ...]
    seconds: float
    name: str
    module: str
    keep: str
    workspace: int
    state: int


@dataclass
class Sketch:
    """Draw a step: ``root`` and ``op`` name buffers by number, ``graph`` adds the backward pass."""

    module: str = ""
    """Path of the module that the next operations run in."""
    calls: list[Call] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    """Buffers that the program holds until the step is over."""

    def root(self, size: int, kind: str = "input") -> int:
        """Memory that was there before the step."""
        return self._buffer(self._storage(size, kind), -1, droppable=False)

    def op(
        self,
        reads: Sequence[int],
        *sizes: int,
        saves: Sequence[int] = (),
        saves_own: Sequence[int] = (),
        writes: Sequence[int] = (),
        seconds: float = 1.0,
        droppable: bool | Sequence[bool] = True,
        name: str = "toy.op.default",
        workspace: int = 0,
        state: int = 0,
    ) -> list[int]:
        """An operation with a result of each of ``sizes`` bytes and a new version of each buffer in ``writes``.

        ``saves`` are buffers that autograd saves, ``saves_own`` which of the results it saves, by position;
        ``workspace`` are bytes that it takes while it runs, ``state`` those of the random state that it draws from.
        """
        number = len(self.rows)
        can = [droppable] * (len(sizes) + len(writes)) if isinstance(droppable, bool) else list(droppable)
        makes = [self._buffer(self._storage(s, "activation"), number, d) for s, d in zip(sizes, can, strict=False)]
        news = [
            self._buffer(self.buffers[old].storage, number, d) for old, d in zip(writes, can[len(sizes) :], strict=True)
        ]
        results = [*makes, *news]
        saved = (*saves, *(results[n] for n in saves_own))
        pairs = tuple(zip(writes, news, strict=True))
        keep = "" if any(can) else "drawn to be kept"
        where = name, self.module, keep
        self.rows.append(Row(tuple(reads), tuple(makes), pairs, saved, seconds, *where, workspace, state))
        return results

    def gather(self, size: int) -> int:
        """A sharded parameter, gathered here and given back after its last reader, whoever has saved it."""
        (buffer,) = self.op([], size, seconds=0.0, droppable=False, name="toy.gather.default")
        storage = self.buffers[buffer].storage
        self.storages[storage] = Storage(size, "gathered", self.module)
        return buffer

    @contextmanager
    def block(self, path: str) -> Iterator[None]:
        """What is drawn inside is a call of the module at ``path``, which returns the last result."""
        first, self.module = len(self.rows), path
        yield
        self.calls.append(Call(path, 0, first, len(self.rows), (len(self.buffers) - 1,)))
        self.module = ""

    def _storage(self, size: int, kind: str) -> int:
        self.storages.append(Storage(size, kind, self.module))
        return len(self.storages) - 1

    def _buffer(self, storage: int, maker: int, droppable: bool) -> int:
        self.buffers.append(Buffer(storage, maker, droppable))
        return len(self.buffers) - 1

    def graph(self) -> StepGraph:
        """The step, with a backward operation and gradients for every operation."""
        return _Drawing(self).graph()


class _Drawing:
    """Turns a sketch into events."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch = sketch
        self.buffers = list(sketch.buffers)
        self.storages = list(sketch.storages)
        self.ops: list[Operation] = []
        self.saves: list[int] = []
        self.events: list[tuple[int, int]] = []
        self.counts: dict[tuple[str, str, bool], int] = {}
        self.gradients: dict[int, int] = {}  # storage of a result: buffer of its gradient

    def graph(self) -> StepGraph:
        rows = self.sketch.rows
        last: dict[int, int] = {}
        for number, row in enumerate(rows):
            for b in (*row.reads, *row.makes):
                last[self.buffers[b].storage] = number
        held = {self.buffers[b].storage for b in self.sketch.held}
        held |= {self.buffers[b].storage for b in range(len(self.buffers)) if self.buffers[b].maker < 0}
        saves = [self._forward(number, row, last, held) for number, row in enumerate(rows)]
        self.events.append((Event.SEAL, 0))
        for number in reversed(range(len(rows))):
            self._backward(rows[number], saves[number])
        self.events += [(Event.FREE, s) for s in sorted(held) if self.storages[s].kind == "activation"]
        return StepGraph(
            ops=tuple(self.ops),
            buffers=tuple(self.buffers),
            storages=tuple(self.storages),
            saves=tuple(self.saves),
            events=tuple((int(kind), index) for kind, index in self.events),
            calls=tuple(self.sketch.calls),
            structure=self._structure(),
        )

    def _structure(self) -> tuple[tuple[str, str], ...]:
        """A list of blocks with something inside, as a model's repeated blocks are."""
        paths = [call.path for call in self.sketch.calls]
        if not paths:
            return ()
        inside = [row for path in paths for row in ((path, "Block"), (f"{path}.inner", "Linear"))]
        return (("", "Drawn"), (paths[0].partition(".")[0], "ModuleList"), *inside)

    def _forward(self, number: int, row: Row, last: dict[int, int], held: set[int]) -> list[int]:
        inputs = [b for b in row.saves if self.buffers[b].maker != number]
        own = [b for b in row.saves if self.buffers[b].maker == number]
        saves = [self._save(b) for b in inputs]
        self._run(row, False, row.reads, row.makes, row.writes, row.seconds)
        saves += [self._save(b) for b in own]
        gone = [s for s, when in last.items() if when == number and s not in held]
        self.events += [(Event.FREE, s) for s in sorted(gone)]
        return saves

    def _save(self, buffer: int) -> int:
        self.saves.append(buffer)
        self.events.append((Event.SAVE, len(self.saves) - 1))
        return len(self.saves) - 1

    def _backward(self, row: Row, saves: list[int]) -> None:
        arrived = {self.gradients.get(self.buffers[b].storage) for b in row.makes} - {None}
        self.events += [(Event.UNPACK, save) for save in saves]
        made = []
        for b in dict.fromkeys(row.reads):
            storage = self.buffers[b].storage
            if self.storages[storage].kind == "input" or any(b == old for old, _ in row.writes):
                continue
            kind = "gradient" if self.buffers[b].maker < 0 else "temporary"
            made.append((storage, self._fresh(self.storages[storage].bytes, kind)))
        reads = (*(g for g in arrived if g is not None), *dict.fromkeys(self.saves[s] for s in saves))
        if made:
            self._run(row, True, reads, [b for _, b in made], (), 2 * row.seconds)
        for storage, b in made:
            self._accumulate(row, storage, b)
        self.events += [(Event.RELEASE, save) for save in saves]
        for b in row.makes:
            gradient = self.gradients.pop(self.buffers[b].storage, None)
            if gradient is not None:
                self.events.append((Event.FREE, self.buffers[gradient].storage))

    def _accumulate(self, row: Row, storage: int, gradient: int) -> None:
        before = self.gradients.get(storage)
        if before is None:
            self.gradients[storage] = gradient
            return
        total = self._fresh(self.storages[storage].bytes, self.storages[self.buffers[before].storage].kind)
        self._run(row, True, (before, gradient), [total], (), 0.1)
        self.events += [(Event.FREE, self.buffers[b].storage) for b in (before, gradient)]
        self.gradients[storage] = total

    def _fresh(self, size: int, kind: str) -> int:
        self.storages.append(Storage(size, kind, ""))
        self.buffers.append(Buffer(len(self.storages) - 1, len(self.ops), False))
        return len(self.buffers) - 1

    def _run(
        self,
        row: Row,
        backward: bool,
        reads: Sequence[int],
        makes: Sequence[int],
        writes: tuple[tuple[int, int], ...],
        seconds: float,
    ) -> None:
        name = f"{row.name}_backward" if backward else row.name
        index = self.counts.get((row.module, name, backward), 0)
        self.counts[row.module, name, backward] = index + 1
        reads = tuple(dict.fromkeys(reads))
        size = sum(self.storages[self.buffers[b].storage].bytes for b in (*reads, *makes))
        where = row.module, 0, index, backward
        work = seconds, int(seconds * 1e9), size
        taken = row.workspace, 0 if backward else row.state
        self.events.append((Event.RUN, len(self.ops)))
        self.ops.append(
            Operation(name, *where, reads, tuple(makes), writes, *work, "" if backward else row.keep, "float32", *taken)
        )


def chain(length: int, size: int = KILO, *, seconds: float = 1.0) -> StepGraph:
    """``length`` operations one after the other, each of which saves its input, and a loss."""
    sketch = Sketch()
    x = sketch.root(size)
    for _ in range(length):
        (x,) = sketch.op([x], size, saves=[x], seconds=seconds)
    sketch.op([x], 4, saves=[x], seconds=seconds)
    return sketch.graph()


def blocks(count: int, seed: int = 0, *, length: int = 4) -> StepGraph:
    """``count`` equal residual blocks of ``length`` random operations each, and a loss."""
    sketch = Sketch()
    x = sketch.root(8 * KILO)
    for number in range(count):
        rng = random.Random(seed)
        with sketch.block(f"blocks.{number}"):
            weight = sketch.root(rng.randint(1, 4) * KILO, "parameter")
            live = [x]
            for _ in range(length - 1):
                size, reads = rng.randint(1, 12) * KILO, [rng.choice(live[-2:]), weight]
                live += sketch.op(reads, size, saves=reads, seconds=rng.randint(1, 40) / 10)
            (x,) = sketch.op([x, live[-1]], 8 * KILO, saves=[live[-1]], seconds=0.5)
    sketch.op([x], 4, saves=[x], seconds=0.1)
    return sketch.graph()


def random_graph(
    seed: int, length: int, *, writes: float = 0.2, outputs: float = 0.2, gathers: float = 0.0
) -> StepGraph:
    """A random step of ``length`` operations: diamonds, skips, several results, versions, things that are kept.

    ``writes`` is the chance that an operation writes in place, ``outputs`` that it has a second result, ``gathers``
    that it reads a sharded parameter, which is gathered for it.
    """
    rng, others, shards = (random.Random(seed + n) for n in (0, 10_000, 20_000))
    sketch = Sketch()
    live = [sketch.root(rng.randint(1, 8) * KILO)]
    weights = [sketch.root(rng.randint(1, 4) * KILO, "parameter") for _ in range(2)]
    roots = {*live, *weights}
    saved: set[int] = set()
    for _ in range(length - 1):
        reads = list(dict.fromkeys(rng.choice(live[-4:]) for _ in range(rng.choice((1, 1, 2, 3)))))
        target = rng.choice(reads)
        seconds = rng.randint(1, 40) / 10
        if rng.random() < writes and target not in saved and target not in roots:
            droppable = rng.random() < 0.9
            own = _some(rng, 1)
            (new,) = sketch.op(
                reads, writes=[target], saves_own=own, seconds=seconds, droppable=droppable, **_taken(others)
            )
            live[live.index(target)] = new
            saved |= set(sketch.rows[-1].saves)
            continue
        weight = [rng.choice(weights)] if rng.random() < 0.4 else []
        if shards.random() < gathers:
            weight.append(sketch.gather(shards.randint(1, 12) * KILO))
        sizes = [rng.randint(1, 12) * KILO for _ in range(2 if rng.random() < outputs else 1)]
        results = sketch.op(
            [*reads, *weight],
            *sizes,
            saves=[*(r for r in reads if rng.random() < 0.6), *weight],
            saves_own=_some(rng, len(sizes)),
            seconds=seconds,
            droppable=[rng.random() < 0.9 for _ in sizes],
            **_taken(others),
        )
        saved |= set(sketch.rows[-1].saves)
        live += results
        if rng.random() < 0.1:
            sketch.held.add(results[0])
    ends = live[-3:]
    sketch.op(ends, 4, saves=[b for b in ends if rng.random() < 0.5], seconds=0.1)
    return sketch.graph()


def _taken(rng: random.Random) -> dict[str, int]:
    workspace, state = rng.randint(1, 12) * KILO, 5056
    return {"workspace": workspace if rng.random() < 0.3 else 0, "state": state if rng.random() < 0.15 else 0}


def _some(rng: random.Random, count: int) -> list[int]:
    return [n for n in range(count) if rng.random() < 0.5]


def droppable_ops(graph: StepGraph) -> list[int]:
    """The operations that have a result which can be dropped."""
    return [
        i
        for i, op in graph.forward_ops()
        if any(graph.buffers[b].droppable for b in (*op.makes, *(new for _, new in op.writes)))
    ]
