"""State that moves twice: statistics, caches, hooks, counters, logs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointError

import lowtide
from troubles.ways import OURS, Way, exact, finish, grads, reentrant, torch_differs, torch_raises

STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "cumulative batch norm": lambda: nn.BatchNorm1d(6, momentum=None),
    "batch norm without gain": lambda: nn.BatchNorm1d(6, affine=False),
    "lazy batch norm": lambda: nn.LazyBatchNorm1d(),
    "instance norm with statistics": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "spectral norm by hooks": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "own moving average": lambda: MovingAverage(),
    "observer": lambda: torch.ao.quantization.FakeQuantize(dtype=torch.quint8),
}


class MovingAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.steps += 1
        return (x - self.mean) * self.weight


def stateful(make: Callable[[], nn.Module]) -> Callable[[Way], object]:
    def program(way: Way) -> object:
        first, state, x = nn.Linear(6, 6), make(), torch.randn(5, 6, requires_grad=True)
        for scale in (1.0, 2.0):
            out = way(lambda x: state(first(x).sin()).tanh(), x * scale)
            finish(out.square().sum())
        return out, grads(first, state, x), list(state.buffers())

    return program


DEPRECATED = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@DEPRECATED
@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_B61_P06_statistics_and_power_iterations_move_twice(make: Callable[[], nn.Module]) -> None:
    exact(stateful(make))
    torch_differs(stateful(make))
    if make not in (STATEFUL["lazy batch norm"],):
        torch_differs(stateful(make), reentrant)


def test_B61_counters_and_means_are_those_of_one_step() -> None:
    x, plain = torch.randn(5, 6), nn.BatchNorm1d(6)
    plain(x)
    for way in OURS:
        norm = nn.BatchNorm1d(6)
        way(norm, x).sum().backward()
        assert norm.num_batches_tracked == 1
        assert torch.equal(norm.running_mean, plain.running_mean)


def test_B63_micro_batches_with_checkpointing_and_batch_norm() -> None:
    def program(way: Way) -> object:
        model, x = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()), torch.randn(16, 6)
        for chunk in x.chunk(4):
            finish(way(model, chunk).square().sum())
        return grads(model), list(model.buffers())

    exact(program)
    torch_differs(program)


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.losses: list[Tensor] = []
        self.metrics: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        self.losses.append(h.square().mean())
        self.metrics.append(float(h.detach().norm()))
        return h.exp()


def auxiliary(way: Way) -> object:
    model, x = Logging(), torch.randn(4, 6, requires_grad=True)
    out = way(model, x)
    finish(out.sum() + sum(model.losses))
    return out, grads(model, x), len(model.losses), model.metrics


def test_B91_metrics_and_auxiliary_losses_are_counted_twice() -> None:
    exact(auxiliary)
    torch_differs(auxiliary)
    torch_differs(auxiliary, reentrant)  # and there the auxiliary loss has no gradient


# ---- relatives -----------------------------------------------------------------------------------------------


def weight_averages(way: Way) -> object:
    """A codebook that is moved by what it saw, and a queue of keys."""
    codes, queue, x = torch.randn(5, 6), torch.zeros(8, 6), torch.randn(4, 6, requires_grad=True)
    layer, place = nn.Linear(6, 6), [0]

    def quantize(x: Tensor) -> Tensor:
        h = layer(x)
        nearest = torch.cdist(h.detach(), codes).argmin(1)
        out = h + (codes[nearest] - h).detach()
        with torch.no_grad():
            codes.index_add_(0, nearest, h.detach(), alpha=0.1)
            queue[place[0] : place[0] + 4] = h
            place[0] = (place[0] + 4) % 8
        return (out @ queue.clone().T).tanh() * out.square().sum(1, keepdim=True)

    out = way(quantize, x)
    finish(out.sum())
    return out, grads(layer, x), codes, queue, place


def hidden_on_the_module(way: Way) -> object:
    """A recurrent state that the module carries from call to call."""
    cell, x = nn.GRUCell(6, 6), torch.randn(3, 4, 6)
    cell.state = torch.zeros(4, 6)

    def step(x: Tensor) -> Tensor:
        cell.state = cell(x, cell.state)
        return cell.state.exp()

    finish(sum(way(step, part).sum() for part in x))  # type: ignore[arg-type]
    return grads(cell), cell.state


def a_weight_that_is_cached_once(way: Way) -> object:
    layer, x, cache = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True), dict[str, Tensor]()

    def step(x: Tensor) -> Tensor:
        if "weight" not in cache:
            cache["weight"] = layer.weight.tanh()
        return F.linear(x, cache["weight"]).exp()

    finish(way(step, x).sum() + way(step, x.sin()).sum())
    return grads(layer, x), len(cache)


def a_counter_that_schedules_noise(way: Way) -> object:
    layer, x = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
    layer.steps = 0

    def step(x: Tensor) -> Tensor:
        layer.steps += 1
        return (layer(x) * (0.5**layer.steps)).exp().sin()

    finish(way(step, x).sum())
    return grads(layer, x), layer.steps


@pytest.mark.parametrize(
    "program",
    [weight_averages, hidden_on_the_module, a_weight_that_is_cached_once, a_counter_that_schedules_noise],
)
def test_relatives(program: Callable[[Way], object]) -> None:
    exact(program)
    if program is hidden_on_the_module:
        torch_raises(program, "different metadata", error=CheckpointError)
    elif program is not a_weight_that_is_cached_once:
        torch_differs(program)


def test_relative_an_attached_model_keeps_its_statistics_over_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3)))
    twin, data = copy.deepcopy(model), torch.randn(4, 64, 6)

    def train(model: nn.Module) -> list[Any]:
        for batch in data:
            model(batch).square().sum().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    with lowtide.attach(model, budget="80%"):
        seen = train(model)
    assert all(torch.equal(a, b) for a, b in zip(seen, train(twin), strict=True))
