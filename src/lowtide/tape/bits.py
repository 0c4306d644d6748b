"""Bits: a random draw of zeros and ones is remembered by its results, an eighth of a byte each.

A dropout mask on the CPU is as large as what it masks, and drawing it once more takes as long as a product of
matrices. Its bits take a thirty-second of a float's memory, and giving them back is a copy.

    mask (n,)      plane 0 | plane 1 | ... | plane 7        each of ceil(n / 8) values
    packed         bit 0     bit 1           bit 7          of the same ceil(n / 8) bytes
"""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide.tape.operators import Operator
from lowtide.tape.recipes import FullRecipe

SMALL = 4096
"""Up to so many values, a byte each: less than the state of the CPU's generator (5,056 bytes), and faster."""


def fits(op: Operator, args: tuple[Any, ...]) -> bool:
    """Whether the draw of ``op`` into its first argument is remembered by its results.

    On accelerators it is not: their random state is a few bytes, and drawing as fast as copying.
    """
    return op.two_valued and args[0].is_cpu and _flat(args[0]) is not None


def bytes_of(count: int) -> int:
    """Bytes that ``count`` zeros and ones take."""
    return count if count <= SMALL else -(-count // 8)


def pack(mask: Tensor) -> Tensor:
    """The zeros and ones of ``mask`` in (``bytes_of(mask.numel())``,) bytes."""
    flat = _flat(mask)
    assert flat is not None
    if flat.numel() <= SMALL:
        return _is_one(flat)
    packed = flat.new_zeros(bytes_of(flat.numel()), dtype=torch.uint8)
    for plane in reversed(flat.split(packed.numel())):
        packed.add_(packed)
        packed[: plane.numel()].bitwise_or_(_is_one(plane))
    return packed


def put(mask: Tensor, packed: Tensor) -> Tensor:
    """Write the zeros and ones in ``packed`` into ``mask``, as the draw did."""
    flat = _flat(mask)
    assert flat is not None
    if flat.numel() <= SMALL:
        flat.copy_(packed)
        return mask
    for bit, plane in enumerate(flat.split(packed.numel())):
        plane.copy_(packed[: plane.numel()].bitwise_and(1 << bit).ne_(0))
    return mask


def remember(recipe: FullRecipe, packed: Any, layout: Any) -> None:
    """Let ``recipe``, which drew zeros and ones into its first argument, put the ``packed`` ones there instead."""
    target = next(read for read in recipe.reads if read[0] == 0)
    recipe.op, recipe.args, recipe.kwargs = _putting(recipe.op), [None, None], None
    recipe.reads = [target, (1, packed, layout)]


def _is_one(values: Tensor) -> Tensor:
    # by its operator, which counters of memory know to make something: they take aten.to for a view
    return torch.ops.aten._to_copy.default(values, dtype=torch.bool).view(torch.uint8)


def _flat(mask: Tensor) -> Tensor | None:
    """``mask`` in one dimension, in the order of its memory; None if it has gaps or overlaps."""
    if not mask.is_contiguous():
        order = sorted(range(mask.dim()), key=mask.stride, reverse=True)
        mask = mask.permute(order)
        if not mask.is_contiguous():
            return None
    return mask.view(-1)


@cache
def _putting(op: Operator) -> Operator:
    """``op`` by name and in all that is known of it, which puts what was drawn instead of drawing."""
    other = copy(op)
    other.call = put
    return other
