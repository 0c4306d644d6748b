"""What decides what a call computes, and is not among its arguments: aliasing, hidden writes, modes, caches."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from harness import dirty_memory, freeze
from lowtide.tape import library
from test_promptness import peak_bytes

STEPS, CHANGE = 12, 8
Step = Callable[[int, Any], list[Tensor | None]]


pytestmark = pytest.mark.usefixtures("shelves")


def followed() -> int:
    return sum(program.followed for shelf in library._local.shelves.values() for program in shelf.programs)


def take(make: Callable[[], Step], context: Any) -> list[Any]:
    torch.manual_seed(0)
    step = make()
    return [[freeze(tensor) for tensor in step(number, context)] for number in range(STEPS)]


def agree(make: Callable[[], Step], policy: Any = lowtide.policies.recompute_all) -> None:
    library._local.shelves = OrderedDict()
    plain = take(make, contextlib.nullcontext())
    recorded = take(make, lowtide.record(policy))
    assert [at for at in range(STEPS) if plain[at] != recorded[at]] == []


def backward(loss: Tensor, *leaves: Tensor) -> list[Tensor | None]:
    for leaf in leaves:
        leaf.grad = None
    garbage = dirty_memory()
    loss.backward()
    del garbage
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def writes_one_of_two(other: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Two tensors from outside, of which one is written; later it is ``other`` of the first and a parameter."""
    weight, second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def step(number: int, context: Any) -> list[Tensor | None]:
        one = torch.full((4, 4), 1.0 + number)
        two = torch.full((4, 4), 1.0) if number < CHANGE else other(one, weight)
        with context:
            loss = (one + weight).sin().sum() + (weight + 1).sin().sum()
            two.mul_(0.5)
            loss = loss + (one * 0.5 + weight).cos().sum() + (weight + second).cos().sum()
        return [*backward(loss, weight, second), weight.detach().clone()]

    return step


@pytest.mark.parametrize(
    "other",
    [
        lambda one, weight: one.detach(),
        lambda one, weight: one.data,
        lambda one, weight: one.t().t(),
        lambda one, weight: weight.data,
    ],
    ids=["detach", "data", "view", "parameter"],
)
def test_tensors_that_share_memory_later(other: Any) -> None:
    agree(functools.partial(writes_one_of_two, other))


def writes_through_numpy() -> Step:
    weight = nn.Parameter(torch.randn(4, 4))

    def step(number: int, context: Any) -> list[Tensor | None]:
        array = np.full((4, 4), 1.0 + number, dtype=np.float32)
        x = torch.from_numpy(array) if number >= CHANGE else torch.full((4, 4), 1.0 + number)
        with context:
            loss = (x + weight).sin().sum()
            array *= 2
            loss = loss + (x * 0.5 + weight).cos().sum()
        return backward(loss, weight)

    return step


def writes_after_the_program_is_left() -> Step:
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4)

    def step(number: int, context: Any) -> list[Tensor | None]:
        with context:
            h = x * weight
            view, loss = h.view(16), h.sin()  # sin has saved h
            del h
            if number >= CHANGE:
                view.data.mul_(2)
            loss = (loss * weight).exp().sum()
        del view
        return backward(loss, weight)

    return step


def nothing_for_a_tensor() -> Step:
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4)

    def step(number: int, context: Any) -> list[Tensor | None]:
        bias: Tensor | None = torch.full((4,), 0.5 + number)
        with context:
            bias = bias * 1.0 if bias is not None else None
            h = F.linear(x, weight, bias).sin()
            if number >= CHANGE:
                bias = None
            loss = F.linear(h, weight, bias).sin().exp().sum()
        return backward(loss, weight)

    return step


class SumForProduct(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.ops.aten.add.Tensor(*args) if func is torch.ops.aten.mul.Tensor else func(*args, **kwargs or {})


def mode_inside() -> Step:
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4)

    def step(number: int, context: Any) -> list[Tensor | None]:
        with context:
            with SumForProduct() if number >= CHANGE else contextlib.nullcontext():
                h = x * weight
            loss = h.sin().exp().sum()
        return backward(loss, weight)

    return step


def warm_autocast_cache() -> Step:
    first, second, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(4, 8)

    def step(number: int, context: Any) -> list[Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16):
            if number >= CHANGE:
                first(x)
                with torch.no_grad():
                    first.weight.mul_(1.5)  # autocast goes on with the old weight
            with context:
                loss = second(first(second(x).sin()).sin()).sin().sum()
            return backward(loss, first.weight, second.weight)

    return step


def fast_path(since: int) -> Step:
    student, x = nn.Linear(16, 16), torch.randn(2, 5, 16)
    teacher = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()

    def step(number: int, context: Any) -> list[Tensor | None]:
        with context:
            h = student(x).sin()
            with torch.no_grad():
                known = teacher(x) if number >= since else torch.zeros(1)
            loss = (h - known).square().mean()
        return backward(loss, student.weight)

    return step


@pytest.mark.parametrize(
    "make",
    [
        writes_through_numpy,
        writes_after_the_program_is_left,
        nothing_for_a_tensor,
        mode_inside,
        warm_autocast_cache,
        functools.partial(fast_path, CHANGE),
    ],
    ids=["numpy", "left", "none", "mode", "autocast", "fast path"],
)
def test_what_arguments_do_not_show(make: Callable[[], Step]) -> None:
    agree(make)
    agree(make, lowtide.policies.keep_matmuls)


def test_torchs_fast_paths_are_taken_in_every_step() -> None:
    agree(functools.partial(fast_path, 0))
    assert followed() == STEPS - 4


def parameters_written_between(hidden: bool) -> Step:
    weight, second, x = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4)

    def step(number: int, context: Any) -> list[Tensor | None]:
        with context:
            one = ((x + weight).sin() * second).sin().sum()
        with context:
            if hidden:
                weight.data.mul_(0.9)
            else:
                with torch.no_grad():
                    weight.mul_(0.9)
            two = ((x + weight).sin() * second).cos().sum()
        return backward(one + two, weight, second)

    return step


@pytest.mark.parametrize("hidden", [True, False], ids=["data", "no_grad"])
def test_parameters_that_another_recording_writes(hidden: bool) -> None:
    agree(functools.partial(parameters_written_between, hidden))
    assert followed() >= STEPS - 4


def numpy_parameter() -> Step:
    weight, x = nn.Parameter(torch.from_numpy(np.ones((4, 4), dtype=np.float32))), torch.randn(4, 4)

    def step(number: int, context: Any) -> list[Tensor | None]:
        with context:
            loss = (x + weight).sin().sum()
        return backward(loss, weight)

    return step


def test_parameters_mapped_from_elsewhere() -> None:
    agree(numpy_parameter)
    assert followed() == STEPS - 4


def other_thread() -> Step:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)

    def other() -> None:
        torch.ones(3, requires_grad=True).sum().backward()

    def step(number: int, context: Any) -> list[Tensor | None]:
        with context:
            h = model[0](x)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            loss = model[2](model[1](h)).sum()
        return backward(loss, *model.parameters())

    return step


def test_backward_in_another_thread_ends_nothing() -> None:
    agree(other_thread)
    assert followed() == STEPS - 4


def test_a_branch_that_dies_is_let_go() -> None:
    layer, inputs = nn.Linear(256, 256), torch.randn(1024, 256)
    recording = lowtide.record(lowtide.policies.keep_matmuls)

    def step() -> None:
        with recording:
            best = None
            for _ in range(8):
                loss = layer(inputs).sin().exp().square().sum()
                best = loss if best is None else best
                del loss
        best.backward()

    peaks = [peak_bytes(step) for _ in range(8)]
    assert followed() == 4
    assert max(peaks[4:]) <= peaks[1]
