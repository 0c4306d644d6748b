"""Key-value caches and generation, on a tiny model of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide

pytest.importorskip("transformers")

from test_architectures import llama, tokens


@pytest.fixture
def model() -> Iterator[Any]:
    torch.manual_seed(0)
    return llama()


def prompt() -> torch.Tensor:
    return tokens(1, 6)["input_ids"]


def ids(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(prompt(), max_new_tokens=5, do_sample=False, pad_token_id=0, **options)


def test_B64_cache_warnings_repeat_for_ever(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Generating in training mode, while attached: no warning at all, for no cache has to be switched off."""
    model.train()
    with lowtide.attach(model, policy=lowtide.policies.segments("layers.*")), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            ids(model)
            model(**tokens(2, 8)).loss.backward()
    assert "use_cache" not in caplog.text
    assert "checkpointing" not in caplog.text


@pytest.mark.parametrize("training", [True, False])
def test_B65_generate_is_wrong_or_fails_with_checkpointing_on(model: Any, training: bool) -> None:
    model.train(training)
    torch.manual_seed(1)
    wanted = ids(model)
    torch.manual_seed(1)
    without_cache = ids(model, use_cache=False)
    with lowtide.attach(model, policy=lowtide.policies.segments("layers.*")) as handle:
        torch.manual_seed(1)
        assert torch.equal(ids(model), wanted)
        torch.manual_seed(1)
        assert torch.equal(ids(model, use_cache=False), without_cache)
        assert handle.report().calls == 0


def test_B65_training_and_generating_in_turns(model: Any) -> None:
    def run() -> list[Any]:
        torch.manual_seed(2)
        seen: list[Any] = []
        for _ in range(2):
            loss = model.train()(**tokens(2, 8)).loss
            loss.backward()
            seen += [loss.detach(), ids(model.eval())]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return seen

    wanted = run()
    with lowtide.attach(model, policy=lowtide.policies.recompute_all):
        assert all(torch.equal(a, b) for a, b in zip(wanted, run(), strict=True))


def test_B66_use_cache_stays_false_in_the_saved_model(model: Any, tmp_path: Path) -> None:
    before = model.config.use_cache
    with lowtide.attach(model, policy=lowtide.policies.segments("layers.*")):
        out = model(**tokens(2, 8), use_cache=True)
        out.loss.backward()
        model.save_pretrained(tmp_path)
    assert out.past_key_values is not None
    assert model.config.use_cache is before is True
    assert '"use_cache": false' not in (tmp_path / "config.json").read_text()


def test_B20_a_cache_in_the_training_step_gives_the_plain_gradients(model: Any) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        model.train()(**tokens(2, 8), use_cache=True).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = run()
    with lowtide.attach(model, policy=lowtide.policies.recompute_all):
        assert all(torch.equal(a, b) for a, b in zip(wanted, run(), strict=True))


# ---- relatives ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.past_key_values:FutureWarning")  # newer releases call it cache
def test_relative_a_second_forward_that_continues_from_the_cache_of_the_first(model: Any) -> None:
    """Prefix tuning, and losses over a continuation: gradients flow through the cached keys and values."""

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        batch = tokens(2, 8)["input_ids"]
        first = model.train()(batch[:, :4], use_cache=True)
        second = model(batch[:, 4:], past_key_values=first.past_key_values)
        (first.logits.square().mean() + second.logits.square().mean()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = run()
    with lowtide.record(lowtide.policies.recompute_all) as recording:
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert not recording.report().warnings


def test_relative_a_frozen_reference_model_scored_in_the_same_step(model: Any) -> None:
    torch.manual_seed(5)
    reference = llama().requires_grad_(False)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        batch = tokens(2, 8)["input_ids"]
        with torch.no_grad():
            target = reference(batch).logits
        (model.train()(batch).logits - target).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = run()
    with lowtide.attach(model, policy=lowtide.policies.recompute_all):
        assert all(torch.equal(a, b) for a, b in zip(wanted, run(), strict=True))
