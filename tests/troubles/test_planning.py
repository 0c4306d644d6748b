"""Will it fit, and what to recompute: estimates, knobs, choices, names."""

from __future__ import annotations

import contextlib
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


def step_of(batch: int, width: int = 64) -> tuple[Any, torch.nn.Module]:
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)), torch.nn.Tanh())
    x = torch.randn(batch, width)
    return lambda: net(x).square().mean(), net


def test_B113_a_smaller_batch_is_accumulated_to_the_one_that_was_asked_for() -> None:
    """Whatever is advised or found to fit, as many samples count for an update as before."""
    step, net = step_of(256)
    advice = lowtide.advise(
        step, net, budget="700 KiB", hardware="cpu", batch=256, remake=lambda batch: step_of(batch)[0]
    )
    smaller = [option for option in advice.fit.tried if "accumulated" in option.name]
    assert len({option.estimate.setup.batch for option in smaller}) > 1
    for option in advice.fit.tried:
        assert option.estimate.setup.batch * option.estimate.setup.accumulation == 256


def trained(full_in: str | None) -> tuple[list[Tensor], list[tuple[bool, int]], list[str]]:
    """Four updates of two micro-batches each, with evaluations between; memory runs out once in `full_in`.

    Returns the weights, whether each call trained and its rows, and what the handle tells; without `full_in` plainly.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
                                for _ in range(4)))  # fmt: skip
    data, full, calls = torch.randn(8, 32, 16), set[str](), list[tuple[bool, int]]()

    def look(module: torch.nn.Module, given: tuple[Tensor]) -> None:
        calls.append((module.training, len(given[0])))
        if ("training" if module.training else "evaluation") in full:
            full.clear()
            raise MemoryError("injected")

    net.register_forward_pre_hook(look)
    handle = lowtide.attach(net, budget="100%") if full_in else None

    def update(*batch: Tensor) -> None:
        for micro in batch:
            (net(micro).square().mean() / len(batch)).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

    run = lowtide.fit_retry(update, handle) if handle is not None else update
    for number in range(4):
        if number == 2 and full_in:
            full.add(full_in)
        run(*data[2 * number : 2 * number + 2])
        net.eval()
        with torch.no_grad(), pytest.raises(MemoryError) if full == {"evaluation"} else contextlib.nullcontext():
            net(data.flatten(0, 1))
        net.train()
    told = list(handle.report().fallbacks) if handle is not None else []
    if handle is not None:
        handle.detach()
    return [p.detach().clone() for p in net.parameters()], calls, told


@pytest.mark.filterwarnings("ignore:a step ran out of memory")
@pytest.mark.parametrize("full_in", ["training", "evaluation"])
def test_B113_memory_that_runs_out_in_evaluation_leaves_training_as_it_is(full_in: str) -> None:
    """The batch stays as it is in both cases; only training that runs out of memory is planned anew, and run again."""
    wanted, plain_calls, _ = trained(None)
    found, calls, told = trained(full_in)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert set(calls) == set(plain_calls) == {(True, 32), (False, 256)}
    assert any("ran out of memory" in text for text in told) is (full_in == "training")
    assert calls.count((True, 32)) == 8 + (full_in == "training")


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
