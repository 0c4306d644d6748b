"""Training steps under DeepSpeed's ZeRO: by name, the engine that each rank makes and what it does with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from distributed_steps import WIDTH, Block, Net, two_forwards, words
from torch import Tensor, nn

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")

TIGHT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
"""Every parameter is partitioned, and given back as soon as its module has run."""


def initialize(model: nn.Module, stage: int, *, accumulate: int = 1, half: bool = False, **zero: Any) -> Any:
    """An engine for ``model`` on this rank."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled on its first use
    settings = {
        "train_micro_batch_size_per_gpu": len(words(0)),
        "gradient_accumulation_steps": accumulate,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5000, **zero},
        "bf16": {"enabled": half},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, config=settings, model_parameters=trained)[0]


@dataclass
class Case:
    """One way to train."""

    stage: int
    build: Callable[[], nn.Module] = Net
    loss_of: Callable[[nn.Module, int], Tensor] = lambda engine, number: engine(words(number))
    settings: Any = None

    def engine(self) -> Any:
        """A new engine, the same each time."""
        torch.manual_seed(0)
        return initialize(self.build(), self.stage, **(self.settings or {}))


def frozen() -> Net:
    model = Net()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].mlp.up.requires_grad_(False)
    return model


def with_leaves() -> Net:
    from deepspeed.utils import set_z3_leaf_modules

    model = Net()
    set_z3_leaf_modules(model, [Block])
    return model


class Convolutions(nn.Module):
    """Parameters that are read by other functions than ``linear``, and by other modules than their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(4, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).transpose(1, 2)
        for _ in range(3):
            x = x + F.dropout(self.norm(self.convolution(x).sigmoid() * self.gate.exp()[:, None]), 0.2)
        self.mean.lerp_(x.detach().mean((0, 2)), 0.5)
        return F.cross_entropy((x.transpose(1, 2) @ self.embed.weight.t()).flatten(0, 1), words.flatten())


CASES: dict[str, Case] = {}
for _stage in (1, 2, 3):
    _zero = TIGHT if _stage == 3 else {}
    CASES[f"stage {_stage}"] = Case(_stage, settings=_zero)
    CASES[f"stage {_stage}, frozen weights"] = Case(_stage, frozen, settings=_zero)
    CASES[f"stage {_stage}, accumulation"] = Case(_stage, settings=_zero | {"accumulate": 3})
    CASES[f"stage {_stage}, bfloat16"] = Case(_stage, settings=_zero | {"half": True})
    CASES[f"stage {_stage}, read aside"] = Case(_stage, lambda: Net("aside"), settings=_zero)
    CASES[f"stage {_stage}, shared block"] = Case(_stage, lambda: Net("shared"), settings=_zero)
    CASES[f"stage {_stage}, convolutions"] = Case(_stage, Convolutions, settings=_zero)
CASES["stage 3, small parameters stay"] = Case(3, settings=TIGHT | {"stage3_param_persistence_threshold": 200})
CASES["stage 3, prefetched"] = Case(
    3, settings=TIGHT | {"stage3_prefetch_bucket_size": 10000, "stage3_max_live_parameters": 20000}
)
CASES["stage 3, as it comes"] = Case(3, settings={"stage3_param_persistence_threshold": 200})
CASES["stage 3, whole blocks"] = Case(3, with_leaves, settings=TIGHT)
CASES["stage 3, gathered by sums"] = Case(3, settings=TIGHT | {"stage3_use_all_reduce_for_fetch_params": True})
CASES["stage 3, two forwards"] = Case(3, loss_of=two_forwards, settings=TIGHT)
