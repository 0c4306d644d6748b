"""What each way to checkpoint makes of memory and time, on the two models of the design's table.

    python -m benchmarks.engine

Peaks are exact: the allocator's own events of one step, with activations, gradients and temporaries in them
and parameters and the batch left out. Times are CPU times of whole steps on one thread, contenders in turn,
medians of per-round ratios to plain.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.contenders import engine_contenders
from benchmarks.models import Workload, gelu_gpt, small_gelu_gpt, small_swiglu_lm, swiglu_lm
from benchmarks.race import Row, race
from lowtide.units import format_bytes

MODELS = {"gpt": gelu_gpt, "lm": swiglu_lm}
QUICK_MODELS = {"gpt": small_gelu_gpt, "lm": small_swiglu_lm}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments`, by default those of the command line, and print the tables."""
    options = parser().parse_args(arguments)
    console = Console()
    models = QUICK_MODELS if options.quick else MODELS
    for name in models if options.model == "all" else [options.model]:
        workload = models[name]()
        rounds = track(range(options.rounds), name, console=Console(stderr=True), disable=options.json, transient=True)
        rows = race(workload, engine_contenders(workload.pattern), rounds, options.steps)
        if options.json:
            print(json.dumps({"model": workload.name, "rows": [asdict(row) for row in rows]}))
        else:
            console.print(render(workload, rows))


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--model", choices=[*MODELS, "all"], default="all")
    made.add_argument("--rounds", type=int, default=7, help="rounds, each contender once in each")
    made.add_argument("--steps", type=int, default=1, help="steps of a contender in a round")
    made.add_argument("--quick", action="store_true", help="small models of the same kinds")
    made.add_argument("--json", action="store_true", help="print one JSON object a model")
    return made


def render(workload: Workload, rows: Sequence[Row]) -> Table:
    """Lay the rows out."""
    plain = rows[0].memory
    table = Table(
        title=workload.name,
        caption="peak: activations, gradients, temporaries; held: left by forward for backward",
    )
    table.add_column("contender", no_wrap=True)
    for heading in ("peak", "peak ratio", "held", "forward", "backward", "step time", "s a step"):
        table.add_column(heading, justify="right")
    table.add_column("step")
    for row in rows:
        figures = [
            format_bytes(row.memory.peak_bytes),
            f"{row.memory.peak_bytes / plain.peak_bytes:.2f}",
            format_bytes(row.memory.held_bytes),
            f"{row.forward_ratio:.2f}",
            f"{row.backward_ratio:.2f}",
            f"{row.step_ratio:.3f}",
            f"{row.step_seconds:.3f}",
        ]
        table.add_row(row.name, *(["-"] * len(figures) if row.failure else figures), row.exact)
    return table


if __name__ == "__main__":
    main()
