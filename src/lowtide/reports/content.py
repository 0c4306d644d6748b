"""What a report says: values alone, from which a page, a text or JSON is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lowtide.course import KINDS, Moment
from lowtide.memory_table import MemoryTable
from lowtide.plan import Prediction

SCHEMA = 1


@dataclass(frozen=True)
class Point:
    """One way to run the step, as peak and time."""

    name: str
    peak_bytes: int
    ratio: float
    """Seconds as a ratio to the step that keeps everything."""
    group: str
    """``frontier``, ``by hand`` or ``this plan``."""


@dataclass(frozen=True)
class Cell:
    """What happens to the results of one operation in one block."""

    block: int
    op: str
    bytes: int
    recomputed: float
    """The part of the bytes that is recomputed."""


@dataclass(frozen=True)
class Content:
    """Everything in a report."""

    title: str
    plan_text: str
    prediction: Prediction
    budget_bytes: int | None
    plain: tuple[Moment, ...]
    planned: tuple[Moment, ...]
    peak_where: str
    """Of the step under the plan."""
    points: tuple[Point, ...]
    cells: tuple[Cell, ...]
    plain_table: MemoryTable
    planned_table: MemoryTable
    assumptions: tuple[str, ...]

    @property
    def modules(self) -> tuple[tuple[str, int, int], ...]:
        """Module, and what it holds at the peak without and with the plan; the largest first."""
        before, after = dict(self.plain_table.modules), dict(self.planned_table.modules)
        names = sorted({*before, *after}, key=lambda name: (-max(before.get(name, 0), after.get(name, 0)), name))
        return tuple((name, before.get(name, 0), after.get(name, 0)) for name in names)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "kind": "lowtide.Report",
            "schema": SCHEMA,
            "title": self.title,
            "budget_bytes": self.budget_bytes,
            "prediction": asdict(self.prediction),
            "peak_where": self.peak_where,
            "kinds": list(KINDS),
            "plain": [[moment.seconds, *moment.bytes] for moment in self.plain],
            "planned": [[moment.seconds, *moment.bytes] for moment in self.planned],
            "points": [asdict(point) for point in self.points],
            "blocks": [asdict(cell) for cell in self.cells],
            "modules": [list(row) for row in self.modules],
            "assumptions": list(self.assumptions),
        }
