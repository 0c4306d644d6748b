"""A zoo of models by configuration, no downloads: what predictions and frontiers are measured on.

All but the two models of the design's table take less than a second of CPU time a step. `pattern` names the
blocks of a model, `mlp` the modules inside them that `by_module` is tried on.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.handmade import deep_perceptron, long_lstm, lstm, unet
from benchmarks.models import Workload, gelu_gpt, gpt_workload, swiglu_lm, swiglu_workload
from benchmarks.zoo_model import ZooModel, from_workload, zoo_model
from lowtide.demo.model import GPTShape

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises kernels that a CPU has no use for

TOKENS = 512
"""Vocabulary of the language models: small, so that the blocks weigh more than the head."""


# ---- language models ----------------------------------------------------------------------------------------


def causal_tokens(batch: int, length: int) -> dict[str, Tensor]:
    """Random tokens (batch, length) that are their own labels."""
    tokens = torch.randint(3, TOKENS, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def llama() -> ZooModel:
    """Grouped queries, rotary positions, SwiGLU, RMSNorm; no dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return zoo_model(
        "Llama, 6 layers of 256, 2 x 256 tokens",
        LlamaForCausalLM(config),
        causal_tokens(2, 256),
        "layers.*",
        "layers.*.mlp",
        use_cache=False,
    )


def gpt2() -> ZooModel:
    """GPT-2 with its dropout, in attention too."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=TOKENS, n_positions=256, n_embd=256, n_layer=6, n_head=8, bos_token_id=0, eos_token_id=0
    )
    return zoo_model(
        "GPT-2, 6 layers of 256, 2 x 256 tokens",
        GPT2LMHeadModel(config),
        causal_tokens(2, 256),
        "h.*",
        "h.*.mlp",
        use_cache=False,
    )


def bert() -> ZooModel:
    """An encoder with post-norm, dropout and a padding mask, that predicts masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=TOKENS,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=256,
    )
    inputs = causal_tokens(2, 256)
    inputs["attention_mask"] = (torch.arange(256) < torch.tensor([[256], [192]])).long()
    return zoo_model(
        "BERT, 6 layers of 256, 2 x 256 tokens",
        BertForMaskedLM(config),
        inputs,
        "layer.*",
        "layer.*.intermediate",
    )


def mixtral() -> ZooModel:
    """Four experts, two of them for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=TOKENS,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return zoo_model(
        "Mixtral, 4 layers of 192, 4 experts, 2 x 256 tokens",
        MixtralForCausalLM(config),
        causal_tokens(2, 256),
        "layers.*",
        "layers.*.mlp",
        use_cache=False,
    )


def mamba2() -> ZooModel:
    """State spaces in plain PyTorch operations, many small ones a layer."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=TOKENS,
        hidden_size=96,
        num_hidden_layers=3,
        num_heads=12,
        head_dim=16,
        state_size=16,
        n_groups=2,
        chunk_size=32,
    )
    return zoo_model(
        "Mamba-2, 3 layers of 96, 1 x 128 tokens",
        Mamba2ForCausalLM(config),
        causal_tokens(1, 128),
        "layers.*",
        "layers.*.mixer",
        use_cache=False,
    )


def t5() -> ZooModel:
    """An encoder and a decoder that share embeddings and relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=TOKENS,
        d_model=192,
        d_kv=32,
        d_ff=512,
        num_layers=3,
        num_heads=6,
        decoder_start_token_id=0,
    )
    inputs = {"input_ids": torch.randint(3, TOKENS, (2, 192)), "labels": torch.randint(3, TOKENS, (2, 128))}
    return zoo_model(
        "T5, 3 + 3 layers of 192, 2 x (192 + 128) tokens",
        T5ForConditionalGeneration(config),
        inputs,
        "block.*",
        "DenseReluDense",
        use_cache=False,
    )


# ---- pictures and sound -------------------------------------------------------------------------------------


def vit() -> ZooModel:
    """Pictures in patches."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        image_size=96,
        patch_size=8,
        hidden_dropout_prob=0.1,
        num_labels=10,
    )
    inputs = {"pixel_values": torch.randn(4, 3, 96, 96), "labels": torch.randint(10, (4,))}
    return zoo_model(
        "ViT, 6 layers of 192, 4 x 3 x 96 x 96",
        ViTForImageClassification(config),
        inputs,
        "layers.*",
        "layers.*.mlp",
    )


def resnet() -> ZooModel:
    """ResNet-50's bottlenecks, fewer and narrower: batch norm and activations in place."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 3, 2], num_labels=10)
    inputs = {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.randint(10, (8,))}
    return zoo_model(
        "ResNet, 9 bottlenecks, 8 x 3 x 128 x 128",
        ResNetForImageClassification(config),
        inputs,
        "layers.*",
        "layers.*.layer",
    )


def wav2vec2() -> ZooModel:
    """Convolutions over sound, then a transformer, then CTC."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        conv_dim=(64, 64, 64),
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 4, 4),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.0,
    )
    inputs = {"input_values": torch.randn(2, 16000), "labels": torch.randint(1, 32, (2, 20))}
    return zoo_model(
        "Wav2Vec2, 4 layers of 192, 2 x 1 s",
        Wav2Vec2ForCTC(config),
        inputs,
        "encoder.layers.*",
        "layers.*.feed_forward",
    )


def whisper() -> ZooModel:
    """Sound to text: an encoder and a decoder with cross attention and dropout."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=TOKENS,
        num_mel_bins=40,
        d_model=192,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=768,
        decoder_ffn_dim=768,
        max_source_positions=200,
        max_target_positions=64,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    inputs = {"input_features": torch.randn(2, 40, 400), "labels": torch.randint(3, TOKENS, (2, 48))}
    return zoo_model(
        "Whisper, 3 + 3 layers of 192, 2 x (200 + 48)",
        WhisperForConditionalGeneration(config),
        inputs,
        "layers.*",
        "layers.*.self_attn",
        use_cache=False,
    )


ZOO: dict[str, Callable[[], ZooModel]] = {
    "gpt": from_workload(gelu_gpt),
    "lm": from_workload(swiglu_lm),
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "t5": t5,
    "mixtral": mixtral,
    "mamba2": mamba2,
    "wav2vec2": wav2vec2,
    "whisper": whisper,
    "unet": unet,
    "lstm": lstm,
}


DEEP: dict[str, Callable[[], ZooModel]] = {"long-lstm": long_lstm, "deep-mlp": deep_perceptron}
"""Thousands of operations deep; minutes under many plans."""


def small_gpt() -> Workload:
    """The first model of the design's table, for tests."""
    shape = GPTShape(vocabulary=64, length=64, width=64, blocks=3, heads=4)
    return gpt_workload("GPT, GELU, 3 blocks of 64, 8 x 64 tokens", shape, batch=8)


def small_lm() -> Workload:
    """The second model of the design's table, for tests."""
    shape = GPTShape(vocabulary=64, length=64, width=48, blocks=3, heads=4)
    return swiglu_workload("LM, SwiGLU/RMSNorm, 3 blocks of 48, 8 x 64 tokens", shape, batch=8)


SMALL: dict[str, Callable[[], ZooModel]] = {
    "small-gpt": from_workload(small_gpt),
    "small-lm": from_workload(small_lm),
    "small-lstm": lambda: lstm(6),
    "small-mlp": lambda: deep_perceptron(24),
}
"""For tests: a few milliseconds a step."""
