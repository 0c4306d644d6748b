"""What a model of the zoo is: a workload with all of its inputs, run from one random state."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.models import Workload
from lowtide.policies import matches


@dataclass(frozen=True)
class ZooModel(Workload):
    """A workload with all of its inputs, and the pattern of an MLP-like part of its blocks."""

    inputs: tuple[Tensor, ...] = ()
    mlp: str = ""

    def seeded(self) -> ZooModel:
        """The same model, every forward pass from the same random state: torch's, NumPy's and Python's."""

        def forward() -> Tensor:
            torch.manual_seed(1)
            np.random.seed(1)
            random.seed(1)
            return self.forward()

        return replace(self, forward=forward)

    def in_bfloat16(self) -> ZooModel:
        """The same model, its forward pass under bfloat16 autocast."""

        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.forward()

        return replace(self, name=f"{self.name}, bfloat16 autocast", forward=forward)


def zoo_model(
    name: str,
    model: nn.Module,
    inputs: dict[str, Tensor],
    pattern: str,
    mlp: str,
    loss: Callable[[Any], Tensor] = lambda output: output.loss,
    **constants: Any,
) -> ZooModel:
    """A model in training mode that is called with `inputs` and `constants`; `loss` takes what it returns."""
    model.train()
    blocks = [module for path, module in model.named_modules() if path and matches(pattern, path)]
    tensors = tuple(inputs.values())

    def forward() -> Tensor:
        return loss(model(**inputs, **constants))

    return ZooModel(name, model, blocks, pattern, tensors[0], forward, tensors, mlp)


def from_workload(make: Callable[[], Workload]) -> Callable[[], ZooModel]:
    """A maker of the GPT-like workload that `make` makes, as a model of the zoo."""

    def made() -> ZooModel:
        own = make()
        return ZooModel(
            own.name, own.model, own.blocks, own.pattern, own.batch, own.forward, (own.batch,), "blocks.*.mlp"
        )

    return made
