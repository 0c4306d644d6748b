"""Whether steps stay within the budgets that they were planned for, over the zoo.

    python -m benchmarks.budgets --model gpt --model unet

Eight budgets a model, from the least that a plan fits to the peak of keeping everything. Each is planned for and its
plan carried out: after five steps, from which on a step is followed, the bytes of one more are counted, what lives
all the time included. Gradients, buffers and loss of every step are compared with the plain step's, bit for bit.
The command fails where a peak is above its budget, more budget is slower, or a bit differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import lowtide
from benchmarks.prediction import graph_of, resident_bytes
from benchmarks.race import Lane, attempt, check, prepare
from benchmarks.zoo import DEEP, SMALL, ZOO
from benchmarks.zoo_model import ZooModel
from lowtide.demo.contenders import PLAIN, Contender
from lowtide.planned import policy_of
from lowtide.planning import Planner
from lowtide.units import format_bytes

BUDGETS = 8


@dataclass(frozen=True)
class Trial:
    """One budget: peaks with all that is resident in them, step seconds as foretold; `wrong` says what differed."""

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    predicted_seconds: float
    gap: float
    wrong: str = ""

    @property
    def within(self) -> bool:
        return 0 < self.measured_bytes <= self.budget_bytes


@dataclass(frozen=True)
class Outcome:
    """A model with its trials, from the least budget to the largest, and its frontier: (peak bytes, seconds)."""

    model: str
    resident_bytes: int
    trials: tuple[Trial, ...]
    frontier: tuple[tuple[int, float], ...]

    @property
    def worst(self) -> float:
        """The largest measured peak over its budget."""
        return max(trial.measured_bytes / trial.budget_bytes for trial in self.trials)

    @property
    def lowest(self) -> float:
        """The least feasible budget over that of keeping everything."""
        return self.trials[0].budget_bytes / self.trials[-1].budget_bytes

    @property
    def lowest_above_resident(self) -> float:
        """The same without what lives all the time."""
        own = [trial.budget_bytes - self.resident_bytes for trial in self.trials]
        return own[0] / own[-1]

    def failures(self) -> Iterator[str]:
        """What is not as it should be."""
        for trial in self.trials:
            at = f"{self.model}, {format_bytes(trial.budget_bytes)}"
            if trial.wrong:
                yield f"{at}: {trial.wrong}"
            elif not trial.within:
                yield f"{at}: took {trial.measured_bytes - trial.budget_bytes} bytes more"
            if trial.predicted_bytes > trial.budget_bytes:
                yield f"{at}: planned with {trial.predicted_bytes - trial.budget_bytes} bytes more"
        for less, more in pairwise(self.trials):
            if more.predicted_seconds > less.predicted_seconds:
                slower = more.predicted_seconds / less.predicted_seconds - 1
                yield f"{self.model}: {format_bytes(more.budget_bytes)} is {slower:.2%} slower than less"
        for (peak, seconds), (lower, longer) in pairwise(self.frontier):
            if lower >= peak or longer <= seconds:
                yield f"{self.model}: its frontier is not monotone at {format_bytes(peak)}"


# ---- trying -------------------------------------------------------------------------------------------------


def outcome_of(model: ZooModel, count: int = BUDGETS) -> Outcome:
    """Plan for `count` budgets, carry the plans out and count."""
    torch.set_num_threads(1)
    buffers = {name: buffer.clone() for name, buffer in model.model.named_buffers()}
    plain = Lane(PLAIN)
    for _ in range(2):  # the first step of a process may compute otherwise than all others
        plain.digests.clear()
        attempt(plain, model, partial(check, plain, model, buffers))
    if plain.failure:
        raise RuntimeError(f"{model.name} fails without lowtide: {plain.failure}")
    planner = Planner(graph_of(model, repeats=1))
    low, high = planner.lowest.peak, planner.plain.peak
    budgets = [low + (high - low) * n // (count - 1) for n in range(count)]
    turns = track(budgets, model.name, console=Console(stderr=True), transient=True)
    trials = tuple(trial_of(model, planner.solve(budget), plain, buffers) for budget in turns)
    points = [plan.prediction for plan in planner.frontier(2 * count)]
    frontier = tuple((point.peak_bytes, point.step_seconds) for point in points if point is not None)
    return Outcome(model.name, planner.graph.resident_bytes, trials, frontier)


def trial_of(model: ZooModel, plan: lowtide.Plan, plain: Lane, buffers: dict[str, Tensor]) -> Trial:
    """Carry a plan out."""
    assert plan.prediction is not None
    assert plan.budget_bytes is not None
    lane = Lane(Contender("planned", start_recording=lambda: lowtide.record(policy_of(plan))))
    attempt(lane, model, partial(prepare, lane, model, buffers))
    attempt(lane, model, partial(check, lane, model, buffers))
    differences = {digest.difference(plain.digests[0]) for digest in lane.digests} - {""}
    return Trial(
        plan.budget_bytes,
        plan.prediction.peak_bytes,
        resident_bytes(model) + lane.memory.peak_bytes,
        plan.prediction.step_seconds,
        plan.prediction.gap,
        lane.failure or "; ".join(sorted(differences)),
    )


# ---- showing ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse `arguments`, by default those of the command line, and print a row a model; exit 1 if one is broken."""
    options = parser().parse_args(arguments)
    found = []
    for name in options.model or [*ZOO, *DEEP]:
        found.append(outcome_of((ZOO | DEEP | SMALL)[name]().seeded(), options.budgets))
        if options.json:
            print(json.dumps(asdict(found[-1]) | {"failures": list(found[-1].failures())}), flush=True)
        else:
            print(f"{name} done", file=sys.stderr)
    failures = [failure for one in found for failure in one.failures()]
    if not options.json:
        Console().print(render(found), *failures, sep="\n")
    if failures:
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=(__doc__ or "").split("\n")[0])
    made.add_argument(
        "--model", choices=[*ZOO, *DEEP, *SMALL], action="append", help="may be given again; default: all"
    )
    made.add_argument("--budgets", type=int, default=BUDGETS, help="budgets a model")
    made.add_argument("--json", action="store_true", help="print one JSON object a model")
    return made


def render(found: Sequence[Outcome]) -> Table:
    """Lay out a row a model; the last column says whether all that was asked held."""
    table = Table(caption="least/plain: the least feasible budget over the peak of keeping everything, in brackets "
                  "without what lives all the time")  # fmt: skip
    table.add_column("model")
    for heading in ("plain", "least/plain", "measured/budget, worst", "measured/predicted", "gap, worst"):
        table.add_column(heading, justify="right")
    table.add_column("monotone")
    table.add_column("exact")
    for one in found:
        against = [trial.measured_bytes / trial.predicted_bytes for trial in one.trials]
        broken = list(one.failures())
        table.add_row(
            one.model,
            format_bytes(one.trials[-1].budget_bytes),
            f"{one.lowest:.0%} ({one.lowest_above_resident:.0%})",
            f"{one.worst:.4f}",
            f"{min(against):.4f}-{max(against):.4f}",
            f"{max(trial.gap for trial in one.trials):.1%}",
            "no" if any("slower" in line or "monotone" in line for line in broken) else "yes",
            "no" if any(trial.wrong for trial in one.trials) else "yes",
        )
    return table


if __name__ == "__main__":
    main()
