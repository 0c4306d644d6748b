"""The step of a small model with repeated blocks, drawn by hand as a StepGraph: the same bytes everywhere.

    embed ─> [ norm ─> mlp.0 ─> mlp.1 (gelu) ─> mlp.2 (dropout of it) ─> add ] × blocks ─> head ─> loss

Every operation saves what it reads; the mask of the dropout is an integer result, so it must be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph import Buffer, Call, Event, Operation, StepGraph, Storage

KILO = 1024
WIDTH = 64 * KILO
"""Bytes of what flows from block to block."""
BLOCK = (
    ("", "Block"),
    ("norm", "LayerNorm"),
    ("mlp", "MLP"),
    ("mlp.0", "Linear"),
    ("mlp.1", "GELU"),
    ("mlp.2", "Drop"),
)


def structure(blocks: int) -> tuple[tuple[str, str], ...]:
    """Paths and classes of the model's modules."""
    rows = [("", "Net"), ("embed", "Embedding"), ("blocks", "ModuleList")]
    for block in range(blocks):
        rows += [(f"blocks.{block}.{path}".rstrip("."), kind) for path, kind in BLOCK]
    return (*rows, ("head", "Linear"))


def net(blocks: int = 3) -> StepGraph:
    """The step."""
    return _Drawing(blocks).graph()


class _Drawing:
    """Operations and events in the order in which they are added."""

    def __init__(self, blocks: int) -> None:
        self.structure = structure(blocks)
        self.ops: list[Operation] = []
        self.buffers: list[Buffer] = []
        self.storages: list[Storage] = []
        self.saves: list[int] = []
        self.events: list[tuple[int, int]] = []
        self.calls: list[Call] = []
        self.backward: list[tuple[str, str, int, list[int], int | None]] = []
        tokens = self.root(4 * KILO, "input")
        x = self.forward("embed", "aten.embedding.default", [tokens], WIDTH, weight=256, held=[tokens])
        for block in range(blocks):
            x = self.block(f"blocks.{block}", x)
        out = self.forward("head", "aten.addmm.default", [x], WIDTH, weight=32)
        self.forward("", "aten.mse_loss.default", [out], 4)

    def block(self, path: str, x: int) -> int:
        first = len(self.ops)
        y = self.forward(f"{path}.norm", "aten.native_layer_norm.default", [x], WIDTH, weight=1, held=[x])
        y = self.forward(f"{path}.mlp.0", "aten.addmm.default", [y], 4 * WIDTH, weight=64, seconds=4e-3)
        y = self.forward(f"{path}.mlp.1", "aten.gelu.default", [y], 4 * WIDTH)
        mask = self.forward(
            f"{path}.mlp.2", "aten.ge.Scalar", [y], WIDTH, keep="bool results decide", saved=False, held=[y]
        )
        y = self.forward(f"{path}.mlp.2", "aten.mul.Tensor", [y, mask], WIDTH)
        out = self.forward(path, "aten.add.Tensor", [x, y], WIDTH, saved=False)
        self.calls.append(Call(path, 0, first, len(self.ops), (out,)))
        return out

    def root(self, size: int, kind: str, owner: str = "") -> int:
        return self.buffer(Storage(size, kind, owner), -1)

    def buffer(self, storage: Storage, maker: int, droppable: bool = False) -> int:
        self.storages.append(storage)
        self.buffers.append(Buffer(len(self.storages) - 1, maker, droppable))
        return len(self.buffers) - 1

    def forward(
        self, module: str, name: str, reads: Sequence[int], size: int, *,
        weight: int = 0, seconds: float = 1e-3, keep: str = "", saved: bool = True, held: Sequence[int] = (),
    ) -> int:  # fmt: skip
        """An operation, with a weight of so many KiB; the program lets go of what it reads, but ``held``."""
        parameter = self.root(weight * KILO, "parameter", f"{module}.weight") if weight else None
        saves = []
        for buffer in reads if saved else ():
            self.saves.append(buffer)
            saves.append(len(self.saves) - 1)
            self.events.append((Event.SAVE, saves[-1]))
        result = self.buffer(Storage(size, "activation", module), len(self.ops), not keep)
        roots = () if parameter is None else (parameter,)
        self.run(module, name, False, (*reads, *roots), result, seconds, keep)
        self.backward.append((module, name, size, saves, parameter))
        self.events += [(Event.FREE, self.buffers[buffer].storage) for buffer in reads if buffer not in held]
        return result

    def run(
        self,
        module: str,
        name: str,
        backward: bool,
        reads: Sequence[int],
        result: int,
        seconds: float,
        keep: str,
    ) -> None:
        self.events.append((Event.RUN, len(self.ops)))
        self.ops.append(Operation(name, module, 0, 0, backward, tuple(reads), (result,), (), seconds, 0, 0, keep))

    def graph(self) -> StepGraph:
        forward = len(self.ops)
        self.events.append((Event.SEAL, 0))
        before = None
        for module, name, size, saves, parameter in reversed(self.backward):
            self.events += [(Event.UNPACK, save) for save in saves]
            self.gradient(module, name, size, before, parameter)
            self.events += [(Event.RELEASE, save) for save in saves]
            before = len(self.buffers) - 1
        assert all(op.backward for op in self.ops[forward:])
        return StepGraph(
            tuple(self.ops), tuple(self.buffers), tuple(self.storages), tuple(self.saves), tuple(self.events),
            tuple(self.calls), structure=self.structure, optimizer_bytes=600 * KILO, hardware="a drawing",
        )  # fmt: skip

    def gradient(self, module: str, name: str, size: int, before: int | None, parameter: int | None) -> None:
        """Backward of an operation: a parameter's gradient stays, the other lives until the next is made."""
        space, short, overload = name.split(".")
        name = f"{space}.{short}_backward.{overload}"
        if parameter is not None:
            owner = self.storages[self.buffers[parameter].storage]
            own = self.buffer(Storage(owner.bytes, "gradient", owner.owner), len(self.ops))
            self.run(module, name, True, (), own, 1e-3, "")
        result = self.buffer(Storage(size, "temporary", module), len(self.ops))
        self.run(module, name, True, () if before is None else (before,), result, 1e-3, "")
        if before is not None:
            self.events.append((Event.FREE, self.buffers[before].storage))
