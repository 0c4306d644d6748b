"""Following: take a known step without looking at each operation.

    first call     which of the known programs begins like this?         none: record the step
    every call     same function, same arguments, same global state?     no: record from here on
    saved tensors  in the order in which they were saved before: a ticket or the tensor itself
    first ticket   the program's operations are replayed on what was collected (numbered.py)

A step is known once it was recorded twice with the same calls. So the wrong thing can only be recomputed if a step
makes the same calls as before and yet computes something else, and what decides that is compared: functions,
arguments, which tensor is which, version counters, torch's global state.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from lowtide.tape.backwards import backwards
from lowtide.tape.buffers import alias
from lowtide.tape.library import Shelf, may_take_over
from lowtide.tape.onlooking import look_on
from lowtide.tape.presence import presence
from lowtide.tape.program import Instance, Program
from lowtide.tape.scribing import Scribe, ScribingRecorder
from lowtide.tape.sites import watch
from lowtide.tape.tickets import keep, unpack
from lowtide.tape.transcript import (
    AGAIN,
    CONSTANT,
    DATA,
    EXTERNAL,
    PARAMETER,
    QUESTIONS,
    RESULT,
    SEQUENCE,
    SILENT,
    Call,
    Meta,
    Pattern,
    backends,
    is_foreign,
    meta_of,
    name_of,
    next_node,
    same_call,
    same_constant,
)
from lowtide.tape.transcript import at as item_at
from lowtide.tape.transforms import pop_hooks, push_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.tape.policy import Policy
    from lowtide.tape.recorder import Recorder


_PLAIN = (Tensor, Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_ref = weakref.ref


def _nothing() -> None:
    return None


class Follower(TorchFunctionMode):
    """Takes one step along a known program, and hands over to a recorder where the step leaves it."""

    def __init__(
        self,
        shelf: Shelf,
        recorder: ScribingRecorder,
        begin: Callable[[Recorder], None],
        end: Callable[[Recorder], None],
    ) -> None:
        super().__init__()
        self.shelf = shelf
        self.recorder, self.begin, self.end = recorder, begin, end  # takes over where the step is not known
        self.recording = False
        self.entered = False
        self.scribe: Scribe | None = None
        self.program: Program | None = None
        self.committed = False  # a call read one of the program's parameters: no other model is meant
        self.calls: list[Call] = []
        self.next = self.nth = 0  # the next call, and what it saves next
        self.now: Call | None = None
        self.lost = False
        self.over = False  # backward has begun
        self.seen: list[Any] = []
        self.owners: dict[int, tuple[int, int]] = {}  # tensors from outside: storage, offset
        self.storages: dict[int, int] = {}  # by storage: the first tensor from outside that lies in it
        self.own: set[int] = set()  # storages of the parameters, where something is written
        self.versions: dict[int, int] = {}  # of tensors from outside when they were seen first
        self.nodes = 0  # the number of autograd's next node before the present call
        self.thread = threading.get_ident()
        self.instance: Instance | None = None
        self.open: list[Module] = []
        self.found: Program | None = None  # that this step turned out to be

    # ---- begin and end --------------------------------------------------------------------------------------

    def start(self) -> Follower | Recorder:
        """Look at this thread's calls and saved tensors; returns who decides what is kept."""
        if self.shelf.records:
            self._begin_to_record(learn=True)
        else:
            push_hooks(self.pack, unpack)
            watch.start(self.open.append, self._closed)
            backwards.wrap(self.step_aside)
        if self.scribe is not None or not self.recording:
            self.entered = True
            presence.start(self)
            self.__enter__()
        return self.recorder if self.recording else self

    def stop(self) -> None:
        """Undo ``start``."""
        if self.entered:
            self.__exit__(None, None, None)
            presence.stop()
        if self.recording:
            try:
                self.recorder.finish()
                if self.found is not None and self.recorder.flaw is not None:
                    self.shelf.give_up(self.found, self.recorder.flaw)
            finally:
                self.recorder.forget()
                self.scribe = None
                self.end(self.recorder)
            return
        self._let_go()
        self.instance = None  # autograd's graph holds the hooks, and with them this
        if self.program is not None:
            self.program.followed += 1
            self.recorder.ledger.add(self.program.notes)

    def _let_go(self) -> None:
        backwards.unwrap(self.step_aside)
        self._close()
        if not self.committed:
            watch.stop()
        pop_hooks()

    def _close(self) -> None:
        if self.instance is not None:
            self.instance.close()

    def _closed(self, module: Module, _: Any) -> None:
        while self.open and self.open.pop() is not module:
            pass

    def record(self) -> None:
        """Record the step from here on, or from the next call on at which that can be."""
        self.lost = True
        if self.recording or self.over or not may_take_over(self.pack):
            return
        self._let_go()
        if self.program is None or not self.committed:
            self.shelf.unwritten = self.next > 0
            self._begin_to_record(learn=self.next == 0)
            self._hand_over()
            for module in self.open:
                self.recorder.enter_module(module)
            return
        self.shelf.miss(self.program)
        call = self.calls[min(self.next, len(self.calls) - 1)]
        self._begin_to_record(learn=False)
        self._hand_over()
        for ref in call.modules:
            module = ref()
            if module is not None:
                self.recorder.enter_module(module)
                frame = self.recorder.frame
                frame.call = max(0, call.counts.get(frame.home.path, 1) - 1)
        self.recorder.calls.update(call.counts)

    def _hand_over(self) -> None:
        if self.instance is not None:
            self.instance.hand_over(self.recorder)
            self.instance = None

    def _begin_to_record(self, *, learn: bool) -> None:
        self.recording = True
        if learn:
            self.recorder.learned = self._learn
            self.scribe = Scribe(self.recorder, self.shelf.flaw_of) if self.shelf.writes else None
        self.begin(self.recorder)

    def _learn(self) -> None:
        self.found = self.shelf.learn(self.recorder, self.scribe, self.recorder.own_notes())

    # ---- calls ----------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.scribe is not None:
            return self.scribe.__torch_function__(func, types, args, kwargs)
        if self.recording or self.over or func in QUESTIONS:
            return func(*args, **kwargs)
        if self.program is None and not self.lost:
            self._choose(func, args, kwargs)
        if self.program is not None and not self.lost and self.next < len(self.calls):
            call = self.calls[self.next]
            if (call.func is func or call.func == func) and self._same(call, args, kwargs):
                if not self.committed and call.parameters():
                    self.committed = True
                    watch.stop()
                return self._run(call, args, kwargs)
            if not self.committed and self._switch(func, args, kwargs):
                return self.__torch_function__(func, types, args, kwargs)
        return self._stray(func, types, args, kwargs)

    def _stray(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """A call that is not the next one of the program."""
        if not self.lost:
            if name_of(func) in SILENT:
                return func(*args, **kwargs)
            if is_foreign(func):
                with self:
                    return func(*args, **kwargs)
        self.record()
        if self.recording:
            return self.__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)

    def _choose(self, func: Any, args: Any, kwargs: Any) -> None:
        """Find a program that begins with this call."""
        if name_of(func) in SILENT or is_foreign(func):
            return
        for program in self.shelf.programs:
            if self._begins(program, func, args, kwargs):
                return

    def _switch(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Find another program that begins as this step did, and goes on with this call."""
        instance, current = self.instance, self.program
        if instance is None or instance.roots or instance.states or instance.tickets:
            return False
        others = [program for program in self.shelf.programs if program is not current]
        return any(
            self._begins(program, func, args, kwargs)
            for program in others
            if len(program.calls) > self.next
            and all(map(same_call, program.calls[: self.next], self.calls[: self.next]))
        )

    def _begins(self, program: Program, func: Any, args: Any, kwargs: Any) -> bool:
        """Take ``program`` if its next call is this one."""
        call = program.calls[self.next]
        seen, owners, storages = self.seen, self.owners, self.storages
        self.seen = [*seen, *[_nothing] * (program.tensors - len(seen))]
        self.owners, self.storages = dict(owners), dict(storages)
        fits = call.func == func and self._same(call, args, kwargs) and program.fits() and call.backends == backends()
        self.seen = [*seen, *[_nothing] * (program.tensors - len(seen))] if fits else seen
        self.owners, self.storages = owners, storages
        if fits:
            self.own = program.storages() if program.writes else set()
            self.program, self.calls = program, program.calls
            self.instance = Instance(program)
        return fits

    def _same(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is the known one."""
        if len(args) != len(call.args) or len(kwargs) != len(call.kwargs) or not call.guard.check():
            return False
        if _dispatch_modes():  # they may change what a function computes
            return False
        seen, fits = self.seen, self._fits
        try:
            for value, pattern in zip(args, call.args, strict=True):
                kind, one, two = pattern
                if kind == RESULT:
                    if seen[one]() is not value or value is None or value._version != two:
                        return False
                elif (kind != CONSTANT or value is not one) and not fits(value, pattern):
                    return False
            for key, pattern in call.kwargs.items():
                value = kwargs.get(key, _nothing)
                if (pattern[0] != CONSTANT or value is not pattern[1]) and not fits(value, pattern):
                    return False
        except RuntimeError:  # an inference tensor has no version
            return False
        return not call.chooses or call.backends == backends()

    def _fits(self, value: Any, pattern: Pattern) -> bool:
        kind, one, two = pattern
        if kind == RESULT:
            return value is not None and self.seen[one]() is value and bool(value._version == two)
        if kind == AGAIN:
            return value is not None and self.seen[one]() is value and value._version - self.versions[one] == two
        if kind == CONSTANT:
            return value is one or same_constant(value, one, two)
        if kind == PARAMETER:
            return one() is value
        if kind == EXTERNAL:
            return self._is_external(value, one, *two)
        if kind == SEQUENCE:
            return type(value) is two and len(value) == len(one) and all(map(self._fits, value, one))
        if kind == DATA:
            return type(value) is one and (value.dtype, value.shape) == two
        parts = (value.start, value.stop, value.step) if type(value) is slice else ()
        return bool(parts) and all(map(self._fits, parts, one))

    def _is_external(self, value: Any, number: int, owner: int, distance: int, meta: Meta) -> bool:
        """Whether a tensor from outside, seen for the first time, is like the known one and lies where that lay."""
        if type(value) is not Tensor or any(ref() is value for ref in self.seen):
            return False
        storage = value.untyped_storage()
        if (*meta_of(value), storage.resizable()) != meta:
            return False
        lies = (storage._cdata, int(value.storage_offset()))
        if owner == number:
            if lies[0] in self.own or self.storages.setdefault(lies[0], number) != number:
                return False  # what is written in one would show in the other
            self.owners[number] = lies
        elif self.owners.get(owner) != (lies[0], lies[1] - distance):
            return False
        self.seen[number] = weakref.ref(value)
        self.versions[number] = value._version
        return True

    def _run(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Make the next call of the program, and collect what the tape needs of it."""
        if call.collects and self.instance is not None:
            self.instance.collect(call, self.next, args, kwargs)
        self.next += 1
        self.now, self.nth = call, 0
        self.lost = True  # unless all goes well
        self.nodes = before = next_node()
        try:
            out = look_on(self, call, args, kwargs) if call.operations else call.func(*args, **kwargs)
        finally:
            self.now = None
        if self.nth != len(call.packs) or next_node() - before != call.nodes:
            return out
        alone = call.alone
        if alone is not None:
            if type(out) is not Tensor or out.shape != alone[2] or out.dtype is not alone[3]:
                return out
            self.seen[alone[1]] = _ref(out)
        else:
            returned = call.tensors_of(out)
            if returned is None:
                return out
            for number, tensor in returned:
                self.seen[number] = _ref(tensor)
        for place, slot, offset in call.keeps:
            self.instance.hold(slot, item_at(out, place), offset)  # type: ignore[union-attr]  # there is one in a call
        self.lost = False
        return out

    # ---- saved tensors --------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """Autograd's pack hook."""
        call, nth = self.now, self.nth
        if call is None or nth < 0 or nth >= len(call.packs) or type(tensor) not in _PLAIN:
            return self._unexpected(tensor)
        slot, layout, aliased, held, nodes = call.packs[nth]
        if tensor.shape != layout[0] or (call.caches and next_node() - self.nodes != nodes):
            return self._unexpected(tensor)
        self.nth = nth + 1
        if held is not None:
            self.instance.take(tensor, *held)  # type: ignore[union-attr]  # there is one in a call
        if slot < 0:
            return (alias(tensor) if aliased else tensor, tensor._version)
        return self.instance.ticket(slot, layout, tensor)  # type: ignore[union-attr]

    def _unexpected(self, tensor: Tensor) -> Any:
        self.nth = -1  # this call is not the known one: record after it
        if not self.over:
            self.lost = True
        with torch._C.DisableTorchFunction():
            return keep(tensor, True)

    # ---- what others ask of a recorder ----------------------------------------------------------------------

    def step_aside(self, creates_graph: bool, run: Callable[[], Any]) -> Any:
        """A backward pass begins inside the recording."""
        if threading.get_ident() == self.thread:
            self.over = True
            self._close()
        return run()

    def use(self, policy: Policy) -> Policy:
        """Let another policy decide from here on."""
        self.record()
        return self.recorder.use(policy)

    def restore_point(self, output: Any) -> None:
        """What is not known to be dropped is kept."""
