"""One trial: a case, a keep set and a way of recording, all drawn from a seed, and what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import time
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

import torch

import lowtide
from fuzz.recorders import Bystander
from fuzz.shrinking import minimise
from harness import Case, MakeContext, Observation, assert_same, observe
from lowtide.errors import LowtideError, RootChanged
from lowtide.tape import library

from .subjects import subjects, under_autocast

SHORT, LONG = 2, 8
"""Steps; of the long trials the first four are recorded and, where the step allows it, the others followed."""
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
SHRINK_SECONDS = 30.0

Outcome = Literal["agrees", "refused", "fails", "torch", "unrepeatable", "not plainly"]
OUTCOMES: dict[Outcome, str] = {
    "agrees": "agree",
    "refused": "refused, as they may be",
    "fails": "fail",
    "torch": "changed by any dispatch mode",
    "unrepeatable": "are not repeatable without lowtide",
    "not plainly": "do not run without lowtide",
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """Which case in which round of which sweep. Everything else is drawn from these four."""

    name: str
    round: int
    seed: int = 0
    autocast: bool = False

    @property
    def command(self) -> str:
        """What to type to see this trial again."""
        autocast = " --autocast" if self.autocast else ""
        return f"./run sweep --case {self.name} --round {self.round} --seed {self.seed}{autocast}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What was drawn for a trial. `share` is the share of operations to keep; `outside`: autocast around all."""

    share: float
    check: Any
    check_every: int
    steps: int
    fresh: bool
    inside: bool
    outside: bool


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a trial; `difference` names the first thing that differs, `dropped` the sites that did it."""

    outcome: Outcome
    difference: str = ""
    dropped: tuple[str, ...] = ()
    steps: int = 0
    followed: int = 0
    asked_count: int = 0
    dropped_count: int = 0


class Lot:
    """A policy that keeps a share of the operations, always the same ones; `only` narrows down what it drops."""

    def __init__(self, seed: str, share: float, only: Sequence[str] | None = None) -> None:
        self.seed, self.share, self.only = seed, share, only
        self.asked: dict[str, bool] = {}

    def __call__(self, op: Any) -> bool:
        """Return whether the operation's results are kept."""
        site = f"{getattr(op, 'site', '')} {op.name}"
        drawn = zlib.crc32(f"{self.seed} {site} {zlib.adler32(site.encode())}".encode()) / 2**32
        keeps = drawn < self.share or (self.only is not None and site not in self.only)
        self.asked[site] = keeps
        return keeps

    @property
    def dropped(self) -> list[str]:
        """The sites that were asked about and not kept."""
        return [site for site, keeps in self.asked.items() if not keeps]


class Entering:
    """A context that may be entered step after step: makes contexts and enters them, outermost first."""

    def __init__(self, *makes: MakeContext) -> None:
        self.makes = makes

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for make in self.makes:
                stack.enter_context(make())
            self.entered = stack.pop_all()

    def __exit__(self, *exception: Any) -> bool | None:
        return self.entered.__exit__(*exception)


MakeRecording: TypeAlias = Callable[[Any, Setting], AbstractContextManager[Any]]
"""Makes the context under test, to be entered once or many times, from a policy and a setting."""


def lowtide_recording(policy: Any, setting: Setting) -> AbstractContextManager[Any]:
    """Record with lowtide."""
    return lowtide.record(policy, check=setting.check, check_every=setting.check_every)


def bystanding(policy: Any, setting: Setting) -> AbstractContextManager[Any]:
    """Only have a dispatch mode on: tells PyTorch's own doing from a recording's."""
    return Entering(Bystander)


def setting_of(trial: Trial) -> Setting:
    """Draw how the case is recorded; every other round is a long one."""
    rng = random.Random(f"{trial.seed} {trial.round} {trial.name}")
    check = rng.choice(["new", "new", "always", "never"])
    if subjects()[trial.name].needs_proof and check == "never":
        check = "new"  # only a proof can notice memory that is written behind the dispatcher's back
    every = rng.choice([0, 0, 3]) if check == "new" else 0
    fresh, inside, outside = rng.random() < 0.25, rng.random() < 0.4, trial.autocast and rng.random() < 0.3
    steps = SHORT if trial.round % 2 == 0 else LONG
    return Setting(rng.choice(SHARES), check, every, steps, fresh, inside and not outside, outside)


def case_of(trial: Trial) -> Case:
    """Find the trial's case, under autocast where that is asked for."""
    case = subjects()[trial.name]
    return under_autocast(case) if trial.autocast else case


class Unrepeatable(Exception):
    """The plain step does not equal itself: nothing can be said of it."""


class NotPlainly(Exception):
    """The plain step raises, for example because autocast gives two of its operands different dtypes."""


def observed_plainly(trial: Trial, steps: int) -> Observation:
    """Observe the case twice without a recording. Raises Unrepeatable or NotPlainly."""
    case = case_of(trial)
    try:
        first, second = (observe(case, contextlib.nullcontext, steps=steps) for _ in range(2))
    except Exception as error:
        raise NotPlainly(repr(error)) from error
    if first.error is not None and not case.fails:
        raise NotPlainly(repr(first.error))
    try:
        assert_same(first, second)
    except AssertionError as error:
        raise Unrepeatable(str(error)) from error
    return first


@functools.cache
def _plainly(name: str, seed: int, autocast: bool, steps: int) -> Observation:
    return observed_plainly(Trial(name, 0, seed, autocast), steps)


def judge(trial: Trial, make: MakeRecording = lowtide_recording) -> Verdict:
    """Run the trial and compare it with the plain steps; look for the fewest dropped results if it fails."""
    setting = setting_of(trial)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the programs are what warns; they are here for that
        try:
            plain = _plainly(trial.name, trial.seed, trial.autocast, setting.steps)
            verdict = compared(trial, setting, plain, make)
            if verdict.outcome == "fails":
                plain = observed_plainly(trial, setting.steps)
                verdict = narrowed(verdict, trial, setting, plain, make)
        except Unrepeatable as error:
            return Verdict("unrepeatable", str(error))
        except NotPlainly as error:
            return Verdict("not plainly", str(error))
    return verdict


def compared(
    trial: Trial, setting: Setting, plain: Observation, make: MakeRecording, only: Sequence[str] | None = None
) -> Verdict:
    """Run the trial recorded and say how it fares beside the plain steps."""
    case = case_of(trial)
    policy = Lot(f"{trial.seed} {trial.round}", setting.share, only)
    forget()
    run = functools.partial(observe, case, backward_inside=setting.inside, steps=setting.steps)
    try:
        recorded = run(contexts(policy, setting, make))
        outcome, difference = told_apart(case, plain, recorded)
        if outcome == "fails" and told_apart(case, run(contexts(policy, setting, bystanding)), recorded)[0] == "agrees":
            outcome = "torch"
    except Exception as error:
        outcome, difference = "fails", f"raises {type(error).__name__}: {error}"
    followed = sum(p.followed for shelf in library._local.shelves.values() for p in shelf.programs)
    dropped = policy.dropped
    listed = tuple(dropped) if outcome == "fails" else ()
    return Verdict(outcome, difference, listed, setting.steps, followed, len(policy.asked), len(dropped))


def contexts(policy: Any, setting: Setting, make: MakeRecording) -> MakeContext:
    """Make contexts of the kind that the setting asks for."""

    def context() -> AbstractContextManager[Any]:
        recording = functools.partial(make, policy, setting)
        if not setting.fresh:
            shared = recording()
            if not setting.outside:
                return shared
            recording = functools.partial(lambda: shared)
        around = [functools.partial(torch.autocast, "cpu", torch.bfloat16)] if setting.outside else []
        return Entering(*around, recording)

    return context


def told_apart(case: Case, plain: Observation, recorded: Observation) -> tuple[Outcome, str]:
    """Compare all that can be seen; an honest refusal passes where the case allows one.

    So does it where plain PyTorch saves what autocast made of a weight that is changed, and not the weight itself.
    """
    error = recorded.error
    cast = case.fails and plain.error is None and isinstance(error, RootChanged)
    if (case.may_refuse or cast) and error is not None:
        return ("refused", "") if isinstance(error, LowtideError) else ("fails", f"raises {error!r}")
    if plain.error is not None and error is not None and not isinstance(error, RuntimeError):
        return "fails", f"raises {error!r} in place of {plain.error!r}"
    try:
        assert_same(plain, recorded)
    except AssertionError as difference:
        return "fails", str(difference)
    return "agrees", ""


def narrowed(verdict: Verdict, trial: Trial, setting: Setting, plain: Observation, make: MakeRecording) -> Verdict:
    """Look for the fewest results that must be dropped for the trial to fail; everything else is kept."""
    deadline = time.monotonic() + SHRINK_SECONDS

    def fails(sites: Sequence[str]) -> bool:
        return time.monotonic() < deadline and compared(trial, setting, plain, make, sites).outcome == "fails"

    again = compared(trial, setting, plain, make)
    if again.outcome != "fails":
        return dataclasses.replace(verdict, difference=f"only once: {verdict.difference}")
    return dataclasses.replace(verdict, dropped=tuple(minimise(verdict.dropped, fails)))


def forget() -> None:
    """Forget the steps of other trials, and that anything was compiled: after that nothing would be followed."""
    import torch._dynamo.utils

    library._local.shelves = OrderedDict()
    torch._dynamo.utils.counters.clear()
