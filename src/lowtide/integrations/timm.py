"""timm: its models in a training loop of one's own.

Example:
    >>> from lowtide.integrations.timm import Lowtide
    >>> with Lowtide(budget="12 GiB").on(model):  # doctest: +SKIP
    ...     train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.integrations.session import Session, Undo, replace

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Lowtide", "take_over"]


def take_over(model: nn.Module) -> Undo:
    """Switch off the checkpointing that ``set_grad_checkpointing`` switched on in ``model``.

    timm takes no other checkpoint function, so without a plan or policy nothing is recomputed.

    Returns:
        A function that undoes it.
    """
    parts = [module for module in model.modules() if getattr(module, "grad_checkpointing", False)]
    return replace(parts, "grad_checkpointing", False, "timm's gradient checkpointing")


class Lowtide(Session):
    """Plans a model's steps: ``with Lowtide(budget=...).on(model):``."""

    take_over = staticmethod(take_over)
