"""Several models and several calls in one step share one budget, and nobody's decisions are taken for another's."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.demo.memory import measure_memory
from lowtide.errors import AttachError, RecomputeWarning
from situations import Tower, rows

Models = list[nn.Module]
Loss = Callable[[Models], Tensor]


def one_model_twice(models: Models) -> Tensor:
    return (models[0](rows(40)) * models[0](rows(40))).mean()


def two_models(models: Models) -> Tensor:
    return (models[0](rows(40)) @ models[1](rows(40)).T).logsumexp(1).mean()


def one_after_the_other(models: Models) -> Tensor:
    return models[1](models[0](rows(40))).square().mean()


def one_twice_and_the_other(models: Models) -> Tensor:
    return (models[0](rows(40)) * models[1](models[0](rows(40)))).mean()


LOSSES: list[Loss] = [one_model_twice, two_models, one_after_the_other, one_twice_and_the_other]


def resident_bytes(models: Models) -> int:
    return sum(t.nbytes for model in models for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("share", [0.85, 0.7])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_the_budget_holds_for_all_calls_of_a_step_together(loss: Loss, share: float) -> None:
    models: Models = [Tower(3), Tower(3)]
    inputs = 2 * rows(40).nbytes

    def peak() -> int:
        for model in models:
            model.zero_grad()
        return measure_memory(lambda: loss(models), Tensor.backward).peak_bytes + resident_bytes(models)

    plain = peak()
    budget = int(share * (plain + inputs))
    with lowtide.attach(models, budget=budget) as handle:
        peaks = [peak() for _ in range(6)][1:]  # also when a step is known by heart
        report = handle.report()
    assert max(peaks) <= budget
    assert min(peaks) > 0.9 * (report.predicted_peak_bytes - inputs)
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=0.01)
    assert report.plan is not None
    assert report.plan.recompute
    assert report.fallbacks == ()


def test_equal_paths_of_two_models_have_decisions_of_their_own() -> None:
    models: Models = [Tower(1), Tower(1)]
    graph = lowtide.trace(lambda: two_models(models), models)
    sites = [op.site for _, op in graph.forward_ops()]
    assert len(set(sites)) == len(sites)
    assert any(site.startswith("0.blocks.0.up/0:") for site in sites)
    assert any(site.startswith("1.blocks.0.up/0:") for site in sites)


def test_a_plan_recomputes_in_the_model_that_it_says_and_not_in_its_twin() -> None:
    models: Models = [Tower(2), Tower(2)]
    step = lambda: two_models(models)  # noqa: E731
    graph = lowtide.trace(step, models)
    plan = lowtide.solve(graph, policy=lambda op: not op.module.startswith("1."))
    plain = lowtide.simulate(graph, frozenset()).peak_bytes
    predicted = lowtide.simulate(graph, plan).peak_bytes
    assert predicted < plain
    assert lowtide.rehearse(step, models, plan) == pytest.approx(predicted, rel=0.01)
    assert lowtide.verify(step, models, plan)
    with lowtide.attach(models, plan=plan) as handle:
        step().backward()
        assert handle.report().planned_calls == 2


def test_outermost_modules_of_one_model_are_called_by_their_paths_in_it() -> None:
    model = nn.ModuleDict({"one": Tower(3), "two": Tower(3)})

    def step() -> Tensor:
        return (model["one"](rows()) * model["two"](rows())).mean()

    graph = lowtide.trace(step, model)
    sites = [op.site for _, op in graph.forward_ops()]
    assert len(set(sites)) == len(sites)
    plan = lowtide.solve(graph, policy=lowtide.policies.segments())
    assert lowtide.verify(step, model, plan)
    assert lowtide.rehearse(step, model, plan) < 0.9 * lowtide.simulate(graph, frozenset()).peak_bytes
    with pytest.warns(RecomputeWarning, match="may be one or two"), lowtide.record(plan):
        step().backward()
    with lowtide.record(plan, model=model):
        step().backward()


def test_twins_that_nobody_named_share_no_decision() -> None:
    models: Models = [Tower(1), Tower(1)]
    seen: list[str] = []

    def policy(op: lowtide.policies.Op) -> bool:
        seen.append(op.site)
        return False

    with lowtide.record(policy):
        two_models(models).backward()
    assert len(set(seen)) == len(seen)


def test_a_step_of_another_kind_is_watched_and_then_planned() -> None:
    models: Models = [Tower(3), Tower(3)]
    with lowtide.attach(models, budget="85%") as handle:
        for number in range(8):
            loss = one_after_the_other(models) if number % 2 else models[1](rows(40)).square().mean()
            loss.backward()
        report = handle.report()
        assert any("another kind of step" in text for text in report.fallbacks)
        before = report.planned_calls
        one_after_the_other(models).backward()
        assert handle.report().planned_calls == before + 2


def test_a_longer_step_than_known_runs_thriftily_and_says_so() -> None:
    model = Tower(3)
    with lowtide.attach(model, budget="85%") as handle:
        for _ in range(2):
            model(rows(40)).mean().backward()
        (model(rows(40)) * model(rows(40))).mean().backward()
        assert any("without a plan" in text for text in handle.report().fallbacks)
        for _ in range(2):
            (model(rows(40)) * model(rows(40))).mean().backward()
        assert len(handle.source.shelf.kinds) == 2


def test_a_plan_for_one_call_serves_each_of_several() -> None:
    model = Tower(3)
    graph = lowtide.trace(lambda: model(rows(40)).square().mean(), model)
    plan = lowtide.solve(graph, budget="70%")

    def peak() -> int:
        model.zero_grad()
        return measure_memory(lambda: one_model_twice([model]), Tensor.backward).held_bytes

    plain = peak()
    with lowtide.attach(model, plan=plan):
        peak()
        assert peak() < 0.8 * plain


def test_two_threads_may_call_an_attached_model() -> None:
    model = Tower(3).eval()
    data = [rows(40) for _ in range(4)]

    def gradients(threads: bool) -> list[Tensor]:
        found: dict[int, tuple[Tensor, ...]] = {}

        def work(number: int) -> None:
            for _ in range(3):
                loss = model(data[number]).square().mean()
                found[number] = torch.autograd.grad(loss, list(model.parameters()))

        workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
            if not threads:
                worker.join()
        for worker in workers:
            worker.join()
        return [gradient for number in range(4) for gradient in found[number]]

    plain = gradients(threads=False)
    for attached in ({"budget": "80%"}, {"policy": lowtide.policies.recompute_all}):
        with lowtide.attach(model, **attached):  # type: ignore[arg-type]
            ours = gradients(threads=True)
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_lists_are_looked_at_closely() -> None:
    model = Tower(1)
    with pytest.raises(AttachError, match="twice"):
        lowtide.attach([model, model], budget="1 GiB")
    with pytest.raises(AttachError, match="list"):
        lowtide.attach([], budget="1 GiB")
    with pytest.raises(AttachError, match="function"):
        lowtide.attach([model, rows], budget="1 GiB")  # type: ignore[list-item]
    with lowtide.attach([model], budget="1 GiB"), pytest.raises(AttachError, match="detach"):
        lowtide.attach([Tower(1), model], budget="1 GiB")
    with lowtide.attach(model, budget="1 GiB"), pytest.raises(AttachError, match="parts in common"):
        lowtide.attach(model.blocks[0], budget="1 GiB")
    with lowtide.attach(model.blocks[0], budget="1 GiB"), pytest.raises(AttachError, match="parts in common"):
        lowtide.attach(model, budget="1 GiB")
    lowtide.attach(model, budget="1 GiB").detach()


def test_a_policy_inside_of_a_budget_is_obeyed() -> None:
    model = Tower(3)
    with (
        lowtide.attach(model, policy=lowtide.policies.keep_all),
        lowtide.attach(model.blocks[1], policy=lowtide.policies.recompute_all),
    ):
        held = measure_memory(lambda: model(rows(40)).mean(), Tensor.backward).held_bytes
    assert held < measure_memory(lambda: model(rows(40)).mean(), Tensor.backward).held_bytes
