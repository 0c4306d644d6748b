"""Small models to train, their data, and what training them leaves behind, to be compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 16, 24

Left = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Tower(nn.Module):
    """A stack of blocks with batch statistics, so that it has buffers."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Words(nn.Module):
    """A small language model with shared weights; its loss is inside unless ``targets`` is None."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def words(batch: int = 16, length: int = 24) -> Tensor:
    return torch.randint(0, WORDS, (batch, length))


def rows(batch: int = 24) -> Tensor:
    return torch.randn(8 * batch, WIDTH)


def left(losses: list[Tensor], *models: nn.Module, **more: Any) -> Left:
    """Everything that training left behind."""
    found: Left = {f"loss {i}": loss.detach().clone() for i, loss in enumerate(losses)}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            found[f"{number} {name}"] = parameter.detach().clone()
            found[f"{number} {name} gradient"] = None if parameter.grad is None else parameter.grad.clone()
        found |= {f"{number} {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return found | more | {"random state": torch.get_rng_state()}


def differences(one: Left, other: Left) -> list[str]:
    """The names of what differs in any bit."""
    names = dict.fromkeys((*one, *other))
    return [name for name in names if name not in one or name not in other or not same(one[name], other[name])]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
