"""How many bytes the tape itself takes: Python's memory of one recorded step, less what it keeps of tensors.

    python -m benchmarks.tape_bytes

A chain of cheap operations on tiny tensors, recorded (the first steps) and followed (all later ones), under a policy
that drops everything, so that each operation has its recipe and each saved tensor its ticket.
"""

from __future__ import annotations

import argparse
import gc
import json
import tracemalloc
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import lowtide
from benchmarks.race import STEPS_TO_KNOW

WARM = {"recorded": 1, "followed": STEPS_TO_KNOW}
"""Steps before the one that is measured."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments`, by default those of the command line, and print the table."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.tape_bytes", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--operations", type=int, default=5000)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    options = made.parse_args(arguments)
    found = {kind: measure(options.operations, warm) for kind, warm in WARM.items()}
    if options.json:
        print(json.dumps({"operations": options.operations, "bytes": found}))
        return
    table = Table(
        title=f"the tape of {options.operations} operations", caption="Python's memory, plain step subtracted"
    )
    for heading in ("step", "MB", "bytes an operation"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for kind, count in found.items():
        table.add_row(kind, f"{count / 1e6:.2f}", f"{count / options.operations:.0f}")
    Console().print(table)


def measure(operations: int, warm: int) -> int:
    """The bytes that a step's tape takes between forward and backward, after `warm` steps."""
    leaf = torch.ones(2, requires_grad=True)
    recording = lowtide.record(policy=lowtide.policies.recompute_all)

    def recorded() -> Tensor:
        with recording:
            return chain(leaf, operations)

    for _ in range(warm):
        torch.autograd.backward(recorded())
    return held(recorded) - held(lambda: chain(leaf, operations))


def chain(leaf: Tensor, operations: int) -> Tensor:
    """`operations` operations in a row, each of which saves its result."""
    x = leaf
    for _ in range(operations - 1):
        x = x.sigmoid()
    return x.sum()


def held(forward: Callable[[], Tensor]) -> int:
    """Python's memory that a forward pass leaves behind while its loss is there."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        loss = forward()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        torch.autograd.backward(loss)
    finally:
        tracemalloc.stop()
    return after - before


if __name__ == "__main__":
    main()
