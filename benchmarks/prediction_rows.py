"""What was foretold beside what was measured, as rows, tables and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from lowtide.units import format_bytes, format_seconds

BYTES_AIM, SECONDS_AIM = 0.01, 0.10


@dataclass(frozen=True)
class Row:
    """One model under one policy. Bytes are peaks with all that is resident; seconds are those of a step.

    `fake_bytes` is foretold from a trace on fake tensors; `fake_failure` says why there is none. Ratios are to
    the plain step, and `noise` is how far the plain step is off itself, or half of the rounds are off their median.
    Seconds and ratios are 0 where time was not measured.
    """

    model: str
    policy: str
    accumulates: bool = False
    measured_bytes: int = 0
    predicted_bytes: int = 0
    fake_bytes: int = 0
    measured_seconds: float = 0.0
    predicted_seconds: float = 0.0
    measured_ratio: float = 0.0
    predicted_ratio: float = 0.0
    noise: float = 0.0
    failure: str = ""
    fake_failure: str = ""

    @property
    def bytes_error(self) -> float:
        return off(self.predicted_bytes, self.measured_bytes)

    @property
    def fake_error(self) -> float:
        return 0.0 if self.fake_failure else off(self.fake_bytes, self.measured_bytes)

    @property
    def seconds_error(self) -> float:
        return off(self.predicted_seconds, self.measured_seconds)

    @property
    def ratio_error(self) -> float:
        return off(self.predicted_ratio, self.measured_ratio)


def off(predicted: float, measured: float) -> float:
    """How far a prediction is above what was measured, as a fraction; 0 where nothing was."""
    return predicted / measured - 1 if measured else 0.0


def render(title: str, rows: Sequence[Row]) -> Table:
    """Lay the rows of one model out; errors beyond the aims are red."""
    aims = f"aims: bytes within {BYTES_AIM:.0%}, seconds within {SECONDS_AIM:.0%}; x: over the plain step"
    table = Table(title=title, caption=aims)
    table.add_column("policy", no_wrap=True)
    table.add_column("gradients")
    for heading in ("peak", "predicted", "off", "off, fakes", "step CPU s", "predicted", "off", "x", "predicted x"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.failure:
            table.add_row(row.policy, "", row.failure)
            continue
        table.add_row(
            row.policy,
            "added to" if row.accumulates else "new",
            format_bytes(row.measured_bytes),
            format_bytes(row.predicted_bytes),
            marked(row.bytes_error, BYTES_AIM),
            "none" if row.fake_failure else marked(row.fake_error, BYTES_AIM),
            *time_cells(row),
        )
    noise = max((row.noise for row in rows), default=0.0)
    if noise:
        table.caption = f"{aims}\nplain against plain: {noise:.1%}"
    for failure in sorted({row.fake_failure for row in rows} - {""}):
        table.caption = f"{table.caption}\nnone on fakes: {failure}"
    return table


def time_cells(row: Row) -> list[str]:
    """What the table says of a row's time, if that was measured."""
    if not row.measured_seconds:
        return []
    return [
        format_seconds(row.measured_seconds),
        format_seconds(row.predicted_seconds),
        marked(row.seconds_error, SECONDS_AIM),
        f"{row.measured_ratio:.3f}",
        f"{row.predicted_ratio:.3f}",
    ]


def marked(error: float, aim: float) -> str:
    """The error in percent, red where it is beyond the aim."""
    text = f"{error:+.2%}"
    return f"[red]{text}[/red]" if abs(error) > aim else text


HEADINGS = ("model", "peak", "peak, from fakes", "step seconds", "over the plain step", "plain against plain")


def summary_head() -> str:
    """The head of a Markdown table of `summary_line`s."""
    return " | ".join(("", *HEADINGS, "")).strip() + "\n" + "|---" * len(HEADINGS) + "|"


def summary_line(rows: Sequence[Row]) -> str:
    """One model, as Markdown: what is off most, and under which policy."""
    good = [row for row in rows if not row.failure]
    cells = [
        rows[0].model,
        worst_of(good, lambda row: row.bytes_error, 4),
        "none" if any(row.fake_failure for row in good) else worst_of(good, lambda row: row.fake_error, 4),
    ]
    timed = [row for row in good if row.measured_seconds]
    if timed:
        cells += [worst_of(timed, lambda row: row.seconds_error, 1), worst_of(timed, lambda row: row.ratio_error, 1)]
    cells += [f"±{max(row.noise for row in timed):.1%}"] if timed else ["", "", ""]
    return " | ".join(("", *cells, "")).strip()


def worst_of(rows: Sequence[Row], error: Callable[[Row], float], digits: int) -> str:
    """The largest error and its policy."""
    if not rows:
        return "failed"
    worst = max(rows, key=lambda row: abs(error(row)))
    found = error(worst)
    return f"{found:+.{digits}%} ({worst.policy})" if found else "0"


def verdict(rows: Sequence[Row]) -> list[str]:
    """The worst row of each kind of prediction, and how many miss."""
    good = [row for row in rows if not row.failure]
    lines = [f"{len(rows) - len(good)} of {len(rows)} failed"] if len(good) < len(rows) else []
    kinds: list[tuple[str, float, Callable[[Row], float]]] = [
        ("bytes", BYTES_AIM, lambda row: row.bytes_error),
        ("bytes from fakes", BYTES_AIM, lambda row: row.fake_error),
        ("seconds", SECONDS_AIM, lambda row: row.seconds_error),
        ("seconds over plain's", SECONDS_AIM, lambda row: row.ratio_error),
    ]
    for kind, aim, error in kinds:
        worst = max(good, key=lambda row: abs(error(row)), default=None)
        if worst is None:
            continue
        misses = sum(abs(error(row)) > aim for row in good)
        where = f"{worst.model}, {worst.policy}{', gradients added to' if worst.accumulates else ''}"
        lines.append(f"{kind}: {misses} of {len(good)} rows miss {aim:.0%}; worst {error(worst):+.2%} ({where})")
    return lines
