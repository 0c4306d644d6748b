"""On fake tensors small integers have values, so that a step goes the way it goes for real."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import GraphError
from lowtide.graph import StepGraph

LENGTH, WIDTH = 12, 8


def both(step: Callable[[], Tensor], model: nn.Module) -> tuple[StepGraph, StepGraph]:
    return lowtide.trace(step, model, repeats=0), lowtide.trace(step, model, fake=True)


def assert_alike(step: Callable[[], Tensor], model: nn.Module) -> StepGraph:
    """The fake trace has the operations, the sizes and the peak of the real one."""
    real, fake = both(step, model)
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert [op.workspace_bytes for op in fake.ops] == [op.workspace_bytes for op in real.ops]
    everything = {i for i, _ in real.forward_ops()}
    for chosen in (set(), everything):
        assert lowtide.simulate(fake, chosen).peak_bytes == lowtide.simulate(real, chosen).peak_bytes
    return fake


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def test_a_mask_that_lets_all_pass_is_left_out(model: nn.Module) -> None:
    lengths = torch.tensor([LENGTH, LENGTH])
    x = torch.randn(2, LENGTH, WIDTH)

    def step() -> Tensor:
        mask = torch.arange(LENGTH) < lengths[:, None]
        hidden = model(x)
        if not mask.all():
            hidden = hidden.masked_fill(~mask[..., None], 0.0)
        return F.scaled_dot_product_attention(hidden, hidden, hidden).square().mean()

    graph = assert_alike(step, model)
    assert not any("masked_fill" in op.name for op in graph.ops)
    lengths[1] = 5
    assert any("masked_fill" in op.name for op in assert_alike(step, model).ops)


def test_numbers_are_asked_for_and_places_counted(model: nn.Module) -> None:
    lengths = torch.tensor([3, LENGTH])
    x = torch.randn(2, LENGTH, WIDTH)

    def step() -> Tensor:
        mask = torch.arange(LENGTH) < lengths[:, None]
        longest = int(lengths.max())
        chosen = model(x)[:, :longest][mask]
        return chosen.sum() + x[..., 0].masked_select(mask).sum() + len(mask.nonzero())

    assert_alike(step, model)


def test_a_layer_is_skipped_by_the_same_draw(model: nn.Module) -> None:
    x = torch.randn(4, WIDTH)

    def step() -> Tensor:
        torch.manual_seed(3)
        hidden = model(x)
        for _ in range(6):
            if torch.rand([]) < 0.5:
                hidden = torch.tanh(hidden)
        return hidden.sum()

    assert_alike(step, model)


def test_the_loss_of_ctc_has_the_length_of_its_longest_target(model: nn.Module) -> None:
    x = torch.randn(LENGTH, 2, WIDTH)
    targets = torch.tensor([[1, 2, 3, 4], [1, 2, 0, 0]])

    def step() -> Tensor:
        scores = F.log_softmax(model(x), -1)
        return F.ctc_loss(scores, targets, torch.tensor([LENGTH, LENGTH]), (targets > 0).sum(1))

    assert_alike(step, model)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="younger than this release")
def test_products_of_groups_are_followed_in_full_precision() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    experts = nn.Parameter(torch.randn(2, 16, 16))
    model.register_parameter("experts", experts)
    x = torch.randn(8, 16)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    assert_alike(lambda: F.grouped_mm(model(x), model.experts, offs=ends).square().sum(), model)


def test_what_was_there_is_never_written(model: nn.Module) -> None:
    count = torch.zeros(3, dtype=torch.long)

    def step() -> Tensor:
        count.add_(1)
        return model(torch.ones(2, WIDTH)).sum()

    lowtide.trace(step, model, fake=True)
    assert not count.any()


def test_what_is_written_with_something_fake_has_no_values(model: nn.Module) -> None:
    def step() -> Tensor:
        hits = torch.zeros(WIDTH, dtype=torch.long)
        hidden = model(torch.ones(2, WIDTH))
        hits.scatter_add_(0, hidden.argmax(1), torch.ones(2, dtype=torch.long))
        return hidden.sum() * (2 if hits.any() else 1)

    with pytest.raises(GraphError, match="looks at values"):
        lowtide.trace(step, model, fake=True)


def test_large_integers_stay_fake(model: nn.Module) -> None:
    """A mask of a long sequence would not fit: 2**40 places."""

    def step() -> Tensor:
        positions = torch.arange(2**20)
        mask = positions[:, None] >= positions
        return model(torch.ones(2, WIDTH)).sum() + mask.shape[0]

    lowtide.trace(step, model, fake=True)


def test_a_mask_that_only_recipes_hold_is_let_go_of() -> None:
    """Dropout of attention on a CPU takes the plain path, whose causal mask dies long before backward."""
    torch.manual_seed(0)
    length = 64
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def step() -> Tensor:
        x = torch.ones(1, 1, length, WIDTH)
        for layer in layers:
            h = layer(x)
            x = F.scaled_dot_product_attention(h, h, h, dropout_p=0.1, is_causal=True)
        return x.sum()

    graph = assert_alike(step, layers)
    masks = [
        i
        for i, s in enumerate(graph.storages)
        if s.kind == "activation" and s.bytes == length * length  # booleans
    ]
    assert len(masks) >= 4
    seal = graph.events.index((5, 0))
    freed = {index for kind, index in graph.events[:seal] if kind == 4}
    assert freed.issuperset(masks)
