"""`lowtide measure`: what a plan really costs on this machine, beside its prediction."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli import conventions


def measure(
    source: conventions.Source,
    budget: conventions.Budget = None,
    plan: conventions.PlanFile = None,
    policy: conventions.PolicyName = None,
    against: Annotated[str, typer.Option(help="Peers: torch-per-block, torch-selective, or both with a comma.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed.")] = 7,
    batch: conventions.Batch = None,
    seq: conventions.Seq = None,
    dtype: conventions.Dtype = None,
    as_json: conventions.AsJson = False,
) -> None:
    """Measure peak and time of a step under a plan on this machine, beside the plain step and PyTorch's own ways.

    A configuration is run with random weights. The exit code is 1 if results differ from the plain step's.
    """
    from rich.text import Text

    from lowtide.configurations.running import runnable
    from lowtide.measurement import measure as compare

    wanted = conventions.decided(budget, plan, policy)
    peers = tuple(name.strip() for name in against.split(",") if name.strip())
    with conventions.working("running", quiet=as_json):
        step, model, optimizer = runnable(source, batch=batch, length=seq, precision=dtype)
        found = compare(step, model, wanted, against=peers, rounds=rounds, optimizer=optimizer)
    conventions.show(Text(str(found)), found.to_json(), as_json)
    if found.row("lowtide").exact is False:
        raise typer.Exit(1)
