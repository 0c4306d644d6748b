"""diffusers: UNets, transformers and autoencoders in a training loop of one's own.

Example:
    >>> from lowtide.integrations.diffusers import Lowtide
    >>> with Lowtide(budget="12 GiB").on(unet):  # doctest: +SKIP
    ...     train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.integrations.session import Session, Undo, replace, stand_in

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Lowtide", "take_over"]


def take_over(model: nn.Module) -> Undo:
    """Send the checkpointing that ``enable_gradient_checkpointing`` switched on in ``model`` to lowtide.

    Under a plan the plan decides; otherwise each block runs under ``lowtide.checkpoint``.

    Returns:
        A function that undoes it.
    """
    blocks = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    return replace(blocks, "_gradient_checkpointing_func", stand_in, "diffusers' gradient checkpointing")


class Lowtide(Session):
    """Plans a model's steps: ``with Lowtide(budget=...).on(model):``."""

    take_over = staticmethod(take_over)
