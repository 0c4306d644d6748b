"""Autocast and dtype: backward computes in the precision in which forward did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from troubles.ways import Way, exact, finish, grads, ours, plainly, recorded, torch_differs

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("where", ["around the step", "around the region", "inside the region"])
def test_B12_bf16_autocast_comes_back_as_fp16_in_the_recompute(half: torch.dtype, where: str) -> None:
    def autocast(here: str) -> Any:
        return torch.autocast("cpu", half) if here == where else contextlib.nullcontext()

    def program(way: Way) -> object:
        layer, x, seen = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8), []

        def function(x: Tensor) -> Tensor:
            with autocast("inside the region"):
                out = layer(x)
            seen.append(out.dtype)
            return out.float().square()

        with autocast("around the step"):
            with autocast("around the region"):
                out = way(function, x)
            loss = out.sum()
        finish(loss)
        assert seen == [half]
        return out, grads(layer)

    exact(program)


def own_autograd_wrapper(function: Way, x: Tensor, *parameters: Tensor) -> Any:
    """What older wrappers do: enter autocast again with its default dtype."""

    class Wrapper(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Any:
            ctx.save_for_backward(x, *parameters)
            ctx.enabled = torch.is_autocast_enabled("cpu")
            return function(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, *parameters = ctx.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad(), torch.autocast("cpu", enabled=ctx.enabled):
                out = function(x)
            return torch.autograd.grad(out, (x, *parameters), gradient)

    return Wrapper.apply(x, *parameters)


def test_B13_a_wrapper_enters_autocast_again_with_the_default_dtype() -> None:
    def program(way: Way) -> object:
        layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

        def function(x: Tensor) -> Tensor:
            return layer(x.sin()).float().tanh()

        with torch.autocast("cpu", torch.float16):
            out = way(function, x, *layer.parameters()) if way is own_autograd_wrapper else way(function, x)
        finish(out.sum())
        return grads(layer, x)

    exact(program)
    torch_differs(program, own_autograd_wrapper)


class Precision:
    """A mixed-precision context of somebody's own, such as the ones for 8-bit floats."""

    bits: int | None = None

    @classmethod
    @contextlib.contextmanager
    def use(cls, bits: int) -> Iterator[None]:
        before, cls.bits = cls.bits, bits
        try:
            yield
        finally:
            cls.bits = before

    @classmethod
    def linear(cls, x: Tensor, w: Tensor) -> Tensor:
        if cls.bits is None:
            return x @ w
        steps = 2.0**cls.bits
        return ((x.float() * steps).round() / steps).to(w.dtype) @ w


def test_B14_an_own_precision_context_nested_with_autocast_is_lost_in_the_recompute() -> None:
    def program(way: Way) -> object:
        w, v, x = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)

        def function(x: Tensor) -> Tensor:
            h = Precision.linear(x * 1.01, w).float().tanh()
            with Precision.use(5):
                return Precision.linear(h.square(), v).float().tanh()

        with torch.autocast("cpu", torch.bfloat16), Precision.use(2):
            out = way(function, x)
        finish(out.sum())
        return out, grads(w, v)

    exact(program)
    torch_differs(program)


CACHED: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "one weight twice": lambda layer, x: layer(layer(x).tanh()),
    "a weight cast before and in the region": lambda layer, x: (x @ layer.weight).tanh(),
    "no_grad inside": lambda layer, x: layer(x) * no_grad_twin(layer, x),
    "autocast off inside": lambda layer, x: layer(x).float() + without_autocast(layer, x),
    "a tied head": lambda layer, x: F.linear(layer(x).tanh(), layer.weight.t()),
}


def no_grad_twin(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x).sigmoid()


def without_autocast(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return layer(x).tanh()


@pytest.mark.parametrize("use", CACHED.values(), ids=CACHED)
@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_B15_the_cache_of_cast_weights_changes_what_is_saved(
    use: Callable[[nn.Linear, Tensor], Tensor], cached: bool, inside: bool
) -> None:
    def program(way: Way) -> object:
        layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            h = layer(x)  # the cast weight may be in the cache from here on
            loss = way(lambda h: use(layer, h.float()).float().tanh(), h).sum()
            if inside:
                finish(loss)
        if not inside:
            finish(loss)
        return loss, grads(layer, x)

    exact(program)


class Casting(nn.Module):
    """A block that casts its input before forward and its output after, by hooks, as sharding engines do."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(half)
        self.casts = 0
        self.inner.register_forward_pre_hook(lambda module, args: (self.count(args[0]).to(half),))
        self.inner.register_forward_hook(lambda module, args, out: out.float())

    def count(self, x: Tensor) -> Tensor:
        self.casts += 1
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sin()).tanh()


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_B17_B18_a_sharding_engine_casts_inputs_in_forward_and_not_in_the_recompute(half: torch.dtype) -> None:
    """The hooks stand in for the engine; with the engine itself: tests of the integrations."""

    def program(way: Way) -> object:
        model, x = Casting(half), torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = way(model, x)
        finish(out.sum())
        return out, grads(model, x), model.casts

    exact(program)
    torch_differs(program)  # the hooks ran twice


# ---- relatives -----------------------------------------------------------------------------------------------


def test_relative_the_default_dtype_is_changed_between_forward_and_backward() -> None:
    def program(way: Way) -> object:
        x = torch.randn(4, 8, requires_grad=True)
        out = way(lambda x: (x.sin() * torch.linspace(0, 1, 8)).exp().square(), x)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            finish(out.sum())
        finally:
            torch.set_default_dtype(before)
        return out, x.grad

    exact(program)
    torch_differs_or_raises(program)


def torch_differs_or_raises(program: Callable[[Way], object]) -> None:
    from torch.utils.checkpoint import CheckpointError

    with contextlib.suppress(CheckpointError):
        torch_differs(program)


def test_relative_a_gradient_scaler_around_a_half_precision_region() -> None:
    def program(way: Way) -> object:
        layer, x, scaler = nn.Linear(8, 8), torch.randn(4, 8), torch.amp.GradScaler("cpu", init_scale=128.0)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autocast("cpu", torch.float16):
                loss = way(lambda x: layer(x).tanh().float().square(), x).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss, list(layer.parameters()), scaler.state_dict()

    exact(program)


def test_relative_autocast_is_left_before_backward_and_another_one_entered() -> None:
    def program(way: Way) -> object:
        layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.float16):
            out = way(lambda x: layer(x.sin()).tanh(), x).float()
        with torch.autocast("cpu", torch.bfloat16):
            finish(out.sum())
        return out, grads(layer, x)

    exact(program, ours, recorded)


def test_relative_a_planned_model_gives_the_same_bits_under_autocast() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(4)))
    x = torch.randn(32, 16)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    plan = lowtide.solve(lowtide.trace(step, model=model), budget="85%")
    assert plan.recompute
    assert lowtide.verify(step, model, plan)
    assert plainly(step).dtype == torch.float32
