"""Buffers: one version of one storage's contents, and how a tensor lies in it.

A storage carries its current buffer as a Python attribute (torch keeps the Python object of a storage as long
as the storage lives), so a buffer is found by identity, and an address that is used again cannot be mistaken
for the old one.

    storage ──MADE──▶ Buffer (dropped: knows its recipe, holds no memory)
    storage ──HELD──▶ [weak] Buffer (held: an alias of memory that some recipe reads)
    storage ──SAVED─▶ Save (a recording that is over dropped what autograd saved of it, and it lives on)

A storage without either attribute is memory whose contents are simply there: parameters, inputs, kept results.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide.errors import ReplayMismatch, RootChanged

if TYPE_CHECKING:
    from lowtide.tape.recipes import Recipe

MADE = "_lowtide_made"
HELD = "_lowtide_held"
SAVED = "_lowtide_saved"
_SNAPSHOT = "_lowtide_snapshot"
INTERRUPTED = "a recomputation was interrupted halfway and cannot be resumed; run the step again"

Layout = tuple[torch.Size, tuple[int, ...], Any, torch.dtype, int]
"""size, stride, offset (in elements of dtype), dtype, bits (1: lazy conjugate, 2: lazy negative)."""


class Buffer:
    """One version of one storage's contents: dropped, rebuilt, or held.

    dropped: ``recipe`` says how to make it and ``value`` is None.
    rebuilt: ``value`` is private memory, ``recipe`` is forgotten.
    held: ``value`` aliases memory of the program at version ``version`` of its version counter.
    """

    __slots__ = ("__weakref__", "rare", "recipe", "saves", "used", "value", "version")

    def __init__(self, recipe: Recipe | None, value: Tensor | None = None, version: int | None = None) -> None:
        self.recipe = recipe
        self.value = value
        self.version = version
        self.used = False  # a recipe or a ticket refers to this version
        self.saves: list[Any] | None = None  # what autograd saved of it (tickets.Save)
        self.rare: Rare | None = None

    def contents(self) -> Tensor:
        """The memory itself, checked to be what it was when a recipe took hold of it."""
        value = self.value
        if value is None:
            raise ReplayMismatch(INTERRUPTED)
        if self.version is not None and value._version != self.version:
            if self.rare is not None and self.rare.copy is not None:
                return self.rare.copy
            raise RootChanged(changed_message(value, self.version))
        if self.version is not None and not value.untyped_storage().nbytes() and value.numel():
            raise RootChanged(
                f"a tensor of shape {tuple(value.shape)} is needed to recompute activations, but its memory was given "
                "back meanwhile, as sharded parameters are after use. Compute with it inside of the module that "
                "gathers it, or keep the results of the operations that read it."
            )
        if (
            self.version is not None
            and not value.untyped_storage().resizable()
            and not (self.rare is not None and self.rare.shared)
        ):
            raise RootChanged(
                f"a tensor of shape {tuple(value.shape)} was given to numpy after it was used, and may have been "
                "written there: it is needed to recompute activations. Give numpy a copy."
            )
        return value


class Rare:
    """What few buffers need to remember."""

    __slots__ = ("blank", "copy", "print", "shared", "site")

    def __init__(self) -> None:
        self.blank: frozenset[Any] | None = None  # of memory not yet written whole: the layouts written so far
        self.shared = False  # held memory that was mapped from elsewhere when it was first read: a weight
        self.copy: Tensor | None = None  # of held memory that was overwritten since, unless its version is put back
        self.print: int | None = None  # fingerprint of the contents, while they are being proven
        self.site: Any = None  # where it was made, while it is being proven


def rare(buffer: Buffer) -> Rare:
    """The rare part of ``buffer``, made on first use."""
    if buffer.rare is None:
        buffer.rare = Rare()
    return buffer.rare


def blank(buffer: Buffer) -> frozenset[Any] | None:
    """The layouts written so far of memory that was never seen being written whole; None of any other."""
    return None if buffer.rare is None else buffer.rare.blank


def changed_message(value: Tensor, version: int) -> str:
    """Say which tensor was changed under the feet of a recomputation, and what to do about it."""
    return (
        f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype} was modified in place between forward and "
        f"backward: it is at version {value._version}, but version {version} is needed to recompute activations. "
        "Run backward before changing it (an optimizer step, an update of a buffer, a clip), or keep the results "
        "of the operations that read it."
    )


def layout_of(tensor: Tensor) -> Layout:
    """How ``tensor`` lies in its storage."""
    bits = 2 if tensor.is_neg() else 0
    if tensor.is_conj():
        bits += 1
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, bits)


_layouts: dict[Layout, Layout] = {}
_MANY_LAYOUTS = 4096


def shared_layout(tensor: Tensor) -> Layout:
    """``layout_of``, one and the same for all that lie alike: a long tape has few of them."""
    layout = layout_of(tensor)
    if len(_layouts) > _MANY_LAYOUTS:
        _layouts.clear()
    try:
        return _layouts.setdefault(layout, layout)
    except TypeError:  # symbolic sizes have no hash
        return layout


def place(value: Tensor, layout: Layout) -> Tensor:
    """A view of ``value``'s storage laid out as ``layout``."""
    size, stride, offset, dtype, bits = layout
    if not bits and value.dtype is dtype:
        if value.shape == size and value.stride() == stride and value.storage_offset() == offset:
            return value
        return value.as_strided(size, stride, offset)
    base = torch.empty(0, dtype=dtype, device=value.device)
    base.set_(value.untyped_storage(), offset, size, stride)
    if bits & 1:
        base = torch._conj(base)
    if bits & 2:
        base = torch._neg_view(base)
    return base


def shifted(layout: Layout, shift: int) -> Layout:
    """``layout``, ``shift`` bytes further on in its storage."""
    size, stride, offset, dtype, bits = layout
    return (size, stride, offset + shift // dtype.itemsize, dtype, bits)


def clone_storage(value: Tensor) -> Tensor:
    """A private copy of all of ``value``'s storage, laid out as ``value``."""
    whole, rest = divmod(value.untyped_storage().nbytes(), value.element_size())
    if not rest and not value.is_conj() and not value.is_neg():
        # Not by set_ where that can be avoided: a fake tensor that it is called on keeps both storages alive.
        copy = value.as_strided((whole,), (1,), 0).clone()
        return copy.as_strided(value.size(), value.stride(), value.storage_offset())
    storage = value.untyped_storage().clone()
    copy = torch.empty(0, dtype=value.dtype, device=value.device)
    return copy.set_(storage, value.storage_offset(), value.size(), value.stride())


_detach = torch.ops.aten.detach.default._handle.redispatch_boxed
_keysets: dict[torch.device, Any] = {}
_plain: dict[type, bool] = {}


def dispatches(kind: type) -> bool:
    """Whether tensors of this class take operations into their own hands (DTensor, FakeTensor, ...)."""
    known = _plain.get(kind)
    if known is None:
        own = getattr(kind, "__torch_dispatch__", None)
        known = _plain[kind] = own is not Tensor.__torch_dispatch__
    return known


def alias(tensor: Tensor) -> Tensor:
    """A detached alias that shares the version counter, made below autograd.

    Plain ``detach`` below autograd gives a fresh counter; the ADInplaceOrView kernel is what shares it.
    """
    if dispatches(type(tensor)) or tensor.is_inference():
        return tensor.detach()
    keys = _keysets.get(tensor.device) or _keyset(tensor.device)
    return _detach(keys, tensor)


def _keyset(device: torch.device) -> Any:
    backend = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device.type))
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView) | torch._C.DispatchKeySet(backend)
    _keysets[device] = keys
    return keys


def hold(tensor: Tensor, storage: torch.UntypedStorage) -> Buffer:
    """The buffer that holds ``storage``'s present contents for recipes to read.

    Memory shared with the world outside torch (numpy, other processes) is copied: nobody sees it being written.
    """
    held: list[weakref.ref[Buffer]] | None = getattr(storage, HELD, None)
    try:
        version: int | None = tensor._version
    except RuntimeError:  # an inference tensor has none
        version = None
    live = []
    if held is not None:
        for ref in held:
            buffer = ref()
            if buffer is not None:
                if buffer.version == version:
                    return buffer
                live.append(ref)
    if not storage.resizable() and not _is_weight(tensor):
        return _snapshot(tensor, storage)
    value = alias(tensor)
    if value.is_conj():  # layouts add lazy bits; what a buffer holds never has them
        torch._C._set_conj(value, False)
    if value.is_neg():
        torch._C._set_neg(value, False)
    if type(tensor).__name__ == "FakeTensor":  # its alias counts versions of its own; writes copy it all the same
        version = value._version
    buffer = Buffer(None, value, version if version is None or value._version == version else None)
    register(buffer, storage, live)
    return buffer


def register(buffer: Buffer, storage: torch.UntypedStorage, others: list[weakref.ref[Buffer]] | None = None) -> None:
    """Let those who write ``storage`` know that ``buffer`` holds its contents, as ``others`` do."""
    if not storage.resizable():
        rare(buffer).shared = True
    if others is None:
        others = [ref for ref in getattr(storage, HELD, ()) if ref() is not None]
    others.append(weakref.ref(buffer))
    setattr(storage, HELD, others)


def _is_weight(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter or a view of one: those may be mapped from a file, but nobody writes it."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def _snapshot(tensor: Tensor, storage: torch.UntypedStorage) -> Buffer:
    """A private copy of memory that code outside torch may write, shared by reads between which nobody did."""
    if dispatches(type(tensor)):
        return Buffer(None, tensor.detach())
    ref: weakref.ref[Buffer] | None = getattr(storage, _SNAPSHOT, None)
    known = ref() if ref is not None else None
    if known is not None and known.value is not None and torch.equal(_bytes(known.value), _bytes(tensor)):
        return known
    buffer = Buffer(None, clone_storage(tensor))
    setattr(storage, _SNAPSHOT, weakref.ref(buffer))
    return buffer


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def release_held(storage: torch.UntypedStorage, written: Tensor, *, declared: bool = True) -> None:
    """Copy what recipes hold of ``storage``, which is about to be overwritten through ``written``.

    Tickets of recordings that are over hear of it too, if autograd counts a version (``declared``) or not.

    A trainable leaf whose version does not move in the end (sharded parameters that are gathered again into the
    same memory put it back) is read live; for it the copy is only the second choice.
    """
    if hasattr(storage, SAVED):
        _tell_saves(storage, written, declared)
    held: list[weakref.ref[Buffer]] | None = getattr(storage, HELD, None)
    if held is None:
        return
    leaf = written.requires_grad and written.is_leaf
    copy: Tensor | None = None
    for ref in held:
        buffer = ref()
        if buffer is None or buffer.value is None or buffer.version is None:
            continue
        if buffer.value._version != buffer.version:
            continue  # already changed unseen: refused when it is read
        copy = clone_storage(buffer.value) if copy is None else copy
        if leaf:
            rare(buffer).copy = place(copy, layout_of(buffer.value))
        else:
            buffer.value = place(copy, layout_of(buffer.value))
            buffer.version = None
    if not leaf:
        delattr(storage, HELD)


def _tell_saves(storage: torch.UntypedStorage, written: Tensor, declared: bool) -> None:
    held: Buffer | None = None
    for save in getattr(storage, SAVED):
        if declared and not save.stale:
            save.written_through(written)
        if not save.stale:
            held = held or Buffer(None, alias(written))
            save.move(held)


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
        held = Buffer(None, alias(tensor))
        for save in buffer.saves:
            save.move(held)
