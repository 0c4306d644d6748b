"""README and docs tell the truth: their code runs, their links lead somewhere, and they leave nothing out."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest

import lowtide

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
TWO_SCREENS_LINES = 100

BLOCK = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)
TASK = re.compile(r"\./run (?P<task>[a-z]+)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def each_page(*pages: Path) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=name_of)


def code_blocks(page: Path) -> Iterator[str]:
    """Yield the python blocks, each moved down by empty lines so that errors name the line of the page."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        if block["language"] == "python":
            yield "\n" * text.count("\n", 0, block.start("text")) + block["text"]


def anchors_of(page: Path) -> set[str]:
    """The anchors of the page's headings, as the docs and code hosts make them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"[^\w\s-]", "", heading["text"]).strip().lower() for heading in HEADING.finditer(text))
    return {re.sub(r"[\s]", "-", heading) for heading in plain}


@each_page(*(page for page in PAGES if any(code_blocks(page))))
def test_the_code_on_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for block in code_blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


@each_page(*PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.finditer(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        file, _, anchor = link["target"].partition("#")
        if file.startswith("https://"):
            continue
        target = (page.parent / file).resolve() if file else page
        assert target.is_file(), f"{link['target']}: no such file"
        assert not anchor or anchor in anchors_of(target), f"{link['target']}: no such heading"


@each_page(*PAGES)
def test_the_tasks_on_a_page_exist(page: Path) -> None:
    usage = subprocess.run(["bash", str(ROOT / "run"), "help"], capture_output=True, text=True, check=True)
    known = set(re.findall(r"^  ([a-z]+)", usage.stdout, re.MULTILINE))
    assert {task["task"] for task in TASK.finditer(page.read_text(encoding="utf-8"))} <= known


def test_the_readme_has_an_example_and_fits_on_two_screens() -> None:
    readme = ROOT / "README.md"
    assert any(code_blocks(readme))
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= TWO_SCREENS_LINES


def test_the_reference_has_a_section_for_every_public_name() -> None:
    sections = anchors_of(DOCS / "api.md")
    assert not {name for name in lowtide.__all__ if name.lower() not in sections}


def test_every_error_and_every_policy_is_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in (*lowtide.errors.__all__, *lowtide.policies.__all__):
        assert re.search(rf"`{name}\b", text), name


def dependencies() -> set[str]:
    """The packages that lowtide asks for, its extras included."""
    return {re.split(r"[^a-z-]", requirement)[0] for requirement in requires("lowtide") or ()} - {"lowtide"}


def test_every_dependency_has_its_reason() -> None:
    listed = re.findall(r"^\| ([a-z-]+) \|", (DOCS / "dependencies.md").read_text(), re.MULTILINE)
    assert dependencies() == set(listed)


def test_every_development_dependency_is_pinned() -> None:
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert dependencies() <= {name.lower().replace("_", "-") for name in pinned}
