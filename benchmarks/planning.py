"""How long planning takes for large transformers, and how close to its bound it comes.

    python -m benchmarks.planning --model 7B --model 70B

Each Llama is traced on fake tensors in a process of its own: bfloat16, sequences of 2048, AdamW, seconds of an H100.
Then one budget is planned for, a third of the way from the least that a plan fits to the peak of keeping everything.
The command fails where that takes longer, or the process more memory, than it may.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import lowtide
from benchmarks.scale import LLAMAS
from lowtide.planning import Planner
from lowtide.units import format_bytes, format_seconds

MODELS: dict[str, dict[str, Any]] = {
    **LLAMAS,
    "405B": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
ALLOWED_SECONDS = {32: 2.0, 80: 5.0, 126: 10.0}
"""Of CPU time, by blocks."""
ALLOWED_BYTES = 2**30
SEQUENCES = 16


@dataclass(frozen=True)
class Planned:
    """CPU seconds of planning alone; `memory_bytes` is the most that the process had, its trace included."""

    model: str
    blocks: int
    operations: int
    seconds: float
    memory_bytes: int
    gap: float
    solver: str

    def failures(self) -> Iterator[str]:
        """What is beyond what is allowed."""
        allowed = ALLOWED_SECONDS.get(self.blocks, float("inf"))
        if self.seconds > allowed:
            yield f"{self.model}: planning took {format_seconds(self.seconds)}, allowed are {format_seconds(allowed)}"
        if self.memory_bytes > ALLOWED_BYTES:
            more = format_bytes(self.memory_bytes - ALLOWED_BYTES)
            yield f"{self.model}: the process had {more} more than it may"


def plan_llama(size: str) -> Planned:
    """Trace and plan for one of `MODELS`."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**MODELS[size])
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode():
        model = LlamaForCausalLM(config)
        tokens = torch.randint(100, (SEQUENCES, 2048))

    def step() -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    graph = lowtide.trace(step, model=model, fake=True, optimizer="adamw", hardware="h100")
    return planned(f"Llama {size}", config.num_hidden_layers, graph)


def planned(name: str, blocks: int, graph: lowtide.StepGraph) -> Planned:
    """Plan for a budget that leaves something to decide."""
    planner = Planner(graph)
    budget = (2 * planner.lowest.peak + planner.plain.peak) // 3
    del planner
    begin = time.process_time()
    plan = lowtide.solve(graph, budget)
    seconds = time.process_time() - begin
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert plan.prediction is not None
    return Planned(name, blocks, len(graph.ops), seconds, most, plan.prediction.gap, plan.solver)


def in_own_process(size: str) -> Planned:
    """`plan_llama` in a process whose memory is nobody else's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(plan_llama, (size,))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments`, by default those of the command line, and print a row a model; exit 1 if one is too slow."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--model", choices=[*MODELS], action="append", help="may be given again; default: all")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    options = made.parse_args(arguments)
    found = [in_own_process(size) for size in options.model or MODELS]
    failures = [failure for one in found for failure in one.failures()]
    if options.json:
        print(json.dumps({"rows": [asdict(one) for one in found], "failures": failures}))
    else:
        Console().print(render(found), *failures, sep="\n")
    if failures:
        sys.exit(1)


def render(found: Sequence[Planned]) -> Table:
    """Lay out a row a model."""
    table = Table(title="Planning alone, CPU seconds on one thread")
    for heading in ("model", "blocks", "operations", "time", "allowed", "process memory", "above the bound"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for one in found:
        allowed = ALLOWED_SECONDS.get(one.blocks)
        table.add_row(
            one.model,
            str(one.blocks),
            f"{one.operations:,}",
            format_seconds(one.seconds),
            "" if allowed is None else format_seconds(allowed),
            format_bytes(one.memory_bytes),
            f"{one.gap:.2%}",
        )
    return table


if __name__ == "__main__":
    main()
