"""Models of the zoo that are written here: a U-Net, recurrences over many steps, a very deep perceptron."""

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


class Layered(nn.Module):
    """PyTorch's own LSTM of several layers, (B, T, D) -> (B, D)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, sequence: Tensor) -> Tensor:
        last: Tensor = self.head(self.layers(sequence)[0][:, -1])
        return last


def long_lstm(steps: int = 1000) -> ZooModel:
    """Two layers over very many steps."""
    torch.manual_seed(0)
    return zoo_model(
        f"LSTM, 2 layers of 32, 4 x {steps} steps",
        Layered(32, 2),
        {"sequence": torch.randn(4, steps, 32)},
        "layers",
        "head",
        lambda last: last.square().mean(),
    )


class Residual(nn.Module):
    """Many small layers on one stream, (B, D) -> (B, D)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def deep_perceptron(layers: int = 1000) -> ZooModel:
    """As deep as anybody goes."""
    torch.manual_seed(0)
    return zoo_model(
        f"residual MLP, {layers} layers of 32, 256 rows",
        Residual(32, layers),
        {"x": torch.randn(256, 32)},
        "layers.*",
        "layers.*.2",
        lambda stream: stream.square().mean(),
    )
