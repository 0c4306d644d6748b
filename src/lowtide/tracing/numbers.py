"""Numbers that autograd saves: of ``x * 0.5`` it keeps a tensor of eight bytes, and shows it to no hook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.tape.operators import Operator

_SAVE_FACTORS = frozenset({"aten.mul", "aten.mul_", "aten.div", "aten.div_"})
"""Operators whose derivatives need a number that stood in a tensor's place; see derivatives.yaml of PyTorch."""
_BYTES: dict[type, int] = {bool: 1, int: 8, float: 8, complex: 16}

_next_node = torch._C._autograd._get_sequence_nr
_running = torch._C._current_autograd_node


def number_bytes(op: Operator, args: tuple[Any, ...]) -> int:
    """Bytes that the autograd node of an operation keeps for a number among its arguments."""
    tensors = op.overload.startswith("Tensor")  # other overloads save the number as such
    if op.name not in _SAVE_FACTORS or not tensors or len(args) < 2 or not torch.is_grad_enabled():
        return 0
    one, other = args[:2]
    number, tensor = (one, other) if isinstance(other, Tensor) else (other, one)
    if not isinstance(tensor, Tensor) or not tensor.requires_grad or tensor.device.type != "cpu":
        return 0  # elsewhere, it still lies in the host's memory
    return _BYTES.get(type(number), 0)


class SavedNumbers:
    """What was noted of nodes of the autograd graph, until they have run."""

    def __init__(self) -> None:
        self._noted: dict[int, int] = {}
        self._last = -1

    def note(self, value: int) -> None:
        """Note ``value`` of the node of the operation that is being dispatched."""
        self._noted[_next_node() - 1] = value

    def over(self) -> Iterator[int]:
        """Values of the node that was running at the last call, if another is running now."""
        node: Any = _running()
        number = -1 if node is None else node._sequence_nr()
        if number != self._last:
            value = self._noted.pop(self._last, None)
            self._last = number
            if value is not None:
                yield value
