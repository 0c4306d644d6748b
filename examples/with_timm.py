"""A vision transformer of timm in a training loop of one's own, within a budget.

pip install timm
python -m examples.with_timm
"""

from __future__ import annotations

from contextlib import nullcontext

import timm
import torch
import torch.nn.functional as F

from lowtide.integrations.timm import Lowtide


def train(session: Lowtide | None) -> list[float]:
    """The losses of a few steps."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=96, num_classes=10, drop_path_rate=0.1)
    model.set_grad_checkpointing()  # lowtide takes its place
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    losses = []
    with session.on(model, optimizer) if session is not None else nullcontext():
        for _ in range(4):
            loss = F.cross_entropy(model(torch.randn(16, 3, 96, 96)), torch.randint(0, 10, (16,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses


def main() -> None:
    session = Lowtide(budget="75%")
    same = train(None) == train(session)
    print(session.report())
    print("the losses are the same to the last bit" if same else "the losses differ")
    assert same


if __name__ == "__main__":
    main()
