"""diffusers' UNet and DiT in a plain loop: the same bits, less memory, and their own switch taken over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.demo.memory import measure_memory

diffusers = pytest.importorskip("diffusers")

from lowtide.integrations.diffusers import Lowtide, take_over  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


def unet() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model, {}


def conditioned_unet() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8,
    )  # fmt: skip
    return model, {"encoder_hidden_states": torch.randn(4, 5, 16)}


def dit() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=3, num_layers=3, sample_size=16, patch_size=2,
        num_embeds_ada_norm=100,
    )  # fmt: skip
    return model, {"class_labels": torch.randint(0, 10, (4,))}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "unet": unet,
    "conditioned unet": conditioned_unet,
    "dit": dit,
}


def train(name: str, session: Lowtide | None, flag: bool = False) -> tuple[list[Tensor], list[int]]:
    """Losses and weights of a few steps, and the peak bytes of each."""
    torch.manual_seed(0)
    model, more = MODELS[name]()
    if flag:
        model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, peaks = [], []
    with session.on(model, optimizer) if session is not None else nullcontext():
        for _ in range(3):
            image, time = torch.randn(4, 3, 16, 16), torch.randint(0, 100, (4,))
            step = lambda: (model.train()(image, time, **more).sample - image).square().mean()  # noqa: B023, E731
            kept: list[Tensor] = []

            def backward(loss: Tensor) -> None:
                kept.append(loss.detach())  # noqa: B023
                loss.backward()

            peaks.append(measure_memory(step, backward).peak_bytes)
            losses += kept
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in model.parameters())], peaks


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "wanted", [{"budget": "90%"}, {"policy": lowtide.policies.recompute_all}], ids=["budget", "all"]
)
def test_a_plain_loop_trains_the_same(name: str, wanted: dict[str, Any]) -> None:
    plain, before = train(name, None)
    ours, peaks = train(name, Lowtide(**wanted))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert "budget" not in wanted or peaks[-1] < before[-1]


@pytest.mark.parametrize("name", MODELS)
def test_the_models_own_switch_is_taken_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's checkpoint was called as well")

    plain, _ = train(name, None)
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", never)
    for session in (Lowtide("90%"), Lowtide(policy=lowtide.policies.keep_matmuls)):
        ours, _ = train(name, session, flag=True)
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_switch_alone_checkpoints_block_by_block() -> None:
    model, more = unet()
    model.enable_gradient_checkpointing()
    image, time = torch.randn(4, 3, 16, 16), torch.randint(0, 100, (4,))
    step = lambda: model.train()(image, time, **more).sample.square().mean()  # noqa: E731
    theirs = measure_memory(step, Tensor.backward).peak_bytes
    before = [p.grad for p in model.parameters()]
    model.zero_grad()
    undo = take_over(model)
    ours = measure_memory(step, Tensor.backward).peak_bytes
    undo()
    assert all(torch.equal(a, b.grad) for a, b in zip(before, model.parameters(), strict=True) if a is not None)
    assert ours < 1.1 * theirs
