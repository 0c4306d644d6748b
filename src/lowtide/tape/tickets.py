"""What autograd is given in place of a saved tensor, and what it gets back for it.

forward   save(t) ─▶ pack ─▶ Kept(t)          the memory stays
                           ─▶ Ticket(buffer)   the memory goes
backward  unpack(Kept)   ─▶ t, if nobody changed it
          unpack(Ticket) ─▶ t, if the program still holds it; else the buffer, made again
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from lowtide.errors import RootChanged
from lowtide.tape.buffers import HELD, MADE, Buffer, Layout, alias, blank, hold, layout_of, place, shared_layout
from lowtide.tape.replay import rebuild

Kept = tuple[Tensor, int | None]
"""A saved tensor handed over as it is, with the version that autograd itself would have checked."""


class Save:
    """That a tensor was saved at a version. Holds no memory: it lives as long as its buffer or ticket."""

    __slots__ = ("origin", "stale", "ticket", "version")

    def __init__(self, origin: weakref.ref[Tensor], version: int, ticket: Ticket) -> None:
        self.origin = origin
        self.version = version
        self.ticket = weakref.ref(ticket)
        self.stale = False

    def move(self, buffer: Buffer) -> None:
        """Let its ticket stand for a later version: what was saved is what its memory holds now."""
        ticket = self.ticket()
        if ticket is not None:
            ticket.move(buffer)

    def written_through(self, written: Tensor) -> None:
        """Note that its memory was written through ``written``.

        Autograd refuses a saved tensor whose version counter moved. A write through an alias with a counter of
        its own (``.data``) goes unnoticed there: the saved tensor then simply has the new contents.
        """
        tensor = self.origin()
        self.stale = self.stale or tensor is None or share_counter(tensor, written)


def share_counter(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same version counter, found by moving one of them for a moment."""
    before, version = one._version, other._version
    move = torch._C._autograd._unsafe_set_version_counter
    move((other,), (version + 1,))
    shared = one._version != before
    move((other,), (version,))
    return shared


def still_there(ref: weakref.ref[Tensor], version: int, layout: Layout) -> Tensor | None:
    """What was saved at a version, if the program still holds it as it was.

    Raises:
        RootChanged: it was modified since.
    """
    origin = ref()
    if origin is None:
        return None
    if origin._version != version:
        raise RootChanged(modified_message(origin.shape, origin.dtype, version, origin._version))
    return origin if layout_of(origin) == layout else None


class Ticket:
    """A saved tensor that was dropped: which buffer, which view of it."""

    __slots__ = ("__weakref__", "buffer", "layout", "save")

    def __init__(self, buffer: Buffer, layout: Layout, save: Save | None) -> None:
        self.buffer = buffer
        self.layout = layout
        self.save = save

    def move(self, buffer: Buffer) -> None:
        """Stand for ``buffer`` from now on."""
        self.buffer = buffer

    def redeem(self) -> Tensor:
        """The tensor's contents: the tensor itself if the program still holds it, else made again."""
        save = self.save
        if save is None:  # hooks around the recording: the contents when it was saved, whatever happened since
            return place(rebuild(self.buffer), self.layout)
        if save.stale:
            raise RootChanged(modified_message(self.layout[0], self.layout[3], save.version, None))
        origin = still_there(save.origin, save.version, self.layout)
        if origin is not None:
            return origin
        return place(rebuild(self.buffer), self.layout)


class Chained:
    """A kept tensor that went through the saved-tensor hooks that were set around the recording."""

    __slots__ = ("packed", "unpack")

    def __init__(self, unpack: Any, packed: Any) -> None:
        self.unpack = unpack
        self.packed = packed

    def redeem(self) -> Tensor:
        """What the outer hook gives back."""
        tensor: Tensor = self.unpack(self.packed)
        return tensor


class Parts:
    """A saved wrapper subclass (a DTensor, say), taken apart; each plain tensor inside is packed by itself."""

    __slots__ = ("context", "kind", "names", "packed", "size", "stride")

    def __init__(self, tensor: Any, packed: list[Any], names: list[str], context: Any) -> None:
        self.kind = type(tensor)
        self.size, self.stride = tensor.size(), tensor.stride()
        self.packed, self.names, self.context = packed, names, context

    def redeem(self) -> Tensor:
        """The wrapper around its redeemed parts."""
        inner = {name: unpack(item) for name, item in zip(self.names, self.packed, strict=True)}
        whole: Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return whole


def unpack(packed: Kept | Ticket | Chained | Parts) -> Tensor:
    """Autograd's unpack hook."""
    if type(packed) is not tuple:
        return packed.redeem()  # type: ignore[union-attr]
    tensor, version = packed
    if version is not None and tensor._version != version:
        raise RootChanged(modified_message(tensor.shape, tensor.dtype, version, tensor._version))
    return tensor


def keep_now(tensor: Tensor, storage: torch.UntypedStorage, buffer: Buffer) -> None:
    """Turn a dropped buffer whose memory still lives into a held one: a restore point."""
    held = hold(tensor, storage)
    buffer.value, buffer.version, buffer.recipe = held.value, held.version, None
    if held.version is not None:
        getattr(storage, HELD).append(weakref.ref(buffer))


def keep_result(tensor: Tensor) -> None:
    """Make a restore point of the memory that ``tensor`` lies in, if it was dropped."""
    if is_functorch_wrapped_tensor(tensor):  # inside vmap, say: what is kept is the memory below
        with temporarily_clear_interpreter_stack():
            return keep_result(get_unwrapped(tensor))
    storage = tensor.untyped_storage()
    buffer: Buffer | None = getattr(storage, MADE, None)
    if buffer is not None and blank(buffer) is None:
        delattr(storage, MADE)
        keep_now(tensor, storage, buffer)
    return None


_next_node = torch._C._autograd._get_sequence_nr


def keep(tensor: Tensor, by_function: bool = False) -> Kept:
    """Hand ``tensor`` over as it is.

    An output that its own node saves would hold the node that holds it, so it goes without its graph. The node
    being built is the youngest of this thread, unless a custom Function (``by_function``) built others inside.
    """
    try:
        version = tensor._version
    except RuntimeError:
        return tensor, None  # an inference tensor has no version
    node = tensor.grad_fn
    if node is None or (not by_function and node._sequence_nr() + 1 != _next_node()):
        return tensor, version
    return alias(tensor), version


def pack_dropped(tensor: Tensor, buffer: Buffer) -> Ticket:
    """Give up a tensor whose buffer can be made again."""
    ticket = Ticket(buffer, shared_layout(tensor), None)
    ticket.save = save = Save(weakref.ref(tensor), tensor._version, ticket)
    if buffer.saves is None:
        buffer.saves = [save]
    else:
        buffer.saves.append(save)
    buffer.used = True
    return ticket


def modified_message(shape: Any, dtype: Any, expected: int, found: int | None) -> str:
    """Autograd's own words for a saved tensor that was modified in place."""
    now = f"is at version {found}; expected version {expected} instead" if found is not None else "was overwritten"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}] {now}. Run backward before modifying it, or modify a copy."
    )
