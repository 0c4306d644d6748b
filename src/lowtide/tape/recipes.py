"""Recipes: how to make a dropped buffer again.

    ticket ─▶ Buffer ─▶ Recipe ─▶ reads: Buffer (dropped) ─▶ Recipe ─▶ ...
                                         Buffer (held)    = memory that is still there

Everything points backwards in time, so reference counting alone frees it: a ticket that dies frees its chain;
a buffer that was rebuilt forgets its recipe and with it all that only the recipe needed.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide.tape import randomness
from lowtide.tape.buffers import Buffer, Layout, shared_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.tape.operators import Operator, Position

Read = tuple["Position", Buffer, Layout]

_order = itertools.count()
next_order = _order.__next__


class Recipe:
    """One recorded operation that made one new result: operator, arguments with tensors as (buffer, layout)."""

    __slots__ = ("args", "grad", "kwargs", "level", "needs", "op", "order", "reads")

    def __init__(self, op: Operator, args: list[Any], kwargs: dict[str, Any] | None, reads: list[Read]) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.reads = reads
        self.order = next(_order)
        self.grad = torch.is_grad_enabled()
        self.level = 0  # see replay.py: how far towards a deeper target its result is cached
        self.needs: frozenset[object] | None = None  # see sharding.py: whose parameters it reads

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
                put(args, kwargs, position, tensor)
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
                    put(self.args, self.kwargs, position, randomness.twin(generator, state))
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


def put(args: list[Any], kwargs: dict[str, Any] | None, position: Position, value: Any) -> None:
    """Put ``value`` where an argument was."""
    if not isinstance(position, tuple):
        (args if isinstance(position, int) else kwargs or {})[position] = value  # type: ignore[index]
        return
    where, item = position
    table: Any = args if isinstance(where, int) else kwargs
    table[where] = [*table[where][:item], value, *table[where][item + 1 :]]


def get(args: Any, kwargs: Any, position: Position) -> Any:
    """What is where ``put`` puts it."""
    if not isinstance(position, tuple):
        return (args if isinstance(position, int) else kwargs)[position]
    where, item = position
    return (args if isinstance(where, int) else kwargs)[where][item]


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
            constants[index] = _capture_tensor(index, value, read, reads)
        elif kind is list or kind is tuple:
            constants[index] = _capture_list(index, value, read, reads)
    if not kwargs:
        return constants, kwargs, reads
    named = dict(kwargs)
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            named[key] = _capture_tensor(key, value, read, reads)
        elif isinstance(value, (list, tuple)):
            named[key] = _capture_list(key, value, read, reads)
    return constants, named, reads


def _capture_tensor(where: Any, value: Tensor, read: Callable[[Tensor], Buffer], reads: list[Read]) -> Tensor | None:
    """Note a read; a tensor without a storage (sparse, mkldnn) is a constant."""
    if value.layout is not torch.strided:
        return value.detach()
    reads.append((where, read(value), shared_layout(value)))
    return None


def _capture_list(where: Any, values: Any, read: Callable[[Tensor], Buffer], reads: list[Read]) -> list[Any]:
    constants = list(values)
    for item, value in enumerate(constants):
        if isinstance(value, Tensor):
            constants[item] = _capture_tensor((where, item), value, read, reads)
    return constants


_CONSTANTS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, complex, torch.layout})
