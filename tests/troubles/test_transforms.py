"""Higher-order gradients and function transforms."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lowtide
from troubles.ways import OURS, Way, exact, finish, grads, ours, recorded, torch_raises, torchs


def wave(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).tanh()


INSIDE_A_TRANSFORM: dict[str, Callable[[Way, Tensor], Tensor]] = {
    "grad": lambda way, x: grad(lambda y: way(wave, y).sum())(x),
    "grad of grad": lambda way, x: grad(lambda y: grad(lambda z: way(wave, z).sum())(y).sum())(x),
    "vjp": lambda way, x: vjp(lambda y: way(wave, y), x)[1](torch.ones_like(x))[0],
    "jacrev": lambda way, x: jacrev(lambda y: way(wave, y).sum(1))(x),
    "jvp": lambda way, x: jvp(lambda y: way(wave, y), (x,), (torch.ones_like(x),))[1],
    "vmap of grad": lambda way, x: vmap(grad(lambda y: way(wave, y).sum()))(x),
    "vmap": lambda way, x: vmap(lambda y: way(wave, y))(x),
}


JIT = pytest.mark.filterwarnings("ignore:.torch.jit.script")
"""Torch's own, where forward mode is used for the first time in a process."""


@JIT
@pytest.mark.parametrize("transform", INSIDE_A_TRANSFORM.values(), ids=INSIDE_A_TRANSFORM)
def test_B85_function_transforms_refuse_a_checkpoint_inside_them(transform: Callable[[Way, Tensor], Tensor]) -> None:
    def program(way: Way) -> object:
        x = torch.randn(3, 4, requires_grad=True)
        out = transform(way, x)
        finish(out.exp().sum())
        return out, x.grad

    exact(program)
    if transform is INSIDE_A_TRANSFORM["grad"]:
        torch_raises(program, "saved tensor hooks")


def test_B85_vmap_inside_a_checkpoint_and_backward_after_it() -> None:
    def program(way: Way) -> object:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(5, 4, requires_grad=True)
        weights = dict(model.named_parameters())

        def per_sample(x: Tensor) -> Tensor:
            return vmap(lambda row: functional_call(model, weights, (row,)).exp())(x)

        finish(way(per_sample, x).sum())
        return grads(model, x)

    exact(program)


def test_B85_per_sample_gradients_of_a_checkpointed_model() -> None:
    def program(way: Way) -> object:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 4)
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
            return way(lambda row: functional_call(model, weights, (row,)), row).sum()

        return vmap(grad(loss), in_dims=(None, 0))(weights, x)

    exact(program)
    torch_raises(program, "saved tensor hooks")


@JIT
def test_B86_forward_mode_tangents_of_intermediates_stay_alive() -> None:
    """What forward mode made is freed when the region ends: no function holds the tangent for a second run."""
    alive: list[Any] = []

    def function(x: Tensor) -> Tensor:
        h = x.sin()
        alive.append(weakref.ref(forward_ad.unpack_dual(h).tangent))
        return h.exp().tanh()

    def held(way: Way) -> bool:
        alive.clear()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.randn(4, requires_grad=True), torch.ones(4))
            out = way(function, dual)
            gc.collect()
            return out is not None and alive[0]() is not None

    assert not held(ours)
    assert not held(recorded)


def energy(way: Way) -> object:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)

    def force(x: Tensor) -> Tensor:
        potential = layer(x).tanh().square().sum()
        (slope,) = torch.autograd.grad(potential, x, create_graph=True)
        return (slope * x).exp()

    out = way(force, x)
    finish(out.sum())
    return out, grads(layer, x)


def test_B88_gradients_inside_the_region() -> None:
    exact(energy)


def test_B88_nested_regions_with_gradients_inside_both() -> None:
    def program(way: Way) -> object:
        x = torch.randn(3, 4, requires_grad=True)

        def inner(y: Tensor) -> Tensor:
            return torch.autograd.grad(way(wave, y).sum(), y, create_graph=True)[0].exp()

        def outer(y: Tensor) -> Tensor:
            return torch.autograd.grad(way(inner, y).sum(), y, create_graph=True)[0].sin()

        finish(way(outer, x).sum())
        return x.grad

    exact(program)


def keep_tanh(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.tanh.default else CheckpointPolicy.PREFER_RECOMPUTE


def twice(way: Way) -> object:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    out = way(lambda x: layer(x.sin()).tanh().exp(), x).sum()
    out.backward(retain_graph=True)
    first = [t.clone() for t in grads(layer, x) if t is not None]
    out.backward()
    return first, grads(layer, x)


def test_B89_a_second_backward_over_the_same_region() -> None:
    contexts = partial(create_selective_checkpoint_contexts, keep_tanh)
    exact(twice)
    exact(twice, partial(ours, context_fn=contexts))
    torch_raises(twice, "only be backward-ed once|backward an extra time|once", partial(torchs, context_fn=contexts))


def test_B89_a_third_backward_without_retain_graph_is_refused_as_in_the_plain_step() -> None:
    for way in OURS:
        out = way(wave, torch.randn(4, requires_grad=True)).sum()
        out.backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()


# ---- relatives -----------------------------------------------------------------------------------------------


def penalty(way: Way) -> object:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(way(model, x).sum(), x, create_graph=True)
    finish((slope.norm(dim=1) - 1).square().mean() + way(model, x).mean())
    return grads(model, x)


def meta_step(way: Way) -> object:
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    fast = w
    for _ in range(2):
        (slope,) = torch.autograd.grad(way(lambda x, fast=fast: (x @ fast).tanh(), x).sum(), fast, create_graph=True)
        fast = fast - 0.1 * slope
    finish(way(lambda x: (x @ fast).exp(), x).sum())
    return w.grad


def batched_gradients(way: Way) -> object:
    x = torch.randn(4, requires_grad=True)
    out = way(lambda x: wave(x) * x.sum(), x)
    return torch.autograd.grad(out, x, torch.eye(4), is_grads_batched=True)


def some_inputs_only(way: Way) -> object:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    out = way(lambda x: layer(x.sin()).tanh().exp(), x).sum()
    first = torch.autograd.grad(out, layer.weight, retain_graph=True)
    out.backward(inputs=[x])
    return first, grads(layer, x)


@pytest.mark.parametrize("program", [penalty, meta_step, batched_gradients, some_inputs_only])
def test_relatives(program: Callable[[Way], object]) -> None:
    exact(program)


def test_relative_torch_func_inside_an_attached_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 4)
    wanted = jacrev(model)(x)
    with lowtide.attach(model, policy=lowtide.policies.recompute_all):
        assert torch.equal(jacrev(model)(x), wanted)
        model(x).sum().backward()
