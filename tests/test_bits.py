"""Zeros and ones that were drawn are remembered by their bits: the same values, a fraction of the memory, no state."""

from __future__ import annotations

import contextlib
import ctypes
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from benchmarks.memory import measure_memory
from harness import dirty_memory
from lowtide.tape import bits, library, randomness
from lowtide.tape.operators import operator

DRAW = operator(torch.ops.aten.bernoulli_.float)
STEPS = 8

MASKS = {
    "none": lambda kind: torch.empty(0, dtype=kind),
    "one": lambda kind: torch.empty((), dtype=kind),
    "few": lambda kind: torch.empty(7, 5, dtype=kind),
    "as many as take a byte each": lambda kind: torch.empty(64, 64, dtype=kind),
    "one more": lambda kind: torch.empty(bits.SMALL + 1, dtype=kind),
    "planes of unequal length": lambda kind: torch.empty(7, 1001, 3, dtype=kind),
    "dimensions in another order": lambda kind: torch.empty(2, 65, 3, 64, dtype=kind).permute(2, 0, 3, 1),
    "channels last": lambda kind: torch.empty(2, 8, 33, 33, dtype=kind).to(memory_format=torch.channels_last),
    "a part of more": lambda kind: torch.empty(9, 50, 50, dtype=kind)[2:7],
}


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_bits_give_back_what_was_drawn(make: Any, kind: torch.dtype) -> None:
    mask = make(kind).bernoulli_(0.7)
    assert bits.fits(DRAW, (mask,))
    packed = bits.pack(mask)
    assert (packed.dtype, packed.shape) == (torch.uint8, (bits.bytes_of(mask.numel()),))
    assert packed.untyped_storage().nbytes() == packed.numel()  # and holds no more
    other = torch.full_like(mask, float("nan"))
    assert bits.put(other, packed) is other
    assert torch.equal(mask, other)


def test_a_mask_with_gaps_is_drawn_again() -> None:
    assert not bits.fits(DRAW, (torch.empty(8, 8)[:, ::2],))


class Dropped(nn.Module):
    """Dropout of ``kind`` in float32, of ``width`` x ``width`` values, and what needs the mask twice."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.LSTM(width, width, 3, dropout=0.3) if kind == "lstm" else None
        self.kind = kind

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.one(rows).relu()
        if self.layers is not None:
            hidden = self.layers(hidden[None])[0][0]
        elif self.kind == "in place":
            hidden = F.dropout(hidden + 0.5, 0.3, training=True, inplace=True)
        elif self.kind == "alpha":
            hidden = F.alpha_dropout(hidden, 0.3, training=True)
        elif self.kind == "feature":
            hidden = F.dropout1d(hidden[None], 0.3, training=True)[0]
        elif self.kind == "by hand":
            mask = torch.empty_like(hidden).bernoulli_(0.7)
            hidden = (hidden * mask / 0.7).exp() * mask
        elif self.kind == "scaled to nothing":
            mask = torch.empty_like(hidden).bernoulli_(0.7)
            hidden = hidden.exp() * mask.exp() * torch.zeros_like(hidden).bernoulli_(0.6).mul_(0.0)
        elif self.kind == "rounded to nothing":
            halves = torch.empty_like(hidden).bernoulli_(0.7).div_(2.0, rounding_mode="floor")
            hidden = hidden.exp() * halves + hidden * torch.empty_like(hidden).bernoulli_(0.5).div_(-0.5)
        elif self.kind == "tensor of chances":
            hidden = hidden * torch.zeros_like(hidden).bernoulli_(hidden.detach().sigmoid())
        elif self.kind == "attention":
            hidden = F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.2)
        else:
            hidden = F.dropout(hidden, 0.3, training=True)
        return self.two(hidden.sin()).square().sum()


KINDS = [
    "dropout", "in place", "alpha", "feature", "by hand", "scaled to nothing", "rounded to nothing",
    "tensor of chances", "attention", "lstm",
]  # fmt: skip


def steps(model: nn.Module, rows: Tensor, context: Any) -> list[list[Tensor]]:
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        with context:
            loss = model(rows)
        garbage = dirty_memory()
        loss.backward()
        del garbage
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()])
    return found


@pytest.mark.usefixtures("shelves")
@pytest.mark.parametrize("width", [12, 80])
@pytest.mark.parametrize("kind", KINDS)
def test_no_random_state_is_needed(
    kind: str, width: int, shelves: OrderedDict[Any, library.Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, rows = Dropped(kind, width), torch.randn(width, width)
    plain = steps(model, rows, contextlib.nullcontext())

    def never(*_: Any) -> None:
        pytest.fail("a random state was set")

    monkeypatch.setattr(randomness, "set_state", never)
    for one, other in zip(plain, steps(model, rows, lowtide.record(lowtide.policies.recompute_all)), strict=True):
        assert all(map(torch.equal, one, other))
    followed = [program.followed for shelf in shelves.values() for program in shelf.programs]
    assert followed == [STEPS - 4], [shelf.flaws for shelf in shelves.values()]
    if kind in ("dropout", "in place"):  # its mask is saved, and seen there
        assert not any(call.operations for shelf in shelves.values() for call in shelf.programs[0].calls)


def test_a_mask_that_something_unseen_wrote_is_called_by_what_drew_it() -> None:
    leaf = torch.ones(100, requires_grad=True)

    def forward() -> tuple[Tensor, Tensor]:
        with lowtide.record():
            mask = torch.empty_like(leaf).bernoulli_(0.5)
            ctypes.memset(mask.data_ptr(), 0, 40)
            return (leaf.exp() * mask).sum(), mask

    with pytest.warns(lowtide.errors.RecomputeWarning, match="aten.bernoulli_ .* the dispatcher does not see"):
        loss, mask = forward()
    loss.backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.ones(100).exp() * mask)


def test_other_draws_are_made_again_with_their_state() -> None:
    def forward(leaf: Tensor) -> Tensor:
        return (leaf * torch.rand(100)).exp().sum() + (leaf * torch.randn(100)).sin().sum()

    gradients = []
    for context in (contextlib.nullcontext(), lowtide.record(lowtide.policies.recompute_all)):
        torch.manual_seed(0)
        leaf = torch.ones(100, requires_grad=True)
        with context:
            loss = forward(leaf)
        loss.backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.usefixtures("shelves")
def test_what_is_held_is_what_was_foretold() -> None:
    """In recorded steps and in followed ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Dropout(0.2), nn.Tanh())])
    rows = torch.randn(256, 128)
    graph = lowtide.trace(lambda: model(rows).sum(), model)
    dropped = frozenset(i for i, op in graph.forward_ops() if not op.keep)
    timeline = lowtide.simulate(graph, dropped)
    assert sum(op.state_bytes for op in graph.ops) == 6 * 256 * 128 // 8

    recording = lowtide.record(lowtide.policies.recompute_all)

    def forward() -> Tensor:
        with recording:
            return model(rows).sum()

    for _ in range(STEPS):
        model.zero_grad()
        measured = measure_memory(forward, torch.autograd.backward).peak_bytes
        assert measured == timeline.peak_bytes - graph.resident_bytes
