"""Train one GPT per contender on the same batches, in turns, and judge each against the plain one."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor, nn

from lowtide.demo.contenders import Around, Contender
from lowtide.demo.memory import StepMemory, measure_memory
from lowtide.demo.model import GPT, GPTShape
from lowtide.demo.text import VOCABULARY, batches, load_corpus

T = TypeVar("T")

UNTIMED_STEPS = 2
"""The first step warms up (and is where lowtide proves its replays), in the second bytes are counted."""


@dataclass(frozen=True)
class Settings:
    """What every contender trains: sizes, steps, sequences per batch, seed."""

    shape: GPTShape
    steps: int
    batch: int
    seed: int = 0
    learning_rate: float = 1e-3

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.batch * self.shape.length


def full_settings(steps: int) -> Settings:
    """Ten million parameters on sequences of 512."""
    shape = GPTShape(vocabulary=VOCABULARY, length=512, width=256, blocks=12, heads=4)
    return Settings(shape, steps=steps, batch=2)


def quick_settings(steps: int) -> Settings:
    """Half a million parameters on sequences of 128, to see that everything runs."""
    shape = GPTShape(vocabulary=VOCABULARY, length=128, width=96, blocks=5, heads=4)
    return Settings(shape, steps=steps, batch=4)


@dataclass(frozen=True)
class Outcome:
    """How one contender fared. Ratios are to the plain contender; bytes are those of `StepMemory`."""

    name: str
    memory: StepMemory
    peak_ratio: float
    held_saved: float
    time_ratio: float
    tokens_per_second: float
    final_loss: float
    same_losses: bool
    same_gradients: bool


@dataclass
class Run:
    """One contender's model on its way, with a row of notes per step taken."""

    contender: Contender
    model: GPT
    optimizer: torch.optim.Optimizer
    around: Around
    losses: list[float] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    wall_seconds: list[float] = field(default_factory=list)
    memory: StepMemory = StepMemory(0, 0)

    def step(self, tokens: Tensor, seed: int) -> None:
        """Take one training step on `tokens`; the second step taken is the one whose bytes are counted."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad(set_to_none=True)
        cpu, wall = time.process_time(), time.perf_counter()
        loss = self.counted(tokens) if len(self.losses) == UNTIMED_STEPS - 1 else self.plainly(tokens)
        self.optimizer.step()
        self.cpu_seconds.append(time.process_time() - cpu)
        self.wall_seconds.append(time.perf_counter() - wall)
        self.losses.append(loss)
        self.digests.append(digest_gradients(self.model))

    def forward(self, tokens: Tensor) -> Tensor:
        with self.around():
            return self.model.loss(tokens)

    def plainly(self, tokens: Tensor) -> float:
        loss = self.forward(tokens)
        loss.backward()
        return loss.item()

    def counted(self, tokens: Tensor) -> float:
        values: list[float] = []

        def backward(loss: Tensor) -> None:
            loss.backward()
            values.append(loss.item())

        self.memory = measure_memory(lambda: self.forward(tokens), backward)
        return values[0]


def digest_gradients(model: nn.Module) -> bytes:
    """Hash the bits of all gradients, so that two equal digests mean gradients equal bit for bit."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        if parameter.grad is not None:
            digest.update(bits_of(parameter.grad))
    return digest.digest()


def bits_of(tensor: Tensor) -> bytes:
    """Return the bits of a CPU tensor in its logical order; works without NumPy."""
    flat = tensor.detach().flatten()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def train(
    settings: Settings,
    contenders: Sequence[Contender],
    watch: Callable[[Run], None] = lambda run: None,
) -> list[Outcome]:
    """Train every contender and compare it with the first one, which must be the plain one.

    Contenders take turns step by step and the one to begin moves on each round, so that all of them meet the
    same weather of a shared machine. `watch` is called after each step of each contender. Whatever ends the
    training, Ctrl-C included, nothing stays attached.
    """
    if settings.steps <= UNTIMED_STEPS:
        raise ValueError(f"{settings.steps} steps leave none to time; take at least {UNTIMED_STEPS + 1}")
    with ExitStack() as attached:
        runs = [start(settings, contender, attached) for contender in contenders]
        data = batches(load_corpus(), settings.batch, settings.shape.length, settings.seed)
        for number, tokens in enumerate(islice(data, settings.steps)):
            for run in in_turn(runs, number):
                run.step(tokens, seed=settings.seed + number)
                watch(run)
    return [judge(run, runs[0], settings.tokens) for run in runs]


def start(settings: Settings, contender: Contender, attached: ExitStack) -> Run:
    """Build the same model for each contender and attach it until `attached` closes."""
    torch.manual_seed(settings.seed)
    model = GPT(settings.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    return Run(contender, model, optimizer, attached.enter_context(contender.on(list(model.blocks))))


def in_turn(items: Sequence[T], number: int) -> list[T]:
    """All items, beginning with another one each round."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def judge(run: Run, plain: Run, tokens: int) -> Outcome:
    """Compare a finished run with the plain one."""
    return Outcome(
        name=run.contender.name,
        memory=run.memory,
        peak_ratio=run.memory.peak_bytes / plain.memory.peak_bytes,
        held_saved=1 - run.memory.held_bytes / plain.memory.held_bytes,
        time_ratio=median_ratio(run.cpu_seconds[UNTIMED_STEPS:], plain.cpu_seconds[UNTIMED_STEPS:]),
        tokens_per_second=tokens / median(run.wall_seconds[UNTIMED_STEPS:]),
        final_loss=run.losses[-1],
        same_losses=run.losses == plain.losses,
        same_gradients=run.digests == plain.digests,
    )


def median_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over the rounds of each round's ratio, which a slow moment of the machine moves little."""
    return median(own / other for own, other in zip(seconds, baseline, strict=True))
