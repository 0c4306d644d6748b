"""What happens below one call and no argument shows: masks made inside, shapes and lengths that data decide."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from harness import dirty_memory
from lowtide.tape import library

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("shelves")]

STEPS, CHANGE = 14, 9
WIDTH = 8
Inside = Callable[[Tensor, int], Tensor]
"""Takes rows (2, 6, WIDTH) and the number of the step."""


def drawn(number: int) -> np.random.Generator:
    return np.random.default_rng(number)


def causal_attention(rows: Tensor, number: int) -> Tensor:
    return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.3, is_causal=True)


def attention_in_the_end_not_causal(rows: Tensor, number: int) -> Tensor:
    return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.3, is_causal=number < CHANGE)


def rows_by_index(rows: Tensor, number: int) -> Tensor:
    return rows[:, torch.tensor(drawn(number).permutation(6))]


def rows_by_mask(rows: Tensor, number: int) -> Tensor:
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[:, torch.tensor(drawn(number).permutation(6)[:2])] = True
    return rows[mask].sin()


def rows_by_another_mask(rows: Tensor, number: int) -> Tensor:
    mask = torch.arange(12).view(2, 6) < (7 if number < CHANGE else 5)
    return rows[mask].sin()


def rows_chosen_by_themselves(rows: Tensor, number: int) -> Tensor:
    return rows.sigmoid()[rows.sum(-1) > 0.1 * (number - 3)].exp()


def repeated_rows(rows: Tensor, number: int) -> Tensor:
    repeats = torch.tensor([1, 2] if number % 2 else [2, 1])
    return torch.repeat_interleave(rows.sin(), repeats, dim=0).exp()


def by_lengths(rows: Tensor, number: int) -> Tensor:
    lengths = torch.tensor([6, 4 if number < CHANGE else 5])
    steps = rows.transpose(0, 1).log_softmax(-1)
    return F.ctc_loss(steps, torch.tensor([[1, 2, 3], [2, 3, 4]]), lengths, torch.tensor([3, 2]))


def by_other_lengths(rows: Tensor, number: int) -> Tensor:
    """A dispatch mode changes what is saved, so that a step without one is not the recorded one."""
    targets = torch.tensor([3, 1]) if number < CHANGE else torch.tensor([2, 2])
    steps = rows.transpose(0, 1).log_softmax(-1)
    return F.ctc_loss(steps, torch.tensor([[1, 2, 3], [2, 3, 4]]), torch.tensor([6, 6]), targets, reduction="none")


def masked_by_numpy(rows: Tensor, number: int) -> Tensor:
    mask = torch.tensor(drawn(number).random((2, 6)) < 0.5, dtype=torch.bool)
    rows = rows.clone()
    rows[mask] = 0.5
    return rows.sin()


def scaled_by_numpy(rows: Tensor, number: int) -> Tensor:
    scale = torch.tensor(drawn(number).random(WIDTH), dtype=torch.float32)
    return (rows * scale).exp() * scale


def numpy_of_another_type(rows: Tensor, number: int) -> Tensor:
    kind = np.float32 if number < CHANGE else np.float64
    return (rows * torch.tensor(drawn(number).random(WIDTH).astype(kind))).exp().float()


def leaf_that_asks_for_grad(rows: Tensor, number: int) -> Tensor:
    noise = torch.full((2, 6, WIDTH), 0.1)
    noise.requires_grad = number < CHANGE
    return (noise * rows).sin() * noise


def chunks_written_apart(rows: Tensor, number: int) -> Tensor:
    first, second = (rows * 1.5).unsafe_chunk(2, -1)
    return first.sigmoid_() * second.tanh_()


BATCHES = torch.empty(3), torch.empty(4, dtype=torch.float64)


def by_answers_about_others(rows: Tensor, number: int) -> Tensor:
    """What is asked of a tensor that nothing else reads shows only in what is done next."""
    other = BATCHES[number >= CHANGE]
    rows = rows.sin() * len(other) * other.size(0)
    return rows.exp() if other.dtype == torch.float32 else rows.tanh()


def shape_twice_removed(rows: Tensor, number: int) -> Tensor:
    """How many differ decides what is computed, not what shape it has."""
    tokens = torch.arange(12) % (3 if number < CHANGE else 4)
    return rows.sin() * torch.bincount(tokens, minlength=WIDTH)[:WIDTH]


class Recurrent(nn.Module):
    """A layer of ``kind`` cells over 6 steps."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)  # type: ignore[call-arg]

    def forward(self, rows: Tensor) -> Tensor:
        state: Any = None
        for row in rows.unbind(1):
            state = self.cell(row, state)
        return state[0] + state[1] if isinstance(state, tuple) else state


class Model(nn.Module):
    def __init__(self, inside: Inside | None, cell: type[nn.RNNCellBase] | None = None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside = inside
        self.recurrent = Recurrent(cell) if cell else None

    def forward(self, rows: Tensor, number: int) -> Tensor:
        hidden = F.gelu(self.one(rows))
        hidden = self.inside(hidden, number) if self.inside else self.recurrent(hidden)  # type: ignore[misc]
        return (self.two(hidden).sin() if hidden.dim() and hidden.shape[-1] == WIDTH else hidden.sin()).sum()


def steps(model: Model, context: Any) -> Iterator[list[Any]]:
    torch.manual_seed(1)
    for number in range(STEPS):
        rows = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(number))
        model.zero_grad()
        with context:
            loss = model(rows, number)
        garbage = dirty_memory()
        loss.backward()
        del garbage
        yield [loss.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]


def copied(values: list[Any]) -> list[Any]:
    return [value if value is None else value.clone() for value in values]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True))


STAY = [
    causal_attention,
    rows_by_index,
    rows_by_mask,
    masked_by_numpy,
    scaled_by_numpy,
]
CHANGES = [
    attention_in_the_end_not_causal,
    rows_by_another_mask,
    by_lengths,
    numpy_of_another_type,
    leaf_that_asks_for_grad,
    by_answers_about_others,
    shape_twice_removed,
]
NOT_FOLLOWED = [rows_chosen_by_themselves, repeated_rows, chunks_written_apart, by_other_lengths]
POLICIES = {
    "all": lowtide.policies.recompute_all,
    "matmuls": lowtide.policies.keep_matmuls,
    "inside": lambda op: op.name in ("aten.mm", "aten.addmm", "aten.gelu", "aten.bmm"),
}


def agree(model: Model, policy: Any, shelves: OrderedDict[Any, library.Shelf]) -> int:
    """How many steps before the change were followed."""
    plain = [copied(step) for step in steps(model, contextlib.nullcontext())]
    different, counts = [], []
    for number, step in enumerate(steps(model, lowtide.record(policy))):
        different += [] if same(plain[number], step) else [number]
        counts.append(sum(program.followed for shelf in shelves.values() for program in shelf.programs))
    assert different == []
    return counts[CHANGE - 1]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("inside", [*STAY, *CHANGES, *NOT_FOLLOWED], ids=lambda inside: inside.__name__)
def test_what_no_argument_shows(inside: Inside, policy: Any, shelves: OrderedDict[Any, library.Shelf]) -> None:
    torch.manual_seed(0)
    followed = agree(Model(inside), policy, shelves)
    assert inside in NOT_FOLLOWED or followed == CHANGE - 4, [shelf.flaws for shelf in shelves.values()]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_are_followed(
    cell: type[nn.RNNCellBase], policy: Any, shelves: OrderedDict[Any, library.Shelf]
) -> None:
    torch.manual_seed(0)
    assert agree(Model(None, cell), policy, shelves) == CHANGE - 4, [shelf.flaws for shelf in shelves.values()]


def test_a_flaw_that_is_known_ends_the_transcript(shelves: OrderedDict[Any, library.Shelf]) -> None:
    """What cannot be followed costs what recording costs, from the second transcript on."""
    model = Model(lambda rows, number: torch.from_numpy(rows.detach().numpy() * 2) * rows)
    lengths = []
    for _ in steps(model, lowtide.record(lowtide.policies.recompute_all)):
        (shelf,) = shelves.values()
        lengths += [len(calls) for calls in shelf.drafts.values()]
    assert len(lengths) == 1, lengths
    assert list(shelf.flaws.values()) == ["numpy: memory escapes from torch's sight"]
