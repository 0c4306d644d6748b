"""Distributed training steps: by name, what each rank builds and does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

WIDTH, WORDS, LENGTH, BATCH, BLOCKS = 32, 61, 16, 12, 4


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.scale = nn.LayerNorm(WIDTH), MLP(), nn.Parameter(torch.ones(WIDTH))
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(self.norm(x) * self.scale)
        self.seen = out.sin()  # read outside of this block by some losses
        return x + F.dropout(out, 0.1, self.training)


class Net(nn.Module):
    """Tokens in, loss out.

    shared: one block runs every time. aside: the loss also reads what the blocks left behind. tied: the head is the
    embedding. unused: parameters that no step uses. norm: batch norm, whose buffers move.
    """

    def __init__(self, *options: str) -> None:
        super().__init__()
        self.options = options
        self.embed = nn.Embedding(WORDS, WIDTH)
        count = 1 if "shared" in options else BLOCKS
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.norm = nn.BatchNorm1d(LENGTH) if "norm" in options else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if "tied" in options:
            self.head.weight = self.embed.weight
        if "unused" in options:
            self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for number in range(BLOCKS):
            x = self.blocks[number % len(self.blocks)](x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), words.flatten())
        if "aside" in self.options:
            loss = loss + sum(block.seen.exp().mean() for block in self.blocks)
        return loss


@dataclass
class Setup:
    """What a rank trains: ``run(number)`` takes one step's forward and backward and returns what to compare."""

    planned: nn.Module
    """What lowtide is attached to."""
    wrapped: nn.Module
    run: Callable[[int], list[Tensor]]


STEPS: dict[str, Callable[[], Setup]] = {}


def words(number: int) -> Tensor:
    """This rank's batch number ``number``."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + number)
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def plain_loop(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor] | None = None) -> Callable[[int], Any]:
    def run(number: int) -> list[Tensor]:
        loss = model(words(number)) if loss_of is None else loss_of(model, number)
        loss.backward()
        return [loss.detach()]

    return run


def two_forwards(model: nn.Module, number: int) -> Tensor:
    return model(words(number)) + 2 * model(words(number + 50))


def under_autocast(model: nn.Module, number: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(words(number))
    return loss


# ---- DDP ------------------------------------------------------------------------------------------------------


def ddp(
    name: str, *options: str, loss_of: Any = None, accumulate: bool = False, outside: bool = False, **wrap: Any
) -> None:
    """Register a step under DDP; lowtide is attached to the model itself, or ``outside`` to the wrapper."""

    def build() -> Setup:
        inner = Net(*options)
        model = DistributedDataParallel(inner, **wrap)

        def accumulated(number: int) -> list[Tensor]:
            losses = []
            for micro in range(3):
                with model.no_sync() if micro < 2 else nullcontext():
                    losses += plain_loop(model)(10 * number + micro)
            return losses

        return Setup(model if outside else inner, model, accumulated if accumulate else plain_loop(model, loss_of))

    STEPS[f"ddp: {name}"] = build


ddp("plain")
ddp("static graph", static_graph=True)
ddp("unused parameters", "unused", find_unused_parameters=True)
ddp("unused parameters, static graph", "unused", static_graph=True, find_unused_parameters=True)
ddp("shared block", "shared")
ddp("shared block, static graph", "shared", static_graph=True)
ddp("two forwards", loss_of=two_forwards, broadcast_buffers=False)
ddp("buffers", "norm")
ddp("gradients as views", gradient_as_bucket_view=True)
ddp("without sync", accumulate=True)
ddp("attached outside", outside=True)
ddp("attached outside, static graph", outside=True, static_graph=True)


# ---- FSDP -----------------------------------------------------------------------------------------------------

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF_OUTSIDE = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)


def fsdp(
    name: str,
    *options: str,
    loss_of: Any = None,
    nested: bool = False,
    freeze: bool = False,
    ignore: bool = False,
    accumulate: bool = False,
    **settings: Any,
) -> None:
    """Register a step under FSDP2."""

    def build() -> Setup:
        model = Net(*options)
        if freeze:
            model.embed.requires_grad_(False)
            model.blocks[0].requires_grad_(False)
            model.blocks[2].mlp.up.requires_grad_(False)
        kept = {p for block in model.blocks for p in [block.scale]} if ignore else None
        for block in model.blocks:
            if nested:
                fully_shard(block.mlp, **settings)
            fully_shard(block, ignored_params=kept, **settings)
        outside = {"mp_policy": HALF_OUTSIDE} if "mp_policy" in settings else {}
        fully_shard(model, ignored_params=kept, **(settings | outside))

        def accumulated(number: int) -> list[Tensor]:
            losses = []
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                losses += plain_loop(model)(10 * number + micro)
            return losses

        return Setup(model, model, accumulated if accumulate else plain_loop(model, loss_of))

    STEPS[f"fsdp: {name}"] = build


fsdp("resharded after forward", reshard_after_forward=True)
fsdp("not resharded after forward", reshard_after_forward=False)
fsdp("mixed precision", mp_policy=HALF)
fsdp("mixed precision, not resharded", mp_policy=HALF, reshard_after_forward=False)
fsdp("nested units", nested=True)
fsdp("nested units, mixed precision", nested=True, mp_policy=HALF)
fsdp("frozen parameters", freeze=True)
fsdp("ignored parameters", ignore=True)
fsdp("without sync", accumulate=True)
fsdp("without sync, mixed precision", accumulate=True, mp_policy=HALF)
fsdp("shared block", "shared")
fsdp("two forwards", loss_of=two_forwards)
fsdp("two forwards, not resharded", loss_of=two_forwards, reshard_after_forward=False)
fsdp("tied weights", "tied")
fsdp("under autocast", loss_of=under_autocast)
fsdp("nested units, mixed precision under autocast", loss_of=under_autocast, nested=True, mp_policy=HALF)
fsdp("read aside", "aside")
fsdp("read aside, nested, mixed precision", "aside", nested=True, mp_policy=HALF)


def old_fsdp(name: str, **settings: Any) -> None:
    """Register a step under FSDP1."""

    def build() -> Setup:
        model = FullyShardedDataParallel(
            Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **settings
        )
        return Setup(model, model, plain_loop(model))

    STEPS[f"old fsdp: {name}"] = build


old_fsdp("full shard", use_orig_params=True)
old_fsdp("full shard, flat parameters", use_orig_params=False)
old_fsdp(
    "gradients and optimizer states",
    use_orig_params=True,
    sharding_strategy=__import__("torch.distributed.fsdp", fromlist=["x"]).ShardingStrategy.SHARD_GRAD_OP,
)


# ---- tensor and sequence parallel ---------------------------------------------------------------------------


def tensor_parallel(sequence: bool) -> Callable[[], Setup]:
    def build() -> Setup:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        model = Net()
        for block in model.blocks:
            block.scale.requires_grad_(False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            plan: dict[str, Any] = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
            if sequence:
                plan["norm"] = SequenceParallel(use_local_output=True)
                plan["mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
                plan["mlp.down"] = RowwiseParallel(output_layouts=Shard(1))
            parallelize_module(block, mesh, plan)
        if sequence:
            parallelize_module(model, mesh, {
                "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            })  # fmt: skip
        return Setup(
            model, model, plain_loop(model, lambda model, number: model(words(number - 100 * dist.get_rank())))
        )

    return build


STEPS["tensor parallel"] = tensor_parallel(False)
STEPS["sequence parallel"] = tensor_parallel(True)


# ---- pipeline -------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self, net: Net, first: bool) -> None:
        super().__init__()
        half = BLOCKS // 2
        self.embed = net.embed if first else None
        self.blocks = net.blocks[:half] if first else net.blocks[half:]
        self.head = None if first else net.head

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def pipeline(schedule: str) -> Callable[[], Setup]:
    def build() -> Setup:
        from torch.distributed import pipelining

        rank, ranks = dist.get_rank(), dist.get_world_size()
        module = Stage(Net(), rank == 0)
        stage = pipelining.PipelineStage(module, rank, ranks, torch.device("cpu"))
        loss = lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten())  # noqa: E731
        runner = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=loss)

        def run(number: int) -> list[Tensor]:
            batch = torch.randint(0, WORDS, (4 * BATCH, LENGTH), generator=torch.Generator().manual_seed(number))
            losses: list[Tensor] = []
            if rank == 0:
                runner.step(batch)
            else:
                runner.step(target=batch, losses=losses)
            return [loss.detach() for loss in losses]

        return Setup(module, module, run)

    return build


STEPS["pipeline: 1F1B"] = pipeline("Schedule1F1B")
STEPS["pipeline: GPipe"] = pipeline("ScheduleGPipe")
