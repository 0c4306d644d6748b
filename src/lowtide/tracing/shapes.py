"""Shapes on fake tensors where torch's own rule refuses what the CPU computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

Rule = Callable[..., Any]
"""Takes the operation, its arguments, and which tensors have values."""


def grouped_product(func: Any, args: Any, kwargs: Any, knows: Callable[[Tensor], bool]) -> Any:
    """Products of groups in any dtype: torch's rule is an accelerator's."""
    first = args[0]
    if first.dtype is torch.bfloat16 or first.device.type != "cpu":
        return func(*args, **kwargs)
    lower = [t.to(torch.bfloat16) if isinstance(t, Tensor) and t.is_floating_point() else t for t in args]
    out = func(*lower, **{key: value for key, value in kwargs.items() if key != "out_dtype"})
    return torch.empty(out.shape, dtype=first.dtype)


def alignment_loss(func: Any, args: Any, kwargs: Any, knows: Callable[[Tensor], bool]) -> Any:
    """The loss of CTC, and what backward needs: as long as the longest target."""
    scores, _, _, lengths, *_ = args
    if not knows(lengths) or scores.dim() != 3:
        return func(*args, **kwargs)
    with unset_fake_temporarily():
        longest = int(lengths.max())
    steps, batch, _ = scores.shape
    return scores.new_empty(batch), scores.new_empty(batch, steps, 2 * longest + 1)


def by_mask(func: Any, args: Any, kwargs: Any, knows: Callable[[Tensor], bool]) -> Any:
    """Indexing by masks whose values are known: by the places where they are true."""
    source, indices = args
    known: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool and knows(index):
            with unset_fake_temporarily():
                known += index.nonzero().unbind(1)
        else:
            known.append(index)
    return func(source, known, **kwargs)


def selected(func: Any, args: Any, kwargs: Any, knows: Callable[[Tensor], bool]) -> Any:
    """What a mask whose values are known selects: as many as it has places."""
    source, mask = args
    if not knows(mask):
        return func(*args, **kwargs)
    with unset_fake_temporarily():
        shape = torch.broadcast_shapes(source.shape, mask.shape)
        count = int(mask.expand(shape).count_nonzero())
    return source.new_empty(count)


RULES: dict[str, Rule] = {
    "aten._grouped_mm.default": grouped_product,
    "aten._ctc_loss.Tensor": alignment_loss,
    "aten.index.Tensor": by_mask,
    "aten.masked_select.default": selected,
}
