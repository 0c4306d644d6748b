"""Random state: what an operator drew from, put back for its replay, and restored afterwards."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lowtide.tape.operators import Operator, argument

State = tuple[torch.device, Tensor]

_CPU = torch.device("cpu")
watchers: list[Callable[[Tensor], object]] = []
"""Told of each copy of a state: they count bytes, and no dispatch mode sees these."""


def get_state(device: torch.device) -> Tensor:
    """The state of ``device``'s default generator."""
    if device.type == "cpu":
        state = torch.default_generator.get_state()
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    for watch in watchers:
        watch(state)
    return state


def digest(state: Tensor) -> bytes:
    """A few bytes that tell states apart."""
    data = ctypes.string_at(state.data_ptr(), state.numel())  # not by numpy, which a recorder sees
    return hashlib.blake2b(data, digest_size=16).digest()


def set_state(device: torch.device, state: Tensor) -> None:
    """Put ``device``'s default generator into ``state``."""
    if device.type == "cpu":
        torch.default_generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def devices_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.device]:
    """The devices whose generators an operator with these arguments can draw from."""
    devices: set[torch.device] = set()
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            devices.add(value.device)
        elif isinstance(value, torch.device):
            devices.add(value)
        elif isinstance(value, (list, tuple)):
            devices |= {item.device for item in value if isinstance(item, Tensor)}
    devices = {device for device in devices if device.type != "meta"}
    return devices or {_CPU}


def drawn(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The random state that an operation is about to draw from: default generators, or those it is given."""
    if op.chance is not None and not argument(op.chance, args, kwargs):
        return None
    given = [
        (where, value, value.get_state())
        for where, value in (*enumerate(args), *kwargs.items())
        if isinstance(value, torch.Generator)
    ]
    if given:
        return None, given
    return states_of(devices_of(args, kwargs)), None


def states_of(devices: Iterable[torch.device]) -> tuple[State, ...]:
    """The present states of the default generators of ``devices``."""
    return tuple((device, get_state(device)) for device in devices)


def enter(states: tuple[State, ...]) -> tuple[State, ...]:
    """Put the default generators into ``states``; returns the states before, for ``leave``."""
    before = tuple((device, get_state(device)) for device, _ in states)
    for device, state in states:
        set_state(device, state)
    return before


def leave(before: Iterable[State]) -> None:
    """Put back what ``enter`` found, as if nothing had been drawn since."""
    for device, state in before:
        set_state(device, state)


def twin(generator: torch.Generator, state: Tensor) -> torch.Generator:
    """A throw-away generator on the same device in ``state``."""
    copy = torch.Generator(generator.device)
    copy.set_state(state)
    return copy
