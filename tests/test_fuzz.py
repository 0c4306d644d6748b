"""Random programs give the same bits under lowtide; and the search itself finds and shrinks what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import faulty
from fuzz.campaign import draw_setting, run_campaign, search
from fuzz.generation import draw_program
from fuzz.judging import judge
from fuzz.programs import Program, Setting, script
from fuzz.recorders import MakeRecorder, plain_recorder
from fuzz.rules import KINDS
from fuzz.shrinking import Case, Shrinker, minimise
from fuzz.summary import Summary

ROOT = Path(__file__).parent.parent
AT_A_TIME = 20


def first_failing(make: MakeRecorder, wanted: str) -> Case:
    """Find a program that fails under a faulty recorder and is worth shrinking."""
    for seed in range(200):
        case = Case(draw_program(seed), Setting())
        long_enough = len(case.program.body) >= 12
        if long_enough and judge(case.program, case.setting, make).signature.startswith(wanted):
            return case
    pytest.fail("no program calls the broken op")


@pytest.mark.parametrize("first", range(0, 200, AT_A_TIME))
def test_random_programs_agree(first: int) -> None:
    failures = [r for r in map(search, range(first, first + AT_A_TIME)) if r.verdict.outcome == "fails"]
    assert not failures, "\n".join(f"{r.verdict.signature}\n{r.verdict.detail}\n{r.small}" for r in failures)


@pytest.mark.fuzz
@pytest.mark.timeout(4 * 3600)
def test_twenty_thousand_random_programs_agree(capsys: pytest.CaptureFixture[str]) -> None:
    summary = Summary()
    first, last = (int(number) for number in os.environ.get("LOWTIDE_FUZZ_SEEDS", "0-20000").split("-"))
    for done, result in enumerate(run_campaign(range(first, last), jobs=os.cpu_count() or 1), 1):
        summary.add(result)
        if done % 250 == 0:
            with capsys.disabled():
                print(f"{done} of {last - first} programs: {dict(summary.outcomes)}", file=sys.stderr, flush=True)
    programs = [results[0].small for results in summary.buckets.values()]
    assert not programs, "\n".join([*summary.lines(details=False), *programs])


def test_a_seed_draws_one_program() -> None:
    assert draw_program(5) == draw_program(5)
    assert draw_setting(5) == draw_setting(5)
    assert draw_program(5) != draw_program(6)


def test_programs_are_rich() -> None:
    summary = Summary()
    for seed in range(40):
        summary.add(search(seed, plain_recorder))
    assert summary.outcomes["agrees"] >= 36
    assert summary.accepted > 0.8 * summary.tried
    assert all(sum(summary.rules[rule.name] for rule in rules) > 20 for rules in KINDS.values())


def test_a_wrong_gradient_is_found_and_shrunk_to_one_op_and_one_decision() -> None:
    shrinker = Shrinker(first_failing(faulty.perturbing_recorder, "differs"), faulty.perturbing_recorder)
    small = shrinker.run()
    assert judge(small.program, small.setting, faulty.perturbing_recorder).outcome == "fails"
    assert judge(small.program, small.setting, plain_recorder).outcome == "agrees"
    assert len(small.program.body) == 1
    assert len(small.program.sources) == 1
    assert small.setting.decisions.keep_share == 1.0
    assert [name for name, _ in small.setting.decisions.flips] == [faulty.BROKEN_OP]


def test_an_exception_is_found_and_shrunk() -> None:
    small = Shrinker(first_failing(faulty.raising_recorder, "raises"), faulty.raising_recorder).run()
    verdict = judge(small.program, small.setting, faulty.raising_recorder)
    assert verdict.signature.startswith("raises NotImplementedError: aten.tanh")
    assert len(small.program.body) == 1


def test_what_stays_attached_is_found_and_taken_away() -> None:
    program = draw_program(3)
    assert judge(program, Setting(), faulty.clinging_recorder).signature == "leaves something attached"
    assert judge(program, Setting(), plain_recorder).outcome == "agrees"


def test_a_program_that_kills_its_process_is_a_finding() -> None:
    seed = next(n for n in range(200) if search(n, faulty.raising_recorder, shrink=False).small)
    results = list(run_campaign(range(seed, seed + 2), 1, faulty.dying_recorder, shrink=False))
    assert [r.seed for r in results] == [seed, seed + 1]
    assert results[0].verdict.signature == "kills the process with exit code 9"
    assert "def step(" in results[0].small


def test_a_printed_program_runs_on_its_own(tmp_path: Path) -> None:
    program = next(p for p in map(draw_program, range(50)) if agrees_plainly(p))
    file = tmp_path / "program.py"
    file.write_text(script(program, Setting(), "A program"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(file)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["agrees"]), done.stderr


def agrees_plainly(program: Program) -> bool:
    return judge(program, Setting(), plain_recorder).outcome == "agrees"


@pytest.mark.parametrize("wanted", [[], [3], [0, 7], [2, 3, 4]])
def test_minimise_leaves_only_what_is_needed(wanted: list[int]) -> None:
    assert minimise(range(10), lambda some: set(wanted) <= set(some)) == wanted
