"""The ways to run a part of a step, and what a test says about them.

A program takes a way, builds everything anew, runs ``way(function, *args, **kwargs)`` where a person would put a
checkpoint, runs backward, and returns all that counts. Two runs agree only if every bit does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from harness import attached, dirty_memory, freeze

Way = Callable[..., Any]
Program = Callable[[Way], object]

SEEN_ON = ("2.13",)
"""Releases of torch on which the troubles of its own checkpoint were seen; on others they are not asked for."""

tried = torch.__version__.startswith(SEEN_ON)


def plainly(function: Way, *args: Any, **kwargs: Any) -> Any:
    """No checkpoint at all: what every other way has to agree with."""
    return function(*args, **kwargs)


def torchs(function: Way, *args: Any, **kwargs: Any) -> Any:
    """Torch's checkpoint as its documentation recommends it."""
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def reentrant(function: Way, *args: Any, **kwargs: Any) -> Any:
    """Torch's older checkpoint, which many trainers still choose."""
    return checkpoint(function, *args, use_reentrant=True, **kwargs)


def ours(function: Way, *args: Any, **kwargs: Any) -> Any:
    """The drop-in."""
    return lowtide.checkpoint(function, *args, **kwargs)


def recorded(function: Way, *args: Any, **kwargs: Any) -> Any:
    """A recording that drops whatever may be dropped, the outputs included."""
    with lowtide.record(lowtide.policies.recompute_all):
        return function(*args, **kwargs)


def recorded_around_matmuls(function: Way, *args: Any, **kwargs: Any) -> Any:
    """A recording under the policy that most people would choose."""
    with lowtide.record(lowtide.policies.keep_matmuls):
        return function(*args, **kwargs)


OURS: tuple[Way, ...] = (ours, recorded, recorded_around_matmuls)


def outcome(program: Program, way: Way) -> object:
    """What the program leaves behind when it runs this way, from the same random state."""
    torch.manual_seed(0)
    before = attached()
    seen = freeze(program(way))
    assert attached() == before
    return seen


def exact(program: Program, *ways: Way) -> None:
    """Lowtide's ways leave behind exactly what the plain step does."""
    wanted = outcome(program, plainly)
    assert outcome(program, plainly) == wanted, "the plain step does not repeat itself"
    for way in ways or OURS:
        seen = outcome(program, way)
        assert seen == wanted, f"{getattr(way, '__name__', way)}: {difference(seen, wanted)}"


def difference(seen: object, wanted: object, where: str = "") -> str:
    """The first place in which two outcomes differ."""
    if isinstance(seen, list | tuple) and isinstance(wanted, list | tuple) and len(seen) == len(wanted):
        for place, (one, other) in enumerate(zip(seen, wanted, strict=True)):
            if one != other:
                return difference(one, other, f"{where}[{place}]")
    return f"{where}: {str(seen)[:200]} instead of {str(wanted)[:200]}"


def torch_differs(program: Program, way: Way = torchs) -> None:
    """Torch's way silently leaves something else behind."""
    if tried:
        assert outcome(program, way) != outcome(program, plainly), "torch no longer shows this trouble"


def torch_raises(program: Program, match: str, way: Way = torchs, error: type[Exception] = RuntimeError) -> None:
    """Torch's way stops with an error where the plain step goes through."""
    if tried:
        with pytest.raises(error, match=match):
            program(way)


def without_rng_state(way: Way) -> Way:
    """The same way with ``preserve_rng_state=False``, as many recipes have it for speed."""
    return partial(way, preserve_rng_state=False)


def finish(loss: Tensor, *between: Callable[[], object]) -> None:
    """What happens between forward and backward, garbage in freed memory included, then backward."""
    for happening in between:
        happening()
    squatters = dirty_memory()
    loss.backward()
    del squatters


def grads(*owners: nn.Module | Tensor) -> list[Tensor | None]:
    """The gradients of tensors and of the parameters of modules."""
    tensors = [t for owner in owners for t in (owner.parameters() if isinstance(owner, nn.Module) else [owner])]
    return [tensor.grad for tensor in tensors]
