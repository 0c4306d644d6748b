"""The recorder: a dispatch mode that writes the tape, and the saved-tensor hooks that hand out tickets.

What happens to one operation, by the route its operator has in the module it runs in:

    PASS    views, and whatever the policy keeps: run, note nothing. Its results are memory that is there.
    DROP    run, then give each new float result a buffer with a recipe.
    ASK     as DROP, but the policy decides for each operation.
    WRITE   writes into its arguments: new versions of their buffers (inplace.py).
    SWAP    gives a tensor other memory (set_, resize_): treated as contents that are simply there.
    FORCE   the policy drops it, it is kept all the same; the reason is noted once per module.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lowtide.tape import bits, inplace, proof, randomness
from lowtide.tape.buffers import HELD, MADE, SAVED, Buffer, current, dispatches, expose, find, layout_of, rare
from lowtide.tape.functions import APPLY, runs_trusted, trusted_codes, trusts
from lowtide.tape.interrupts import without
from lowtide.tape.operators import Operator, operator, tensors_at, tensors_in
from lowtide.tape.policy import Op, Policy
from lowtide.tape.recipes import FullRecipe, Recipe, capture
from lowtide.tape.replay import TapeMode
from lowtide.tape.sharding import Units, keep_across, needs, sharding
from lowtide.tape.sites import Home, Tree, tree_for
from lowtide.tape.tickets import Chained, Parts, Ticket, keep, keep_result, pack_dropped

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from lowtide.tape.ledger import Ledger

PASS, DROP, ASK, WRITE, SWAP, FORCE = range(6)
_NONE: dict[str, Any] = {}
_plain: set[type] = {Tensor, Parameter}  # classes whose tensors are recorded; FakeTensor is added when it is met


class Frame:
    """One module call in progress."""

    __slots__ = ("around", "call", "counts", "home", "module", "pending")

    def __init__(self, home: Home, module: torch.nn.Module | None, call: int, around: Units | None = None) -> None:
        self.home = home
        self.module = module
        self.call = call
        self.counts: dict[int, int] | None = None
        self.pending: set[int] | None = None  # operators proven in this call
        self.around = around  # see sharding.py: the modules around it whose parameters come and go


class Recorder(TapeMode):
    """Writes the tape of one thread between entering and leaving a recording."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs compiled; what it saves is kept

    def __init__(self, policy: Policy, home: Home, ledger: Ledger, *, check: str, strict: bool) -> None:
        super().__init__()
        self.policy = policy
        self.rule = policy  # the policy for the modules now running
        self.ledger = ledger
        self.proving = check != "never"
        self.proving_all = check == "always"
        self.strict = strict
        self.frame = Frame(home, None, -1)  # outside of modules
        self.frames: list[Frame] = []
        self.calls: dict[str, int] = {}
        self.tree: Any = None
        self.names: Tree | None = None  # of the program, where that is known; else the outermost module's own
        self.paused = 0
        self.outer: tuple[Any, Any] | None = None  # saved-tensor hooks set around the recording
        self.base_depth = 0  # of what the policy recomputes without being asked
        self._stand_in(self.frame)
        self.made: list[weakref.ref[torch.UntypedStorage]] = []
        self.read: Callable[[Tensor], Buffer] = find

    # ---- operations -----------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and not all(kind in _plain or _is_plain(kind) for kind in types):
            return NotImplemented
        call = self.passes.get(id(func))
        if call is not None:
            return call(*args, **kwargs) if kwargs else call(*args)
        kind, op = self.routes.get(id(func)) or self._learn(func)
        if kind == PASS or self.paused:
            return op.call(*args, **kwargs) if kwargs else op.call(*args)
        if kind > ASK:
            return self._other(kind, op, args, kwargs or _NONE)
        nth = self.count(op) if kind == ASK else -1
        if not torch.is_grad_enabled() and not op.declared and not self.trusts_caller():
            return op.call(*args, **kwargs) if kwargs else op.call(*args)
        if self.proving and (self.proving_all or op.key not in self.frame.home.proven):
            return proof.run(self, op, args, kwargs or _NONE, nth)
        drew = randomness.drawn(op, args, kwargs or _NONE) if op.random else None
        out = op.call(*args, **kwargs) if kwargs else op.call(*args)
        depth = self.depth(op, nth, results_of(out)) if nth >= 0 else self.base_depth
        if depth >= 0:
            self.drop(op, args, kwargs, out, drew, depth)
        return out

    def _learn(self, func: Any) -> tuple[int, Operator]:
        """Decide once how operations of ``func`` in the present module are treated."""
        op = operator(func)
        home = self.frame.home
        policy = home.scoped or self.rule
        decision = policy.by_name(op.name)
        if op.swaps_memory:
            kind = SWAP
        elif op.writes or op.undeclared:
            kind = WRITE
        elif op.view or decision is True:
            kind = PASS
        elif op.keep is not None or op.key in home.distrusted:
            kind = FORCE
        else:
            kind = ASK if decision is None else DROP
        if kind == PASS:
            home.passes[op.key] = op.call
            return kind, op
        route = home.routes[op.key] = (kind, op)
        return route

    def _other(self, kind: int, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind == WRITE:
            return inplace.write(self, op, args, kwargs)
        if kind == SWAP:
            for tensor in tensors_at(op.writes, args, kwargs):
                expose(tensor.untyped_storage(), tensor)
        else:
            self.ledger.note(op, self.frame.home, op.keep or "found not to be reproducible")
        return op.call(*args, **kwargs)

    def drop(self, op: Operator, args: Any, kwargs: Any, out: Any, drew: Any, depth: int) -> list[Buffer]:
        """Give the new float results of an operation buffers that can be made again."""
        if type(out) is Tensor or isinstance(out, Tensor):
            if not self.droppable(op, out):
                return []
            recipe = (Recipe if drew is None else FullRecipe)(op, *capture(args, kwargs, self.read))
            results: Any = ((-1, out),)
        else:
            results = [(which, result) for which, result in enumerate(out) if isinstance(result, Tensor)]
            results = [(which, result) for which, result in results if self.droppable(op, result)]
            if not results:
                return []
            recipe = FullRecipe(op, *capture(args, kwargs, self.read))
        if drew is not None:
            recipe.states, recipe.generators = drew  # type: ignore[attr-defined]
        recipe.level = depth
        recipe.needs = needs(recipe, self.frame.around)
        if op.takes_dtype and isinstance(out, Tensor) and not any(isinstance(value, Tensor) for value in args):
            recipe.kwargs = {**(recipe.kwargs or {}), "dtype": out.dtype}  # the default dtype may change
        buffers = []
        for which, result in results:
            storage = result.untyped_storage()
            if hasattr(storage, MADE) or hasattr(storage, HELD):
                continue  # shares the memory of something known: a view after all
            buffer = Buffer(recipe)
            if op.blank:
                rare(buffer).blank = frozenset()
            if which >= 0:
                recipe.outs.append((which, weakref.ref(buffer)))  # type: ignore[attr-defined]
            setattr(storage, MADE, buffer)
            self.made.append(weakref.ref(storage))
            buffers.append(buffer)
        return buffers

    def _read_in_unit(self, tensor: Tensor) -> Buffer:
        keep_across(tensor, self.frame.around)
        return find(tensor)

    def adopt(self, storage: torch.UntypedStorage, buffer: Buffer) -> None:
        """``buffer`` is what ``storage`` contains from now on."""
        setattr(storage, MADE, buffer)
        self.made.append(weakref.ref(storage))

    def copied(self, buffer: Buffer, original: Tensor) -> None:
        """``buffer`` is a private copy of ``original``, which is about to be overwritten."""

    def packs(self, op: Operator, args: tuple[Any, ...]) -> bool:
        """Whether what ``op`` is about to draw is remembered by its results instead of by random state."""
        return op.two_valued and bits.fits(op, args)

    def packed(self, buffer: Buffer) -> None:
        """``buffer`` holds what the operation that is running drew."""

    def droppable(self, op: Operator, result: Tensor) -> bool:
        """Whether one result may be recomputed; notes why not."""
        if not (result.is_floating_point() or result.is_complex() or (op.random and op.several)):
            self.ledger.note(op, self.frame.home, "integer or bool results can decide what comes next")
            return False
        if op.name == "aten._efficientzerotensor":
            return False  # has no memory
        if op.safe_on_cpu_only and not (result.is_cpu or result.is_meta):
            self.ledger.note(op, self.frame.home, "not reproducible from run to run on this device")
            return False
        return result.layout is torch.strided and (type(result) in _plain or _is_plain(type(result)))

    def count(self, op: Operator) -> int:
        """Which operation of this kind in this module call is about to run, from 0."""
        counts = self.frame.counts
        if counts is None:
            counts = self.frame.counts = {}
        nth = counts.get(op.key, 0)
        counts[op.key] = nth + 1
        return nth

    def depth(self, op: Operator, nth: int, results: list[Tensor]) -> int:
        """The policy's decision for one operation: -1 to keep, else the depth at which it is recomputed."""
        frame = self.frame
        policy = frame.home.scoped or self.rule
        return policy.depth(Op(op.name, op.overload, frame.home.path, frame.call, nth, results))

    def must_prove(self, op: Operator) -> bool:
        """Whether this operation is to be proven reproducible before it is dropped."""
        return self.proving and (self.proving_all or op.key not in self.frame.home.proven)

    def trusts_caller(self) -> bool:
        """Whether operations without grad come from a declared custom Function's forward."""
        return bool(trusted_codes) and runs_trusted()

    def step_aside(self, creates_graph: bool, run: Callable[[], Any]) -> Any:
        """Run a backward pass that starts inside the recording without looking on, as the plain step runs it."""
        depth = torch._C._len_torch_dispatch_stack()
        if creates_graph or depth == 0 or torch._C._get_dispatch_stack_at(depth - 1) is not self:
            return run()
        return without(self, run)

    # ---- saved tensors --------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """Autograd's pack hook."""
        return self.hand_over(tensor, sys._getframe(1))

    def hand_over(self, tensor: Tensor, saver: FrameType) -> Any:
        """What autograd gets for ``tensor``, which it saves for what runs in the Python frame ``saver``."""
        kind = type(tensor)
        if kind is not Tensor and kind is not Parameter:
            if not _is_plain(kind):
                return self._pack_wrapper(tensor, saver)
            if kind.__name__ != "FakeTensor":
                return keep(tensor, True)  # code that unpacks it may look at its class
        try:
            buffer: Buffer | None = getattr(tensor.untyped_storage(), MADE, None)
        except NotImplementedError:  # sparse tensors have no storage
            buffer = None
        function = saver if saver.f_code is APPLY else None
        if self.read is not find and buffer is not None:
            keep_across(tensor, self.frame.around)
            buffer = getattr(tensor.untyped_storage(), MADE, None)
        if buffer is not None and self._still_made(tensor, buffer, function):
            if self.outer is None:
                return pack_dropped(tensor, buffer)
            buffer.used = True
            return Ticket(buffer, layout_of(tensor), None)
        if self.outer is not None:
            return Chained(self.outer[1], self.outer[0](tensor))
        return keep(tensor, function is not None)

    def _still_made(self, tensor: Tensor, buffer: Buffer, function: FrameType | None) -> bool:
        """Whether ``buffer``'s recipe makes what is being saved."""
        storage = tensor.untyped_storage()
        if function is not None and not trusts(function.f_locals.get("cls")):
            expose(storage, tensor)  # a custom Function's forward may write what the dispatcher does not see
            return False
        if buffer.rare is not None:
            proof.watch_memory(self, tensor)
            if not hasattr(storage, MADE):
                return False
        return current(storage, tensor, buffer)

    def _pack_wrapper(self, tensor: Tensor, saver: FrameType) -> Any:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            return keep(tensor)
        names, context = flatten()
        parts = [getattr(tensor, name) for name in names]
        if not all(isinstance(part, Tensor) for part in parts):
            return keep(tensor)
        return Parts(tensor, [self.hand_over(part, saver) for part in parts], list(names), context)

    # ---- modules --------------------------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module's forward begins."""
        outer = self.frame
        if not self.frames:
            self.tree, whole = (self.names, True) if self.names is not None else tree_for(module, self.policy)
            if whole:
                self.names = self.tree  # modules called later that belong to it are called by these names
            self.rule = self.tree.bind(self.policy)
        home = self.tree.homes.get(id(module))
        if home is None or home.module() is not module:
            home = self.tree.home(module, outer.home)
        call = self.calls.get(home.path, 0)  # by path: modules of two trees that share it share no site
        self.calls[home.path] = call + 1
        self.frames.append(outer)
        around = outer.around
        if isinstance(module, sharding.units):
            around, self.read = (around or frozenset()) | {home}, self._read_in_unit
        self._stand_in(Frame(home, module, call, around))

    def _stand_in(self, frame: Frame) -> None:
        self.frame = frame
        home = frame.home
        if home.policy is not self.rule:
            home.obey(self.rule)
        self.routes, self.passes = home.routes, home.passes

    def leave_module(self, module: torch.nn.Module, output: Any) -> None:
        """A module's forward ended, perhaps by an exception."""
        while self.frames and self.frame.module is not module:
            self._close_frame()
        if not self.frames:
            return
        restores = self.frame.home.restores
        self._close_frame()
        if restores:
            with torch._C.DisableTorchFunction():
                self.restore_point(output)

    def _close_frame(self) -> None:
        if self.frame.pending:
            self.settle()
        frame = self.frames.pop()
        if not self.frames:
            self.rule = self.policy
        self._stand_in(frame)

    def settle(self) -> None:
        """What was proven in this call needs no proof in the next."""
        if self.frame.pending:
            self.frame.home.proven |= self.frame.pending - self.frame.home.distrusted
            self.frame.pending = None

    def restore_point(self, output: Any) -> None:
        """Keep the tensors in ``output``, whatever made them."""
        for tensor in tensors_in(output):
            if _is_plain(type(tensor)) and tensor.layout is torch.strided:
                keep_result(tensor)

    def use(self, policy: Policy) -> Policy:
        """Let ``policy`` decide from here on; returns the one before."""
        before, self.policy = self.policy, policy
        self.rule = self.tree.bind(policy) if self.frames else policy
        self._stand_in(self.frame)
        return before

    def seal(self) -> None:
        """End of the recording: what still lives is from now on memory that is there."""
        while self.frames:
            self._close_frame()
        self.settle()
        for ref in self.made:
            storage = ref()
            buffer: Buffer | None = getattr(storage, MADE, None) if storage is not None else None
            if storage is not None and buffer is not None:
                delattr(storage, MADE)
                if buffer.saves:
                    setattr(storage, SAVED, buffer.saves)
        self.made.clear()


# ---- small questions ----------------------------------------------------------------------------------------


def _is_plain(kind: type) -> bool:
    """Whether tensors of this class are recorded: all but those that take operations into their own hands."""
    if kind not in _plain and (kind.__name__ == "FakeTensor" or not dispatches(kind)):
        _plain.add(kind)
    return kind in _plain


def results_of(out: Any) -> list[Tensor]:
    """The tensors among an operator's results."""
    if isinstance(out, Tensor):
        return [out]
    return [item for item in out if isinstance(item, Tensor)] if isinstance(out, (list, tuple)) else []
