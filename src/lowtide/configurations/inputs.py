"""What a model of a configuration is fed with, and the loss of what it returns."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.configurations.reading import ConfigurationError

LONGEST_BY_DEFAULT = 4096
AUDIO_RATE = 16_000
AUDIO_SECONDS = 10
LABELS_PER_SAMPLE = ("SequenceClassification", "ImageClassification", "AudioClassification")


@dataclass(frozen=True)
class Feed:
    """What kind of input a model takes, and how long one is by default."""

    kind: str
    """``text``, ``text to text``, ``image``, ``features to text``, ``audio`` or ``image and text``."""
    length: int
    """Tokens, or numbers of a sound; 0 where there is nothing to choose."""
    remark: str = ""


def feed_of(config: Any, kind: type[nn.Module]) -> Feed:
    """What ``kind`` takes.

    Raises:
        ConfigurationError: something that lowtide cannot make up.
    """
    main = getattr(kind, "main_input_name", "input_ids")
    both = bool(getattr(config, "is_encoder_decoder", False))
    if _takes(kind, "return_loss") and getattr(config, "vision_config", None) is not None:
        return Feed("image and text", _positions(config.text_config, LONGEST_BY_DEFAULT))
    if main == "input_ids" or getattr(config, "text_config", None) is not None:
        pictures = getattr(config, "vision_config", None) is not None
        remark = "the text alone: pictures and the part that reads them are not counted as activations"
        text = getattr(config, "text_config", config)
        return Feed(
            "text to text" if both else "text", _positions(text, LONGEST_BY_DEFAULT), remark if pictures else ""
        )
    if main == "pixel_values":
        return Feed("image", 0)
    if main == "input_features" and both:
        return Feed("features to text", getattr(config, "max_target_positions", 448))
    if main == "input_values":
        return Feed("audio", AUDIO_RATE * AUDIO_SECONDS, f"audio of {AUDIO_RATE} numbers a second; length counts those")
    raise ConfigurationError(
        f"{kind.__name__} takes {main!r}, which lowtide cannot make up. Write a factory that returns the step and the "
        "model, and name it as FILE.py:FUNCTION."
    )


def make(config: Any, kind: type[nn.Module], feed: Feed, batch: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs of zeros: made under a fake mode they take no memory."""
    ids = torch.zeros(batch, length, dtype=torch.long) if length else None
    if feed.kind == "image":
        inputs: dict[str, Any] = {"pixel_values": _picture(config, batch, dtype)}
    elif feed.kind == "features to text":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        inputs = {"input_features": torch.zeros(batch, config.num_mel_bins, frames, dtype=dtype)}
    elif feed.kind == "audio":
        inputs = {"input_values": torch.zeros(batch, length, dtype=dtype)}
    elif feed.kind == "image and text":
        return {"input_ids": ids, "pixel_values": _picture(config.vision_config, batch, dtype), "return_loss": True}
    else:
        inputs = {"input_ids": ids}
    if _takes(kind, "labels") and "CTC" not in kind.__name__:
        single = any(name in kind.__name__ for name in LABELS_PER_SAMPLE)
        inputs["labels"] = torch.zeros(batch, dtype=torch.long) if single or ids is None else ids
    return inputs


def loss_of(output: Any) -> Tensor:
    """The model's own loss, or one that reads all of its first result in float32."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    first = output[0]
    return first.float().log_softmax(-1).mean()  # type: ignore[no-any-return]


def _picture(config: Any, batch: int, dtype: torch.dtype) -> Tensor:
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.zeros(batch, getattr(config, "num_channels", 3), height, width, dtype=dtype)


def _positions(config: Any, most: int) -> int:
    for name in ("max_position_embeddings", "n_positions"):
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return min(found, most)
    return min(512, most)


def longest(config: Any) -> int | None:
    """How many positions the configuration says that the model has."""
    text = getattr(config, "text_config", None) or config
    return getattr(text, "max_position_embeddings", None)


def _takes(kind: type[nn.Module], name: str) -> bool:
    return name in inspect.signature(kind.forward).parameters
