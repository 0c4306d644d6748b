"""A GPT of plain PyTorch parts: LayerNorm, fused attention, a GELU MLP, dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a GPT: vocabulary and length in tokens, width in features, dropout as a probability."""

    vocabulary: int
    length: int
    width: int
    blocks: int
    heads: int
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) -> (B, T, D); no dropout inside, so the fused kernel can be used."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        return joined


class MLP(nn.Sequential):
    """Two linear maps around a GELU, (B, T, D) -> (B, T, D)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
            nn.Dropout(shape.dropout),
        )


class Block(nn.Module):
    """One pre-norm transformer block, (B, T, D) -> (B, T, D)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class GPT(nn.Module):
    """Predict the next token; the output matrix is the embedding itself."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, T, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy in nats of tokens (B, T + 1), each predicted from those before it."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
