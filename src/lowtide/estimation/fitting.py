"""fit: does a training step fit, and if not, what does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowtide.estimation.estimates import Estimate
from lowtide.estimation.optimizers import OPTIMIZERS
from lowtide.estimation.setups import Setup, Workload
from lowtide.estimation.trials import (
    EFFICIENT,
    EIGHT_BIT,
    FUSED,
    MIXED,
    SHARDING,
    SMALLER,
    Change,
    Option,
    Told,
    Trials,
    levers_for,
)
from lowtide.hardware import Accelerator

SCHEMA = 1
NEAR = 0.9
"""From this part of the room on, what the optimizer's step needs stands in the way."""
SMALL = 0.05
"""Optimizer states below this share of the peak are not worth another optimizer."""
PAIRS = (
    (EFFICIENT, MIXED),
    (MIXED, SMALLER),
    (SMALLER, EIGHT_BIT),
    (EIGHT_BIT, SHARDING),
    (EFFICIENT, SMALLER),
)
"""Combinations that are tried besides each lever alone; each with and without checkpointing."""


@dataclass(frozen=True)
class Fit:
    """Whether a step fits as it was asked for, and all that was tried. Prints as a table."""

    workload: str
    asked: Option
    tried: tuple[Option, ...]
    """What was tried, what was asked for first."""
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether it fits as asked."""
        return self.asked.estimate.fits

    @property
    def options(self) -> tuple[Option, ...]:
        """What fits, the fastest for each sample first; of equal speed the one that changes least."""
        fitting = [option for option in self.tried if option.estimate.fits]
        return tuple(sorted(fitting, key=lambda option: (round(option.estimate.device_seconds, 9), len(option.levers))))

    @property
    def nearest(self) -> Option:
        """What needs least, for where nothing fits."""
        return min(self.tried, key=lambda option: option.estimate.high_bytes)

    @property
    def estimate(self) -> Estimate:
        """What was asked for."""
        return self.asked.estimate

    def __str__(self) -> str:
        from lowtide.reports import fit_text

        return fit_text(self)

    def _repr_html_(self) -> str:
        from lowtide.reports import html_of

        return html_of(str(self))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "kind": "lowtide.Fit",
            "schema": SCHEMA,
            "workload": self.workload,
            "fits": self.fits,
            "asked": self.asked.to_json(),
            "options": [option.to_json() for option in self.options],
            "assumptions": list(self.assumptions),
        }


def fit(
    workload: Workload,
    setup: Setup,
    accelerator: Accelerator,
    memory: int | None = None,
    *,
    tell: Told = lambda text: None,
    always: bool = False,
) -> Fit:
    """Estimate ``workload`` under ``setup``, and where it does not fit, everything that may help.

    Args:
        workload: what is trained.
        setup: how.
        accelerator: on what.
        memory: bytes to fit into; by default all that the accelerator has.
        tell: is told what is being done.
        always: try what may help even where it is not needed.

    Raises:
        GraphError: fake tensors cannot follow the step.
    """
    trials = Trials(workload, accelerator, accelerator.memory_bytes if memory is None else memory, tell)
    return fit_with(trials, setup, always=always)


def fit_with(trials: Trials, setup: Setup, *, always: bool = False) -> Fit:
    """The same on trials, whose traces and plans stay."""
    asked = trials.plain(setup)
    tried = [asked]
    if always or not asked.estimate.fits:
        tried += _tried(trials, setup)
    return Fit(trials.workload.name, asked, tuple(tried), tuple(assumptions(trials, setup)))


def _tried(trials: Trials, setup: Setup) -> Iterator[Option]:
    yield trials.checkpointed(setup)
    levers = _worthwhile(trials, setup)
    for lever, degrees in levers.items():
        yield from _degrees(trials, setup, (lever,), degrees)
    for first, second in PAIRS:
        if first in levers and second in levers:
            strongest = levers[first][-1]
            yield from _degrees(trials, strongest(setup), (first, second), levers[second])


def _worthwhile(trials: Trials, setup: Setup) -> dict[str, list[Change]]:
    """The levers, without other optimizers where memory has little to do with them."""
    prepared = trials.prepared(setup)
    states = prepared.graph.optimizer_bytes / max(1, trials.plain(setup).estimate.peak_bytes)
    in_step = prepared.optimizer_bytes > NEAR * trials.room
    useless = {lever for lever, use in ((FUSED, in_step), (EIGHT_BIT, in_step or states > SMALL)) if not use}
    levers = levers_for(trials.workload, setup, trials.accelerator)
    return {lever: degrees for lever, degrees in levers.items() if lever not in useless}


def _degrees(trials: Trials, setup: Setup, levers: tuple[str, ...], degrees: list[Change]) -> Iterator[Option]:
    """The mildest degree at which it fits under checkpointing, and the mildest at which it fits without."""
    checkpointed = False
    for number, change in enumerate(degrees):
        changed = change(setup)
        plain = trials.plain(changed, levers)
        last = number == len(degrees) - 1
        if plain.estimate.fits or last:
            yield plain
        hopeless = trials.prepared(changed).graph.resident_bytes > trials.room
        if not plain.estimate.fits and not checkpointed and (last or not hopeless):
            option = trials.checkpointed(changed, levers)
            checkpointed = option.estimate.fits
            if checkpointed or last:
                yield option
        if plain.estimate.fits:
            return


def assumptions(trials: Trials, setup: Setup) -> Iterator[str]:
    """What the numbers rest on."""
    traced = trials.prepared(setup).traced
    accelerator = trials.accelerator
    yield from traced.remarks
    if accelerator.name == "cpu":
        yield "bytes are those of tensors, within 1 %"
    else:
        yield (
            "bytes are those of tensors, within 1 %; up to 5 % more for the allocator's fragments and 0.68 GiB for "
            "the device's context and libraries are assumed, not measured"
        )
    if OPTIMIZERS[setup.optimizer].remark:
        yield f"{setup.optimizer}: {OPTIMIZERS[setup.optimizer].remark}"
    yield f"times are a roofline of {accelerator.name} ({accelerator.source}); they rank, they do not promise"
    yield "sharded: communication is overlapped, and counts only where it takes longer than the rest"
