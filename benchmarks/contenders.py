"""PyTorch's and other people's ways to checkpoint, beside lowtide's, all put on the same blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch_remat  # type: ignore[import-untyped]
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lowtide.demo.contenders import (
    PLAIN,
    Contender,
    Forward,
    lowtide_policy,
    lowtide_segments,
    torch_per_block,
)

EXPENSIVE = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What selective checkpointing keeps: matrix products, convolutions, attention."""


def torch_sac() -> Contender:
    """PyTorch's selective activation checkpointing: each block again, but for its expensive operations."""
    contexts = partial(create_selective_checkpoint_contexts, EXPENSIVE)
    return Contender(
        "torch SAC",
        replace_forward=lambda forward: partial(checkpoint, forward, use_reentrant=False, context_fn=contexts),
    )


class DefaultGenerator:
    """Hands torch_remat the CPU's random state, which it does not look after by itself."""

    def snapshot(self) -> Any:
        return torch.get_rng_state()

    def restore(self, state: Any) -> None:
        torch.set_rng_state(state)


def torch_remat_per_block() -> Contender:
    """torch_remat around each block, told to restore the random state so that dropout comes out the same."""

    def replace_forward(forward: Forward) -> Forward:
        checkpointed: Forward = torch_remat.checkpoint(recompute_state_hooks=(DefaultGenerator(),))(forward)
        return checkpointed

    return Contender("torch_remat per block", replace_forward=replace_forward)


def host_cost_contenders(pattern: str) -> list[Contender]:
    """Those whose work on the host is compared, plain first."""
    return [
        PLAIN,
        torch_per_block(),
        torch_sac(),
        torch_remat_per_block(),
        lowtide_policy("keep_all"),
        lowtide_policy("keep_matmuls"),
        lowtide_segments(pattern, n=1),
    ]


def engine_contenders(pattern: str) -> list[Contender]:
    """Those whose memory and time are compared, plain first."""
    return [
        PLAIN,
        torch_per_block(),
        torch_sac(),
        lowtide_segments(pattern, n=1),
        lowtide_segments(pattern, n=2),
        lowtide_policy("keep_matmuls"),
    ]
