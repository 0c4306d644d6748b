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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import lowtide
from benchmarks.memory import measure_memory
from benchmarks.race import clear, forward
from benchmarks.scale import LLAMAS, in_own_process, render_scale, simulation_scale
from benchmarks.zoo import SMALL, ZOO
from benchmarks.zoo_model import ZooModel
from lowtide.demo.training import in_turn, median_ratio
from lowtide.hand import plan_of
from lowtide.tape.policy import Policy
from lowtide.units import format_bytes, format_seconds

BYTES_AIM, SECONDS_AIM = 0.01, 0.10
IN_BFLOAT16 = ["vit", "resnet"]
"""Models whose bytes are measured under bfloat16 autocast too; many CPUs emulate it, ten times slower."""


@dataclass(frozen=True)
class Row:
    """One model under one policy. Bytes are peaks with all that is resident; seconds are those of a step.

    `fake_bytes` is foretold from a trace on fake tensors; `fake_failure` says why there is none. Ratios are to
    the plain step. Seconds and ratios are 0 where time was not measured.
    """

    model: str
    policy: str
    accumulates: bool = False
    measured_bytes: int = 0
    predicted_bytes: int = 0
    fake_bytes: int = 0
    measured_seconds: float = 0.0
    predicted_seconds: float = 0.0
    measured_ratio: float = 0.0
    predicted_ratio: float = 0.0
    failure: str = ""
    fake_failure: str = ""

    @property
    def bytes_error(self) -> float:
        return off(self.predicted_bytes, self.measured_bytes)

    @property
    def fake_error(self) -> float:
        return 0.0 if self.fake_failure else off(self.fake_bytes, self.measured_bytes)

    @property
    def seconds_error(self) -> float:
        return off(self.predicted_seconds, self.measured_seconds)

    @property
    def ratio_error(self) -> float:
        return off(self.predicted_ratio, self.measured_ratio)


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


@dataclass(frozen=True)
class Time:
    """Median seconds of a step, and the median of per-round ratios to the plain step."""

    seconds: float = 0.0
    ratio: float = 0.0


# ---- measuring ----------------------------------------------------------------------------------------------


def resident_bytes(model: ZooModel) -> int:
    """Bytes that live before a step: parameters, buffers, inputs, and gradients where there are any."""
    gradients = [p.grad for p in model.model.parameters() if p.grad is not None]
    tensors = [*model.model.parameters(), *model.model.buffers(), *model.inputs, *gradients]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def take_step(model: ZooModel, around: AbstractContextManager[Any]) -> None:
    """Forward and backward; gradients are added to what is there."""
    torch.autograd.backward(forward(model, around))


def measured_peak(model: ZooModel, recording: AbstractContextManager[Any], accumulates: bool) -> int:
    """Peak bytes of one step and all that lived before it; `recording` must be warm."""
    clear(model)
    if accumulates:
        take_step(model, recording)
    before = resident_bytes(model)
    peak = measure_memory(lambda: forward(model, recording), torch.autograd.backward).peak_bytes
    clear(model)
    return before + peak


def measured_seconds(model: ZooModel, around: Sequence[AbstractContextManager[Any]], rounds: int) -> list[Time]:
    """CPU seconds of a step inside each of `around`, in turn, and over those inside the first."""
    seconds: list[list[float]] = [[] for _ in around]
    for number in range(rounds):
        for which in in_turn(range(len(around)), number):
            clear(model)
            gc.collect()
            begin = time.process_time()
            take_step(model, around[which])
            seconds[which].append(time.process_time() - begin)
    clear(model)
    return [Time(median(own), median_ratio(own, seconds[0])) if own else Time() for own in seconds]


# ---- foretelling --------------------------------------------------------------------------------------------


def graph_of(model: ZooModel, *, fake: bool = False, accumulates: bool = False, repeats: int = 0) -> lowtide.StepGraph:
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
    recordings: dict[str, AbstractContextManager[Any]] = {"plain": nullcontext()}
    failures: dict[str, str] = {}
    for name, policy in policies.items():
        recording = lowtide.record(policy)
        try:
            for _ in range(2):  # the first step proves replays
                clear(model)
                take_step(model, recording)
            recordings[name] = recording
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
    times = dict(zip(recordings, measured_seconds(model, list(recordings.values()), rounds), strict=True))
    for accumulates in (False, True):
        real = graph_of(model, accumulates=accumulates, repeats=0 if accumulates or not rounds else 3)
        fake, fake_failure = fake_graph_of(model, accumulates)
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
                lowtide.simulate(fake, plan_of(fake, policy), trail=False).peak_bytes if fake else 0,
                fake_failure=fake_failure,
            )
            yield (
                row
                if accumulates
                else replace(
                    row,
                    measured_seconds=times[name].seconds,
                    measured_ratio=times[name].ratio,
                    predicted_seconds=timeline.step_seconds,
                    predicted_ratio=timeline.step_seconds / real.seconds,
                )
            )


def fake_graph_of(model: ZooModel, accumulates: bool) -> tuple[lowtide.StepGraph | None, str]:
    """The graph from fake tensors, or why there is none."""
    try:
        return graph_of(model, fake=True, accumulates=accumulates), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


# ---- showing ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments`, by default those of the command line, and print the tables."""
    options = parser().parse_args(arguments)
    console = Console()
    if options.scale or options.large:
        found = simulation_scale() + [in_own_process(size) for size in LLAMAS if size == "7B" or options.large]
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
    made = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--model", choices=[*ZOO, *SMALL], action="append", help="may be given again; default: all")
    made.add_argument("--rounds", type=int, default=7, help="timed rounds; 0 measures bytes alone")
    made.add_argument("--bfloat16", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--scale", action="store_true", help="time simulate and the trace of a 7B model instead")
    made.add_argument("--large", action="store_true", help="the same, and a 70B model")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def render(title: str, rows: Sequence[Row]) -> Table:
    """Lay the rows of one model out; errors beyond the aims are red."""
    aims = f"aims: bytes within {BYTES_AIM:.0%}, seconds within {SECONDS_AIM:.0%}; x: over the plain step"
    table = Table(title=title, caption=aims)
    table.add_column("policy", no_wrap=True)
    table.add_column("gradients")
    for heading in ("peak", "predicted", "off", "off, fakes", "step CPU s", "predicted", "off", "x", "predicted x"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.failure:
            table.add_row(row.policy, "", row.failure)
            continue
        table.add_row(
            row.policy,
            "added to" if row.accumulates else "new",
            format_bytes(row.measured_bytes),
            format_bytes(row.predicted_bytes),
            marked(row.bytes_error, BYTES_AIM),
            "none" if row.fake_failure else marked(row.fake_error, BYTES_AIM),
            *time_cells(row),
        )
    for failure in sorted({row.fake_failure for row in rows} - {""}):
        table.caption = f"{aims}\nnone on fakes: {failure}"
    return table


def time_cells(row: Row) -> list[str]:
    """What the table says of a row's time, if that was measured."""
    if not row.measured_seconds:
        return []
    return [
        format_seconds(row.measured_seconds),
        format_seconds(row.predicted_seconds),
        marked(row.seconds_error, SECONDS_AIM),
        f"{row.measured_ratio:.3f}",
        f"{row.predicted_ratio:.3f}",
    ]


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
        ("seconds over plain's", SECONDS_AIM, lambda row: row.ratio_error),
    ]
    for kind, aim, error in kinds:
        worst = max(good, key=lambda row: abs(error(row)), default=None)
        if worst is None:
            continue
        misses = sum(abs(error(row)) > aim for row in good)
        where = f"{worst.model}, {worst.policy}{', gradients added to' if worst.accumulates else ''}"
        lines.append(f"{kind}: {misses} of {len(good)} rows miss {aim:.0%}; worst {error(worst):+.2%} ({where})")
    return lines


if __name__ == "__main__":
    main()
