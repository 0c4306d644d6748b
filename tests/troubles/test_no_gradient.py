"""No gradient reaches the weights: what requires grad in the plain step requires grad here, and gets one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from troubles.ways import OURS, Way, exact, finish, grads, plainly, reentrant, torch_differs, torch_raises


@pytest.mark.parametrize("data_requires_grad", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_B30_the_output_requires_grad_exactly_when_the_plain_one_does(data_requires_grad: bool, trains: bool) -> None:
    layer, x = nn.Linear(4, 4).requires_grad_(trains), torch.randn(2, 4, requires_grad=data_requires_grad)
    wanted = plainly(lambda x: layer(x).tanh(), x)
    for way in OURS:
        out = way(lambda x: layer(x).tanh(), x)
        assert out.requires_grad == wanted.requires_grad == (data_requires_grad or trains)


def first_block_on_data(way: Way) -> object:
    block, head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)
    finish(head(way(block, torch.randn(2, 4))).sum())
    return grads(block, head)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_B30_a_first_block_whose_input_is_data_trains() -> None:
    exact(first_block_on_data)
    torch_differs(first_block_on_data, reentrant)  # trains the head alone, in silence but for a warning


class Frozen(nn.Module):
    """A frozen embedding and frozen blocks; the last block's end is what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)

    def forward(self, tokens: Tensor, way: Way = plainly) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + way(block, x)
        return x


def frozen_embedding(way: Way) -> object:
    model, head = Frozen(), nn.Linear(8, 1)
    finish(head(model(torch.arange(6), way)).sum())
    return grads(model, head)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_B31_a_frozen_embedding_and_checkpointing_mean_no_training() -> None:
    exact(frozen_embedding)
    torch_differs(frozen_embedding, reentrant)


def test_B31_nothing_is_warned_about_where_everything_that_trains_gets_its_gradient() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in OURS:
            frozen_embedding(way)
        model = Frozen()
        with lowtide.attach(model, policy=lowtide.policies.segments("blocks.*")):
            model(torch.arange(6)).sum().backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


class Adapter(nn.Module):
    """A frozen layer with a low-rank matrix beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block[0] = Adapter(block[0])


@pytest.mark.parametrize("order", ["adapters first", "checkpointing first"])
def test_B32_switching_checkpointing_on_before_or_after_the_adapters_is_all_the_same(order: str) -> None:
    torch.manual_seed(0)
    model = Frozen().requires_grad_(False)
    if order == "adapters first":
        adapt(model)
        handle = lowtide.attach(model, policy=lowtide.policies.segments("blocks.*"))
    else:
        handle = lowtide.attach(model, policy=lowtide.policies.segments("blocks.*"))
        adapt(model)
    with handle:
        model(torch.arange(6)).square().sum().backward()
    ours = [p.grad for p in model.parameters() if p.requires_grad]
    assert len(ours) == 6
    model.zero_grad()
    plain = copy.deepcopy(model)
    plain(torch.arange(6)).square().sum().backward()
    theirs = [p.grad for p in plain.parameters() if p.requires_grad]
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def adapters_step(way: Way) -> object:
    stem, adapter, head = nn.Linear(8, 8).requires_grad_(False), Adapter(nn.Linear(8, 8)), nn.Linear(8, 1)
    trained = [p for module in (adapter, head) for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(3):
        head(way(lambda x: adapter(x).tanh(), stem(torch.ones(2, 8)))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return trained


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_B33_low_rank_matrices_stay_at_their_start_values() -> None:
    exact(adapters_step)
    torch_differs(adapters_step, reentrant)


def partly_frozen(way: Way) -> object:
    vision, text, x = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
    seen = way(lambda x: vision(x.detach()).tanh(), x)
    finish(text(seen).sum() if way is not reentrant else (text(seen).sum() + seen.sum()))
    return seen, grads(vision, text, x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_B34_none_of_output_has_requires_grad_for_a_partly_frozen_model() -> None:
    exact(partly_frozen)
    torch_raises(partly_frozen, "none of output has requires_grad", reentrant)


def test_B34_a_frozen_region_costs_nothing() -> None:
    vision = nn.Linear(8, 8).requires_grad_(False)
    with lowtide.record(lowtide.policies.recompute_all) as recording:
        out = vision(torch.ones(2, 8)).tanh()
    assert not out.requires_grad
    model = nn.Sequential(vision)
    with lowtide.attach(model, budget="50%") as handle:
        model(torch.ones(2, 8))
    assert handle.report().calls == 0
    assert not recording.report().warnings


def embedding_alone(way: Way) -> object:
    embed, head, tokens = nn.Embedding(10, 8), nn.Linear(8, 1), torch.tensor([1, 4, 4, 2])
    finish(head(way(embed, tokens).tanh()).sum())
    return grads(embed, head)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_B35_checkpointing_the_embedding_itself() -> None:
    exact(embedding_alone)
    torch_differs(embedding_alone, reentrant)


# ---- relatives -----------------------------------------------------------------------------------------------


RELATIVES: dict[str, Callable[[Way], object]] = {}


def relative(program: Callable[[Way], object]) -> Callable[[Way], object]:
    RELATIVES[program.__name__] = program
    return program


@relative
def a_soft_prompt_in_front_of_a_frozen_model(way: Way) -> object:
    model, prompt = Frozen().requires_grad_(False), torch.randn(2, 8, requires_grad=True)
    x = torch.cat([prompt, model.embed(torch.arange(4))])
    finish(way(lambda x: model.blocks[0](x).tanh(), x).sum())
    return grads(prompt, model)


@relative
def a_parameter_that_only_the_closure_knows(way: Way) -> object:
    gain, x = torch.ones(8, requires_grad=True), torch.randn(2, 8)
    finish(way(lambda x: (x * gain).exp().sin(), x).sum())
    return grads(gain)


@relative
def an_input_gradient_through_a_frozen_model_in_eval_mode(way: Way) -> object:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval().requires_grad_(False), torch.randn(2, 8)
    x.requires_grad_()
    finish(way(model, x).square().sum())
    return grads(x, model)


@relative
def weight_norm_on_a_frozen_base(way: Way) -> object:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    layer.parametrizations.weight.original1.requires_grad_(False)
    finish(way(lambda x: layer(x).tanh(), torch.randn(2, 8)).sum())
    return grads(layer)


@pytest.mark.parametrize("program", RELATIVES.values(), ids=RELATIVES)
def test_relatives(program: Callable[[Way], object]) -> None:
    exact(program)
