"""`lowtide report`: a plan as a page that opens anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli import conventions
from lowtide.errors import LowtideError


def report(
    source: conventions.Source,
    budget: conventions.Budget = None,
    plan: conventions.PlanFile = None,
    policy: conventions.PolicyName = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to save it; - or nothing prints it.")
    ] = None,
    kind: Annotated[
        str, typer.Option("--format", help="html, md, json or svg; by default as the output's name says.")
    ] = "",
    points: Annotated[int, typer.Option(min=0, help="Budgets of the frontier; 0 leaves it out.")] = 12,
    batch: conventions.Batch = None,
    seq: conventions.Seq = None,
    dtype: conventions.Dtype = None,
    optimizer: conventions.OptimizerName = "adamw",
    hardware: conventions.Hardware = "h100",
    lora: conventions.Lora = 0,
    force: conventions.Force = False,
    as_json: conventions.AsJson = False,
) -> None:
    """Show a plan: memory over time, what memory costs, what each block keeps, modules, assumptions.

    The page is one file without scripts, and needs nothing else. SOURCE may also be a graph that was saved.
    """
    from lowtide.reporting import report as gather
    from lowtide.reports.page import FORMATS, render

    output = None if output == Path("-") else output
    kind = "json" if as_json else kind or (output.suffix.removeprefix(".") if output else "md")
    if kind not in FORMATS:
        raise LowtideError(f"There is no format {kind!r}; there are {', '.join(FORMATS)}.")
    conventions.refuse_to_overwrite(output, force)
    wanted = conventions.decided(budget, plan, policy)
    accelerator = conventions.accelerator_of(hardware)
    with conventions.working("tracing", quiet=as_json) as tell:
        graph, name, remarks = conventions.graph_of(
            source, accelerator, batch=batch, length=seq, precision=dtype, optimizer=optimizer, lora=lora
        )
        tell("planning")
        found = conventions.planned(graph, wanted)
        tell("drawing")
        text = render(gather(graph, found, title=name, assumptions=remarks, points=points), kind)
    if output is None:
        typer.echo(text, nl=False)
        return
    conventions.write(output, text)
    typer.echo(f"saved to {output}", err=True)
