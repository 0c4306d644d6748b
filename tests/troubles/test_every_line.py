"""Every line of the list of troubles has a test that bears its name; of stand-ins it is said what they stand for."""

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

ELSEWHERE = {
    "B04": ("troubles/test_randomness.py", "test_B04_as_the_compiler_of_torch_shows_it"),
    "B05": ("troubles/test_randomness.py", "test_B05_draws_on_device_tensors_in_nested_containers_are_replayed"),
    "B17": ("integrations/test_distributed.py", "test_a_distributed_step_is_the_same_and_sends_the_same"),
    "B18": ("integrations/test_distributed.py", "test_a_distributed_step_is_the_same_and_sends_the_same"),
    "B29": (
        "integrations/test_troubles.py",
        "test_B29_peers_recompute_in_different_order_and_collectives_pair_wrongly",
    ),
    "B32": ("integrations/test_adapters.py", "test_adapters_train_the_same_in_either_order"),
    "B50": ("troubles/test_parallel.py", "test_B50_gradients_are_equal_on_all_ranks_and_those_of_the_plain_run"),
    "B52": ("integrations/test_distributed.py", "test_a_distributed_step_is_the_same_and_sends_the_same"),
    "B57": ("integrations/test_distributed.py", "test_a_distributed_step_is_the_same_and_sends_the_same"),
    "B60": ("integrations/test_deepspeed.py", "test_a_step_is_the_same_and_sends_the_same"),
    "B98": ("troubles/test_contexts.py", "test_B98_a_region_runs_under_another_current_device"),
    "B104": ("troubles/test_offload.py", "test_B104_B106_saving_on_the_cpu_with_pinned_memory"),
    "B106": ("troubles/test_offload.py", "test_B104_B106_saving_on_the_cpu_with_pinned_memory"),
    "B119": ("troubles/test_others.py", "test_B119_cuda_graphs_and_checkpoint"),
    "B123": ("integrations/test_distributed.py", "test_a_distributed_step_is_the_same_and_sends_the_same"),
}
"""Where a line is tested here by a stand-in: the test with the devices, ranks or frameworks themselves."""

BY_A_STAND_IN_ALONE = {
    "B52": "what a gather costs shows on accelerators only, so gathers are counted: there are as many as plainly",
    "B57": "a second axis for experts is not tried: the engine's operations are left alone by name, of whatever group",
    "B122": "what nn.DataParallel costs shows on accelerators only; there are no regions here to wait for each other",
}
"""What of a line does not apply, or cannot be shown by a test: why."""


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
def test_a_line_has_a_test(line: str) -> None:
    assert line in named_tests()


def test_no_test_is_named_after_a_line_that_does_not_exist() -> None:
    assert named_tests().keys() | ELSEWHERE.keys() | BY_A_STAND_IN_ALONE.keys() <= set(LINES)
    assert len(set(LINES)) == len(LINES)


@pytest.mark.parametrize("line", ELSEWHERE)
def test_what_a_stand_in_shows_is_also_tested_with_the_real_thing(line: str) -> None:
    file, test = ELSEWHERE[line]
    body = ast.parse((Path(__file__).parent.parent / file).read_text(encoding="utf-8")).body
    (found,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == test)
    marks = [*found.decorator_list, *(node.value for node in body if isinstance(node, ast.Assign))]
    assert re.search(r"mark\.(slow|cuda|integration)\b", "\n".join(map(ast.unparse, marks)))


def test_every_section_goes_on_to_relatives_that_the_list_does_not_name() -> None:
    others = ("test_every_line.py", "test_breaking.py", "test_comparison.py")
    sections = [path for path in Path(__file__).parent.glob("test_*.py") if path.name not in others]
    texts = {path.name: path.read_text(encoding="utf-8") for path in sections}
    without = [n for n, text in texts.items() if text.count("def test_relative") < 2 and "test_relatives" not in text]
    assert not without
