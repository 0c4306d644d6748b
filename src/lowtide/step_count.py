"""Counting the memory of one real step of somebody else's loop, to set it beside the prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.interception import optimizers
from lowtide.tracing.counting import LiveBytes, distinct_bytes

_PLAIN = (Tensor, nn.Parameter)


class _Counter(LiveBytes):  # type: ignore[no-untyped-call]
    """Lets compiled code run compiled; what happens inside it is not counted."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class StepCount:
    """A context manager, entered for each part of a step, that knows the peak of what tensors held."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        weights = [t for model in models for t in (*model.parameters(), *model.buffers())]
        there = [*weights, *(t.grad for t in weights if t.grad is not None)]
        states = [s for one in optimizers.of(models) for state in one.state.values() for s in state.values()]
        there += [state for state in states if isinstance(state, Tensor)]
        self.states = states_of(models)
        self._resident = distinct_bytes({id(t): t for t in there}.values())
        self._counter = _Counter()
        for tensor in there:
            self._counter.ignore(tensor)

    @property
    def peak_bytes(self) -> int:
        """Most bytes so far: what the step made, what it read, parameters, gradients and optimizer states."""
        return self._counter.peak + self._counter.inputs + self._resident

    def __enter__(self) -> StepCount:
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self._counter.__exit__(*exc)  # type: ignore[no-untyped-call]


def states_of(models: Sequence[nn.Module]) -> int:
    """How many parameters have optimizer states."""
    return sum(len(optimizer.state) for optimizer in optimizers.of(models))


def countable(models: Sequence[nn.Module], inputs: Iterable[Tensor]) -> bool:
    """Whether a step can be counted: all tensors are plain, since wrapped ones have no storage to ask."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return False
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    return all(type(t) in _PLAIN and t.layout is torch.strided for t in (*tensors, *inputs))
