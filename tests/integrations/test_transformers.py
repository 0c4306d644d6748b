"""transformers' Trainer with lowtide's callback: the same training, within the budget, and nothing left behind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lowtide
from lowtide.demo.memory import measure_memory

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lowtide.integrations.transformers import Lowtide, take_over  # noqa: E402
from test_architectures import MODELS, llama, tokens  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

TRAINED = [name for name in MODELS if name not in {"unet", "lstm", "gru"}]
SHARE = "85%"


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of batches that are made like a model's inputs; ``calls`` counts how often any was asked for."""

    def __init__(self, inputs: Callable[[], dict[str, Tensor]], batches: int = 16) -> None:
        state = torch.get_rng_state()
        torch.manual_seed(5)
        made = [inputs() for _ in range(batches)]
        torch.set_rng_state(state)
        self.rows = [{key: value[row] for key, value in batch.items()} for batch in made for row in range(2)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def arguments(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "report_to": [],
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": 3,
    }
    return transformers.TrainingArguments(str(folder), **(settings | changes))


def train(
    model: nn.Module,
    folder: Path,
    data: Rows,
    callback: Lowtide | None = None,
    resume: str | None = None,
    **changes: Any,
) -> Any:
    given: dict[str, Any] = {"eval_dataset": data} if "eval_strategy" in changes else {}
    trainer = transformers.Trainer(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=data,
        callbacks=[callback] if callback is not None else [],
        **given,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    torch.manual_seed(1)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def built(name: str) -> tuple[nn.Module, Rows]:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    return make(), Rows(inputs)


def assert_same_training(one: Any, other: Any) -> None:
    keys = ("loss", "grad_norm", "eval_loss")
    logs = [[{k: row[k] for k in keys if k in row} for row in t.state.log_history] for t in (one, other)]
    assert logs[0] == logs[1]
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    assert list(ours) == list(theirs)
    assert not [key for key in ours if not torch.equal(ours[key], theirs[key])]


@pytest.mark.parametrize("name", TRAINED)
def test_training_under_a_budget_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, data = built(name)
    plain = train(model, tmp_path, data)
    callback = Lowtide(SHARE)
    model, data = built(name)
    assert_same_training(plain, train(model, tmp_path, data, callback))
    report = callback.report()
    assert report.plan is not None
    assert report.planned_calls == 3
    assert not report.fallbacks


@pytest.mark.parametrize("flag", ["activation_checkpointing", "gradient_checkpointing"])
@pytest.mark.parametrize("wanted", [{}, {"budget": SHARE}], ids=["no budget", "a budget"])
def test_the_trainers_own_flag_is_taken_over_and_said_so(
    flag: str, wanted: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's checkpoint was called as well")

    plain = train(*swap(built("llama"), tmp_path))
    model, data = built("llama")
    with caplog.at_level(logging.WARNING, "lowtide"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.checkpoint, "checkpoint", never)
        patch.setattr(transformers.modeling_utils, "checkpoint", never)
        ours = train(model, tmp_path, data, Lowtide(**wanted), **{flag: True})
    assert_same_training(plain, ours)
    assert "lowtide takes its place" in caplog.text


def swap(pair: tuple[nn.Module, Rows], folder: Path) -> tuple[nn.Module, Path, Rows]:
    return pair[0], folder, pair[1]


def test_a_flag_alone_is_sent_to_lowtide_layer_by_layer() -> None:
    def gradients(take: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = llama().train()
        model.activation_checkpointing_enable()
        undo = take_over(model) if take else None
        batch = tokens(8, 32)
        torch.manual_seed(2)
        peak = measure_memory(lambda: model(**batch)["loss"], Tensor.backward).peak_bytes
        if undo is not None:
            undo()
            assert model.model.layers[0]._gradient_checkpointing_func.func is torch.utils.checkpoint.checkpoint
        return [p.grad for p in model.parameters()], peak

    (theirs, their_peak), (ours, our_peak) = gradients(False), gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert our_peak < 1.05 * their_peak


def test_the_peak_stays_within_the_budget() -> None:
    torch.manual_seed(0)
    model = llama().train()
    batch = tokens(16, 32)
    resident = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), *batch.values()))
    graph = lowtide.trace(lambda: model(**batch)["loss"], model)
    budget = int(0.6 * lowtide.simulate(graph, frozenset()).peak_bytes)
    session = Lowtide(budget)
    with session.on(model):
        for step in range(4):
            model.zero_grad()
            peak = measure_memory(lambda: model(**batch)["loss"], Tensor.backward).peak_bytes + resident
            assert step == 0 or peak <= budget


def test_evaluation_during_training_is_not_recorded(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    model, data = built("llama")
    plain = train(model, tmp_path, data, **settings)
    model, data = built("llama")
    callback = Lowtide(SHARE)
    assert_same_training(plain, train(model, tmp_path, data, callback, **settings))
    assert callback.report().calls == 4


def test_saved_and_resumed_training_is_the_same(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    model, data = built("llama")
    plain = train(model, tmp_path / "plain", data, **settings)
    model, data = built("llama")
    train(model, tmp_path / "ours", data, Lowtide(SHARE), **settings)
    for file in ("config.json", "model.safetensors"):
        pair = [(tmp_path / folder / "checkpoint-2" / file).read_bytes() for folder in ("plain", "ours")]
        assert pair[0] == pair[1]
    model, data = built("llama")
    again = train(model, tmp_path / "ours", data, Lowtide(SHARE), str(tmp_path / "ours" / "checkpoint-2"), **settings)
    assert_same_training(plain, again)


def test_a_model_that_was_trained_is_saved_as_one_that_was_not(tmp_path: Path) -> None:
    model, data = built("llama")
    names, kind = sorted(vars(train(model, tmp_path, data).model)), type(model)
    model, data = built("llama")
    train(model, tmp_path, data, Lowtide(SHARE))
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert type(model) is kind
    assert "__call__" not in kind.__dict__
    assert sorted(vars(model)) == names


@pytest.mark.parametrize("changes", [{"gradient_accumulation_steps": 2}, {"bf16": True}], ids=["accumulated", "bf16"])
def test_other_ways_to_train_are_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    model, data = built("llama")
    plain = train(model, tmp_path, data, **changes)
    model, data = built("llama")
    assert_same_training(plain, train(model, tmp_path, data, Lowtide(SHARE), **changes))


def test_a_key_value_cache_grows_once() -> None:
    def gradients(session: Lowtide | None) -> list[Tensor]:
        model, _ = built("llama")
        assert model.config.use_cache
        batch = tokens(2, 12)
        with session.on(model) if session is not None else nullcontext():
            for _ in range(3):
                model.zero_grad()
                out = model.train()(**batch)
                out["loss"].backward()
                assert out["past_key_values"].get_seq_length() == 12
        return [p.grad for p in model.parameters()]

    plain = gradients(None)
    for wanted in ({"policy": lowtide.policies.recompute_all}, {"budget": "90%"}):
        torch.manual_seed(0)
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(Lowtide(**wanted)), strict=True))


def test_frozen_embeddings_need_nothing_special(tmp_path: Path) -> None:
    def trained(callback: Lowtide | None, **changes: Any) -> Any:
        model, data = built("llama")
        model.get_input_embeddings().requires_grad_(False)
        for layer in model.model.layers[:2]:
            layer.requires_grad_(False)
        return train(model, tmp_path, data, callback, **changes)

    plain = trained(None)
    assert_same_training(plain, trained(Lowtide(SHARE)))
    assert_same_training(plain, trained(Lowtide(), activation_checkpointing=True))
