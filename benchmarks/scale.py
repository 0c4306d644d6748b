"""How fast simulate is on a large graph, and how long a fake trace of a large model takes.

python -m benchmarks.prediction --scale            (--large adds a model of 70B parameters)
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import lowtide
from benchmarks.handmade import lstm
from lowtide.hand import plan_of
from lowtide.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Scale:
    """How long one of the tools took on what; `per_minute` calls, `memory_bytes` the process's most."""

    what: str
    operations: int
    seconds: float
    memory_bytes: int = 0

    @property
    def per_minute(self) -> float:
        return 60 / self.seconds


def simulation_scale(operations: int = 5000) -> list[Scale]:
    """Seconds of one call of `simulate` on a graph of about so many operations, by policy."""
    per_step = len(recurrent_graph(8).ops) / 8
    graph = recurrent_graph(round(operations / per_step))
    hand = lowtide.policies
    policies = {
        "recompute_all": hand.recompute_all,
        "keep_matmuls": hand.keep_matmuls,
        "segments": hand.segments("cells.*"),
    }
    found = []
    for name, policy in policies.items():
        plan = plan_of(graph, policy)
        chosen = frozenset(i for i, op in graph.forward_ops() if op.site in plan.recompute)
        seconds = fastest(lambda chosen=chosen: lowtide.simulate(graph, chosen, trail=False))  # type: ignore[misc]
        found.append(Scale(f"simulate, {name}", len(graph.ops), seconds))
    return found


def recurrent_graph(steps: int) -> lowtide.StepGraph:
    """A graph with many small operations a step."""
    model = lstm(steps)
    return lowtide.trace(model.forward, model=model.model, repeats=0)


def fastest(call: Callable[[], object], repeats: int = 9) -> float:
    """The least CPU seconds of several calls."""
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return min(seconds)


LLAMAS: dict[str, dict[str, Any]] = {
    "7B": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def llama_scale(size: str) -> Scale:
    """Trace a Llama of that size on fake tensors: bfloat16, one sequence of 2048, AdamW's states counted."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMAS[size])
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode():
        model = LlamaForCausalLM(config)
        tokens = torch.randint(100, (1, 2048))

    def step() -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    begin = time.process_time()
    graph = lowtide.trace(step, model=model, fake=True, optimizer="adamw")
    seconds = time.process_time() - begin
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Scale(f"fake trace, Llama {size}", len(graph.ops), seconds, most)


def in_own_process(size: str) -> Scale:
    """`llama_scale` in a process of its own, whose memory is nobody else's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(llama_scale, (size,))


def render_scale(found: Sequence[Scale]) -> Table:
    """Lay out how fast the tools are."""
    table = Table(title="How fast the tools are", caption="CPU seconds, one thread")
    table.add_column("what", no_wrap=True)
    for heading in ("operations", "time", "calls a minute", "process memory"):
        table.add_column(heading, justify="right")
    for one in found:
        memory = format_bytes(one.memory_bytes) if one.memory_bytes else ""
        table.add_row(one.what, f"{one.operations:,}", format_seconds(one.seconds), f"{one.per_minute:,.0f}", memory)
    return table
