"""Calls, arguments, randomness, autocast, devices (test_utils.py and test_autograd.py of PyTorch)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import checkpoint, checkpoint_sequential
from lowtide.errors import PolicyError
from torch_laws.table import Counting, Table, equal, layers, leaf, same_gradients

TABLE = Table()
law = TABLE.law

# ---- calls and arguments ---------------------------------------------------------------------------------


@law("test_checkpoint_trigger", difference="the functions run once, never again in backward")
def _functions_run_once() -> None:
    parts = [Counting() for _ in range(6)]
    checkpoint_sequential(parts, 2, leaf()).sum().backward()
    assert [part.calls for part in parts] == [1] * 6


@law("test_checkpoint_valid", difference="torch.autograd.grad and create_graph work whatever use_reentrant says")
def _autograd_grad_works() -> None:
    net, x = layers(), leaf()
    for reentrant in (True, False):
        run = partial(checkpoint_sequential, net, 2, x, use_reentrant=reentrant)
        wanted = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        assert equal(list(wanted), list(torch.autograd.grad(run().sum(), x, create_graph=True)))


@law("test_checkpoint", "test_checkpoint_module_list")
def _sequential_takes_modules_and_lists() -> None:
    net, x = layers(), leaf()
    for functions in (net, list(net.children()), nn.ModuleList(net.children())):
        same_gradients(lambda: net(x), partial(checkpoint_sequential, functions, 2, x), x, *net.parameters())


@law("test_checkpoint_sequential_deprecated_multiple_args", "test_checkpoint_sequential_deprecated_no_args")
def _sequential_takes_one_input() -> None:
    with pytest.raises(TypeError):
        checkpoint_sequential(layers(), 1)  # type: ignore[call-arg]
    with pytest.raises((TypeError, PolicyError)):
        checkpoint_sequential(layers(), 1, leaf(), leaf(), leaf())  # type: ignore[call-arg, arg-type]


@law("test_checkpoint_non_tensor", "test_checkpoint_no_tensors", "test_checkpoint_non_tensor_inputs_outputs")
def _anything_in_and_out() -> None:
    def function(a: Any, b: Any, scale: Any, c: Any) -> Any:
        return scale, (a + b * c) * scale, None, True, (a * b + c) * scale, "bar", a

    x, y = leaf(5), leaf(5)
    for args in ((x, y, 3, torch.rand(5)), (1.5, 2.5, 3, 0.5), (x, 2.0, 3, 1.0)):
        for mine, theirs in zip(checkpoint(function, *args), function(*args), strict=True):
            assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
    out = checkpoint(function, x, y, 3, torch.rand(5))
    assert out[6] is x
    out[1].sum().backward(retain_graph=True)
    out[4].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out[4].sum().backward()
    assert checkpoint(lambda a, b: a if b is None else a + b, x, None) is x


@law("test_checkpoint_partial_grad", difference="without anything that requires grad there is no error")
def _some_inputs_require_grad() -> None:
    with_grad, without = leaf(), torch.randn(4, 6)
    one, two = checkpoint(lambda a, b: (a, b), with_grad, without)
    assert (one.requires_grad, two.requires_grad) == (True, False)
    assert not checkpoint(lambda a, b: a.sin(), without, with_grad).requires_grad


@law("test_checkpointing_without_reentrant_arbitrary_input_output")
def _containers() -> None:
    weight = leaf(6, 6)
    data = {"x": [leaf(), leaf()], "flag": True}

    def function(d: dict[str, Any]) -> dict[str, Any]:
        return {"out": [(t @ weight).tanh() for t in d["x"]], "flag": d["flag"]}

    def run(call: Callable[..., Any]) -> Tensor:
        out = call(function, data)
        assert out["flag"] is True
        return torch.stack(out["out"])

    same_gradients(lambda: run(lambda f, d: f(d)), lambda: run(checkpoint), weight, *data["x"])  # type: ignore[misc]


@law("test_nested_checkpoint_non_tensor_inputs_and_outputs", "test_nested_checkpoint_kwargs")
def _nested_with_keywords() -> None:
    def inner(x: Tensor, k: int = 1, *, blah: Tensor | None = None) -> tuple[Tensor, int, Tensor | None]:
        return (x * k).sin().exp() if blah is None else (x * blah).cos().exp(), k, blah

    def outer(call: Callable[..., Any], x: Tensor, **kwargs: Any) -> Tensor:
        y, k, blah = call(inner, x, 2, **kwargs)
        return call(inner, y, k, blah=blah)[0]

    x, blah = leaf(), leaf()
    for kwargs in ({}, {"blah": blah}):
        plain = partial(outer, lambda f, *a, **k: f(*a, **k), x, **kwargs)
        same_gradients(plain, partial(checkpoint, partial(outer, checkpoint), x, **kwargs), x, blah)


@law(
    "test_checkpoint_warns_if_use_reentrant_not_passed_explcitly",
    "test_checkpoint_sequential_warns_if_use_reentrant_not_passed_explcitly",
    difference="no warning: there is one way only",
)
def _no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(torch.sin, leaf()).sum().backward()
        checkpoint_sequential(layers(), 2, leaf()).sum().backward()


# ---- randomness, autocast, devices -----------------------------------------------------------------------


@law("test_checkpoint_rng_cpu", "test_checkpoint_not_preserve_rng_state_and_without_reentrant")
def _random_numbers_are_those_of_forward() -> None:
    first, second, x = nn.Dropout(), nn.Dropout(), torch.randn(2000, requires_grad=True)
    for _ in range(3):
        for keep in (True, False):
            ours = lambda keep=keep: checkpoint(lambda h: second(h) ** 2, first(x), preserve_rng_state=keep)  # noqa: E731
            same_gradients(lambda: second(first(x)) ** 2, ours, x)


def same_on(device: str) -> None:
    x = torch.randn(2000, device=device, requires_grad=True)
    same_gradients(lambda: F.dropout(x.sin()) ** 2, lambda: checkpoint(lambda x: F.dropout(x.sin()) ** 2, x), x)
    with torch.device(device):
        y = checkpoint(lambda x: x * torch.ones(2000).sum(), x)
    y.sum().backward()


@law("test_checkpoint_preserves_device_context (on the CPU)")
def _device_context() -> None:
    same_on("cpu")


@law("test_get_device_states_recursive", "test_infer_device_state_recursive_meta")
def _devices_in_containers() -> None:
    from lowtide.tape.randomness import devices_of

    x, meta = torch.rand(3), torch.empty(3, device="meta")
    assert devices_of(([x, None], {"a": x}), {}) == {torch.device("cpu")}
    assert devices_of((meta,), {}) == {torch.device("cpu")}  # meta tensors draw nothing
    assert checkpoint(torch.sin, meta).device.type == "meta"


@law("test_checkpointing_non_reentrant_autocast_cpu")
def _autocast() -> None:
    net, x = layers(), leaf()
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            same_gradients(lambda: net(x), lambda: checkpoint(net, x), x, *net.parameters())
