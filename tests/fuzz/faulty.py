"""Recorders that are wrong on purpose: what the search, the shrinker and the campaign are tried on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .programs import Setting
from .recorders import Policy, Recorder

BROKEN_OP = "aten.tanh"


@dataclasses.dataclass(frozen=True)
class Op:
    name: str


class Watch(TorchDispatchMode):
    """Ask the policy about every op, and call `found` with the results of each broken op that it drops."""

    def __init__(self, policy: Policy, found: Callable[[Any], object]) -> None:
        super().__init__()
        self.policy, self.found = policy, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, then ask."""
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if not self.policy(Op(name)) and name == BROKEN_OP:
            self.found(result)
        return result


@contextlib.contextmanager
def perturbing(policy: Policy) -> Iterator[None]:
    """Give back every dropped result of the broken op a little too large."""
    wrong: dict[int, Tensor] = {}

    def remember(result: Tensor) -> None:
        wrong[result.data_ptr()] = result

    def pack(saved: Tensor) -> tuple[Tensor, bool]:
        return saved, saved.data_ptr() in wrong

    def unpack(packed: tuple[Tensor, bool]) -> Tensor:
        saved, is_wrong = packed
        return saved * 1.01 if is_wrong else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), Watch(policy, remember):
        yield


def perturbing_recorder(setting: Setting) -> Recorder:
    """Make gradients wrong wherever the broken op is dropped."""
    return Recorder(dataclasses.replace(setting, one_recording=False), perturbing)


def raising_recorder(setting: Setting) -> Recorder:
    """Raise where the broken op is dropped."""

    def fail(result: Any) -> None:
        raise NotImplementedError(f"{BROKEN_OP} with {len(tree_leaves(result))} results")

    return Recorder(dataclasses.replace(setting, one_recording=False), lambda policy: Watch(policy, fail))


def dying_recorder(setting: Setting) -> Recorder:
    """End the process where the broken op is dropped."""
    only_once = dataclasses.replace(setting, one_recording=False)
    return Recorder(only_once, lambda policy: Watch(policy, lambda result: os._exit(9)))


class Clinging(Watch):
    """Stay attached after the end of the `with`."""

    def __exit__(self, *exception: object) -> None:
        return None


def clinging_recorder(setting: Setting) -> Recorder:
    """Leave a dispatch mode behind."""
    only_once = dataclasses.replace(setting, one_recording=False)
    return Recorder(only_once, lambda policy: Clinging(policy, lambda result: None))
