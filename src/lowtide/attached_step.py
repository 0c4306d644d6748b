"""One training step of an attached model, as seen from its calls.

model(x)    call 0 ─┐ all recorded under one plan, or watched by one tracer;
model(y)    call 1 ─┤ module calls are counted on from one to the next
loss.backward()     ┘ reaches one of the calls: the next call begins a new step
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.step_count import StepCount
from lowtide.tape.operators import tensors_in
from lowtide.tape.sites import Counts
from lowtide.tracing.observing import Observation

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """What decides beside shapes how much memory a call needs."""

    trainable: int
    trainable_bytes: int
    device: str
    autocast: tuple[Any, ...]
    element_bytes: tuple[int, ...]
    """Of the tensors that the call is given."""


@dataclass(frozen=True)
class Call:
    """One call of an attached model: which of them, in which setting, with tensors of which shapes."""

    model: int
    setting: Setting
    shapes: tuple[Shape, ...]

    def __str__(self) -> str:
        return ", ".join("x".join(map(str, shape)) for shape in self.shapes) or "no tensors"

    def fraction_of(self, other: Call) -> float:
        """The share of the elements of ``other``; infinite if it is another kind of call, or larger anywhere."""
        if (self.model, self.setting) != (other.model, other.setting) or len(self.shapes) != len(other.shapes):
            return math.inf
        shares = [_share(*pair) for pair in zip(self.shapes, other.shapes, strict=True)]
        return max(shares, default=1.0)


def _share(shape: Shape, other: Shape) -> float:
    if len(shape) != len(other) or any(a > b for a, b in zip(shape, other, strict=True)):
        return math.inf
    return math.prod(a / b if b else 1.0 for a, b in zip(shape, other, strict=True))


def call_of(number: int, models: Sequence[nn.Module], args: Any, kwargs: Any) -> tuple[Call, bool]:
    """The call that is about to happen, and whether there are gradients that its own will be added to."""
    trainable = size = 0
    accumulates = False
    for model in models:
        for parameter in model.parameters():
            if parameter.requires_grad:
                trainable += 1
                size += 0 if nn.parameter.is_lazy(parameter) else parameter.nbytes
                accumulates = accumulates or parameter.grad is not None
    first = next(models[number].parameters(), None)
    device = first.device.type if first is not None else "cpu"
    tensors = tensors_in((args, kwargs))
    setting = Setting(trainable, size, device, _autocast(device), tuple(t.element_size() for t in tensors))
    return Call(number, setting, tuple(tuple(t.shape) for t in tensors)), accumulates


def _autocast(device: str) -> tuple[Any, ...]:
    kinds = {device, "cpu"} - {"meta"}
    return tuple((k, torch.get_autocast_dtype(k)) for k in sorted(kinds) if torch.is_autocast_enabled(k))


class Step:
    """The calls of one training step so far, and whether it is over."""

    def __init__(self, *, accumulates: bool, watched: Observation | None = None) -> None:
        self.calls: list[Call] = []
        self.counts = Counts()
        self.accumulates = accumulates
        self.watched = watched
        self.planned = True
        """Whether all its calls ran under a plan."""
        self.failed = False
        self.count: StepCount | None = None
        """Counts its memory, in the first step under a plan."""
        self.start = time.perf_counter()
        self.seconds = 0.0
        """From its first call to the end of its last backward pass."""
        self.reached: list[bool] = []
        self._signals: list[weakref.ref[_Signal]] = []
        self._blind = False

    @property
    def began_backward(self) -> bool:
        """Whether a backward pass has come to one of the calls."""
        return bool(self.reached)

    @property
    def over(self) -> bool:
        """Whether the next call begins a new step: backward came, or nothing is left that it could come to."""
        return (
            self.failed or self.began_backward or not (self._blind or any(ref() is not None for ref in self._signals))
        )

    @property
    def waiting(self) -> bool:
        """Whether a graph of one of its calls is alive that no backward pass has come to."""
        return any((signal := ref()) is not None and not signal.fired for ref in self._signals)

    def follow(self, output: Any) -> None:
        """Learn from the graph of a call's output when backward comes to it, and when it dies."""
        nodes = dict.fromkeys(t.grad_fn for t in tensors_in(output) if t.grad_fn is not None)
        if not nodes:
            self._blind = True
        for node in nodes:
            signal = _Signal(self.reached)
            node.register_prehook(signal)
            self._signals.append(weakref.ref(signal))


class _Signal:
    """Sits on a node of the autograd graph; must not hold the step, which may hold memory."""

    __slots__ = ("__weakref__", "fired", "reached")

    def __init__(self, reached: list[bool]) -> None:
        self.reached = reached
        self.fired = False

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.fired = True
        self.reached.append(True)
