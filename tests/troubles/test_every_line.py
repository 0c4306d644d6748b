"""Every line of the list of troubles has a test that bears its name, or stands below with what is outstanding."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

LINES = (
    *(f"B{n:02}" for n in (*range(1, 10), 11, 12, 13, 14, 15, 17, 18)),
    *(f"B{n}" for n in (19, 20, 21, 22, 24, 25, 26, 27, 29, 30, 31, 32, 33, 34, 35, 37, 39, 40, 41, 42, 43, 44)),
    *(f"B{n}" for n in (46, 47, 48, 50, 51, 52, 53, 54, 55, 56, 57, 58, 60, 61, 63, 64, 65, 66, 67, 69, 70)),
    *(f"B{n}" for n in (*range(71, 78), *range(79, 87), 88, 89, 90, 91, 92, 93, 97, 98, 99, 101, 102)),
    *(f"B{n}" for n in (*range(104, 112), *range(113, 124))),
    *(f"P{n:02}" for n in (1, 2, 3, 6, 8, 10, 11, 12, 13, 14, 15)),
)

OUTSTANDING = {
    "B113": "the search for the largest batch belongs to the command line; the core changes no batch by itself",
    "B119": "capture in a CUDA graph needs an accelerator, and reading random state is forbidden while it captures",
}
"""What the core cannot show alone."""

PARTLY = {
    "B04": "the compiler's own redrawn masks are shown under -m slow",
    "B05": "on a device: -m cuda",
    "B17": "with more than one rank: tests/integrations",
    "B18": "with more than one rank: tests/integrations",
    "B29": "with four processes: tests/integrations",
    "B32": "with PEFT itself: tests/integrations",
    "B50": "two processes: -m slow",
    "B52": "the cost of a gather shows on accelerators only; here gathers are counted",
    "B57": "with more than one rank: tests/integrations",
    "B60": "with DeepSpeed itself: tests/integrations",
    "B98": "two devices: -m cuda",
    "B104": "pinned memory and streams: -m cuda",
    "B106": "pinned memory: -m cuda",
    "B122": "the cost of nn.DataParallel shows on accelerators only",
    "B123": "with more than one rank: tests/integrations",
}
"""Where a stand-in takes the place of what this machine may lack, and where the rest is."""


@cache
def named_tests() -> dict[str, list[str]]:
    """Line -> the tests that bear its name."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for line in re.findall(r"(?<=_)[BP]\d+(?=_)", node.name):
                    found.setdefault(line, []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("line", LINES)
def test_a_line_has_a_test_or_says_what_is_outstanding(line: str) -> None:
    assert (line in named_tests()) is not (line in OUTSTANDING)


def test_no_test_is_named_after_a_line_that_does_not_exist() -> None:
    assert named_tests().keys() | OUTSTANDING.keys() | PARTLY.keys() <= set(LINES)
    assert len(set(LINES)) == len(LINES)


def test_every_section_goes_on_to_relatives_that_the_list_does_not_name() -> None:
    others = ("test_every_line.py", "test_breaking.py", "test_comparison.py")
    sections = [path for path in Path(__file__).parent.glob("test_*.py") if path.name not in others]
    texts = {path.name: path.read_text(encoding="utf-8") for path in sections}
    without = [n for n, text in texts.items() if text.count("def test_relative") < 2 and "test_relatives" not in text]
    assert not without
