"""How a zoo file writes its cases down: a line for a plain body or a module, a function for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness import Case, Program

Shape = tuple[int, ...]


def prepare(leaf: Tensor) -> Tensor:
    """Make a result several ops deep from a leaf: in-place ops on it are lawful, and it can be dropped."""
    return leaf.mul(1.25).sin().add(leaf) if leaf.is_floating_point() or leaf.is_complex() else leaf


def weigh(out: Any) -> Tensor:
    """Reduce tensors, nested in any way, to a scalar; each element counts with a weight of its own."""
    return torch.stack([_weigh(tensor) for tensor in _tensors(out)]).sum()


def _weigh(out: Tensor) -> Tensor:
    if out.is_complex():
        out = torch.view_as_real(out)
    out = out.double()
    ramp = torch.linspace(-1.0, 1.5, out.numel(), dtype=torch.float64).view(out.shape)
    return ((out * 0.5).tanh() * ramp).sum()


def _tensors(out: Any) -> Iterable[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, dict):
        yield from _tensors(list(out.values()))
    elif out is not None:
        for item in out:
            yield from _tensors(item)


def randn(*shape: int, requires_grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw a leaf."""
    return torch.randn(shape, dtype=dtype).requires_grad_(requires_grad)


class Zoo(list[Case]):
    """A list of cases whose names begin with the file's subject."""

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def flow(self, name: str, body: Callable[..., Any], *, dtype: torch.dtype = torch.float32, **about: Any) -> None:
        """Add a program that draws leaves, prepares each, runs `body` on them and weighs what comes out.

        Keywords that are shapes name leaves (default: x of 6 x 8); the others belong to the case.
        """
        shapes: dict[str, Shape] = {key: about.pop(key) for key in list(about) if isinstance(about[key], tuple)}

        def build() -> Program:
            leaves = {key: randn(*shape, dtype=dtype) for key, shape in (shapes or {"x": (6, 8)}).items()}
            return Program(lambda: weigh(body(*map(prepare, leaves.values()))), leaves=leaves)

        self.add(name, build, **about)

    def module(
        self,
        name: str,
        make: Callable[[], nn.Module],
        *shape: int,
        call: Callable[..., Any] | None = None,
        **about: Any,
    ) -> None:
        """Add a program that runs a module on one prepared leaf; `call(model, x)` replaces `model(x)`."""

        def build() -> Program:
            model, x = make(), randn(*shape)
            run = call or (lambda model, x: model(x))
            return Program(lambda: weigh(run(model, prepare(x))), model=model, leaves={"x": x})

        self.add(name, build, **about)

    def add(self, name: str, build: Callable[[], Program], **about: Any) -> None:
        """Add a builder under a name."""
        self.append(Case(f"{self.subject}-{name}", build, **about))

    def program(self, **about: Any) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
        """Add the decorated builder under its own name."""

        def add(build: Callable[[], Program]) -> Callable[[], Program]:
            self.add(build.__name__, build, **about)
            return build

        return add
