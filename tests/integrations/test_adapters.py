"""Adapters of PEFT, TRL's SFTTrainer and accelerate, on top of lowtide or below it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

from lowtide.integrations.transformers import Lowtide, take_over  # noqa: E402
from test_architectures import llama, tokens  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

SHARE = "90%"


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    made: nn.Module = peft.get_peft_model(model, config)
    return made


def steps(model: nn.Module, count: int = 3) -> list[Tensor]:
    """Losses and adapters after some steps of training."""
    torch.manual_seed(3)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    losses = []
    for _ in range(count):
        loss = model.train()(**tokens(8, 24))["loss"]
        loss.backward()
        assert all(p.grad is not None for p in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in trained)]


def assert_equal(plain: list[Tensor], ours: list[Tensor]) -> None:
    assert len(plain) == len(ours)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return llama()


@pytest.mark.parametrize("wanted", [{"budget": SHARE}, {"policy": lowtide.policies.recompute_all}, {}])
@pytest.mark.parametrize("order", ["adapters first", "lowtide first"])
def test_adapters_train_the_same_in_either_order(order: str, wanted: dict[str, Any]) -> None:
    plain = steps(adapted(fresh()))
    base = fresh()
    model = adapted(base) if order == "adapters first" else base
    with Lowtide(**wanted).on(model):
        assert_equal(plain, steps(model if order == "adapters first" else adapted(base)))


@pytest.mark.parametrize("order", ["adapters first", "flag first"])
def test_the_flag_works_without_inputs_that_require_grad(order: str) -> None:
    plain = steps(adapted(fresh()))
    model = fresh()
    if order == "adapters first":
        model = adapted(model)
    base = model.get_base_model() if order == "adapters first" else model  # type: ignore[operator]
    base._set_gradient_checkpointing(True)
    model = model if order == "adapters first" else adapted(model)
    undo = take_over(model)
    assert_equal(plain, steps(model))
    undo()


def test_accelerate_prepares_before_or_after() -> None:
    def trained(when: str) -> list[Tensor]:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = fresh()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        session: Any = Lowtide(SHARE).on(model) if when else nullcontext()
        torch.manual_seed(3)
        if when == "before":
            session.__enter__()
        prepared, optimizer = accelerator.prepare(model, optimizer)
        if when != "before":
            session.__enter__()
        for _ in range(3):
            accelerator.backward(prepared.train()(**tokens(8, 24))["loss"])
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        session.__exit__(None, None, None)
        return [p.detach().clone() for p in accelerator.unwrap_model(prepared).parameters()]

    plain = trained("")
    assert_equal(plain, trained("before"))
    assert_equal(plain, trained("after"))


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "adapters"])
def test_sft_trainer_whose_flag_is_on_by_default(adapters: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": tokens(32, 24)["input_ids"].tolist()})

    def trained(callback: Lowtide | None, **changes: Any) -> Any:
        settings = {"max_steps": 4, "per_device_train_batch_size": 8, "report_to": [], "use_cpu": True, "bf16": False}
        more = {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "seed": 3, "max_length": 32}
        args = trl.SFTConfig(str(tmp_path), **(settings | more | changes))
        model = adapted(fresh()) if adapters else fresh()
        torch.manual_seed(1)
        trainer = trl.SFTTrainer(
            model, args, train_dataset=rows, processing_class=tokenizer(), callbacks=[callback] if callback else []
        )
        trainer.train()
        return trainer

    plain = trained(None, **{flag(trl): False})
    for callback in (Lowtide("98%"), Lowtide()):  # most of the memory is in the trainer's own loss
        ours = trained(callback)
        keep = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (plain, ours)]
        assert keep[0] == keep[1]
        assert_equal(list(plain.model.state_dict().values()), list(ours.model.state_dict().values()))
        assert callback.report().calls == 4


def flag(trl: Any) -> str:
    """What TRL's switch is called in this release."""
    fields = trl.SFTConfig.__dataclass_fields__
    return "activation_checkpointing" if "activation_checkpointing" in fields else "gradient_checkpointing"


def tokenizer() -> Any:
    """A tokenizer of 61 words that needs no files."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{i}": i for i in range(60)} | {"<pad>": 60}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<pad>"
    )
