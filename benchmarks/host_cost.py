"""What bookkeeping costs on the host: CPU time over the plain step, forward and backward apart and together.

    python -m benchmarks.host_cost --model tiny

On the tiny model nearly all time is the host's, so that its ratios are upper bounds; the other two say what
is left of them on models of ordinary size with small inputs. One thread, contenders in turn, medians of
per-round ratios.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.contenders import host_cost_contenders
from benchmarks.models import Workload, medium_gpt, resnet50, tiny_gpt
from benchmarks.race import Row, count_forward_ops, race

MODELS = {"tiny": tiny_gpt, "medium": medium_gpt, "resnet": resnet50}
STEPS = {"tiny": 20, "medium": 1, "resnet": 2}
"""Steps a round: enough that the clock's own grain and one garbage collection weigh little."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments`, by default those of the command line, and print the tables."""
    options = parser().parse_args(arguments)
    console = Console()
    for name in MODELS if options.model == "all" else [options.model]:
        workload = MODELS[name]()
        ops = count_forward_ops(workload)
        rounds = track(range(options.rounds), name, console=Console(stderr=True), disable=options.json, transient=True)
        rows = race(workload, host_cost_contenders(workload.pattern), rounds, options.steps or STEPS[name])
        if options.json:
            print(json.dumps({"model": workload.name, "forward_ops": ops, "rows": [asdict(row) for row in rows]}))
        else:
            console.print(render(workload, ops, rows))


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.host_cost", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--model", choices=[*MODELS, "all"], default="tiny")
    made.add_argument("--rounds", type=int, default=9, help="rounds, each contender once in each")
    made.add_argument(
        "--steps", type=int, default=0, help="steps of a contender in a round; by default as the model needs"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object a model")
    return made


def render(workload: Workload, ops: int, rows: Sequence[Row]) -> Table:
    """Lay the rows out; extra microseconds an op are a step's extra time over its forward operations."""
    table = Table(title=f"{workload.name}: {ops} forward operations", caption="CPU time, ratios to plain")
    table.add_column("contender", no_wrap=True)
    for heading in ("forward", "backward", "together", "ms a step", "extra us an op"):
        table.add_column(heading, justify="right")
    table.add_column("step")
    for row in rows:
        extra = (row.step_ratio - 1) * rows[0].step_seconds / ops * 1e6
        figures = [
            f"{row.forward_ratio:.2f}",
            f"{row.backward_ratio:.2f}",
            f"{row.step_ratio:.2f}",
            f"{row.step_seconds * 1e3:.2f}",
            f"{extra:.1f}",
        ]
        table.add_row(row.name, *(["-"] * len(figures) if row.failure else figures), row.exact)
    return table


if __name__ == "__main__":
    main()
