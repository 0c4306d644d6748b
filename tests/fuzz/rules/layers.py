"""What networks are made of: products, norms, softmax, convolution, attention, linear algebra, modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .drawing import (
    Choice,
    Draw,
    NoChoice,
    Rule,
    Want,
    among,
    axis,
    both,
    called,
    dims,
    full,
    one,
    pair,
    same_dtype,
    same_shape,
    single,
    triple,
    truth,
)


def _meets(t: Tensor) -> Want:
    """Want a matrix, or a stack of them, that the first operand can be multiplied by."""
    return lambda u: dims(2, 3)(u) and u.dtype == t.dtype and u.shape[-2] == t.shape[-1] and u.dim() <= t.dim()


def _weight(t: Tensor) -> Want:
    return lambda u: dims(2, 2)(u) and u.dtype == t.dtype and u.shape[1] == t.shape[-1]


def _row(t: Tensor) -> Want:
    """Want a vector as long as the first operand's rows."""
    return lambda u: dims(1, 1)(u) and u.dtype == t.dtype and u.shape[0] == t.shape[-1]


def _batched(t: Tensor) -> Want:
    return lambda u: dims(3, 3)(u) and u.dtype == t.dtype and u.shape[0] == t.shape[0] and u.shape[1] == t.shape[2]


def _pair_and_bias(first: Want, second: Callable[[Tensor], Want], width: int) -> Callable[[Draw], Choice]:
    """Draw two operands and a third that expands to rows as wide as the second's dimension `width`."""

    def choose(d: Draw) -> Choice:
        a = d.pick(first)
        b = d.pick(second(d[a]))
        wide = d[b].shape[width]
        fits = lambda t: full(t) and t.dtype == d[a].dtype and t.dim() == 1 and t.shape[0] == wide  # noqa: E731
        return (a, b, d.pick(fits)), (d.number(),)

    return choose


def _statistics(d: Draw) -> Choice:
    """Draw an input with at least two values a channel, and running mean and variance to go with it."""
    a = d.pick(lambda t: dims(2)(t) and t.dtype == torch.float32 and t.numel() // t.shape[1] > 1)
    channels = d[a].shape[1]
    buffer = lambda t: single(t) and tuple(t.shape) == (channels,) and not t.requires_grad  # noqa: E731
    mean = d.pick(buffer)
    var = d.pick(lambda t: buffer(t) and t is not d[mean] and bool((t >= 0).all()))
    return (a, mean, var), (d.rng.choice(["True", "True", "False"]), d.rng.choice([0.1, 0.5]))


def _groups(d: Draw) -> Choice:
    a = d.pick(lambda t: dims(2)(t) and t.numel() > t.shape[0] * t.shape[1])
    even = d[a].shape[1] % 2 == 0
    return (a,), (d.rng.choice([1, 2]) if even else 1,)


def _square(d: Draw) -> Choice:
    a = d.pick(lambda t: dims(2, 3)(t) and t.dtype in (torch.float32, torch.float64))
    if d[a].shape[-1] > 6 or d[a].shape[-2] > 6:
        raise NoChoice
    return (a,), ()


PRODUCTS = [
    Rule("matmul", "{r} = {a} @ {b}", pair(dims(2, 4), _meets), 6),
    Rule("matmul transposed", "{r} = {a} @ {b}.mT", pair(dims(2, 4), lambda t: both(dims(2, 2), _weight(t))), 3),
    Rule("gram", "{r} = {a}.mT @ {a}", one(dims(2, 3)), 3),
    Rule("mv", "{r} = {a} @ {b}", pair(dims(2, 2), _row), 1),
    Rule("dot", "{r} = torch.dot({a}, {b})", pair(dims(1, 1), same_shape), 1),
    Rule("outer", "{r} = torch.outer({a}, {b})", pair(dims(1, 1), lambda t: both(dims(1, 1), same_dtype(t))), 1),
    Rule("bmm", "{r} = torch.bmm({a}, {b})", pair(dims(3, 3), _batched), 2),
    Rule("bmm self", "{r} = torch.bmm({a}, {a}.transpose(1, 2))", one(dims(3, 3)), 2),
    Rule("linear", "{r} = F.linear({a}, {b})", pair(dims(1, 4), _weight), 4),
    Rule("linear bias", "{r} = F.linear({a}, {b}, {c})", _pair_and_bias(dims(1, 4), _weight, 0), 4),
    Rule("addmm", "{r} = torch.addmm({c}, {a}, {b}, alpha={x})", _pair_and_bias(dims(2, 2), _meets, 1), 3),
    Rule(
        "baddbmm",
        "{r} = torch.baddbmm({a}, {a}, {a}.new_ones({a}.shape[0], {a}.shape[2], {a}.shape[2]))",
        one(dims(3, 3)),
        0.7,
    ),
    Rule("einsum", '{r} = torch.einsum("...ij,...kj->...ik", {a}, {a})', one(dims(2, 3)), 1),
    Rule(
        "einsum two",
        '{r} = torch.einsum("ij,jk->ki", {a}, {b})',
        pair(dims(2, 2), lambda t: both(dims(2, 2), _meets(t))),
        1,
    ),
    Rule("tensordot", "{r} = torch.tensordot({a}, {a}, dims=([0], [0]))", one(dims(1, 2)), 0.7),
    Rule("addr", "{r} = torch.addr({c}, {a}, {b})", lambda d: _rank_one(d), 0.5),
    Rule(
        "kron",
        "{r} = torch.kron({a}.reshape(-1)[:3] * 1, {b}.reshape(-1)[:3] * 1)",
        pair(full, lambda t: both(full, same_dtype(t))),
        0.3,
    ),
    Rule(
        "bilinear",
        "{r} = F.bilinear({a}, {a}, torch.ones(2, {a}.shape[-1], {a}.shape[-1]))",
        one(dims(1, 3, single)),
        0.4,
    ),
    Rule(
        "cosine matrix",
        "{r} = F.normalize({a} + 0.1, dim=1) @ F.normalize({a} + 0.1, dim=1).t()",
        one(dims(2, 2)),
        0.7,
    ),
]

NORMS = [
    Rule("softmax", "{r} = F.softmax({a}, {x})", one(dims(1), axis), 3),
    Rule("log_softmax", "{r} = F.log_softmax({a}, {x})", one(dims(1), axis), 2),
    Rule("softmax dtype", "{r} = F.softmax({a}, {x}, dtype=torch.float64)", one(dims(1), axis), 0.7),
    Rule("layer_norm", "{r} = F.layer_norm({a}, {a}.shape[-1:])", one(dims(1)), 2),
    Rule(
        "layer_norm affine",
        "{r} = F.layer_norm({a}, {a}.shape[-1:], {b}, {c})",
        triple(dims(1), _row, _row),
        3,
    ),
    Rule("rms_norm", "{r} = F.rms_norm({a}, {a}.shape[-1:], {b}, 1e-3)", pair(dims(1), _row), 1.5),
    Rule("group_norm", "{r} = F.group_norm({a}, {x})", _groups, 2),
    Rule("instance_norm", "{r} = F.instance_norm({a})", one(lambda t: dims(3, 4)(t) and t.shape[-1] > 1), 0.7),
    Rule(
        "batch_norm",
        "{r} = F.batch_norm({a}, {b}, {c}, training={x}, momentum={y})",
        _statistics,
        6,
        risky=True,
    ),
    Rule(
        "batch_norm loose",
        "{r} = F.batch_norm({a}, None, None, training=True)",
        one(lambda t: dims(2)(t) and t.numel() > t.shape[1]),
        1,
    ),
    Rule("local_response_norm", "{r} = F.local_response_norm({a}, 2)", one(dims(3, 4)), 0.3),
]

SPATIAL = [
    Rule(
        "conv1d",
        "{r} = F.conv1d({a}, {b}, padding={x})",
        pair(
            dims(3, 3),
            lambda t: both(
                dims(3, 3),
                lambda u: u.shape[1] == t.shape[1] and u.dtype == t.dtype and u.shape[2] <= t.shape[2] + 2,
            ),
            among(1, 2),
        ),
        3,
    ),
    Rule(
        "conv1d depthwise",
        "{r} = F.conv1d({a}, {a}[:1].transpose(0, 1), groups={a}.shape[1], padding=1)",
        one(dims(3, 3)),
        1,
    ),
    Rule(
        "conv2d",
        "{r} = F.conv2d({a}.unsqueeze(0), {a}.unsqueeze(0)[..., :2, :2], padding=1)",
        one(lambda t: dims(3, 3)(t) and min(t.shape[1:]) >= 2),
        2,
    ),
    Rule("conv2d stride", "{r} = F.conv2d({a}, {a}[:, :, :1, :1], stride=2)", one(dims(4, 4)), 1),
    Rule(
        "conv_transpose1d",
        "{r} = F.conv_transpose1d({a}, {a}.transpose(0, 1)[..., :2])",
        one(lambda t: dims(3, 3)(t) and t.shape[0] < 4),
        1,
    ),
    Rule("max_pool1d", "{r} = F.max_pool1d({a}, 2, 1)", one(lambda t: dims(2, 3)(t) and t.shape[-1] > 1), 1),
    Rule(
        "max_pool2d",
        "{r}, {s} = F.max_pool2d({a}, 2, 1, return_indices=True)",
        one(lambda t: dims(3, 4)(t) and min(t.shape[-2:]) > 1),
        1,
    ),
    Rule("avg_pool2d", "{r} = F.avg_pool2d({a}, 2, 1, 1)", one(dims(3, 4)), 0.7),
    Rule("adaptive pool", "{r} = F.adaptive_avg_pool1d({a}, 2)", one(dims(2, 3)), 0.7),
    Rule("adaptive max", "{r} = F.adaptive_max_pool1d({a}, 2)", one(dims(2, 3)), 0.5),
    Rule(
        "interpolate",
        "{r} = F.interpolate({a}, scale_factor=2, mode={x})",
        one(lambda t: dims(3, 3)(t) and t.numel() < 60, among('"nearest"', '"linear"')),
        0.7,
    ),
    Rule("fold", "{r} = F.unfold({a}, 2, padding=1)", one(lambda t: dims(4, 4)(t) and t.numel() < 60), 0.4),
    Rule(
        "grid_sample",
        "{r} = F.grid_sample({a}, {a}[..., :2].transpose(1, 2).tanh(), align_corners=False)",
        one(lambda t: dims(4, 4)(t) and t.shape[-1] >= 2),
        0.4,
    ),
]

ATTENTION = [
    Rule(
        "attention self",
        "{r} = F.scaled_dot_product_attention({a}, {a}, {a}, is_causal={x})",
        one(dims(2, 4), truth),
        3,
    ),
    Rule(
        "attention",
        "{r} = F.scaled_dot_product_attention({a}, {b}, {c}, dropout_p={x})",
        triple(dims(2, 4), same_shape, same_shape, among(0.0, 0.3)),
        4,
    ),
    Rule(
        "attention masked",
        "mask = torch.ones({a}.shape[-2], {a}.shape[-2]).tril().bool()\n"
        "{r} = F.scaled_dot_product_attention({a}, {a}, {a}, attn_mask=mask)",
        one(dims(2, 4)),
        1.5,
    ),
    Rule(
        "attention biased",
        "{r} = F.scaled_dot_product_attention({a}, {a}, {a}, attn_mask={a} @ {a}.mT)",
        one(dims(2, 4)),
        1,
    ),
    Rule(
        "attention heads",
        "{r} = F.scaled_dot_product_attention({a}[:, None], {a}[:, None], {a}[:, None]).squeeze(1)",
        one(dims(3, 3)),
        1.5,
    ),
]

ALGEBRA = [
    Rule(
        "inverse matrix",
        "{r} = torch.linalg.inv({a} @ {a}.mT + 2 * torch.eye({a}.shape[-2], dtype={a}.dtype))",
        _square,
        0.7,
    ),
    Rule(
        "cholesky",
        "{r} = torch.linalg.cholesky({a} @ {a}.mT + 2 * torch.eye({a}.shape[-2], dtype={a}.dtype))",
        _square,
        0.7,
    ),
    Rule(
        "solve",
        "{r} = torch.linalg.solve({a} @ {a}.mT + 2 * torch.eye({a}.shape[-2], dtype={a}.dtype), {a})",
        _square,
        0.7,
    ),
    Rule(
        "slogdet",
        "{r} = torch.linalg.slogdet({a} @ {a}.mT + 2 * torch.eye({a}.shape[-2], dtype={a}.dtype))[1]",
        _square,
        0.5,
    ),
    Rule(
        "eigvalsh",
        "{r} = torch.linalg.eigvalsh({a} @ {a}.mT + torch.arange(1.0, 1 + {a}.shape[-2]).diag().to({a}))",
        _square,
        0.4,
    ),
    Rule("matrix_exp", "{r} = torch.matrix_exp(({a} @ {a}.mT) * 0.05)", _square, 0.4),
    Rule(
        "qr",
        "{r}, {s} = torch.linalg.qr({a} @ {a}.mT + 2 * torch.eye({a}.shape[-2], dtype={a}.dtype))",
        _square,
        0.4,
    ),
]

MODULES = [
    Rule("call", "{r} = {a}({b})", called, 14, risky=True),
    Rule("call twice", "{r} = {a}({a}({b}))", called, 3, risky=True),
    Rule(
        "fresh linear",
        "{r} = {a} @ torch.nn.init.orthogonal_(torch.empty({a}.shape[-1], 3))",
        one(dims(2, 3, single)),
        0.4,
    ),
    Rule(
        "mlp inline",
        "{r} = F.linear(F.dropout(F.gelu(F.linear({a}, {b})), 0.2), {b}.t()) + {a}",
        pair(dims(1, 3), _weight),
        3,
    ),
]


def _rank_one(d: Draw) -> Choice:
    c = d.pick(dims(2, 2))
    sizes = d[c].shape
    vector = lambda n: lambda t: dims(1, 1)(t) and t.dtype == d[c].dtype and t.shape[0] == n  # noqa: E731
    return (d.pick(vector(sizes[0])), d.pick(vector(sizes[1])), c), ()


RULES = [*PRODUCTS, *NORMS, *SPATIAL, *ATTENTION, *ALGEBRA, *MODULES]
