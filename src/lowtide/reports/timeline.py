"""A timeline as text: its costs, and the course of its bytes in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.simulation import Timeline

COLUMNS = 72
LEVELS = "▁▂▃▄▅▆▇█"


def timeline_text(timeline: Timeline) -> str:
    """``timeline`` as a short table."""
    lines = [
        f"peak       {format_bytes(timeline.peak_bytes):<9}  {timeline.peak_where}",
        f"step       {format_seconds(timeline.step_seconds)}",
        f"recompute  {_recomputed(timeline)}",
    ]
    if timeline.highs:
        lines.append(f"bytes      {course(timeline.highs)}")
    return "\n".join(lines)


def course(highs: Sequence[int], columns: int = COLUMNS) -> str:
    """The most bytes of each part of the step as one line of bars; full height is the most of all.

    >>> course([0, 4, 8, 4])
    '▁▅█▅'
    """
    columns = min(columns, len(highs))
    parts = [highs[i * len(highs) // columns : (i + 1) * len(highs) // columns] for i in range(columns)]
    top = max(1, *highs)
    return "".join(LEVELS[min(len(LEVELS) - 1, max(part) * len(LEVELS) // top)] for part in parts)


def _recomputed(timeline: Timeline) -> str:
    if not timeline.replayed:
        return "nothing"
    seconds = format_seconds(timeline.recompute_seconds)
    return f"{seconds:<9}  {timeline.replayed} operations run again"
