"""Randomness of every source: default and explicit generators, Python, numpy, reseeding inside the step."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, Dirichlet, Gamma, Normal, RelaxedBernoulli

from harness import Program
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("random")

ZOO.flow("dropout", lambda x: F.dropout(x, 0.3).exp())
ZOO.flow("dropout_twice", lambda x: F.dropout(F.dropout(x, 0.3).sin(), 0.5).exp())
ZOO.flow("dropout_inplace", lambda x: F.dropout(x, 0.3, inplace=True).exp())
ZOO.flow("dropout_never", lambda x: F.dropout(x.sin(), 0.0).exp())
ZOO.flow("dropout_always", lambda x: F.dropout(x.sin(), 1.0).exp())
ZOO.flow("dropout_native", lambda x: torch.native_dropout(x.sin(), 0.4, True)[0].exp())
ZOO.flow("dropout_bfloat16", lambda x: F.dropout(x.bfloat16(), 0.3).exp())
ZOO.flow("alpha_dropout", lambda x: F.alpha_dropout(x, 0.3, training=True).exp())
ZOO.flow("feature_alpha_dropout", lambda x: F.feature_alpha_dropout(x, 0.3, training=True).exp(), x=(4, 5, 3))
ZOO.module("dropout_2d_3d", lambda: nn.Sequential(nn.Dropout2d(), nn.GELU(), nn.Dropout3d()), 3, 4, 5, 6)
ZOO.flow("rrelu", lambda x: F.rrelu(x, training=True).exp())
ZOO.flow("rrelu_inplace", lambda x: F.rrelu(x, training=True, inplace=True).exp())
ZOO.flow("bernoulli_of_probabilities", lambda x: torch.bernoulli(x.sigmoid()) * x.exp())
ZOO.flow("bernoulli_inplace", lambda x: torch.empty_like(x).bernoulli_(0.7).mul(x).exp())
ZOO.flow("normal_inplace", lambda x: torch.empty(6, 8).normal_().mul(x).exp())
ZOO.flow("uniform_inplace", lambda x: torch.zeros(6, 8).uniform_(-1, 1).mul(x).exp())
ZOO.flow("random_exponential_cauchy", lambda x: (_fill("exponential_") + _fill("cauchy_").tanh()) * x.exp())
ZOO.flow("log_normal_geometric", lambda x: (_fill("log_normal_") * _fill("geometric_", 0.5)) * x.sin())
ZOO.flow("random_integers_inplace", lambda x: torch.empty(6, 8).random_(0, 5) * x.exp())
ZOO.flow("randn_like", lambda x: (x.sin() + torch.randn_like(x)).exp())
ZOO.flow("rand_compared", lambda x: (torch.rand(6, 8) < x.sigmoid()).float() * x.exp())
ZOO.flow("rand_then_randn", lambda x: (torch.rand(6, 8) * x).exp() * (torch.randn(6, 8) * x).sin())
ZOO.flow("multinomial", lambda x: x.exp()[torch.arange(6)[:, None], torch.multinomial(x.softmax(1), 3)].sin())
ZOO.flow("randperm", lambda x: x.exp()[torch.randperm(6)].sin())
ZOO.flow("randint", lambda x: x.exp()[:, torch.randint(0, 8, (5,))].sin())
ZOO.flow("normal_of_tensors", lambda x: torch.normal(x.detach(), x.detach().exp()) * x.sin())
ZOO.flow("poisson_binomial", lambda x: _counts(x) * x.sin())
ZOO.flow("gumbel_softmax", lambda x: F.gumbel_softmax(x, tau=0.7).sin())
ZOO.flow("gumbel_softmax_hard", lambda x: F.gumbel_softmax(x, hard=True) * x.exp())
ZOO.flow("rsample_normal", lambda x: Normal(x, x.exp()).rsample().sin())
ZOO.flow("rsample_gamma_beta", lambda x: Gamma(x.exp(), 1.0).rsample() + Beta(x.exp(), x.exp() + 1).rsample())
ZOO.flow("rsample_dirichlet", lambda x: Dirichlet(x.exp()).rsample().sin())
ZOO.flow("relaxed_bernoulli", lambda x: RelaxedBernoulli(torch.tensor(0.5), logits=x).rsample().sin())
ZOO.flow("sample_and_log_prob", lambda x: _reinforce(x))
ZOO.flow("fork_rng", lambda x: _forked(x) * torch.rand_like(x))
ZOO.flow("manual_seed_inside", lambda x: _reseeded(x))
ZOO.flow("rng_state_put_back_inside", lambda x: _put_back(x))
ZOO.flow("trunc_normal_init", lambda x: nn.init.trunc_normal_(torch.empty(8, 3)).mul(1.5).T @ x.T)
ZOO.flow("fractional_max_pool", lambda x: F.fractional_max_pool2d(x.sin(), 2, output_size=3).exp(), x=(2, 3, 7, 7))
ZOO.flow("drop_path", lambda x: x + F.gelu(x) * (torch.rand(6, 1) < 0.6) / 0.6)
ZOO.flow("mixup", lambda x: _mixup(x))
ZOO.flow("noise_in_place_of_result", lambda x: x.sin().add_(torch.randn(6, 8), alpha=0.1).exp())
ZOO.flow("noise_on_slice", lambda x: _noise_on_slice(x))


def _fill(method: str, *args: float) -> Tensor:
    return getattr(torch.empty(6, 8), method)(*args)


def _counts(x: Tensor) -> Tensor:
    many = torch.poisson(x.detach().exp() * 5)
    return many + torch.binomial(many, x.detach().sigmoid())


def _reinforce(x: Tensor) -> Tensor:
    coin = Bernoulli(logits=x)
    sample = coin.sample()
    return coin.log_prob(sample) * (sample - 0.5)


def _forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return F.dropout(x.sin(), 0.4).exp()


def _reseeded(x: Tensor) -> Tensor:
    y = F.dropout(x.sin(), 0.4)
    torch.manual_seed(11)
    return F.dropout(y.exp(), 0.4).sin()


def _put_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = F.dropout(x.sin(), 0.4)
    torch.set_rng_state(state)
    return y.exp() * F.dropout(x.cos(), 0.4)


def _mixup(x: Tensor) -> Tensor:
    share = float(np.random.beta(0.5, 0.5))
    return (share * x + (1 - share) * x[torch.randperm(6)]).exp()


def _noise_on_slice(x: Tensor) -> Tensor:
    y = x.sin()
    y[:, 2:4].normal_()
    return (y * x).exp()


def _with_generator(draw: Callable[[Tensor, torch.Generator], Tensor]) -> Callable[[], Program]:
    def build() -> Program:
        x, generator = randn(6, 8), torch.Generator().manual_seed(5)

        def step() -> Tensor:
            return weigh((draw(prepare(x), generator) * prepare(x)).exp())

        return Program(step, leaves={"x": x}, python_state=lambda: generator)

    return build


GENERATOR_DRAWS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "rand": lambda x, g: torch.rand(6, 8, generator=g),
    "randn": lambda x, g: torch.randn(6, 8, generator=g) + torch.randn(6, 8),
    "randint": lambda x, g: torch.randint(0, 9, (6, 8), generator=g).sin(),
    "randperm": lambda x, g: x[torch.randperm(6, generator=g)],
    "bernoulli": lambda x, g: torch.bernoulli(x.sigmoid(), generator=g),
    "multinomial": lambda x, g: x.softmax(1).gather(1, torch.multinomial(x.softmax(1), 8, generator=g)),
    "normal_inplace": lambda x, g: torch.empty(6, 8).normal_(generator=g),
    "uniform_inplace": lambda x, g: x.sin().mul_(torch.empty(6, 8).uniform_(generator=g)),
    "exponential_inplace": lambda x, g: torch.empty(6, 8).exponential_(generator=g),
    "reseeded": lambda x, g: torch.rand(6, 8, generator=g.manual_seed(g.initial_seed() + 1)),
    "cloned": lambda x, g: torch.rand(6, 8, generator=g) * torch.rand(6, 8, generator=g.clone_state()),
    "fresh": lambda x, g: torch.rand(6, 8, generator=torch.Generator().manual_seed(int(g.initial_seed()))),
    "interleaved": lambda x, g: torch.rand(6, 8, generator=g) * torch.rand(6, 8) + torch.rand(6, 8, generator=g),
}
for _name, _draw in GENERATOR_DRAWS.items():
    ZOO.add(f"generator_{_name}", _with_generator(_draw))


@ZOO.program()
def python_and_numpy_random() -> Program:
    x = randn(6, 8)

    def step() -> Tensor:
        h = prepare(x)
        for _ in range(3):
            h = (h * random.uniform(0.5, 1.5)).sin() if random.random() < 0.6 else h.exp().tanh()
        return weigh(h * torch.from_numpy(np.random.rand(6, 8)) + float(np.random.randn()))

    return Program(step, leaves={"x": x})


@ZOO.program()
def own_python_and_numpy_generators() -> Program:
    x, mine, theirs = randn(6, 8), random.Random(1), np.random.default_rng(2)

    def step() -> Tensor:
        h = prepare(x) * mine.gauss(0, 1)
        return weigh(h.sin() * torch.tensor(theirs.normal(size=(6, 8)), dtype=torch.float32) * x)

    return Program(step, leaves={"x": x}, python_state=lambda: [mine, theirs])


@ZOO.program()
def layer_drop() -> Program:
    model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(5))
    x = randn(6, 8)

    def step() -> Tensor:
        h = prepare(x)
        for block in model:
            h = h + block(h) if random.random() < 0.7 else h
        return weigh(h)

    return Program(step, model=model, leaves={"x": x})


@ZOO.program()
def numbers_drawn_between_forward_and_backward() -> Program:
    x = randn(6, 8)
    return Program(
        lambda: weigh(F.dropout(prepare(x), 0.5).exp()),
        leaves={"x": x},
        after_forward=lambda: (torch.rand(7), random.random(), np.random.rand()),
    )


@ZOO.program()
def numbers_drawn_by_a_gradient_hook() -> Program:
    x = randn(6, 8)

    def step() -> Tensor:
        h = F.dropout(prepare(x), 0.5)
        h.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return weigh(F.dropout(h.exp(), 0.5).sin())

    return Program(step, leaves={"x": x})
