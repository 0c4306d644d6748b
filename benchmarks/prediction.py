"""What lowtide foretells of a step, beside what the step then takes: peak bytes and seconds, over the zoo.

    python -m benchmarks.prediction
    python -m benchmarks.prediction --model llama --model unet --json
    python -m benchmarks.prediction --summary          (a line a model, with its worst policy: the table in the docs)
    python -m benchmarks.prediction --scale            (how fast planning's tools are; --large adds 70B)

Bytes: the allocator's own events of one step, and what lived before it: parameters, buffers, inputs and, where
gradients accumulate, gradients. Seconds: CPU time of whole steps that are followed, on one thread, policies in turn,
medians. The plain step takes part twice: what it is off itself is the machine's noise.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.console import Console

import lowtide
from benchmarks.memory import measure_memory
from benchmarks.prediction_rows import Row, render, summary_head, summary_line, verdict
from benchmarks.race import STEPS_TO_KNOW, clear, forward
from benchmarks.scale import LLAMAS, in_own_process, render_scale, simulation_scale
from benchmarks.zoo import SMALL, ZOO
from benchmarks.zoo_model import ZooModel
from lowtide.demo.training import in_turn, median_ratio
from lowtide.hand import plan_of
from lowtide.tape.policy import Policy

IN_BFLOAT16 = ["vit", "resnet", "small-gpt", "small-lm", "small-lstm"]
"""Models whose bytes are measured under bfloat16 autocast too, unless models are named; many CPUs emulate it slowly."""
LONG = ["gpt", "lm"]
"""Models of seconds a step; a summary has them in small."""
SHORT_TURN = 0.1
"""Seconds: whose step is shorter takes several a turn."""
PLAIN, AGAIN = "plain", "plain again"


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
    """Median seconds of a step; median of per-round ratios to the plain step, and how far half of them are off it."""

    seconds: float = 0.0
    ratio: float = 0.0
    spread: float = 0.0


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
    steps = 1 + round(SHORT_TURN / step_seconds(model, around[0])) if rounds else 0
    for number in range(rounds):
        for which in in_turn(range(len(around)), number):
            gc.collect()
            own = [step_seconds(model, around[which]) for _ in range(steps)]
            seconds[which].append(median(own[steps > 1 :]))  # the first finds caches full of others' data
    clear(model)
    return [timed(own, seconds[0]) if own else Time() for own in seconds]


def step_seconds(model: ZooModel, around: AbstractContextManager[Any]) -> float:
    """CPU seconds of one step."""
    clear(model)
    begin = time.process_time()
    take_step(model, around)
    return time.process_time() - begin


def timed(own: Sequence[float], plain: Sequence[float]) -> Time:
    """What the seconds of each round come to, beside the plain step's."""
    ratio = median_ratio(own, plain)
    return Time(median(own), ratio, median(abs(a / b - ratio) for a, b in zip(own, plain, strict=True)))


# ---- foretelling --------------------------------------------------------------------------------------------


def graph_of(model: ZooModel, *, fake: bool = False, accumulates: bool = False, repeats: int = 0) -> lowtide.StepGraph:
    """Trace the model; `repeats` times each operation and the plain step where it is not 0."""
    clear(model)
    if accumulates:
        torch.autograd.backward(model.forward())
    graph = lowtide.trace(model.forward, model=model.model, fake=fake, repeats=repeats, plain_steps=repeats)
    clear(model)
    return graph


def rows_of(model: ZooModel, rounds: int) -> Iterator[Row]:
    """Foretell and measure a model under every policy, with and without gradients that are there before."""
    policies = policies_for(model)
    recordings: dict[str, AbstractContextManager[Any]] = {PLAIN: nullcontext(), AGAIN: nullcontext()}
    failures: dict[str, str] = {}
    for name, policy in policies.items():
        recording = lowtide.record(policy)
        try:
            for _ in range(STEPS_TO_KNOW if rounds else 2):  # the first step proves replays
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
                    noise=max(abs(times[AGAIN].ratio - 1), times[AGAIN].spread),
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
    if options.summary and not options.json:
        print(summary_head(), flush=True)
    for model, rounds in chosen_models(options):
        own = list(rows_of(model, rounds))
        rows += own
        if options.summary and not options.json:
            print(summary_line(own), flush=True)
        elif not options.json:
            console.print(render(model.name, own))
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    elif not options.summary:
        console.print("\n".join(verdict(rows)))


def chosen_models(options: argparse.Namespace) -> Iterator[tuple[ZooModel, int]]:
    """Make the models, with how many rounds to time, one at a time, so that one lives at a time."""
    for name in options.model or default_models(options.summary):
        yield (ZOO | SMALL)[name]().seeded(), options.rounds
        if name in also_in_bfloat16(options):
            yield (ZOO | SMALL)[name]().in_bfloat16().seeded(), 0


def also_in_bfloat16(options: argparse.Namespace) -> list[str]:
    """The models to measure so: those that were named, else a few."""
    if not options.bfloat16:
        return []
    return options.model or [name for name in IN_BFLOAT16 if name in SMALL or not options.summary]


def default_models(short: bool) -> list[str]:
    """The zoo; `short`: what takes minutes."""
    return [*(name for name in ZOO if name not in LONG), *SMALL] if short else list(ZOO)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--model", choices=[*ZOO, *SMALL], action="append", help="may be given again; default: all")
    made.add_argument("--rounds", type=int, default=7, help="timed rounds; 0 measures bytes alone")
    made.add_argument("--bfloat16", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument(
        "--summary", action="store_true", help="a line a model, as Markdown; models of seconds a step not"
    )
    made.add_argument("--scale", action="store_true", help="time simulate and the trace of a 7B model instead")
    made.add_argument("--large", action="store_true", help="the same, and a 70B model")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


if __name__ == "__main__":
    main()
