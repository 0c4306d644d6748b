"""Judge a program: run it plainly, plainly again and under a recorder, and compare what was seen.

Where plain PyTorch runs and repeats itself, the recorder must give the same bits. Where plain PyTorch refuses
because a saved tensor was overwritten, the recorder must refuse too, or give what copies would have given.
"""

from __future__ import annotations

import dataclasses
import linecache
import sys
import traceback
import warnings
from collections import Counter
from typing import Literal

import torch
from torch.utils._python_dispatch import _pop_mode

from .observing import Observation, Setup, Step, compiled, differences, far_apart, finite, observe
from .programs import Conduct, Program, Setting, hides_writes
from .recorders import MakeRecorder, Recorder, bystander_recorder, copying_recorder, plain_recorder
from .rules import RULES

MODE_DEPENDENT = {
    "eigvalsh": "without grad, computes eigenvectors too, by another algorithm, if any dispatch mode is on",
    'torch.autocast("cpu", dtype=torch.bfloat16)': "casts what a kernel calls only where no dispatch mode is on",
    "prod": "its derivative takes another formula",
    "cumprod": "its derivative takes another formula",
    "torch.inference_mode()": "its views and writes no longer tell the tensors they share memory with",
}
"""What gives other results in torch 2.13 as soon as any dispatch mode is on: rules and scopes."""

OVERWRITTEN = "modified by an inplace operation"
MODIFIED = "raises RootChanged"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a program fared: `signature` is a short name for the failure, `detail` the whole story."""

    outcome: Literal["agrees", "refused", "torch", "discarded", "fails"]
    signature: str = ""
    detail: str = ""
    dropped: tuple[tuple[str, int], ...] = ()
    asked: Counter[str] = dataclasses.field(default_factory=Counter)
    kept: Counter[str] = dataclasses.field(default_factory=Counter)
    warned: Counter[str] = dataclasses.field(default_factory=Counter)
    finite: bool = True
    plainly_refused: bool = False


def attached() -> tuple[int, object]:
    """Say what is attached to this thread: dispatch modes and saved-tensor hooks."""
    return torch._C._len_torch_dispatch_stack(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def release(before: tuple[int, object]) -> None:
    """Take away what a run left attached, so that the next run starts clean."""
    while torch._C._len_torch_dispatch_stack() > before[0]:
        _pop_mode()
    while torch._C._autograd._top_saved_tensors_default_hooks(True) != before[1]:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def quietly(setup: Setup, step: Step, conduct: Conduct, record: Recorder) -> tuple[Observation, Counter[str]]:
    """Observe with warnings collected; return them by category and opening words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = observe(setup, step, conduct, record)
    return seen, Counter(f"{w.category.__name__}: {str(w.message)[:100]}" for w in caught)


def discarded(why: str) -> Verdict:
    return Verdict("discarded", why)


def judge_functions(
    setup: Setup,
    step: Step,
    conduct: Conduct,
    setting: Setting,
    make: MakeRecorder,
    truth: MakeRecorder = plain_recorder,
) -> Verdict:
    """Judge a program given as its two functions; `truth` says what is right."""
    try:
        try:
            expected, usual = quietly(setup, step, conduct, truth(setting))
        except RuntimeError as error:
            if OVERWRITTEN not in str(error):
                raise
            truth = copying_recorder
            expected, usual = quietly(setup, step, conduct, truth(setting))
        again, _ = quietly(setup, step, conduct, truth(setting))
    except Exception as error:
        return discarded(f"plain raises {type(error).__name__}: {str(error)[:60]}")
    if expected != again:
        return discarded(f"plain differs from itself: {differences(expected, again)[0]}")
    record = make(setting)
    signature, detail, warned = confront(setup, step, conduct, record, expected, truth is copying_recorder)
    verdict = Verdict(
        "fails" if signature else "agrees",
        signature,
        detail,
        dropped=tuple(record.policy.dropped),
        asked=record.policy.asked,
        finite=finite(expected),
        plainly_refused=truth is copying_recorder,
    )
    return verdict if signature else dataclasses.replace(verdict, kept=record.kept(), warned=warned - usual)


def confront(
    setup: Setup, step: Step, conduct: Conduct, record: Recorder, expected: Observation, may_refuse: bool
) -> tuple[str, str, Counter[str]]:
    """Run the program under the recorder; return what is wrong, in short and in full, and the warnings."""
    before = attached()
    signature, detail, warned = "", "", Counter[str]()
    try:
        got, warned = quietly(setup, step, conduct, record)
        problems = far_apart(expected, got) if may_refuse else differences(expected, got)
        if problems:
            signature, detail = f"differs: {kinds(problems)}", "\n".join(problems)
            signature = f"accepts what plain refuses and {signature}" if may_refuse else signature
    except Exception as error:
        if not (may_refuse and isinstance(error, RuntimeError) and OVERWRITTEN in str(error)):
            signature, detail = f"raises {type(error).__name__}: {first_words(error)}", traceback.format_exc()
    if attached() != before:
        signature, detail = signature or "leaves something attached", f"{detail}\nleft attached: {attached()}"
        release(before)
    return signature, detail, warned


def first_words(error: Exception) -> str:
    """Shorten an error to what stays the same from program to program: its opening words and its place."""
    text = "".join("#" if c.isdigit() else c for c in str(error).split("\n")[0])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "lowtide" in f.filename]
    return text[:70] + (f" (in {frames[-1].name})" if frames else "")


def kinds(problems: list[str]) -> str:
    """Say what kinds of things differ."""
    labels = {
        "grad" if ".grad:" in p or p.split(":")[0].endswith(".grad") else p.split(":")[0].split(" ")[0]
        for p in problems
    }
    named = {"value" if label.startswith("v") else label for label in labels}
    return ", ".join(sorted(named))


def judge(program: Program, setting: Setting, make: MakeRecorder) -> Verdict:
    """Judge a program: it agrees, or it fails, or plain PyTorch does not run it or does not repeat it.

    A recorder may refuse a program that, out of its sight, overwrote what a recomputation would read. Where
    results depend on whether any dispatch mode is on, they must be those of a mode that does nothing.
    """
    if hides_writes(program.body):
        return discarded("writes where neither a version counter nor a recording shows it")
    try:
        setup, step = compiled(program.source())
    except SyntaxError as error:
        return discarded(f"no Python: {error}")
    verdict = judge_functions(setup, step, program.conduct, setting, make)
    linecache.cache.pop(step.__code__.co_filename, None)
    if verdict.plainly_refused and any(i.rule.startswith("rrelu") for i in program.body):
        return discarded("rrelu writes its noise after saving it, so copies show nothing")
    if verdict.signature.startswith(MODIFIED) and writes_unseen(program):
        return dataclasses.replace(verdict, outcome="refused")
    if verdict.outcome == "fails" and depends_on_modes(program):
        conduct = dataclasses.replace(program.conduct, steps=min(program.conduct.steps, 2))  # later: no mode is on
        beside = judge_functions(setup, step, conduct, setting, make, bystander_recorder)
        both_raise = beside.signature.startswith("plain raises") and verdict.signature.startswith("raises")
        if beside.outcome == "agrees" or both_raise:
            return dataclasses.replace(verdict, outcome="torch")
    return verdict


def depends_on_modes(program: Program) -> bool:
    """Say whether PyTorch itself may give other results under any dispatch mode."""
    return any(name in MODE_DEPENDENT for i in program.body for name in (i.rule, *i.scopes))


def writes_unseen(program: Program) -> bool:
    """Say whether the program may write out of the recording's sight, or past version counters.

    Written past a version counter, plain PyTorch silently computes with what was written.
    """
    if any(i.writes_hidden or i.rule == "leaf grad use" for i in program.body):  # the backward pass adds to gradients
        return True
    recorded = False
    for instruction in program.body:
        recorded = recorded or instruction.recorded
        if recorded and not instruction.recorded and RULES[instruction.rule].risky:
            return True
    return False


def convict(setup: Setup, step: Step, conduct: Conduct, setting: Setting, make: MakeRecorder) -> None:
    """Judge a printed program, say the verdict, and exit with 1 where it fails."""
    verdict = judge_functions(setup, step, conduct, setting, make)
    print(verdict.outcome, verdict.signature)
    print(verdict.detail)
    sys.exit(verdict.outcome == "fails")
