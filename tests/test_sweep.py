"""The sweep draws the same trials from the same seed, finds recorders that are wrong, and says how to see it again."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from fuzz import faulty
from harness import Case, Program
from sweep import __main__ as command
from sweep import trials, workers
from sweep.subjects import subjects
from sweep.totals import Totals, described
from sweep.trials import LONG, Entering, Setting, Trial, Verdict, judge, lowtide_recording, setting_of
from sweep.workers import swept
from zoo.table import Zoo


def perturbing(policy: Any, setting: Setting) -> AbstractContextManager[Any]:
    return Entering(functools.partial(faulty.perturbing, policy))


def dying(policy: Any, setting: Setting) -> AbstractContextManager[Any]:
    return Entering(functools.partial(faulty.Watch, policy, lambda result: os._exit(9)))


def hanging(policy: Any, setting: Setting) -> AbstractContextManager[Any]:
    time.sleep(30)
    raise AssertionError


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    """One small case in the place of all."""
    zoo = Zoo("small")
    zoo.flow("case", lambda x: (x.sin() @ torch.ones(8, 8)).tanh().exp().cos())
    monkeypatch.setattr(trials, "subjects", lambda: {zoo[0].name: zoo[0]})
    trials._plainly.cache_clear()
    return zoo[0]


def replace(monkeypatch: pytest.MonkeyPatch, case: Case, **changes: Any) -> None:
    monkeypatch.setattr(trials, "subjects", lambda: {case.name: dataclasses.replace(case, **changes)})


def test_subjects_are_the_zoo_and_the_models() -> None:
    assert {"hidden-empty_filled_by_numpy", "model-gpt2", "model-whisper"} <= set(subjects())
    assert len(subjects()) > 500


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["model-gpt2", "hidden-empty_filled_by_numpy"])
def test_lowtide_agrees(name: str, autocast: bool) -> None:
    for number in range(2):
        verdict = judge(Trial(name, number, autocast=autocast))
        assert verdict.outcome == "agrees", verdict


def test_a_trial_is_drawn_from_its_seed() -> None:
    drawn = [setting_of(Trial("model-gpt2", number, seed)) for number in range(8) for seed in range(8)]
    assert drawn == [setting_of(Trial("model-gpt2", number, seed)) for number in range(8) for seed in range(8)]
    assert len({setting.share for setting in drawn}) > 3
    assert {setting.steps for setting in drawn} == {2, LONG}
    assert {setting.fresh for setting in drawn} == {setting.inside for setting in drawn} == {False, True}


def test_long_trials_are_followed_and_keep_a_share(case: Case) -> None:
    verdicts = [judge(Trial(case.name, number)) for number in range(1, 24, 2)]
    assert all(verdict.outcome == "agrees" for verdict in verdicts), verdicts
    assert sum(verdict.followed for verdict in verdicts) > LONG
    assert 0 < sum(v.dropped_count for v in verdicts) < sum(v.asked_count for v in verdicts)


def test_hidden_writes_are_always_proven() -> None:
    names = [name for name, case in subjects().items() if case.needs_proof]
    assert all(setting_of(Trial(name, number)).check != "never" for name in names for number in range(10))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_wrong_gradient_is_found_and_its_cause_narrowed_down(case: Case, autocast: bool) -> None:
    verdicts = {number: judge(Trial(case.name, number, autocast=autocast), perturbing) for number in range(4)}
    found = {number: verdict for number, verdict in verdicts.items() if verdict.outcome == "fails"}
    assert found
    for number, verdict in found.items():
        assert verdict.difference.startswith("step 1: gradient of x: ")
        assert verdict.dropped == (" aten.tanh",)
        told = described(Trial(case.name, number, autocast=autocast), verdict)
        assert f"./run sweep --case small-case --round {number} --seed 0" in told
        assert ("--autocast" in told) == autocast


def test_an_exception_is_found(case: Case) -> None:
    def raising(policy: Any, setting: Setting) -> AbstractContextManager[Any]:
        raise NotImplementedError("no")

    verdict = judge(Trial(case.name, 0), raising)
    assert (verdict.outcome, verdict.difference) == ("fails", "raises NotImplementedError: no")


def test_what_does_not_repeat_itself_is_not_judged(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count()

    def build() -> Program:
        program = case.build()
        return dataclasses.replace(program, step=lambda: next(counter) * next(iter(program.leaves.values())).sum())

    replace(monkeypatch, case, build=build)
    verdict = judge(Trial(case.name, 0), lowtide_recording)
    assert verdict.outcome == "unrepeatable"
    assert "step 1: loss" in verdict.difference


def test_what_does_not_run_under_autocast_is_not_judged(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Program:
        weight = torch.ones(4, 4, requires_grad=True)
        return Program(lambda: torch.addmm(weight, weight @ weight, weight, out=torch.empty(4, 4)).sum())

    replace(monkeypatch, case, build=build)
    assert judge(Trial(case.name, 0, autocast=True)).outcome == "not plainly"


def test_what_any_dispatch_mode_changes_is_counted_apart(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """`affine_grid` multiplies in bfloat16 under autocast, and in float32 if there is a dispatch mode as well."""
    zoo = Zoo("small")
    zoo.flow("grid", lambda x: torch.nn.functional.affine_grid(x.tanh(), [2, 3, 5, 5], False).sin(), x=(2, 2, 3))
    replace(monkeypatch, case, build=zoo[0].build)
    assert judge(Trial(case.name, 0, autocast=True)).outcome == "torch"
    assert judge(Trial(case.name, 0)).outcome == "agrees"


def test_a_trial_that_ends_its_process_is_a_finding() -> None:
    name = next(name for name in subjects() if "tanh" in name)
    number = next(number for number in range(100) if setting_of(Trial(name, number)).share == 0)
    ((_, verdict),) = swept(iter([Trial(name, number)]), make=dying)
    assert verdict.difference == "ends the process with exit code 9"


def test_a_trial_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.5)
    ((_, verdict),) = swept(iter([Trial("model-gpt2", 0)]), make=hanging)
    assert verdict.difference.startswith("hangs")


def test_totals_count_rounds_cases_and_failures() -> None:
    totals = Totals(case_count=2)
    for number, name in itertools.product(range(2), ("a", "b")):
        totals.add(Trial(name, number), Verdict("agrees", steps=(2, LONG)[number], followed=3 * number))
    totals.add(Trial("a", 2), Verdict("fails", "step 1: loss: …"))
    totals.add(Trial("a", 3), Verdict("agrees"))
    totals.add(Trial("c", 4), Verdict("unrepeatable", "step 2: loss: …"))
    text = "\n".join(totals.lines())
    assert "7 trials: 2 whole rounds of 2 cases and 3 more" in text
    assert "6 of the 16 in long trials followed" in text
    assert "unrepeatable: c: step 2: loss: …" in text
    assert "1 x a fails" in text


def test_the_command_goes_round_prints_totals_and_says_by_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(["--case", "model-gpt2"]) == 0
    assert "1 trials: 1 whole rounds of 1 cases and 0 more\n1 agree" in capsys.readouterr().out
    failing = [(Trial("model-gpt2", 0), Verdict("fails", "step 1: loss: …"))]
    monkeypatch.setattr(command, "swept", lambda some, jobs: iter(failing))
    assert command.main(["--case", "model-gpt2"]) == 1
    assert "FAILS ./run sweep --case model-gpt2 --round 0 --seed 0\n  step 1: loss: …" in capsys.readouterr().out


def test_an_unknown_case_is_refused_with_examples() -> None:
    with pytest.raises(SystemExit, match="there is no case model-gtp2"):
        list(command.trials(command.parsed(["--case", "model-gtp2"])))


def test_ctrl_c_ends_it_with_the_totals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(some: Any, jobs: int) -> Any:
        yield Trial("model-gpt2", 0), Verdict("agrees", steps=2)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "swept", interrupted)
    assert command.main(["--rounds", "1"]) == 0
    told = capsys.readouterr().out
    assert "interrupted; so far:" in told
    assert "1 agree" in told
