"""Will it fit, and what to recompute: estimates, knobs, choices, names."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.errors import InfeasibleBudget
from tiny import Tiny, gpt_step

BUDGETS = ("95%", "85%", "75%", "65%")


@cache
def model() -> tuple[Tiny, Any]:
    made = gpt_step(blocks=4, length=32)
    return made, made.trace(fake=False)


def test_B109_ask_before_running_whether_it_fits() -> None:
    """From fake tensors alone: total, breakdown, and the measured peak within a percent."""
    made, _ = model()
    graph = made.trace(fake=True)
    plain = lowtide.simulate(graph, lowtide.solve(graph, policy=lowtide.policies.keep_all))
    measured = lowtide.measure(made.step, made.model, lowtide.policies.keep_all, rounds=1)
    assert plain.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    table = graph.memory_table()
    kinds = dict(table.kinds)
    assert kinds["parameters"] == sum(p.numel() * 4 for p in made.model.parameters())
    assert kinds["saved activations"] > 0
    assert sum(kinds.values()) == table.total_bytes


def test_B109_yes_or_no_with_the_smallest_that_would_do() -> None:
    _, graph = model()
    with pytest.raises(InfeasibleBudget, match=r"the smallest that a plan fits is .*\((\d+) bytes\)") as refused:
        lowtide.solve(graph, budget=1000)
    smallest = int(str(refused.value).split(" bytes)")[0].rpartition("(")[2])
    assert lowtide.solve(graph, budget=smallest).prediction.peak_bytes <= smallest


def test_B110_estimates_leave_activations_out() -> None:
    _, graph = model()
    kinds = dict(graph.memory_table().kinds)
    assert kinds["saved activations"] > kinds["parameters"] * 0.2
    assert {"parameters", "saved activations", "temporaries"} <= kinds.keys()


@pytest.mark.parametrize(
    "policy",
    [lowtide.policies.keep_all, lowtide.policies.keep_matmuls, lowtide.policies.recompute_all,
     lowtide.policies.segments("blocks.*")],
    ids=["none", "selective", "full", "per block"],
)  # fmt: skip
def test_B111_an_estimate_holds_for_every_setting_not_for_one(policy: Any) -> None:
    made, graph = model()
    plan = lowtide.solve(graph, policy=policy)
    measured = lowtide.measure(made.step, made.model, plan, rounds=1)
    assert measured.peak_bytes == pytest.approx(plan.prediction.peak_bytes, rel=0.01)
    assert measured.row("lowtide").exact


def test_B114_the_budget_is_a_peak_and_more_of_it_is_never_slower() -> None:
    _, graph = model()
    plans = [lowtide.solve(graph, budget=budget) for budget in BUDGETS]
    for plan in plans:
        assert plan.budget_bytes is not None
        assert lowtide.simulate(graph, plan).peak_bytes <= plan.budget_bytes
    for more, less in pairwise(plans):
        assert more.prediction.peak_bytes >= less.prediction.peak_bytes
        assert more.prediction.step_seconds <= less.prediction.step_seconds + 1e-12


def test_B114_the_frontier_is_monotonic() -> None:
    _, graph = model()
    plans = lowtide.frontier(graph, points=8)
    assert plans[0].prediction.peak_bytes == plans[0].prediction.plain_peak_bytes
    for one, other in pairwise(plans):
        assert one.prediction.peak_bytes > other.prediction.peak_bytes
        assert one.prediction.step_seconds <= other.prediction.step_seconds


@pytest.mark.parametrize("n", [1, 2, 4])
def test_B115_every_nth_layer(n: int) -> None:
    _, graph = model()
    plan = lowtide.solve(graph, policy=lowtide.policies.segments("blocks.*", n=n))
    assert plan.prediction.peak_bytes <= plan.prediction.plain_peak_bytes
    assert lowtide.simulate(graph, plan).replayed > 0 or n == 4


def test_B116_given_a_byte_limit_it_is_chosen_what_to_recompute() -> None:
    """Better than per block at per block's own peak, and close to a proven bound."""
    graph = model()[0].trace(fake=True, hardware="h100")
    by_hand = lowtide.solve(graph, policy=lowtide.policies.segments("blocks.*"))
    chosen = lowtide.solve(graph, budget=by_hand.prediction.peak_bytes)
    assert chosen.prediction.step_seconds <= by_hand.prediction.step_seconds
    assert chosen.prediction.bound_seconds <= chosen.prediction.step_seconds
    assert chosen.prediction.gap < 0.25


def test_B117_see_what_is_saved_and_by_whom() -> None:
    made, graph = model()
    by_module = dict(graph.memory_table().modules)
    assert by_module["blocks.0-3"] > sum(size for module, size in by_module.items() if module != "blocks.0-3")
    assert "bernoulli_" in str(graph.memory_table())
    with lowtide.record(lowtide.policies.keep_all) as recording:
        made.step().backward()
    assert not recording.report().warnings


def test_B118_save_by_name_by_module_or_by_region() -> None:
    made, _ = model()

    def asked_in(policy: Any) -> set[str]:
        modules: set[str] = set()

        def watch(op: Any) -> bool:
            modules.add(op.module)
            return bool(policy(op)) if callable(policy) else False

        with lowtide.record(watch):
            made.step().backward()
        return modules

    by_path = asked_in(lambda op: op.module.startswith("blocks.0"))
    assert any(path.startswith("blocks.3") for path in by_path)
    graph = made.trace(fake=False)
    plan = lowtide.solve(graph, policy=lowtide.policies.by_module("blocks.1", lowtide.policies.recompute_all))
    assert plan.recompute
    assert all(site.startswith("blocks.1") for site in plan.recompute)


def test_B118_a_plan_names_sites_and_is_read_back_equal(tmp_path: Path) -> None:
    made, graph = model()
    plan = lowtide.solve(graph, budget="80%")
    plan.save(tmp_path / "plan.json")
    assert lowtide.Plan.load(tmp_path / "plan.json") == plan
    text = json.loads((tmp_path / "plan.json").read_text())
    assert text["schema"]
    shorter = gpt_step(blocks=4, length=16)
    with lowtide.record(plan):  # the same plan serves another length
        loss = shorter.step()
    loss.backward()
    torch.manual_seed(0)
    assert lowtide.verify(shorter.step, shorter.model, plan)
    assert made.model is not shorter.model


# ---- relatives -----------------------------------------------------------------------------------------------


def test_relative_a_budget_in_unclear_units_is_refused_before_anything_runs() -> None:
    made, graph = model()
    with pytest.raises(lowtide.errors.UnitError, match="12 G"):
        lowtide.solve(graph, budget="12 G")
    with pytest.raises(lowtide.errors.UnitError, match="12 G"):
        lowtide.attach(made.model, budget="12 G")


def test_relative_a_plan_for_another_model_is_refused_with_the_first_difference() -> None:
    made, graph = model()
    plan, other = lowtide.solve(graph, budget="85%"), gpt_step(blocks=5, length=32)
    with pytest.raises(lowtide.errors.PlanMismatch, match=r"blocks\.4"), lowtide.record(plan):
        other.step()
    with lowtide.record(plan):
        assert isinstance(made.step(), Tensor)
