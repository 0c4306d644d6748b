"""Training a part of a model: low-rank adapters as PEFT adds them, and parameters that are frozen."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lowtide.configurations.reading import ConfigurationError


class LowRank(nn.Module):
    """A frozen linear layer and a product of two narrow ones beside it (Hu et al., 2021, "LoRA").

    As in PEFT the adapters are float32 whatever the base is, and the input is cast for them.
    """

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(inputs, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, outputs, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        cast = x if torch.is_autocast_enabled("cpu") else x.to(self.lora_A.weight.dtype)
        product: Tensor = self.lora_B(self.lora_A(cast))
        return (result + product * 2.0).to(result.dtype)


def add_adapters(model: nn.Module, rank: int, targets: tuple[str, ...] = ()) -> int:
    """Freeze ``model`` and put an adapter on every linear layer but the head, or on those that end in ``targets``.

    Returns:
        How many layers got one.

    Raises:
        ConfigurationError: there is no such layer.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    heads = {id(head) for head in (_head(model),) if head is not None}
    found: list[tuple[nn.Module, str, nn.Module, int, int]] = []
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            size = _size(child)
            named = not targets or any(fnmatchcase(f"{path}.{name}", f"*{target}") for target in targets)
            if size is not None and named and id(child) not in heads:
                found.append((parent, name, child, *size))
    if not found:
        wanted = f" whose path ends in {' or '.join(targets)}" if targets else ""
        raise ConfigurationError(f"The model has no linear layer{wanted} to put an adapter on.")
    for parent, name, child, inputs, outputs in found:
        setattr(parent, name, LowRank(child, inputs, outputs, rank))
    return len(found)


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names fit one of ``patterns``, or that are inside of a module that does.

    Raises:
        ConfigurationError: a pattern fits nothing, or nothing is left to train.
    """
    for pattern in patterns:
        fitting = [p for name, p in model.named_parameters() if _fits(name, pattern)]
        if not fitting:
            some = ", ".join(sorted({name.partition(".")[0] for name, _ in model.named_parameters()}))
            raise ConfigurationError(f"--freeze {pattern!r} fits no parameter; their names begin with {some}.")
        for parameter in fitting:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigurationError("Everything is frozen; nothing is left to train.")


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _head(model: nn.Module) -> nn.Module | None:
    head = getattr(model, "get_output_embeddings", None)
    return head() if head is not None else None


def _size(module: nn.Module) -> tuple[int, int] | None:
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor):  # GPT-2's linear layer
        return module.weight.shape[0], module.weight.shape[1]
    return None
