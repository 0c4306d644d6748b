"""DeepSpeed's ZeRO-3 in two processes: the same losses with lowtide as without, and nothing gathered for a replay.

torchrun --nproc-per-node 2 -m examples.with_deepspeed
"""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

from lowtide.demo.model import GPT, GPTShape

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

from lowtide.integrations.deepspeed import Lowtide

WORDS = 128
SETTINGS = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 1000,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": 100_000,  # of the default, 2 GB, a budget would have to leave room
    },
}


def train(session: Lowtide | None) -> list[float]:
    """The losses of a few steps on this rank."""
    torch.manual_seed(0)
    model = GPT(GPTShape(WORDS, 64, 64, 4, heads=2))
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks[0])])  # gather block by block
    engine, *_ = deepspeed.initialize(model=model, config=SETTINGS, model_parameters=list(model.parameters()))
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    if session is not None:
        session.begin(engine)
    for _ in range(4):
        logits = engine(tokens := torch.randint(WORDS, (8, 64)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    if session is not None:
        session.end()
    engine.destroy()
    return losses


def main() -> None:
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    deepspeed.init_distributed("gloo")
    plain = train(None)
    session = Lowtide(budget="85%")
    same = plain == train(session)
    print(f"rank {dist.get_rank()}: {'the losses are the same to the last bit' if same else 'the losses differ'}")
    if dist.get_rank() == 0:
        print(session.report())
    dist.destroy_process_group()
    assert same


if __name__ == "__main__":
    main()
