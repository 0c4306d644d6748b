"""Real text that every CPython carries, as bytes, and batches cut from it."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCABULARY = 256
"""A token is a byte: no tokenizer to ship, and logits that take little room beside the blocks."""


def load_corpus() -> Tensor:
    """Return the reference texts behind Python's `help()` as one tensor of bytes, in a fixed order."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def batches(corpus: Tensor, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield batches (batch, length + 1) of tokens without end, from places drawn with `seed`."""
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(corpus) - length, (batch, 1), generator=generator)
        yield corpus[starts + span].long()
