"""Run contenders on one model in turns, and judge each against the plain one of the same round."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.memory import StepMemory, measure_memory
from benchmarks.models import Workload
from lowtide.demo.contenders import Around, Contender
from lowtide.demo.training import bits_of, digest_gradients, in_turn, median_ratio

SEED = 1


@dataclass(frozen=True)
class Digest:
    """What a step left, as bits: two equal digests mean two equal steps."""

    loss: bytes
    gradients: bytes
    buffers: bytes

    def difference(self, plain: Digest) -> str:
        """Return "" if equal, else what differs from plain."""
        wrong = [name for name in ("loss", "gradients", "buffers") if getattr(self, name) != getattr(plain, name)]
        return f"{', '.join(wrong)} differ" if wrong else ""


STEPS_TO_KNOW = 5
"""The first is proven, the second to fourth are recorded, the fifth is followed: as all later ones are."""


@dataclass(frozen=True)
class Row:
    """One contender's figures: medians over rounds of CPU time to plain's. `failure` stands for them all."""

    name: str
    memory: StepMemory = StepMemory(0, 0)
    forward_ratio: float = 0.0
    backward_ratio: float = 0.0
    step_ratio: float = 0.0
    step_seconds: float = 0.0
    difference: str = ""
    failure: str = ""

    @property
    def exact(self) -> str:
        """The exactness column of every table."""
        return self.failure or self.difference or "exact"


@dataclass
class Lane:
    """A contender in the race with what it did so far; seconds are CPU seconds a step, one entry a round."""

    contender: Contender
    digests: list[Digest] = field(default_factory=list)
    memory: StepMemory = StepMemory(0, 0)
    forward_seconds: list[float] = field(default_factory=list)
    backward_seconds: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def step_seconds(self) -> list[float]:
        return [sum(pair) for pair in zip(self.forward_seconds, self.backward_seconds, strict=True)]


class OpCounter(TorchDispatchMode):
    """Counts the operations that reach the dispatcher while it is on."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_forward_ops(workload: Workload) -> int:
    """Count the ATen operations of one forward pass."""
    with OpCounter() as counter:
        workload.forward()
    return counter.count


def race(workload: Workload, contenders: Sequence[Contender], rounds: Iterable[int], steps: int) -> list[Row]:
    """Time every contender for `steps` steps in each of `rounds` rounds and return one row for each.

    The first contender is the plain one. Before the rounds each takes five checked steps and one whose bytes
    are counted, after them one more checked step: a recording that goes wrong with use shows there. A
    contender that raises gets a row that says so, and the others go on.
    """
    torch.set_num_threads(1)
    buffers = {name: buffer.clone() for name, buffer in workload.model.named_buffers()}
    lanes = [Lane(contender) for contender in contenders]
    for lane in lanes:
        attempt(lane, workload, partial(prepare, lane, workload, buffers))
    if lanes[0].failure:
        raise RuntimeError(f"{lanes[0].contender.name}, to which all else is compared, failed: {lanes[0].failure}")
    for number in rounds:
        for lane in in_turn(lanes, number):
            attempt(lane, workload, partial(time_steps, lane, workload, steps))
    for lane in lanes:
        attempt(lane, workload, partial(check, lane, workload, buffers))
    return [judge(lane, lanes[0]) for lane in lanes]


def attempt(lane: Lane, workload: Workload, action: Callable[[Around], None]) -> None:
    """Run `action` with the contender attached, and write down what it raises."""
    if lane.failure:
        return
    try:
        lane.contender = lane.contender.with_one_recording()
        with lane.contender.on(workload.blocks) as around:
            action(around)
    except Exception as error:
        lane.failure = f"{type(error).__name__}: {error}"


def prepare(lane: Lane, workload: Workload, buffers: dict[str, Tensor], around: Around) -> None:
    """Take checked steps, after which replays are proven and the step is known, and count the bytes of one more."""
    for _ in range(STEPS_TO_KNOW):
        check(lane, workload, buffers, around)
    clear(workload)
    lane.memory = measure_memory(lambda: forward(workload, around()), torch.autograd.backward)
    clear(workload)


def check(lane: Lane, workload: Workload, buffers: dict[str, Tensor], around: Around) -> None:
    """Take one step from fixed buffers and a fixed seed, and note its bits."""
    with torch.no_grad():
        for name, buffer in workload.model.named_buffers():
            buffer.copy_(buffers[name])
    clear(workload)
    loss = forward(workload, around())
    torch.autograd.backward(loss)
    left = hashlib.sha256()
    for _, buffer in workload.model.named_buffers():
        left.update(bits_of(buffer))
    lane.digests.append(Digest(bits_of(loss), digest_gradients(workload.model), left.digest()))
    clear(workload)


def time_steps(lane: Lane, workload: Workload, steps: int, around: Around) -> None:
    """Time forward and backward apart; what a step frees when it ends counts as backward."""
    gc.collect()
    ahead = back = 0.0
    for _ in range(steps):
        clear(workload)
        begin = time.process_time()
        loss = forward(workload, around())
        middle = time.process_time()
        torch.autograd.backward(loss)
        del loss
        end = time.process_time()
        ahead += middle - begin
        back += end - middle
    lane.forward_seconds.append(ahead / steps)
    lane.backward_seconds.append(back / steps)
    clear(workload)


def forward(workload: Workload, around: AbstractContextManager[Any]) -> Tensor:
    with around:
        return workload.forward()


def clear(workload: Workload) -> None:
    """Drop gradients and set the seed, as before any step."""
    workload.model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)


def judge(lane: Lane, plain: Lane) -> Row:
    """Compare what a lane did with the plain one's."""
    if lane.failure:
        return Row(lane.contender.name, failure=lane.failure)
    differences = {digest.difference(plain.digests[0]) for digest in lane.digests} - {""}
    return Row(
        name=lane.contender.name,
        memory=lane.memory,
        forward_ratio=median_ratio(lane.forward_seconds, plain.forward_seconds),
        backward_ratio=median_ratio(lane.backward_seconds, plain.backward_seconds),
        step_ratio=median_ratio(lane.step_seconds, plain.step_seconds),
        step_seconds=min(lane.step_seconds),
        difference="; ".join(sorted(differences)),
    )
