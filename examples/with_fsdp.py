"""FSDP2 in two processes: the same losses with lowtide as without, and not one gather more.

torchrun --nproc-per-node 2 -m examples.with_fsdp
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.demo.model import GPT, GPTShape

WORDS = 128


def train(policy: lowtide.policies.Policy | None) -> list[float]:
    """The losses of a few steps on this rank."""
    torch.manual_seed(0)
    model = GPT(GPTShape(WORDS, 64, 64, 4, heads=2))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    handle = lowtide.attach(model, policy=policy) if policy is not None else None
    for _ in range(4):
        logits = model(tokens := torch.randint(WORDS, (8, 64)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if handle is not None:
        handle.detach()
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    plain = train(None)
    same = plain == train(lowtide.policies.segments("blocks.*"))
    print(f"rank {dist.get_rank()}: {'the losses are the same to the last bit' if same else 'the losses differ'}")
    dist.destroy_process_group()
    assert same


if __name__ == "__main__":
    main()
