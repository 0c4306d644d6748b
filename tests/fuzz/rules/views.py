"""Views and aliases: the same memory under another shape, order, dtype or name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .drawing import (
    Choice,
    Draw,
    NoChoice,
    Part,
    Rule,
    among,
    axis,
    both,
    dims,
    full,
    numeric,
    one,
    pair,
    real,
    same_dtype,
    shape_of,
    single,
    tensor,
)


def _permutation(d: Draw, t: Any) -> str:
    order = list(range(t.dim()))
    d.rng.shuffle(order)
    return repr(order)


def _dim_of_size(least: int, *parts: Part) -> Callable[[Draw], Choice]:
    """Draw a tensor and a dimension of it that has at least `least` entries."""

    def choose(d: Draw) -> Choice:
        a = d.pick(dims(1))
        fitting = [i for i, n in enumerate(d[a].shape) if n >= least]
        if not fitting:
            raise NoChoice
        return (a,), (d.rng.choice(fitting), *(part(d, d[a]) for part in parts))

    return choose


def _strided(d: Draw) -> Choice:
    """Lay a random window over contiguous memory, sometimes with a stride that makes rows overlap."""
    a = d.pick(lambda t: full(t) and t.is_contiguous() and t.numel() >= 6)
    rows, row_stride = d.rng.choice([(2, 3), (2, 1), (3, 2), (2, 2)])
    most = (d[a].numel() - 1 - (rows - 1) * row_stride) // 1 + 1
    columns = d.rng.randrange(1, min(4, most) + 1)
    offset = d[a].storage_offset() + d.rng.randrange(0, most - columns + 1)
    return (a,), (f"({rows}, {columns})", f"({row_stride}, 1)", offset)


def _regrouped(d: Draw) -> Choice:
    a = d.pick(numeric)
    n = d[a].numel()
    shapes = [f"{n}", f"1, {n}", f"{n}, 1", *(f"{k}, {n // k}" for k in (2, 3, 4, 6) if n and n % k == 0)]
    return (a,), (d.rng.choice(shapes),)


def _broader(d: Draw) -> Choice:
    a = d.pick(dims(0, 3))
    if d[a].numel() > 40:
        raise NoChoice
    return (a,), (repr((d.rng.randrange(2, 4), *d[a].shape)),)


def _numbered(least: int) -> Callable[[Draw], Choice]:
    return one(dims(least), axis)


RULES = [
    Rule("view flat", "{r} = {a}.view(-1)", one(both(numeric, lambda t: t.is_contiguous()))),
    Rule("view", "{r} = {a}.view({x})", lambda d: _regrouped(d), 1),
    Rule("reshape", "{r} = {a}.reshape({x})", lambda d: _regrouped(d), 2),
    Rule("transpose", "{r} = {a}.transpose(0, {x})", _numbered(2), 3),
    Rule("permute", "{r} = {a}.permute({x})", one(dims(2), _permutation), 2),
    Rule("movedim", "{r} = {a}.movedim({x}, 0)", one(dims(1), axis), 0.5),
    Rule("mT", "{r} = {a}.mT", one(dims(2))),
    Rule("select", "{r} = {a}.select({x}, {y})", _dim_of_size(2, among(0, 1, -1)), 2),
    Rule("first", "{r} = {a}[0]", one(dims(1)), 1.5),
    Rule("slice", "{r} = {a}[{x}:]", one(dims(1), among(1, -1, -2, 0)), 1.5),
    Rule("slice step", "{r} = {a}[..., ::{x}]", one(dims(1), among(2, 3)), 1.5),
    Rule("narrow", "{r} = {a}.narrow({x}, 1, 1)", _dim_of_size(2)),
    Rule("expand", "{r} = {a}.expand({x})", _broader, 2),
    Rule("expand_as", "{r} = {a}.sum({x}, keepdim=True).expand_as({a})", one(dims(1), axis)),
    Rule("unsqueeze", "{r} = {a}.unsqueeze({x})", one(dims(0, 3), among(0, -1)), 1.5),
    Rule("none index", "{r} = {a}[None, ..., None]", one(dims(0, 2)), 0.5),
    Rule("squeeze", "{r} = {a}.squeeze()", one(real)),
    Rule("flatten", "{r} = {a}.flatten({x})", one(dims(1), among(0, -1)), 1),
    Rule("unflatten", "{r} = {a}.unflatten({x}, (-1, 2))", lambda d: _even(d), 0.7),
    Rule("diagonal", "{r} = {a}.diagonal({x}, -2, -1)", one(dims(2), among(0, 1, -1)), 1.5),
    Rule("as_strided", "{r} = {a}.as_strided({x}, {y}, {z})", _strided, 2),
    Rule("chunk", "{r}, {s} = {a}.chunk(2, {x})", _dim_of_size(2), 2),
    Rule("split", "{r}, *_ = {a}.split(1, {x})", _dim_of_size(1), 1),
    Rule("split sizes", "{r}, {s} = {a}.split([1, {a}.shape[{x}] - 1], {x})", _dim_of_size(2), 1),
    Rule("unbind", "{r}, {s}, *_ = {a}.unbind({x})", _dim_of_size(2), 2),
    Rule("tensor_split", "{r}, {s} = {a}.tensor_split(2, {x})", _dim_of_size(2), 0.7),
    Rule("unfold", "{r} = {a}.unfold({x}, 2, 1)", _dim_of_size(2), 1),
    Rule(
        "view real bits",
        "{r} = {a}.contiguous().view(torch.int32)",
        one(both(single, lambda t: not t.requires_grad)),
        0.5,
    ),
    Rule(
        "halves",
        "{r} = {a}.detach().contiguous().view(torch.bfloat16)[..., 1::2]",
        one(dims(1, 4, single)),
        0.5,
    ),
    Rule("detach", "{r} = {a}.detach()", one(numeric), 1),
    Rule("data", "{r} = {a}.data", one(numeric), 1, unseen=True),
    Rule("detached use", "{r} = {a} * {a}.detach()", one(numeric), 1),
    Rule("contiguous", "{r} = {a}.contiguous()", one(numeric), 1.5),
    Rule("transposed contiguous", "{r} = {a}.mT.contiguous()", one(dims(2)), 1),
    Rule("same reshape", "{r} = {a}.reshape({x})", one(numeric, shape_of), 0.7),
    Rule("same dtype", "{r} = {a}.to({a}.dtype)", one(numeric), 0.7),
    Rule("same expand", "{r} = {a}.expand({x})", one(numeric, shape_of), 0.5),
    Rule("view_as", "{r} = {a}.view_as({a})", one(numeric), 0.5),
    Rule("second name", "{r} = {a}", one(tensor), 1),
    Rule(
        "broadcast",
        "{r}, {s} = torch.broadcast_tensors({a}, {b})",
        pair(real, lambda t: lambda u: real(u) and u.dim() == 0),
        0.5,
    ),
    Rule("ravel", "{r} = {a}.ravel()", one(numeric), 0.5),
    Rule(
        "cat",
        "{r} = torch.cat([{a}.reshape(-1), {b}.reshape(-1)])",
        pair(full, lambda t: both(full, same_dtype(t))),
        2,
    ),
    Rule("cat self", "{r} = torch.cat([{a}, {a} * 2], {x})", one(dims(1), axis), 1),
    Rule(
        "stack",
        "{r} = torch.stack([{a}, {b}], {x})",
        pair(full, lambda t: lambda u: real(u) and u.shape == t.shape, among(0, -1)),
        2,
    ),
    Rule("hstack", "{r} = torch.hstack([{a}, {a}.cos()])", one(dims(1)), 0.5),
    Rule("repeat", "{r} = {a}.repeat(2, *[1] * ({a}.dim() - 1))", one(dims(1, 3)), 1),
    Rule("repeat_interleave", "{r} = {a}.repeat_interleave(2, {x})", one(dims(1, 3), axis), 0.7),
    Rule("flip", "{r} = {a}.flip({x})", one(dims(1), axis), 0.7),
    Rule("roll", "{r} = {a}.roll({x}, 0)", one(dims(1), among(1, -1)), 0.7),
    Rule(
        "pad",
        "{r} = F.pad({a}, (1, 1), mode={x})",
        one(dims(2, 3), among('"constant"', '"reflect"', '"circular"')),
        0.7,
    ),
    Rule(
        "meshgrid",
        '{r}, {s} = torch.meshgrid({a}, {b}, indexing="ij")',
        pair(dims(1, 1), lambda t: both(dims(1, 1), same_dtype(t))),
        0.5,
    ),
    Rule("block_diag", "{r} = torch.block_diag({a}, {a})", one(dims(1, 2)), 0.3),
    Rule(
        "pixel_shuffle",
        "{r} = F.pixel_shuffle({a}.reshape(1, 4, -1, 2), 2)",
        one(lambda t: full(t) and t.numel() % 8 == 0),
        0.3,
    ),
]


def _even(d: Draw) -> Choice:
    a = d.pick(dims(1, 4))
    even = [i for i, n in enumerate(d[a].shape) if n % 2 == 0 and n]
    if not even:
        raise NoChoice
    return (a,), (d.rng.choice(even),)
