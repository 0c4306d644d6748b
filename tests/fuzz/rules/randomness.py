"""Random numbers: from the default generator, from an explicit one, in place, as data, and reseeding."""

from __future__ import annotations

from collections.abc import Callable

from .drawing import Choice, Draw, Rule, among, axis, dims, full, number, one, real, seed, shape_of, single, tensor

HALF = among(0.2, 0.5)


def _inplace(name: str, template: str, choose: Callable[[Draw], Choice], weight: float = 1.0) -> Rule:
    return Rule(name, template, choose, weight, risky=True)


RULES = [
    Rule("dropout", "{r} = F.dropout({a}, {x})", one(real, HALF), 6),
    Rule("dropout inplace", "{r} = F.dropout({a}, {x}, inplace=True)", one(real, HALF), 1.5, risky=True),
    Rule("alpha_dropout", "{r} = F.alpha_dropout({a}, {x}, training=True)", one(real, HALF), 0.7),
    Rule("feature dropout", "{r} = F.dropout1d({a}, {x})", one(dims(2, 3), HALF), 0.7),
    Rule("rrelu", "{r} = F.rrelu({a}, training=True)", one(real), 1.5),
    Rule("rrelu inplace", "{r} = F.rrelu({a}, training=True, inplace=True)", one(real), 0.5, risky=True),
    Rule("bernoulli", "{r} = torch.bernoulli({a}.sigmoid()) * {a}", one(real), 1.5),
    Rule("bernoulli generator", "{r} = torch.bernoulli({a}.sigmoid(), generator=gen) * {a}", one(real), 1),
    Rule("rand_like", "{r} = {a} * torch.rand_like({a})", one(real), 2),
    Rule("randn_like", "{r} = {a} + torch.randn_like({a}) * {x}", one(real, number), 1.5),
    Rule("noise", "{r} = {a} * torch.randn({x})", one(real, shape_of), 2),
    Rule("noise generator", "{r} = {a} * torch.randn({x}, generator=gen)", one(real, shape_of), 2),
    Rule("only noise", "{r} = torch.randn({x})", one(real, shape_of), 1),
    Rule("double noise", "{r} = {a} * torch.rand({x}, dtype=torch.float64)", one(real, shape_of), 0.5),
    Rule("randint", "{r} = torch.randint(0, 4, {x})", one(dims(1), shape_of), 1),
    Rule("randint generator", "{r} = torch.randint(0, 4, {x}, generator=gen)", one(dims(1), shape_of), 1),
    Rule("random rows", "{r} = {a}[torch.randint(0, {a}.shape[0], (3,))]", one(dims(1, 3)), 1),
    Rule("randperm", "{r} = {a}[torch.randperm({a}.shape[0])]", one(dims(1)), 1),
    Rule(
        "multinomial",
        "{r} = torch.multinomial({a}.float().softmax(-1), {x}, replacement=True)",
        one(dims(1, 2), among(1, 3)),
        1,
    ),
    Rule(
        "gumbel",
        "{r} = F.gumbel_softmax({a}, hard={x}, dim={y})",
        one(dims(1), among("True", "False"), axis),
        1,
    ),
    Rule("normal of", "{r} = torch.normal({a}, 0.5)", one(single), 0.7),
    Rule("normal generator", "{r} = torch.normal({a}.detach(), 0.5, generator=gen) * {a}", one(single), 0.7),
    Rule("poisson", "{r} = torch.poisson({a}.abs()) * {a}", one(real), 0.5),
    Rule("rsample", "{r} = torch.distributions.Normal({a}, {a}.abs() + 0.3).rsample()", one(single), 0.7),
    Rule("gamma", "{r} = torch.distributions.Gamma({a}.abs() + 0.5, 1.0).rsample()", one(single), 0.4),
    Rule(
        "dirichlet",
        "{r} = torch.distributions.Dirichlet({a}.abs() + 0.5).rsample()",
        one(dims(1, 2, single)),
        0.3,
    ),
    Rule(
        "categorical",
        "{r} = torch.distributions.Categorical(logits={a}).sample()",
        one(dims(1, 2, single)),
        0.5,
    ),
    Rule("trunc normal", "{r} = {a} * nn.init.trunc_normal_(torch.empty({x}))", one(single, shape_of), 0.4),
    Rule("python random", "{r} = {a} * random.random()", one(real), 1),
    Rule("empty normal", "{r} = {a} * torch.empty({x}).normal_()", one(real, shape_of), 1),
    Rule("stochastic depth", "{r} = {a} if torch.rand(()).item() < 0.5 else {a} * {x}", one(real, number), 1),
    _inplace("normal_", "{a}.normal_()", one(real), 1),
    _inplace("normal_ generator", "{a}.normal_(generator=gen)", one(real), 1),
    _inplace("uniform_", "{a}[..., :1].uniform_()", one(dims(1)), 1),
    _inplace("bernoulli_", "{a}.bernoulli_(0.5)", one(real), 0.7),
    _inplace("exponential_", "{a}.exponential_(generator=gen)", one(single), 0.5),
    _inplace("random_", "{a}.random_(0, 3)", one(tensor), 0.5),
    _inplace("noise add_", "{a}.add_(torch.randn({x}), alpha=0.1)", one(real, shape_of), 1.5),
    Rule("reseed", "torch.manual_seed({x})", lambda d: ((), (seed(d, None),)), 0.5),
    Rule("reseed generator", "gen.manual_seed({x})", lambda d: ((), (seed(d, None),)), 0.7),
    Rule(
        "rewind",
        "state = gen.get_state()\n{r} = {a} * torch.rand((), generator=gen)\ngen.set_state(state)",
        one(full),
        0.7,
    ),
    Rule(
        "rewind default",
        "state = torch.get_rng_state()\n{r} = {a} * torch.rand(())\ntorch.set_rng_state(state)",
        one(full),
        0.7,
    ),
    Rule(
        "fresh generator",
        "{r} = {a} * torch.rand((), generator=torch.Generator().manual_seed({x}))",
        one(full, seed),
        0.7,
    ),
]
