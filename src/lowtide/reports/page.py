"""A report as one HTML file that needs nothing else, and as Markdown, SVG or JSON.

The charts are drawn beforehand, once for a desk and once for a phone, so the page has no script at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from lowtide.course import KINDS
from lowtide.reports.charts import NARROW, WIDE, blocks_chart, frontier_chart, memory_chart, svg
from lowtide.reports.content import Content
from lowtide.units import format_bytes, format_seconds

FORMATS = ("html", "md", "json", "svg")
STYLE = """
:root{--ink:#1b1f24;--dim:#57606a;--paper:#fff;--line:#d0d7de;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9aa4af;--paper:#10141a;--line:#30363d}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:56rem;padding:1rem;
font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.15rem;margin-top:2rem}
figure{margin:1rem 0}figcaption{color:var(--dim);font-size:.9rem}
svg{max-width:100%;height:auto;display:block}
svg text{fill:var(--ink)!important}svg .mark-rule line[stroke-dasharray]{stroke:#d55e00}
svg .mark-symbol path[fill="#000000"]{fill:var(--ink)}
svg .role-axis-domain line,svg .role-axis-tick line{stroke:var(--dim)}
.narrow{display:none}
@media(max-width:46rem){dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.5rem}.wide{display:none}.narrow{display:block}}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem}th,td{padding:.25rem .75rem .25rem 0;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}thead th{border-bottom:1px solid var(--line)}
pre{overflow-x:auto;font-size:.8rem;line-height:1.35}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1rem}
dd{margin:0;overflow-wrap:anywhere}dt{color:var(--dim)}summary{cursor:pointer;color:var(--dim)}
"""

Draw = Callable[[int], dict[str, Any]]


def render(content: Content, kind: str) -> str:
    """``content`` as ``html``, ``md``, ``json`` or ``svg``."""
    if kind == "json":
        return json.dumps(content.to_json(), indent=1)
    if kind == "md":
        return markdown(content)
    if kind == "svg":
        return svg(stacked(content), "")
    return page(content)


def page(content: Content) -> str:
    """The whole page."""
    parts = [
        f"<h1>{escape(content.title)}</h1>",
        summary(content),
        "<h2>Memory over time</h2>",
        _figure("plain", _course_words("Without a plan", content.plain), lambda width: memory_chart(
            "Everything kept", content.plain, content, width), _course_table(content.plain)),
        _figure("planned", _course_words("Under the plan", content.planned), lambda width: memory_chart(
            "Under the plan", content.planned, content, width), _course_table(content.planned)),
    ]  # fmt: skip
    if len(content.points) > 1:
        words = "Peak over extra time. Lower and further left is better; the line has the best plans that were found."
        parts += [
            "<h2>What memory costs in time</h2>",
            _figure("frontier", words, lambda width: frontier_chart(content, width), _points_table(content)),
        ]
    if content.cells:
        words = "Results that backward needs, by operation and block: blue is kept, orange is computed again."
        parts += [
            "<h2>Kept and recomputed, block by block</h2>",
            _figure("blocks", words, lambda width: blocks_chart(content, width), _cells_table(content)),
        ]
    parts += [
        "<h2>Modules at the peak</h2>",
        _table(("module", "without", "with the plan"), _modules(content)),
        "<h2>The plan</h2>",
        f"<pre>{escape(content.plan_text)}</pre>",
        "<h2>Assumptions</h2>",
        "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in content.assumptions) + "</ul>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(content.title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def summary(content: Content) -> str:
    """The numbers that matter, as a list of terms."""
    return "<dl>" + "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in facts(content)) + "</dl>"


def facts(content: Content) -> list[tuple[str, str]]:
    """What the plan needs and takes, beside the plain step."""
    numbers = content.prediction
    saved = _percent(numbers.peak_bytes, numbers.plain_peak_bytes)
    slower = _percent(numbers.step_seconds, numbers.plain_seconds)
    plain_seconds = format_seconds(numbers.plain_seconds)
    found = [
        (
            "peak",
            f"{format_bytes(numbers.peak_bytes)} ({saved}; everything kept: {format_bytes(numbers.plain_peak_bytes)})",
        ),
        ("where", content.peak_where),
        (
            "step",
            f"{format_seconds(numbers.step_seconds)} ({slower}; everything kept: {plain_seconds})",
        ),
    ]
    if content.budget_bytes is not None:
        found.insert(0, ("budget", format_bytes(content.budget_bytes)))
    if numbers.bound_seconds:
        found.append(("above the proven bound", f"{100 * numbers.gap:.1f} %"))
    return found


def markdown(content: Content) -> str:
    """The report as Markdown, without pictures."""
    lines = [f"# {content.title}", "", *(f"- {a}: {b}" for a, b in facts(content)), ""]
    lines += _markdown_table(("module", "without", "with the plan"), _modules(content))
    if len(content.points) > 1:
        lines += ["", *_markdown_table(("way", "peak", "time"), _points(content))]
    lines += ["", "```text", content.plan_text, "```", "", *(f"- {text}" for text in content.assumptions)]
    return "\n".join(lines) + "\n"


def stacked(content: Content) -> dict[str, Any]:
    """The two courses of memory in one picture."""
    above = memory_chart("Everything kept", content.plain, content, WIDE)
    below = memory_chart("Under the plan", content.planned, content, WIDE)
    shared = {key: above[key] for key in ("$schema", "config")}
    inner = [
        {
            key: value
            for key, value in one.items()
            if key not in ("$schema", "config", "background", "autosize", "padding")
        }
        for one in (above, below)
    ]
    return {**shared, "background": "#ffffff", "description": below["description"], "vconcat": inner}


def _figure(name: str, words: str, draw: Draw, table: str) -> str:
    pictures = "".join(
        f'<div class="{kind}">{svg(draw(width), f"{name}-{kind}-")}</div>'
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )
    return (
        f'<figure id="{name}">{pictures}<figcaption>{escape(words)}</figcaption>'
        f"<details><summary>The same as numbers</summary>{table}</details></figure>"
    )


def _course_words(name: str, moments: Sequence[Any]) -> str:
    top = max(moments, key=lambda moment: moment.total_bytes)
    parts = sorted(zip(KINDS, top.bytes, strict=True), key=lambda pair: -pair[1])
    largest = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in parts[:4] if size)
    return f"{name}: at most {format_bytes(top.total_bytes)}, after {format_seconds(top.seconds)}; {largest}."


def _course_table(moments: Sequence[Any]) -> str:
    some = moments[:: max(1, len(moments) // 16)]
    rows = [
        (format_seconds(m.seconds), *(format_bytes(size) for size in m.bytes), format_bytes(m.total_bytes))
        for m in some
    ]
    return _table(("time", *KINDS, "all"), rows)


def _points(content: Content) -> list[tuple[str, str, str]]:
    return [(p.name, format_bytes(p.peak_bytes), f"×{p.ratio:.3f}") for p in content.points]


def _points_table(content: Content) -> str:
    return _table(("way", "peak", "time"), _points(content))


def _cells_table(content: Content) -> str:
    sums: dict[str, list[float]] = {}
    for cell in content.cells:
        both = sums.setdefault(cell.op, [0.0, 0.0])
        both[0] += cell.bytes
        both[1] += cell.bytes * cell.recomputed
    rows = [(op, format_bytes(size), f"{100 * again / size:.0f} %") for op, (size, again) in sums.items()]
    return _table(("operation", "all blocks", "recomputed"), rows)


def _modules(content: Content) -> list[tuple[str, str, str]]:
    return [(name, format_bytes(before), format_bytes(after)) for name, before, after in content.modules]


def _table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = "|".join([" --- ", *("--:" for _ in headings[1:])])
    return [f"| {' | '.join(headings)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]


def _percent(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f} %" if base else "unknown"
