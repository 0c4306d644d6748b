"""Show how the contenders fared: a table to read, a dictionary to store, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from lowtide.demo.training import UNTIMED_STEPS, Outcome, Settings
from lowtide.units import format_bytes

SCHEMA = 1


def render_table(settings: Settings, outcomes: Sequence[Outcome]) -> Table:
    """Lay the outcomes out, one row a contender, in 80 columns."""
    shape = settings.shape
    table = Table(
        title=f"GPT, {shape.blocks} blocks of width {shape.width}, {settings.batch} × {shape.length} tokens",
        caption=describe_columns(settings),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("contender")
    for heading in ("peak", "to\nplain", "held", "CPU\ntime", "tokens\n/ s", "last\nloss"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("gradients", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            outcome.name,
            format_bytes(outcome.memory.peak_bytes),
            change(outcome.peak_ratio - 1),
            change(-outcome.held_saved),
            f"×{outcome.time_ratio:.2f}",
            f"{outcome.tokens_per_second:.0f}",
            f"{outcome.final_loss:.4f}",
            "identical" if outcome.same_gradients and outcome.same_losses else "[red]differ[/red]",
        )
    return table


def change(fraction: float) -> str:
    """Return a change in whole per cent with its sign, "0%" where there is none."""
    return f"{fraction:+.0%}" if round(100 * fraction) else "0%"


def describe_columns(settings: Settings) -> str:
    """Say what each column counts."""
    return (
        "peak: most bytes live at once in a forward and backward, exact: activations,\n"
        "  gradients and temporaries, but not parameters, optimizer states and batch\n"
        "held: bytes of activations at the end of forward, against plain\n"
        "CPU time: of whole steps, against plain in the same round,\n"
        f"  median of {settings.steps - UNTIMED_STEPS} rounds\n"
        f"gradients: all of them, and the loss, in all {settings.steps} steps, bit for bit"
    )


def as_record(settings: Settings, outcomes: Sequence[Outcome], threads: int) -> dict[str, Any]:
    """Return everything measured as plain values; bytes and ratios are not rounded."""
    shape = settings.shape
    return {
        "schema": SCHEMA,
        "threads": threads,
        "steps": settings.steps,
        "tokens_per_step": settings.tokens,
        "model": {
            "blocks": shape.blocks,
            "width": shape.width,
            "length": shape.length,
            "dropout": shape.dropout,
        },
        "peak_includes": ["activations", "gradients", "temporaries"],
        "peak_excludes": ["parameters", "optimizer states", "batch"],
        "contenders": [
            {
                "name": outcome.name,
                "peak_bytes": outcome.memory.peak_bytes,
                "held_bytes": outcome.memory.held_bytes,
                "peak_ratio": outcome.peak_ratio,
                "held_saved": outcome.held_saved,
                "cpu_time_ratio": outcome.time_ratio,
                "tokens_per_second": outcome.tokens_per_second,
                "final_loss": outcome.final_loss,
                "same_losses": outcome.same_losses,
                "same_gradients": outcome.same_gradients,
            }
            for outcome in outcomes
        ],
    }


def unequal(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the names of those whose losses or gradients are not the plain ones bit for bit."""
    return [outcome.name for outcome in outcomes if not (outcome.same_losses and outcome.same_gradients)]
