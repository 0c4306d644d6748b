"""What a kernel takes while it runs is seen by a real trace, counted by simulate, and never made up on fakes."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from benchmarks.memory import measure_memory
from graphs import Sketch
from lowtide.graph import Event, StepGraph
from lowtide.simulation import simulate
from lowtide.tape.bits import bytes_of
from lowtide.tracing import kernels
from lowtide.tracing.workspaces import run_measured
from tiny import TINY

CPU = torch.device("cpu")
STATE = torch.default_generator.get_state().nbytes


def step_of(*layers: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*layers), torch.randn(4, 8, 16, 16)


class Scaled(nn.Module):
    """Saves no tensor of its own, but a hundred numbers."""

    def forward(self, rows: Tensor) -> Tensor:
        for _ in range(50):
            rows = 1.5 * rows / 1.5
        return rows


LAYERS = {
    "convolution": lambda: (nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2)),
    "transposed": lambda: (nn.ConvTranspose2d(8, 12, 2, 2), nn.GELU(), nn.Conv2d(12, 4, 1)),
    "batch norm": lambda: (
        nn.Conv2d(8, 8, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 3),
    ),
    "recurrent": lambda: (nn.Flatten(2), nn.LSTM(256, 32, 2, batch_first=True)),
    "numbers": lambda: (nn.Flatten(1), nn.Linear(2048, 2), Scaled(), nn.Linear(2, 4096), nn.Tanh()),
    "dropout": lambda: (nn.Flatten(1), nn.Linear(2048, 64), nn.Dropout(0.3), nn.Linear(64, 512), nn.Dropout(0.2)),
}
POLICIES = {"keep": lowtide.policies.keep_all, "recompute": lowtide.policies.recompute_all}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_the_peak_of_a_real_trace_is_the_measured_one_to_the_byte(name: str, policy: str) -> None:
    model, x = step_of(*LAYERS[name]())

    def step() -> Tensor:
        out = model(x)
        loss: Tensor = (out[0] if isinstance(out, tuple) else out).square().mean()
        return loss

    graph = lowtide.trace(step, model, repeats=1)
    assert graph.workspaces
    recording = lowtide.record(POLICIES[policy])

    def forward() -> Tensor:
        model.zero_grad(set_to_none=True)
        with recording:
            return step()

    for _ in range(3):  # the first step proves
        forward().backward()
    model.zero_grad(set_to_none=True)
    gc.collect()  # what dies inside of a profile is subtracted
    measured = measure_memory(forward, lambda loss: loss.backward()).peak_bytes + graph.resident_bytes
    predicted = simulate(graph, lowtide.solve(graph, policy=POLICIES[policy])).peak_bytes
    assert predicted == pytest.approx(measured, abs=64)  # numbers that an operation wraps while it runs


def test_a_trace_without_times_sees_the_same_workspaces() -> None:
    timed, untimed = (TINY["convolutions"]().trace(fake=False, repeats=repeats) for repeats in (2, 0))
    assert [op.workspace_bytes for op in timed.ops] == [op.workspace_bytes for op in untimed.ops]
    assert any(op.workspace_bytes for op in timed.ops if op.backward)
    assert any(op.workspace_bytes for op in timed.ops if not op.backward)


def test_fake_tensors_foretell_the_same_workspaces() -> None:
    real, fake = TINY["convolutions"]().trace(fake=False, repeats=0), TINY["convolutions"]().trace(fake=True)
    assert fake.workspaces
    assert [op.workspace_bytes for op in fake.ops] == [op.workspace_bytes for op in real.ops]


def test_what_another_machine_takes_is_unknown_and_said_to_be() -> None:
    tiny = TINY["convolutions"]()
    graph = lowtide.trace(tiny.step, tiny.model, fake=True, hardware="h100")
    assert not graph.workspaces
    assert not any(op.workspace_bytes for op in graph.ops)


def test_kernels_beyond_the_limit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_BYTES", 100)
    graph = TINY["convolutions"]().trace(fake=True)
    assert not graph.workspaces
    assert not any(op.workspace_bytes for op in graph.ops if op.name == "aten.convolution.default")


def test_trying_kernels_leaves_random_state_alone() -> None:
    kernels._known.clear()
    tiny = TINY["perceptron"]()
    state = torch.get_rng_state()
    tiny.trace(fake=True)
    assert kernels._known
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_measured_inside_of_somebodys_profile() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        graph = TINY["convolutions"]().trace(fake=False, repeats=0)
    assert not graph.workspaces
    assert not any(op.workspace_bytes for op in graph.ops)
    assert any(event.key == "aten::convolution" for event in profile.key_averages())


def test_what_an_operation_leaves_is_no_workspace() -> None:
    x = torch.randn(64, 64)
    assert run_measured(lambda: x + x, CPU)[1] == 0
    inside = run_measured(lambda: (x @ x @ x, x + x)[0], CPU)[1]
    assert inside == x.nbytes  # x @ x dies when the second product is there, x + x with the tuple


def test_an_error_inside_leaves_no_profile_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        run_measured(lambda: 1 // 0, CPU)
    assert not torch._C._autograd._profiler_enabled()


def test_a_workspace_counts_while_its_operation_runs_and_again_in_its_replay() -> None:
    sketch = Sketch()
    x = sketch.root(100)
    (a,) = sketch.op([x], 200, workspace=1000)
    sketch.op([a], 4, saves=[a])
    graph = sketch.graph()
    timeline = simulate(graph, {0})
    run = graph.events.index((Event.RUN, 0))
    unpack = graph.events.index((Event.UNPACK, 0))
    assert (timeline.highs[run], timeline.bytes[run]) == (1300, 300)
    assert (timeline.highs[unpack], timeline.bytes[unpack]) == (1300, 300)


def test_a_recipe_holds_the_random_state_that_it_needs() -> None:
    sketch = Sketch()
    x = sketch.root(100)
    (a,) = sketch.op([x], 20_000, saves_own=[0], state=5000)
    sketch.op([a], 4)
    graph = sketch.graph()
    kept, dropped = simulate(graph, ()), simulate(graph, {0})
    seal = graph.events.index((Event.SEAL, 0))
    unpack = graph.events.index((Event.UNPACK, 0))
    assert (kept.bytes[seal], dropped.bytes[seal]) == (20_100, 5100)
    before = dropped.bytes[unpack - 1]
    assert dropped.highs[unpack] - before == 20_000 + 5000  # the present state is set aside
    assert dropped.bytes[unpack] - before == 20_000 - 5000


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_what_a_recipe_holds_of_chance_is_known(fake: bool) -> None:
    graph = TINY["perceptron"]().trace(fake=fake)
    draws = [op for op in graph.ops if op.name.startswith("aten.bernoulli_")]
    sizes = [graph.storages[graph.buffers[op.writes[0][1]].storage].bytes for op in draws]
    assert [op.state_bytes for op in draws] == [bytes_of(size // 4) for size in sizes]
    assert {op.state_bytes for op in graph.ops if op not in draws} == {0}

    noise = lowtide.trace(lambda: (torch.randn(8) * torch.ones(8, requires_grad=True)).exp().sum(), fake=fake)
    assert [op.state_bytes for op in noise.ops if op.name == "aten.randn.default"] == [STATE]


def test_a_graph_of_an_older_schema_has_none_of_this() -> None:
    graph = TINY["perceptron"]().trace()
    data = graph.to_json()
    old = {key: value for key, value in data.items() if key != "workspaces"}
    old |= {"schema": 1, "ops": [row[:-3] for row in data["ops"]]}
    ops = tuple(replace(op, workspace_bytes=0, state_bytes=0) for op in graph.ops)
    assert StepGraph.from_json(old) == replace(graph, ops=ops, workspaces=False)

    measured = TINY["perceptron"]().trace(fake=False, repeats=1)
    old = measured.to_json() | {"schema": 2}
    old["ops"] = [row[:-1] for row in old["ops"]]
    ops = tuple(replace(op, replay_seconds=-1.0) for op in measured.ops)
    assert ops != measured.ops
    assert StepGraph.from_json(old) == replace(measured, ops=ops)


def test_the_memory_table_says_what_a_kernel_takes() -> None:
    sketch = Sketch()
    x = sketch.root(100)
    with sketch.block("layers.0"):
        (a,) = sketch.op([x], 200, workspace=1000, name="aten.convolution.default")
    sketch.op([a], 4)
    table = sketch.graph().memory_table()
    row = next(row for row in table.rows if row.bytes == 1000)
    assert (row.kind, row.op) == ("temporaries", "inside convolution")
    assert sum(row.bytes for row in table.rows) == table.total_bytes == 1300


def refilled(rows: Tensor) -> Tensor:
    """Memory whose parts are written one after the other, one of them twice."""
    mask = torch.empty_like(rows)
    mask[:30].fill_(0.5).mul_(2.0)
    mask[30:].fill_(0.3)
    return rows * mask


def overwritten(rows: Tensor) -> Tensor:
    """A mask that is written again while what was computed with it can only be computed with what it was."""
    mask = torch.empty_like(rows).bernoulli_(0.6)
    before = rows.detach() * mask
    mask.fill_(2)
    return torch.cos(rows * mask) + before


@pytest.mark.parametrize("ops", [(), ("aten.mul", "aten.add"), ("aten.mul", "aten.add", "aten.cos", "aten.tanh")])
@pytest.mark.parametrize("inside", [refilled, overwritten])
def test_memory_that_is_written_again_is_counted_while_it_is_there(inside: Any, ops: tuple[str, ...]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(72, 72)

        def forward(self, rows: Tensor) -> Tensor:
            return inside(torch.tanh(self.layer(rows))).sum() + inside(rows).sum()

    model, rows = Net(), torch.randn(60, 72)

    def step() -> Tensor:
        return model(rows).square()

    graph = lowtide.trace(step, model)
    plan = lowtide.solve(graph, policy=lambda op: op.name not in ops)
    rehearsed = [lowtide.rehearse(step, model, plan, fake=fake) for fake in (False, True)]
    assert rehearsed == [lowtide.simulate(graph, plan).peak_bytes] * 2
