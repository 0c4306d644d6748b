"""Configurations of public models, as far as they decide about shapes, and how many parameters their authors name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PublicConfig:
    """A config.json, and the number of parameters, in millions, that is stated for it."""

    values: dict[str, Any]
    millions: float
    length: int = 512


def llama(
    hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    """The configuration of a Llama or of one of its relatives."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    } | more


PUBLIC: dict[str, PublicConfig] = {
    "gpt2": PublicConfig({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, 124.4),
    "gpt2-xl": PublicConfig({"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48}, 1557.6),
    "bert-large": PublicConfig(
        {
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
        },
        335.2,
    ),
    "llama-3.1-8b": PublicConfig(llama(4096, 14336, 32, 32, 8, 128256), 8030.3),
    "llama-3.1-70b": PublicConfig(llama(8192, 28672, 80, 64, 8, 128256), 70553.7),
    "qwen3-8b": PublicConfig(llama(4096, 12288, 36, 32, 8, 151936, model_type="qwen3", head_dim=128), 8190.7),
    "mistral-7b": PublicConfig(llama(4096, 14336, 32, 32, 8, 32000, model_type="mistral", sliding_window=None), 7241.7),
    "mixtral-8x7b": PublicConfig(
        llama(4096, 14336, 32, 32, 8, 32000, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2), 46702.8
    ),
    "vit-large": PublicConfig(
        {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "image_size": 224,
            "patch_size": 16,
            "id2label": {str(number): str(number) for number in range(1000)},
        },
        304.3,
        0,
    ),
    "whisper-large-v3": PublicConfig(
        {
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "vocab_size": 51866,
        },
        1543.5,
        448,
    ),
    "t5-large": PublicConfig(
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": 1024,
            "d_ff": 4096,
            "d_kv": 64,
            "num_heads": 16,
            "num_layers": 24,
        },
        737.7,
    ),
    "wav2vec2-large": PublicConfig(
        {
            "model_type": "wav2vec2",
            "architectures": ["Wav2Vec2ForCTC"],
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
        },
        315.5,
        80_000,
    ),
}


def write_config(values: dict[str, Any], folder: Path) -> Path:
    """Write a config.json into ``folder``, and return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path
