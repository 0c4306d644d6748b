"""Where recomputation meets other parallel modes: one gloo process here; more in the tests of the integrations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lowtide
from troubles.ways import Way, exact, finish, grads, ours, recorded

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save_splits(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = op in (torch.ops.aten.split.Tensor, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def test_B57_selective_checkpointing_replays_the_engines_own_operations() -> None:
    """What gathers and scatters parameters is no part of the recording, so no policy is asked about it."""
    asked: set[str] = set()

    def program(way: Way) -> object:
        blocks, x = nn.ModuleList(Mlp() for _ in range(3)), torch.randn(4, 8)
        for block in blocks:
            fully_shard(block)
        for block in blocks:
            x = way(block, x)
        x.square().sum().backward()
        return [full(p.grad) for p in blocks.parameters()]

    exact(program, partial(ours, context_fn=partial(create_selective_checkpoint_contexts, save_splits)))

    def watched(function: Way, *args: Any) -> Any:
        with lowtide.record(lambda op: bool(asked.add(op.name))):
            return function(*args)

    exact(program, watched)
    assert "aten.addmm" in asked
    assert not any(name.startswith(("fsdp", "c10d", "_c10d")) for name in asked)


def test_B60_a_second_step_after_a_backward_that_is_no_scalars() -> None:
    def program(way: Way) -> object:
        model, seen = Mlp(), []
        for _ in range(3):
            out = way(model, torch.randn(4, 8))
            out.backward(gradient=torch.ones_like(out) * 0.5)
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        return seen

    exact(program)


@pytest.mark.parametrize("way", [ours, recorded], ids=["drop-in", "recorded"])
def test_B123_tensor_parallel_gradients_and_collectives_are_those_of_the_plain_run(way: Way) -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (1,))

    def program(way: Way) -> object:
        model, x = Mlp(), torch.randn(4, 8, requires_grad=True)
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with CommDebugMode() as sent:
            finish(way(model, x).square().sum())
        return [full(g) for g in grads(model, x)], sent.get_total_counts()

    exact(program, way)


def test_B123_packed_sequences() -> None:
    def program(way: Way) -> object:
        attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(7, 8, requires_grad=True)
        lengths = [3, 4]

        def packed(x: Tensor) -> Tensor:
            parts = [attention(part[None], part[None], part[None])[0][0] for part in x.split(lengths)]
            return torch.cat(parts).tanh()

        out = way(packed, x)
        lengths[:] = [4, 3]  # the next batch is prepared before backward
        finish(out.square().sum())
        return out, grads(attention, x)

    exact(program)


# ---- relatives ------------------------------------------------------------------------------------------------


def test_relative_nested_tensors_of_ragged_sequences() -> None:
    def program(way: Way) -> object:
        layer, x = nn.Linear(8, 8), torch.randn(7, 8, requires_grad=True)
        offsets = torch.tensor([0, 3, 7])

        def ragged(x: Tensor) -> Tensor:
            nested = torch.nested.nested_tensor_from_jagged(layer(x), offsets)
            return nested.sin().exp().values()

        finish(way(ragged, x).sum())
        return grads(layer, x)

    exact(program)


def test_relative_a_pipeline_that_holds_several_micro_batches() -> None:
    """Forward of all, then backward in another order: each recording stands for itself."""

    def program(way: Way) -> object:
        first, second = Mlp(), Mlp()
        held = []
        for _ in range(3):
            middle = way(first, torch.randn(4, 8))
            cut = middle.detach().requires_grad_()
            held.append((middle, cut, way(second, cut).square().sum()))
        for middle, cut, loss in (held[1], held[0], held[2]):
            loss.backward()
            middle.backward(cut.grad)
        return grads(first, second)

    exact(program)
