"""How a row is written down, and what rows use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

Body = TypeVar("Body", bound=Callable[[], None])


@dataclass(frozen=True)
class Law:
    """One of PyTorch's tests, what it asks, and how lowtide's answer differs, if it does."""

    theirs: str
    check: Callable[[], None]
    difference: str


class Table(list[Law]):
    """Rows of one subject."""

    def law(self, *theirs: str, difference: str = "") -> Callable[[Body], Body]:
        """Add the decorated check under the names of PyTorch's tests that it answers."""

        def add(check: Body) -> Body:
            self.extend(Law(name, check, difference) for name in theirs)
            return check

        return add


def layers(depth: int = 3, width: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape or (4, 6), requires_grad=True)


def gradients(run: Callable[[], Tensor], *leaves: Tensor, seed: int = 7) -> list[Tensor | None]:
    for each in leaves:
        each.grad = None
    torch.manual_seed(seed)
    run().sum().backward()
    return [each.grad for each in leaves]


def saving(name: str) -> Callable[..., CheckpointPolicy]:
    """A selective policy that saves what operators of this name make."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if name in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def equal(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    pairs = zip(one, other, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def same_gradients(plain: Callable[[], Tensor], ours: Callable[[], Tensor], *leaves: Tensor) -> None:
    assert equal(gradients(plain, *leaves), gradients(ours, *leaves))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * torch.tensor(2.0)
