"""Questions to ways of checkpointing, each answered by running it: what the table in docs/comparison.md says.

A probe is a program that takes a way, as in ways.py. The answer is yes if the way leaves behind what the plain step
does, bit for bit; no if it leaves something else, or raises where the plain step does not.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from troubles.ways import Way, finish, grads, ours, outcome, plainly, reentrant, torchs

PROBES: dict[str, Callable[[Way], object]] = {}


def probe(question: str) -> Callable[[Callable[[Way], object]], Callable[[Way], object]]:
    def add(program: Callable[[Way], object]) -> Callable[[Way], object]:
        PROBES[question] = program
        return program

    return add


@probe("the function is called once")
def _once(way: Way) -> object:
    x, calls = torch.randn(4, requires_grad=True), []
    finish(way(lambda x: (calls.append(1), x.sin().exp())[1], x).sum())
    return len(calls)


@probe("batch norm counts a batch once")
def _batch_norm(way: Way) -> object:
    norm, x = nn.BatchNorm1d(6), torch.randn(4, 6, requires_grad=True)
    finish(way(lambda x: norm(x).tanh(), x).sum())
    return list(norm.buffers())


@probe("dropout, without any setting")
def _dropout(way: Way) -> object:
    layer, x = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
    finish(way(lambda x: F.dropout(layer(x), 0.5).square(), x).sum(), lambda: torch.rand(3))
    return grads(layer, x)


@probe("a generator of one's own, Python's random")
def _generators(way: Way) -> object:
    own, x = torch.Generator().manual_seed(1), torch.randn(6, requires_grad=True)
    random.seed(2)
    finish(way(lambda x: (x * torch.rand(6, generator=own) * random.random()).exp().sin(), x).sum())
    return x.grad


@probe("a setting that changes before backward")
def _setting(way: Way) -> object:
    setting, x = {"scale": 2.0}, torch.randn(6, requires_grad=True)
    finish(way(lambda x: (x * setting["scale"]).sin().exp(), x).sum(), lambda: setting.update(scale=3.0))
    return x.grad


@probe("a cache that the function appends to")
def _cache(way: Way) -> object:
    layer, cache, x = nn.Linear(6, 6), list[Tensor](), torch.randn(3, 6, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        cache.append(layer(x))
        keys = torch.cat(cache)
        return (x @ keys.T).softmax(-1) @ keys

    finish(way(attend, x).sum())
    return grads(layer, x), len(cache)


@probe("weights changed before backward are an error, as in the plain step")
def _weights(way: Way) -> object:
    first, second, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
    out = way(lambda x: second(first(x).tanh()).tanh(), x)
    with torch.no_grad():
        second.weight.mul_(2)
    try:
        finish(out.sum())
    except RuntimeError:
        return "refused"
    return grads(first)


@probe("data as the only argument, weights in the closure")
def _frozen_input(way: Way) -> object:
    layer, head = nn.Linear(6, 6), nn.Linear(6, 1)
    finish(head(way(lambda x: layer(x).tanh(), torch.randn(4, 6))).sum())
    return grads(layer, head)


@probe("keyword arguments")
def _keywords(way: Way) -> object:
    x, mask = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    finish(way(lambda x, *, mask: (x * mask.sigmoid()).exp(), x, mask=mask).sum())
    return grads(x, mask)


@probe("tensors in dicts and lists, in and out")
def _containers(way: Way) -> object:
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    out = way(lambda d: {"out": [d["a"][0].exp() * d["a"][1].sin()]}, {"a": [x, y]})
    finish(out["out"][0].sum())
    return grads(x, y)


@probe("hooks of the modules inside fire in pairs, once")
def _hooks(way: Way) -> object:
    block, x, events = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4), list[str]()
    block[2].register_forward_pre_hook(lambda *_: events.append("before"))
    block[2].register_forward_hook(lambda *_: events.append("after"))
    finish(way(lambda x: block(x), x.requires_grad_()).sum())
    return events


@probe("torch.func.grad around it")
def _functional(way: Way) -> object:
    return grad(lambda x: way(lambda y: y.sin().exp(), x).sum())(torch.randn(4))


@probe("gradients of gradients")
def _second_order(way: Way) -> object:
    layer, x = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
    (slope,) = torch.autograd.grad(way(lambda x: layer(x).tanh(), x).sum(), x, create_graph=True)
    finish(slope.square().sum())
    return grads(layer)


@probe("a second backward with retain_graph")
def _twice(way: Way) -> object:
    x = torch.randn(6, requires_grad=True)
    out = way(lambda x: x.sin().exp().tanh(), x).sum()
    out.backward(retain_graph=True)
    out.backward()
    return x.grad


@probe("the training flag does not matter")
def _evaluating(way: Way) -> object:
    """Whether less is kept in eval mode as well, where gradients are needed."""
    kept: list[int] = []
    x = torch.randn(4, requires_grad=True)

    def chain(x: Tensor) -> Tensor:
        for _ in range(6):
            x = x.sin().exp()
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(1) or t, lambda t: t):
        way(chain, x, evaluating=True) if way is flagged else way(chain, x)
    return len(kept) <= 3 or way is plainly


# ---- the ways -------------------------------------------------------------------------------------------------


def keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.exp.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(function: Way, *args: Any, **kwargs: Any) -> Any:
    """Torch's selective checkpointing, saving matrix products and exponentials."""
    return torchs(function, *args, context_fn=partial(create_selective_checkpoint_contexts, keep_matmuls), **kwargs)


def remat(function: Way, *args: Any, **kwargs: Any) -> Any:
    """torch_remat with its defaults."""
    import torch_remat  # type: ignore[import-untyped]

    return torch_remat.checkpoint()(function)(*args, **kwargs)


def flagged(function: Way, *args: Any, evaluating: bool = False, **kwargs: Any) -> Any:
    """A layer of transformers under the trainer's flag, with the options that the flag has by default."""
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    layer = Layer()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    return layer.train(not evaluating)(*args, **kwargs)


def deepspeeds(function: Way, *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's checkpoint function with its defaults."""
    import deepspeed  # type: ignore[import-not-found]

    return deepspeed.checkpointing.checkpoint(function, *args, **kwargs)


def compiled(budget: float) -> Way:
    """Torch's compiler with a budget for what it saves, its decompositions without a code generator."""

    def way(function: Way, *args: Any, **kwargs: Any) -> Any:
        from torch._functorch import config

        torch._dynamo.reset()
        with config.patch(activation_memory_budget=budget):
            return torch.compile(function, backend="aot_eager_decomp_partition")(*args, **kwargs)

    return way


WAYS: dict[str, tuple[Way, Way]] = {
    "torch": (torchs, plainly),
    "reentrant": (reentrant, plainly),
    "selective": (selective, plainly),
    "torch_remat": (remat, plainly),
    "transformers": (flagged, plainly),
    "DeepSpeed": (deepspeeds, plainly),
    "compiler": (compiled(0.0), compiled(1.0)),
    "lowtide": (ours, plainly),
}
"""Column of the table -> a way, and what it has to agree with: the plain step, or compiled code that keeps all."""


def answer(question: str, way: Way, base: Way = plainly) -> bool:
    """Whether the way leaves behind what the base does."""
    program = PROBES[question]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return outcome(program, way) == outcome(program, base)
        except ImportError:
            raise
        except Exception:  # an error where the plain step has none
            return False
