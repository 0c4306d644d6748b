"""Whatever people do around a model, with something attached it does the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import lowtide
from lowtide import Plan
from lowtide.interception import interception
from situations import differences
from training_loops import SITUATIONS, TIGHT

ATTACHED: dict[str, dict[str, Any]] = {
    "a budget": {"budget": "75%"},
    "a lot of room": {"budget": "8 GiB"},
    "a policy": {"policy": lowtide.policies.recompute_all},
}


def nothing(models: Any) -> AbstractContextManager[None]:
    return nullcontext()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = torch.autograd._engine_run_backward
    yield
    assert not interception.attached()
    assert torch.autograd._engine_run_backward is before
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("attached", ATTACHED.values(), ids=ATTACHED)
@pytest.mark.parametrize("name", SITUATIONS)
def test_nothing_changes(name: str, attached: dict[str, Any]) -> None:
    run, handles = SITUATIONS[name], []
    if attached.get("budget") == "75%":
        attached = {"budget": TIGHT.get(name, "75%")}

    @contextmanager
    def put(models: Any) -> Iterator[None]:
        with lowtide.attach(models, **attached) as handle:
            handles.append(handle)
            yield

    def from_seed(put: Callable[..., AbstractContextManager[Any]]) -> Any:
        torch.manual_seed(0)
        return run(put)

    assert differences(from_seed(nothing), from_seed(put)) == []
    report = handles[0].report()
    assert report.planned_calls > 0
    assert str(report)
    if str(attached.get("budget")) in ("75%", "90%"):
        assert any(plan.recompute for plan in handles[0].source.recordings if isinstance(plan, Plan))
