"""Whether a step fits, as tables: what fills the memory, and what fits, fastest first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lowtide.reports.terminal import bar, text_of
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.estimation import Estimate, Fit
    from lowtide.estimation.trials import Option

STYLES = {"fits": "bold green", "may fit": "bold yellow", "does not fit": "bold red"}
SHOWN = 8
"""Options in the table; --json has all."""


def fit_text(fit: Fit) -> str:
    """``fit`` as plain text."""
    return text_of(render_fit(fit))


def render_fit(fit: Fit, options: bool = False) -> RenderableType:
    """The verdict, the breakdown, the options where they are needed or asked for, and what the numbers assume."""
    parts: list[RenderableType] = [heading(fit), Text(), render_kinds(fit.estimate)]
    if options or not fit.fits:
        parts += [Text(), _choice(fit)]
    return Group(*parts, Text(), *notes(fit.assumptions))


def heading(fit: Fit) -> Text:
    """What was asked, and the answer."""
    estimate = fit.estimate
    text = Text(f"{fit.workload} on {estimate.hardware}: {estimate.setup.text}\n", style="bold")
    text.append(estimate.verdict, style=STYLES[estimate.verdict])
    text.append(
        f": {format_bytes(estimate.low_bytes)} to {format_bytes(estimate.high_bytes)} needed, "
        f"{format_bytes(estimate.memory_bytes)} there\n"
        f"{format_bytes(estimate.peak_bytes)} of tensors at the peak, {estimate.peak_where}\n"
        f"{pace(estimate)}",
        style="not bold",
    )
    return text


def pace(estimate: Estimate) -> str:
    """Time of a step and how many samples or tokens a second."""
    rate = estimate.samples_per_second
    length = estimate.setup.length
    amount = f"{rate * length:,.0f} tokens/s" if length else f"{rate:,.1f} samples/s"
    return f"{format_seconds(estimate.step_seconds)} a step, {amount}"


def render_kinds(estimate: Estimate) -> Table:
    """What fills the peak, with bars of the memory there is."""
    most = max(estimate.memory_bytes, estimate.peak_bytes)
    table = _table("at the peak", "bytes", "share", "")
    for kind, size in estimate.kinds:
        share = f"{100 * size / max(1, estimate.peak_bytes):.1f} %"
        table.add_row(kind, format_bytes(size), share, Text(bar(size / most), style="cyan"))
    table.add_row(
        "there is", format_bytes(estimate.memory_bytes), "", Text(bar(estimate.memory_bytes / most), style="dim")
    )
    return table


def _choice(fit: Fit) -> RenderableType:
    if fit.options:
        return render_options("what fits, fastest first", fit.options[:SHOWN], fit.estimate)
    nearest = fit.nearest
    return Text(
        f"Nothing that was tried fits. Nearest: {nearest.name}, {format_bytes(nearest.estimate.high_bytes)}. "
        "A smaller model or a shorter sequence, LoRA (--lora 16), or hardware with more memory would help."
    )


def render_options(title: str, options: Iterable[Option], plain: Estimate) -> Table:
    """Options with their bytes, their time for each sample as a ratio to ``plain``, and whether results change."""
    table = _table(title, "peak", "of memory", "time", "results")
    for option in options:
        estimate = option.estimate
        table.add_row(
            option.name,
            format_bytes(estimate.peak_bytes),
            Text(f"{100 * estimate.high_bytes / estimate.memory_bytes:.0f} %", style=STYLES[estimate.verdict]),
            f"×{estimate.device_seconds / plain.device_seconds:.2f}",
            "the same" if option.exact else "differ",
        )
    return table


def notes(texts: Iterable[str]) -> list[RenderableType]:
    """Assumptions, one a line."""
    return [Text("assumed", style="dim"), *(Padding(Text(f"- {text}", style="dim"), (0, 0, 0, 2)) for text in texts)]


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold", max_width=44)
    for heading_ in others:
        table.add_column(heading_, justify="right" if heading_ else "left", no_wrap=True)
    return table
