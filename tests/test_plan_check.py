"""A plan runs on the model that it was made for, and on no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtide
from blocks import structure
from lowtide.errors import PlanMismatch
from lowtide.plan import Plan
from lowtide.planned import policy_of

WHOLE = structure(2)
DIFFERENCES = [
    ("class", [(p, "SiLU" if p == "blocks.1.mlp.1" else k) for p, k in WHOLE],
     "blocks.1.mlp.1 is of class SiLU here, of class GELU in the plan's model"),
    ("root", [("", "Other"), *WHOLE[1:]], "the model itself is of class Other here, of class Net"),
    ("missing", [row for row in WHOLE if row[0] != "blocks.0.norm"], "blocks.0.norm (LayerNorm) is missing"),
    ("missing at the end", WHOLE[:-1], "head (Linear) is missing here"),
    ("extra", [*WHOLE[:4], ("blocks.0.gate", "Linear"), *WHOLE[4:]], "blocks.0.gate (Linear) is extra"),
    ("extra at the end", [*WHOLE, ("tail", "Linear")], "tail (Linear) is extra"),
    ("longer", structure(3), "blocks.2 (Block) is extra"),
    ("shorter", structure(1), "blocks.1 (Block) is missing here"),
    ("order", [*WHOLE[:1], *WHOLE[2:], WHOLE[1]], "blocks (ModuleList) comes at another place"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "message"), [case[1:] for case in DIFFERENCES], ids=[case[0] for case in DIFFERENCES]
)
def test_the_first_difference_between_models_is_named(found: Any, message: str) -> None:
    with pytest.raises(PlanMismatch) as refused:
        Plan(frozenset(), structure=WHOLE).check(found)
    assert message in str(refused.value)


def test_the_model_of_the_plan_is_accepted_and_a_plan_without_a_model_accepts_all() -> None:
    Plan(frozenset(), structure=WHOLE).check(WHOLE)
    Plan(frozenset()).check(WHOLE)


def model(width: int = 8, activation: type[torch.nn.Module] = torch.nn.GELU) -> torch.nn.Sequential:
    blocks = (torch.nn.Sequential(torch.nn.Linear(width, width), activation()) for _ in range(2))
    return torch.nn.Sequential(*blocks, torch.nn.Linear(width, 1))


def planned(one: torch.nn.Module) -> Plan:
    graph = lowtide.trace(lambda: one(torch.ones(3, 8)).sum(), model=one, repeats=0)
    return lowtide.solve(graph, policy=lowtide.policies.recompute_all)


def test_recording_under_a_plan_gives_the_same_gradients() -> None:
    one = model()
    plan = planned(one)
    one(torch.ones(3, 8)).sum().backward()
    plain = [parameter.grad for parameter in one.parameters()]
    one.zero_grad(set_to_none=True)
    with lowtide.record(plan):
        loss = one(torch.ones(3, 8)).sum()
    loss.backward()
    for expected, parameter in zip(plain, one.parameters(), strict=True):
        assert expected is not None
        assert parameter.grad is not None
        assert torch.equal(expected, parameter.grad)


def test_recording_another_model_is_refused_and_leaves_no_trace() -> None:
    plan = planned(model())
    other = model(activation=torch.nn.SiLU)
    with (
        pytest.raises(PlanMismatch, match=r"0\.1 is of class SiLU here, of class GELU"),
        lowtide.record(plan),
    ):
        other(torch.ones(3, 8))
    other(torch.ones(3, 8)).sum().backward()


def test_a_plan_with_nothing_to_recompute_refuses_another_model_and_then_records_nothing() -> None:
    policy_of.cache_clear()
    one, other = model(), model(activation=torch.nn.SiLU)
    graph = lowtide.trace(lambda: one(torch.ones(3, 8)).sum(), model=one, repeats=0)
    plan = lowtide.solve(graph, policy=lowtide.policies.keep_all)
    assert not plan.recompute
    for _ in range(2):
        with pytest.raises(PlanMismatch, match=r"0\.1 is of class SiLU here"), lowtide.record(plan):
            other(torch.ones(3, 8))
    assert not policy_of(plan).keeps_all
    for _ in range(3):
        with lowtide.record(plan):
            loss = torch.nn.MSELoss()(one(torch.ones(3, 8)), torch.zeros(3, 1))
        loss.backward()
    assert policy_of(plan).keeps_all


def test_a_loss_module_a_part_of_the_model_and_a_frozen_teacher_are_no_other_model() -> None:
    one, teacher = model(), model(activation=torch.nn.SiLU)
    plan = planned(one)
    with lowtide.record(plan):
        with torch.no_grad():
            target = teacher(torch.ones(3, 8))
        loss = torch.nn.MSELoss()(one(torch.ones(3, 8)), target) + one[0](torch.ones(3, 8)).sum()
    loss.backward()


def test_a_plan_made_without_a_model_runs_everywhere() -> None:
    plan = Plan(planned(model()).recompute)
    with lowtide.record(plan):
        loss = model(activation=torch.nn.SiLU)(torch.ones(3, 8)).sum()
    loss.backward()


def test_the_policy_of_a_plan_is_made_once() -> None:
    plan = planned(model())
    assert policy_of(plan) is policy_of(Plan.from_json(plan.to_json()))
