"""Custom autograd Functions and operators, leaks, user code that catches everything."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.demo.memory import measure_memory
from troubles.ways import OURS, Way, exact, finish, grads, ours, plainly, recorded, reentrant, torch_raises, tried


class SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


def live_tensors() -> int:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("way", OURS)
def test_B99_a_custom_function_at_the_end_leaks(way: Way) -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)

    def step() -> None:
        way(lambda x: SavesItsOutput.apply(layer(x).tanh()), x).sum().backward()

    for _ in range(3):
        step()
    gc.collect()
    before = live_tensors()
    for _ in range(10):
        step()
    gc.collect()
    assert live_tensors() <= before


class KeepsOnContext(torch.autograd.Function):
    """Keeps an intermediate as an attribute, where nobody can free it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.z = x.sin()
        return ctx.z.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.z.exp() * (1 - ctx.z.square()).sqrt()


def test_B101_tensors_on_the_context_stay_and_are_right() -> None:
    """They are the program's own references, so they stay; written as save_for_backward they can go, see below."""

    def program(way: Way) -> object:
        x = torch.rand(8, requires_grad=True)
        finish(way(lambda x: KeepsOnContext.apply(x).tanh(), x).sum())
        return x.grad

    exact(program)


class Fused(torch.autograd.Function):
    """The same, as the documentation of torch asks for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        z = x.sin()
        out = z.exp()
        ctx.save_for_backward(z, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        z, out = ctx.saved_tensors
        return gradient * out * (1 - z.square()).sqrt()


def test_B101_a_custom_function_can_be_kept_or_recomputed_by_name() -> None:
    x = torch.rand(1 << 12, requires_grad=True)

    class Declared(Fused):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            z = x.sin()
            out = z.exp()
            ctx.save_for_backward(z, out)
            return out

    lowtide.recomputable(Declared)

    def held(kind: Any, policy: Any) -> int:
        def forward() -> Tensor:
            with lowtide.record(policy):
                return kind.apply(x * 0.5).tanh().sum()

        forward().backward()
        return measure_memory(forward, Tensor.backward).held_bytes

    none, all_of_it = lowtide.policies.recompute_all, lowtide.policies.keep_all
    only_sin = lambda op: op.name == "aten.sin"  # noqa: E731
    tensor = x.numel() * 4
    assert held(Declared, all_of_it) - held(Declared, only_sin) >= 2 * tensor
    assert held(Declared, only_sin) - held(Declared, none) == pytest.approx(tensor, abs=256)
    assert held(Fused, none) > held(Declared, none) + tensor  # undeclared: kept, whatever the policy says


@pytest.fixture
def scaled() -> Any:
    """A registered operator with its own backward formula."""
    with contextlib.suppress(AttributeError):
        return torch.ops.lowtide_custom.scaled

    @torch.library.custom_op("lowtide_custom::scaled", mutates_args=())
    def scaled(x: Tensor, factor: float) -> Tensor:
        calls.append(1)
        return x.detach().sin() * factor

    def setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.factor = inputs[1]

    scaled.register_autograd(lambda ctx, g: (g * ctx.saved_tensors[0].cos() * ctx.factor, None), setup_context=setup)
    return torch.ops.lowtide_custom.scaled


calls: list[int] = []


def test_B101_an_operator_with_its_own_backward_is_kept_until_it_is_declared(scaled: Any) -> None:
    x = torch.rand(1 << 12, requires_grad=True)

    def forward() -> Tensor:
        with lowtide.record(lowtide.policies.recompute_all):
            h = x
            for _ in range(4):
                h = scaled(h * 2, 0.5)
            return h.sum()

    def program(way: Way) -> object:
        x = torch.randn(8, requires_grad=True)
        finish(way(lambda x: scaled(scaled(x.exp(), 0.5).tanh(), 2.0).exp(), x).sum())
        return x.grad

    exact(program)
    forward().backward()
    kept = measure_memory(forward, Tensor.backward).held_bytes
    lowtide.recomputable("lowtide_custom::scaled")
    exact(program)
    calls.clear()
    forward().backward()
    assert len(calls) == 8 + 4  # proven: twice each in forward; once each in backward, which reads the outputs too
    assert measure_memory(forward, Tensor.backward).held_bytes < kept / 4


# ---- memory that waits for the collector ---------------------------------------------------------------------


def leaves_garbage(way: Way) -> bool:
    holder: list[Any] = []
    x = torch.randn(16, requires_grad=True)
    gc.collect()
    gc.disable()
    try:

        def function(x: Tensor) -> Tensor:
            out = x.sin().exp()
            holder.append(out)
            return out

        loss = way(function, x).sum()
        ref = weakref.ref(holder[0])
        loss.backward()
        del loss, function
        holder.clear()
        return ref() is not None
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.parametrize("way", [*OURS, plainly])
def test_B102_a_reference_cycle_keeps_outputs_until_the_collector_runs(way: Way) -> None:
    assert not leaves_garbage(way)


def test_B102_a_closure_that_holds_the_output() -> None:
    def leaks(way: Way) -> bool:
        box: dict[str, Any] = {}
        x = torch.randn(16, requires_grad=True)
        gc.collect()
        gc.disable()
        try:
            box["out"] = way(lambda x, box=box: (x.sin().exp(), box)[0], x)
            ref = weakref.ref(box["out"])
            box["out"].sum().backward()
            del box
            return ref() is not None
        finally:
            gc.enable()
            gc.collect()

    assert not any(leaks(way) for way in (ours, recorded, plainly))
    if tried:
        assert leaks(reentrant)


# ---- probed ---------------------------------------------------------------------------------------------------


def catches_everything(way: Way) -> object:
    layer, x, fallbacks = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True), []

    def region(x: Tensor) -> Tensor:
        try:
            h = layer(x).tanh()
            return h.exp().sin()
        except Exception:
            fallbacks.append("taken")
            return layer(x)

    finish(way(region, x).sum())
    return fallbacks, grads(layer, x)


def test_P12_user_code_with_except_exception_swallows_the_early_stop_signal() -> None:
    """There is no such signal here: a replay calls no user code."""
    exact(catches_everything)
    torch_raises(catches_everything, "early_stop is set", error=AssertionError)


# ---- relatives -----------------------------------------------------------------------------------------------


def test_relative_a_function_that_marks_its_input_dirty_and_one_without_gradient() -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = x.round()
            ctx.mark_non_differentiable(out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def program(way: Way) -> object:
        x = torch.randn(6, requires_grad=True)
        finish(way(lambda x: Doubles.apply(x.sin()).cos() * Stops.apply(x.sin() * 3), x).sum())
        return x.grad

    exact(program)


def test_relative_a_cycle_through_a_hook_on_the_output() -> None:
    x = torch.randn(16, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for way in (ours, recorded):
            out = way(lambda x: x.sin().exp(), x)
            seen: list[float] = []
            out.register_hook(lambda gradient, seen=seen: seen.append(float(gradient.sum())))
            ref = weakref.ref(out)
            out.sum().backward()
            del out
            assert ref() is None
    finally:
        gc.enable()
