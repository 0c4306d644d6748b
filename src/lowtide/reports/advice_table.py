"""Advice as a text with tables: what fills the memory, each remedy alone, what to do, what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.reports.fit_table import heading, notes, render_kinds, render_options
from lowtide.reports.terminal import text_of
from lowtide.units import format_seconds

if TYPE_CHECKING:
    from lowtide.advice import Advice, Costs
    from lowtide.estimation.limits import Limit

SHOWN = 5
KILOWATT_HOUR = 3.6e6


def advice_text(advice: Advice) -> str:
    """``advice`` as plain text."""
    return text_of(render_advice(advice))


def render_advice(advice: Advice) -> RenderableType:
    """Everything, the answer first."""
    plain = advice.fit.estimate
    parts: list[RenderableType] = [
        heading(advice.fit),
        Text(),
        Text(advice.verdict, style="bold"),
        Text(advice.diagnosis),
        Text(),
        render_kinds(plain),
        Text(),
        render_options("each alone", [advice.fit.asked, *advice.alone], plain),
    ]
    if advice.fit.options:
        parts += [Text(), render_options("what fits, fastest first", advice.fit.options[:SHOWN], plain)]
    parts += [Text(), render_costs(advice.costs)]
    if advice.limits:
        parts += [Text(), render_limits(advice.limits)]
    return Group(*parts, Text(), *notes(advice.fit.assumptions))


def render_costs(costs: Costs) -> Table:
    """Time, arithmetic and energy, for each step and for the run."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row(
        "step", f"{format_seconds(costs.step_seconds)}, {format_seconds(costs.extra_seconds)} of it recomputation"
    )
    table.add_row("throughput", f"×{costs.throughput:.2f} of the step as asked")
    table.add_row("recomputed", f"{costs.extra_flops / 1e12:,.3g} Tflop a step")
    if costs.step_joules:
        table.add_row("energy", f"{costs.step_joules:,.3g} J a step, {costs.extra_joules:,.3g} J of it recomputation")
    if costs.steps:
        energy = f", {costs.run_joules / KILOWATT_HOUR:,.3g} kWh" if costs.step_joules else ""
        table.add_row(f"{costs.steps:,} steps", f"{format_seconds(costs.run_seconds)}{energy}")
    return table


def render_limits(limits: tuple[Limit, ...]) -> Table:
    """How far batch and length can grow."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("largest that fits")
    table.add_column("keeping all", justify="right")
    table.add_column("checkpointing", justify="right")
    for one in limits:
        table.add_row(one.what, *(f"{value:,}" if value else "none" for value in (one.plain, one.checkpointed)))
    return table
