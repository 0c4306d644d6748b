"""What a sharded step needs on one rank, foretold: against the bytes measured, and for 64 ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_steps import Net, words
from ranks import on_ranks
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.demo.memory import measure_memory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def sharded(reshard: bool) -> Net:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return model


def foretold_and_measured(reshard: bool) -> tuple[int, int]:
    """The peak of a plain step, as a watched step foretells it and as the allocator sees it."""
    model, batch = sharded(reshard), words(0)
    with lowtide.attach(model, budget="1 GiB") as handle:
        for _ in range(2):
            model(batch).backward()
            model.zero_grad()
        assert handle.plan is not None
        foretold = handle.plan.prediction.peak_bytes
    resident = sum(p.to_local().nbytes for p in model.parameters()) + batch.nbytes  # type: ignore[attr-defined]
    return foretold, measure_memory(lambda: model(batch), Tensor.backward).peak_bytes + resident


@pytest.mark.parametrize("reshard", [True, False])
def test_the_peak_of_a_rank_is_foretold(reshard: bool) -> None:
    for foretold, measured in on_ranks(foretold_and_measured, reshard):
        assert measured <= 1.02 * foretold
        assert foretold <= 1.2 * measured  # the scratch of gloo is seen when it is read, and counted all the time


def test_the_peak_of_one_of_64_ranks_is_foretold_in_one_process() -> None:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    try:
        model, batch = sharded(True), words(0)
        with lowtide.attach(model, budget="1 GiB") as handle:
            for _ in range(2):
                model(batch).backward()
                model.zero_grad()
            assert handle.plan is not None
            foretold = handle.plan.prediction.peak_bytes
        tracker: Any = FSDPMemTracker(model)
        tracker.track_inputs((batch,))
        with tracker:
            model(batch).backward()
        tracked = sum(tracker.get_tracker_snapshot("peak")[torch.device("cpu")].values()) // 2  # with its total
    finally:
        dist.destroy_process_group()
    assert foretold == pytest.approx(tracked, rel=0.1)
