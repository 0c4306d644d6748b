"""The command line: what it lists, what it refuses, and how errors leave it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import lowtide.cli
from lowtide.cli.app import VERBS, main
from lowtide.errors import LowtideError


def leave(*arguments: str) -> int:
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    code = left.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def put_verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Put a function in the place of the verb `demo`, in a file of its own."""

    def put(verb: Callable[[], None]) -> None:
        stand_in = ModuleType("lowtide.cli.demo")
        stand_in.demo = verb  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lowtide.cli.demo", stand_in)

    return put


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_verb(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(flag) == 0
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert verb in shown


def test_every_file_but_the_app_and_what_verbs_share_is_a_verb() -> None:
    files = {path.stem for path in Path(lowtide.cli.__file__).parent.glob("*.py")}
    assert files - {"__init__", "app", "conventions"} == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_a_function_with_a_help_text(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    first_line = getattr(import_module(f"lowtide.cli.{verb}"), verb).__doc__.splitlines()[0]
    assert leave(verb, "--help") == 0
    assert first_line.split()[0] in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("--version") == 0
    assert capsys.readouterr().out == f"lowtide {version('lowtide')}\n"


def test_an_unknown_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("damo") == 2
    assert "No such command 'damo'" in capsys.readouterr().err


def test_a_verb_that_ends_leaves_with_0(put_verb: Callable[..., None]) -> None:
    put_verb(lambda: None)
    assert leave("demo") == 0


def test_an_error_of_ours_becomes_one_text_and_exit_code_1(
    put_verb: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise LowtideError("blocks.3.mlp, aten.addmm: float32[2, 3] expected, [bold]float32[2][/bold] found")

    put_verb(refuse)
    assert leave("demo") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == ("lowtide: blocks.3.mlp, aten.addmm: float32[2, 3] expected, [bold]float32[2][/bold] found\n")


def test_an_interrupt_leaves_with_130(put_verb: Callable[..., None]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    put_verb(interrupt)
    assert leave("demo") == 130


def test_an_error_that_is_not_ours_keeps_its_traceback(put_verb: Callable[..., None]) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    put_verb(fail)
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


def test_python_m_does_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "lowtide", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"lowtide {version('lowtide')}\n"), done.stderr
