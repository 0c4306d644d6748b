"""`fit` beside what is known: stated numbers of parameters, the formulas of Korthikanti et al., measured peaks.

The formulas are those of "Reducing Activation Recomputation in Large Transformer Models" (2022), bytes of one layer in
16 bit with dropout: 34 s b h + 5 a s^2 b with plain attention, 34 s b h where the scores are not stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide import hardware
from lowtide.configurations import workload_of
from lowtide.configurations.configured import Configured
from lowtide.estimation import Setup, estimate
from public_configs import PUBLIC, PublicConfig, write_config

H100, CPU = hardware.find("h100"), hardware.find("cpu")
BATCH, LENGTH, WIDTH, HEADS = 2, 256, 256, 4
SBH, ASSB = BATCH * LENGTH * WIDTH, HEADS * LENGTH * LENGTH * BATCH
GPT2 = {"model_type": "gpt2", "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": 64}
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "vocab_size": 64,
}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZES}
LLAMA = {"model_type": "llama", **SIZES, "intermediate_size": 3 * WIDTH, "num_key_value_heads": 2}
VIT = {"model_type": "vit", **SIZES, "image_size": 64, "patch_size": 4, "architectures": ["ViTForImageClassification"]}


def workload(values: dict[str, Any], folder: Path, accelerator: hardware.Accelerator = H100) -> Configured:
    found = workload_of(str(write_config(values, folder)), accelerator)
    assert isinstance(found, Configured)
    return found


def saved_bytes(values: dict[str, Any], folder: Path, attention: str) -> int:
    """Bytes of activations that autograd saves, each piece of memory once."""
    traced = workload(values, folder).trace(Setup(batch=BATCH, length=LENGTH, precision="bf16", attention=attention))
    graph = traced.graph
    saved = {graph.buffers[buffer].storage for buffer in graph.saves}
    return sum(graph.storages[s].bytes for s in saved if graph.storages[s].kind == "activation")


def bytes_of_a_layer(values: dict[str, Any], layers: str, folder: Path, attention: str) -> float:
    two, four = (saved_bytes({**values, layers: count}, folder, attention) for count in (2, 4))
    return (four - two) / 2


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_model_has_the_parameters_that_are_stated_for_it(name: str, tmp_path: Path) -> None:
    public: PublicConfig = PUBLIC[name]
    own = workload(public.values, tmp_path)
    _, model = own.step(Setup(length=own.length(16)), FakeTensorMode(allow_non_fake_inputs=True))
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions == pytest.approx(public.millions, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "layers"),
    [({**GPT2, "activation_function": "gelu"}, "n_layer"), (BERT, "num_hidden_layers")],
    ids=["gpt2", "bert"],
)
@pytest.mark.parametrize(("attention", "formula"), [("plain", 34 * SBH + 5 * ASSB), ("efficient", 34 * SBH)])
def test_a_layer_saves_what_the_formula_of_korthikanti_says(
    values: dict[str, Any], layers: str, attention: str, formula: int, tmp_path: Path
) -> None:
    assert bytes_of_a_layer(values, layers, tmp_path, attention) == pytest.approx(formula, rel=0.01)


def test_gpt2s_own_gelu_saves_three_more_results_of_the_inner_width(tmp_path: Path) -> None:
    """It is written as separate operations: x, its cube's product, tanh and 1 + tanh, each 8 s b h bytes."""
    found = bytes_of_a_layer(GPT2, "n_layer", tmp_path, "efficient")
    assert found == pytest.approx((34 + 3 * 8) * SBH, rel=0.01)


def test_a_layer_of_vit_saves_the_formula_less_its_dropout_masks(tmp_path: Path) -> None:
    tokens = (64 // 4) ** 2 + 1
    formula = (34 - 2) * BATCH * tokens * WIDTH
    assert bytes_of_a_layer(VIT, "num_hidden_layers", tmp_path, "efficient") == pytest.approx(formula, rel=0.01)


def test_a_layer_of_llama_saves_what_its_own_parts_add_up_to(tmp_path: Path) -> None:
    """Two norms in float32 (12), their outputs (4), q and attention's output (4), k and v (4 g), and four results of
    the inner width (8 f); g is key heads a head, f the inner width in widths."""
    g, f = 2 / HEADS, 3
    found = bytes_of_a_layer(LLAMA, "num_hidden_layers", tmp_path, "efficient")
    assert found == pytest.approx((20 + 4 * g + 8 * f) * SBH, rel=0.02)


TINY = {
    "gpt2": {**GPT2, "n_layer": 2},
    "bert": {**BERT, "num_hidden_layers": 2},
    "llama": {**LLAMA, "num_hidden_layers": 2},
    "vit": {**VIT, "num_hidden_layers": 2},
    "t5": {
        "model_type": "t5",
        "d_model": 64,
        "d_ff": 256,
        "d_kv": 16,
        "num_heads": 4,
        "num_layers": 2,
        "vocab_size": 64,
    },
}


@pytest.mark.parametrize("name", TINY)
def test_the_estimated_peak_is_the_measured_one(name: str, tmp_path: Path) -> None:
    own = workload(TINY[name], tmp_path, CPU)
    setup = Setup(batch=2, length=own.length(64), optimizer="sgd-momentum")
    torch.manual_seed(0)
    step, model = own.step(setup)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    step().backward()
    optimizer.step()
    measured = lowtide.measure(step, model, lowtide.policies.keep_all, rounds=1, optimizer=optimizer).row("plain")
    estimated = estimate(own.trace(setup), setup, CPU)
    assert estimated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.001)  # the band is ten times as wide
    assert estimated.low_bytes <= measured.peak_bytes <= estimated.high_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_model_is_traced_at_its_full_size(name: str, tmp_path: Path) -> None:
    own = workload(PUBLIC[name].values, tmp_path)
    setup = Setup(batch=1, length=own.length(PUBLIC[name].length), precision="bf16")
    found = estimate(own.trace(setup), setup, H100)
    assert dict(found.kinds)["weights"] == pytest.approx(2e6 * PUBLIC[name].millions, rel=0.01)
