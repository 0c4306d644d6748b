"""transformers' Trainer within a budget, on a small Llama made from its configuration; with peft also with LoRA.

pip install "lowtide[transformers]" accelerate
python -m examples.with_transformers [--lora]
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lowtide.integrations.transformers import Lowtide

WORDS, LENGTH = 256, 64


class Text(Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train(callback: Lowtide | None, lora: bool) -> list[float]:
    """The losses of a few steps."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
        )
    )
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=5, per_device_train_batch_size=8, logging_steps=1, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Text(40), callbacks=[callback] if callback else [])
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters alone")
    lora = parser.parse_args().lora
    callback = Lowtide(budget="70%")
    same = train(None, lora) == train(callback, lora)
    print(callback.report())
    print("the losses are the same to the last bit" if same else "the losses differ")
    assert same


if __name__ == "__main__":
    main()
