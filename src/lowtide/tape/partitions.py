"""Parameters of which each rank has a part, as under DeepSpeed's ZeRO-3: gathered, they lie in other memory each time.

    parameter.data      empty ─▶ memory 1 ─▶ empty ─▶ memory 2 ─▶ empty
                                 forward              backward
    Partitioned.value   given    memory 1    given    memory 2    given
                        back                 back                 back

A recipe must not hold memory 1: it would never be free. It holds the parameter, and reads what that has by then. Small
parameters that stay on every rank are not partitioned, and are held like any other.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lowtide.tape.buffers import HELD, Buffer, alias

_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"


class Partitioned(Buffer):
    """The contents of a partitioned parameter, wherever they lie when they are read."""

    __slots__ = ("fixed", "offset", "parameter", "shape")

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.shape = parameter.shape
        self.offset = parameter.storage_offset()
        super().__init__(None, None, parameter._version)

    @property
    def value(self) -> Tensor | None:
        """An alias of the parameter; memory of no bytes while it is given back."""
        if self.fixed is not None:
            return self.fixed
        parameter = self.parameter()
        if parameter is None:
            return None
        if not available(parameter):
            return _given_back(self.shape, parameter)
        if parameter.storage_offset() == self.offset:
            return alias(parameter)
        copy = parameter.new_empty(self.offset + parameter.numel())[self.offset :].view(self.shape)
        torch._C._autograd._unsafe_set_version_counter((copy.copy_(parameter.detach()),), (parameter._version,))
        return copy

    @value.setter
    def value(self, fixed: Tensor | None) -> None:
        self.fixed = fixed  # a copy, as the memory was about to be written


def _given_back(shape: torch.Size, parameter: Tensor) -> Tensor:
    nothing = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    nothing.untyped_storage().resize_(0)
    torch._C._autograd._unsafe_set_version_counter((nothing,), (parameter._version,))
    return nothing


def stands_for(parameter: Tensor) -> Partitioned:
    """What recipes hold that read ``parameter``, which has just been gathered."""
    buffer = Partitioned(parameter)
    storage = parameter.untyped_storage()
    setattr(storage, HELD, [weakref.ref(buffer), *getattr(storage, HELD, ())])
    return buffer


def is_partitioned(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter whose memory is another each time."""
    return hasattr(tensor, "ds_status")


def available(parameter: Any) -> bool:
    """Whether a partitioned parameter has been gathered, and will be given back."""
    return parameter.ds_status.name == "AVAILABLE" and not parameter.ds_persist and bool(parameter.numel())


def partitioned_parameters(owner: Any) -> list[Any]:
    """The partitioned parameters of a list, or those that are gathered for a module; of anything else none."""
    if isinstance(owner, Module):
        known = sys.modules[_COORDINATOR]
        owner = list(known.iter_params(owner, recurse=known.z3_leaf_module(owner)))
    return [one for one in owner if is_partitioned(one)] if isinstance(owner, list) else []


class _HasPartitions(type):
    def __instancecheck__(cls, module: Any) -> bool:
        return type(module._parameters).__name__ == "ZeROOrderedDict"


class PartitionedModule(metaclass=_HasPartitions):
    """Stands for the modules whose parameters DeepSpeed has partitioned; their class stays what it was."""
