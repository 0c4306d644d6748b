"""Buffers that move in the forward: running statistics, power iterations, moving averages, counters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from harness import Program
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("norms")


def _evaluating(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), module.eval(), nn.GELU())


def _convolutions() -> nn.Module:
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
    ]
    return nn.Sequential(*layers, nn.SiLU(inplace=True))


ZOO.module(
    "batch_norm_1d",
    lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.BatchNorm1d(8)),
    6,
    8,
)
ZOO.module("batch_norm_1d_sequence", lambda: nn.BatchNorm1d(4), 3, 4, 5, call=lambda m, x: m(x.exp()).sin())
ZOO.module("batch_norm_2d_relu_inplace", _convolutions, 2, 3, 9, 9)
ZOO.module("batch_norm_2d_channels_last", lambda: _convolutions().to(memory_format=torch.channels_last), 2, 3, 9, 9)
ZOO.module("batch_norm_3d", lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), nn.Tanh()), 2, 2, 4, 4, 4)
ZOO.module("batch_norm_eval", lambda: _evaluating(nn.BatchNorm1d(8)), 6, 8)
ZOO.module(
    "batch_norm_cumulative",
    lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.GELU()),
    6,
    8,
)
ZOO.module(
    "batch_norm_without_statistics",
    lambda: nn.BatchNorm1d(8, track_running_stats=False),
    6,
    8,
    call=lambda m, x: m(x.exp()).sin(),
)
ZOO.module("batch_norm_not_affine", lambda: nn.BatchNorm1d(8, affine=False), 6, 8, call=lambda m, x: m(x.exp()).sin())
ZOO.module("batch_norm_called_twice", lambda: nn.BatchNorm1d(8), 6, 8, call=lambda m, x: m(m(x.exp()).sin() * 2))
ZOO.module("batch_norm_functional", lambda: nn.BatchNorm1d(8), 6, 8, call=lambda m, x: _functional_norm(m, x))
ZOO.module("batch_norm_frozen_in_train", lambda: _frozen(nn.BatchNorm1d(8)), 6, 8, call=lambda m, x: m(x.exp()).sin())
ZOO.module(
    "batch_norm_bfloat16",
    lambda: nn.BatchNorm1d(8),
    6,
    8,
    call=lambda m, x: m(x.bfloat16().float().exp()).sin(),
)
ZOO.module("batch_norm_half_inputs", lambda: nn.BatchNorm2d(3), 2, 3, 4, 4, call=lambda m, x: m(x.bfloat16()).exp())
ZOO.module(
    "batch_norm_mode_switched_between_calls",
    lambda: nn.BatchNorm1d(8),
    6,
    8,
    call=lambda m, x: _switched(m, x),
)
ZOO.module("instance_norm", lambda: nn.InstanceNorm2d(3, affine=True), 2, 3, 4, 4, call=lambda m, x: m(x.exp()).sin())
ZOO.module(
    "instance_norm_running",
    lambda: nn.InstanceNorm1d(3, track_running_stats=True, affine=True),
    2,
    3,
    6,
    call=lambda m, x: m(x.exp()).sin(),
)
ZOO.module(
    "group_norm",
    lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv1d(4, 4, 1), nn.GroupNorm(4, 4)),
    2,
    4,
    5,
)
ZOO.module(
    "layer_norm_local_response",
    lambda: nn.Sequential(nn.LayerNorm(5), nn.LocalResponseNorm(2), nn.Tanh()),
    2,
    4,
    5,
)
ZOO.module(
    "spectral_norm",
    lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    6,
    8,
    call=lambda m, x: m(m(x).sin()).exp(),
)
ZOO.module("spectral_norm_convolution", lambda: parametrizations.spectral_norm(nn.Conv1d(3, 4, 3)), 2, 3, 8)
ZOO.module(
    "spectral_norm_old",
    lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    6,
    8,
    call=lambda m, x: m(m(x).sin()).exp(),
)
ZOO.module(
    "weight_norm",
    lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    6,
    8,
    call=lambda m, x: m(m(x).sin()).exp(),
)
ZOO.module(
    "weight_norm_old",
    lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
    6,
    8,
    call=lambda m, x: m(m(x).sin()).exp(),
)
ZOO.module(
    "orthogonal",
    lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    6,
    8,
    call=lambda m, x: m(m(x).sin()).exp(),
)
ZOO.module(
    "parametrization_cached",
    lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    6,
    8,
    call=lambda m, x: _cached(m, x),
)
ZOO.module("weight_standardised", lambda: nn.Conv1d(3, 4, 3), 2, 3, 8, call=lambda m, x: _standardised(m, x))


def _functional_norm(m: nn.BatchNorm1d, x: Tensor) -> Tensor:
    y = F.batch_norm(x.exp(), m.running_mean, m.running_var, m.weight, m.bias, training=True, momentum=0.3)
    return y.sin() - m.running_mean + m.running_var.sqrt()


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def _switched(m: nn.BatchNorm1d, x: Tensor) -> Tensor:
    y = m.train()(x.exp()).sin()
    z = m.eval()(y).exp()
    return m.train()(z).cos()


def _cached(m: nn.Module, x: Tensor) -> Tensor:
    with parametrize.cached():
        return m(m(x).sin()).exp()


def _standardised(m: nn.Conv1d, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(m.weight, dim=(1, 2), keepdim=True)
    return F.conv1d(x.exp(), (m.weight - mean) * (variance + 1e-5).rsqrt(), m.bias).sin()


class Counting(nn.Module):
    """Keep a call counter, a moving average, a running maximum and a queue; read them in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("largest", torch.full((8,), -1e9))
        self.register_buffer("queue", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).exp().tanh()
        self.calls += 1
        self.average.lerp_(h.detach().mean(0), 0.1)
        torch.maximum(self.largest, h.detach().amax(0), out=self.largest)
        self.queue[int(self.calls) % 4] = h.detach().mean(0)
        return ((h - self.average) / (self.largest + 2) @ self.queue.T.clone()).sin() * int(self.calls)


class Reassigning(nn.Module):
    """Replace a buffer by a new tensor instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().exp().mean(0)
        return (x - self.average).sin() * (x * self.average).exp()


class Codebook(nn.Module):
    """Vector quantisation with moving-average codes, updated in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 8))
        self.register_buffer("sizes", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.cdist(x, self.codes).argmin(1)
        chosen = self.codes[place]
        with torch.no_grad():
            hits = F.one_hot(place, 5).float()
            self.sizes.mul_(0.9).add_(hits.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_((hits.T @ x) / self.sizes[:, None], alpha=0.1)
        return (x + (chosen - x).detach()).sin() + (x - chosen).pow(2).mean()


ZOO.module("counters_and_averages", Counting, 6, 8, call=lambda m, x: m(x.sin()).sum() + m(x.cos()))
ZOO.module("buffer_reassigned", Reassigning, 6, 8, call=lambda m, x: m(m(x.sin())))
ZOO.module("codebook", Codebook, 6, 8, call=lambda m, x: m(m(x.sin())))


@ZOO.program()
def moving_average_teacher() -> Program:
    student, teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
    model, x = nn.ModuleDict({"student": student, "teacher": teacher}), randn(6, 8)

    def step() -> Tensor:
        h = prepare(x)
        with torch.no_grad():
            target = teacher(h).softmax(1)
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        return F.cross_entropy(student(h.sin()).tanh(), target) + weigh(teacher(h))

    return Program(step, model=model, leaves={"x": x})


class NormedBlocks(nn.Module):
    """Residual blocks with batch norm and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


ZOO.module("residual_blocks", NormedBlocks, 6, 8, blocks="blocks.*")
