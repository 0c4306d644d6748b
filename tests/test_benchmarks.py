"""The benchmarks: the judge is judged, and every table is made once, small."""

from __future__ import annotations

import fnmatch
import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_remat")

from benchmarks import budgets, engine, host_cost, host_share, instructions, tape_bytes
from benchmarks.contenders import engine_contenders, host_cost_contenders
from benchmarks.memory import StepMemory, measure_memory, track_peak
from benchmarks.models import Workload, small_gelu_gpt, small_swiglu_lm, tiny_gpt
from benchmarks.race import SEED, Row, count_forward_ops, race
from lowtide.demo.contenders import PLAIN, Contender, Forward, lowtide_segments, torch_per_block

SMALL: list[Callable[[], Workload]] = [tiny_gpt, small_gelu_gpt, small_swiglu_lm]


def normed_workload() -> Workload:
    """Two blocks with batch norm, whose running statistics tell how often a block ran."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU()) for _ in range(2)))
    batch = torch.randn(8, 4)
    return Workload("normed", model, list(model), "*", batch, lambda: model(batch).square().sum())


def failing(forward: Forward) -> Forward:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such luck")

    return fail


def results(rows: list[Row]) -> dict[str, str]:
    return {row.name: row.exact for row in rows}


@pytest.mark.parametrize("make", SMALL)
def test_two_witnesses_agree_on_the_peak(make: Callable[[], Workload]) -> None:
    workload = make()

    def seeded() -> Tensor:
        torch.manual_seed(SEED)
        return workload.forward()

    torch.autograd.backward(seeded())
    workload.model.zero_grad(set_to_none=True)
    counted = measure_memory(seeded, torch.autograd.backward).peak_bytes
    workload.model.zero_grad(set_to_none=True)
    parameters = sum(parameter.nbytes for parameter in workload.model.parameters())
    batch = workload.batch.nbytes
    assert track_peak(seeded, torch.autograd.backward) == counted + parameters + batch


@pytest.mark.parametrize("make", SMALL)
def test_patterns_name_the_blocks(make: Callable[[], Workload]) -> None:
    workload = make()
    depth = workload.pattern.count(".")
    named = [
        module
        for name, module in workload.model.named_modules()
        if name.count(".") == depth and fnmatch.fnmatchcase(name, workload.pattern)
    ]
    assert named == workload.blocks


def test_the_tiny_model_has_about_250_forward_operations() -> None:
    assert 200 <= count_forward_ops(tiny_gpt()) <= 300


@pytest.mark.slow
@pytest.mark.parametrize("make", [*host_cost.MODELS.values(), *engine.MODELS.values()])
def test_every_model_takes_a_step(make: Callable[[], Workload]) -> None:
    workload = make()
    loss = workload.forward()
    torch.autograd.backward(loss)
    assert loss.isfinite()
    assert [name for name, parameter in workload.model.named_parameters() if parameter.grad is None] == []


def test_a_race_tells_exact_from_wrong_from_failed() -> None:
    wrong = Contender("wrong", replace_forward=lambda forward: lambda x: forward(x) * 1.00001)
    rows = race(tiny_gpt(), [PLAIN, wrong, Contender("broken", replace_forward=failing)], range(2), steps=1)
    assert results(rows) == {
        "plain": "exact",
        "wrong": "loss, gradients differ",
        "broken": "RuntimeError: no such luck",
    }
    assert rows[0].step_ratio == rows[0].forward_ratio == 1.0


def test_a_block_that_runs_twice_is_seen_in_its_buffers() -> None:
    rows = race(normed_workload(), [PLAIN, torch_per_block(), lowtide_segments("*", n=1)], range(1), steps=1)
    assert results(rows) == {
        "plain": "exact",
        "torch per block": "buffers differ",
        "lowtide segments n=1": "exact",
    }


def test_host_cost_prints_every_contender(capsys: pytest.CaptureFixture[str]) -> None:
    host_cost.main(["--model", "tiny", "--rounds", "1", "--steps", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == [one.name for one in host_cost_contenders("")]
    assert [row for row in rows if row["failure"] or row["difference"]] == []


@pytest.mark.usefixtures("shelves")
def test_a_tape_takes_less_than_a_thousand_bytes_an_operation(capsys: pytest.CaptureFixture[str]) -> None:
    """So that the tape of a step of five thousand operations stays below 5 MB."""
    tape_bytes.main(["--operations", "1000", "--json"])
    found = json.loads(capsys.readouterr().out)["bytes"]
    assert 0 < found["followed"] < found["recorded"] < 1000 * 1000


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind counts the instructions")
def test_instructions_are_read_from_valgrind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions.sys, "executable", shutil.which("true"))
    once = instructions.counted("tiny", "plain", 1)
    assert once > 10_000
    assert instructions.counted("tiny", "plain", 1) == pytest.approx(once, rel=0.01)


@pytest.mark.parametrize("contender", host_cost_contenders(""), ids=lambda one: one.name)
def test_steps_whose_instructions_are_counted_are_taken(contender: Contender) -> None:
    try:
        instructions.main(["--model", "tiny", "--contender", contender.name, "--steps", "1"])
    finally:
        gc.enable()


def test_shares_of_the_host_are_positive() -> None:
    assert min(host_share.extra_seconds(host_share.narrow_gpt(), [0, 1]).values()) > 0


def test_engine_prints_every_contender_and_who_saves_memory(capsys: pytest.CaptureFixture[str]) -> None:
    engine.main(["--quick", "--rounds", "1", "--json"])
    tables = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(tables) == len(engine.MODELS)
    for rows in (table["rows"] for table in tables):
        assert [row["name"] for row in rows] == [one.name for one in engine_contenders("")]
        assert [row for row in rows if row["failure"] or row["difference"]] == []
        plain, *savers = (row["memory"]["peak_bytes"] for row in rows)
        assert max(savers) < plain


@pytest.mark.parametrize("model", ["small-gpt", "small-mlp"])
def test_followed_steps_stay_within_their_budgets(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    budgets.main(["--model", model, "--budgets", "3", "--json"])
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert found["failures"] == []
    assert all(0 < trial["measured_bytes"] <= trial["budget_bytes"] for trial in found["trials"])
    assert len(found["frontier"]) > 2


def test_what_is_broken_makes_the_budgets_fail() -> None:
    good = budgets.Trial(100, 90, 95, 1.5, 0.0), budgets.Trial(200, 200, 200, 1.0, 0.0)
    assert list(budgets.Outcome("m", 10, good, ((200, 1.0), (90, 1.5))).failures()) == []
    over = replace(good[0], measured_bytes=101)
    slower = replace(good[1], predicted_seconds=1.6)
    wrong = replace(good[0], wrong="gradients differ")
    for trials, frontier, text in (
        ((over, good[1]), ((200, 1.0),), "took 1 bytes more"),
        ((good[0], slower), ((200, 1.0),), "slower than less"),
        ((wrong, good[1]), ((200, 1.0),), "gradients differ"),
        (good, ((200, 1.0), (90, 1.0)), "not monotone"),
    ):
        (failure,) = budgets.Outcome("m", 10, trials, frontier).failures()
        assert text in failure


@pytest.mark.parametrize("command", [host_cost, engine])
def test_tables_show_a_failure_in_place_of_figures(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    rows = [
        Row("plain", StepMemory(2**20, 2**19), step_ratio=1.0, step_seconds=0.1),
        Row("broken", failure="RuntimeError: no such luck"),
    ]
    workload = tiny_gpt()
    table = command.render(workload, 200, rows) if command is host_cost else command.render(workload, rows)
    Console(width=150).print(table)
    assert "RuntimeError: no such luck" in capsys.readouterr().out
