"""Sharded parameters: what keeps replays inside of their unit, what happens without it, and what ranks agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_steps import STEPS, Net, words
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.errors import PlanMismatch, RootChanged
from lowtide.tape import sharding

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def caught(step: Any) -> str:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without_units() -> tuple[str, str]:
    """What a replay across the border of a unit meets, and what one inside of it does."""
    made = STEPS["fsdp: resharded after forward"]
    torch.manual_seed(0)
    with lowtide.record():
        loss = made().planned(words(0))
    inside = caught(loss.backward)
    units, sharding._UNITS[:] = list(sharding._UNITS), []
    torch.manual_seed(0)
    with lowtide.record():
        loss = made().planned(words(0))
    sharding._UNITS[:] = units
    return inside, caught(loss.backward)


def test_a_parameter_that_was_given_back_is_never_read() -> None:
    for inside, across in on_ranks(without_units):
        assert not inside
        assert across.startswith(RootChanged.__name__)
        assert "given back" in across


class Escapes(nn.Module):
    """Hands a result of its parameters to whoever asks, beside what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.aside = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).exp()
        self.aside = hidden.sin()
        self.aside.mul_(2)
        return hidden.cos()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Escapes(), Escapes()

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.first(x))
        aside = self.first.aside
        aside.add_(self.second.aside)  # written by another unit than made it
        return (out * aside.tanh()).square().mean()


def escaping(recorded: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Outer()
    for unit in (model.first, model.second, model):
        fully_shard(unit)
    x = torch.randn(4, 8)
    if recorded:
        with lowtide.record(check="always"):
            loss = model(x)
    else:
        loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]  # type: ignore[union-attr]


def test_what_leaves_a_unit_is_kept_however_it_leaves() -> None:
    for plain, ours in zip(on_ranks(escaping, False), on_ranks(escaping, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def nothing_left() -> bool:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    before = dict(vars(FSDPParamGroup))
    setup = STEPS["fsdp: resharded after forward"]()
    with lowtide.attach(setup.planned, policy=lowtide.policies.recompute_all):
        setup.run(0)
    return before == dict(vars(FSDPParamGroup)) and "__call__" not in Net.__dict__


def test_nothing_is_left_behind_where_the_class_changed_meanwhile() -> None:
    assert all(on_ranks(nothing_left))


def attach_before_sharding() -> bool:
    torch.manual_seed(0)
    model = Net()
    handle = lowtide.attach(model, policy=lowtide.policies.recompute_all)
    fully_shard(model)
    model(words(0)).backward()
    counted = handle.report().calls
    handle.detach()
    return counted == 1 and "__call__" not in Net.__dict__ and "__call__" not in type(model).__dict__


def test_a_model_may_be_sharded_after_it_was_attached() -> None:
    assert all(on_ranks(attach_before_sharding))


# ---- one plan for all ranks -----------------------------------------------------------------------------------


def plans() -> list[str]:
    setup = STEPS["ddp: plain"]()
    with lowtide.attach(setup.planned, budget="85%") as handle:
        for number in range(2):
            setup.run(number)
        assert handle.plan is not None
        assert handle.plan.recompute
        return sorted(handle.plan.recompute)


def test_ranks_that_plan_the_same_step_take_the_same_plan() -> None:
    one, other = on_ranks(plans)
    assert one == other


def another_plan() -> str:
    torch.manual_seed(0)
    model = Net()
    batch = words(0)
    policies = [lowtide.policies.recompute_all, lowtide.policies.keep_all]
    graph = lowtide.trace(lambda: model(batch), model, fake=True)
    same = lowtide.solve(graph, policy=lowtide.policies.keep_matmuls)
    lowtide.attach(model, plan=same).detach()
    dist.barrier()
    different = lowtide.solve(graph, policy=policies[dist.get_rank()])
    return caught(lambda: lowtide.attach(model, plan=different).detach())


def test_a_rank_with_another_plan_is_told_so_when_it_attaches() -> None:
    said = on_ranks(another_plan)
    assert sorted(map(bool, said)) == [False, True]
    assert max(said).startswith(PlanMismatch.__name__)
    assert "rank 0" in max(said)
    assert "rank 1" in max(said)


def test_a_plan_of_the_unsharded_model_serves_the_sharded_one() -> None:
    assert all(on_ranks(planned_elsewhere))


def planned_elsewhere() -> bool:
    torch.manual_seed(0)
    model = Net()
    batch = words(0)
    graph = lowtide.trace(lambda: model(batch), model, fake=True)
    plan = lowtide.solve(graph, policy=lowtide.policies.recompute_all)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with lowtide.attach(model, plan=plan):
        model(batch).backward()
    return True
