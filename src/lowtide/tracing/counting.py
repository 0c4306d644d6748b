"""Count the bytes that live tensors hold while a program runs, for real or on fake tensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SEEN = "_lowtide_counted"


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that knows the bytes of all storages made inside it and when each of them dies.

    Counts what the dispatcher sees: results of operations, not the scratch memory inside a kernel. Enter it
    outside of a recording, so that replayed operations pass through it as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._counts: dict[weakref.ref[Any], int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in (out,) if isinstance(out, Tensor) else out if isinstance(out, (list, tuple)) else ():
            if isinstance(result, Tensor):
                self.see(result)
        return out

    def ignore(self, tensor: Tensor) -> None:
        """Leave out the memory of ``tensor``, which was there before."""
        setattr(tensor.untyped_storage(), _SEEN, self)

    def see(self, tensor: Tensor) -> None:
        """Count the memory of ``tensor`` if it is new."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse
            return
        if getattr(storage, _SEEN, None) is self:
            return
        setattr(storage, _SEEN, self)
        size = storage.nbytes()
        ref = weakref.ref(storage, self._dead)
        self._counts[ref] = size
        self.live += size
        self.peak = max(self.peak, self.live)

    def _dead(self, ref: weakref.ref[Any]) -> None:
        self.live -= self._counts.pop(ref, 0)


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the storage behind ``tensor``."""
    return tensor.untyped_storage().nbytes()


def distinct_bytes(tensors: Any) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    return sum({id(t.untyped_storage()): storage_bytes(t) for t in tensors if t.layout is torch.strided}.values())
