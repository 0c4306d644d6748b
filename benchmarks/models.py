"""The models that are measured, each with a batch, its blocks and a step to take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.demo.model import GPT, Attention, GPTShape


@dataclass(frozen=True)
class Workload:
    """A model in training mode and all that is needed to run and to checkpoint it.

    `blocks` are what per-block contenders wrap, `pattern` matches the paths of the same modules, and
    `forward` runs the model on `batch` and returns the loss.
    """

    name: str
    model: nn.Module
    blocks: list[nn.Module]
    pattern: str
    batch: Tensor
    forward: Callable[[], Tensor]


def gpt_workload(name: str, shape: GPTShape, batch: int) -> Workload:
    """A GPT with GELU blocks on random tokens (batch, length + 1)."""
    torch.manual_seed(0)
    model = GPT(shape)
    tokens = torch.randint(shape.vocabulary, (batch, shape.length + 1))
    return Workload(name, model, list(model.blocks), "blocks.*", tokens, lambda: model.loss(tokens))


def tiny_gpt() -> Workload:
    """So small that nearly all of its time is the host's."""
    shape = GPTShape(vocabulary=64, length=8, width=16, blocks=6, heads=2)
    return gpt_workload("tiny GPT, 6 blocks of 16, 2 x 8 tokens", shape, batch=2)


def medium_gpt() -> Workload:
    """GPT-2 medium's blocks on one short sequence; a small vocabulary leaves the time to the blocks."""
    shape = GPTShape(vocabulary=1024, length=16, width=1024, blocks=24, heads=16)
    return gpt_workload("GPT-2 medium, 24 blocks of 1024, 1 x 16 tokens", shape, batch=1)


def gelu_gpt() -> Workload:
    """The first model of the design's table."""
    shape = GPTShape(vocabulary=1024, length=512, width=512, blocks=6, heads=8)
    return gpt_workload("GPT, GELU, 6 blocks of 512, 4 x 512 tokens", shape, batch=4)


def small_gelu_gpt() -> Workload:
    """The same kind in seconds, for tests."""
    shape = GPTShape(vocabulary=64, length=64, width=64, blocks=3, heads=4)
    return gpt_workload("GPT, GELU, 3 blocks of 64, 4 x 64 tokens", shape, batch=4)


class SwiGLU(nn.Module):
    """A gated MLP, (B, T, D) -> (B, T, D), hidden width 8 D / 3."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        hidden = 8 * shape.width // 3
        self.gate = nn.Linear(shape.width, hidden, bias=False)
        self.up = nn.Linear(shape.width, hidden, bias=False)
        self.down = nn.Linear(hidden, shape.width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))
        return mixed


class RMSBlock(nn.Module):
    """One block with RMSNorm and SwiGLU, (B, T, D) -> (B, T, D)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


def swiglu_workload(name: str, shape: GPTShape, batch: int) -> Workload:
    """A GPT whose blocks and last norm are those of newer language models."""
    torch.manual_seed(0)
    model = GPT(shape)
    model.blocks = nn.ModuleList(RMSBlock(shape) for _ in range(shape.blocks))
    model.norm = nn.RMSNorm(shape.width)  # type: ignore[assignment]
    tokens = torch.randint(shape.vocabulary, (batch, shape.length + 1))
    return Workload(name, model, list(model.blocks), "blocks.*", tokens, lambda: model.loss(tokens))


def swiglu_lm() -> Workload:
    """The second model of the design's table."""
    shape = GPTShape(vocabulary=1024, length=384, width=384, blocks=8, heads=6)
    return swiglu_workload("LM, SwiGLU/RMSNorm, 8 blocks of 384, 4 x 384 tokens", shape, batch=4)


def small_swiglu_lm() -> Workload:
    """The same kind in seconds, for tests."""
    shape = GPTShape(vocabulary=64, length=64, width=48, blocks=3, heads=4)
    return swiglu_workload("LM, SwiGLU/RMSNorm, 3 blocks of 48, 4 x 64 tokens", shape, batch=4)


def resnet50() -> Workload:
    """ResNet-50 of transformers, by configuration, on eight pictures of 32 x 32."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig()).train()
    pictures, labels = torch.randn(8, 3, 32, 32), torch.randint(model.config.num_labels, (8,))

    def forward() -> Tensor:
        return F.cross_entropy(model(pixel_values=pictures).logits, labels)

    blocks = [layer for stage in model.resnet.encoder.stages for layer in stage.layers]
    pattern = "resnet.encoder.stages.*.layers.*"
    return Workload("ResNet-50, 8 x 3 x 32 x 32", model, blocks, pattern, pictures, forward)
