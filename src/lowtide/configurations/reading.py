"""From a config.json to the model class that is trained, and to a model without weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.errors import LowtideError

SEQUENCES = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING")
PAIRS = ("MODEL_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING")
AUTO = (
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_CTC_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
"""Where a configuration names no class that is trained: the first of these that has one. Before them, ``SEQUENCES`` for
models with an encoder and a decoder, and ``PAIRS`` for models of pictures and text."""
ATTENTION = {"efficient": "sdpa", "plain": "eager"}


class ConfigurationError(LowtideError, ValueError):
    """A configuration cannot be read, or no step can be made of it."""


def read_config(path: Path) -> Any:
    """The configuration in a config.json, or in the folder that has one.

    Raises:
        ConfigurationError: there is none, it is broken, or it is of a model that transformers does not have.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"{file}: no such file. Name a config.json of transformers, a folder with one, or FILE.py:FUNCTION. "
            "Nothing is downloaded."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} is no JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigurationError(f'{file} has no "model_type", so it is no configuration of a transformers model.')
    transformers = _transformers()
    kind = values.pop("model_type")
    try:
        return transformers.AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise ConfigurationError(
            f"{file}: transformers {transformers.__version__} has no model {kind!r}: {str(error).splitlines()[0]} "
            "Code that comes with a model is never run; write a factory and name it as FILE.py:FUNCTION."
        ) from None


def class_of(config: Any) -> type[nn.Module]:
    """The class that is trained: the first that the configuration names, or the usual one for its kind."""
    transformers = _transformers()
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if named is not None and has_loss(named):
            return named  # type: ignore[no-any-return]
    from transformers.models.auto import modeling_auto

    pair = getattr(config, "vision_config", None) is not None and getattr(config, "text_config", None) is not None
    first = SEQUENCES if getattr(config, "is_encoder_decoder", False) else PAIRS if pair else ()
    for mapping in (*first, *AUTO):
        found = getattr(modeling_auto, mapping).get(type(config), None)
        kind = found[0] if isinstance(found, tuple) else found
        if kind is not None and (mapping not in first or has_loss(kind)):
            return kind  # type: ignore[no-any-return]
    raise ConfigurationError(f"transformers has no model for a {type(config).__name__}.")


def has_loss(kind: type[nn.Module]) -> bool:
    """Whether the model computes a loss itself."""
    return bool({"labels", "return_loss"} & inspect.signature(kind.forward).parameters.keys())


def attention_of(kind: type[nn.Module], wanted: str | None) -> str:
    """How attention is computed: as wanted, else without storing scores where the model can.

    Raises:
        ConfigurationError: it is wanted in a way that there is not.
    """
    can = bool(getattr(kind, "_supports_sdpa", False))
    if wanted not in (None, *ATTENTION):
        raise ConfigurationError(f"There is no attention {wanted!r}; there are {' and '.join(ATTENTION)}.")
    return wanted or ("efficient" if can else "plain")


def build(config: Any, kind: type[nn.Module], dtype: torch.dtype, attention: str, mode: Any) -> nn.Module:
    """A model of fake tensors of ``mode``, in training mode; None as ``mode`` makes a real one."""
    settings = {"attn_implementation": ATTENTION[attention]}
    with _default_dtype(dtype), ExitStack() as stack:
        if mode is not None:
            from transformers.initialization import no_init_weights

            stack.enter_context(no_init_weights())
            stack.enter_context(mode)
        try:
            model = kind._from_config(config, **settings)  # type: ignore[attr-defined]
        except ValueError as error:
            text = str(error).partition("\n")[0]
            cure = " Try --attention plain." if attention == "efficient" and "attention implementation" in text else ""
            raise ConfigurationError(f"{kind.__name__} cannot be made of this configuration: {text}{cure}") from None
        model.tie_weights()
    model.train()
    return model  # type: ignore[no-any-return]


def prepare_config(config: Any) -> None:
    """Switch off what is not part of training, and fill in what only generation would."""
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "to_dict") and hasattr(v, "model_type"))]
    for part in parts:
        part.use_cache = False
        for chance in ("mask_time_prob", "mask_feature_prob"):
            if hasattr(part, chance):
                setattr(part, chance, 0.0)
    if getattr(config, "is_encoder_decoder", False):
        for token in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, token, None) is None:
                setattr(config, token, 0)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _transformers() -> Any:
    transformers: Any
    try:
        import transformers
    except ImportError:
        raise ConfigurationError(
            "Reading a configuration needs transformers: pip install 'lowtide[transformers]'. A factory, "
            "FILE.py:FUNCTION, needs nothing."
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers
