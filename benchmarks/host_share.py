"""How much of a step of a larger model the bookkeeping takes.

    python -m benchmarks.host_share

The same blocks are built narrow, where a step is hardly more than what the host does: what a policy adds there,
bookkeeping and dispatch of the recomputed operations, is set against the seconds of a plain step of the large model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.models import Workload, gelu_gpt, gpt_workload, swiglu_lm, swiglu_workload
from benchmarks.race import race
from lowtide.demo.contenders import PLAIN, Contender, lowtide_policy, lowtide_segments
from lowtide.demo.model import GPTShape


def narrow_gpt() -> Workload:
    """As many GELU blocks as the large one has."""
    return gpt_workload("narrow", GPTShape(vocabulary=64, length=8, width=16, blocks=6, heads=2), batch=2)


def narrow_lm() -> Workload:
    """As many SwiGLU blocks as the large one has."""
    return swiglu_workload("narrow", GPTShape(vocabulary=64, length=8, width=12, blocks=8, heads=2), batch=2)


MODELS: dict[str, tuple[Callable[[], Workload], Callable[[], Workload]]] = {
    "gpt": (gelu_gpt, narrow_gpt),
    "lm": (swiglu_lm, narrow_lm),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments`, by default those of the command line, and print the table."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.host_share", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--model", choices=[*MODELS], action="append", default=[], help="by default all")
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--json", action="store_true", help="print one JSON object a model")
    options = made.parse_args(arguments)
    table = Table(title="bookkeeping in a step of a larger model")
    for heading in ("model", "policy", "ms more", "ms a plain step", "share"):
        table.add_column(heading, justify="left" if heading in ("model", "policy") else "right")
    for name in options.model or MODELS:
        large, narrow = MODELS[name]
        seconds = race(large(), [PLAIN], range(1), steps=1)[0].step_seconds
        rounds = track(range(options.rounds), name, console=Console(stderr=True), disable=options.json, transient=True)
        found = extra_seconds(narrow(), list(rounds))
        if options.json:
            print(json.dumps({"model": name, "plain_seconds": seconds, "extra_seconds": found}))
        for policy, extra in found.items():
            table.add_row(name, policy, f"{extra * 1e3:.1f}", f"{seconds * 1e3:.0f}", f"{extra / seconds:.2%}")
    if not options.json:
        Console().print(table)


def extra_seconds(narrow: Workload, rounds: Sequence[int]) -> dict[str, float]:
    """CPU seconds that each policy adds to a step."""
    contenders: list[Contender] = [PLAIN, lowtide_policy("keep_matmuls"), lowtide_segments(narrow.pattern, n=1)]
    plain, *rows = race(narrow, contenders, rounds, steps=10)
    return {row.name: (row.step_ratio - 1) * plain.step_seconds for row in rows}


if __name__ == "__main__":
    main()
