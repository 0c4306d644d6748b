"""Tiny models with a step each, to be traced and to try many plans on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.demo.model import GPT, GPTShape
from lowtide.graph import StepGraph
from lowtide.plan import Plan


@dataclass(frozen=True)
class Tiny:
    """A model and a step of it, small enough to try many plans on."""

    model: nn.Module
    step: Callable[[], Tensor]

    def trace(self, **settings: Any) -> StepGraph:
        """The graph of the step, by default on fake tensors."""
        return lowtide.trace(self.step, self.model, **({"fake": True} | settings))

    def rehearse(self, plan: Plan, *, fake: bool = True) -> int:
        """The peak that a rehearsal counts."""
        return lowtide.rehearse(self.step, self.model, plan, fake=fake)


def gpt_step(*, blocks: int, batch: int = 2, length: int = 16, width: int = 32, vocabulary: int = 64) -> Tiny:
    """A step of a GPT with positions for every length up to 64."""
    torch.manual_seed(0)
    model = GPT(GPTShape(vocabulary, max(length, 64), width, blocks, heads=2))
    tokens = torch.randint(vocabulary, (batch, length + 1))
    return Tiny(model, lambda: model.loss(tokens))


class Forward(nn.Module):
    """A module whose forward is given as a function of its parts."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.run = forward

    def forward(self, *args: Tensor) -> Tensor:
        return self.run(self, *args)


TINY: dict[str, Callable[[], Tiny]] = {}


def tiny(*shapes: tuple[int, ...], **parts: Callable[[], nn.Module]) -> Callable[[Callable[..., Tensor]], None]:
    """Register a tiny model of ``parts`` with inputs of ``shapes``; the loss is the mean of what it returns."""

    def register(forward: Callable[..., Tensor]) -> None:
        def build() -> Tiny:
            torch.manual_seed(0)
            model = Forward(forward, **{name: make() for name, make in parts.items()})
            inputs = [torch.randn(shape) for shape in shapes]
            return Tiny(model, lambda: model(*inputs).square().mean())

        TINY[forward.__name__.strip("_")] = build

    return register


def _linear(i: int = 32, o: int = 32) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(i, o)


@tiny((16, 32), a=_linear(), b=_linear(32, 64), c=_linear(64, 32))
def perceptron(m: Any, x: Tensor) -> Tensor:
    return m.c(F.dropout(F.gelu(m.b(F.relu(m.a(x)))), 0.2))


@tiny((16, 32), a=_linear(), b=_linear())
def in_place_activations(m: Any, x: Tensor) -> Tensor:
    return F.relu_(m.b(F.dropout(m.a(x), 0.5, inplace=True)))


@tiny((16, 32), a=_linear(), b=_linear())
def overwritten_after_use(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).sin()
    z = y.exp()
    y.mul_(2)
    return m.b(z * y).tanh()


@tiny((16, 32), a=_linear())
def written_in_parts(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 2
    h[:, :8].mul_(0.5)
    h[:, 8:].add_(h[:, :24].detach().sin())
    return h.sin() * h


@tiny((16, 32), a=_linear(), b=_linear(), c=_linear())
def diamond(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.b(h).sigmoid() * m.c(h).exp() + h


@tiny((16, 32), a=_linear(32, 96), b=_linear())
def several_results(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.a(x).exp().chunk(3, dim=1)
    top, _ = torch.sort(q.sin(), dim=1)
    variance, mean = torch.var_mean(k.cos(), dim=1)
    return m.b(top * v) * (variance - mean)[:, None]


@tiny((4, 3, 8, 8), a=lambda: nn.Conv2d(3, 8, 3, padding=1), n=lambda: nn.BatchNorm2d(8), b=lambda: nn.Conv2d(8, 8, 3))
def convolutions(m: Any, x: Tensor) -> Tensor:
    h = F.max_pool2d(F.relu(m.n(m.a(x)), inplace=True), 2)
    return m.b(h).flatten(1).softmax(1)


@tiny((4, 8, 8, 8), down=lambda: nn.Conv2d(8, 16, 2, 2), mid=lambda: nn.Conv2d(16, 16, 3, padding=1),
      up=lambda: nn.ConvTranspose2d(16, 8, 2, 2), end=lambda: nn.Conv2d(16, 4, 1))  # fmt: skip
def skip(m: Any, x: Tensor) -> Tensor:
    top = F.silu(x * 2)
    h = m.up(F.silu(m.mid(F.silu(m.down(top)))))
    return m.end(torch.cat([top, h], dim=1)).tanh()


@tiny((4, 12, 32), n=lambda: nn.LayerNorm(32), qkv=_linear(32, 96), out=_linear())
def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(m.n(x)).view(4, 12, 3, 4, 8).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + m.out(mixed.transpose(1, 2).reshape(4, 12, 32))


@tiny((4, 12, 32), qk=_linear(32, 64), out=_linear())
def attention_by_hand(m: Any, x: Tensor) -> Tensor:
    q, k = m.qk(x).chunk(2, dim=-1)
    scores = q @ k.transpose(1, 2) / 6
    scores.masked_fill_(torch.ones(12, 12, dtype=torch.bool).triu(1), -1e9)
    return m.out(F.dropout(scores.softmax(-1), 0.1) @ x)


@tiny((4, 10, 16), rnn=lambda: nn.LSTM(16, 16, 2, batch_first=True), out=_linear(16, 8))
def recurrent(m: Any, x: Tensor) -> Tensor:
    return m.out(m.rnn(x.sin())[0])


@tiny((8, 16), cell=lambda: nn.GRUCell(16, 16))
def unrolled(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    total = torch.zeros_like(x)
    for _ in range(4):
        h = m.cell(x, h)
        total += h.square()
    return total


@tiny((16, 32), a=_linear(), b=_linear())
def shared_weights(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + m.b(F.silu(m.a(x)))
    return x


@tiny((16, 32), a=_linear(32, 4), b=_linear(), c=_linear())
def routed(m: Any, x: Tensor) -> Tensor:
    weights, picks = m.a(x).softmax(-1).topk(2)
    first = (picks[:, :1] < 2).to(x.dtype)
    return weights[:, :1] * m.b(x).tanh() * first + weights[:, 1:] * m.c(x).sigmoid()


@tiny((16, 32), a=_linear(), b=_linear())
def frozen_part(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.b(x).tanh()
    return (m.a(x).exp() - target).sigmoid()


@tiny((16, 32), a=_linear(), b=_linear())
def half_precision(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.b(F.gelu(m.a(x))).float().log_softmax(-1)
