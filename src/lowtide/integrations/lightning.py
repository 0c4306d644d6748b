"""Lightning: a callback for its ``Trainer``.

Example:
    >>> from lowtide.integrations.lightning import Lowtide
    >>> trainer = Trainer(callbacks=[Lowtide(budget="12 GiB")])  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from lowtide.integrations.session import Session, Undo, take_over_wrappers

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

__all__ = ["Lowtide", "take_over"]


def take_over(model: nn.Module) -> Undo:
    """Send the checkpoint wrappers around parts of ``model`` to lowtide; Lightning has no switch of its own.

    Returns:
        A function that undoes it.
    """
    return take_over_wrappers(model)


class Lowtide(Session, Callback):
    """Plans the steps of the trained module from ``on_train_start`` to ``on_train_end``.

    Args:
        budget: see ``lowtide.attach``; so are plan, policy and strict.
        part: path of the part of the ``LightningModule`` whose calls are planned. By default its only child with
            parameters; where it has several, the module itself, which ``training_step`` must then call.
    """

    take_over = staticmethod(take_over)

    def __init__(self, budget: int | str | None = None, *, part: str | None = None, **wanted: Any) -> None:
        super().__init__(budget, **wanted)
        self.part = part

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module or its part."""
        self.begin(self._planned_part(pl_module), trainer.optimizers[0] if len(trainer.optimizers) == 1 else None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach; the report stays."""
        self.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detach."""
        self.end()

    def _planned_part(self, module: LightningModule) -> nn.Module:
        if self.part is not None:
            return module.get_submodule(self.part)
        trained = [child for child in module.children() if any(True for _ in child.parameters())]
        return trained[0] if len(trained) == 1 else module
