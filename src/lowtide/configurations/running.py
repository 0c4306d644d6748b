"""A step that really runs on this machine, from a factory or a configuration with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from lowtide import hardware
from lowtide.configurations.reading import ConfigurationError
from lowtide.configurations.scripted import Scripted
from lowtide.configurations.source import workload_of
from lowtide.estimation.setups import Setup
from lowtide.units import format_bytes

LARGEST_BYTES = 8 * 2**30
"""Of weights and gradients; a configuration beyond this is surely not meant to run on a CPU."""

Runnable = tuple[Callable[[], torch.Tensor], nn.Module, torch.optim.Optimizer | None]


def runnable(source: str, *, batch: int | None, length: int | None, precision: str | None) -> Runnable:
    """The step that ``source`` names, its model, and its optimizer where the factory returns one.

    Raises:
        ConfigurationError: it is too large, or names nothing.
    """
    workload = workload_of(source, hardware.find("cpu"))
    if isinstance(workload, Scripted):
        asked = {"batch": batch, "length": length}
        given = {name: value for name, value in asked.items() if value is not None and name in workload.takes}
        made = workload.factory(**given)
        step, model = workload.checked(made)
        step = workload.around(step, workload.precision(precision))
        return step, model, made[2] if len(made) > 2 else None
    precision = precision or "float32"
    setup = Setup(
        batch=batch or 1, length=workload.length(length or 0), precision=precision, attention=workload.attention(None)
    )
    size = 2 * workload.trace(replace(setup, batch=1)).trained_bytes
    if size > LARGEST_BYTES:
        raise ConfigurationError(
            f"{workload.name} has {format_bytes(size)} of weights and gradients; a step that is run may have "
            f"{format_bytes(LARGEST_BYTES)}. `lowtide fit`, `plan` and `report` need no memory; or make the "
            "configuration smaller, or write a factory for your accelerator."
        )
    torch.manual_seed(0)
    return *workload.step(setup), None
