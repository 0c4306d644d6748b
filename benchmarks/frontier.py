"""lowtide's frontier, each plan carried out, among other ways to checkpoint: peak bytes against CPU time.

    python -m benchmarks.frontier --model gpt --model lm --figures
    python -m benchmarks.frontier --model lm --compile

Peaks are what one step takes from the allocator above what lived before it: activations, gradients and
temporaries; parameters and inputs are left out, in the predictions too. Times are CPU times of whole steps on
one thread, contenders in turn, medians of per-round ratios to plain. Every row is checked bit for bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import lowtide
from benchmarks.contenders import torch_remat_per_block, torch_sac
from benchmarks.frontier_figure import draw
from benchmarks.headlines import Headlines, Point, headlines
from benchmarks.memory import measure_memory
from benchmarks.prediction import graph_of, resident_bytes
from benchmarks.race import Row, clear, race
from benchmarks.zoo import SMALL, ZOO
from benchmarks.zoo_model import ZooModel
from lowtide.demo.contenders import PLAIN, Around, Contender, torch_per_block
from lowtide.planned import policy_of
from lowtide.units import format_bytes

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.0)
"""Of the compiler's activation memory."""


@dataclass(frozen=True)
class Entry:
    """One contender: what it did, and what was foretold of it (0 where nothing was). Bytes as in `StepMemory`."""

    row: Row
    predicted_bytes: int = 0
    predicted_ratio: float = 0.0
    plan: str = ""

    @property
    def point(self) -> Point:
        return Point(self.row.memory.peak_bytes, self.row.step_ratio)


# ---- contenders ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EverySecond(Contender):
    """A contender put on every second block."""

    @contextmanager
    def on(self, blocks: Sequence[nn.Module]) -> Iterator[Around]:
        with super().on(blocks[::2]) as around:
            yield around


def peers() -> list[Contender]:
    """What torch and others offer, plain first."""
    per_block = torch_per_block()
    second = EverySecond("torch every 2nd block", per_block.replace_forward)
    return [PLAIN, per_block, second, torch_sac(), torch_remat_per_block()]


def planned(name: str, plan: lowtide.Plan) -> Contender:
    """Carry out a plan of lowtide's."""
    return Contender(name, start_recording=lambda: lowtide.record(policy_of(plan)))


@dataclass(frozen=True)
class Compiled(Contender):
    """The compiler with a budget for what it saves; it wants the whole model, not its blocks."""

    model: nn.Module | None = None
    budget: float = 1.0

    @contextmanager
    def on(self, blocks: Sequence[nn.Module]) -> Iterator[Around]:
        assert self.model is not None
        self.model.forward = torch.compile(type(self.model).forward.__get__(self.model))
        try:
            with (
                torch._functorch.config.patch(activation_memory_budget=self.budget),
                super().on(()) as around,
            ):
                yield around
        finally:
            del self.model.forward


def compiled_entries(model: ZooModel, rounds: int) -> list[Entry]:
    """Each budget of the compiler in a race of its own with plain: compiled code is forgotten in between."""
    entries = []
    for budget in BUDGETS:
        torch._dynamo.reset()
        contender = Compiled(f"compile budget {budget:g}", model=model.model, budget=budget)
        entries.append(Entry(race(model, [PLAIN, contender], range(rounds), steps=1)[1]))
    torch._dynamo.reset()
    return entries


# ---- plans --------------------------------------------------------------------------------------------------


def chosen_plans(model: ZooModel, graph: lowtide.StepGraph, count: int) -> list[lowtide.Plan]:
    """`count` plans spread over the frontier's bytes, its ends among them, and one at torch per block's peak."""
    plans = lowtide.frontier(graph)
    plain, least = peak_of(plans[0]), peak_of(plans[-1])
    wanted = [plain - (plain - least) * n / (count - 1) for n in range(count)]
    picked = {min(range(len(plans)), key=lambda i: abs(peak_of(plans[i]) - peak)) for peak in wanted}
    found = [plans[i] for i in sorted(picked)]
    per_block = resident_bytes(model) + peak_under(model, torch_per_block())
    if least < per_block < plain:
        found.append(lowtide.solve(graph, budget=per_block))
    return sorted(found, key=peak_of, reverse=True)


def peak_of(plan: lowtide.Plan) -> int:
    """Foretold peak bytes, all that is resident included."""
    assert plan.prediction is not None
    return plan.prediction.peak_bytes


def peak_under(model: ZooModel, contender: Contender) -> int:
    """Measured peak bytes above what lived before the step."""
    with contender.on(model.blocks):
        torch.autograd.backward(model.forward())
        clear(model)
        peak = measure_memory(model.forward, torch.autograd.backward).peak_bytes
        clear(model)
    return peak


def entries_of(model: ZooModel, count: int, rounds: int) -> list[Entry]:
    """Plan, carry out and race."""
    torch.autograd.backward(model.forward())
    clear(model)
    graph = graph_of(model, repeats=3)
    plans = {f"lowtide {n}": plan for n, plan in enumerate(chosen_plans(model, graph, count))}
    contenders = peers() + [planned(name, plan) for name, plan in plans.items()]
    turns = track(range(rounds), model.name, console=Console(stderr=True), transient=True)
    resident = resident_bytes(model)
    entries = []
    for row in race(model, contenders, turns, steps=1):
        plan = plans.get(row.name)
        if plan is None or plan.prediction is None:
            entries.append(Entry(row))
            continue
        ratio = plan.prediction.step_seconds / plan.prediction.plain_seconds
        entries.append(Entry(row, plan.prediction.peak_bytes - resident, ratio, str(plan)))
    return entries


# ---- showing ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments`, by default those of the command line, and print the tables."""
    options = parser().parse_args(arguments)
    console = Console()
    for name in list(ZOO) if options.all else options.model or ["gpt", "lm"]:
        model = (ZOO | SMALL)[name]().seeded()
        entries = entries_of(model, options.plans, options.rounds)
        if options.compile:
            entries += compiled_entries(model, options.rounds)
        numbers = headlines_of(entries)
        found = {
            "model": model.name,
            "rounds": options.rounds,
            "headlines": asdict(numbers),
            "entries": [asdict(entry) for entry in entries],
        }
        if options.json:
            print(json.dumps(found))
        else:
            console.print(render(model.name, entries), render_headlines(numbers))
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / f"frontier-{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        if options.figures:
            FIGURES.mkdir(parents=True, exist_ok=True)
            draw(model.name, *pictured(entries), FIGURES / f"frontier-{name}.svg")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.frontier", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--model", choices=[*ZOO, *SMALL], action="append", help="may be given again; default: gpt, lm")
    made.add_argument("--all", action="store_true", help="the whole zoo")
    made.add_argument("--plans", type=int, default=8, help="plans of the frontier to carry out")
    made.add_argument("--rounds", type=int, default=7, help="rounds, each contender once in each")
    made.add_argument("--compile", action="store_true", help="race the compiler's activation budget too")
    made.add_argument("--json", action="store_true", help="print one JSON object a model")
    made.add_argument("--output", type=Path, help="folder to write JSON to, one file a model")
    made.add_argument("--figures", action="store_true", help="draw docs/figures/frontier-MODEL.svg")
    return made


def headlines_of(entries: Sequence[Entry]) -> Headlines:
    """The numbers that the measured rows come down to."""
    good = [entry for entry in entries if not entry.row.failure]
    own = [entry.point for entry in good if entry.plan]
    known = {entry.row.name: entry.point for entry in good}
    return headlines(known["plain"], own, known.get("torch per block"))


def pictured(entries: Sequence[Entry]) -> tuple[list[Point], dict[str, Point]]:
    """The frontier's points, and the others' by name."""
    good = [entry for entry in entries if not entry.row.failure]
    return [e.point for e in good if e.plan], {e.row.name: e.point for e in good if not e.plan}


def render(title: str, entries: Sequence[Entry]) -> Table:
    """Lay out what was measured beside what was foretold."""
    table = Table(title=title, caption="peak: activations, gradients, temporaries; time: CPU time over plain's")
    table.add_column("contender", no_wrap=True)
    for heading in ("peak", "of plain's", "predicted", "off", "time", "predicted", "s a step"):
        table.add_column(heading, justify="right")
    table.add_column("step")
    plain = entries[0].row.memory.peak_bytes
    for entry in entries:
        row, foretold = entry.row, ["", "", ""]
        if row.failure:
            table.add_row(row.name, *["-"] * 7, row.exact)
            continue
        peak = row.memory.peak_bytes
        if entry.plan:
            error = f"{entry.predicted_bytes / peak - 1:+.2%}"
            foretold = [format_bytes(entry.predicted_bytes), error, f"{entry.predicted_ratio:.3f}"]
        table.add_row(
            row.name,
            format_bytes(peak),
            f"{peak / plain:.1%}",
            *foretold[:2],
            f"{row.step_ratio:.3f}",
            foretold[2],
            f"{row.step_seconds:.3f}",
            row.exact,
        )
    return table


def render_headlines(numbers: Headlines) -> Table:
    """Lay out the numbers beside their bars."""
    table = Table(show_header=True)
    for heading in ("what", "reached", "bar"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for what, value, bar, good in numbers.rows():
        table.add_row(what, f"[{'green' if good else 'red'}]{value}", bar)
    return table


if __name__ == "__main__":
    main()
