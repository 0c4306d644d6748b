"""Predicted: the peak of a step under a policy is foretold within 1 %, for real and from fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from benchmarks import prediction
from benchmarks.headlines import Point, best, headlines, peak_at, ratio_at
from benchmarks.prediction import graph_of, measured_peak, policies_for, resident_bytes, take_step
from benchmarks.prediction_rows import Row, off, summary_head, summary_line, verdict
from benchmarks.zoo import SMALL
from benchmarks.zoo_model import ZooModel, zoo_model
from lowtide.hand import plan_of

BYTES = 0.01
REHEARSED = 0.005


def shared() -> ZooModel:
    """One MLP called three times in a row between in-place activations; its gradients add up inside a step."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(96, 256), nn.ReLU(inplace=True), nn.Linear(256, 96), nn.Tanh())
    model = nn.Sequential(nn.Linear(96, 96), mlp, mlp, mlp)
    return zoo_model("shared", model, {"input": torch.randn(512, 96)}, "*", "1", lambda out: out.square().mean())


MODELS: dict[str, Callable[[], ZooModel]] = {
    "gpt": SMALL["small-gpt"],
    "lm": SMALL["small-lm"],
    "lstm": SMALL["small-lstm"],
    "shared": shared,
}
POLICIES = ["keep_all", "recompute_all", "keep_matmuls", "segments", "by_module"]


@functools.cache
def model_of(name: str) -> ZooModel:
    return MODELS[name]().seeded()


@functools.cache
def graph(name: str, fake: bool, accumulates: bool) -> lowtide.StepGraph:
    return graph_of(model_of(name), fake=fake, accumulates=accumulates)


def measured(name: str, policy: str, accumulates: bool) -> int:
    model = model_of(name)
    recording = lowtide.record(policies_for(model)[policy])
    take_step(model, recording)
    take_step(model, recording)
    return measured_peak(model, recording, accumulates)


@pytest.mark.parametrize("accumulates", [False, True], ids=["new-gradients", "gradients-added-to"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_the_measured_peak_is_foretold(name: str, policy: str, accumulates: bool) -> None:
    peak = measured(name, policy, accumulates)
    for fake in (False, True):
        known = graph(name, fake, accumulates)
        timeline = lowtide.simulate(known, plan_of(known, policies_for(model_of(name))[policy]))
        assert timeline.peak_bytes == pytest.approx(peak, rel=BYTES)


@pytest.mark.parametrize("accumulates", [False, True], ids=["new-gradients", "gradients-added-to"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["gpt", "lm", "shared"])
def test_simulation_and_rehearsal_agree(name: str, policy: str, accumulates: bool) -> None:
    model = model_of(name)
    known = graph(name, True, accumulates)
    plan = plan_of(known, policies_for(model)[policy])
    if accumulates:
        torch.autograd.backward(model.forward())
    rehearsed = lowtide.rehearse(model.forward, model.model, plan)
    model.model.zero_grad(set_to_none=True)
    assert lowtide.simulate(known, plan).peak_bytes == pytest.approx(rehearsed, rel=REHEARSED)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_there_before_the_step_is_counted_once(name: str) -> None:
    model = model_of(name)
    model.model.zero_grad(set_to_none=True)
    assert graph(name, False, False).resident_bytes == resident_bytes(model)
    torch.autograd.backward(model.forward())
    assert graph(name, False, True).resident_bytes == resident_bytes(model)
    model.model.zero_grad(set_to_none=True)


def test_the_table_and_the_verdict_name_the_worst_row(capsys: pytest.CaptureFixture[str]) -> None:
    prediction.main(["--model", "small-gpt", "--rounds", "1", "--no-bfloat16"])
    out = " ".join(capsys.readouterr().out.split())
    assert "bytes: 0 of 10 rows miss 1%" in out
    rows = [Row("a", "p", measured_bytes=100, predicted_bytes=100), Row("b", "q", True, 100, 110, 100)]
    assert verdict(rows)[0] == "bytes: 1 of 2 rows miss 1%; worst +10.00% (b, q, gradients added to)"
    assert off(1, 0) == 0


def test_a_summary_has_a_line_for_a_model_with_its_worst_policies(capsys: pytest.CaptureFixture[str]) -> None:
    prediction.main(["--summary", "--model", "small-mlp", "--rounds", "1", "--no-bfloat16"])
    head, rule, line = capsys.readouterr().out.splitlines()
    assert [head, rule] == summary_head().splitlines()
    assert line.count("|") == head.count("|") == rule.count("|")
    rows = [
        Row("m", "a", measured_bytes=100, predicted_bytes=101, fake_bytes=100, noise=0.02, measured_seconds=1.0,
            predicted_seconds=0.9, measured_ratio=1.0, predicted_ratio=1.1),
        Row("m", "b", measured_bytes=100, predicted_bytes=98, fake_bytes=100),
    ]  # fmt: skip
    assert summary_line(rows) == "| m | -2.0000% (b) | 0 | -10.0% (a) | +10.0% (a) | ±2.0% |"


def test_headlines_are_read_off_the_line_between_measured_points() -> None:
    plain, per_block = Point(100, 1.0), Point(40, 1.30)
    line = [Point(80, 1.02), Point(40, 1.10), Point(70, 1.2), Point(30, 1.20)]
    found = headlines(plain, line, per_block)
    assert found.overhead == pytest.approx(0.10 / 0.30)
    assert found.reduction_at_2 == pytest.approx(0.2)
    assert found.reduction_at_15 == pytest.approx(0.65)
    assert found.lowest == pytest.approx(0.75)
    points = best([plain, *line])
    assert Point(70, 1.2) not in points
    assert peak_at(points, 2.0) == 30
    assert ratio_at(points, 60) == pytest.approx(1.06)
