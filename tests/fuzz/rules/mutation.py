"""Writing in place: on tensors, on views of them, through `out=`, lists, detached aliases and `.data`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .drawing import (
    Choice,
    Draw,
    Rule,
    Want,
    among,
    axis,
    both,
    constant,
    dims,
    expands,
    full,
    logical,
    number,
    numeric,
    one,
    pair,
    real,
    same_shape,
    single,
    tensor,
    triple,
    whole,
)

NO_GRAD = "torch.no_grad()"


def _same(t: Any) -> Want:
    """Want a real tensor of the first operand's shape and dtype."""
    return both(real, same_shape(t))


def _row(t: Any) -> Want:
    """Want what can be written into one row of the first operand."""
    return lambda u: real(u) and u.dim() < t.dim() and expands(t[0])(u)


def _other_dtype(t: Any) -> Want:
    return lambda u: real(u) and u.shape == t.shape and u.dtype != t.dtype


def _mask(t: Any) -> Want:
    return lambda u: logical(u) and u.shape == t.shape


def _positions(t: Any) -> Want:
    return lambda u: whole(u) and 0 < u.numel() <= 24


def _inplace(name: str, template: str, choose: Callable[[Draw], Choice], weight: float = 1.0) -> Rule:
    return Rule(name, template, choose, weight, risky=True)


WHOLE = [
    *(
        _inplace(f"{f}_", f"{{a}}.{f}_()", one(real), 0.8)
        for f in ["relu", "exp", "tanh", "sigmoid", "sin", "neg", "abs", "square"]
    ),
    *(
        _inplace(f"F {f}", f"{{r}} = F.{f}({{a}}, inplace=True)", one(real), 0.8)
        for f in ["relu", "silu", "leaky_relu", "elu", "hardtanh", "mish"]
    ),
    _inplace("add_", "{a}.add_({b}, alpha={x})", pair(real, expands, number), 3),
    _inplace("sub_", "{a} -= {b}", pair(real, expands), 1),
    _inplace("mul_", "{a}.mul_({b})", pair(real, expands), 3),
    _inplace("scale_", "{a} *= {x}", one(numeric, number), 3),
    _inplace("shift_", "{a}.add_({x})", one(numeric, number), 2),
    _inplace("div_", "{a}.div_({b}.abs() + 0.5)", pair(real, expands), 1),
    _inplace("pow_", "{a}.pow_(2)", one(real), 0.7),
    _inplace("clamp_", "{a}.clamp_(-0.6, {x})", one(real, among(0.3, 0.9)), 1),
    _inplace("lerp_", "{a}.lerp_({b}, {x})", pair(real, _same, number), 0.7),
    _inplace("addcmul_", "{a}.addcmul_({b}, {c})", triple(real, expands, expands), 0.7),
    _inplace(
        "addmm_",
        "{a}.addmm_({a}, {b})",
        pair(lambda t: dims(2, 2)(t) and t.shape[0] == t.shape[1], _same),
        0.7,
    ),
    _inplace("copy_", "{a}.copy_({b})", pair(real, expands), 2),
    _inplace("copy_ cast", "{a}.copy_({b})", pair(real, _other_dtype), 1),
    _inplace("zero_", "{a}.zero_()", one(numeric), 1),
    _inplace("fill_", "{a}.fill_({x})", one(numeric, number), 1),
    _inplace("masked_fill_", "{a}.masked_fill_({a} > {x}, 0.5)", one(real, number), 1.5),
    _inplace("masked_fill_ mask", "{a}.masked_fill_({b}, {x})", pair(real, _mask, number), 1),
    _inplace(
        "index_put_",
        "{a}.index_put_(({b} % {a}.shape[0],), {a}[0].detach() * {x}, accumulate=True)",
        pair(dims(1), _positions, number),
        1,
    ),
    _inplace("assign rows", "{a}[{b} % {a}.shape[0]] = {x}", pair(dims(1), _positions, number), 1),
    _inplace("assign mask", "{a}[{a} > {x}] = 0.25", one(dims(1), number), 1),
    _inplace(
        "scatter_add_",
        "{a}.scatter_add_({x}, {a}.argsort(dim={x}, stable=True), {b})",
        pair(dims(1), _same, axis),
        1,
    ),
    _inplace("scatter_", "{a}.scatter_({x}, {a}.argmax({x}, keepdim=True), 0.1)", one(dims(1), axis), 0.7),
    _inplace(
        "index_add_",
        "{a}.index_add_(0, torch.tensor([0, 0]), {b}[:1].repeat(2, *[1] * ({b}.dim() - 1)))",
        pair(dims(1), _same),
        0.7,
    ),
    _inplace("index_copy_", "{a}.index_copy_(0, torch.tensor([0]), {b}[:1])", pair(dims(1), _same), 0.7),
    _inplace("index_fill_", "{a}.index_fill_(0, torch.tensor([0]), {x})", one(dims(1), number), 0.7),
    _inplace("fill_diagonal_", "{a}.fill_diagonal_({x})", one(dims(2, 2), number), 0.5),
    _inplace("cumsum_", "{a}.cumsum_({x})", one(dims(1), axis), 0.5),
    _inplace("tril_", "{a}.tril_()", one(dims(2, 4)), 0.5),
    _inplace("int add_", "{a} += {x}", one(whole, among(1, 2)), 0.7),
    _inplace("not_", "{a}.logical_not_()", one(logical), 0.4),
]

VIEWS = [
    _inplace("row mul", "{a}[0] *= {x}", one(dims(1), number), 2),
    _inplace("row assign", "{a}[0] = {b}", pair(dims(1), _row), 2),
    _inplace("row fill", "{a}[-1] = {x}", one(dims(1), number), 1),
    _inplace("columns add", "{a}[..., 1:] += {x}", one(dims(1), number), 1.5),
    _inplace("columns fill", "{a}[..., ::2].fill_({x})", one(dims(1), number), 1),
    _inplace("columns exp", "{a}[..., :2].exp_()", one(dims(1)), 1),
    _inplace("shifted", "{a}[1:] += {a}[:-1].clone()", one(dims(1)), 0.7),
    _inplace("transposed mul", "{a}.mT.mul_({b}.mT)", pair(dims(2), _same), 1),
    _inplace("diagonal add", "{a}.diagonal().add_({x})", one(dims(2, 3), number), 1),
    _inplace("flat zero", "{a}.view(-1)[:3].zero_()", one(lambda t: full(t) and t.is_contiguous()), 1.5),
    _inplace("flat tanh", "{a}.view(-1).tanh_()", one(lambda t: full(t) and t.is_contiguous()), 1),
    _inplace("select copy", "{a}.select(0, 0).copy_({b}.select(0, -1))", pair(dims(1), _same), 1),
    _inplace("chunk mul", "{a}.chunk(2)[0].mul_({x})", one(dims(1), number), 1),
    _inplace(
        "strided add",
        "{a}.as_strided((2,), (1,), {a}.storage_offset()).add_({x})",
        one(lambda t: full(t) and t.is_contiguous() and t.numel() > 2, number),
        0.7,
    ),
    _inplace("real mul", "{a}.real.mul_({x})", one(lambda t: tensor(t) and t.is_complex(), number), 0.7),
    _inplace("conj add", "{a}.conj().add_({x} * 1j)", one(lambda t: tensor(t) and t.is_complex(), number), 0.7),
    _inplace("unsqueeze_", "{a}.unsqueeze_(0)", one(dims(0, 3)), 0.4),
    _inplace("squeeze_", "{a}.squeeze_()", one(dims(1)), 0.4),
    _inplace("t_", "{a}.t_()", one(dims(2, 2)), 0.5),
    _inplace("detach_", "{a}.detach_()", one(real), 0.3),
    _inplace("requires_grad_", "{a}.requires_grad_()", one(constant), 0.5),
    _inplace("bits write", "{a}.detach().view(torch.int32).bitwise_xor_(1)", one(single), 0.6),
    Rule("data mul", "{a}.data.mul_({x})", one(real, number), 0.7, risky=True, unseen=True),
    Rule("data row", "{a}.data[:1].fill_({x})", one(dims(1), number), 0.4, risky=True, unseen=True),
    _inplace("detached add", "{a}.detach().add_({x})", one(real, number), 0.7),
    Rule("set data", "{a}.data = {b}.detach().clone()", pair(constant, _same), 0.2, risky=True, unseen=True),
    Rule("quiet mul", "{a}.mul_({x})", one(real, number), 1.5, risky=True, scope=NO_GRAD),
    Rule(
        "quiet average",
        "{a}.mul_(0.9).add_({b}.detach(), alpha=0.1)",
        pair(constant, _same),
        2,
        risky=True,
        scope=NO_GRAD,
    ),
    Rule("quiet copy", "{a}.copy_({b})", pair(real, expands), 1.5, risky=True, scope=NO_GRAD),
    Rule("quiet row", "{a}[0] = {x}", one(dims(1), number), 1, risky=True, scope=NO_GRAD),
]


def _out(name: str, template: str, choose: Callable[[Draw], Choice], weight: float = 0.7) -> Rule:
    return Rule(name, template, choose, weight, risky=True, scope=NO_GRAD)


def _matrices(d: Draw) -> Choice:
    a = d.pick(dims(2, 2))
    b = d.pick(lambda t: dims(2, 2)(t) and t.dtype == d[a].dtype and t.shape[0] == d[a].shape[1])
    shape = (d[a].shape[0], d[b].shape[1])
    c = d.pick(lambda t: real(t) and t.dtype == d[a].dtype and tuple(t.shape) == shape)
    return (a, b, c), ()


OUT = [
    _out("add out", "torch.add({a}, {b}, out={c})", triple(real, _same, _same), 1.5),
    _out("mul out", "torch.mul({a}, {x}, out={b})", pair(real, _same, number), 1.5),
    _out("sin out", "torch.sin({a}, out={b})", pair(real, _same), 1),
    _out("exp self out", "torch.sigmoid({a}, out={a})", one(real), 0.7),
    _out("matmul out", "torch.matmul({a}, {b}, out={c})", _matrices, 1.5),
    _out(
        "sum out",
        "torch.sum({a}, 0, out={b})",
        pair(dims(1), lambda t: lambda u: real(u) and u.shape == t.shape[1:] and u.dtype == t.dtype),
        1,
    ),
    _out(
        "cat out",
        "torch.cat([{a}.reshape(-1), {a}.reshape(-1)], out={b})",
        pair(full, lambda t: lambda u: dims(1, 1)(u) and u.dtype == t.dtype and u.numel() == 2 * t.numel()),
        0.5,
    ),
    _out("row out", "torch.mul({a}[0], {x}, out={a}[-1])", one(dims(1), number), 0.7),
    _out(
        "sort out",
        "torch.sort({a}, out=({b}, {c}))",
        triple(dims(1), _same, lambda t: lambda u: whole(u) and u.shape == t.shape),
        0.7,
    ),
    _out("fresh out", "{r} = torch.add({a}, {x}, out=torch.empty(0, dtype={a}.dtype))", one(real, number), 0.7),
    _out(
        "argmax out",
        "torch.argmax({a}, -1, out={b})",
        pair(dims(1), lambda t: lambda u: whole(u) and u.shape == t.shape[:-1]),
        0.5,
    ),
]

FOREACH = [
    Rule("foreach mul", "{r}, {s} = torch._foreach_mul([{a}, {b}], {x})", pair(real, lambda t: real, number)),
    Rule("foreach add", "{r}, {s} = torch._foreach_add([{a}, {b}], [{b}, {a}])", pair(real, _same)),
    Rule("foreach exp", "{r}, {s} = torch._foreach_sigmoid([{a}, {b}])", pair(real, lambda t: real)),
    Rule("foreach norm", "{r}, {s} = torch._foreach_norm([{a} + 0.1, {b} + 0.1])", pair(full, lambda t: full)),
    Rule("foreach lerp", "{r}, {s} = torch._foreach_lerp([{a}, {b}], [{b}, {a}], 0.3)", pair(real, _same), 0.5),
    _inplace(
        "foreach mul_",
        "torch._foreach_mul_([{a}, {b}], {x})",
        pair(real, lambda t: lambda u: real(u) and u is not t, number),
        1.5,
    ),
    _inplace("foreach add_", "torch._foreach_add_([{a}], [{b}], alpha={x})", pair(real, _same, number), 1),
    _inplace(
        "foreach addcmul_",
        "torch._foreach_addcmul_([{a}], [{b}], [{c}], 0.5)",
        triple(real, _same, _same),
        0.7,
    ),
    _inplace(
        "foreach tanh_",
        "torch._foreach_tanh_([{a}, {b}])",
        pair(real, lambda t: lambda u: real(u) and u is not t),
        0.7,
    ),
    _out("foreach copy_", "torch._foreach_copy_([{a}], [{b}])", pair(real, _same), 0.7),
    _out("foreach zero_", "torch._foreach_zero_([{a}])", one(constant), 0.4),
]

RULES = [*WHOLE, *VIEWS, *OUT, *FOREACH]
