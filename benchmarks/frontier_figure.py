"""The picture of a frontier: CPU time to the right, peak upwards, lowtide a line, the others points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.headlines import Point, best

LINE, INK, FAINT = "#0b6e99", "#333333", "#bbbbbb"
MIB = 2**20


def draw(title: str, frontier: Sequence[Point], others: Mapping[str, Point], path: Path) -> None:
    """Write the picture to `path`; the same points give the same file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {"svg.hashsalt": "lowtide", "svg.fonttype": "path", "font.size": 9, "text.color": INK}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
        line = best(frontier)
        axes.plot([percent(p) for p in line], [p.peak_bytes / MIB for p in line], "-o", color=LINE, ms=4, lw=1.6)
        axes.plot(
            [percent(p) for p in others.values()], [p.peak_bytes / MIB for p in others.values()], "s", color=INK, ms=4
        )
        axes.set_ylim(bottom=0)
        name_points(axes, ({"lowtide": line[len(line) // 2]} if line else {}) | dict(others))
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("extra CPU time of a step, % of plain")
        axes.set_ylabel("peak of a step, MiB (parameters left out)")
        axes.grid(color=FAINT, lw=0.4)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def coordinates(points: Iterable[Point]) -> tuple[list[float], list[float]]:
    """Extra time in percent, and peaks in MiB."""
    points = list(points)
    return [percent(point) for point in points], [point.peak_bytes / MIB for point in points]


def percent(point: Point) -> float:
    """Extra time in percent."""
    return 100 * (point.ratio - 1)


def name_points(axes: Any, points: Mapping[str, Point]) -> None:
    """Write each name beside its point: above it, or below where another name is, and inwards at the right."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    named: list[tuple[float, float]] = []
    for name, point in points.items():
        x, y = percent(point), point.peak_bytes / MIB
        at = (x - left) / (right - left), (y - bottom) / (top - bottom)
        crowded = any(abs(at[0] - other[0]) < 0.3 and abs(at[1] - other[1]) < 0.05 for other in named)
        named.append(at)
        axes.annotate(
            name,
            (x, y),
            xytext=(-5 if at[0] > 0.7 else 5, -11 if crowded else 5),
            textcoords="offset points",
            ha="right" if at[0] > 0.7 else "left",
            color=LINE if name == "lowtide" else INK,
            fontsize=8,
        )
