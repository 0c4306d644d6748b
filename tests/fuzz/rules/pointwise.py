"""Element by element: one operand, two operands, dtype changes, complex numbers."""

from __future__ import annotations

from .drawing import (
    Choice,
    Draw,
    NoChoice,
    Rule,
    among,
    axis,
    both,
    broadcasts,
    dims,
    expands,
    full,
    imaginary,
    logical,
    number,
    numeric,
    one,
    pair,
    real,
    same_shape,
    shape_of,
    single,
    small,
    tensor,
    triple,
    whole,
)

PLAIN = [
    "exp",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "relu",
    "abs",
    "neg",
    "square",
    "erf",
    "sign",
    "trunc",
    "positive",
    "sinh",
    "expm1",
    "sinc",
    "nan_to_num",
]
FUNCTIONAL = [
    "gelu",
    "silu",
    "softplus",
    "elu",
    "leaky_relu",
    "hardtanh",
    "mish",
    "hardswish",
    "logsigmoid",
    "celu",
    "selu",
    "relu6",
    "tanhshrink",
    "softsign",
    "hardsigmoid",
    "hardshrink",
    "softshrink",
]
GUARDED = {
    "sqrt": 0.1,
    "rsqrt": 0.2,
    "log": 0.1,
    "log1p": 0.0,
    "reciprocal": 0.5,
    "lgamma": 1.0,
    "digamma": 1.0,
}
DTYPES = ["torch.float64", "torch.bfloat16", "torch.float32", "torch.float16"]


def _dtype(d: Draw, first: object) -> str:
    return d.rng.choice(DTYPES)


def _even(d: Draw) -> Choice:
    a = d.pick(dims(1))
    even = [i for i, n in enumerate(d[a].shape) if n % 2 == 0]
    if not even:
        raise NoChoice
    return (a,), (d.rng.choice(even),)


UNARY = [
    *(Rule(f, f"{{r}} = torch.{f}({{a}})", one(real)) for f in PLAIN),
    *(Rule(f, f"{{r}} = F.{f}({{a}})", one(real), 0.7) for f in FUNCTIONAL),
    *(Rule(f, f"{{r}} = torch.{f}({{a}}.abs() + {add})", one(real), 0.7) for f, add in GUARDED.items()),
    Rule("raw sqrt", "{r} = {a}.abs().sqrt()", one(real), 0.5),
    Rule("tanh gelu", '{r} = F.gelu({a}, approximate="tanh")', one(real), 0.7),
    Rule("clone", "{r} = {a}.clone()", one(numeric)),
    Rule("scale", "{r} = {a} * {x}", one(numeric, number), 3),
    Rule("shift", "{r} = {a} + {x}", one(numeric, number), 2),
    Rule("turned", "{r} = {a} * (0.5 + turn)", one(real), 1),
    Rule("inverse", "{r} = {x} / ({a}.abs() + 1)", one(real, number)),
    Rule("clamp", "{r} = {a}.clamp(-0.5, {x})", one(real, among(0.25, 0.75, 1.5))),
    Rule("clamp_min", "{r} = {a}.clamp_min({x})", one(real, number)),
    Rule("power", "{r} = {a} ** {x}", one(real, among(1, 2, 3, 0))),
    Rule("root", "{r} = ({a}.abs() + 0.2) ** {x}", one(real, among(0.5, 1.5, -0.5, -1))),
    Rule("base", "{r} = {x} ** {a}", one(real, among(0.5, 2.0))),
    Rule("threshold", "{r} = F.threshold({a}, {x}, 0.1)", one(real, number)),
    Rule("glu", "{r} = F.glu({a}, {x})", _even),
    Rule("cumsum", "{r} = {a}.cumsum({x})", one(dims(1), axis)),
    Rule("cumprod", "{r} = {a}.cumprod({x})", one(dims(1), axis)),
    Rule("logcumsumexp", "{r} = {a}.logcumsumexp({x})", one(dims(1), axis)),
    Rule("tril", "{r} = {a}.tril({x})", one(dims(2, 4), among(0, 1, -1))),
    Rule("triu", "{r} = {a}.triu({x})", one(dims(2, 4), among(0, 1, -1))),
    Rule("not", "{r} = ~{a}", one(logical)),
    Rule("isfinite", "{r} = torch.isfinite({a})", one(real), 0.3),
]

BINARY = [
    Rule("add", "{r} = {a} + {b}", pair(real, broadcasts), 4),
    Rule("sub", "{r} = {a} - {b}", pair(real, broadcasts), 2),
    Rule("mul", "{r} = {a} * {b}", pair(real, broadcasts), 6),
    Rule("div", "{r} = {a} / ({b}.abs() + 0.5)", pair(real, broadcasts), 3),
    Rule("raw div", "{r} = {a} / {b}", pair(full, broadcasts)),
    Rule("add alpha", "{r} = torch.add({a}, {b}, alpha={x})", pair(real, broadcasts, number)),
    Rule("rsub", "{r} = torch.rsub({a}, {b}, alpha={x})", pair(real, broadcasts, small), 0.5),
    Rule("maximum", "{r} = torch.maximum({a}, {b})", pair(real, broadcasts)),
    Rule("minimum", "{r} = torch.minimum({a}, {b})", pair(real, broadcasts)),
    Rule("atan2", "{r} = torch.atan2({a}, {b})", pair(real, broadcasts)),
    Rule("hypot", "{r} = torch.hypot({a}, {b})", pair(real, same_shape)),
    Rule("copysign", "{r} = torch.copysign({a}, {b})", pair(real, broadcasts), 0.5),
    Rule("fmod", "{r} = torch.fmod({a}, {b}.abs() + 0.5)", pair(real, broadcasts), 0.5),
    Rule("remainder", "{r} = torch.remainder({a}, {b}.abs() + 0.5)", pair(real, broadcasts), 0.5),
    Rule("logaddexp", "{r} = torch.logaddexp({a}, {b})", pair(single, same_shape), 0.5),
    Rule("pow tensor", "{r} = ({a}.abs() + 0.5) ** {b}", pair(real, broadcasts)),
    Rule("xlogy", "{r} = torch.xlogy({a}, {b}.abs() + 0.5)", pair(real, broadcasts), 0.5),
    Rule(
        "prelu",
        "{r} = F.prelu({a}, {b}.reshape(-1)[:1])",
        pair(dims(1), lambda t: both(full, same_shape(t))),
        0.5,
    ),
    Rule("mse", "{r} = F.mse_loss({a}, {b}, reduction={x})", pair(full, same_shape, among('"none"', '"mean"'))),
    Rule("smooth l1", "{r} = F.smooth_l1_loss({a}, {b}, reduction='none')", pair(full, same_shape), 0.5),
    Rule("huber", "{r} = F.huber_loss({a}, {b})", pair(full, same_shape), 0.5),
    Rule("bce", "{r} = F.binary_cross_entropy_with_logits({a}, {b}.sigmoid())", pair(full, same_shape), 0.5),
    Rule(
        "kl",
        "{r} = F.kl_div(F.log_softmax({a}, 0), F.softmax({b}, 0), reduction='sum')",
        pair(dims(1), same_shape),
    ),
    Rule("cosine", "{r} = F.cosine_similarity({a}, {b}, dim=0)", pair(dims(1), same_shape), 0.5),
    Rule("where", "{r} = torch.where({a} > 0, {a}, {b})", pair(real, broadcasts), 2),
    Rule(
        "where mask",
        "{r} = torch.where({a}, {b}, {x})",
        pair(logical, lambda t: broadcasts(t.float()), number),
    ),
    Rule("where two", "{r} = torch.where({a} > {b}, {b} * {x}, {a})", pair(real, broadcasts, number)),
    Rule("greater", "{r} = {a} > {b}", pair(real, broadcasts)),
    Rule("equal", "{r} = {a} == {b}", pair(real, broadcasts), 0.3),
    Rule("or", "{r} = {a} | {b}", pair(logical, lambda t: lambda u: logical(u) and u.shape == t.shape), 0.5),
    Rule("lerp", "{r} = torch.lerp({a}, {b}, {x})", pair(real, same_shape, number)),
    Rule("lerp tensor", "{r} = torch.lerp({a}, {b}, {c})", triple(real, same_shape, same_shape)),
    Rule("addcmul", "{r} = torch.addcmul({a}, {b}, {c}, value={x})", triple(real, expands, expands, number)),
    Rule(
        "addcdiv",
        "{r} = torch.addcdiv({a}, {b}, {c}.abs() + 0.5, value={x})",
        triple(real, expands, expands, number),
    ),
    Rule("fused chain", "{r} = ({a} * {b}).tanh() * {a} + {b}.sin()", pair(real, broadcasts), 2),
]

DTYPE = [
    Rule("to", "{r} = {a}.to({x})", one(real, _dtype), 2),
    Rule("type as", "{r} = {a}.type_as({b})", pair(real, lambda t: real), 0.5),
    Rule("through int", "{r} = ({a} * 4).to(torch.int32).to(torch.float32) * {a}", one(real)),
    Rule("to int", "{r} = ({a} * 4).long()", one(full)),
    Rule("from int", "{r} = {a}.to({x})", one(whole, _dtype)),
    Rule("from bool", "{r} = {a}.float() * {x}", one(logical, number), 0.5),
    Rule("int arithmetic", "{r} = {a} * 2 + {x}", one(whole, small), 0.5),
    Rule("bits round trip", "{r} = {a}.detach().view(torch.int32).view(torch.float32)", one(single)),
    Rule("bits", "{r} = {a}.detach().view(torch.int32)", one(single), 0.5),
    Rule("bits xor", "{r} = ({a}.detach().view(torch.int32) ^ 1).view(torch.float32) * {a}", one(single), 0.5),
]

COMPLEX = [
    Rule("complex", "{r} = torch.complex({a}, {b})", pair(single, lambda t: both(single, same_shape(t))), 1),
    Rule("to complex", "{r} = {a}.to(torch.complex64)", one(single), 0.7),
    Rule(
        "view_as_complex",
        "{r} = torch.view_as_complex(torch.stack([{a}, {a} * {x}], -1))",
        one(single, number),
        0.7,
    ),
    Rule("view_as_real", "{r} = torch.view_as_real({a}.resolve_conj())", one(imaginary)),
    Rule("conj", "{r} = {a}.conj()", one(imaginary), 2),
    Rule("real", "{r} = {a}.real", one(imaginary)),
    Rule("imag", "{r} = {a}.imag", one(imaginary)),
    Rule("complex abs", "{r} = ({a} + (2 + 1j)).abs()", one(imaginary)),
    Rule("angle", "{r} = ({a} + (2 + 1j)).angle()", one(imaginary), 0.5),
    Rule(
        "complex mul",
        "{r} = {a} * {b}",
        pair(imaginary, lambda t: both(numeric, lambda u: u.shape == t.shape)),
        2,
    ),
    Rule("complex conj mul", "{r} = {a} * {b}.conj()", pair(imaginary, same_shape), 1),
    Rule("complex tanh", "{r} = ({a} * 0.3).tanh()", one(imaginary), 0.7),
    Rule("complex exp", "{r} = ({a}.imag * 1j).exp()", one(imaginary), 0.7),
    Rule("resolve_conj", "{r} = {a}.conj().resolve_conj()", one(imaginary), 0.5),
    Rule("adjoint", "{r} = {a} @ {a}.mH", one(dims(2, 3, numeric)), 0.7),
    Rule(
        "negative bit",
        "{r} = {a}.conj().imag * {b}",
        pair(imaginary, lambda t: lambda u: real(u) and u.shape == t.shape),
    ),
    Rule("fft", "{r} = torch.fft.fft({a}, dim={x})", one(dims(1, 4, single), axis), 0.7),
    Rule("rfft", "{r} = torch.fft.rfft({a}).abs()", one(dims(1, 4, single)), 0.5),
    Rule(
        "polar",
        "{r} = torch.polar({a}.abs() + 0.1, {b})",
        pair(single, lambda t: both(single, same_shape(t))),
        0.5,
    ),
]

MAKING = [
    Rule("zeros_like", "{r} = torch.zeros_like({a})", one(tensor), 0.5),
    Rule("ones_like", "{r} = torch.ones_like({a}) * {x}", one(real, number), 0.5),
    Rule("full", "{r} = torch.full({y}, {x})", one(real, number, shape_of), 0.5),
    Rule("literal", "{r} = {a} * torch.tensor({x})", one(real, number), 0.7),
    Rule("arange", "{r} = {a} * torch.arange({a}.numel()).view({a}.shape) * 0.1", one(full), 0.7),
    Rule("eye", "{r} = {a} + torch.eye({a}.shape[-2], {a}.shape[-1])", one(dims(2, 4)), 0.5),
    Rule("linspace", "{r} = {a} + torch.linspace(-1, 1, {a}.shape[-1])", one(dims(1)), 0.5),
    Rule("new_full", "{r} = {a}.new_full({y}, {x}) + {a}", one(real, number, shape_of), 0.5),
    Rule("empty filled", "{r} = torch.empty_like({a}).copy_({a}) * {x}", one(real, number), 0.7),
    Rule("scalar tensor", "{r} = {a} * torch.scalar_tensor({x} + turn)", one(real, number), 0.5),
]

RULES = [*UNARY, *BINARY, *DTYPE, *COMPLEX, *MAKING]
