"""Every cell of the table in docs/comparison.md is measured: yes is bit for bit, no is another number or an error."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from troubles.probes import PROBES, WAYS, answer
from troubles.ways import tried

PAGE = Path(__file__).parents[2] / "docs" / "comparison.md"
MARKER = "<!-- table: point by point -->"
NEEDS = {"torch_remat": "torch_remat", "transformers": "transformers", "DeepSpeed": "deepspeed"}


def table() -> dict[str, dict[str, str]]:
    """Question -> column -> the answer that the page gives."""
    lines = PAGE.read_text(encoding="utf-8").partition(MARKER)[2].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    header = rows[0][1:]
    return {row[0]: dict(zip(header, row[1:], strict=True)) for row in rows[2:]}


def test_the_page_asks_what_is_measured() -> None:
    assert list(table()) == list(PROBES)
    assert all(list(row) == list(WAYS) for row in table().values())


@pytest.mark.parametrize(
    "column", [pytest.param(name, marks=pytest.mark.slow if name == "compiler" else ()) for name in WAYS]
)
def test_a_column_says_what_is_so(column: str) -> None:
    if importlib.util.find_spec(NEEDS.get(column, "torch")) is None:
        pytest.skip(f"{NEEDS[column]} is not installed here")
    if column != "lowtide" and not tried:
        pytest.skip("the others' columns are those of torch 2.13")
    measured = {question: "yes" if answer(question, *WAYS[column]) else "no" for question in PROBES}
    assert measured == {question: row[column] for question, row in table().items()}


def test_every_answer_of_lowtide_is_yes() -> None:
    assert {row["lowtide"] for row in table().values()} == {"yes"}
