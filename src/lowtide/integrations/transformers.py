"""transformers: a callback for ``Trainer`` and what is built on it (TRL's trainers).

Example:
    >>> from lowtide.integrations.transformers import Lowtide
    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[Lowtide(budget="12 GiB")])  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from lowtide.integrations.session import Session, Undo, replace, stand_in

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Lowtide", "take_over"]


def take_over(model: nn.Module) -> Undo:
    """Send the activation checkpointing that is switched on in ``model`` to lowtide.

    That is what ``activation_checkpointing_enable``, the older ``gradient_checkpointing_enable`` and the trainer's
    flags switch on. Under a plan the plan decides; otherwise each layer runs under ``lowtide.checkpoint``.

    Returns:
        A function that undoes it.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    return replace(layers, "_gradient_checkpointing_func", stand_in, "transformers' activation checkpointing")


class Lowtide(Session, TrainerCallback):
    """Plans the trained model's steps from ``on_train_begin`` to ``on_train_end``.

    Where the trainer's own activation checkpointing is on, lowtide takes its place. Evaluation is not recorded. The
    model, what is saved of it and the trainer's arguments stay as they are.
    """

    take_over = staticmethod(take_over)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the trainer's model."""
        self.begin(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach; the report stays."""
        self.end()
