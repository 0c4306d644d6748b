"""Recipes: how to make a dropped buffer again, and the replay that follows them.

    ticket ─▶ Buffer ─▶ Recipe ─▶ reads: Buffer (dropped) ─▶ Recipe ─▶ ...
                                         Buffer (held)    = memory that is still there

Everything points backwards in time, so reference counting alone frees it: a ticket that dies frees its chain;
a buffer that was rebuilt forgets its recipe and with it all that only the recipe needed.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import ReplayMismatch
from lowtide.tape import randomness
from lowtide.tape.buffers import MADE, Buffer, Layout, alias, clone_storage, hold, layout_of, place, rare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lowtide.tape.operators import Operator, Position

Read = tuple["Position", Buffer, Layout]

_order = itertools.count()
# Operators are replayed exactly as they were recorded: below autograd, autocast and version counting.
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _name in dir(torch._C.DispatchKey):
    if _name.startswith("Autocast") or (_name.startswith("Autograd") and "Functionality" not in _name):
        _BELOW = _BELOW | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name))


class TapeMode(TorchDispatchMode):
    """A dispatch mode that writes a tape, and can be told to look away while operations are replayed."""

    paused = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that torch would add costs as much as the mode itself


def _pause(step: int) -> None:
    for index in range(torch._C._len_torch_dispatch_stack()):
        mode = torch._C._get_dispatch_stack_at(index)
        if isinstance(mode, TapeMode):
            mode.paused += step


class Recipe:
    """One recorded operation that made one new result: operator, arguments with tensors as (buffer, layout)."""

    __slots__ = ("args", "grad", "kwargs", "op", "order", "reads")

    def __init__(self, op: Operator, args: list[Any], kwargs: dict[str, Any] | None, reads: list[Read]) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.reads = reads
        self.order = next(_order)
        self.grad = torch.is_grad_enabled()

    def run(self, inputs: list[Tensor]) -> Any:
        """Run the operator on ``inputs``, one tensor per read."""
        args, kwargs = self.args.copy(), self.kwargs
        if kwargs:
            kwargs = dict(kwargs)
        for read, tensor in zip(self.reads, inputs, strict=True):
            position = read[0]
            if type(position) is int:
                args[position] = tensor
            else:
                _put(args, kwargs, position, tensor)
        return self.op.call(*args, **kwargs) if kwargs else self.op.call(*args)


class FullRecipe(Recipe):
    """A recorded operation with several results, results written in place, or random state."""

    __slots__ = ("generators", "made", "outs", "states", "written")

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.outs: list[tuple[int, weakref.ref[Buffer]]] = []  # new results: (which, buffer)
        self.made: list[tuple[int, weakref.ref[Buffer]]] = []  # new versions: (id of the old buffer, new)
        self.written: dict[int, bool] | None = None  # id of a buffer that is written: it has no other reader
        self.states: tuple[randomness.State, ...] | None = None  # of the default generators it drew from
        self.generators: list[tuple[Position, torch.Generator, Tensor]] | None = None

    def run(self, inputs: list[Tensor]) -> Any:
        """Run the operator on ``inputs``, one tensor per read, with the random state that it saw."""
        if self.generators:
            args, kwargs = self.args, self.kwargs
            try:
                self.args, self.kwargs = list(args), dict(kwargs or {})
                for position, generator, state in self.generators:
                    _put(self.args, self.kwargs, position, randomness.twin(generator, state))
                return super().run(inputs)
            finally:
                self.args, self.kwargs = args, kwargs
        if self.states is None:
            return super().run(inputs)
        before = randomness.enter(self.states)
        try:
            return super().run(inputs)
        finally:
            randomness.leave(before)


def _put(args: list[Any], kwargs: dict[str, Any] | None, position: Position, value: Any) -> None:
    if type(position) is int:
        args[position] = value
    elif type(position) is str:
        assert kwargs is not None
        kwargs[position] = value
    else:
        index, item = position  # type: ignore[misc]
        if isinstance(index, str):
            assert kwargs is not None
            kwargs[index] = [*kwargs[index][:item], value, *kwargs[index][item + 1 :]]
        else:
            args[index] = [*args[index][:item], value, *args[index][item + 1 :]]


def capture(
    args: tuple[Any, ...], kwargs: dict[str, Any], read: Callable[[Tensor], Buffer]
) -> tuple[list[Any], dict[str, Any], list[Read]]:
    """Split arguments into constants and reads; ``read`` names the buffer of a tensor."""
    constants = list(args)
    reads: list[Read] = []
    for index, value in enumerate(args):
        kind = type(value)
        if kind in _CONSTANTS:
            continue
        if kind is Tensor or isinstance(value, Tensor):
            reads.append((index, read(value), layout_of(value)))
            constants[index] = None
        elif kind is list or kind is tuple:
            constants[index] = _capture_list(index, value, read, reads)
    if not kwargs:
        return constants, kwargs, reads
    named = dict(kwargs)
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            reads.append((key, read(value), layout_of(value)))
            named[key] = None
        elif isinstance(value, (list, tuple)):
            named[key] = _capture_list(key, value, read, reads)
    return constants, named, reads


def _capture_list(where: Any, values: Any, read: Callable[[Tensor], Buffer], reads: list[Read]) -> list[Any]:
    constants = list(values)
    for item, value in enumerate(constants):
        if isinstance(value, Tensor):
            reads.append(((where, item), read(value), layout_of(value)))  # type: ignore[arg-type]
            constants[item] = None
    return constants


_CONSTANTS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, complex, torch.layout})


# ---- replay -------------------------------------------------------------------------------------------------

_lock = threading.RLock()


def rebuild(buffer: Buffer) -> Tensor:
    """The contents of ``buffer``: as they are, or made again from what is still there."""
    if buffer.recipe is None:
        return buffer.contents()
    with _lock:
        if buffer.recipe is None:  # another thread was faster
            return buffer.contents()
        guard = torch._C._ExcludeDispatchKeyGuard(_BELOW)
        grad = torch.is_grad_enabled()
        recording = torch._C._len_torch_dispatch_stack() > 0
        if recording:
            _pause(1)
        try:
            for target, recipe in _plan(buffer):
                if recipe.grad is not torch.is_grad_enabled():
                    torch._C._set_grad_enabled(recipe.grad)
                _follow(target, recipe)
        finally:
            if recording:
                _pause(-1)
            torch._C._set_grad_enabled(grad)
            del guard
    return buffer.contents()


def _plan(buffer: Buffer) -> Iterable[tuple[Buffer, Recipe]]:
    """The recipes that lead to ``buffer``, in the order in which they were recorded.

    Iterative: a chain may be as long as the program.
    """
    recipe = buffer.recipe
    assert recipe is not None
    missing = [read for _, read, _ in recipe.reads if read.recipe is not None]
    if not missing:
        return ((buffer, recipe),)
    found = {recipe.order: (buffer, recipe)}
    while missing:
        target = missing.pop()
        recipe = target.recipe
        if recipe is None or recipe.order in found:
            continue
        found[recipe.order] = (target, recipe)
        missing += [read for _, read, _ in recipe.reads if read.recipe is not None]
    return _Draining(found[order] for order in sorted(found))


class _Draining(list[Any]):
    """A list that lets go of its items as it is iterated: a recipe that is done must not hold its inputs."""

    def __iter__(self) -> Any:
        self.reverse()
        while self:
            yield self.pop()


def _follow(target: Buffer, recipe: Recipe) -> None:
    """Run one recipe and give its results to the buffers that are still wanted."""
    if type(recipe) is FullRecipe:
        _follow_full(target, recipe)
        return
    inputs = [place(read.contents(), layout) for _, read, layout in recipe.reads]
    value = recipe.run(inputs)
    if target.rare is not None and target.rare.print is not None:
        _compare(target, value, recipe)
    target.value = value
    target.recipe = None


def _follow_full(target: Buffer, recipe: FullRecipe) -> None:
    bases: dict[int, Tensor] = {}
    if recipe.written:
        for _, read, _ in recipe.reads:
            alone = recipe.written.get(id(read))
            if alone is not None and id(read) not in bases:
                value = read.contents()
                bases[id(read)] = value if alone and read.version is None else clone_storage(value)
    inputs = [
        place(bases[id(read)] if id(read) in bases else read.contents(), layout) for _, read, layout in recipe.reads
    ]
    result = recipe.run(inputs)
    del inputs
    if not recipe.outs and not recipe.made:
        _fill(target, result, recipe)
    for which, ref in recipe.outs:
        _fill(ref(), result[which] if which >= 0 else result, recipe)
    for old, ref in recipe.made:
        _fill(ref(), bases[old], recipe)


def _fill(buffer: Buffer | None, value: Tensor, recipe: Recipe) -> None:
    if buffer is None or buffer.recipe is not recipe:
        return
    if buffer.rare is not None and buffer.rare.print is not None:
        _compare(buffer, value, recipe)
    buffer.value = value
    buffer.recipe = None


def _compare(buffer: Buffer, value: Tensor, recipe: Recipe) -> None:
    from lowtide.tape.proof import fingerprint

    assert buffer.rare is not None
    if fingerprint(value.untyped_storage()) != buffer.rare.print:
        site = buffer.rare.site
        site.home.distrust(recipe.op.key)
        raise ReplayMismatch(
            f"recomputing {recipe.op.name} gave other values than the forward pass did ({site.describe()}). It "
            "depends on something that changed since, so gradients would have been wrong. Its results are kept "
            "from now on: run the step again."
        )


# ---- which buffer a tensor is -------------------------------------------------------------------------------


def find(tensor: Tensor) -> Buffer:
    """The buffer that ``tensor`` is a view of: a dropped one, or the memory itself, taken hold of."""
    storage = tensor.untyped_storage()
    buffer: Buffer | None = getattr(storage, MADE, None)
    if buffer is None or not current(storage, tensor, buffer):
        return hold(tensor, storage)
    buffer.used = True
    return buffer


def current(storage: torch.UntypedStorage, tensor: Tensor, buffer: Buffer) -> bool:
    """Whether ``buffer``'s recipe still makes what ``storage`` holds; if not, the memory counts as it is.

    Not so for memory that was never seen being written whole, and memory shared with code outside torch.
    """
    if storage.resizable() and (buffer.rare is None or buffer.rare.blank is None):
        return True
    expose(storage, tensor)
    return False


def expose(storage: torch.UntypedStorage, tensor: Tensor) -> None:
    """Treat ``storage`` from now on as memory whose contents are simply there."""
    buffer: Buffer | None = getattr(storage, MADE, None)
    if buffer is None:
        return
    delattr(storage, MADE)
    if buffer.saves:
        rare(buffer).next = Buffer(None, alias(tensor))
