"""Models of the zoo that are written here: a U-Net, and a recurrence over many steps."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_model import ZooModel, zoo_model


class UNet(nn.Module):
    """Two levels down and two up with skips, (B, 3, H, W) -> (B, 2, H, W): batch norm, activations in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.convolutions(3, width), self.convolutions(width, 2 * width)])
        self.middle = self.convolutions(2 * width, 2 * width)
        self.up = nn.ModuleList([self.convolutions(4 * width, width), self.convolutions(2 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def convolutions(before: int, after: int) -> nn.Module:
        """Two convolutions, (B, before, H, W) -> (B, after, H, W)."""
        layers: list[nn.Module] = []
        for width in (before, after):
            layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Dropout2d(0.1))

    def forward(self, pictures: Tensor) -> Tensor:
        x, skips = pictures, []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
            x = block(torch.cat([x, skips.pop()], 1))
        logits: Tensor = self.head(x)
        return logits


def unet() -> ZooModel:
    """A U-Net by hand that tells two classes apart at every pixel."""
    torch.manual_seed(0)
    pictures, labels = torch.randn(4, 3, 96, 96), torch.randint(2, (4, 96, 96))
    own = zoo_model(
        "U-Net of 24, 4 x 3 x 96 x 96",
        UNet(24),
        {"pictures": pictures},
        "up.*",
        "middle",
        lambda logits: F.cross_entropy(logits, labels),
    )
    return replace(own, inputs=(pictures, labels))


class Recurrent(nn.Module):
    """Two LSTM cells run step by step, (B, T, D) -> (B, D): deep in operations, small in each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.cells = nn.ModuleList([nn.LSTMCell(width, width) for _ in range(2)])
        self.head = nn.Linear(width, width)

    def forward(self, sequence: Tensor) -> Tensor:
        states = [(sequence.new_zeros(len(sequence), self.width),) * 2 for _ in self.cells]
        for x in sequence.unbind(1):
            states[0] = self.cells[0](x, states[0])
            states[1] = self.cells[1](states[0][0], states[1])
        last: Tensor = self.head(states[-1][0])
        return last


def lstm(steps: int = 80) -> ZooModel:
    """A recurrence over many steps."""
    torch.manual_seed(0)
    return zoo_model(
        f"LSTM, 2 cells of 96, 16 x {steps} steps",
        Recurrent(96),
        {"sequence": torch.randn(16, steps, 96)},
        "cells.*",
        "head",
        lambda last: last.square().mean(),
    )
