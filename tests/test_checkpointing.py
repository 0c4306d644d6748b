"""lowtide.checkpoint: torch's call, any arguments, everything once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lowtide
from lowtide.errors import PolicyError


@dataclass
class Pair:
    left: Tensor
    right: Tensor | None = None


def by_keyword(x: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
    y = (x * scale).exp().sin()
    return y if mask is None else y * mask


CALLS: dict[str, Callable[[Callable[..., Any], Tensor], Any]] = {
    "a tensor": lambda call, x: call(lambda a: a.exp().sin(), x),
    "keywords and None": lambda call, x: call(by_keyword, x, scale=0.5, mask=None),
    "a mask that needs grad": lambda call, x: call(by_keyword, x, scale=0.5, mask=x.sigmoid()),
    "a dict of lists": lambda call, x: call(lambda d: d["a"][0].exp() * d["a"][1], {"a": [x, x.cos()]}),
    "a dataclass": lambda call, x: call(lambda p: p.left.exp() * p.left.sin(), Pair(x)),
    "a dataclass back": lambda call, x: call(lambda a: Pair(a.exp().sin(), a), x).left,
    "a tuple back": lambda call, x: sum(call(lambda a: (a.exp().sin(), a.cos().exp()), x)),
    "a generator": lambda call, x: call(lambda g: sum(t.exp().sin() for t in g), (x * k for k in (1.0, 2.0))),
    "a flag and a number": lambda call, x: call(lambda a, n, on, f: a.exp() * n * f if on else a, x, 3, True, 0.5),
    "nested": lambda call, x: call(lambda a: call(lambda b: b.exp().sin(), a.cos()).exp(), x),
    "data that needs no grad": lambda call, x: call(lambda d: d.exp().sin(), torch.ones(5)) * x,
}


@pytest.mark.parametrize("use", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("reentrant", [None, True, False], ids=str)
def test_any_argument_works_and_the_function_runs_once(use: Callable[..., Any], reentrant: bool | None) -> None:
    runs = [0]

    def run(call: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
        x = torch.linspace(-1, 1, 5).requires_grad_()
        loss = use(call, x).sum()
        loss.backward()
        return loss.detach(), x.grad

    def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def ours(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def counted(*a: Any, **k: Any) -> Any:
            runs[0] += 1
            return function(*a, **k)

        return lowtide.checkpoint(counted, *args, use_reentrant=reentrant, **kwargs)

    for one, other in zip(run(plainly), run(ours), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert runs[0] in (1, 2)  # nested calls two functions


def test_only_inputs_and_outputs_are_held() -> None:
    from lowtide.demo.memory import measure_memory

    x = torch.randn(1 << 16, requires_grad=True)

    def stretch(a: Tensor) -> Tensor:
        for _ in range(6):
            a = a.sin().exp()
        return a

    plain = measure_memory(lambda: stretch(x).sum(), Tensor.backward)
    ours = measure_memory(lambda: lowtide.checkpoint(stretch, x).sum(), Tensor.backward)
    assert ours.held_bytes < plain.held_bytes / 5


def test_dropout_is_the_same_with_and_without_preserve_rng_state() -> None:
    def run(call: Callable[..., Any]) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
        out = call(layer, torch.ones(4, 8))
        torch.rand(7)
        out.sum().backward()
        grad = layer[0].weight.grad
        assert grad is not None
        return grad

    plain = run(lambda f, x: f(x))
    for keep in (True, False):
        assert torch.equal(plain, run(partial(lowtide.checkpoint, preserve_rng_state=keep)))


def test_selective_contexts_decide_what_is_kept() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def grads(call: Callable[..., Any]) -> list[Tensor]:
        x.grad = w.grad = None
        call(lambda a: (a @ w).sin().exp(), x).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return [x.grad, w.grad]

    contexts = partial(create_selective_checkpoint_contexts, policy)
    ours = grads(partial(lowtide.checkpoint, context_fn=contexts))
    assert all(torch.equal(a, b) for a, b in zip(grads(lambda f, a: f(a)), ours, strict=True))


def test_words_that_torch_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="determinism_check"):
        lowtide.checkpoint(torch.sin, torch.ones(2), determinism_check="sometimes")


def test_no_warning_about_reentrant() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowtide.checkpoint(torch.exp, torch.ones(2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("segments", [1, 2, 3, 6])
def test_sequential_in_segments_is_exact(segments: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)))
    x = torch.randn(3, 6, requires_grad=True)
    net(x).sum().backward()
    plain = [p.grad.clone() for p in (x, *net.parameters()) if p.grad is not None]
    net.zero_grad()
    x.grad = None
    lowtide.checkpoint_sequential(net, segments, x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, (x, *net.parameters()), strict=True) if p.grad is not None)


def test_too_many_segments_are_refused() -> None:
    with pytest.raises(PolicyError, match="segments"):
        lowtide.checkpoint_sequential([torch.sin], 2, torch.ones(2))
