"""Sharded parameters: memory that is gathered before a module runs, and given back after it, in forward and backward.

    forward    gather A | A runs | give back A   gather B | B runs | give back B
    backward   gather B | B's backward, replays of what B made | give back B   gather A | ...

A module whose parameters come and go together is a unit. Around an operation are the units whose modules run; in its
backward their parameters are there again. A recipe needs the units around it if it reads their parameters, and
otherwise what the recipes need whose results it reads. What is read or saved where a unit that it needs is not around
is kept. Then a replay reads only parameters that are there, and nothing is gathered for it.

    units      block ─┬─ up      h = up(x)       needs block, up      read by gelu, around which is block: kept
                      ├─ (gelu)  g = gelu(h)     needs nothing        dropped; replayed in the backward of down
                      └─ down    y = down(g)     needs block, down    kept

Gathering and giving back run outside of the recording: they fill parameters with what they had before.
"""

from __future__ import annotations

import sys
import threading
from functools import wraps
from typing import TYPE_CHECKING, Any

from lowtide.tape.buffers import MADE, Buffer, blank, expose
from lowtide.tape.partitions import available, is_partitioned, partitioned_parameters, stands_for
from lowtide.tape.replay import pause, tapes
from lowtide.tape.tickets import keep_now

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

    from lowtide.tape.recipes import Recipe

Units = frozenset[object]
"""Units by their homes."""

_FSDP2 = ("torch.distributed.fsdp._fully_shard._fully_shard", "FSDPModule")
_UNITS = [
    _FSDP2,
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("lowtide.tape.partitions", "PartitionedModule"),
]
"""Classes whose modules are units: where they are defined, and their names."""

_MOVERS = [
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "FSDPParamGroup",
        ("unshard", "wait_for_unshard", "reshard"),
        0,
    ),
    (
        "torch.distributed.fsdp._flat_param",
        "FlatParamHandle",
        ("pre_unshard", "unshard", "post_unshard", "reshard", "post_reshard"),
        0,
    ),
    (
        "deepspeed.runtime.zero.parameter_offload",
        "DeepSpeedZeRoOffload",
        (
            "pre_sub_module_forward_function",
            "post_sub_module_forward_function",
            "pre_sub_module_backward_function",
            "post_sub_module_backward_function",
        ),
        1,
    ),
    ("deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator", ("reset_step",), 0),
    ("deepspeed.runtime.zero.partition_parameters", "Init", ("_all_gather", "_partition"), 1),
]
"""Methods that gather parameters or give them back, and which of their arguments says which parameters."""

_GATHERED = "_lowtide_gathered"


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
                for module, name, methods, owner in _MOVERS:
                    kind = _loaded(module, name)
                    for method in methods if kind is not None else ():
                        self._replace(kind, method, owner)  # type: ignore[arg-type]

    def stop(self) -> None:
        """End what ``start`` began."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for kind, method, original in self._replaced:
                    setattr(kind, method, original)
                self._replaced = []

    def _replace(self, kind: type, method: str, owner: int) -> None:
        original = kind.__dict__.get(method)
        if original is not None:
            self._replaced.append((kind, method, original))
            setattr(kind, method, _outside(original, owner))


def _loaded(module: str, name: str) -> type | None:
    """A class, if the module that defines it has been imported; nobody can use it otherwise."""
    return getattr(sys.modules.get(module), name, None)


def class_name(module: Module) -> str:
    """The name of ``module``'s class before FSDP2 put another in its place, so that one plan serves both."""
    kind = type(module)
    return kind.__bases__[-1].__name__ if _loaded(*_FSDP2) in kind.__bases__ else kind.__name__


def _outside(original: Callable[..., Any], owner: int) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        pause(1)
        try:
            return original(*args, **kwargs)
        finally:
            pause(-1)
            for tensor in gathered(args[owner]):
                _mark(tensor)
            for mode in tapes():
                mode.moved(args[owner])

    return run


def gathered(owner: Any) -> list[Tensor]:
    """The whole parameters that a mover fills and empties; those given back have no memory."""
    kind = type(owner).__name__
    if kind == "FSDPParamGroup":
        coming = owner._all_gather_result  # until it is waited for
        whole = [tensor for parameter in owner.fsdp_params for tensor in _of_fsdp(parameter)]
        return whole if coming is None else [*whole, coming.all_gather_output]
    if kind == "FlatParamHandle":
        flat = getattr(owner.flat_param, "_full_param_padded", None)
        return [] if flat is None else [flat]
    return [parameter for parameter in partitioned_parameters(owner) if available(parameter)]


def _of_fsdp(parameter: Any) -> list[Tensor]:
    whole = getattr(parameter, "_unsharded_param", None)
    return [*parameter.all_gather_outputs, *([local(whole)] if whole is not None else [])]


def _mark(tensor: Tensor) -> None:
    """Note that ``tensor``'s memory is given back after its unit has run."""
    storage = tensor.untyped_storage()
    if not hasattr(storage, _GATHERED):
        setattr(storage, _GATHERED, stands_for(tensor) if is_partitioned(tensor) else True)


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that is on this rank; any other tensor itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def needs(recipe: Recipe, around: Units | None) -> Units | None:
    """The units whose parameters a replay of ``recipe`` reads, which was made with those ``around``."""
    if around is None:
        return None
    found: Units = frozenset()
    for _, buffer, _ in recipe.reads:
        if buffer.recipe is not None:
            found |= buffer.recipe.needs or frozenset()
        elif buffer.value is not None and hasattr(buffer.value.untyped_storage(), _GATHERED):
            return around
    return found


def keep_across(tensor: Tensor, around: Units | None) -> None:
    """Keep what ``tensor`` holds if it needs another unit than those ``around`` whoever is about to use it."""
    storage = tensor.untyped_storage()
    buffer: Buffer | None = getattr(storage, MADE, None)
    if buffer is None or buffer.recipe is None or not buffer.recipe.needs or buffer.recipe.needs <= (around or set()):
        return
    missing = blank(buffer)
    if missing is None:
        delattr(storage, MADE)
        keep_now(tensor, storage, buffer)
    elif missing:
        expose(storage, tensor)  # written in part; memory that nobody has written yet needs no parameter


sharding = Sharding()
