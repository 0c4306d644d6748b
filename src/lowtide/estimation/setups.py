"""How a model is trained: everything besides the model that decides about memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from lowtide.errors import LowtideError
from lowtide.graph import StepGraph

PRECISIONS = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "bf16-mixed": "bfloat16-mixed",
    "bfloat16-mixed": "bfloat16-mixed",
    "fp16-mixed": "float16-mixed",
    "float16-mixed": "float16-mixed",
}
"""What people write, and what it is: the weights' dtype, or the autocast dtype over float32 weights."""

SHARDINGS = {
    "none": "every rank holds everything (DDP)",
    "zero1": "optimizer states are sharded",
    "zero2": "optimizer states and gradients are sharded",
    "fsdp": "parameters, gradients and optimizer states are sharded (FSDP, ZeRO-3)",
}


class SetupError(LowtideError, ValueError):
    """A setup says something that lowtide cannot estimate; the message names what it can."""


@dataclass(frozen=True)
class Setup:
    """How one device trains. The optimizer steps once every ``accumulation`` batches."""

    batch: int = 1
    """Samples that a device handles at once."""
    length: int = 0
    """Tokens of a sample; 0 where the model has none, or its own length counts."""
    precision: str = "float32"
    """``float32``, ``bfloat16``, ``float16``; with ``-mixed`` the last two are autocast over float32 weights."""
    attention: str = "efficient"
    """``efficient``: scores are never stored; ``plain``: they are."""
    optimizer: str = "adamw"
    accumulation: int = 1
    ranks: int = 1
    """Devices that train together, each with its own batch."""
    sharding: str = "none"

    def __post_init__(self) -> None:
        for name in ("batch", "accumulation", "ranks"):
            if getattr(self, name) < 1:
                raise SetupError(f"{name} is {getattr(self, name)}; at least 1 is expected")
        if self.length < 0:
            raise SetupError(f"length is {self.length}; at least 1 is expected")
        for name, known in (("precision", PRECISIONS), ("sharding", SHARDINGS)):
            if getattr(self, name) not in known:
                raise SetupError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        object.__setattr__(self, "precision", PRECISIONS[self.precision])

    @property
    def trace_key(self) -> Setup:
        """The same setup as far as it decides what one step computes."""
        again = 2 if self.accumulation > 1 else 1
        return replace(self, optimizer="adamw", accumulation=again, ranks=1, sharding="none")

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""
        return 2 if self.precision in ("bfloat16", "float16") else 4

    @property
    def text(self) -> str:
        """In a few words.

        >>> Setup(batch=4, length=8192, precision="bf16").text
        '4 × 8192, bfloat16, adamw'
        """
        size = f"{self.batch} × {self.length}" if self.length else f"batch {self.batch}"
        words = [size, self.precision, self.optimizer]
        if self.attention == "plain":
            words.append("plain attention")
        if self.accumulation > 1:
            words.append(f"accumulated over {self.accumulation}")
        if self.ranks > 1:
            words.append(f"{self.sharding if self.sharding != 'none' else 'ddp'} over {self.ranks}")
        return ", ".join(words)


@dataclass(frozen=True)
class Tensor:
    """A parameter that is trained, without its contents."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def count(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the parameter, and of its gradient."""
        return self.count * self.itemsize


@dataclass(frozen=True)
class Traced:
    """One step, traced under a setup."""

    graph: StepGraph
    trained: tuple[Tensor, ...]
    remarks: tuple[str, ...] = ()
    """What the trace assumes."""

    @property
    def trained_bytes(self) -> int:
        """Bytes of all that is trained."""
        return sum(tensor.bytes for tensor in self.trained)


class Workload(Protocol):
    """A step that can be traced under other setups."""

    @property
    def name(self) -> str:
        """What is trained, in a few words."""

    @property
    def changes(self) -> frozenset[str]:
        """Fields of a setup that can be other than they are: batch, length, precision, attention."""

    @property
    def longest(self) -> int | None:
        """Tokens that the model has positions for; None where nobody says."""

    def trace(self, setup: Setup) -> Traced:
        """The step under ``setup``; equal trace keys give the same answer.

        Raises:
            GraphError: fake tensors cannot follow the step.
        """
