"""What is known of the steps that were taken, and when a step may be followed at all."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from lowtide.tape.compiling import program_of
from lowtide.tape.program import Program
from lowtide.tape.transcript import EXTERNAL, PARAMETER, Call, Flaw, name_of, same_call, transformed
from lowtide.tape.transforms import hooks_allowed

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lowtide.tape.scribing import Scribe, ScribingRecorder

_ATTEMPTS = 16
"""Steps recorded in a row after which steps that never repeat themselves are given up."""
PROGRAMS = 6
"""Programs under one policy at one place: one for each model and combination of shapes."""
_MISSES = 3
"""Times a program is left halfway, after which it is given up unless it was followed ten times as often."""


class Shelf:
    """What is known of the steps taken under one policy at one place of the user's code."""

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.recorded = 0  # steps recorded since a program was found
        self.surveys: set[int] = set()  # operations of steps that were recorded without a transcript
        self.unsurveyed = False  # the last transcript was of a step whose operations no survey has shown
        self.unwritten = False  # the last step left a program before it was known which model it is
        self.drafts: dict[Any, list[Call]] = {}  # transcripts by how they begin
        self.flaws: dict[Any, str] = {}  # why steps that begin so are not followed

    @property
    def hopeless(self) -> bool:
        """Whether to record every step and be done with it."""
        return not self.programs and self.recorded > _ATTEMPTS

    @property
    def learns(self) -> bool:
        """Whether another program may be found."""
        return len(self.programs) < PROGRAMS and self.recorded <= _ATTEMPTS

    @property
    def records(self) -> bool:
        """Whether the next step is to be recorded from its beginning, whatever it is."""
        return not self.programs or (self.learns and (self.unsurveyed or self.unwritten))

    @property
    def writes(self) -> bool:
        """Whether a step that is recorded from its beginning is to have a transcript.

        In turn two steps without and two with: a transcript changes how some of torch's own functions compute, which
        shows in the operations.
        """
        if self.programs:
            return self.learns and not self.unsurveyed
        return self.recorded % 4 >= 2

    def learn(self, recorder: ScribingRecorder, scribe: Scribe | None, notes: dict[Any, int]) -> Program | None:
        """Take in a recorded step; with an equal one before it becomes a program."""
        self.recorded += 1
        operations = hash(tuple(recorder.operations))
        if scribe is None:
            self.surveys.add(operations)
            self.unsurveyed = False
            return None
        self.unsurveyed, self.unwritten = operations not in self.surveys, False
        if self.unsurveyed or not scribe.calls:
            return None
        key = beginning(scribe.calls)
        if key in self.flaws or len(self.programs) >= PROGRAMS:
            return None
        calls, self.drafts[key] = self.drafts.get(key), scribe.calls
        if calls is None or len(calls) != len(scribe.calls) or not all(map(same_call, calls, scribe.calls)):
            return None
        del self.drafts[key]
        try:
            self.programs.append(program_of(scribe, recorder, notes))
        except Flaw as flaw:
            self.flaws[key] = str(flaw)
            return None
        self.recorded = 0
        return self.programs[-1]

    def flaw_of(self, calls: list[Call]) -> str | None:
        """Why steps that begin with these calls are not followed, if that is known."""
        return self.flaws.get(beginning(calls))

    def give_up(self, program: Program, why: str) -> None:
        """Never follow steps that begin like ``program`` again."""
        if program in self.programs:
            self.programs.remove(program)
            self.flaws[beginning(program.calls)] = why

    def miss(self, program: Program) -> None:
        """A step left a program halfway."""
        program.missed += 1
        if program.missed >= _MISSES and program.followed < 10 * program.missed:
            self.give_up(program, "the step changes from time to time")


def beginning(calls: list[Call]) -> Any:
    """What tells steps apart: functions, parameters and shapes of the calls up to the first that reads a parameter."""
    found: list[Any] = []
    for call in calls:
        leaves = [(kind, one, two) for kind, one, two in call.leaves() if kind in (PARAMETER, EXTERNAL)]
        found += [name_of(call.func), *(id(one()) if kind == PARAMETER else two[2][0] for kind, one, two in leaves)]
        if any(kind == PARAMETER for kind, _, _ in leaves):
            break
    return tuple(found)


_local = threading.local()
_SHELVES = 32


def shelf_of(*key: Hashable) -> Shelf:
    """What this thread knows of the steps taken under a policy; the least recently used are forgotten."""
    shelves: OrderedDict[Any, Shelf] | None = getattr(_local, "shelves", None)
    if shelves is None:
        shelves = _local.shelves = OrderedDict()
    shelf = shelves.get(key)
    if shelf is None:
        shelf = shelves[key] = Shelf()
        if len(shelves) > _SHELVES:
            shelves.popitem(last=False)
    shelves.move_to_end(key)
    return shelf


def may_take_over(pack: Any) -> bool:
    """Whether recording may begin while the follower with this pack hook is in force.

    Not inside of a transform, where no hooks may be set; and not inside of modes and hooks that the step has set since:
    they would take off the recorder's in place of their own.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    inside = transformed() is not None or torch._C._len_torch_dispatch_stack() > 0
    return not inside and hooks_allowed() and top is not None and bool(top[0] == pack)


def may_follow() -> bool:
    """Whether nothing is in force on this thread that sees the difference between following and recording."""
    return (
        torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and transformed() is None
        and not _compiled()
    )


def _compiled() -> bool:
    """Whether anything was compiled in this process: compiled code looks at the modes in force."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters)
