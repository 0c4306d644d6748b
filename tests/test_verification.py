"""verify: exact is called exact, what is wrong is named, and nothing is different afterwards."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from harness import freeze
from lowtide import Verdict
from lowtide.errors import GraphError, InfeasibleBudget, PlanMismatch, UnitError
from lowtide.tape import proof, replay, tickets
from lowtide.tape.policy import Policy
from lowtide.verification import dirty_memory
from situations import WIDTH, Tower, rows


@dataclass
class Program:
    """A model and a step that trains it; `owned` is whatever else the step may change."""

    model: nn.Module
    step: Callable[[], Tensor]
    owned: dict[str, Any] = field(default_factory=dict)


def mlp() -> Program:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 1))
    x = torch.randn(4, 6)
    return Program(model, lambda: model(x).square().mean())


def own_generator() -> Program:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    x, generator = torch.randn(4, 6, requires_grad=True), torch.Generator().manual_seed(7)

    def step() -> Tensor:
        noise = torch.randn(4, 6, generator=generator) * random.random() * np.random.rand()
        return model(x * noise).mean()

    return Program(model, step, {"x": x, "generator": generator})


class Busy(nn.Module):
    """Changes itself in every way a module can: buffers in place and by name, attributes, lists, tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.calls, self.seen, self.plain = 0, [], torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.count = self.count + 1
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.plain.add_(1)
        return torch.tanh(self.fc(x - self.mean)).relu()


def busy() -> Program:
    model, x = Busy(), torch.randn(4, 6)
    return Program(model, lambda: model(x).sum(), {"seen": model.seen, "plain": model.plain})


def sparse() -> Program:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4), nn.GELU())
    tokens = torch.randint(10, (3, 5))
    return Program(model, lambda: model(tokens).sum())


PROGRAMS = [mlp, own_generator, busy, sparse]
each_program = pytest.mark.parametrize("build", PROGRAMS, ids=lambda build: build.__name__)


def state_of(program: Program, optimizer: torch.optim.Optimizer | None = None) -> object:
    """All that verify and measure must leave as it was, bit for bit."""
    model = program.model
    attributes = {
        path: {k: v for k, v in vars(module).items() if isinstance(v, int | list | Tensor)}
        for path, module in model.named_modules()
    }
    states = [] if optimizer is None else [*optimizer.state.values(), *optimizer.param_groups]
    return freeze(
        {
            "parameters": dict(model.named_parameters()),
            "gradients": {name: p.grad for name, p in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
            "attributes": attributes,
            "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
            "own": program.owned,
            "own gradients": {name: getattr(value, "grad", None) for name, value in program.owned.items()},
            "optimizer": [{k: v for k, v in state.items() if k != "params"} for state in states],
        }
    )


@each_program
@pytest.mark.parametrize("policy", ["recompute_all", "keep_matmuls"])
def test_a_step_under_a_policy_is_exact(build: Callable[[], Program], policy: str) -> None:
    program = build()
    verdict = lowtide.verify(program.step, program.model, getattr(lowtide.policies, policy))
    assert verdict, str(verdict)
    assert verdict.reproducible
    assert verdict.plan is None


def test_everything_compared_is_counted() -> None:
    program = own_generator()
    verdict = lowtide.verify(program.step, program.model, lowtide.policies.recompute_all)
    assert str(verdict) == "exact: loss, 5 gradients, 4 random states"


def test_a_budget_becomes_a_plan() -> None:
    program = mlp()
    verdict = lowtide.verify(program.step, program.model, "95%")
    assert verdict
    assert verdict.plan is not None
    assert verdict.plan.recompute
    assert lowtide.verify(program.step, program.model, verdict.plan).plan == verdict.plan


def test_an_optimizer_steps_and_is_compared() -> None:
    program = mlp()
    optimizer = torch.optim.AdamW(program.model.parameters())
    verdict = lowtide.verify(program.step, program.model, lowtide.policies.recompute_all, steps=3, optimizer=optimizer)
    assert str(verdict) == (
        "exact over 3 steps: loss, 6 gradients, 3 buffers, 3 random states, 6 parameters, 18 optimizer states"
    )


# ---- what is wrong is found --------------------------------------------------------------------------------


@pytest.fixture
def broken_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recomputed comes out a little too large."""
    rebuild = replay.rebuild
    monkeypatch.setattr(tickets, "rebuild", lambda buffer: rebuild(buffer) * 1.5)


@pytest.mark.usefixtures("broken_replay")
def test_a_wrong_replay_is_named_with_its_module_and_size() -> None:
    program = mlp()
    verdict = lowtide.verify(program.step, program.model, lowtide.policies.recompute_all)
    assert not verdict
    assert verdict.reproducible
    first = verdict.differences[0]
    assert (first.what, first.module, first.step) == ("gradient of 0.weight", "0 (Linear)", 1)
    assert "of 48 elements differ, by at most" in first.text
    assert first.largest is not None
    assert first.largest > 0
    assert "gradient of 0.weight in 0 (Linear): " in str(verdict)
    assert str(verdict).startswith("not exact: ")
    assert "it comes of recomputing aten." in str(verdict)


@torch.library.custom_op("lowtide_test_verification::fickle", mutates_args=())
def fickle(x: Tensor) -> Tensor:
    """Twice ``x``; but three times in a backward pass once it has been proven, which nothing but verify sees."""
    if torch._C._current_graph_task_id() == -1:
        forwards.append(1)
        return x * 2
    return x * (3 if len(forwards) > PROVEN else 2)


forwards: list[int] = []
PROVEN = 5
"""Discovery, two plain runs, and one that is proven, which runs it twice."""

fickle.register_autograd(lambda ctx, gradient: gradient * 2)
lowtide.recomputable(fickle)


class Fickle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(fickle(x))


@pytest.mark.parametrize("policy", [lowtide.policies.recompute_all, lowtide.policies.segments("1")], ids=repr)
def test_the_operation_to_blame_is_named_with_its_module_and_line(policy: Policy) -> None:
    model, data = nn.Sequential(Tower(2), nn.Sequential(nn.Linear(WIDTH, WIDTH), Fickle(), nn.Tanh())), rows()
    forwards.clear()
    verdict = lowtide.verify(lambda: model(data).square().mean(), model, policy)
    line = inspect.getsourcelines(Fickle.forward)[1] + 1
    assert verdict.culprit == f"lowtide_test_verification.fickle in 1.1, test_verification.py:{line}"
    assert Verdict.from_json(verdict.to_json()) == verdict


@pytest.mark.usefixtures("broken_replay")
def test_a_wrong_replay_shows_in_the_weights_too() -> None:
    program = mlp()
    optimizer = torch.optim.SGD(program.model.parameters(), 0.1, momentum=0.9)
    verdict = lowtide.verify(program.step, program.model, lowtide.policies.recompute_all, steps=2, optimizer=optimizer)
    names = {difference.what for difference in verdict.differences}
    assert {"parameter of 0.weight", "optimizer state of momentum_buffer of 0.weight", "loss"} <= names
    assert "step 1, gradient of 0.weight" in str(verdict)


def test_freed_memory_is_full_of_nan_when_backward_begins() -> None:
    freed = [torch.ones(32 * n) for n in range(1, 9)]
    freed.clear()
    dirty_memory({torch.device("cpu")})
    found = [torch.empty(32 * n) for n in range(1, 9)]
    assert any(bool(tensor.isnan().all()) for tensor in found)


def test_an_error_of_the_replay_is_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(buffer: Any) -> Tensor:
        raise lowtide.errors.ReplayMismatch("aten.gelu in 2, model.py:3 came out differently")

    monkeypatch.setattr(tickets, "rebuild", refuse)
    program = mlp()
    verdict = lowtide.verify(program.step, program.model, lowtide.policies.recompute_all)
    assert str(verdict) == "not exact: ReplayMismatch: aten.gelu in 2, model.py:3 came out differently"


def test_a_step_that_differs_from_itself_is_named_and_set_aside() -> None:
    model, calls = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), []

    def step() -> Tensor:
        calls.append(0)
        with torch.no_grad():
            moved = torch.full((2, 1), float(len(calls)))
        return (model(torch.ones(2, 3)) * moved).sum()

    verdict = lowtide.verify(step, model, lowtide.policies.recompute_all)
    assert not verdict.reproducible
    assert {"loss", "gradient of 0.weight"} <= set(verdict.irreproducible)
    assert not verdict
    assert "the plain step differs from itself" in str(verdict)
    assert "no gradient is reproducible" in str(verdict)


def test_the_rest_of_an_irreproducible_step_is_compared() -> None:
    model, calls = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), []

    def step() -> Tensor:
        calls.append(0)
        return model(torch.ones(2, 3)).sum() + len(calls)

    verdict = lowtide.verify(step, model, lowtide.policies.recompute_all)
    assert verdict.irreproducible == ("loss",)
    assert verdict
    assert "exact: 4 gradients, 3 random states" in str(verdict)


def test_what_is_kept_against_the_plan_is_told_and_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "same_bits", lambda one, other: False)
    program = mlp()
    verdict = lowtide.verify(program.step, program.model, lowtide.policies.recompute_all)
    assert verdict
    assert any("aten.gelu in 2, " in text for text in verdict.warnings)
    assert "warning: aten.gelu" in str(verdict)


# ---- nothing is different afterwards -----------------------------------------------------------------------


@each_program
@pytest.mark.parametrize("with_gradients", [False, True])
def test_everything_is_put_back(build: Callable[[], Program], with_gradients: bool) -> None:
    program = build()
    if with_gradients:
        program.step().backward()
    before = state_of(program)
    gradients = [p.grad for p in program.model.parameters()]
    plan = lowtide.policies.recompute_all if build is sparse else "100%"
    lowtide.verify(program.step, program.model, plan, steps=2)
    assert state_of(program) == before
    assert all(p.grad is old for p, old in zip(program.model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("warm", [False, True])
def test_the_optimizer_is_put_back(warm: bool) -> None:
    program = mlp()
    optimizer = torch.optim.AdamW(program.model.parameters(), lr=0.1)
    if warm:
        program.step().backward()
        optimizer.step()
    before = state_of(program, optimizer)
    lowtide.verify(program.step, program.model, lowtide.policies.recompute_all, steps=2, optimizer=optimizer)
    assert state_of(program, optimizer) == before


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("backward fails")


@pytest.mark.parametrize("where", ["forward", "backward", "plan"])
def test_everything_is_put_back_after_an_error(where: str) -> None:
    program = busy()
    program.step().backward()
    before = state_of(program)

    def step() -> Tensor:
        loss = program.step() * torch.rand(())
        if where == "forward":
            raise RuntimeError("forward fails")
        return Bomb.apply(loss) if where == "backward" else loss

    if where == "plan":
        with pytest.raises(InfeasibleBudget):
            lowtide.verify(step, program.model, 1)
    else:
        with pytest.raises(RuntimeError, match=f"{where} fails"):
            lowtide.verify(step, program.model, lowtide.policies.recompute_all)
    assert state_of(program) == before


def test_a_graph_that_is_alive_can_still_be_run_backward() -> None:
    program = mlp()
    program.model.eval()
    loss = program.step()
    lowtide.verify(program.step, program.model, lowtide.policies.recompute_all)
    loss.backward()


def test_what_is_attached_does_nothing_meanwhile() -> None:
    program = mlp()
    with lowtide.attach(program.model, policy=lowtide.policies.recompute_all) as handle:
        assert lowtide.verify(program.step, program.model, lowtide.policies.keep_matmuls)
        assert handle.report().calls == 0
        program.step()
        assert handle.report().calls == 1


# ---- what is refused, and the value ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda: 1.0, "returned float"),
        (lambda: torch.ones(2, requires_grad=True), r"shape \(2,\)"),
        (lambda: torch.ones(()), "does not require grad"),
    ],
)
def test_a_step_without_a_scalar_loss_is_refused(step: Callable[[], Any], text: str) -> None:
    with pytest.raises(GraphError, match=text):
        lowtide.verify(step, nn.Linear(1, 1), lowtide.policies.recompute_all)


def test_other_misuse_is_refused() -> None:
    program = mlp()
    with pytest.raises(ValueError, match="at least 1"):
        lowtide.verify(program.step, program.model, "95%", steps=0)
    with pytest.raises(UnitError):
        lowtide.verify(program.step, program.model, "12 pounds")
    with pytest.raises(TypeError):
        lowtide.verify(program.step, program.model, 1.5)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"weight has no contents yet"):
        lowtide.verify(program.step, nn.LazyLinear(3), lowtide.policies.recompute_all)
    other = busy()
    plan = lowtide.verify(other.step, other.model, "100%").plan
    assert plan is not None
    with pytest.raises(PlanMismatch):
        lowtide.verify(program.step, program.model, plan)


@pytest.mark.usefixtures("broken_replay")
@pytest.mark.parametrize("plan", ["95%", lowtide.policies.recompute_all])
def test_a_verdict_goes_to_json_and_back(plan: Any) -> None:
    program = mlp()
    verdict = lowtide.verify(program.step, program.model, plan)
    assert lowtide.Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict
    assert "<pre" in verdict._repr_html_()
    with pytest.raises(GraphError):
        lowtide.Verdict.from_json({"kind": "lowtide.Plan"})
    with pytest.raises(GraphError, match="broken"):
        lowtide.Verdict.from_json({"kind": "lowtide.Verdict", "schema": 1})
