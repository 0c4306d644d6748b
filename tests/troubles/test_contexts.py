"""Context managers around forward, the current device, and threads."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._device import DeviceContext

from troubles.ways import OURS, Way, exact, finish, grads, plainly, torch_differs, torch_raises


def attention(way: Way) -> object:
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        out = way(lambda q: F.scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=0.3).exp(), q)
    finish(out.sum())
    return out, q.grad


def test_B97_an_attention_backend_is_chosen_around_forward_only() -> None:
    exact(attention)


def test_B97_as_torch_shows_it() -> None:
    def without_dropout(way: Way) -> object:
        q = torch.randn(2, 4, 6, 8, requires_grad=True)
        with sdpa_kernel(SDPBackend.MATH):
            out = way(lambda q: F.scaled_dot_product_attention(q, q.sin(), q.cos()).exp(), q)
        finish(out.sum())
        return out, q.grad

    exact(without_dropout)
    torch_raises(without_dropout, "different metadata|different number")


class Setting:
    """What somebody's library keeps in a module global, a thread local or a context variable."""

    plain = 1.0
    local = threading.local()
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)

    @classmethod
    @contextlib.contextmanager
    def set(cls, value: float) -> Iterator[None]:
        cls.plain, cls.local.value, token = value, value, cls.variable.set(value)
        try:
            yield
        finally:
            cls.plain, cls.local.value = 1.0, 1.0
            cls.variable.reset(token)


READS: dict[str, Callable[[], float]] = {
    "a global": lambda: Setting.plain,
    "a thread local": lambda: getattr(Setting.local, "value", 1.0),
    "a context variable": lambda: Setting.variable.get(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_B97_any_setting_in_force_around_forward_is_not_asked_for_again(read: Callable[[], float]) -> None:
    def program(way: Way) -> object:
        x = torch.randn(4, requires_grad=True)
        with Setting.set(3.0):
            out = way(lambda x: (x.sin() * read()).exp().square(), x)
        finish(out.sum())
        return out, x.grad

    exact(program)
    torch_differs(program)


def test_B98_the_current_device_is_not_restored() -> None:
    """With the meta device as a stand-in for another accelerator: factories in a replay make what they made before."""

    def program(way: Way) -> object:
        x = torch.randn(4, requires_grad=True)
        out = way(lambda x: (x * torch.linspace(0, 1, 4).to("cpu")).exp().sin(), x)
        with DeviceContext("meta"):
            out.sum().backward()
        return out, x.grad

    exact(program)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_B98_a_region_runs_under_another_current_device() -> None:
    def program(way: Way) -> object:
        with torch.cuda.device(1):
            x = torch.randn(4, device="cuda", requires_grad=True)
            out = way(lambda x: (x * torch.rand(4, device="cuda")).exp().sin(), x)
        out.sum().backward()
        return out.cpu(), x.grad.cpu() if x.grad is not None else None

    exact(program)


# ---- relatives -----------------------------------------------------------------------------------------------


def test_relative_anomaly_detection_around_forward_and_backward() -> None:
    def program(way: Way) -> object:
        layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with torch.autograd.detect_anomaly(check_nan=False):
                out = way(lambda x: layer(x.sin()).tanh(), x)
                out.sum().backward()
        return out, grads(layer, x)

    exact(program)


def test_relative_deterministic_algorithms_are_switched_on_between() -> None:
    def program(way: Way) -> object:
        x, index = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 0, 1, 2])
        out = way(lambda x: torch.zeros(3, 3).index_add(0, index, x.sin()).exp(), x)
        torch.use_deterministic_algorithms(True)
        try:
            finish(out.sum())
        finally:
            torch.use_deterministic_algorithms(False)
        return out, x.grad

    exact(program)


def test_relative_two_threads_train_two_models_at_once() -> None:
    def train(way: Way, seed: int, results: dict[int, Any]) -> None:
        model, x = _model(seed), torch.linspace(-1, 1, 24).view(4, 6)
        for _ in range(8):
            way(model, x).square().sum().backward()
        results[seed] = [p.grad for p in model.parameters()]

    wanted: dict[int, Any] = {}
    for seed in range(2):
        train(plainly, seed, wanted)
    for way in OURS:
        results: dict[int, Any] = {}
        threads = [threading.Thread(target=train, args=(way, seed, results)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(a, b) for seed in range(2) for a, b in zip(wanted[seed], results[seed], strict=True))


def _model(seed: int) -> nn.Module:
    """A model whose weights come from no random state that threads would share."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)) for _ in range(3)))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter).mul(number + seed + 1).sin())
    return model
