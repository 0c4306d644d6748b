"""`lowtide explore`: what memory costs in time, from keeping everything to the least."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli import conventions


def explore(
    source: conventions.Source,
    points: Annotated[int, typer.Option(min=2, help="For how many budgets to solve.")] = 12,
    batch: conventions.Batch = None,
    seq: conventions.Seq = None,
    dtype: conventions.Dtype = None,
    optimizer: conventions.OptimizerName = "adamw",
    hardware: conventions.Hardware = "h100",
    lora: conventions.Lora = 0,
    as_json: conventions.AsJson = False,
) -> None:
    """List the best plans from keeping everything to the least memory, with their peak and time.

    Hand policies are listed beside them. SOURCE may also be a graph that was saved.
    """
    from dataclasses import asdict

    from lowtide.plan import Plan
    from lowtide.reporting import points_of
    from lowtide.reports import render_frontier

    accelerator = conventions.accelerator_of(hardware)
    with conventions.working("tracing", quiet=as_json) as tell:
        graph, name, _ = conventions.graph_of(
            source, accelerator, batch=batch, length=seq, precision=dtype, optimizer=optimizer, lora=lora
        )
        tell("planning")
        found = points_of(graph, Plan(frozenset()), points)[:-1]
    record = {"kind": "lowtide.Frontier", "schema": 1, "workload": name, "points": [asdict(point) for point in found]}
    conventions.show(render_frontier(name, found), record, as_json)
