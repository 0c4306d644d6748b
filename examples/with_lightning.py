"""Lightning's Trainer within a budget.

pip install "lowtide[lightning]"
python -m examples.with_lightning
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lowtide.integrations.lightning import Lowtide


class Regression(LightningModule):
    """A stack of equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        )
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train(callback: Lowtide | None) -> list[float]:
    """The losses of one epoch."""
    torch.manual_seed(0)
    module = Regression()
    rows = torch.randn(4096, 64)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[callback] if callback else [],
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=512))  # type: ignore[arg-type]
    return module.losses


def main() -> None:
    callback = Lowtide(budget="75%")
    same = train(None) == train(callback)
    print(callback.report())
    print("the losses are the same to the last bit" if same else "the losses differ")
    assert same


if __name__ == "__main__":
    main()
