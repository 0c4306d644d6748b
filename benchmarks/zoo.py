"""A zoo of models by configuration, no downloads: what predictions and frontiers are measured on.

All but the two models of the design's table take less than a second of CPU time a step. `pattern` names the
blocks of a model, `mlp` the modules inside them that `by_module` is tried on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Workload, gelu_gpt, small_gelu_gpt, small_swiglu_lm, swiglu_lm
from lowtide.policies import matches

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises kernels that a CPU has no use for

TOKENS = 512
"""Vocabulary of the language models: small, so that the blocks weigh more than the head."""


@dataclass(frozen=True)
class ZooModel(Workload):
    """A workload with all of its inputs, and the pattern of an MLP-like part of its blocks."""

    inputs: tuple[Tensor, ...] = ()
    mlp: str = ""

    def seeded(self) -> ZooModel:
        """The same model, every forward pass from the same random state: torch's, NumPy's and Python's."""

        def forward() -> Tensor:
            torch.manual_seed(1)
            np.random.seed(1)
            random.seed(1)
            return self.forward()

        return replace(self, forward=forward)

    def in_bfloat16(self) -> ZooModel:
        """The same model, its forward pass under bfloat16 autocast."""

        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.forward()

        return replace(self, name=f"{self.name}, bfloat16 autocast", forward=forward)


def zoo_model(
    name: str,
    model: nn.Module,
    inputs: dict[str, Tensor],
    pattern: str,
    mlp: str,
    loss: Callable[[Any], Tensor] = lambda output: output.loss,
    **constants: Any,
) -> ZooModel:
    """A model in training mode that is called with `inputs` and `constants`; `loss` takes what it returns."""
    model.train()
    blocks = [module for path, module in model.named_modules() if path and matches(pattern, path)]
    tensors = tuple(inputs.values())

    def forward() -> Tensor:
        return loss(model(**inputs, **constants))

    return ZooModel(name, model, blocks, pattern, tensors[0], forward, tensors, mlp)


def from_workload(make: Callable[[], Workload]) -> Callable[[], ZooModel]:
    """A maker of the GPT-like workload that `make` makes, as a model of the zoo."""

    def made() -> ZooModel:
        own = make()
        return ZooModel(
            own.name, own.model, own.blocks, own.pattern, own.batch, own.forward, (own.batch,), "blocks.*.mlp"
        )

    return made


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
    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 3, 2], num_labels=10
    )
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


class UNet(nn.Module):
    """Two levels down and two up with skips, (B, 3, H, W) -> (B, 2, H, W): batch norm, activations in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.convolutions(3, width), self.convolutions(width, 2 * width)])
        self.middle = self.convolutions(2 * width, 2 * width)
        self.up = nn.ModuleList([self.convolutions(4 * width, width), self.convolutions(2 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def convolutions(before: int, after: int) -> nn.Module:
        """Two convolutions, (B, before, H, W) -> (B, after, H, W)."""
        layers: list[nn.Module] = []
        for width in (before, after):
            layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Dropout2d(0.1))

    def forward(self, pictures: Tensor) -> Tensor:
        x, skips = pictures, []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
            x = block(torch.cat([x, skips.pop()], 1))
        logits: Tensor = self.head(x)
        return logits


def unet() -> ZooModel:
    """A U-Net by hand that tells two classes apart at every pixel."""
    torch.manual_seed(0)
    pictures, labels = torch.randn(4, 3, 96, 96), torch.randint(2, (4, 96, 96))
    own = zoo_model(
        "U-Net of 24, 4 x 3 x 96 x 96",
        UNet(24),
        {"pictures": pictures},
        "up.*",
        "middle",
        lambda logits: F.cross_entropy(logits, labels),
    )
    return replace(own, inputs=(pictures, labels))


# ---- recurrence ---------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Two LSTM cells run step by step, (B, T, D) -> (B, D): deep in operations, small in each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.cells = nn.ModuleList([nn.LSTMCell(width, width) for _ in range(2)])
        self.head = nn.Linear(width, width)

    def forward(self, sequence: Tensor) -> Tensor:
        states = [(sequence.new_zeros(len(sequence), self.width),) * 2 for _ in self.cells]
        for x in sequence.unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(x, states[number])
                x = states[number][0]
        last: Tensor = self.head(states[-1][0])
        return last


def lstm(steps: int = 80) -> ZooModel:
    """A recurrence over many steps."""
    torch.manual_seed(0)
    return zoo_model(
        f"LSTM, 2 cells of 96, 16 x {steps} steps",
        Recurrent(96),
        {"sequence": torch.randn(16, steps, 96)},
        "cells.*",
        "head",
        lambda last: last.square().mean(),
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

SMALL = {"small-gpt": from_workload(small_gelu_gpt), "small-lm": from_workload(small_swiglu_lm), "unet": unet}
"""For tests: seconds each."""
