"""Troubles that only several processes show: one test a line of the list, named after it, as in tests/troubles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import Collectives, on_ranks
from torch import Tensor

from troubles.ways import OURS, Way, plainly, torchs, tried

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RANKS = 4
Left = tuple[list[Tensor], dict[str, int]]


def swapped(way: Way) -> Left:
    """Two regions that exchange rows with all ranks in forward; one rank runs backward the other way round."""
    torch.manual_seed(dist.get_rank())
    weight, rows = torch.randn(8, 8, requires_grad=True), [torch.randn(RANKS, 8) + n for n in range(2)]

    def region(x: Tensor) -> Tensor:
        received = funcol.all_to_all_single(x.sin(), None, None, dist.group.WORLD)
        return (received @ weight).tanh().exp()

    with Collectives() as sent:
        losses = [way(region, each).sum() for each in rows]
        for loss in losses[::-1] if dist.get_rank() == 1 else losses:
            loss.backward()
    assert weight.grad is not None
    return [weight.grad], sent.counts


def same(one: Left, other: Left) -> bool:
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def by_way(program: Callable[[Way], Left], ways: tuple[Way, ...]) -> list[Left]:
    """What this rank is left with under each way."""
    return [program(way) for way in ways]


def test_B29_peers_recompute_in_different_order_and_collectives_pair_wrongly() -> None:
    for plain, *found, by_torch in on_ranks(by_way, swapped, (plainly, *OURS, torchs), ranks=RANKS):
        assert plain[1] == {"_c10d_functional::all_to_all_single": 2}
        assert all(same(plain, one) for one in found)
        if tried:  # torch's sends again in backward, and the rank that begins with the other region gets other rows
            assert by_torch[1] == {"_c10d_functional::all_to_all_single": 4}
            assert not torch.equal(plain[0][0], by_torch[0][0])
