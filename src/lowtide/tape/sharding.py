"""Sharded parameters: memory that is gathered before a module runs, and given back after it, in forward and backward.

    forward    gather A | A runs | give back A   gather B | B runs | give back B
    backward   gather B | B's backward, replays of what B made | give back B   gather A | ...

A module whose parameters come and go together is a unit. What one unit made is never replayed for another: when it is
read or saved elsewhere it is kept. Then a replay reads only parameters that are there, and nothing is gathered for it.
Gathering and giving back run outside of the recording: they fill parameters with what they had before.
"""

from __future__ import annotations

import sys
import threading
from functools import wraps
from typing import TYPE_CHECKING, Any

from lowtide.tape.buffers import MADE, Buffer, blank, expose
from lowtide.tape.replay import pause, tapes
from lowtide.tape.tickets import keep_now

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

_FSDP2 = ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule")
_UNITS = [
    _FSDP2,
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
]
"""Classes whose modules are units: where they are defined, and their names."""

_MOVERS = [
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "FSDPParamGroup",
        ("unshard", "wait_for_unshard", "reshard"),
    ),
    (
        "torch.distributed.fsdp._flat_param",
        "FlatParamHandle",
        ("pre_unshard", "unshard", "post_unshard", "reshard", "post_reshard"),
    ),
]
"""Methods that gather parameters or give them back."""


class Sharding:
    """Lets the movers run outside of recordings while anybody records; knows the classes of units."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._replaced: list[tuple[type, str, Any]] = []
        self.units: tuple[type, ...] = ()

    def start(self) -> None:
        """Somebody begins to record."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self.units = tuple(kind for module, name in _UNITS if (kind := _loaded(module, name)) is not None)
                for module, name, methods in _MOVERS:
                    kind = _loaded(module, name)
                    for method in methods if kind is not None else ():
                        self._replace(kind, method)  # type: ignore[arg-type]

    def stop(self) -> None:
        """End what ``start`` began."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for kind, method, original in self._replaced:
                    setattr(kind, method, original)
                self._replaced = []

    def _replace(self, kind: type, method: str) -> None:
        original = kind.__dict__.get(method)
        if original is not None:
            self._replaced.append((kind, method, original))
            setattr(kind, method, _outside(original))


def _loaded(module: str, name: str) -> type | None:
    """A class, if the module that defines it has been imported; nobody can use it otherwise."""
    return getattr(sys.modules.get(module), name, None)


def class_name(module: Module) -> str:
    """The name of ``module``'s class before FSDP2 put another in its place, so that one plan serves both."""
    kind = type(module)
    return kind.__bases__[-1].__name__ if _loaded(*_FSDP2) in kind.__bases__ else kind.__name__


def _outside(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        pause(1)
        try:
            return original(*args, **kwargs)
        finally:
            pause(-1)
            for mode in tapes():
                mode.moved(args[0])

    return run


def gathered(mover: Any) -> list[Tensor]:
    """The whole parameters that a mover fills and empties; those given back have no memory."""
    if type(mover).__name__ == "FSDPParamGroup":
        return [tensor for parameter in mover.fsdp_params for tensor in parameter.all_gather_outputs]
    flat = getattr(mover.flat_param, "_full_param_padded", None)
    return [] if flat is None else [flat]


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that is on this rank; any other tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def keep_across(tensor: Tensor, unit: object) -> None:
    """Keep what ``tensor`` holds if another unit made it than ``unit``, which is about to use it."""
    storage = tensor.untyped_storage()
    buffer: Buffer | None = getattr(storage, MADE, None)
    if buffer is None or buffer.recipe is None or buffer.recipe.unit is unit:
        return
    missing = blank(buffer)
    if missing is None:
        delattr(storage, MADE)
        keep_now(tensor, storage, buffer)
    elif missing:
        expose(storage, tensor)  # written in part; memory that nobody has written yet needs no parameter


sharding = Sharding()
