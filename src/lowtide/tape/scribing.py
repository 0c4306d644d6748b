"""Scribing: a step is recorded, and beside the tape the calls are written down that it belongs to."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lowtide.tape import randomness
from lowtide.tape.buffers import HELD, Buffer
from lowtide.tape.operators import operator, tensors_at
from lowtide.tape.recipes import next_order
from lowtide.tape.recorder import Recorder
from lowtide.tape.tickets import Kept, Ticket
from lowtide.tape.transcript import (
    QUESTIONS,
    SHOWN_TO_HOOKS,
    SILENT,
    Call,
    Flaw,
    Place,
    Step,
    Transcriber,
    backends,
    byte_offset,
    escapes,
    is_foreign,
    name_of,
    next_node,
    step_of,
    tensors_with_places,
    transformed,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_LOOKS, _VARIES = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


_MADE_OF_OTHERS = ("aten.linalg_", "aten._linalg_", "aten.pinverse", "aten._trilinear", "aten.affine_grid_generator")
"""Operators whose kernels call others, which autocast casts only where no dispatch mode looks on.

Of those that are not listed here a followed step notices when the dtype of a result changes by that.
"""


Leaf = tuple[Place, int, int, int]
"""A tensor among the arguments or results of a call: where, storage, version, offset in bytes."""


class Trace:
    """What happened below one call."""

    __slots__ = (
        "first",
        "last",
        "leaves",
        "nodes",
        "offsets",
        "operations",
        "orders",
        "overwrites",
        "packs",
        "peeks",
        "results",
        "returned",
        "states",
        "varies",
        "writes",
        "written",
    )

    def __init__(self, first: int, leaves: list[Leaf], states: dict[torch.device, bytes]) -> None:
        self.first = first  # numbers of the recipes made
        self.last = first
        self.leaves = leaves
        self.states = states  # digests of the states of the random generators before it
        self.packs: list[tuple[Tensor | None, Kept | Ticket]] = []  # what autograd saved and was given
        self.offsets: list[int] = []  # of what was saved, in bytes
        self.nodes = [next_node()]  # before it and whenever something was saved: the number of autograd's next node
        self.writes: set[Place] = set()  # arguments that it writes
        self.operations: list[Step] = []  # below it
        self.orders: list[int] = []  # by operation: numbers below those of its recipes
        self.overwrites = False  # it writes memory that is held and that it was not given
        self.written: set[int] = set()  # storages that it writes
        self.peeks = False  # it looked at data
        self.varies = False  # an operation below it gave a result whose shape depends on data
        self.results = False  # it returned tensors
        self.returned: list[Leaf] = []


def _leaves(found: list[tuple[Place, Tensor]]) -> list[Leaf]:
    return [
        (place, tensor.untyped_storage()._cdata, tensor._version, byte_offset(tensor))
        for place, tensor in found
        if type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_inference()
    ]  # a wrapper has no memory to ask for


class ScribingRecorder(Recorder):
    """A recorder that also notes which call each part of the tape belongs to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.operations: list[int] = []
        self.thread = threading.get_ident()
        self.traces: list[Trace] = []
        self.now: Trace | None = None
        self.casts = False  # the present call runs under autocast
        self.private: dict[int, tuple[Buffer, int, Place, int]] = {}
        self.draws: dict[int, tuple[Buffer, int, int]] = {}  # what was drawn: in which call and operation
        self.flaw: str | None = None
        self.over = False
        self.counts: dict[str, int] = {}
        self.learned: Callable[[], None] | None = None  # called once, when the program ends
        self.noted = dict(self.ledger.notes)  # before this step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused:
            return super().__torch_dispatch__(func, types, args, kwargs)
        op = operator(func)
        if op.writes or op.undeclared:
            self._note_writes(tensors_at((*op.writes, *op.undeclared), args, kwargs or {}))
        if not self.over:
            self.operations.append(op.key)
            if self.casts and op.name.startswith(_MADE_OF_OTHERS):
                self.flaw = f"{op.name} computes something else under autocast while a mode looks on"
            if self.now is not None and op.name not in SHOWN_TO_HOOKS:
                self._note_peeks(self.now, getattr(func, "tags", ()))
                self.now.operations.append(step_of(func, args, kwargs))
                self.now.orders.append(next_order())
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note_peeks(self, trace: Trace, tags: Any) -> None:
        """A shape that depends on data is seen in what the call returns, unless more is made of it before."""
        trace.peeks = trace.peeks or trace.varies or _LOOKS in tags
        trace.varies = _VARIES in tags

    def _note_writes(self, targets: list[Tensor]) -> None:
        """Memory is about to be written that other recordings may need as it is."""
        if self.over:
            self.flaw = "something is written after backward, inside of the recording"
        for tensor in targets:
            if tensor.layout is not torch.strided or type(tensor) not in (Tensor, Parameter):
                continue
            storage = tensor.untyped_storage()
            if self.now is not None:
                self.now.written.add(storage._cdata)
            places = [] if self.now is None else [leaf[0] for leaf in self.now.leaves if leaf[1] == storage._cdata]
            if places:
                self.now.writes.add(places[0])  # type: ignore[union-attr]
            elif hasattr(storage, HELD) and self.now is not None:
                self.now.overwrites = True
            elif hasattr(storage, HELD):
                self.flaw = "memory is written outside of a torch function"

    def open_call(self, call: Call, args: Any, kwargs: Any) -> None:
        """A call of a torch function begins."""
        found = [(place, tensor) for place, tensor in tensors_with_places((args, kwargs))]
        leaves = _leaves(found)
        devices = {tensor.device for _, tensor in found if tensor.device.type != "meta"} | {torch.device("cpu")}
        states = {device: randomness.digest(state) for device, state in randomness.states_of(devices)}
        self.now = Trace(next_order(), leaves, states)
        self.casts = call.caches
        self.traces.append(self.now)
        frames = [*self.frames, self.frame]
        call.modules = tuple(weakref.ref(frame.module) for frame in frames if frame.module is not None)
        if self.counts != self.calls:
            self.counts = dict(self.calls)
        call.counts = self.counts

    def close_call(self, call: Call, out: Any) -> None:
        """The call has returned."""
        assert self.now is not None
        self.now.last = next_order()
        call.nodes = next_node() - self.now.nodes[0]
        self.now.results = bool(call.results)
        self.now.returned = _leaves(tensors_with_places(out))
        self.now = None

    def hand_over(self, tensor: Tensor, saver: FrameType) -> Any:
        packed = super().hand_over(tensor, saver)
        if self.now is None or type(tensor) not in (Tensor, Parameter):
            self.flaw = "autograd saved something outside of a torch function, or a tensor of another class"
            return packed
        self.now.offsets.append(byte_offset(tensor))
        self.now.nodes.append(next_node())
        if type(packed) is tuple:
            self.now.packs.append((tensor if packed[0] is tensor else None, packed))
        elif type(packed) is Ticket and packed.save is not None:
            self.now.packs.append((None, packed))
        else:
            self.flaw = "something was saved in a way that is not followed"
        return packed

    def copied(self, buffer: Buffer, original: Tensor) -> None:
        storage = original.untyped_storage()._cdata
        if self.now is not None:
            for place, leaf, version, offset in self.now.leaves:
                if leaf == storage and version == original._version:
                    self.private[id(buffer)] = (buffer, len(self.traces) - 1, place, offset)
                    return

    def packed(self, buffer: Buffer) -> None:
        if self.now is not None:
            self.draws[id(buffer)] = (buffer, len(self.traces) - 1, len(self.now.operations) - 1)

    def use(self, policy: Any) -> Any:
        self.flaw = "another policy came into force inside of the recording"
        return super().use(policy)

    def own_notes(self) -> dict[Any, int]:
        """What this step added to the notes for the report."""
        before, after = self.noted, self.ledger.notes
        return {row: count - before.get(row, 0) for row, count in after.items() if count != before.get(row, 0)}

    def finish(self) -> None:
        """The program ends: with the recording, or when backward begins inside of it."""
        learned, self.learned = self.learned, None
        self.over = True
        if learned is not None:
            learned()

    def forget(self) -> None:
        """Let go of what was noted: autograd's graph holds the hooks, and with them this."""
        self.traces, self.private, self.draws, self.learned, self.now = [], {}, {}, None, None

    def step_aside(self, creates_graph: bool, run: Any) -> Any:
        if threading.get_ident() == self.thread:
            self.finish()
        return super().step_aside(creates_graph, run)


class Scribe(TorchFunctionMode):
    """Writes the transcript of a step that is recorded at the same time."""

    def __init__(self, recorder: ScribingRecorder, flaw_of: Callable[[list[Call]], str | None]) -> None:
        super().__init__()
        self.recorder = recorder
        self.flaw_of = flaw_of  # what is known of steps that begin with these calls
        self.begun = False  # a call has read a parameter
        self.transcriber = Transcriber()
        self.calls: list[Call] = []
        self.flaw: str | None = None
        self._guard: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.flaw is not None or self.recorder.over or func in QUESTIONS or name_of(func) in SILENT:
            return func(*args, **kwargs)
        if is_foreign(func):
            with self:
                return func(*args, **kwargs)
        try:
            call = self._describe(func, args, kwargs)
        except Flaw as flaw:
            self.flaw = f"{name_of(func)}: {flaw}"
            return func(*args, **kwargs)
        self.calls.append(call)
        if not self.begun and call.parameters():
            self.begun = True
            self.flaw = self.flaw_of(self.calls)
            if self.flaw is not None:
                return func(*args, **kwargs)
        self.recorder.open_call(call, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self.flaw = f"{name_of(func)} raised"
            raise
        found = [
            (place, self.transcriber.number(tensor), tensor.shape, tensor.dtype)
            for place, tensor in tensors_with_places(out)
        ]
        call.returned(found, plain=type(out) is Tensor)
        self.recorder.close_call(call, out)
        return out

    def _describe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if escapes(func):
            raise Flaw("memory escapes from torch's sight")
        if torch._C._len_torch_dispatch_stack() > 1:
            raise Flaw("a dispatch mode inside of the recording")
        if transformed() is not None:
            raise Flaw("a torch.func transform")
        call = Call(func)
        pattern = self.transcriber.data if func is torch.tensor else self.transcriber.pattern
        call.args = tuple(map(pattern, args))
        call.kwargs = {key: pattern(value) for key, value in kwargs.items()}
        if self._guard is None or not self._guard.check():
            self._guard = torch._C._dynamo.guards.GlobalStateGuard()
        call.guard = self._guard
        call.backends = backends()
        call.caches = torch._C._is_any_autocast_enabled()
        return call
