"""The frontier as a table: peak and time of each plan, with bars."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.reports.content import Point
from lowtide.reports.terminal import bar
from lowtide.units import format_bytes


def render_frontier(name: str, points: Sequence[Point]) -> RenderableType:
    """The best plans from most memory to least, then the hand policies."""
    most = max((point.peak_bytes for point in points), default=1)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("plan", overflow="fold", max_width=24)
    for heading in ("peak", "of plain", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for point in points:
        style = "cyan" if point.group == "frontier" else "yellow"
        table.add_row(
            "planned" if point.group == "frontier" else point.name,
            format_bytes(point.peak_bytes),
            f"{100 * point.peak_bytes / most:.1f} %",
            f"×{point.ratio:.3f}",
            Text(bar(point.peak_bytes / most), style=style),
        )
    return Group(Text(name, style="bold"), Text(), table)
