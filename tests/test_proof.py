"""The first step proves what it drops: what cannot be made again is kept, said, and costs nothing afterwards."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import RecomputeWarning, ReplayMismatch
from lowtide.policies import recompute_all

_noise = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _fickle_operator() -> Iterator[None]:
    """An operator that gives other values each time it runs."""
    with torch.library._scoped_library("lowtide_test", "FRAGMENT") as library:
        library.define("fickle(Tensor x) -> Tensor")
        library.impl("fickle", lambda x: x + 0.001 * next(_noise), "CPU")
        lowtide.recomputable("lowtide_test::fickle")
        yield


class Fickle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = torch.zeros(6)
        h = torch.ops.lowtide_test.fickle(x + shift)
        return (h * self.weight).sin().sum()


def test_an_operation_that_does_not_repeat_is_kept_with_a_warning_that_says_where() -> None:
    model, x = Fickle(), torch.linspace(0, 1, 6)
    said = r"lowtide_test\.fickle .*test_proof\.py:\d+.*kept"
    with pytest.warns(RecomputeWarning, match=said), lowtide.record(recompute_all) as recording:
        loss = model(x)
    loss.backward()
    assert model.weight.grad is not None
    assert torch.isfinite(model.weight.grad).all()
    assert any(row.op == "lowtide_test.fickle" for row in recording.report().kept)


def test_the_step_under_proof_is_right_and_later_steps_are_silent() -> None:
    model, x = Fickle(), torch.linspace(0, 1, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputeWarning)
        for _ in range(2):
            seen: list[Tensor] = []
            with lowtide.record(recompute_all):
                h = torch.ops.lowtide_test.fickle(x)
                seen.append(h.detach().clone())
                (h * model.weight).sum().backward()
            assert model.weight.grad is not None
            assert torch.equal(model.weight.grad, seen[0])
            model.weight.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = Fickle()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecomputeWarning)
            with lowtide.record(recompute_all):
                first(x)
        with lowtide.record(recompute_all):
            first(x).backward()


def test_strict_makes_it_an_error() -> None:
    with pytest.raises(ReplayMismatch, match="fickle"), lowtide.record(recompute_all, strict=True):
        Fickle()(torch.ones(6))
    assert torch._C._len_torch_dispatch_stack() == 0


class Counted(nn.Module):
    """Counts how often its operator runs."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.ops.lowtide_test_counted.twice(x) * self.weight).sum()


@pytest.fixture
def _counted_operator() -> Iterator[None]:
    def twice(x: Tensor) -> Tensor:
        Counted.runs += 1
        return x * 2

    with torch.library._scoped_library("lowtide_test_counted", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", twice, "CPU")
        lowtide.recomputable("lowtide_test_counted::twice")
        yield


@pytest.mark.usefixtures("_counted_operator")
def test_proof_costs_one_more_run_the_first_time_and_none_later_unless_asked_for() -> None:
    model, x = Counted(), torch.ones(6)
    recording = lowtide.record(recompute_all, check_every=4)
    runs = []
    for _ in range(4):
        Counted.runs = 0
        with recording:
            model(x)
        runs.append(Counted.runs)
    assert runs == [2, 1, 1, 2]


def test_a_value_that_changed_unseen_after_the_forward_is_refused_in_backward() -> None:
    import ctypes

    weight = torch.ones(64, requires_grad=True)
    constant = torch.full((64,), 0.5)
    with lowtide.record(recompute_all):
        loss = ((constant * 2).sin() * weight).sum()
    ctypes.memset(constant.data_ptr(), 0, 4 * 64)
    with pytest.raises(ReplayMismatch, match=r"aten\.(mul|sin).*test_proof\.py"):
        loss.backward()


@pytest.mark.parametrize("check", ["new", "always"])
def test_memory_beyond_a_result_is_not_compared_after_a_write_either(check: Any) -> None:
    """The mean's kernel leaves what it summed in the storage of its one number."""
    x = torch.linspace(-1, 1, 24, requires_grad=True)
    with lowtide.record(lambda op: op.name not in ("aten.mse_loss", "aten.add_"), check=check):
        loss = F.mse_loss(x, 2 * x)
        assert loss.untyped_storage().nbytes() > loss.nbytes
        loss.add_(0.5)
        out = loss.sqrt()
    del loss
    out.backward()
    assert x.grad is not None
    plain = torch.linspace(-1, 1, 24, requires_grad=True)
    (F.mse_loss(plain, 2 * plain).add_(0.5)).sqrt().backward()
    assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]
