"""The report: what is in it, and that a browser shows it, wide and narrow, light and dark."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import pytest

import lowtide
from lowtide.course import course
from lowtide.errors import LowtideError
from lowtide.graph import StepGraph
from lowtide.plan import Plan
from lowtide.reporting import report
from lowtide.reports.content import Content
from lowtide.reports.labels import box_of, places
from lowtide.reports.page import markdown, page, render
from lowtide.units import format_bytes
from tiny import gpt_step

pytest.importorskip("vl_convert", reason="charts need the extra report")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.browser
FIGURES = ("plain", "planned", "frontier", "blocks")


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return gpt_step(blocks=4, batch=4, length=64, width=64).trace(optimizer="adamw", hardware="h100")


@pytest.fixture(scope="module")
def plan(graph: StepGraph) -> Plan:
    return lowtide.solve(graph, budget="75%")


@pytest.fixture(scope="module")
def content(graph: StepGraph, plan: Plan) -> Content:
    return report(graph, plan, title="GPT <4 blocks>", points=5)


@pytest.fixture(scope="module")
def html(content: Content) -> str:
    return page(content)


# ---- what is in it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["100%", "75%", "60%"])
def test_the_course_reaches_exactly_the_peak_and_ends_with_the_step(graph: StepGraph, budget: str) -> None:
    plan = lowtide.solve(graph, budget=budget)
    moments, timeline = course(graph, plan, points=30), lowtide.simulate(graph, plan)
    assert max(moment.total_bytes for moment in moments) == timeline.peak_bytes
    assert moments[-1].seconds == pytest.approx(timeline.step_seconds)
    assert all(size >= 0 for moment in moments for size in moment.bytes)
    assert [moment.seconds for moment in moments] == sorted(moment.seconds for moment in moments)


def test_only_a_plan_has_memory_that_is_recomputed(content: Content) -> None:
    position = content.to_json()["kinds"].index("recomputed")
    assert not any(moment.bytes[position] for moment in content.plain)
    assert any(moment.bytes[position] for moment in content.planned)


def test_the_map_of_blocks_says_what_the_plan_says(content: Content, graph: StepGraph, plan: Plan) -> None:
    assert {cell.block for cell in content.cells} == set(range(4))
    again = sum(cell.bytes * cell.recomputed for cell in content.cells)
    assert again > 0
    nothing = report(graph, Plan(frozenset()), points=0)
    assert not any(cell.recomputed for cell in nothing.cells)


def test_it_needs_nothing_from_elsewhere_and_has_no_script(html: str) -> None:
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert not re.search(r"https?://|<script|<link|@import|src=", without_namespaces)
    assert len(html) < 1_500_000


def test_every_chart_has_a_name_for_those_who_cannot_see_it(html: str) -> None:
    for figure in FIGURES:
        (one,) = re.findall(rf'<figure id="{figure}">.*?</figure>', html, re.DOTALL)
        assert len(re.findall(r'<svg[^>]* role="img"[^>]*aria-label="[^"]{20,}"', one)) == 2
        assert "<figcaption>" in one
        assert "<table>" in one
    assert "&lt;4 blocks&gt;" in html


def test_ids_are_used_once(html: str) -> None:
    found = re.findall(r'\bid="([^"]+)"', html)
    assert len(found) == len(set(found))


def test_it_is_well_formed(html: str) -> None:
    class Balance(HTMLParser):
        open: ClassVar[list[str]] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta",):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

        def handle_startendtag(self, tag: str, attrs: object) -> None: ...

    checker = Balance()
    checker.feed(html)
    assert checker.open == []


def test_svg_is_svg_and_json_is_json(content: Content) -> None:
    assert ElementTree.fromstring(render(content, "svg")).tag.endswith("svg")
    found = json.loads(render(content, "json"))
    assert found["prediction"]["peak_bytes"] == content.prediction.peak_bytes
    assert sum(row[2] for row in found["modules"]) == content.prediction.peak_bytes


def test_markdown_has_the_numbers(content: Content) -> None:
    text = markdown(content)
    assert text.startswith("# GPT <4 blocks>\n")
    assert format_bytes(content.prediction.peak_bytes) in text
    assert "| keep_matmuls |" in text


def test_a_plan_of_another_model_is_refused(plan: Plan) -> None:
    with pytest.raises(lowtide.errors.PlanMismatch):
        report(gpt_step(blocks=2).trace(), plan)


def test_without_vl_convert_the_way_out_is_named(content: Content, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(LowtideError, match=r"pip install 'lowtide\[report\]'\. --format md and json need nothing"):
        page(content)


def test_names_of_points_are_not_written_over_each_other() -> None:
    points = [(10.0 * n, 100.0 + n) for n in range(1, 6)]
    names = ["recompute_all", "keep_matmuls", "", "segments", "sqrt"]
    budget = box_of("budget 5.52 MiB", 260, 100)
    found = places(points, names, 260, 200, [budget])
    boxes = [place.box(*at, name) for place, at, name in zip(found, points, names, strict=True) if name] + [budget]
    assert not any(one.meets(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.left >= 0 and box.right <= 260 for box in boxes)


def test_a_name_without_room_is_still_placed() -> None:
    assert places([(5.0, 5.0)], ["a name that is far too long"], 20, 10)[0].rise == -10


# ---- in a browser -------------------------------------------------------------------------------------------

MEASURE = """
<script>
addEventListener('error', event => document.body.dataset.error = event.message);
addEventListener('load', () => {
  const seen = name => [...document.querySelectorAll(name + ' svg')].filter(s => s.getBoundingClientRect().width);
  const sizes = [...document.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().width)
    .map(t => parseFloat(getComputedStyle(t).fontSize) * t.closest('svg').getBoundingClientRect().width
              / t.closest('svg').viewBox.baseVal.width);
  const cut = [...document.querySelectorAll('svg text')].filter(t => {
    const box = t.getBoundingClientRect(), around = t.closest('svg').getBoundingClientRect();
    return box.width && (box.left < around.left - 1 || box.right > around.right + 1);
  }).map(t => t.textContent);
  const texts = [...document.querySelectorAll('svg g[class*="mark-text"] text')]
    .map(t => [t.textContent, t.getBoundingClientRect()]).filter(([_, box]) => box.width);
  const over = texts.flatMap(([a, one], i) => texts.slice(i + 1).filter(([b, other]) =>
    one.left < other.right - 1 && other.left < one.right - 1 && one.top < other.bottom - 3
    && other.top < one.bottom - 3).map(([b, _]) => a + ' / ' + b));
  document.body.dataset.found = JSON.stringify({
    width: document.documentElement.clientWidth, needed: document.documentElement.scrollWidth,
    wide: seen('.wide').length, narrow: seen('.narrow').length, smallest: Math.min(...sizes), cut, over,
    paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    text: getComputedStyle(document.querySelector('svg text')).fill});
  if (parent !== window) parent.document.body.dataset.inner = document.body.dataset.found;
});
</script>
"""


def open_page(html: str, folder: Path, *, width: int = 1000, dark: bool = False) -> dict[str, object]:
    """Open the page in a window, or below its least width in a frame, and return what it measures of itself."""
    (folder / "page.html").write_text(html.replace("</body>", MEASURE + "</body>"))
    frame = f'<!doctype html><body><iframe src="page.html" style="width:{width}px;height:9000px;border:0"></iframe>'
    (folder / "frame.html").write_text(frame)
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1100,3000", "--virtual-time-budget=3000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--enable-logging=stderr", "--dump-dom",
        (folder / "frame.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    (found,) = re.findall(r'data-inner="([^"]+)"', done.stdout)
    return dict(json.loads(found.replace("&quot;", '"')))


@browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize(("width", "shown", "hidden"), [(1000, "wide", "narrow"), (390, "narrow", "wide")])
def test_a_browser_shows_it_on_a_desk_and_on_a_phone(
    width: int, shown: str, hidden: str, html: str, tmp_path: Path
) -> None:
    found = open_page(html, tmp_path, width=width)
    assert found["width"] == width
    assert found["needed"] == width, "nothing to scroll sideways"
    assert (found[shown], found[hidden]) == (len(FIGURES), 0)
    assert isinstance(found["smallest"], float | int)
    assert found["smallest"] >= 9
    assert found["cut"] == [], "no text is cut off"
    assert found["over"] == [], "no name is written over another"


@browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it_light_and_dark(dark: bool, html: str, tmp_path: Path) -> None:
    found = open_page(html, tmp_path, dark=dark)

    def light(what: str) -> float:
        numbers = re.findall(r"\d+", str(found[what]))[:3]
        return sum(map(int, numbers)) / (3 * 255)

    paper, ink = light("paper"), light("ink")
    assert (paper < 0.2) == dark
    assert abs(paper - ink) > 0.7, "enough contrast"
    assert found["text"] == found["ink"], "charts follow"
