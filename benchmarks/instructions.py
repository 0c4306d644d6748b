"""What bookkeeping costs on the host in instructions: the repeatable second opinion to host_cost.

    python -m benchmarks.instructions --model tiny

Each contender runs alone under valgrind, once for a few known steps and once for some more; the difference is
what these took. The garbage collector is off, so that the same steps always take the same instructions, nearly.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.contenders import host_cost_contenders
from benchmarks.host_cost import MODELS
from benchmarks.race import SEED, STEPS_TO_KNOW, forward

FEW, MORE = 1, {"tiny": 9, "medium": 3, "resnet": 3}
VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments`, by default those of the command line, and print the table."""
    options = parser().parse_args(arguments)
    if options.steps:
        take_steps(options.model, options.contender[0], options.steps)
        return
    if shutil.which(VALGRIND[0]) is None:
        sys.exit("valgrind is not installed: it counts the instructions")
    names = [one.name for one in host_cost_contenders("")]
    names = [name for name in names if not options.contender or name in options.contender or name == "plain"]
    rounds = track(names, options.model, console=Console(stderr=True), disable=options.json, transient=True)
    counts = {name: instructions(options.model, name) for name in rounds}
    if options.json:
        print(json.dumps({"model": options.model, "instructions": counts}))
        return
    table = Table(title=f"{options.model}: instructions a step", caption="forward and backward, ratio to plain")
    for heading in ("contender", "millions", "ratio"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for name, count in counts.items():
        table.add_row(name, f"{count / 1e6:.1f}", f"{count / counts['plain']:.2f}")
    Console().print(table)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--model", choices=[*MODELS], default="tiny")
    made.add_argument("--contender", action="append", default=[], help="only this one and plain; may be repeated")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)  # the run that is counted
    return made


def instructions(model: str, name: str) -> float:
    """How many instructions a step takes."""
    few, more = FEW, MORE[model]
    return (counted(model, name, more) - counted(model, name, few)) / (more - few)


def counted(model: str, name: str, steps: int) -> int:
    """The instructions of a process that takes `steps` steps."""
    step = [
        sys.executable,
        "-m",
        "benchmarks.instructions",
        "--model",
        model,
        "--contender",
        name,
        "--steps",
        str(steps),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    ended = subprocess.run([*VALGRIND, *step], capture_output=True, check=False, text=True, env=environment)
    found = re.search(r"I *refs: *([\d,]+)", ended.stderr)
    if ended.returncode or found is None:
        sys.exit(f"{name} failed under valgrind:\n{ended.stderr[-2000:]}")
    return int(found[1].replace(",", ""))


def take_steps(model: str, name: str, steps: int) -> None:
    """Make the step known, and take it `steps` times more."""
    torch.set_num_threads(1)
    workload = MODELS[model]()
    (contender,) = (one for one in host_cost_contenders(workload.pattern) if one.name == name)
    gc.collect()
    gc.disable()
    with contender.with_one_recording().on(workload.blocks) as around:
        for _ in range(STEPS_TO_KNOW + steps):
            workload.model.zero_grad(set_to_none=True)
            torch.manual_seed(SEED)
            torch.autograd.backward(forward(workload, around()))


if __name__ == "__main__":
    main()
