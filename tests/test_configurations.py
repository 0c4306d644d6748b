"""Configurations: which class is trained, on what, with which attention; adapters and frozen parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide import hardware
from lowtide.configurations import workload_of
from lowtide.configurations.adapters import LowRank
from lowtide.configurations.configured import Configured
from lowtide.estimation import Setup, estimate
from lowtide.simulation import simulate
from public_configs import PUBLIC, write_config

H100 = hardware.find("h100")
WIDTH, LAYERS = 64, 2
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", **TEXT}
PAIR = {"vision_config": {**TEXT, "image_size": 32, "patch_size": 8}, "text_config": TEXT}


def workload(values: dict[str, Any], folder: Path, **settings: Any) -> Configured:
    found = workload_of(str(write_config(values, folder)), H100, **settings)
    assert isinstance(found, Configured)
    return found


def setup(own: Configured, **settings: Any) -> Setup:
    return Setup(batch=2, length=own.length(0), attention=own.attention(None), precision="bf16", **settings)


@pytest.mark.parametrize(
    ("values", "name", "kind"),
    [
        (LLAMA, "LlamaForCausalLM", "text"),
        ({"model_type": "bert", **TEXT, "architectures": ["BertModel"]}, "BertForMaskedLM", "text"),
        ({"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64},
         "BartForConditionalGeneration", "text to text"),
        ({"model_type": "clip", **PAIR, "architectures": ["CLIPModel"]}, "CLIPModel", "image and text"),
        ({"model_type": "resnet", "depths": [1, 1, 1, 1]}, "ResNetForImageClassification", "image"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)  # fmt: skip
def test_the_usual_class_of_a_configuration_is_trained(
    values: dict[str, Any], name: str, kind: str, tmp_path: Path
) -> None:
    own = workload(values, tmp_path)
    assert (own.name, own.feed.kind) == (name, kind)
    small = Setup(batch=2, length=own.length(8), attention=own.attention(None), precision="bf16")
    assert estimate(own.trace(small), small, H100).peak_bytes > 0


def test_a_model_without_fused_attention_is_traced_with_what_it_has(tmp_path: Path) -> None:
    own = workload({"model_type": "resnet", "depths": [1, 1, 1, 1]}, tmp_path)
    assert own.attention(None) == "plain"
    assert "attention" not in own.changes
    assert "the model's code has no fused attention" in own.trace(setup(own)).remarks


def test_no_mask_is_made_that_a_real_step_does_not_have(tmp_path: Path) -> None:
    own = workload(LLAMA, tmp_path)
    graph = own.trace(Setup(batch=1, length=59, precision="bf16")).graph
    assert not [s for s in graph.storages if s.bytes % 59**2 == 0]
    assert any("flash_attention" in op.name for op in graph.ops)


def test_dropout_in_attention_does_not_store_scores(tmp_path: Path) -> None:
    values = {"model_type": "gpt2", "n_embd": WIDTH, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 64}
    names = {op.name for op in workload(values, tmp_path).trace(Setup(length=64, precision="bf16")).graph.ops}
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in names
    assert "aten.native_dropout.default" in names
    assert "aten._softmax.default" not in names


def test_adapters_are_what_is_trained(tmp_path: Path) -> None:
    own = workload(LLAMA, tmp_path, lora=4)
    traced = own.trace(setup(own))
    assert {tensor.name.rpartition(".lora_")[2] for tensor in traced.trained} == {"A.weight", "B.weight"}
    assert {tensor.itemsize for tensor in traced.trained} == {4}
    narrow, wide = 4 * 2 * WIDTH, 4 * 3 * WIDTH
    assert sum(tensor.count for tensor in traced.trained) == LAYERS * (4 * narrow + 3 * wide)
    gradients = {s.owner for s in traced.graph.storages if s.kind == "gradient"}
    assert gradients == {tensor.name for tensor in traced.trained}


def test_an_adapter_computes_the_base_and_a_low_rank_product() -> None:
    torch.manual_seed(0)
    base = torch.nn.Linear(6, 4)
    adapted = LowRank(base, 6, 4, 2)
    x = torch.randn(3, 6)
    expected = x @ (base.weight + 2.0 * adapted.lora_B.weight @ adapted.lora_A.weight).T + base.bias
    torch.testing.assert_close(adapted(x), expected)


def test_targets_choose_the_layers(tmp_path: Path) -> None:
    own = workload(LLAMA, tmp_path, lora=4, targets=("q_proj", "v_proj"))
    names = {tensor.name.split(".")[-3] for tensor in own.trace(setup(own)).trained}
    assert names == {"q_proj", "v_proj"}


def test_what_is_frozen_has_no_gradient(tmp_path: Path) -> None:
    own = workload(LLAMA, tmp_path, frozen=("model.embed_tokens", "model.layers.0"))
    names = {tensor.name for tensor in own.trace(setup(own)).trained}
    assert names
    assert not [name for name in names if name.startswith(("model.embed_tokens", "model.layers.0."))]


def test_accumulated_gradients_are_there_all_the_time(tmp_path: Path) -> None:
    own = workload(LLAMA, tmp_path)
    once, more = (own.trace(setup(own, accumulation=count)) for count in (1, 2))
    later = more.graph.resident_bytes - once.graph.resident_bytes
    assert later == once.trained_bytes
    assert simulate(more.graph, frozenset()).peak_bytes > simulate(once.graph, frozenset()).peak_bytes


def test_tied_weights_count_once(tmp_path: Path) -> None:
    apart, tied = (workload({**LLAMA, "tie_word_embeddings": tie}, tmp_path) for tie in (False, True))
    weights = [dict(estimate(own.trace(setup(own)), setup(own), H100).kinds)["weights"] for own in (apart, tied)]
    assert weights[0] - weights[1] == 2 * 64 * WIDTH


def test_nothing_is_stored_for_a_model_of_seventy_billion_parameters(tmp_path: Path) -> None:
    own = workload(PUBLIC["llama-3.1-70b"].values, tmp_path)
    _, model = own.step(Setup(length=16, precision="bf16"), FakeTensorMode())
    assert sum(p.nbytes for p in model.parameters()) > 130e9
