"""What lowtide foretells of a step, beside what the step then takes: peak bytes and seconds, over the zoo.

    python -m benchmarks.prediction
    python -m benchmarks.prediction --model llama --model unet --json
    python -m benchmarks.prediction --scale            (how fast planning's tools are; --large adds 70B)

Bytes: the allocator's own events of one step, and what lived before it: parameters, buffers, inputs and, where
gradients accumulate, gradients. Seconds: CPU time of whole steps on one thread, policies in turn, medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import lowtide
from benchmarks.memory import measure_memory
from benchmarks.race import clear, forward
from benchmarks.zoo import SMALL, ZOO, ZooModel, lstm
from lowtide.demo.training import in_turn
from lowtide.hand import plan_of
from lowtide.tape.policy import Policy
from lowtide.units import format_bytes, format_seconds

BYTES_AIM, SECONDS_AIM = 0.01, 0.10
IN_BFLOAT16 = ["vit", "resnet"]
"""Models whose bytes are measured under bfloat16 autocast too; many CPUs emulate it, ten times slower."""


@dataclass(frozen=True)
class Row:
    """One model under one policy. Bytes are peaks with all that is resident; seconds are those of a step.

    `fake_bytes` is foretold from a trace on fake tensors; seconds are 0 where time was not measured.
    """

    model: str
    policy: str
    accumulates: bool = False
    measured_bytes: int = 0
    predicted_bytes: int = 0
    fake_bytes: int = 0
    measured_seconds: float = 0.0
    predicted_seconds: float = 0.0
    failure: str = ""

    @property
    def bytes_error(self) -> float:
        return off(self.predicted_bytes, self.measured_bytes)

    @property
    def fake_error(self) -> float:
        return off(self.fake_bytes, self.measured_bytes)

    @property
    def seconds_error(self) -> float:
        return off(self.predicted_seconds, self.measured_seconds)


def off(predicted: float, measured: float) -> float:
    """How far a prediction is above what was measured, as a fraction; 0 where nothing was."""
    return predicted / measured - 1 if measured else 0.0


def policies_for(model: ZooModel) -> dict[str, Policy]:
    """The policies that a model is tried under, by name."""
    hand = lowtide.policies
    return {
        "keep_all": hand.keep_all,
        "recompute_all": hand.recompute_all,
        "keep_matmuls": hand.keep_matmuls,
        "segments": hand.segments(model.pattern),
        "by_module": hand.by_module(model.mlp, hand.recompute_all),
    }


# ---- measuring ----------------------------------------------------------------------------------------------


def resident_bytes(model: ZooModel) -> int:
    """Bytes that live before a step: parameters, buffers, inputs, and gradients where there are any."""
    gradients = [p.grad for p in model.model.parameters() if p.grad is not None]
    tensors = [*model.model.parameters(), *model.model.buffers(), *model.inputs, *gradients]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def take_step(model: ZooModel, recording: lowtide.Recording) -> None:
    """Forward and backward; gradients are added to what is there."""
    torch.autograd.backward(forward(model, recording))


def measured_peak(model: ZooModel, recording: lowtide.Recording, accumulates: bool) -> int:
    """Peak bytes of one step and all that lived before it; `recording` must be warm."""
    clear(model)
    if accumulates:
        take_step(model, recording)
    before = resident_bytes(model)
    peak = measure_memory(lambda: forward(model, recording), torch.autograd.backward).peak_bytes
    clear(model)
    return before + peak


def measured_seconds(model: ZooModel, recordings: Sequence[lowtide.Recording], rounds: int) -> list[float]:
    """Median CPU seconds of a step under each recording, in turn."""
    seconds: list[list[float]] = [[] for _ in recordings]
    for number in range(rounds):
        for which in in_turn(range(len(recordings)), number):
            clear(model)
            gc.collect()
            begin = time.process_time()
            take_step(model, recordings[which])
            seconds[which].append(time.process_time() - begin)
    clear(model)
    return [median(own) if own else 0.0 for own in seconds]


# ---- foretelling --------------------------------------------------------------------------------------------


def graph_of(
    model: ZooModel, *, fake: bool = False, accumulates: bool = False, repeats: int = 0
) -> lowtide.StepGraph:
    """Trace the model; `repeats` times each operation where it is not 0."""
    clear(model)
    if accumulates:
        torch.autograd.backward(model.forward())
    graph = lowtide.trace(model.forward, model=model.model, fake=fake, repeats=repeats)
    clear(model)
    return graph


def rows_of(model: ZooModel, rounds: int) -> Iterator[Row]:
    """Foretell and measure a model under every policy, with and without gradients that are there before."""
    policies = policies_for(model)
    recordings = {name: lowtide.record(policy) for name, policy in policies.items()}
    failures: dict[str, str] = {}
    for name, recording in recordings.items():
        clear(model)
        try:
            take_step(model, recording)
            take_step(model, recording)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
    running = [name for name in policies if name not in failures]
    graph = graph_of(model, repeats=3 if rounds else 0)
    seconds = dict(
        zip(running, measured_seconds(model, [recordings[name] for name in running], rounds), strict=True)
    )
    for accumulates in (False, True):
        real = graph_of(model, accumulates=True) if accumulates else graph
        fake = graph_of(model, fake=True, accumulates=accumulates)
        for name, policy in policies.items():
            if name in failures:
                yield Row(model.name, name, accumulates, failure=failures[name])
                continue
            timeline = lowtide.simulate(real, plan_of(real, policy), trail=False)
            row = Row(
                model.name,
                name,
                accumulates,
                measured_peak(model, recordings[name], accumulates),
                timeline.peak_bytes,
                lowtide.simulate(fake, plan_of(fake, policy), trail=False).peak_bytes,
            )
            if rounds and not accumulates:
                row = replace(row, measured_seconds=seconds[name], predicted_seconds=timeline.step_seconds)
            yield row


# ---- how fast the tools are ---------------------------------------------------------------------------------


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
    per_step = len(graph_of(lstm(8)).ops) / 8
    graph = graph_of(lstm(round(operations / per_step)))
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
        found.append(
            Scale(
                f"simulate, {name}",
                len(graph.ops),
                fastest(lambda c=chosen: lowtide.simulate(graph, c, trail=False)),
            )
        )
    return found


def fastest(call: Callable[[], object], repeats: int = 9) -> float:
    """The least CPU seconds of several calls."""
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return min(seconds)


LLAMAS = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


def llama_scale(size: str) -> Scale:
    """Trace a Llama of that size on fake tensors: bfloat16, one sequence of 2048, AdamW's states counted."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMAS[size])  # type: ignore[arg-type]
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


# ---- showing ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments`, by default those of the command line, and print the tables."""
    options = parser().parse_args(arguments)
    console = Console()
    if options.scale or options.large:
        found = simulation_scale() + [
            in_own_process(size) for size in LLAMAS if size == "7B" or options.large
        ]
        if options.json:
            print(json.dumps({"scale": [asdict(one) | {"per_minute": one.per_minute} for one in found]}))
        else:
            console.print(render_scale(found))
        return
    rows: list[Row] = []
    for model, rounds in chosen_models(options):
        own = list(rows_of(model, rounds))
        rows += own
        if not options.json:
            console.print(render(model.name, own))
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        console.print("\n".join(verdict(rows)))


def chosen_models(options: argparse.Namespace) -> Iterator[tuple[ZooModel, int]]:
    """Make the models, with how many rounds to time, one at a time, so that one lives at a time."""
    for name in options.model or ZOO:
        yield (ZOO | SMALL)[name]().seeded(), options.rounds
        if options.bfloat16 and name in IN_BFLOAT16:
            yield ZOO[name]().in_bfloat16().seeded(), 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument(
        "--model", choices=[*ZOO, *SMALL], action="append", help="may be given again; default: all"
    )
    made.add_argument("--rounds", type=int, default=7, help="timed rounds; 0 measures bytes alone")
    made.add_argument("--bfloat16", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument(
        "--scale", action="store_true", help="time simulate and the trace of a 7B model instead"
    )
    made.add_argument("--large", action="store_true", help="the same, and a 70B model")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def render(title: str, rows: Sequence[Row]) -> Table:
    """Lay the rows of one model out; errors beyond the aims are red."""
    table = Table(
        title=title, caption=f"aims: bytes within {BYTES_AIM:.0%}, seconds within {SECONDS_AIM:.0%}"
    )
    table.add_column("policy", no_wrap=True)
    table.add_column("gradients")
    for heading in ("measured peak", "predicted", "off", "from fakes, off", "step CPU s", "predicted", "off"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.failure:
            table.add_row(row.policy, "", row.failure)
            continue
        seconds = ["", "", ""]
        if row.measured_seconds:
            seconds = [
                format_seconds(row.measured_seconds),
                format_seconds(row.predicted_seconds),
                marked(row.seconds_error, SECONDS_AIM),
            ]
        table.add_row(
            row.policy,
            "added to" if row.accumulates else "new",
            format_bytes(row.measured_bytes),
            format_bytes(row.predicted_bytes),
            marked(row.bytes_error, BYTES_AIM),
            marked(row.fake_error, BYTES_AIM),
            *seconds,
        )
    return table


def marked(error: float, aim: float) -> str:
    """The error in percent, red where it is beyond the aim."""
    text = f"{error:+.2%}"
    return f"[red]{text}[/red]" if abs(error) > aim else text


def verdict(rows: Sequence[Row]) -> list[str]:
    """The worst row of each kind of prediction, and how many miss."""
    good = [row for row in rows if not row.failure]
    lines = [f"{len(rows) - len(good)} of {len(rows)} failed"] if len(good) < len(rows) else []
    kinds: list[tuple[str, float, Callable[[Row], float]]] = [
        ("bytes", BYTES_AIM, lambda row: row.bytes_error),
        ("bytes from fakes", BYTES_AIM, lambda row: row.fake_error),
        ("seconds", SECONDS_AIM, lambda row: row.seconds_error),
    ]
    for kind, aim, error in kinds:
        worst = max(good, key=lambda row: abs(error(row)), default=None)
        if worst is None:
            continue
        misses = sum(abs(error(row)) > aim for row in good)
        where = f"{worst.model}, {worst.policy}{', gradients added to' if worst.accumulates else ''}"
        lines.append(
            f"{kind}: {misses} of {len(good)} rows miss {aim:.0%}; worst {error(worst):+.2%} ({where})"
        )
    return lines


def render_scale(found: Sequence[Scale]) -> Table:
    """Lay out how fast the tools are."""
    table = Table(title="How fast the tools are", caption="CPU seconds, one thread")
    table.add_column("what", no_wrap=True)
    for heading in ("operations", "time", "calls a minute", "process memory"):
        table.add_column(heading, justify="right")
    for one in found:
        memory = format_bytes(one.memory_bytes) if one.memory_bytes else ""
        table.add_row(
            one.what, f"{one.operations:,}", format_seconds(one.seconds), f"{one.per_minute:,.0f}", memory
        )
    return table


if __name__ == "__main__":
    main()
