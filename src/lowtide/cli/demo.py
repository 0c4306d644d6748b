"""`lowtide demo`: what each way of saving memory costs on this machine, on a GPT that really learns."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lowtide.demo.training import Outcome, Settings

INTERRUPTED = 130


def demo(
    steps: Annotated[
        int | None,
        typer.Option(min=3, help="Training steps of each contender; by default 24, with --quick 8."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A much smaller model: seconds, not minutes.")] = False,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of each operation. CPU time is only fair to compare on one.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, no table and no progress.")] = False,
) -> None:
    """Train a small GPT on Python's own manual, with and without keeping its activations.

    Every contender starts from the same weights, sees the same batches and takes its steps in turn with the
    others: no checkpointing, PyTorch's checkpoint on every block, and lowtide under three policies. Takes
    about four minutes. The exit code is 1 if a loss or gradient differs from the plain one in a single bit.
    """
    import torch

    from lowtide.demo.table import as_record, render_table, unequal
    from lowtide.demo.training import full_settings, quick_settings

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else each profile writes two lines of its own to standard error
    torch.set_num_threads(threads)
    settings = quick_settings(steps or 8) if quick else full_settings(steps or 24)
    outcomes = run(settings, show_progress=not as_json)
    if as_json:
        typer.echo(json.dumps(as_record(settings, outcomes, threads), indent=2))
    else:
        from rich.console import Console

        Console().print(render_table(settings, outcomes))
    wrong = unequal(outcomes)
    if wrong:
        typer.echo(f"error: losses or gradients differ from plain: {', '.join(wrong)}", err=True)
        raise typer.Exit(1)


def run(settings: Settings, show_progress: bool) -> list[Outcome]:
    """Train with a progress bar on stderr; Ctrl-C becomes one line and exit code 130."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lowtide.demo.contenders import demo_contenders
    from lowtide.demo.training import Run, train

    contenders = demo_contenders()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not show_progress,
        transient=True,
    )
    task = progress.add_task("starting", total=settings.steps * len(contenders))

    def watch(taken: Run) -> None:
        progress.update(task, advance=1, description=f"{taken.contender.name:<24} loss {taken.losses[-1]:.3f}")

    try:
        with progress:
            return train(settings, contenders, watch)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing stays attached", err=True)
        raise typer.Exit(INTERRUPTED) from None
