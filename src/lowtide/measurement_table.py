"""A measurement as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.measured import Measurement, Row


def render(measurement: Measurement) -> RenderableType:
    """Lay the rows out, predictions beside them; under them what differs and what failed."""
    predicted = any(row.predicted_peak_bytes is not None for row in measurement.rows)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("peak", "step"):
        headings = (name, "to plain", "predicted") if predicted else (name, "to plain")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("results", no_wrap=True)
    for row in measurement.rows:
        table.add_row(row.name, *_bytes(row, predicted), *_seconds(row, predicted), _results(row))
    return Group(table, Text("\n".join(["", *_notes(measurement)])))


def _bytes(row: Row, predicted: bool) -> list[str]:
    if row.failure:
        return [""] * (2 + predicted)
    foretold = [format_bytes(row.predicted_peak_bytes) if row.predicted_peak_bytes else ""] if predicted else []
    return [format_bytes(row.peak_bytes), _ratio(row.peak_ratio), *foretold]


def _seconds(row: Row, predicted: bool) -> list[str]:
    if row.failure:
        return [""] * (2 + predicted)
    foretold = [format_seconds(row.predicted_seconds) if row.predicted_seconds else ""] if predicted else []
    return [format_seconds(row.step_seconds), _ratio(row.seconds_ratio), *foretold]


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"×{ratio:.2f}"


def _results(row: Row) -> Text:
    if row.failure:
        return Text("failed", style="red")
    if row.exact is None:
        return Text("not compared")
    return Text("exact") if row.exact else Text("differ", style="red")


def _notes(measurement: Measurement) -> list[str]:
    """What the columns are, then what went wrong."""
    clock = "CPU seconds" if measurement.device == "cpu" else "elapsed seconds"
    threads = f", {measurement.threads} thread{'s' * (measurement.threads > 1)}" if clock[0] == "C" else ""
    lines = [
        f"peak: {format_bytes(measurement.resident_bytes)} of it is there all the time",
        f"step: {clock} on {measurement.device}{threads}, median of {measurement.rounds} rounds",
    ]
    lines += [f"{row.name} differs: {row.difference}" for row in measurement.rows if row.difference]
    lines += [f"{row.name} failed: {row.failure}" for row in measurement.rows if row.failure]
    names = measurement.irreproducible
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"not compared, as the plain step does not repeat it: {', '.join(names[:3])}{more}")
    return lines
