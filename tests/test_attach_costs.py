"""What attach costs: nothing when off, little time to plan, and the same memory after a thousand steps."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.demo.model import GPT, GPTShape
from situations import Tower, rows

PLANNING_SECONDS = 3.0


def python_calls(run: Callable[[], Any]) -> int:
    """How many Python functions ``run`` calls."""
    count = 0

    def seen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("blocks", [1, 8])
def test_evaluation_costs_a_few_function_calls_whatever_the_model(blocks: int) -> None:
    model, data = Tower(blocks).eval(), rows()

    def evaluate() -> int:
        with torch.no_grad():
            model(data)
            return python_calls(lambda: model(data))

    plain = evaluate()
    with lowtide.attach(model, budget="80%") as handle:
        assert evaluate() <= plain + 8
        assert handle.report().calls == 0
    assert evaluate() == plain


def test_detached_nothing_is_left_to_cost_anything() -> None:
    model, data = Tower(), rows()
    plain = python_calls(lambda: model(data))
    hooks = [dict(vars(nn.modules.module)[name]) for name in dir(nn.modules.module) if name.startswith("_global_")
             and isinstance(vars(nn.modules.module)[name], dict)]  # fmt: skip
    with lowtide.attach(model, budget="80%"):
        for _ in range(3):
            model(data).sum().backward()
    assert "__call__" not in vars(Tower)
    assert python_calls(lambda: model(data)) == plain
    assert not any(hooks)


def test_a_model_of_thirty_two_blocks_is_planned_within_three_seconds() -> None:
    torch.manual_seed(0)
    model = GPT(GPTShape(256, 64, 128, 32, heads=4))
    tokens = torch.randint(256, (16, 65))
    seconds = []
    with lowtide.attach(model, budget="70%") as handle:
        for _ in range(4):
            start = time.process_time()
            loss = model.loss(tokens)
            seconds.append(time.process_time() - start)
            loss.backward()
            model.zero_grad()
        assert handle.plan is not None
    print(f"second forward {seconds[1]:.2f} s, later ones {seconds[3]:.2f} s")
    assert seconds[1] - seconds[3] < PLANNING_SECONDS


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8))


def test_a_thousand_steps_leave_what_a_hundred_leave() -> None:
    models = [small(), small()]
    sizes = (8, 6, 3)

    def steps(count: int) -> tuple[int, int]:
        for number in range(count):
            data = torch.randn(sizes[number % 3], 8)
            loss = (models[0](data) * models[1](data)).mean()
            if number % 5:  # some losses are never used
                loss.backward()
            for model in models:
                model.zero_grad()
        del loss, data
        gc.collect()
        return len(gc.get_objects()), sys.getallocatedblocks()

    with lowtide.attach(models, budget="100%") as handle:
        steps(100)
        early = steps(15)
        late = steps(900)
        assert handle.report().planned_calls > 1000
    assert late[0] <= early[0] + 50
    assert late[1] <= early[1] + 500
