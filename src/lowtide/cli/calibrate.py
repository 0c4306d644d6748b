"""`lowtide calibrate`: measure this machine once, plan for it ever after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from lowtide.hardware import Accelerator


def calibrate(
    output: Annotated[Path, typer.Option(help="Where to save the numbers.")] = Path("lowtide-hardware.json"),
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long to measure.")] = 10,
    device: Annotated[str, typer.Option(help="What to measure: cpu, cuda, cuda:1 or mps.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what is saved as one JSON object, no table.")] = False,
) -> None:
    """Measure how fast this machine multiplies matrices, moves memory and starts an op, and save the numbers.

    A CPU is measured with as many threads as PyTorch uses here; set OMP_NUM_THREADS for another number. Close
    what else is busy: the numbers are medians, but a machine that is shared all the time looks slow.
    """
    from rich.console import Console

    from lowtide import calibration, hardware
    from lowtide.errors import LowtideError

    if output.exists() and not force:
        raise LowtideError(f"{output} is there already. --force replaces it, --output names another file.")
    if not output.parent.is_dir():
        raise LowtideError(f"{output.parent} is no folder. Make it first, or name another --output.")
    with Console(stderr=True).status(f"measuring {device} for about {seconds:g} s"):
        measured = calibration.calibrate(seconds, device)
    try:
        hardware.save(measured, output)
    except OSError as error:
        raise LowtideError(f"Cannot write {output}: {error.strerror}.") from error
    if as_json:
        typer.echo(json.dumps(hardware.as_record(measured), indent=2))
    else:
        Console().print(render_table(measured))
        typer.echo(f"saved to {output}")


def render_table(accelerator: Accelerator) -> Table:
    """Lay the numbers out, one row a number, in 80 columns."""
    from rich import box
    from rich.table import Table

    from lowtide.units import format_bytes, format_seconds

    table = Table(
        title=accelerator.name,
        caption=accelerator.source,
        caption_justify="left",
        show_header=False,
        box=box.SIMPLE,
        pad_edge=False,
    )
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_row("memory", format_bytes(accelerator.memory_bytes))
    table.add_row("bandwidth", f"{accelerator.bandwidth / 1e9:,.1f} GB/s")
    for dtype, rate in accelerator.flops.items():
        table.add_row(f"matrix products, {dtype}", f"{rate / 1e9:,.1f} Gflop/s")
    table.add_row("an op on one element", format_seconds(accelerator.launch_seconds))
    table.add_row("usual part of these rates", f"{accelerator.efficiency_flops:.0%}")
    table.add_row("usual part of the bandwidth", f"{accelerator.efficiency_bandwidth:.0%}")
    return table
