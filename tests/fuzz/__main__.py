"""Search for programs whose numbers lowtide changes: python -m tests.fuzz --programs 20000 --jobs 2."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .campaign import draw_setting, run_campaign, search
from .generation import draw_program
from .programs import script
from .summary import Summary


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many programs to draw")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes to use")
    parser.add_argument(
        "--show", type=int, metavar="SEED", help="print one program, judge it, make it small if it fails"
    )
    parser.add_argument("--no-shrink", action="store_true", help="leave failing programs as they are")
    parser.add_argument("--details", action="store_true", help="print every table in full")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write one small program for each kind of failure")
    return parser.parse_args()


def show(seed: int, shrink: bool) -> bool:
    """Print the program of one seed and how it fares; return whether it fails."""
    print(script(draw_program(seed), draw_setting(seed), f"Program {seed}"))
    result = search(seed, shrink=shrink)
    print(result.verdict.outcome, result.verdict.signature, result.verdict.detail, sep="\n")
    if result.small:
        print(result.small)
    return result.verdict.outcome == "fails"


def main() -> int:
    """Run the campaign; the exit code is 1 if a program fails."""
    asked = parsed()
    if asked.show is not None:
        return int(show(asked.show, not asked.no_shrink))
    summary, console = Summary(), Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    seeds = range(asked.seed, asked.seed + asked.programs)
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("no failures", total=asked.programs)
            for result in run_campaign(seeds, asked.jobs, shrink=not asked.no_shrink):
                summary.add(result)
                failures = summary.outcomes["fails"]
                progress.update(task, advance=1, description=f"{failures} fail, {len(summary.buckets)} kinds")
    except KeyboardInterrupt:
        console.print("interrupted; so far:")
    print("\n".join(summary.lines(asked.details)))
    if asked.save:
        print("written:", *summary.save(asked.save))
    for results in summary.buckets.values():
        print("\n" + min((r.small for r in results), key=len))
    return int(bool(summary.buckets))


if __name__ == "__main__":
    sys.exit(main())
