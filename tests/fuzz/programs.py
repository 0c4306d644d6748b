"""A program as data: what exists before the step, what the step does, and how it is driven."""

from __future__ import annotations

import dataclasses
import textwrap
import zlib
from collections.abc import Sequence
from typing import Literal

from .rules import RULES, Constant

RECORD = "record()"
"""The scope in which lowtide records; in a program's text it is a function the judge hands in."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One use of a rule: `operands` and `results` number variables, `scopes` are the `with` around it."""

    rule: str
    operands: tuple[int, ...] = ()
    constants: tuple[Constant, ...] = ()
    results: tuple[int, ...] = ()
    scopes: tuple[str, ...] = ()

    def text(self) -> str:
        """Write the instruction as Python, without its scopes."""
        names = dict(zip("abcd", (f"v{i}" for i in self.operands), strict=False))
        names |= dict(zip("rst", (f"v{i}" for i in self.results), strict=False))
        return RULES[self.rule].template.format(**names, **dict(zip("xyzuw", self.constants, strict=False)))

    @property
    def recorded(self) -> bool:
        """Whether lowtide sees the instruction: a recording that is entered without grad records nothing."""
        return recording(self.scopes)

    @property
    def writes_hidden(self) -> bool:
        """Whether the instruction writes past version counters, or makes a name through which others do."""
        return RULES[self.rule].unseen


def recording(scopes: tuple[str, ...]) -> bool:
    """Say whether a recording is on within these scopes."""
    grad = True
    for scope in scopes:
        grad = (grad or scope == "torch.enable_grad()") and scope != "torch.no_grad()"
        if scope == RECORD and grad:
            return True
    return False


def hides_writes(body: Sequence[Instruction]) -> bool:
    """Say whether something may be written that neither a version counter nor a recording shows."""
    hidden = False
    for instruction in body:
        hidden = hidden or instruction.writes_hidden
        if hidden and RULES[instruction.rule].risky and not instruction.recorded:
            return True
        if instruction.rule == "batch_norm" and not instruction.recorded:
            return True  # its statistics have no versions
    return False


@dataclasses.dataclass(frozen=True)
class Conduct:
    """How a judge drives a program's step.

    `between` is what happens to the leaves between two steps; `interleaved` runs both forwards before both
    backwards; `backwards` counts how often the backward pass of one loss runs; with `inside` the step runs it
    itself, in the scopes of its loss.
    """

    seed: int = 0
    steps: int = 1
    between: Literal["nothing", "descend", "clear", "evaluate"] = "nothing"
    interleaved: bool = False
    backwards: int = 1
    inside: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A random training step. `terms` go into the loss, `held` stay alive after the step."""

    sources: tuple[Instruction, ...]
    body: tuple[Instruction, ...]
    terms: tuple[int, ...]
    held: tuple[int, ...] = ()
    loss_scopes: tuple[str, ...] = ()
    conduct: Conduct = Conduct()

    def source(self) -> str:
        """Write the program as two Python functions, `setup()` and `step(s, log, gen, turn, record)`."""
        setup = [i.text() for i in self.sources]
        names = [f"v{i}" for instruction in self.sources for i in instruction.results]
        table = "{" + ", ".join(f"{n!r}: {n}" for n in names) + "}"
        lines = ["def setup():", *indent(setup), f"    return {table}, [], torch.Generator().manual_seed(7)"]
        held = "[" + ", ".join(f"v{i}" for i in self.held) + "]"
        unpack = [f"{', '.join(names)}, = s.values()"]
        body = blocks([(i.scopes, i.text()) for i in self.body] + self._ending())
        lines += ["", "", "def step(s, log, gen, turn, record):", *indent([*unpack, "total = 0.0", *body])]
        return "\n".join([*lines, f"    return loss, {held}", ""])

    def _ending(self) -> list[tuple[tuple[str, ...], str]]:
        terms = ", ".join(f"v{i}" for i in self.terms)
        loss = [(self.loss_scopes, f"loss = total + weigh({terms})")]
        backward = [(self.loss_scopes, f"dirty_memory()\nrun_backward(loss, {self.conduct.backwards})")]
        return loss + backward if self.conduct.inside else loss


@dataclasses.dataclass(frozen=True)
class Decisions:
    """A policy: keep a share of all ops, drawn from a hash of op name and running count, save for `flips`."""

    seed: int = 0
    keep_share: float = 0.0
    flips: frozenset[tuple[str, int]] = frozenset()

    def keeps(self, name: str, count: int) -> bool:
        """Say whether the `count`-th op of this name is kept."""
        drawn = zlib.crc32(f"{self.seed}:{name}:{count}".encode()) / 2**32
        return (drawn < self.keep_share) != ((name, count) in self.flips)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the judge asks of the recorder."""

    decisions: Decisions = Decisions()
    check: Literal["new", "never", "always"] = "never"
    check_every: int = 0
    one_recording: bool = False
    strict: bool = False


def indent(lines: list[str]) -> list[str]:
    """Move lines, which may hold several lines each, one level in."""
    return [textwrap.indent(line, "    ") for line in lines]


def blocks(items: list[tuple[tuple[str, ...], str]]) -> list[str]:
    """Write lines under their scopes, neighbours that share outer scopes under one `with`."""
    lines: list[str] = []
    while items:
        scopes, text = items[0]
        if not scopes:
            lines.append(text)
            items = items[1:]
            continue
        run = next((i for i, (s, _) in enumerate(items) if s[:1] != scopes[:1]), len(items))
        inner = [(s[1:], t) for s, t in items[:run]]
        lines += [f"with {scopes[0]}:", *indent(blocks(inner))]
        items = items[run:]
    return lines


USAGE = "Run it from the repository's root with PYTHONPATH=. set; the exit code is 1 if it fails."
HEADER = """\
from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from tests.fuzz.judging import convict
from tests.fuzz.programs import Conduct, Decisions, Setting
from tests.fuzz.recorders import lowtide_recorder
from tests.fuzz.support import *

"""


def script(program: Program, setting: Setting, title: str) -> str:
    """Write a program as a file that runs from the repository's root and tells whether it still fails."""
    call = f"convict(setup, step, {program.conduct!r}, {setting!r}, lowtide_recorder)"
    ending = f'if __name__ == "__main__":\n    {call}\n'
    return f'"""{title}\n\n{USAGE}\n"""\n\n{HEADER}\n{program.source()}\n\n{ending}'
