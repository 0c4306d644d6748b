"""Whole models by configuration, tiny, in train mode: two AdamW steps under each policy are exact."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from harness import Case, Observation, Program, assert_same, observe
from lowtide.errors import RecomputeWarning

transformers = pytest.importorskip("transformers")

# transformers warns about kernels that are not installed; none of it concerns what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
Inputs = Callable[[], dict[str, Tensor]]


def tokens(batch: int = 2, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(3, 61, (batch, length))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def images(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def labelled_tokens() -> dict[str, Tensor]:
    return tokens() | {"labels": torch.tensor([0, 1])}


def sequences_to_sequences() -> dict[str, Tensor]:
    return tokens() | {"labels": torch.randint(3, 61, (2, 7))}


def sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400), "labels": torch.tensor([[3, 4], [5, -100]])}


def spectra() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, 61, (2, 6))}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=3, n_head=4)
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, attention_dropout=0.1))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED))


def gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(
        **GROUPED, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    return transformers.Gemma3ForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def mamba2() -> nn.Module:
    config = transformers.Mamba2Config(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
    )
    return transformers.Mamba2ForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, max_position_embeddings=64))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    shape = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**shape, image_size=16, patch_size=4, hidden_dropout_prob=0.1)
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=2
    )
    return transformers.ResNetForImageClassification(config)


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        **SMALL,
        conv_dim=(8, 8),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_length=2,
    )
    return transformers.Wav2Vec2ForCTC(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=61,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=20,
        max_target_positions=16,
        dropout=0.1,
        encoder_layerdrop=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    return transformers.WhisperForConditionalGeneration(config)


class UNet(nn.Module):
    """Two levels down, two up, skip connections, batch norm and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._convolutions(3, 8), self._convolutions(8, 16)])
        self.middle = self._convolutions(16, 16)
        self.up = nn.ModuleList([self._convolutions(32, 8), self._convolutions(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    @staticmethod
    def _convolutions(before: int, after: int) -> nn.Module:
        layers: list[nn.Module] = []
        for width in (before, after):
            layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Dropout2d(0.1))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, skips = pixel_values, []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
            x = block(torch.cat([x, skips.pop()], 1))
        target = labels[:, None, None].expand(-1, *x.shape[2:])
        return {"loss": F.cross_entropy(self.head(x), target)}


class Recurrent(nn.Module):
    """A token model on a recurrent layer with dropout; its last state is carried to the next step."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.layer = layer(16, 24, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(24, 61)
        self.state: Any = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out, state = self.layer(self.embed(input_ids) * attention_mask[..., None], self.state)
        self.state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
        return {"loss": F.cross_entropy(self.head(out).flatten(0, 1), labels.flatten())}


MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "qwen3": (qwen3, tokens),
    "gemma3": (gemma3, tokens),
    "mixtral": (mixtral, tokens),
    "mamba2": (mamba2, tokens),
    "bert": (bert, labelled_tokens),
    "t5": (t5, sequences_to_sequences),
    "vit": (vit, images),
    "resnet": (resnet, functools.partial(images, 32)),
    "wav2vec2": (wav2vec2, sound),
    "whisper": (whisper, spectra),
    "unet": (UNet, images),
    "lstm": (functools.partial(Recurrent, nn.LSTM), tokens),
    "gru": (functools.partial(Recurrent, nn.GRU), tokens),
}
WITHOUT_BLOCKS = {"lstm", "gru"}

POLICIES = {
    "keep_all": lowtide.policies.keep_all,
    "recompute_all": lowtide.policies.recompute_all,
    "keep_matmuls": lowtide.policies.keep_matmuls,
    "segments": lowtide.policies.segments(),
}


def training(make: Callable[[], nn.Module], inputs: Inputs, autocast: bool) -> Program:
    """Make the program that trains a model by AdamW; every step draws its own batch."""
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss: Tensor = model(**inputs())["loss"]
        return loss

    return Program(step, model=model, after_step=optimizer.step)


@functools.cache
def case(name: str, autocast: bool) -> Case:
    make, inputs = MODELS[name]
    return Case(name, lambda: training(make, inputs, autocast))


@functools.cache
def plainly(name: str, autocast: bool) -> Observation:
    first, second = (observe(case(name, autocast), contextlib.nullcontext) for _ in range(2))
    assert_same(first, second)
    return first


def assert_trains_the_same(name: str, policy: Any, *, autocast: bool = False, check: Any = "new") -> None:
    plain = plainly(name, autocast)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputeWarning)
        other = observe(case(name, autocast), functools.partial(lowtide.record, policy, check=check))
    assert_same(plain, other)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_two_optimizer_steps_are_exact(name: str, policy: str) -> None:
    if policy == "segments" and name in WITHOUT_BLOCKS:
        pytest.skip("no repeated blocks")
    assert_trains_the_same(name, POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "resnet"])
def test_two_optimizer_steps_under_bfloat16_autocast_are_exact(name: str, policy: str) -> None:
    assert_trains_the_same(name, POLICIES[policy], autocast=True)


@pytest.mark.parametrize("name", MODELS)
def test_two_optimizer_steps_without_proofs_are_exact(name: str) -> None:
    assert_trains_the_same(name, lowtide.policies.recompute_all, check="never")


def test_plain_models_train() -> None:
    losses = [value for key, value in plainly("gpt2", False).seen.items() if key.endswith("loss")]
    assert len(losses) == 2
    assert losses[0] != losses[1]
