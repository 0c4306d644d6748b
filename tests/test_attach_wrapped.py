"""A wrapper around the model, before or after attach, changes nothing; and a plan finds its model inside of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import lowtide
from lowtide.demo.memory import measure_memory
from lowtide.errors import PlanMismatch
from situations import Left, Tower, differences, left, rows


@pytest.fixture(scope="module")
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Outer(nn.Module):
    """A wrapper that does something of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.inner(x).mean(1, keepdim=True)).tanh()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": DataParallel,
    "another module": Outer,
    "Sequential": lambda model: nn.Sequential(model, nn.Flatten()),
}


def train(wrap: Callable[[nn.Module], nn.Module], attached: str, **how: Any) -> tuple[Left, int]:
    torch.manual_seed(0)
    model = Tower()
    calls = 0

    @contextmanager
    def put(target: nn.Module) -> Iterator[None]:
        nonlocal calls
        with lowtide.attach(target, **how) as handle:
            yield
            calls = handle.report().planned_calls

    with put(model) if attached == "before" else nullcontext():
        outer = wrap(model)
        target = model if attached == "inner" else outer
        with put(target) if attached in ("inner", "outer") else nullcontext():
            losses = []
            for _ in range(4):
                losses.append(outer(rows()).square().mean())
                losses[-1].backward()
    return left(losses, model), calls


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("attached", ["before", "inner", "outer"])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_trains_the_same(wrap: Callable[[nn.Module], nn.Module], attached: str) -> None:
    plain, _ = train(wrap, "")
    ours, calls = train(wrap, attached, budget="80%")
    assert differences(plain, ours) == []
    assert calls == 3


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("attached", ["before", "inner", "outer"])
@pytest.mark.parametrize("traced", ["inner", "outer"])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_plan_fits_its_model_in_a_wrapper_and_out_of_it(
    wrap: Callable[[nn.Module], nn.Module], traced: str, attached: str
) -> None:
    model = Tower()
    if traced == "outer":
        model = wrap(model)  # type: ignore[assignment]
    graph = lowtide.trace(lambda: model(rows()).square().mean(), model)
    plan = lowtide.solve(graph, policy=lowtide.policies.recompute_all)
    plain, _ = train(wrap, "")
    ours, calls = train(wrap, attached, plan=plan)
    assert differences(plain, ours) == []
    assert calls == 4


@pytest.mark.parametrize("traced", ["inner", "outer"])
@pytest.mark.parametrize("ran", ["inner", "outer"])
def test_a_plan_recomputes_the_same_whatever_is_around_the_model(traced: str, ran: str) -> None:
    tower = Tower()
    models = {"inner": tower, "outer": Outer(tower)}
    graph = lowtide.trace(lambda: models[traced](rows()).square().mean(), models[traced])
    plan = lowtide.solve(graph, policy=lambda op: "gelu" not in op.name and "layer_norm" not in op.name)

    def held(run: Callable[[], Any]) -> int:
        return measure_memory(run, torch.Tensor.backward).held_bytes

    def step() -> torch.Tensor:
        return models[ran](rows()).square().mean()

    plain = held(step)
    with lowtide.record(plan):
        recorded = held(step)
    with lowtide.attach(models[ran], plan=plan):
        held(step)
        attached = held(step)
    assert recorded < 0.9 * plain
    assert attached == recorded


def test_a_plan_for_another_model_is_refused_at_once() -> None:
    graph = lowtide.trace(lambda: Tower(2)(rows()).mean())
    plan = lowtide.solve(graph, budget="100%")
    lowtide.attach(Tower(3), plan=plan).detach()  # made without a model: fits all
    model = Tower(2)
    plan = lowtide.solve(lowtide.trace(lambda: model(rows()).mean(), model), budget="100%")
    with pytest.raises(PlanMismatch, match=r"blocks\.2 \(Block\) is extra"):
        lowtide.attach(Tower(3), plan=plan)
    lowtide.attach(Tower(3), budget="1 GiB").detach()


def test_a_part_that_may_be_any_of_several_is_refused() -> None:
    model = Tower(3)
    plan = lowtide.solve(lowtide.trace(lambda: model(rows()).mean(), model), budget="100%")
    with pytest.raises(PlanMismatch, match=r"may be blocks\.0 or blocks\.1 or blocks\.2"):
        lowtide.attach(model.blocks[1], plan=plan)


@pytest.mark.filterwarnings("ignore")  # Dynamo's own, of hooks and of what it cannot trace
@pytest.mark.parametrize("order", ["attach, compile", "compile, attach", "model.compile, attach"])
def test_compiled_models_train_the_same(order: str) -> None:
    def train(attach: bool) -> tuple[Left, int]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Tower(1).eval()
        model.norm = nn.Identity()  # type: ignore[assignment]
        run: Any = model
        handle = None
        if attach and order == "attach, compile":
            handle = lowtide.attach(model, budget="8 GiB")
        if order == "model.compile, attach":
            model.compile(backend="eager")
        else:
            run = torch.compile(model, backend="eager")
        if attach and handle is None:
            handle = lowtide.attach(run, budget="8 GiB")
        losses = []
        for _ in range(3):
            losses.append(run(rows()).square().mean())
            losses[-1].backward()
        calls = handle.report().calls if handle is not None else 0
        if handle is not None:
            handle.detach()
        return left(losses, model), calls

    plain, _ = train(attach=False)
    ours, calls = train(attach=True)
    assert differences(plain, ours) == []
    assert calls == 3
