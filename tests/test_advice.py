"""advise: the diagnosis, each remedy alone, what is recommended, and when not to checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowtide
from estimates import GIB, made, too_large
from lowtide.advice import Advice, OfStep, _costs, _recommended
from lowtide.estimation import Setup
from lowtide.estimation.setups import SetupError
from lowtide.estimation.trials import CHECKPOINTING, Option
from lowtide.hardware import find
from lowtide.units import format_bytes


class Model(nn.Module):
    """Much of its memory is activations where the batch is large, and weights where it is small."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def case(batch: int) -> tuple[Callable[[], Tensor], nn.Module, Callable[..., Callable[[], Tensor]]]:
    model = Model()

    def remake(batch: int) -> Callable[[], Tensor]:
        x = torch.zeros(batch, 32)
        return lambda: model(x).square().mean()

    return remake(batch), model, remake


@pytest.fixture(scope="module")
def tight() -> Advice:
    """Activations are most of it, and seven tenths of the peak are there."""
    step, model, remake = case(2048)
    peak = lowtide.simulate(lowtide.trace(step, model, fake=True, optimizer="adamw"), frozenset()).peak_bytes
    return lowtide.advise(step, model, budget=int(0.7 * peak), hardware="cpu", batch=2048, remake=remake, steps=1000)


def test_activations_are_named_where_they_fill_the_memory(tight: Advice) -> None:
    assert tight.filled_by == "activations"
    assert tight.saving > 0.2
    assert "checkpointing can bring the peak" in tight.diagnosis


def test_weights_are_named_where_they_do_and_checkpointing_is_called_little_help() -> None:
    step, model, _ = case(1)
    found = lowtide.advise(step, model, budget="100 KiB", hardware="cpu")
    assert found.filled_by in ("weights", "optimizer states")
    assert "helps little, at most" in found.diagnosis
    assert not found.checkpoint


def test_the_remedies_come_in_their_order(tight: Advice) -> None:
    names = [option.levers[0] for option in tight.alone]
    assert names[:4] == ["mixed precision", "smaller batch, accumulated", "checkpointing", "sharding"]


def test_what_is_recommended_fits_and_gives_the_same_results(tight: Advice) -> None:
    assert tight.recommended is not None
    assert tight.recommended.estimate.fits
    assert tight.recommended.exact
    assert tight.recommended.estimate.setup.ranks == 1


def test_checkpointing_alone_is_what_the_planner_finds(tight: Advice) -> None:
    (alone,) = [option for option in tight.alone if option.levers == (CHECKPOINTING,)]
    assert alone.estimate.fits
    assert alone.estimate.plan is not None
    assert alone.estimate.step_seconds > alone.estimate.plain_seconds


def test_a_step_that_fits_is_left_alone() -> None:
    step, model, _ = case(64)
    found = lowtide.advise(step, model, budget="1 GiB", hardware="cpu")
    assert found.verdict == "It fits as it is: leave checkpointing off, it would only cost time."
    assert not found.checkpoint
    assert found.costs.extra_flops == 0


def test_the_largest_batch_fits_and_is_larger_with_checkpointing(tight: Advice) -> None:
    (batch,) = tight.limits
    assert batch.what == "batch"
    assert 0.6 * 2048 < batch.plain < 0.75 * 2048
    assert batch.checkpointed > batch.plain

    def fits(size: int) -> bool:
        step, model, _ = case(size)
        graph = lowtide.trace(step, model, fake=True, optimizer="adamw")
        return 1.01 * lowtide.simulate(graph, frozenset()).peak_bytes <= tight.fit.estimate.memory_bytes

    assert fits(batch.plain)
    assert not fits(batch.plain + 2 * batch.step)


def test_energy_is_power_times_time(tight: Advice) -> None:
    costs = tight.costs
    assert costs.step_joules == pytest.approx(find("cpu").watts * costs.step_seconds)
    assert costs.run_joules == pytest.approx(1000 * costs.step_joules)


def test_costs_of_checkpointing_are_time_flops_and_energy() -> None:
    asked, option = Option((), made(150)), Option((CHECKPOINTING,), made(70, 1.25))
    costs = _costs(option, asked, 10)
    assert costs.extra_seconds == pytest.approx(0.25)
    assert costs.extra_flops == pytest.approx(0.25e15)
    assert costs.throughput == pytest.approx(0.8)
    assert costs.extra_joules == pytest.approx(700 * 0.25)
    assert costs.run_seconds == pytest.approx(12.5)


def test_the_same_results_on_the_same_devices_go_before_speed() -> None:
    best = _recommended(too_large())
    assert best is not None
    assert best.name == "checkpointing"


def test_nothing_is_recommended_where_nothing_fits() -> None:
    found = too_large()
    found = replace(found, tried=tuple(option for option in found.tried if not option.estimate.fits))
    assert _recommended(found) is None


def test_nothing_of_the_model_is_changed() -> None:
    step, model, remake = case(8)
    step().backward()
    before = {name: (p.clone(), p.grad) for name, p in model.named_parameters()}
    lowtide.advise(step, model, budget="50 KiB", hardware="cpu", batch=8, remake=remake)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert parameter.grad is before[name][1]


def test_remake_must_take_a_size() -> None:
    step, model, _ = case(8)
    with pytest.raises(SetupError, match="remake takes n; it must take batch"):
        OfStep(step, model, find("cpu"), lambda n: step)


def test_it_prints_and_is_json(tight: Advice) -> None:
    assert tight.verdict in str(tight)
    found = tight.to_json()
    assert found["recommended"]["verdict"] == "fits"
    assert found["fit"]["asked"]["peak_bytes"] == tight.fit.estimate.peak_bytes
    assert format_bytes(tight.fit.estimate.peak_bytes) in tight._repr_html_()


def test_a_setup_is_traced_once() -> None:
    step, model, _ = case(8)
    own = OfStep(step, model, find("cpu"))
    assert own.trace(Setup(batch=8)) is own.trace(Setup(batch=8, optimizer="sgd", ranks=8))
    assert GIB == 2**30
