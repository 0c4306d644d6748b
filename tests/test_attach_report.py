"""handle.report(): what is in force, measured beside predicted, and what went another way, as text and as data."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.attachment import AttachReport
from lowtide.errors import RecomputeWarning
from lowtide.free_memory import free_bytes
from situations import WIDTH, Tower, rows


def report(model: nn.Module, steps: int = 4, **how: object) -> AttachReport:
    with lowtide.attach(model, **how) as handle:  # type: ignore[arg-type]
        for _ in range(steps):
            model(rows(40)).square().mean().backward()
            model.zero_grad()
        return handle.report()


def test_what_is_measured_stands_beside_what_was_predicted() -> None:
    found = report(Tower(), budget="80%")
    assert found.plan is not None
    assert (found.calls, found.planned_calls, found.steps, found.steps_since) == (4, 3, 3, 2)
    assert found.measured_peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=0.01)
    assert found.measured_seconds is not None
    assert found.budget_bytes is not None
    text = str(found)
    assert "measured, predicted" in text
    assert "4 training calls in 3 steps, 3 of them under a plan" in text


def test_before_there_is_a_plan_it_says_so() -> None:
    found = report(Tower(), steps=1, budget="80%")
    assert found.plan is None
    assert str(found).startswith("no plan yet")


def test_a_policy_is_named() -> None:
    found = report(Tower(), policy=lowtide.policies.keep_matmuls)
    assert found.policy == "lowtide.policies.keep_matmuls"
    assert "4 of them under a policy" in str(found)


class Choosy(nn.Module):
    """Sorts, so that it makes integers, and calls a module that it does not own up to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tower(1)
        self.hidden = [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden[0](self.inner(x)).tanh()
        return x.gather(1, x.argsort(1))


class Growing(Choosy):
    """From the third step on another hidden part runs, which no step that was watched has shown."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = super().forward(x)
        return nn.Softplus()(x) if self.steps > 2 else x


def test_what_is_kept_against_the_policy_and_what_the_plan_does_not_know_are_told() -> None:
    model = Choosy()
    found = report(model, policy=lowtide.policies.recompute_all)
    assert any(row.op == "aten.sort" and "integer" in row.reason for row in found.kept)
    assert report(model, budget="95%").fallbacks == ()
    found = report(Growing(), budget="95%")
    assert found.fallbacks == ("the plan does not know <Softplus>: what it makes is kept",)


def test_a_report_goes_to_json() -> None:
    found = report(Growing(), budget="95%")
    data = json.loads(json.dumps(found.to_json()))
    assert data["kind"] == "lowtide.AttachReport"
    assert data["steps"] == found.steps
    assert lowtide.Plan.from_json(data["plan"]) == found.plan
    assert data["fallbacks"] == list(found.fallbacks)


def test_a_larger_shape_is_told_and_planned_for() -> None:
    model = Tower()
    with lowtide.attach(model, budget="80%") as handle:
        for batch in (16, 16, 40, 40, 16):
            model(rows(batch)).square().mean().backward()
        found = handle.report()
    assert found.planned_calls == 3
    assert any("larger shape" in text for text in found.fallbacks)


def test_optimizer_states_count_as_soon_as_they_are_there() -> None:
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = []
    with lowtide.attach(model, budget="8 GiB") as handle:
        for number in range(6):
            model(rows(40)).square().mean().backward()
            if number == 3:
                optimizer.step()
            model.zero_grad()
            prediction = handle.plan.prediction if handle.plan is not None else None
            peaks.append(prediction.peak_bytes if prediction is not None else 0)
        model(rows(40))
        found = handle.report()
    states = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
    assert peaks[5] == peaks[2] + states
    assert found.measured_peak_bytes == pytest.approx(peaks[5], rel=0.01)


def test_states_of_a_given_optimizer_are_expected_before_they_are_there() -> None:
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    weights = sum(p.nbytes for p in model.parameters())
    without = report(Tower(), steps=2, budget="8 GiB").predicted_peak_bytes
    found = report(model, steps=2, budget="8 GiB", optimizer=optimizer).predicted_peak_bytes
    assert found is not None
    assert without is not None
    assert found - without == pytest.approx(2 * weights, rel=0.05)


def test_auto_takes_what_is_free() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free > 0
    found = report(Tower(), budget="auto")
    assert found.budget_bytes is not None
    assert found.budget_bytes == pytest.approx(free, rel=0.5)


def test_an_operation_that_cannot_be_repeated_is_in_the_report() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(moody(self.inner(x)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputeWarning)
        found = report(Moody(), policy=lowtide.policies.recompute_all)
    assert any("moody" in text for text in found.warnings)
    with pytest.raises(lowtide.errors.ReplayMismatch, match="moody"):
        report(Moody(), policy=lowtide.policies.recompute_all, strict=True)


@torch.library.custom_op("lowtide_test_attach::moody", mutates_args=())
def moody(x: Tensor) -> Tensor:
    """Another result each time."""
    times.append(1)
    return x * len(times)


times: list[int] = []
moody.register_autograd(lambda ctx, gradient: gradient)
lowtide.recomputable(moody)
