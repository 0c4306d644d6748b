"""Replay of followed steps: what it leaves as it was, what it lets go of, and what it refuses."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from harness import dirty_memory
from lowtide.tape import library, numbered
from lowtide.tape.program import Weight

KNOWN = 6
"""Steps after which a step is followed."""


pytestmark = pytest.mark.usefixtures("shelves")


def known(forward: Callable[[], Tensor], recording: Any) -> Callable[[], Tensor]:
    """``forward`` under a recording that follows it."""

    def taken() -> Tensor:
        with recording:
            loss = forward()
        return loss

    for _ in range(KNOWN):
        torch.autograd.backward(taken())
    (shelf,) = library._local.shelves.values()
    assert [program.followed for program in shelf.programs] == [KNOWN - 4]
    return taken


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = F.dropout(self.inner(self.norm(rows.sin())).exp(), 0.5)
        return self.out(hidden.tanh()).square().mean()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def plainly(model: nn.Module, rows: Tensor, change: Callable[[], None] = lambda: None) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(rows)
    change()
    torch.autograd.backward(loss)
    return gradients(model)


def followed(
    model: nn.Module,
    rows: Tensor,
    change: Callable[[], None] = lambda: None,
    policy: Any = lowtide.policies.recompute_all,
) -> list[Tensor | None]:
    step = known(lambda: model(rows), lowtide.record(policy))
    model.zero_grad()
    torch.manual_seed(3)
    loss = step()
    change()
    garbage = dirty_memory()
    torch.autograd.backward(loss)
    del garbage
    return gradients(model)


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("steps", [1, KNOWN + 1], ids=["recorded", "followed"])
def test_redeeming_leaves_the_grad_mode_and_the_random_state(steps: int, enabled: bool) -> None:
    """What was computed with grad is replayed where grad is off."""
    rows, recording = torch.randn(4, 4, requires_grad=True), lowtide.record(lowtide.policies.recompute_all)
    for _ in range(steps):
        with recording:
            result: Any = F.dropout(rows, 0.5).sin().exp()
    state = torch.get_rng_state()
    with torch.set_grad_enabled(enabled):
        assert result.grad_fn.next_functions[0][0]._saved_self is not None
        assert torch.is_grad_enabled() is enabled
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_that_were_given_other_memory_are_read_where_they_were() -> None:
    """As plain torch does with what it computed from them: a swap of ``.data`` changes no activation."""
    torch.manual_seed(0)
    model, rows = Normed(), torch.randn(4, 8)
    kept = model.norm.bias.data

    def swap() -> None:
        model.norm.bias.data = torch.full((8,), 7.0)

    expected = plainly(model, rows, swap)
    model.norm.bias.data = kept
    found = followed(model, rows, swap)
    assert same(expected, found)


def test_weights_that_were_written_are_refused() -> None:
    model, rows = Normed(), torch.randn(4, 8)

    def write() -> None:
        with torch.no_grad():
            model.norm.bias.add_(1)

    with pytest.raises(lowtide.errors.RootChanged, match="modified in place between forward and backward"):
        followed(model, rows, write)


def test_weights_that_numpy_was_given_are_refused() -> None:
    model, rows = Normed(), torch.randn(4, 8)
    with pytest.raises(lowtide.errors.RootChanged, match="given to numpy"):
        followed(model, rows, lambda: model.norm.bias.detach().numpy().fill(3))


def test_weights_without_memory_are_refused() -> None:
    """As sharded parameters are after use."""
    model, rows = Normed(), torch.randn(4, 8)
    with pytest.raises(lowtide.errors.RootChanged, match="memory was given"):
        followed(model, rows, lambda: model.norm.bias.untyped_storage().resize_(0))


def test_frozen_weights_outlive_their_model_until_backward() -> None:
    rows = torch.randn(4, 8, requires_grad=True)
    model = Normed().requires_grad_(False)
    torch.manual_seed(3)
    torch.autograd.backward(model(rows))
    expected, rows.grad = rows.grad, None
    step = known(functools.partial(model, rows), lowtide.record(lowtide.policies.recompute_all))
    rows.grad = None
    torch.manual_seed(3)
    loss = step()
    alive = weakref.ref(model.norm.weight)
    del step
    del model
    gc.collect()
    torch.autograd.backward(loss)
    assert torch.equal(rows.grad, expected)  # type: ignore[arg-type]
    del loss
    gc.collect()
    assert alive() is None


def test_nothing_is_left_when_backward_is_over() -> None:
    """Each part goes as soon as it is not needed, and all of it without the garbage collector."""
    model, rows = Normed(), torch.randn(4, 8)
    step = known(lambda: model(rows), lowtide.record(lowtide.policies.recompute_all))
    replays: list[Any] = []
    prepare = numbered.NumberedReplay.__init__

    def noted(self: Any, *args: Any) -> None:
        prepare(self, *args)
        replays.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbered.NumberedReplay, "__init__", noted)
        gc.disable()
        try:
            loss = step()
            torch.autograd.backward(loss)
            (replay,) = replays
            assert not any(replay._uses)
            assert all(value is None for value in replay._values)
            assert not replay._roots
            assert not replay._states
        finally:
            gc.enable()


def test_branches_that_nobody_wants_are_let_go_of() -> None:
    """A graph that dies before backward takes with it what only it needed; the rest is made as it was."""
    model, rows = Normed(), torch.randn(4, 8)
    other = nn.Linear(8, 8)

    def forward() -> tuple[Tensor, Tensor]:
        return model(rows), other(rows.cos()).exp().tanh().sum()

    def both() -> Tensor:
        one, two = forward()
        return one + two

    known(both, recording := lowtide.record(lowtide.policies.recompute_all))
    model.zero_grad()
    other.zero_grad()
    torch.manual_seed(3)
    with recording:
        one, two = forward()
        total = one + two
    del two, total
    torch.autograd.backward(one)
    found = gradients(model)
    assert other.weight.grad is None
    assert same(found, plainly(model, rows))


def test_an_interrupted_replay_can_be_repeated_or_says_that_it_cannot() -> None:
    model, rows = Normed(), torch.randn(4, 8)
    expected = plainly(model, rows)
    step = known(lambda: model(rows), lowtide.record(lowtide.policies.recompute_all))
    calls = 0

    def failing(original: Any, at: int) -> Any:
        def run(self: Any, nth: int) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise MemoryError("no memory")
            original(self, nth)

        return run

    original = numbered.NumberedReplay._run
    for at in range(1, 12):
        model.zero_grad()
        torch.manual_seed(3)
        loss = step()
        state, calls = torch.get_rng_state(), 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(numbered.NumberedReplay, "_run", failing(original, at))
            with contextlib.suppress(MemoryError):
                torch.autograd.backward(loss, retain_graph=True)
                break
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled()
        model.zero_grad()
        torch.autograd.backward(loss)
        assert same(gradients(model), expected)
    assert calls < at


def test_a_weight_tells_others_that_it_holds_memory() -> None:
    parameter = nn.Parameter(torch.ones(3))
    weight = Weight(parameter, (torch.Size([3]), (1,), 0, torch.float32, 0))
    recording = lowtide.record(lowtide.policies.recompute_all)
    with recording, torch.no_grad():
        parameter.mul_(2)
    assert torch.equal(weight.contents(), torch.ones(3))
