"""Under autocast: what is cached, and what casts only where no mode looks on."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from harness import dirty_memory
from lowtide.tape import library
from test_promptness import peak_bytes

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("shelves")]
STEPS = 9


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, rows: Tensor) -> Tensor:
        for _ in range(2):  # the second time the weights are found in autocast's cache
            rows = self.two(F.gelu(self.one(rows)).exp()).sin()
        return rows.float().square().mean()


def gradients(model: nn.Module, rows: Tensor, context: Any) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16), context:
        loss = model(rows)
    garbage = dirty_memory()
    loss.backward()
    del garbage
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_steps_under_autocast_are_followed_exactly_and_hold_no_more_than_recorded_ones(
    shelves: OrderedDict[Any, library.Shelf],
) -> None:
    model, rows = Cast(), torch.randn(128, 32)
    recording = lowtide.record(lowtide.policies.recompute_all)
    plain = gradients(model, rows, torch.enable_grad())
    for _ in range(STEPS):
        found = gradients(model, rows, recording)
        assert all(map(torch.equal, plain, found))
    (shelf,) = shelves.values()
    assert [(program.followed, program.missed) for program in shelf.programs] == [(STEPS - 4, 0)]
    shelves.clear()
    step = functools.partial(gradients, model, rows, lowtide.record(lowtide.policies.recompute_all))
    peaks = [peak_bytes(step) for _ in range(STEPS)]
    assert max(peaks[1:]) <= peaks[0], peaks


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.bilinear(x, x, w),
        lambda x, w: F.grid_sample(
            x[None, None], F.affine_grid(w[:1, :2, :3].exp(), [1, 1, 4, 4]), align_corners=False
        ),
    ],
    ids=["bilinear", "affine_grid"],
)
def test_what_casts_only_where_no_mode_looks_on_is_never_followed(
    function: Any, shelves: OrderedDict[Any, library.Shelf]
) -> None:
    """Recorded, it has the bits that any dispatch mode gives it, and in every step the same."""
    x, w = torch.randn(4, 4), torch.randn(3, 4, 4).requires_grad_()
    recording = lowtide.record(lowtide.policies.recompute_all)
    seen = []
    for _ in range(STEPS):
        w.grad = None
        with torch.autocast("cpu", torch.bfloat16), recording:
            loss = function(x.exp(), w.sin()).float().square().sum()
        loss.backward()
        assert w.grad is not None
        seen.append((loss.detach(), w.grad.clone()))
    assert all(torch.equal(a, b) for step in seen for a, b in zip(seen[0], step, strict=True))
    assert sum(program.followed for shelf in shelves.values() for program in shelf.programs) == 0
