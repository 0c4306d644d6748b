"""The tracer: a recorder that also writes down what happens, as the rows of a StepGraph.

It runs the step under the tape with everything dropped that can be. So what the program itself holds, and for
how long, is seen without autograd holding it too; and a step that only just fits can still be traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.graph import Buffer, Call, Event, Operation, Storage
from lowtide.policies import recompute_all
from lowtide.structure import repeated_blocks
from lowtide.tape import bits, proof, randomness
from lowtide.tape.buffers import MADE
from lowtide.tape.ledger import Ledger
from lowtide.tape.operators import Operator, operator, tensors_at, tensors_in
from lowtide.tape.recorder import Recorder, _is_plain, results_of
from lowtide.tape.sharding import gathered
from lowtide.tape.sites import Home
from lowtide.tape.tickets import Ticket, unpack
from lowtide.tracing.kernels import bytes_of, flops_of, workspace_of
from lowtide.tracing.lingering import Lingering
from lowtide.tracing.numbers import SavedNumbers, number_bytes
from lowtide.tracing.timing import distinct, has_memory, packing_seconds, tried
from lowtide.tracing.values import KnownValues
from lowtide.tracing.workspaces import device_of, measurable, run_measured

_TRACED = "_lowtide_traced"
_INSIDE = 64  # depth of what is inside a block; block outputs have lower ones


class TracedSave:
    """What autograd is given while tracing: the packed tensor, and when it is asked for and let go of."""

    __slots__ = ("__weakref__", "buffer", "index", "inner", "tape_buffer", "tracer")

    def __init__(self, tracer: Tracer, inner: Any, index: int, buffer: int) -> None:
        self.tracer = tracer
        self.inner = inner
        self.index = index
        self.buffer = buffer
        self.tape_buffer = inner.buffer if isinstance(inner, Ticket) else None

    def moved(self) -> bool:
        """Whether it stands for a later version by now: its memory was written through an alias."""
        return isinstance(self.inner, Ticket) and self.inner.buffer is not self.tape_buffer

    def redeem(self) -> Tensor:
        """The tensor; its memory counts as the buffer that was saved."""
        tracer = self.tracer
        tracer.events.append((Event.UNPACK, self.index))
        tracer.module_in_backward = tracer.save_modules[self.index]
        tracer.paused += 1
        try:
            tensor = unpack(self.inner)
        finally:
            tracer.paused -= 1
        storage = tensor.untyped_storage()
        if not hasattr(storage, _TRACED):
            setattr(storage, _TRACED, (tracer, self.buffer))
        return tensor


class Tracer(Recorder):
    """Records one step and writes down its operations, buffers and events."""

    def __init__(
        self, repeats: int, *, home: Home | None = None, ledger: Ledger | None = None, check: str = "never"
    ) -> None:
        super().__init__(recompute_all, home or Home("", None), ledger or Ledger(), check=check, strict=False)
        self.repeats = repeats
        self.fakes: Any = None  # the fake mode that the step runs under
        self.values = KnownValues()  # beside it
        self.try_kernels = False  # on fake tensors: run each kind of call once to see its workspace
        self.workspaces = True  # all of them were measured
        self.on_cpu = True  # all operations
        self.inputs: dict[int, Tensor] = {}
        self.blocks: frozenset[str] = frozenset()
        self.passed = 0
        self.outstanding = 0
        self.dispatched = [0, 0]  # operations of forward and backward, views too
        self.ops: list[Operation] = []
        self.buffers: list[list[Any]] = []  # storage, maker, droppable
        self.storages: list[list[Any]] = []  # bytes, kind, owner
        self.saves: list[int] = []
        self.save_modules: list[str] = []
        self.saves_of: dict[int, list[weakref.ref[TracedSave]]] = {}  # by buffer
        self.events: list[tuple[int, int]] = []
        self.module_calls: list[Call] = []
        self.starts: list[int] = []
        self.module_in_backward = ""
        self.sealed = False
        self._refs: dict[weakref.ref[Any], Any] = {}
        self.lingering = Lingering()
        self.numbers = SavedNumbers()
        self.gathered: dict[int, tuple[int, Any]] = {}  # storages of sharded parameters that are there: their numbers

    # ---- operations -----------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and not all(_is_plain(kind) for kind in types):
            return NotImplemented  # a wrapper: what it does inside comes here again
        op = operator(func)
        if self.paused:
            return super().__torch_dispatch__(func, types, args, kwargs)
        backward = self.sealed or torch._C._current_graph_task_id() != -1
        self.dispatched[backward] += 1
        if op.view:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        self.lingering.look(self._let_go_of)
        for saved in self.numbers.over():
            self._let_go_of(saved)
        frame = self.frame
        index = self.count(op)
        reads = tuple(dict.fromkeys(self.buffer_of(t) for t in proof.tensors(args, kwargs) if has_memory(t)))
        known = self._try(op, args, kwargs) if self.repeats and op.keep is None and not op.swaps_memory else None
        replay = packing_seconds(args[0], self.repeats) if known and not backward and super().packs(op, args) else -1.0
        record = super().__torch_dispatch__
        run = partial(op.call, *args, **kwargs) if self.sealed else partial(record, func, types, args, kwargs)
        if known is not None or self.fakes is not None:
            out, (seconds, workspace) = run(), known or (0.0, 0)
        else:
            seconds, (out, workspace) = 0.0, self._measured(run, args, kwargs)
        number = len(self.ops)
        written = tensors_at((*op.writes, *op.undeclared), args, kwargs)
        writes = tuple(self._new_version(t, number) for t in distinct(written))
        results = [t for t in results_of(out) if has_memory(t)]
        if not results and not writes:
            return out  # asks for a device or a number
        makes = tuple(self._new_memory(t, number, backward) for t in distinct(results) if self._is_new(t))
        saved = 0 if backward else number_bytes(op, args)
        if saved:
            makes = (*makes, self._saved_number(saved, number))
        fresh = [*makes, *(new for _, new in writes)]
        keep = "" if backward or any(self.buffers[b][2] for b in fresh) else self._reason(op, writes)
        flops = flops_of(op, args, kwargs, out)
        size = bytes_of(args, kwargs, results)
        if self.fakes is not None:
            workspace = self._foretold(op, args, kwargs, flops, size)
        self.ops.append(
            Operation(
                f"{op.name}.{op.overload}",
                self.module_in_backward if backward else frame.home.path,
                frame.call,
                index,
                backward,
                reads,
                makes,
                writes,
                seconds,
                flops,
                size,
                keep,
                str((results or written)[0].dtype).removeprefix("torch."),
                workspace,
                self._state_bytes(op, args, kwargs) if op.random and not backward else 0,
                replay,
            )
        )
        self.events.append((Event.RUN, number))
        return out

    def _reason(self, op: Operator, writes: Any) -> str:
        if op.keep:
            return op.keep
        if not torch.is_grad_enabled():
            return "runs without grad"
        if writes:
            return "writes memory that is kept"
        return "integer or bool results can decide what comes next"

    def packs(self, op: Operator, args: tuple[Any, ...]) -> bool:
        return False  # what is traced is replayed on paper

    def _state_bytes(self, op: Operator, args: Any, kwargs: Any) -> int:
        if super().packs(op, args):
            return bits.bytes_of(args[0].numel())
        default, given = randomness.drawn(op, args, kwargs) or ((), ())
        return sum(state.nbytes for *_, state in (*(default or ()), *(given or ())))

    # ---- memory ---------------------------------------------------------------------------------------------

    def buffer_of(self, tensor: Tensor) -> int:
        """The buffer that ``tensor`` views; memory never seen before was there before the step."""
        if self.fakes is not None and type(tensor) is Tensor and not self._real(tensor):
            tensor = self.fakes.from_tensor(tensor)  # as the operation will; else its views count once more
            self.inputs[id(tensor)] = tensor  # torch remembers the fake only while it lives
        storage = tensor.untyped_storage()
        known = getattr(storage, _TRACED, None)
        if known is not None and known[0] is self:
            buffer: int = known[1]
            row = self.buffers[buffer]
            if row[2] and not self.sealed and row[1] >= 0 and not hasattr(storage, MADE):
                row[2] = False  # the tape gave it up: something may have written it unseen
                self.lingering.watch(storage, row[0])
            return buffer
        self.storages.append([storage.nbytes(), "input", ""])
        return self._tag(storage, len(self.storages) - 1, -1, False, watch=False)

    def _real(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` stays as it is among fakes."""
        return self.values.knows(tensor) or not self._is_new(tensor)

    def _tag(self, storage: Any, number: int, maker: int, droppable: bool, *, watch: bool) -> int:
        self.buffers.append([number, maker, droppable])
        setattr(storage, _TRACED, (self, len(self.buffers) - 1))
        if watch:
            self._refs[weakref.ref(storage, self._freed)] = number
        else:
            self._refs[weakref.ref(storage)] = None
        return len(self.buffers) - 1

    def _freed(self, ref: weakref.ref[Any]) -> None:
        number = self._refs.pop(ref)
        if not self.lingering.forget(number):
            self.events.append((Event.FREE, number))

    def _let_go_of(self, number: int) -> None:
        self.events.append((Event.FREE, number))

    def _is_new(self, tensor: Tensor) -> bool:
        known = getattr(tensor.untyped_storage(), _TRACED, None)
        return known is None or known[0] is not self

    def _new_memory(self, tensor: Tensor, maker: int, backward: bool) -> int:
        storage = tensor.untyped_storage()
        if not backward and not hasattr(storage, MADE):
            self.lingering.watch(storage, len(self.storages))
        kind = "temporary" if backward else "activation"
        owner = self.module_in_backward if backward else self.frame.home.path
        self.storages.append([storage.nbytes(), kind, owner])
        return self._tag(storage, len(self.storages) - 1, maker, hasattr(storage, MADE), watch=True)

    def _saved_number(self, size: int, maker: int) -> int:
        self.numbers.note(len(self.storages))
        self.buffers.append([len(self.storages), maker, False])
        self.storages.append([size, "activation", self.frame.home.path])
        return len(self.buffers) - 1

    def moved(self, mover: object) -> None:
        """Note what was gathered as memory of its own, which is free again when it is given back."""
        there = {t.untyped_storage()._cdata: t.untyped_storage() for t in gathered(mover)}
        came = {key: s for key, s in there.items() if s.nbytes() and key not in self.gathered}
        for key in there.keys() & self.gathered.keys():
            if not there[key].nbytes():
                self._given_back(key)
        if not came:
            return
        backward = self.sealed or torch._C._current_graph_task_id() != -1
        home, call, number = self.frame.home, self.frame.call, len(self.ops)
        makes = []
        for key, storage in came.items():
            self.gathered[key] = len(self.storages), weakref.ref(storage, partial(self._given_back, key))
            self.storages.append([storage.nbytes(), "gathered", home.path])
            makes.append(self._tag(storage, len(self.storages) - 1, number, False, watch=False))
        size = sum(storage.nbytes() for storage in came.values())
        row = ("lowtide.gather", home.path, call, number, backward, (), tuple(makes), (), 0.0, 0, size)
        self.ops.append(Operation(*row, "moves sharded parameters", workspace_bytes=size))
        self.events.append((Event.RUN, number))

    def _given_back(self, key: int, _: object = None) -> None:
        number, _ = self.gathered.pop(key, (None, None))
        if number is not None:
            self.events.append((Event.FREE, number))

    def _new_version(self, tensor: Tensor, maker: int) -> tuple[int, int]:
        storage = tensor.untyped_storage()
        old = self.buffer_of(tensor)
        number = self.buffers[old][0]
        self.storages[number][0] = max(self.storages[number][0], storage.nbytes())
        self.buffers.append([number, maker, hasattr(storage, MADE)])
        setattr(storage, _TRACED, (self, new := len(self.buffers) - 1))
        for ref in self.saves_of.pop(old, ()):
            save = ref()
            if save is not None and save.moved():
                self._follow(save, new)
        return old, new

    def _follow(self, save: TracedSave, buffer: int) -> None:
        save.buffer = self.saves[save.index] = buffer
        save.tape_buffer = save.inner.buffer
        self.saves_of.setdefault(buffer, []).append(weakref.ref(save))

    def known_storage(self, tensor: Tensor) -> int | None:
        """The number of ``tensor``'s storage in this trace, if the step touched it."""
        if not has_memory(tensor):
            return None
        known = getattr(tensor.untyped_storage(), _TRACED, None)
        return self.buffers[known[1]][0] if known is not None and known[0] is self else None

    # ---- saves and modules ----------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        packed = super().pack(tensor)
        if not has_memory(tensor) or not _is_plain(type(tensor)):
            return packed
        save = TracedSave(self, packed, len(self.saves), self.buffer_of(tensor))
        self.lingering.saved(self.buffers[save.buffer][0])
        self.saves.append(save.buffer)
        self.save_modules.append(self.frame.home.path)
        self.events.append((Event.SAVE, save.index))
        self.outstanding += 1
        self._refs[weakref.ref(save, self._released)] = save.index
        self.saves_of.setdefault(save.buffer, []).append(weakref.ref(save))
        return save

    def _released(self, ref: weakref.ref[Any]) -> None:
        self.events.append((Event.RELEASE, self._refs.pop(ref)))
        self.outstanding -= 1

    def enter_module(self, module: torch.nn.Module) -> None:
        super().enter_module(module)
        if len(self.frames) == 1:
            self.blocks = frozenset(repeated_blocks(self.tree.structure() or ()))
            self.base_depth = _INSIDE if self.blocks else 0
        self.starts.append(len(self.ops))

    def leave_module(self, module: torch.nn.Module, output: Any) -> None:
        if self.starts and self.frame.module is module:
            outputs = [t for t in tensors_in(output) if has_memory(t) and _is_plain(type(t))]
            buffers = tuple(dict.fromkeys(self.buffer_of(t) for t in outputs))
            home, call = self.frame.home, self.frame.call
            if home.path in self.blocks:
                self._step_stairs(outputs)
            self.module_calls.append(Call(home.path, call, self.starts.pop(), len(self.ops), buffers))
        super().leave_module(module, output)

    def _step_stairs(self, outputs: list[Tensor]) -> None:
        """Give the outputs of a repeated block a depth, so that replays leave a staircase of blocks and no more."""
        self.passed += 1
        twos = (self.passed & -self.passed).bit_length()  # 1, 2, 1, 3, 1, 2, 1, 4, ...
        for tensor in outputs:
            buffer = getattr(tensor.untyped_storage(), MADE, None)
            if buffer is not None and buffer.recipe is not None:
                buffer.recipe.level = _INSIDE - twos

    def seal(self) -> None:
        if not self.sealed:
            self.events.append((Event.SEAL, 0))
        self.sealed = True
        super().seal()

    def reopen(self) -> None:
        """The forward pass goes on after all: another model is called before backward."""
        if self.sealed:
            self.events.remove((Event.SEAL, 0))
            self.sealed = False

    def held(self) -> dict[str, int]:
        """Bytes by module of what the step made and still holds."""
        sizes: dict[str, int] = {}
        for ref, number in self._refs.items():
            if number is not None and isinstance(ref(), torch.UntypedStorage):
                size, _, owner = self.storages[number]
                sizes[owner] = sizes.get(owner, 0) + size
        return sizes

    def rows(self) -> dict[str, Any]:
        """The parts of a StepGraph that were written down."""
        self._refs.clear()
        self.saves_of.clear()
        for saved in self.numbers.over():
            self._let_go_of(saved)
        return {
            "ops": tuple(self.ops),
            "buffers": tuple(Buffer(*row) for row in self.buffers),
            "storages": tuple(Storage(*row) for row in self.storages),
            "saves": tuple(self.saves),
            "events": tuple((int(kind), index) for kind, index in self.events),
            "calls": tuple(self.module_calls),
        }

    # ---- time and workspaces --------------------------------------------------------------------------------

    def _measured(self, run: Callable[[], Any], args: Any, kwargs: Any) -> tuple[Any, int]:
        device = device_of(args, kwargs)
        self.workspaces = self.workspaces and (device.type != "cpu" or measurable())
        self.on_cpu = self.on_cpu and device.type == "cpu"
        return run_measured(run, device)

    def _foretold(self, op: Operator, args: Any, kwargs: Any, flops: int, size: int) -> int:
        """The workspace of an operation on fakes; one that is unknown counts nothing."""
        found = workspace_of(op, args, kwargs, flops=flops, bytes=size) if self.try_kernels else None
        self.workspaces = self.workspaces and found is not None
        return found or 0

    def _try(self, op: Operator, args: Any, kwargs: Any) -> tuple[float, int]:
        """Seconds of the operation, and what its kernel takes while it runs."""
        return tried(op, args, kwargs, self.repeats, lambda run: self._measured(run, args, kwargs))
