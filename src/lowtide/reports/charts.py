"""Charts of a report, as specifications for Vega-Lite; drawn to SVG by vl-convert, without a browser or a network.

Colours are those of Okabe and Ito (2008), which people with colour-blind eyes can tell apart.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

from lowtide.course import KINDS, Moment
from lowtide.errors import LowtideError
from lowtide.reports.content import Content
from lowtide.reports.labels import box_of, places
from lowtide.units import BYTES_PER_UNIT, format_bytes

COLOURS = ("#56b4e9", "#0072b2", "#999999", "#009e73", "#e69f00", "#cc79a7", "#d55e00")
"""Of ``KINDS``, in their order."""
POINTS = {"frontier": "#0072b2", "by hand": "#e69f00", "this plan": "#d55e00"}
WIDE, NARROW = 720, 330
"""Pixels: on a desk, and on a phone."""
FRONTIER_HEIGHT = 260
_AXIS_WIDTH = 58
"""Pixels beside a chart that its axis and padding take."""


def memory_chart(title: str, moments: tuple[Moment, ...], content: Content, width: int) -> dict[str, Any]:
    """Bytes over the seconds of the step, stacked by kind, with a line at the budget and a mark at the peak."""
    unit, scale = unit_of(max(content.prediction.plain_peak_bytes, content.prediction.peak_bytes))
    time, seconds = ("ms", 1e3) if content.prediction.step_seconds < 10 else ("s", 1.0)
    rows = [
        {"time": moment.seconds * seconds, "kind": kind, "memory": size / scale, "order": number}
        for moment in moments
        for number, (kind, size) in enumerate(zip(KINDS, moment.bytes, strict=True))
    ]
    top = max(moments, key=lambda moment: moment.total_bytes)
    most = max(content.prediction.plain_peak_bytes, content.budget_bytes or 0) / scale * 1.12
    latest = content.prediction.step_seconds * seconds
    x = {"field": "time", "type": "quantitative", "title": f"time, {time}", "scale": {"domain": [0, latest]}}
    y = {"type": "quantitative", "title": f"memory, {unit}", "scale": {"domain": [0, most]}}
    area = {
        "data": {"values": rows},
        "mark": {"type": "area", "interpolate": "linear"},
        "encoding": {
            "x": x,
            "y": {**y, "field": "memory", "stack": "zero"},
            "color": _colour("kind", list(KINDS), list(COLOURS), width),
            "order": {"field": "order"},
        },
    }
    peak = {
        "data": {"values": [{"time": top.seconds * seconds, "memory": top.total_bytes / scale}]},
        "encoding": {"x": x, "y": {**y, "field": "memory"}},
        "layer": [
            {"mark": {"type": "point", "filled": True, "size": 60, "color": "#000000"}},
            {
                "mark": {"type": "text", "dy": -10, "fontWeight": "bold", **_inside(top.seconds * seconds, latest)},
                "encoding": {"text": {"value": f"peak {format_bytes(top.total_bytes)}"}},
            },
        ],
    }
    layers: list[dict[str, Any]] = [area, peak]
    if content.budget_bytes is not None and content.budget_bytes / scale <= most:
        layers.append(_budget(content.budget_bytes, scale, y))
    described = f"{title}: memory over the time of a step, at most {format_bytes(top.total_bytes)}"
    return _chart(title, described, width, 230, {"layer": layers})


def frontier_chart(content: Content, width: int) -> dict[str, Any]:
    """Peak over time: the frontier as a line, the plan and hand policies as points."""
    unit, scale = unit_of(max(point.peak_bytes for point in content.points))
    rows: list[dict[str, Any]] = [
        {
            "extra": 100 * (point.ratio - 1),
            "memory": point.peak_bytes / scale,
            "name": point.name,
            "group": point.group,
        }
        for point in content.points
    ]
    extras = [row["extra"] for row in rows]
    across = [min(0.0, *extras), max(1.0, *extras) * 1.02]
    up = [0.0, max(*(row["memory"] for row in rows), (content.budget_bytes or 0) / scale) * 1.12]
    _place(rows, across, up, width, content)
    x = {"field": "extra", "type": "quantitative", "title": "extra time, %", "scale": {"domain": across}}
    y = {"field": "memory", "type": "quantitative", "title": f"peak, {unit}", "scale": {"domain": up}}
    groups = [group for group in POINTS if any(row["group"] == group for row in rows)]
    shown = {"x": x, "y": y, "color": _colour("group", groups, [POINTS[group] for group in groups], width)}
    layers: list[dict[str, Any]] = [
        {
            "transform": [{"filter": "datum.group == 'frontier'"}],
            "mark": {"type": "line", "color": POINTS["frontier"]},
            "encoding": {"x": x, "y": y, "order": {"field": "extra"}},
        },
        {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 1}, "encoding": shown},
        *(_names(place, x, y) for place in sorted({(row["align"], row["rise"]) for row in rows})),
    ]
    if content.budget_bytes is not None:
        layers.append(_budget(content.budget_bytes, scale, y, at_end=True))
    described = (
        "Peak memory over extra time: the best plans as a line, this plan and policies written by hand as points"
    )
    return _chart("Frontier", described, width, FRONTIER_HEIGHT, {"data": {"values": rows}, "layer": layers})


def blocks_chart(content: Content, width: int) -> dict[str, Any]:
    """One column a block, one row an operation: kept or recomputed."""
    longest = 34 if width > NARROW else 18
    rows = [
        {
            "block": cell.block,
            "op": _short(cell.op, longest),
            "share": round(100 * cell.recomputed),
            "bytes": format_bytes(cell.bytes),
        }
        for cell in content.cells
    ]
    ops = list(dict.fromkeys(str(row["op"]) for row in rows))
    spec = {
        "data": {"values": rows},
        "mark": {"type": "rect", "stroke": "#ffffff", "strokeWidth": 0.5},
        "encoding": {
            "x": {
                "field": "block",
                "type": "ordinal",
                "title": "block",
                "axis": {"labelAngle": 0, "labelOverlap": True},
            },
            "y": {"field": "op", "type": "nominal", "title": None, "sort": ops, "axis": {"labelLimit": 400}},
            "color": {
                "field": "share",
                "type": "quantitative",
                "title": "recomputed, %",
                "scale": {"domain": [0, 100], "range": ["#0072b2", "#e69f00"]},
                "legend": {"orient": "top", "gradientLength": 120},
            },
        },
    }
    described = "What is kept and what is recomputed: operations of each block, by block"
    return _chart("Blocks", described, width, 22 * len(ops), spec)


def svg(spec: dict[str, Any], prefix: str) -> str:
    """``spec`` drawn as SVG with text alternatives; ``prefix`` keeps its ids apart from those of other charts.

    Raises:
        LowtideError: vl-convert is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise LowtideError(
            "Charts need vl-convert: pip install 'lowtide[report]'. --format md and json need nothing."
        ) from None
    drawn: str = vl_convert.vegalite_to_svg(spec)
    drawn = drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(spec["description"])}" ', 1)
    return re.sub(r'(\bid="|url\(#|href="#)', lambda found: found[0] + prefix, drawn)


def unit_of(size: float) -> tuple[str, int]:
    """The unit that ``size`` bytes is written in, and its bytes."""
    unit = format_bytes(size).split()[-1]
    return unit, BYTES_PER_UNIT[unit]


def _colour(field: str, names: list[str], colours: list[str], width: int) -> dict[str, Any]:
    legend = {"orient": "top", "title": None, "columns": 4 if width > NARROW else 2, "columnPadding": 22}
    return {"field": field, "type": "nominal", "scale": {"domain": names, "range": colours}, "legend": legend}


def _place(rows: list[dict[str, Any]], across: list[float], up: list[float], width: int, content: Content) -> None:
    """Say in each row where its name goes."""
    wide, high = width - _AXIS_WIDTH - width // 24, FRONTIER_HEIGHT
    at = [
        ((row["extra"] - across[0]) / (across[1] - across[0]) * wide, high - row["memory"] / up[1] * high)
        for row in rows
    ]
    names = ["" if row["group"] == "frontier" else row["name"] for row in rows]
    taken = []
    if content.budget_bytes is not None:
        line = high - content.budget_bytes / unit_of(max(p.peak_bytes for p in content.points))[1] / up[1] * high
        taken.append(box_of(_budget_text(content.budget_bytes), wide, line))
    for row, place in zip(rows, places(at, names, wide, high, taken), strict=True):
        row |= {"align": place.align, "rise": place.rise}


def _names(place: tuple[str, int], x: dict[str, Any], y: dict[str, Any]) -> dict[str, Any]:
    """The names that go to this place beside their points."""
    align, rise = place
    here = f"datum.align == '{align}' && datum.rise == {rise}"
    return {
        "transform": [{"filter": f"datum.group != 'frontier' && {here}"}],
        "mark": {"type": "text", "dy": rise, "align": align, "dx": 4 if align == "right" else -4},
        "encoding": {"x": x, "y": y, "text": {"field": "name"}},
    }


def _budget_text(size: int) -> str:
    return f"budget {format_bytes(size)}"


def _budget(size: int, scale: int, y: dict[str, Any], at_end: bool = False) -> dict[str, Any]:
    at = {"align": "right", "x": "width"} if at_end else {"align": "left", "x": 4}
    values = {"values": [{"budget": size / scale, "text": _budget_text(size)}]}
    line = {**y, "field": "budget"}
    return {
        "data": values,
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [6, 4], "color": "#d55e00"}, "encoding": {"y": line}},
            {
                "mark": {"type": "text", "dy": -5, "color": "#d55e00", **at},
                "encoding": {"y": line, "text": {"field": "text"}},
            },
        ],
    }


def _short(name: str, longest: int) -> str:
    """The end of ``name``, which tells the operation."""
    return name if len(name) <= longest else "…" + name[1 - longest :]


def _inside(at: float, latest: float) -> dict[str, Any]:
    """Which side of the mark its text is on."""
    return {"align": "left", "dx": 8} if at < latest / 2 else {"align": "right", "dx": -8}


def _chart(title: str, described: str, width: int, height: int, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": title, "anchor": "start", "fontSize": 14},
        "description": described,
        "width": width,
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 10 + width // 24, "right": 12, "top": 5, "bottom": 5},
        "background": None,
        "config": {
            "font": "system-ui, sans-serif",
            "axis": {"labelFontSize": 11, "titleFontSize": 12, "gridColor": "#88888844", "labelFlush": False},
            "legend": {"labelFontSize": 11},
            "view": {"stroke": None},
        },
        **spec,
    }
