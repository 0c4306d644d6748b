"""DeepSpeed: an engine's model in a training loop of one's own, under any stage of ZeRO.

Example:
    >>> from lowtide.integrations.deepspeed import Lowtide
    >>> engine, *_ = deepspeed.initialize(model=model, config=config)  # doctest: +SKIP
    >>> with Lowtide(budget="12 GiB").on(engine):  # doctest: +SKIP
    ...     train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed import DeepSpeedEngine, checkpointing
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

from lowtide import recomputable
from lowtide.integrations.session import Session, Undo, replace, stand_in

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Lowtide", "take_over"]

recomputable(LinearFunctionForZeroStage3)  # a matrix product, in place of torch's own


def take_over(model: nn.Module | None = None) -> Undo:
    """Send ``deepspeed.checkpointing.checkpoint`` to lowtide, and ``non_reentrant_checkpoint`` beside it.

    They belong to no model: what calls them by way of the module is served, whichever it is. Under a plan the plan
    decides; otherwise each call runs under ``lowtide.checkpoint``. What DeepSpeed partitions or moves to the host
    there is then recomputed instead.

    Returns:
        A function that undoes it.
    """
    del model
    one = replace([checkpointing], "checkpoint", stand_in)
    other = replace([checkpointing], "non_reentrant_checkpoint", stand_in)

    def undo() -> None:
        one()
        other()

    return undo


class Lowtide(Session):
    """Plans the steps of an engine's model: ``with Lowtide(budget=...).on(engine):``."""

    take_over = staticmethod(take_over)

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Attach to an engine's model, or to a model that an engine is made of afterwards."""
        super().begin(model.module if isinstance(model, DeepSpeedEngine) else model, optimizer)
