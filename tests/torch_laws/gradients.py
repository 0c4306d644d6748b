"""Gradients, memory and nesting (test_autograd.py of PyTorch)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop

from lowtide import checkpoint
from lowtide.demo.memory import measure_memory
from torch_laws.table import Table, gradients, layers, leaf, same_gradients, saving

TABLE = Table()
law = TABLE.law

# ---- gradients -------------------------------------------------------------------------------------------


@law("test_checkpointing", "test_checkpointing_without_reentrant_input_requires_grad")
def _many_regions_in_a_row() -> None:
    net = layers(4)
    for requires_grad in (True, False):
        x = torch.randn(4, 6, requires_grad=requires_grad)

        def run(call: Callable[..., Any], x: Tensor = x) -> Tensor:
            for _ in range(5):
                x = call(net, x)
            return x.exp()

        same_gradients(partial(run, lambda f, x: f(x)), partial(run, checkpoint), x, *net.parameters())


@law("test_checkpointing_without_reentrant_correct_grad", "test_access_saved_tensor_twice_without_recomputation_works")
def _powers_and_retained_graphs() -> None:
    a = torch.tensor(1.0, requires_grad=True)
    b = checkpoint(lambda x: torch.exp(x) * torch.exp(x), a)
    (first,) = torch.autograd.grad(b, a, retain_graph=True)
    (again,) = torch.autograd.grad(b, a)
    assert torch.equal(first, again)
    y = checkpoint(torch.exp, a)
    saved = y.grad_fn._saved_result  # type: ignore[union-attr]
    assert torch.equal(saved, y.grad_fn._saved_result)  # type: ignore[union-attr]


@law("test_checkpointing_without_reentrant_detached_tensor", difference="no error for use_reentrant=True either")
def _detached_inside() -> None:
    weight = leaf(6, 6)
    for reentrant in (True, False):
        ours = partial(checkpoint, lambda x: (x.detach() @ weight).tanh(), leaf(), use_reentrant=reentrant)
        assert gradients(ours, weight)[0] is not None
    assert not checkpoint(lambda x: x.detach().exp(), leaf()).requires_grad


@law("test_checkpointing_without_reentrant_parameter_used_in_an_out")
def _parameter_used_inside_and_outside() -> None:
    w = leaf(6, 6)

    def run(call: Callable[..., Any]) -> Tensor:
        x = (torch.ones(4, 6) @ w).exp()
        return call(lambda t: (w @ t.T).sin(), x).sum() + (x @ w).sum()

    same_gradients(lambda: run(lambda f, x: f(x)), lambda: run(checkpoint), w)


@law("test_checkpointing_without_reentrant_custom_function_works", "test_function_with_more_than_one_output")
def _custom_functions() -> None:
    class TwoOuts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = x * y
            ctx.save_for_backward(x, y, out, x.clone())
            return out, x + y

        @staticmethod
        def backward(ctx: Any, a: Tensor, b: Tensor) -> Any:
            x, y, out, copy_of_x = ctx.saved_tensors
            assert torch.equal(x * y, out)
            assert torch.equal(x, copy_of_x)
            return a * y + b, a * x + b

    x, y = leaf(), leaf()
    function = lambda x, y: sum(t.tanh() for t in TwoOuts.apply(x.sin(), y.exp()))  # noqa: E731
    same_gradients(lambda: function(x, y), lambda: checkpoint(function, x, y), x, y)


@law(
    "test_checkpointing_without_reentrant_saved_object_identity",
    difference="a saved leaf is its own memory, by another Python object",
)
def _a_saved_leaf_is_itself() -> None:
    x, y = leaf(), leaf()
    out = checkpoint(lambda a, b: a * b, x, y)
    for saved, leaf_ in ((out.grad_fn._saved_self, x), (out.grad_fn._saved_other, y)):  # type: ignore[union-attr]
        assert saved.data_ptr() == leaf_.data_ptr()
        assert saved._version == leaf_._version


@law("test_checkpoint_valid_reset_on_error")
def _an_error_in_backward_leaves_nothing_behind() -> None:
    a = torch.randn(2, 2, requires_grad=True)

    def fail(_: Tensor) -> None:
        raise ValueError("from a hook")

    out = checkpoint(torch.exp, a).sum()
    handle = a.register_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        out.backward()
    handle.remove()
    checkpoint(torch.exp, a).sum().backward()
    assert torch.equal(a.grad, a.detach().exp())  # type: ignore[arg-type]


@law("test_checkpoint_detects_non_determinism", difference="a second run that would differ is never made")
def _what_changes_between_two_runs_does_not_matter() -> None:
    state = {"runs": 0, "save": True}

    def function(x: Tensor) -> Tensor:
        state["runs"] += 1
        x = x.sin().exp() if state.pop("save", False) else x.sin()
        return x[: 4 - state["runs"]].exp()

    for check in ("default", "none"):
        state.update(runs=0, save=True)
        x = leaf()
        checkpoint(function, x, determinism_check=check).sum().backward()
        assert state["runs"] == 1
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint(function, leaf(), determinism_check="bad")


# ---- memory ----------------------------------------------------------------------------------------------


@law("test_checkpointing_without_reentrant_memory_savings", "test_flops_and_mem")
def _less_is_held() -> None:
    net, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GELU()) for _ in range(4))), leaf(128, 64)

    def held(call: Callable[..., Any]) -> int:
        run = lambda: call(net, x).sum()  # noqa: E731
        run().backward()
        return measure_memory(run, Tensor.backward).held_bytes

    tensor, plain = 128 * 64 * 4, held(lambda f, x: f(x))
    assert held(checkpoint) < plain / 4
    save = saving("addmm")
    selective = held(partial(checkpoint, context_fn=partial(create_selective_checkpoint_contexts, save)))
    assert plain > selective >= 4 * tensor


@law("test_checkpointing_without_reentrant_early_free", "test_storage_lifetime")
def _freed_as_backward_goes() -> None:
    alive: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp.default:
                alive.append(weakref.ref(out.untyped_storage()))
            return out

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.exp().sin()
            x.register_hook(lambda _: counts.append(sum(ref() is not None for ref in alive)))
        return x

    counts: list[int] = []
    x = leaf(10)
    gc.disable()
    try:
        loss = checkpoint(chain, x).sum()
        with Watch():
            loss.backward()
        assert all(one >= other for one, other in pairwise(counts[1:]))
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


# ---- nesting ---------------------------------------------------------------------------------------------


@law("test_nested_checkpoint", "test_nested_checkpoint_two_children", "test_nested_checkpoint_same_graph")
def _nesting_in_every_shape() -> None:
    def sin(x: Tensor) -> Tensor:
        return x.sin().exp().sin()

    def cos(x: Tensor) -> Tensor:
        return x.cos().exp().cos()

    shapes: list[Callable[[Callable[..., Any]], Callable[[Tensor], Tensor]]] = [
        lambda c: lambda x: c(c_of(c, c_of(c, sin)), x),
        lambda c: lambda x: c(lambda y: c(cos, c(sin, y)), x),
        lambda c: lambda x: c(sin, x) * c(sin, x) + c(lambda y: c(sin, y) + c(cos, y), x),
        lambda c: lambda x: c(lambda y: cos(c(sin, cos(y))), x),
    ]

    def c_of(call: Callable[..., Any], function: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: call(function, x)

    x = leaf()
    for shape in shapes:
        same_gradients(lambda s=shape: s(lambda f, y: f(y))(x), lambda s=shape: s(checkpoint)(x), x)  # type: ignore[misc]


@law("test_nested_checkpoint_reentrant_backwards")
def _backward_inside_of_backward() -> None:
    def inner(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            checkpoint(lambda z: z.sin().exp(), y).sum().backward()
        assert y.grad is not None
        return x * y.grad

    x = leaf()
    same_gradients(lambda: inner(x.cos()), lambda: checkpoint(lambda x: inner(x.cos()), x), x)


@law(
    "test_nested_checkpoint_set_early_stop",
    "test_nested_checkpoint_set_early_stop_no_recompution_needed",
    "test_checkpoint_graph_execution_group",
    difference="early_stop and set_checkpoint_early_stop change nothing: only what is asked for is ever recomputed",
)
def _early_stop_is_irrelevant() -> None:
    x, replayed = leaf(), list[str]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            replayed.append(str(func))
            return func(*args, **(kwargs or {}))

    for stop in (True, False):
        replayed.clear()
        with set_checkpoint_early_stop(stop):
            out = checkpoint(lambda x: x.exp().sin().add(1.0).clone(), x, early_stop=stop)
        with Watch():
            out.sum().backward()
        assert not {"aten.clone.default", "aten.sin.default"} & set(replayed)
        assert replayed.count("aten.exp.default") == 1
