"""`lowtide plan`: the fastest plan within a budget, saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli import conventions


def plan(
    source: conventions.Source,
    budget: conventions.Budget = None,
    policy: conventions.PolicyName = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to save the plan.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say for each module what is kept and why.")] = False,
    batch: conventions.Batch = None,
    seq: conventions.Seq = None,
    dtype: conventions.Dtype = None,
    optimizer: conventions.OptimizerName = "adamw",
    hardware: conventions.Hardware = "h100",
    lora: conventions.Lora = 0,
    force: conventions.Force = False,
    as_json: conventions.AsJson = False,
) -> None:
    """Find the fastest plan whose peak is within a budget, and save it for `lowtide.attach(model, plan=...)`.

    A budget counts tensors; a percentage is of the peak when everything is kept. SOURCE may also be a graph that
    was saved. The exit code is 1 if no plan fits; the message names the smallest budget that one fits.
    """
    from rich.text import Text

    conventions.refuse_to_overwrite(output, force)
    wanted = conventions.decided(budget, None, policy)
    accelerator = conventions.accelerator_of(hardware)
    with conventions.working("tracing", quiet=as_json) as tell:
        graph, _, _ = conventions.graph_of(
            source, accelerator, batch=batch, length=seq, precision=dtype, optimizer=optimizer, lora=lora
        )
        tell("planning")
        found = conventions.planned(graph, wanted, tell)
    if output is not None:
        found.save(output)
    text = str(found.explain(graph)) if explain else str(found)
    conventions.show(Text(text), found.to_json(), as_json)
    if output is not None and not as_json:
        typer.echo(f"saved to {output}")
