"""Integer and boolean indexing: reading and writing by positions that are data."""

from __future__ import annotations

from typing import Any

from .drawing import (
    Rule,
    Want,
    axis,
    both,
    dims,
    full,
    logical,
    number,
    one,
    pair,
    real,
    same_shape,
    small,
    whole,
)


def positions(first: Any) -> Want:
    """Want integers to index with."""
    return lambda t: whole(t) and 0 < t.numel() <= 24


def same_mask(first: Any) -> Want:
    """Want a mask of the first operand's shape."""
    return lambda t: logical(t) and t.shape == first.shape


RULES = [
    Rule(
        "index_select",
        "{r} = {a}.index_select({x}, {b}.reshape(-1)[:4] % {a}.shape[{x}])",
        pair(dims(1), positions, axis),
        2,
    ),
    Rule("gather self", "{r} = {a}.gather({x}, {a}.argsort(dim={x}, stable=True))", one(dims(1), axis), 1.5),
    Rule(
        "gather",
        "{r} = {a}.gather(-1, {b}.reshape(-1)[0].expand({a}.shape) % {a}.shape[-1])",
        pair(dims(1), positions),
    ),
    Rule(
        "take_along_dim",
        "{r} = torch.take_along_dim({a}, {a}.argmax({x}, keepdim=True), {x})",
        one(dims(1), axis),
    ),
    Rule("take", "{r} = torch.take({a}, {b} % {a}.numel())", pair(full, positions), 0.5),
    Rule(
        "embedding",
        "{r} = F.embedding({b}.reshape(-1)[:5] % {a}.shape[0], {a})",
        pair(dims(2, 2), positions),
        3,
    ),
    Rule(
        "embedding_bag",
        '{r} = F.embedding_bag({b}.reshape(1, -1) % {a}.shape[0], {a}, mode="sum")',
        pair(dims(2, 2), positions),
        0.5,
    ),
    Rule(
        "index rows",
        "{r} = {a}[{b} % {a}.shape[0]]",
        pair(dims(1, 3), lambda t: both(positions(t), lambda u: u.numel() < 8)),
        2,
    ),
    Rule("index columns", "{r} = {a}[..., {b}.reshape(-1)[:3] % {a}.shape[-1]]", pair(dims(1), positions)),
    Rule(
        "index with none",
        "{r} = {a}[None, {b}.reshape(-1)[:3] % {a}.shape[0], None]",
        pair(dims(1, 3), positions),
        0.7,
    ),
    Rule(
        "index pairs",
        "{r} = {a}[{b}.reshape(-1)[:3] % {a}.shape[0], {b}.reshape(-1)[:3] % {a}.shape[1]]",
        pair(dims(2), positions),
    ),
    Rule("index list", "{r} = {a}[[0, -1, 0]]", one(dims(1, 3))),
    Rule("index mask", "{r} = {a}[{a} > 0]", one(dims(1)), 1.5),
    Rule("index other mask", "{r} = {a}[{b}]", pair(dims(1), same_mask)),
    Rule("index row mask", "{r} = {a}[{a}.reshape({a}.shape[0], -1).sum(1) > 0]", one(dims(1))),
    Rule("masked_select", "{r} = torch.masked_select({a}, {a} < {x})", one(dims(1), number), 0.7),
    Rule("masked_fill", "{r} = {a}.masked_fill({a} > {x}, {x})", one(real, number), 2),
    Rule("masked_fill mask", "{r} = {a}.masked_fill({b}, 0.5)", pair(real, same_mask), 1),
    Rule("masked_scatter", "{r} = {a}.masked_scatter({a} > 0, {b})", pair(full, same_shape), 0.7),
    Rule(
        "index_add",
        "{r} = {a}.index_add(0, torch.tensor([0, 0]), {a}[:1].repeat(2, *[1] * ({a}.dim() - 1)))",
        one(dims(1)),
        0.7,
    ),
    Rule("index_copy", "{r} = {a}.index_copy(0, torch.tensor([0]), {a}[-1:] * {x})", one(dims(1), number), 0.7),
    Rule("index_fill", "{r} = {a}.index_fill({x}, torch.tensor([0]), 0.5)", one(dims(1), axis), 0.7),
    Rule(
        "index_put",
        "{r} = {a}.index_put(({b} % {a}.shape[0],), {a}[0] * {x}, accumulate=True)",
        pair(dims(1), positions, number),
    ),
    Rule("scatter", "{r} = {a}.scatter({x}, {a}.argmin({x}, keepdim=True), 0.5)", one(dims(1), axis)),
    Rule(
        "scatter_add",
        "{r} = {a}.scatter_add({x}, {a}.argsort(dim={x}, stable=True), {b})",
        pair(dims(1), same_shape, axis),
        1.5,
    ),
    Rule(
        "scatter_reduce",
        '{r} = {a}.scatter_reduce({x}, {a}.argsort(dim={x}, stable=True), {b}, "amax")',
        pair(dims(1), same_shape, axis),
        0.7,
    ),
    Rule(
        "one_hot",
        "{r} = F.one_hot({b}.reshape(-1)[:4] % 4, 4).to({a}.dtype) * {a}.sum()",
        pair(full, positions),
        0.7,
    ),
    Rule("nonzero", "{r} = ({a} > 0).nonzero()[:, 0]", one(dims(1)), 0.7),
    Rule("bucketize", "{r} = torch.bucketize({a}, torch.tensor([-0.5, 0.0, 0.5]))", one(full), 0.7),
    Rule(
        "searchsorted",
        "{r} = torch.searchsorted({a}.detach().reshape(-1).sort()[0], {a}.detach())",
        one(full),
        0.4,
    ),
    Rule(
        "slice by data",
        "{r} = {a}[: 1 + int({a}.abs().sum().nan_to_num().item()) % {a}.shape[0]]",
        one(dims(1)),
        1,
    ),
    Rule(
        "tril_indices",
        "{r} = {a}[tuple(torch.tril_indices({a}.shape[0], {a}.shape[1]))]",
        one(dims(2, 2)),
        0.5,
    ),
    Rule("route", "{r} = route({a}, {x})", one(dims(2, 2), small), 1),
    Rule("slice_scatter", "{r} = {a}.slice_scatter({a}[:1] * {x}, 0, 0, 1)", one(dims(1), number), 0.5),
    Rule("select_scatter", "{r} = {a}.select_scatter({a}[-1].cos(), 0, 0)", one(dims(1)), 0.5),
    Rule("diagonal_scatter", "{r} = {a}.diagonal_scatter({a}.diagonal() * {x})", one(dims(2, 2), number), 0.5),
    Rule("bincount", "{r} = torch.bincount({a}.reshape(-1).clamp(0, 5))", one(whole), 0.3),
]
