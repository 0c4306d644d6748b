"""measure: bytes and seconds of a tiny GPT in several ways, predictions beside them, nothing left behind."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from harness import freeze
from lowtide.demo.model import GPT, GPTShape
from lowtide.errors import GraphError
from lowtide.measured import Row
from lowtide.peers import PEERS

PEER_NAMES = ["torch-per-block", "torch-selective"]


def gpt() -> tuple[GPT, Callable[[], Tensor]]:
    """Three blocks of width 32, with dropout, on two sequences of 64 tokens."""
    torch.manual_seed(0)
    model = GPT(GPTShape(vocabulary=32, length=64, width=32, blocks=3, heads=2))
    tokens = torch.randint(32, (2, 65))
    return model, lambda: model.loss(tokens)


@cache
def measured() -> lowtide.Measurement:
    """The GPT under a budget of 75 %, measured once for all tests that only read."""
    model, step = gpt()
    return lowtide.measure(step, model, "75%", against=PEER_NAMES, rounds=3)


def test_there_is_a_row_for_each_way() -> None:
    assert [row.name for row in measured().rows] == ["plain", "lowtide", *PEER_NAMES]
    assert all(row.exact for row in measured().rows)
    assert all(row.step_seconds > 0 for row in measured().rows)


def test_the_peak_is_what_was_predicted_and_within_the_budget() -> None:
    found = measured()
    plan = found.plan
    assert plan is not None
    assert plan.budget_bytes is not None
    assert found.peak_bytes <= plan.budget_bytes
    for name in ("plain", "lowtide"):
        row = found.row(name)
        assert row.predicted_peak_bytes is not None
        assert row.peak_bytes == pytest.approx(row.predicted_peak_bytes, rel=0.01)


def test_peaks_of_the_peers_lie_where_they_should() -> None:
    plain, _, per_block, selective = (row.peak_bytes for row in measured().rows)
    assert per_block < selective < plain
    assert measured().row("torch-per-block").peak_ratio == per_block / plain
    assert measured().row("plain").peak_ratio == measured().row("plain").seconds_ratio == 1


def test_resident_bytes_are_parameters_buffers_states_and_inputs() -> None:
    model, step = gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    parameters = sum(p.nbytes for p in model.parameters())
    tokens = 2 * 65 * 8
    assert measured().resident_bytes == parameters + tokens
    step().backward()
    optimizer.step()
    found = lowtide.measure(step, model, lowtide.policies.sqrt, rounds=1, optimizer=optimizer)
    assert found.resident_bytes == 2 * parameters + tokens
    assert found.row("plain").peak_bytes == measured().row("plain").peak_bytes + parameters


def test_the_table_has_all_rows_and_says_what_it_counts() -> None:
    lines = str(measured()).splitlines()
    assert lines[0].split() == [
        "peak",
        "to",
        "plain",
        "predicted",
        "step",
        "to",
        "plain",
        "predicted",
        "results",
    ]
    assert [line.split()[0] for line in lines[2:6]] == ["plain", "lowtide", *PEER_NAMES]
    assert all(line.endswith("exact") for line in lines[2:6])
    assert re.search(r" \d\.\d\d MiB ", lines[2])
    assert lines[7].startswith("peak: ")
    assert lines[8] == "step: CPU seconds on cpu, 1 thread, median of 3 rounds"
    assert max(map(len, lines)) <= 88
    assert "<pre" in measured()._repr_html_()


def test_without_a_prediction_the_table_is_narrower() -> None:
    model, step = gpt()
    found = lowtide.measure(step, model, lowtide.policies.recompute_all, rounds=1)
    assert found.plan is None
    assert str(found).splitlines()[0].split() == ["peak", "to", "plain", "step", "to", "plain", "results"]


def test_a_measurement_goes_to_json_and_back() -> None:
    data = json.loads(json.dumps(measured().to_json()))
    assert lowtide.Measurement.from_json(data) == measured()
    with pytest.raises(GraphError):
        lowtide.Measurement.from_json({"kind": "lowtide.Plan"})
    with pytest.raises(GraphError, match="broken"):
        lowtide.Measurement.from_json({"kind": "lowtide.Measurement", "schema": 1})
    with pytest.raises(KeyError, match="there are plain, lowtide"):
        measured().row("torch")


# ---- peers -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block with batch norm: run again, its statistics move twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.fc(x)))


class Once(Block):
    """A block that refuses to be run again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("a second run")
        return super().forward(x)


def of_blocks(kind: type[nn.Module], count: int = 2) -> tuple[nn.Module, Callable[[], Tensor]]:
    model, x = nn.Sequential(*(kind() for _ in range(count))), torch.randn(8, 4)
    return model, lambda: model(x).square().mean()


def test_a_peer_that_changes_results_is_found_out_and_lowtide_is_exact() -> None:
    model, step = of_blocks(Block)
    found = lowtide.measure(step, model, lowtide.policies.recompute_all, against=PEER_NAMES, rounds=1)
    assert found.row("lowtide").exact
    assert found.row("torch-per-block").exact is False
    assert "buffer of 0.norm.running_mean" in found.row("torch-per-block").difference
    assert "torch-per-block differs: buffer of 0.norm.running_mean in 0.norm (BatchNorm1d)" in str(found)


def test_a_peer_that_fails_has_its_error_in_its_row() -> None:
    model, step = of_blocks(Once)
    found = lowtide.measure(step, model, lowtide.policies.recompute_all, against=PEER_NAMES, rounds=1)
    assert found.row("lowtide").exact
    assert found.row("torch-per-block") == Row("torch-per-block", failure="RuntimeError: a second run")
    assert "torch-per-block failed: RuntimeError: a second run" in str(found)


def test_a_model_without_repeated_blocks_has_no_such_peer() -> None:
    model = nn.Linear(4, 1)
    found = lowtide.measure(
        lambda: model(torch.ones(2, 4)).sum(),
        model,
        lowtide.policies.recompute_all,
        against=PEER_NAMES,
        rounds=1,
    )
    assert "needs repeated blocks" in found.row("torch-selective").failure


def test_a_peer_puts_each_forward_back() -> None:
    model, _ = of_blocks(Block)
    own = model[0].forward
    model[0].forward = own
    with PEERS["torch-per-block"].on(model):
        assert model[0].forward is not own
        assert "forward" in vars(model[1])
    assert model[0].forward is own
    assert "forward" not in vars(model[1])


def test_a_plain_step_that_does_not_fit_leaves_its_row_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.measurement import _Bench

    def too_much(bench: _Bench) -> None:
        raise torch.OutOfMemoryError("12 GiB requested")

    observe = _Bench._observe
    monkeypatch.setattr(
        _Bench, "_observe", lambda bench, one: too_much(bench) if one.name == "plain" else observe(bench, one)
    )
    model, step = of_blocks(Block)
    found = lowtide.measure(step, model, lowtide.policies.recompute_all, rounds=1)
    assert found.row("plain").failure == "OutOfMemoryError: 12 GiB requested"
    assert found.row("lowtide").exact is None
    assert found.row("lowtide").seconds_ratio is None
    assert "not compared" in str(found)


def test_what_the_plain_step_does_not_repeat_is_not_compared() -> None:
    model, calls = nn.Linear(4, 1), []

    def step() -> Tensor:
        calls.append(0)
        return model(torch.ones(2, 4)).sum() + len(calls)

    found = lowtide.measure(step, model, lowtide.policies.recompute_all, rounds=1)
    assert found.irreproducible == ("loss",)
    assert found.row("plain").exact is False
    assert found.row("lowtide").exact
    assert "not compared, as the plain step does not repeat it: loss" in str(found)


# ---- nothing is different afterwards -----------------------------------------------------------------------


def state_of(model: nn.Module) -> object:
    return freeze(
        {
            "state": model.state_dict(),
            "gradients": {name: p.grad for name, p in model.named_parameters()},
            "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        }
    )


@pytest.mark.parametrize("with_gradients", [False, True])
def test_everything_is_put_back(with_gradients: bool) -> None:
    model, step = of_blocks(Block)
    if with_gradients:
        step().backward()
    before, attributes = state_of(model), dict(vars(model[0]))
    gradients = [p.grad for p in model.parameters()]
    found = lowtide.measure(step, model, "100%", against=PEER_NAMES, rounds=2)
    assert found.row("lowtide").exact
    assert state_of(model) == before
    assert dict(vars(model[0])) == attributes
    assert all(p.grad is old for p, old in zip(model.parameters(), gradients, strict=True))


def test_everything_is_put_back_after_an_error() -> None:
    model, step = of_blocks(Block)
    step().backward()
    calls: list[int] = []

    def failing() -> Tensor:
        calls.append(0)
        if len(calls) == 5:
            raise RuntimeError("the fifth call fails")
        return step() * torch.rand(())

    before = state_of(model)
    with pytest.raises(RuntimeError, match="fifth"):
        lowtide.measure(failing, model, lowtide.policies.recompute_all)
    assert state_of(model) == before


def test_misuse_is_refused() -> None:
    model, step = of_blocks(Block)
    with pytest.raises(ValueError, match="no peer is called 'remat'; known: plain, torch-per-block"):
        lowtide.measure(step, model, "90%", against=["remat"])
    with pytest.raises(ValueError, match="at least 1"):
        lowtide.measure(step, model, "90%", rounds=0)
    with pytest.raises(GraphError, match="does not require grad"):
        lowtide.measure(lambda: torch.ones(()), model, lowtide.policies.recompute_all)
