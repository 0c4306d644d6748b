"""`lowtide verify`: does a step under a plan leave behind what the plain step does, bit for bit."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli import conventions

DIFFERS = 1


def verify(
    source: conventions.Source,
    budget: conventions.Budget = None,
    plan: conventions.PlanFile = None,
    policy: conventions.PolicyName = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to take.")] = 1,
    batch: conventions.Batch = None,
    seq: conventions.Seq = None,
    dtype: conventions.Dtype = None,
    as_json: conventions.AsJson = False,
) -> None:
    """Run a step plainly and under a plan on this machine, and compare all that is left bit for bit.

    A configuration is run with random weights. The exit code is 1 if anything differs.
    """
    from rich.text import Text

    from lowtide.configurations.running import runnable
    from lowtide.verification import verify as compare

    wanted = conventions.decided(budget, plan, policy)
    with conventions.working("running", quiet=as_json):
        step, model, optimizer = runnable(source, batch=batch, length=seq, precision=dtype)
        verdict = compare(step, model, wanted, steps=steps, optimizer=optimizer)
    conventions.show(Text(str(verdict)), verdict.to_json(), as_json)
    if not verdict:
        raise typer.Exit(DIFFERS)
