"""What exists before the step: leaves, constants, buffers, aliases of them, and modules."""

from __future__ import annotations

from .drawing import Choice, Draw, Rule, dims, none, one, real, seed, tensor, truth

SHAPES = ["4, 6", "6, 4", "4, 4", "2, 3, 4", "6", "4", "", "1", "2, 1, 4", "1, 6", "3, 3", "2, 2, 2, 3", "5"]
RARE_SHAPES = ["0, 4", "2, 0", "0"]
DTYPES = ["torch.float32"] * 8 + ["torch.float64", "torch.float64", "torch.bfloat16", "torch.complex64"]
WIDTHS = [4, 6, 3]


def _shaped(d: Draw) -> Choice:
    shapes = RARE_SHAPES if d.rng.random() < 0.03 else SHAPES
    return (), (f"[{d.rng.choice(shapes)}]", d.rng.randrange(1000), d.rng.choice(DTYPES))


def _common(d: Draw) -> Choice:
    return (), (f"[{d.rng.choice(SHAPES[:4])}]", d.rng.randrange(1000), "torch.float32")


def _width(d: Draw) -> Choice:
    return (), (d.rng.choice(WIDTHS), d.rng.randrange(1000))


RULES = [
    Rule("leaf", "{r} = leaf({x}, {y}, {z})", _common, 8),
    Rule("odd leaf", "{r} = leaf({x}, {y}, {z})", _shaped, 4),
    Rule("transposed leaf", "{r} = leaf([6, 4], {x}).detach().t().requires_grad_()", none(seed), 1),
    Rule("constant", "{r} = constant({x}, {y}, {z})", _common, 3),
    Rule("odd constant", "{r} = constant({x}, {y}, {z})", _shaped, 2),
    Rule("indices", "{r} = torch.randint(0, 4, {x}, generator=seeded({y}))", lambda d: _common(d)),
    Rule("buffers", "{r}, {s} = torch.zeros({x}), torch.ones({x})", lambda d: ((), (d.rng.choice(WIDTHS),)), 3),
    Rule("detached alias", "{r} = {a}.detach()", one(tensor)),
    Rule("flat alias", "{r} = {a}.detach().reshape(-1)", one(tensor)),
    Rule("row alias", "{r} = {a}.detach()[0]", one(dims(1))),
    Rule("mlp", "{r} = Mlp({x}, {y})", _width, 1),
    Rule("normed", "{r} = Normed({x}, {y})", _width, 1),
    Rule("counter", "{r} = Counter()", none(), 0.7),
    Rule("cache", "{r} = Cache()", none(), 0.7),
    Rule("recurrent", "{r} = Recurrent({x}, {y})", _width, 0.7),
    Rule("attention module", "{r} = Attention({x}, {y})", _width, 0.7),
    Rule("convolution", "{r} = Convolution({x}, {y})", _width, 0.7),
    Rule("gated", "{r} = Gated({x}, {y}, bias={z})", lambda d: ((), (*_width(d)[1], truth(d, None))), 0.7),
    Rule("tied", "{r} = Tied({x}, {y})", _width, 0.5),
    Rule("half", "{r} = constant([4, 6], {x}).to(torch.bfloat16)", none(seed), 0.5),
    Rule("table", "{r} = leaf([7, 4], {x})", none(seed), 0.5),
    Rule("strided", "{r} = constant([8, 8], {x})[::2, 1:7]", none(seed), 0.5),
    Rule("expanded", "{r} = constant([6], {x}).expand(4, 6)", none(seed), 0.5),
    Rule("mask", "{r} = {a}.detach() > 0", one(real), 1),
]
