"""Out of memory: the error says what filled it and what would fit, and fit_retry runs the same step again."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import AttachError, RecomputeWarning
from lowtide.tracing.counting import LiveBytes
from situations import Left, Tower, differences, left, rows


class Limit(LiveBytes):
    """Memory that ends: operations inside fail, as an allocator does, once they hold more than ``limit`` bytes."""

    def __init__(self, limit: int, *, error: Callable[[str], Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.limit = limit
        self.error = error

    def see(self, tensor: Tensor) -> None:
        super().see(tensor)
        if self.live > self.limit:
            raise self.error(f"[enforce fail] DefaultCPUAllocator: can't allocate memory: {tensor.nbytes} bytes")


class Drawn(nn.Module):
    """Draws from everything, has a buffer and a counter, and trains with what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.tower(x + torch.randn_like(x)).square().mean()


def train(limits: list[int | None], *, optimizer_inside: bool = True) -> tuple[Left, Any]:
    """Train a step a limit; None stands for no limit and nothing attached."""
    torch.manual_seed(0)
    model = Drawn()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[Tensor] = []
    attached = any(limit is not None for limit in limits)
    handle = lowtide.attach(model, budget="100%") if attached else None
    memory = [0]

    def step(data: Tensor) -> Tensor:
        with Limit(memory[0]) if memory[0] else nullcontext():
            loss = model(data)
            loss.backward()
        if optimizer_inside:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    run = lowtide.fit_retry(step, handle, tries=20, factor=0.7) if handle is not None else step
    for limit in limits:
        memory[0] = limit or 0
        losses.append(run(rows(32)))
    if handle is not None:
        handle.detach()
    return left(losses, model, calls=model.calls), handle


def peak(budget: str) -> int:
    """What a step of ``train`` makes at most, above its weights."""
    torch.manual_seed(0)
    model, data = Drawn(), rows(32)
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), data))
    with lowtide.attach(model, budget=budget) as handle:
        for _ in range(3):
            model(data).backward()
            model.zero_grad()
        found = handle.report().measured_peak_bytes
    assert found is not None
    return found - resident


def test_a_step_that_runs_out_of_memory_is_run_again_under_a_tighter_plan() -> None:
    plain, _ = train([None] * 5)
    limit = int(0.8 * peak("100%"))
    with pytest.warns(RecomputeWarning, match="run again from the same state"):
        ours, handle = train([0, 0, limit, limit, limit])
    assert differences(plain, ours) == []
    report = handle.report()
    assert any("ran out of memory" in text for text in report.fallbacks)
    assert report.plan.recompute


def test_gradients_that_were_there_are_put_back() -> None:
    plain, _ = train([None] * 4, optimizer_inside=False)
    limit = int(0.8 * peak("100%"))
    with pytest.warns(RecomputeWarning, match="run again"):
        ours, _ = train([0, 0, limit, limit], optimizer_inside=False)
    assert differences(plain, ours) == []


def test_without_a_tighter_plan_the_original_error_comes_with_a_note() -> None:
    with (
        pytest.warns(RecomputeWarning, match="run again"),
        pytest.raises(torch.OutOfMemoryError, match="DefaultCPUAllocator") as failed,
    ):
        train([0, 0, 1000])
    notes = "\n".join(failed.value.__notes__)
    assert "there is no plan that needs less" in notes
    assert "smallest budget that a plan fits" in notes


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_error_says_what_filled_the_memory_and_what_would_fit(where: str) -> None:
    model, data = Drawn(), rows(32)
    with lowtide.attach(model, budget="90%") as handle:
        for _ in range(2):
            model(data).backward()
        with pytest.raises(RuntimeError) as failed:  # noqa: PT012
            with Limit(2_000, error=RuntimeError) if where == "forward" else nullcontext():
                loss = model(data)
            with Limit(2_000, error=RuntimeError):
                loss.backward()
        lowest = handle.smallest_budget
    (note,) = failed.value.__notes__
    assert "tower.blocks.0-3" in note
    assert f"({lowest} bytes)" in note
    assert "the plan in force expects a peak" in note


def test_the_first_step_says_what_it_held() -> None:
    model = Drawn()
    with lowtide.attach(model, budget="90%"), Limit(500_000), pytest.raises(torch.OutOfMemoryError) as failed:
        model(rows(256)).backward()
    (note,) = failed.value.__notes__
    assert "nothing is planned yet" in note


def test_other_errors_are_left_alone_and_not_retried() -> None:
    calls = []
    model = Drawn()

    def step() -> None:
        calls.append(model(rows()))
        raise ValueError("not about memory")

    with lowtide.attach(model, budget="1 GiB") as handle, pytest.raises(ValueError, match="not about") as failed:
        lowtide.fit_retry(step, handle)()
    assert len(calls) == 1
    assert not hasattr(failed.value, "__notes__")


def test_a_step_that_has_written_weights_is_not_run_again() -> None:
    model = Drawn()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(fail: bool) -> None:
        model(rows()).backward()
        optimizer.step()
        if fail:
            raise torch.OutOfMemoryError("in the second half of the optimizer")

    with lowtide.attach(model, budget="1 GiB") as handle:
        run = lowtide.fit_retry(step, handle)
        for _ in range(3):
            run(fail=False)
        with pytest.raises(torch.OutOfMemoryError) as failed:
            run(fail=True)
    assert "weights were written" in failed.value.__notes__[0]


def test_a_generator_of_the_step_is_put_back() -> None:
    def losses(limit: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, generator, data = Tower(), torch.Generator().manual_seed(1), rows()
        found = []

        def step(limit: int) -> None:
            noise = torch.rand(data.shape, generator=generator)
            with Limit(limit) if limit else nullcontext():
                loss = model(data + noise).square().mean()
                loss.backward()
            model.zero_grad()
            found.append(loss.detach())

        if limit is None:
            for _ in range(3):
                step(0)
            return found
        with lowtide.attach(model, budget="100%") as handle:
            run = lowtide.fit_retry(step, handle, tries=20, factor=0.7, generators=[generator])
            for one in (0, 0, limit):
                run(one)
        return found

    plain = losses(None)
    with pytest.warns(RecomputeWarning, match="run again"):
        ours = losses(290_000)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_only_a_budget_can_be_tightened() -> None:
    model = Drawn()
    by_hand = lowtide.policies.recompute_all
    with lowtide.attach(model, policy=by_hand) as handle, pytest.raises(AttachError, match="budget"):
        lowtide.fit_retry(lambda: None, handle)
    with lowtide.attach(model, budget="1 GiB") as handle, pytest.raises(ValueError, match="at least one try"):
        lowtide.fit_retry(lambda: None, handle, tries=0)


REAL = """
import resource, torch, lowtide
from situations import Tower, WIDTH

torch.set_num_threads(1)
model = Tower(3)
with lowtide.attach(model, budget="70%") as handle:
    for _ in range(2):
        model(torch.randn(64, WIDTH)).sum().backward()
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**28, -1))
    with torch.no_grad():
        data = torch.randn(2**18, WIDTH)
    model(data).sum().backward()
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="needs a limit on address space")
def test_the_allocators_own_error_carries_the_note() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, cwd="tests", check=False)
    assert done.returncode == 1
    assert "DefaultCPUAllocator: can't allocate memory" in done.stderr
    assert "lowtide: memory ran out in a training step" in done.stderr
