"""Count the bytes that live tensors hold while a program runs, for real or on fake tensors."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.tape.operators import operator
from lowtide.tape.sharding import local
from lowtide.tape.transcript import QUESTIONS
from lowtide.tracing.kernels import bytes_of, flops_of, workspace_of
from lowtide.tracing.numbers import SavedNumbers, number_bytes
from lowtide.tracing.workspaces import device_of, run_measured

_SEEN = "_lowtide_counted"


class CallCount(TorchFunctionMode):
    """Counts the calls of torch's functions that a followed step compares."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func not in QUESTIONS
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that knows the bytes of all storages made inside it and when each of them dies.

    Counts what the dispatcher sees, results of operations, and with ``workspaces`` what kernels take for themselves:
    on fake tensors as far as trying them tells. Enter it outside of a recording, so that replayed operations pass
    through it as well. What operations read that was not made inside is counted on its own, in ``inputs``.
    """

    def __init__(self, *, workspaces: bool = False, fake: bool = False) -> None:
        super().__init__()
        self.workspaces = workspaces
        self.fake = fake
        self.live = 0
        self.peak = 0
        self.inputs = 0
        self.numbers = SavedNumbers()
        self._counts: dict[weakref.ref[Any], int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, Tensor):
                    self.note(tensor)
        for saved in self.numbers.over():
            self.live -= saved
        saved = number_bytes(operator(func), args)
        if saved:
            self.numbers.note(saved)
        self.live += saved
        out, workspace = self._run(func, args, kwargs)
        # A view of a real tensor among fakes is a view of a fake that was never seen.
        see = self.ignore if func.is_view else self.see
        for result in (out,) if isinstance(out, Tensor) else out if isinstance(out, (list, tuple)) else ():
            if isinstance(result, Tensor):
                see(result)
        self.peak = max(self.peak, self.live + workspace)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
        if not self.workspaces or func.is_view:
            return func(*args, **kwargs), 0
        if not self.fake:
            return run_measured(partial(func, *args, **kwargs), device_of(args, kwargs))
        out, op = func(*args, **kwargs), operator(func)
        flops, size = flops_of(op, args, kwargs, out), bytes_of(args, kwargs, out)
        return out, workspace_of(op, args, kwargs, flops=flops, bytes=size) or 0

    def ignore(self, tensor: Tensor) -> None:
        """Leave out the memory of ``tensor``, which was there before."""
        storage = _storage(tensor)
        if storage is not None:
            setattr(storage, _SEEN, self)

    def note(self, tensor: Tensor) -> None:
        """Count the memory of ``tensor`` as an input if it was not made here."""
        storage = _storage(tensor)
        if storage is not None and getattr(storage, _SEEN, None) is not self:
            setattr(storage, _SEEN, self)
            self.inputs += storage.nbytes()

    def see(self, tensor: Tensor) -> None:
        """Count the memory of ``tensor`` if it is new."""
        storage = _storage(tensor)
        if storage is None or getattr(storage, _SEEN, None) is self:
            return
        setattr(storage, _SEEN, self)
        size = storage.nbytes()
        ref = weakref.ref(storage, self._dead)
        self._counts[ref] = size
        self.live += size
        self.peak = max(self.peak, self.live)

    def _dead(self, ref: weakref.ref[Any]) -> None:
        self.live -= self._counts.pop(ref, 0)


def _storage(tensor: Tensor) -> Any:
    try:
        return local(tensor).untyped_storage()
    except NotImplementedError:  # sparse
        return None


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the storage behind ``tensor``."""
    return local(tensor).untyped_storage().nbytes()


def distinct_bytes(tensors: Any) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    strided = [local(t) for t in tensors if t.layout is torch.strided]
    return sum({t.untyped_storage()._cdata: storage_bytes(t) for t in strided}.values())
