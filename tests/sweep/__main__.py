"""Take every hazard of the zoo and every model round under random keep sets: ./run sweep --minutes 60 --autocast."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from .subjects import subjects
from .totals import Totals, described
from .trials import Trial
from .workers import swept


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run sweep", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to go on (default: 60)")
    parser.add_argument("--rounds", type=int, help="how many rounds at most (default: as many as there is time for)")
    parser.add_argument("--seed", type=int, default=0, help="what everything is drawn from")
    parser.add_argument("--autocast", action="store_true", help="forwards under bfloat16 autocast, not in float32")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes to use")
    parser.add_argument("--round", type=int, default=0, metavar="N", help="the first round; odd ones are long")
    parser.add_argument("--case", metavar="NAME", help="one case only, once unless --rounds says otherwise")
    return parser.parse_args(arguments)


def trials(asked: argparse.Namespace) -> Iterator[Trial]:
    """Draw up trials, round after round, until the time or the rounds are over. Raises SystemExit: no such case."""
    deadline = time.monotonic() + 60 * asked.minutes
    names = [asked.case] if asked.case else list(subjects())
    if not set(names) <= set(subjects()):
        raise SystemExit(f"there is no case {asked.case}; for example: {', '.join(itertools.islice(subjects(), 3))}")
    rounds = asked.rounds or (1 if asked.case else None)
    numbers = itertools.count(asked.round) if rounds is None else range(asked.round, asked.round + rounds)
    for number, name in ((number, name) for number in numbers for name in names):
        if time.monotonic() > deadline:
            return
        yield Trial(name, number, asked.seed, asked.autocast)


def main(arguments: list[str]) -> int:
    """Sweep; the exit code is 1 if a trial fails."""
    asked = parsed(arguments)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    totals = Totals(1 if asked.case else len(subjects()))
    columns = (TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("starting", total=None)
            for trial, verdict in swept(trials(asked), asked.jobs):
                totals.add(trial, verdict)
                progress.update(task, description=f"round {trial.round}: {totals.line()}; {trial.name}")
                if verdict.outcome == "fails":
                    console.print(described(trial, verdict))
                if totals.is_complete(trial.round) and not console.is_terminal:
                    console.print(f"round {trial.round} done: {totals.line()}")
    except KeyboardInterrupt:
        console.print("interrupted; so far:")
    print("\n".join(totals.lines()))
    return int(bool(totals.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
