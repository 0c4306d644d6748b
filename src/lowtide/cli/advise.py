"""`lowtide advise`: is it activations, and what to do about memory."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli import conventions

NOTHING_FITS = 4


def advise(
    source: conventions.Source,
    batch: conventions.Batch = None,
    seq: conventions.Seq = None,
    dtype: conventions.Dtype = None,
    optimizer: conventions.OptimizerName = "adamw",
    hardware: conventions.Hardware = "h100",
    budget: conventions.Budget = None,
    lora: conventions.Lora = 0,
    ranks: conventions.Ranks = 1,
    sharding: conventions.Sharding = "none",
    attention: conventions.Attention = None,
    steps: Annotated[int, typer.Option(min=0, help="Optimizer steps of the training, for its time and energy.")] = 0,
    search: Annotated[bool, typer.Option(help="Look for the largest batch and the longest sequence.")] = True,
    as_json: conventions.AsJson = False,
) -> None:
    """Say what fills the memory, what each remedy would give, what to take, and when not to checkpoint.

    Each remedy is traced and simulated: mixed precision, a smaller batch with accumulation, efficient attention,
    checkpointing, sharding, other optimizers, and combinations. The exit code is 4 if nothing that was tried fits.
    """
    from lowtide.advice import advise_on
    from lowtide.configurations import workload_of
    from lowtide.estimation.estimates import memory_of
    from lowtide.reports import render_advice

    accelerator = conventions.accelerator_of(hardware)
    memory = memory_of(budget, accelerator)
    with conventions.working("reading", quiet=as_json) as tell:
        workload = workload_of(source, accelerator, lora=lora)
        setup = conventions.setup_of(
            workload,
            batch=batch,
            length=seq,
            precision=dtype,
            optimizer=optimizer,
            attention=attention,
            ranks=ranks,
            sharding=sharding,
        )
        found = advise_on(workload, setup, accelerator, memory, steps=steps, search=search, tell=tell)
    conventions.show(render_advice(found), found.to_json(), as_json)
    if found.recommended is None:
        raise typer.Exit(NOTHING_FITS)
