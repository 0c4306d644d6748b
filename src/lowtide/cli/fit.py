"""`lowtide fit`: will it fit, and how, without weights and without an accelerator."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli import conventions

FITS, AN_OPTION_FITS, NOTHING_FITS = 0, 3, 4


def fit(
    source: conventions.Source,
    batch: conventions.Batch = None,
    seq: conventions.Seq = None,
    dtype: conventions.Dtype = None,
    optimizer: conventions.OptimizerName = "adamw",
    hardware: conventions.Hardware = "h100",
    budget: conventions.Budget = None,
    lora: conventions.Lora = 0,
    lora_targets: conventions.LoraTargets = "",
    freeze: conventions.Freeze = None,
    ranks: conventions.Ranks = 1,
    sharding: conventions.Sharding = "none",
    accumulate: conventions.Accumulate = 1,
    attention: conventions.Attention = None,
    options: Annotated[
        bool, typer.Option("--options", help="List what else fits even where it fits as asked.")
    ] = False,
    as_json: conventions.AsJson = False,
) -> None:
    """Say whether a training step fits into an accelerator's memory, what fills it, and what would fit.

    The model is built and traced on tensors without contents: no weights are read, nothing is downloaded, and
    neither the memory nor the accelerator is needed. Exit codes: 0 it fits; 3 it does not as asked, but an option
    that is listed does; 4 nothing that was tried fits; 1 refused.
    """
    from lowtide.configurations import workload_of
    from lowtide.estimation import fit as fit_workload
    from lowtide.estimation.estimates import memory_of
    from lowtide.reports import render_fit

    accelerator = conventions.accelerator_of(hardware)
    memory = memory_of(budget, accelerator)
    targets = tuple(part.strip() for part in lora_targets.split(",") if part.strip())
    with conventions.working("reading", quiet=as_json) as tell:
        workload = workload_of(source, accelerator, lora=lora, targets=targets, frozen=tuple(freeze or ()))
        setup = conventions.setup_of(
            workload,
            batch=batch,
            length=seq,
            precision=dtype,
            optimizer=optimizer,
            attention=attention,
            accumulation=accumulate,
            ranks=ranks,
            sharding=sharding,
        )
        found = fit_workload(workload, setup, accelerator, memory, tell=tell, always=options)
    conventions.show(render_fit(found, options=options), found.to_json(), as_json)
    if not found.fits:
        raise typer.Exit(AN_OPTION_FITS if found.options else NOTHING_FITS)
