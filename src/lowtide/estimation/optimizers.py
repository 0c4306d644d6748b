"""Optimizers as numbers: what their states take, what their step takes for a moment, and what memory it moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from lowtide.estimation.setups import SetupError, Tensor

EIGHT_BIT_FROM = 4096
"""bitsandbytes keeps the states of smaller tensors in float32."""
QUANTIZED_BLOCK = 256
"""Elements that share one float32 scale."""


@dataclass(frozen=True)
class Optimizer:
    """``state`` gives the bytes of a parameter's states, ``step`` those that its step holds for a moment.

    ``whole`` says whether that happens for all parameters at once, or for one after the other. ``passes`` is how
    many times the step reads or writes as many bytes as the parameters have.
    """

    state: Callable[[Tensor], float]
    passes: float
    step: Callable[[Tensor], float] = lambda tensor: 0
    whole: bool = True
    remark: str = ""


def _states(count: int) -> Callable[[Tensor], float]:
    return lambda tensor: count * tensor.bytes


def _eight_bit(count: int) -> Callable[[Tensor], float]:
    def state(tensor: Tensor) -> float:
        if tensor.count < EIGHT_BIT_FROM:
            return count * 4 * tensor.count
        return count * (tensor.count + 4 * math.ceil(tensor.count / QUANTIZED_BLOCK))

    return state


def _factored(tensor: Tensor) -> float:
    if len(tensor.shape) < 2:
        return 4 * tensor.count
    *outer, rows, columns = tensor.shape
    return 4 * math.prod(outer) * (rows + columns)


def _one_copy(tensor: Tensor) -> float:
    return tensor.bytes


_FOREACH = "PyTorch's default on accelerators handles all parameters at once and holds one copy of them meanwhile"
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(_states(2), 20, _one_copy, remark=_FOREACH),
    "adamw-fused": Optimizer(_states(2), 7),
    "adamw-8bit": Optimizer(_eight_bit(2), 4, remark="8-bit states as bitsandbytes keeps them, blocks of 256"),
    "sgd": Optimizer(_states(0), 5, _one_copy, remark="with weight decay, all parameters at once"),
    "sgd-momentum": Optimizer(_states(1), 8, _one_copy, remark="with weight decay, all parameters at once"),
    "adafactor": Optimizer(_factored, 10, _one_copy, whole=False, remark="factored states, as torch.optim.Adafactor"),
    "lion": Optimizer(_states(1), 9, _one_copy, whole=False),
}
"""By name. Passes of adamw: three in ``lerp``, two each in the scalings, five in ``addcmul``, four in ``addcdiv``."""


def optimizer(name: str) -> Optimizer:
    """The optimizer of that name.

    Raises:
        SetupError: there is none.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    close = get_close_matches(name, OPTIMIZERS, n=1)
    nearest = f" Nearest: {close[0]}." if close else ""
    raise SetupError(f"Unknown optimizer {name!r}.{nearest} Known: {', '.join(OPTIMIZERS)}.")


def state_bytes(name: str, trained: Iterable[Tensor]) -> int:
    """Bytes of the optimizer's states once it has made a step."""
    own = optimizer(name)
    return round(sum(own.state(tensor) for tensor in trained))


def step_bytes(name: str, trained: Iterable[Tensor], *, foreach: bool = True) -> int:
    """Bytes that the optimizer's step holds for a moment, besides parameters, gradients and states."""
    own = optimizer(name)
    pieces = [own.step(tensor) for tensor in trained]
    return round(sum(pieces) if own.whole and foreach else max(pieces, default=0))


def step_traffic(name: str, trained: Iterable[Tensor]) -> float:
    """Bytes that the optimizer's step reads and writes."""
    own = optimizer(name)
    return own.passes * sum(tensor.bytes for tensor in trained)
