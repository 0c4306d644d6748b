"""Gathering, scattering, masks, and control flow that depends on data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Program
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("indexing")

ROWS = torch.tensor([0, 2, 2, 5])
PLACES = torch.tensor([[0, 1, 2], [3, 3, 4], [7, 0, 5], [1, 1, 1], [2, 6, 0], [5, 4, 3]])

ZOO.flow("gather", lambda x: x.exp().gather(1, PLACES).sin())
ZOO.flow("gather_by_result", lambda x: x.exp().gather(1, x.sin().argsort(1)[:, :3]).cos())
ZOO.flow("take_along_and_take", lambda x: x.exp().take_along_dim(PLACES, 1).sin() * x.sin().take(PLACES).exp())
ZOO.flow("scatter", lambda x: x.exp().scatter(1, PLACES, x[:, :3].sin()).cos())
ZOO.flow("scatter_add", lambda x: torch.zeros(6, 8).scatter_add(1, PLACES, x[:, 2:5].exp()).sin())
ZOO.flow("scatter_reduce", lambda x: x.exp().scatter_reduce(1, PLACES, x[:, :3].sin(), "prod").sin())
ZOO.flow("index_add", lambda x: torch.zeros(6, 8).index_add(0, ROWS, x[:4].exp()).sin())
ZOO.flow("index_copy_fill", lambda x: x.exp().index_copy(0, ROWS[:2], x[:2].sin()).index_fill(1, ROWS, 0.5).cos())
ZOO.flow("index_select", lambda x: x.exp().index_select(0, ROWS).sin())
ZOO.flow("index_with_none", lambda x: x.exp()[:, None, ROWS].sin() * x.sin()[ROWS][None, :, :1, None].exp().sum())
ZOO.flow("index_two_lists", lambda x: x.exp()[ROWS, ROWS + 1].sin() * x.exp()[1, 2:6])
ZOO.flow("index_put", lambda x: x.exp().index_put((ROWS[:2], ROWS[:2]), x[:2, 0]).cos())
ZOO.flow("index_put_accumulate", lambda x: x.exp().index_put((ROWS, ROWS), x[:4, 0].sin(), accumulate=True).cos())
ZOO.flow("boolean_index", lambda x: x.exp()[x > 0.1].sin())
ZOO.flow("boolean_index_of_dropped_mask", lambda x: x.exp()[x.sin().exp() > 1.0].cos())
ZOO.flow("boolean_assignment", lambda x: _boolean_assignment(x))
ZOO.flow("nonzero", lambda x: x.exp()[tuple(x.sin().gt(0.2).nonzero().T)].sin())
ZOO.flow("nonzero_as_tuple", lambda x: x.exp()[torch.where(x.sin() > 0)].sin().sum())
ZOO.flow("masked_fill", lambda x: x.exp().masked_fill(x.sin() > 0.3, 0.1).cos())
ZOO.flow("masked_fill_tensor_value", lambda x: x.exp().masked_fill(x > 0.3, x.detach().mean()).cos())
ZOO.flow("masked_select", lambda x: x.exp().masked_select(x.cos() < 0.9).sin())
ZOO.flow("masked_scatter", lambda x: x.exp().masked_scatter(x > 0.2, x.sin().flatten()).cos())
ZOO.flow("where", lambda x: torch.where(x.sin() > 0, x.exp(), x.cos() * 0.5).sin())
ZOO.flow("where_nan_branch", lambda x: torch.where(x > 0, x.sqrt(), torch.zeros(())).nansum().exp() * x.sin())
ZOO.flow(
    "causal_mask",
    lambda x: (x @ x.T).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1) @ x,
)
ZOO.flow("tril_bias", lambda x: ((x @ x.T) + torch.full((6, 6), -1e9).triu(1)).softmax(-1) @ x.exp())
ZOO.flow("one_hot", lambda x: F.one_hot(x.exp().argmax(1), 8).float() * x.exp())
ZOO.flow("straight_through", lambda x: x.exp() + (x.exp().round() - x.exp()).detach() * x.sin())
ZOO.flow(
    "bucketize_searchsorted",
    lambda x: torch.linspace(0, 1, 9)[torch.bucketize(x, torch.linspace(-1, 1, 8))] * x.exp(),
)
ZOO.flow("unique_and_bincount", lambda x: _counted(x))
ZOO.flow(
    "median_mode_kthvalue",
    lambda x: x.exp().median(1).values + x.kthvalue(3, 1)[0].sin() + x.exp().mode(1)[0],
)
ZOO.flow("branch_on_item", lambda x: x.exp().sin() if x.sum().item() > 0 else x.cos().exp())
ZOO.flow("loop_until_converged", lambda x: _iterated(x))
ZOO.flow("halting_per_row", lambda x: _halting(x))
ZOO.flow("tolist_shapes", lambda x: x.exp()[: max(1, int(x.abs().sum().tolist()) % 5)].sin())
ZOO.flow("early_exit", lambda x: _early_exit(x))
ZOO.flow("beam_reordering", lambda x: _beams(x))
ZOO.flow("segment_softmax", lambda x: _segment_softmax(x))
ZOO.flow("mixture_of_experts", lambda x, w: _experts(x, w), x=(6, 8), w=(4, 8, 8))
ZOO.flow("message_passing", lambda x, w: _messages(x, w), x=(6, 8), w=(8, 8))
ZOO.flow(
    "trapezoid_cummax_logcumsumexp",
    lambda x: x.exp().cummax(1)[0].sin() + x.logcumsumexp(1).cos() + x.cumsum(0),
)
ZOO.flow("cumprod_diff_with_zeros", lambda x: (x * (x > -0.3)).cumprod(1)[:, 1:].sin() + x.exp().diff(dim=1))


def _boolean_assignment(x: Tensor) -> Tensor:
    y = x.exp() * 1.0
    y[x < 0] = x[x < 0].sin()
    return y.tanh() * x


def _counted(x: Tensor) -> Tensor:
    levels, places = (x.detach() * 2).round().unique(return_inverse=True)
    counts = torch.bincount(places.flatten(), minlength=levels.numel()).float()
    return (levels * counts)[places] * x.exp()


def _iterated(x: Tensor) -> Tensor:
    y, rounds = x, 0
    while y.abs().max().item() > 0.35 and rounds < 12:
        y, rounds = (y * 0.8).sin(), rounds + 1
    return y.exp() * rounds


def _halting(x: Tensor) -> Tensor:
    total, active = torch.zeros(6), torch.ones(6, dtype=torch.bool)
    for k in range(4):
        chance = (x[:, k] * x[:, k + 4]).sigmoid()
        total = total + torch.where(active, chance, 0.0)
        active = active & (total < 1.0)
        if not bool(active.any()):
            break
    return total.exp()


def _early_exit(x: Tensor) -> Tensor:
    y = x
    for k in range(5):
        y = (y @ y.T @ x).tanh()
        if bool(y.mean() > 0.05 * k):
            return y.exp()
    return y.sin()


def _beams(x: Tensor) -> Tensor:
    score = x[:, :4].log_softmax(1)
    for _ in range(3):
        best, place = (score[:, :, None] + x[:, None, 4:].log_softmax(2)).flatten(1).topk(4, dim=1)
        score = best + score.gather(1, place // 4).sin()
    return score


def _segment_softmax(x: Tensor) -> Tensor:
    groups = torch.tensor([0, 0, 1, 2, 2, 2])[:, None].expand(6, 8)
    top = torch.full((3, 8), -torch.inf).scatter_reduce(0, groups, x, "amax")
    weights = (x - top.gather(0, groups)).exp()
    return weights / torch.zeros(3, 8).scatter_add(0, groups, weights).gather(0, groups)


def _experts(x: Tensor, w: Tensor) -> Tensor:
    chance, chosen = (x @ w.sum(1).T).softmax(1).topk(2, dim=1)
    out = torch.zeros_like(x)
    for expert in range(4):
        rows, slot = torch.where(chosen == expert)
        if rows.numel():
            out.index_add_(0, rows, F.silu(x[rows] @ w[expert]) * chance[rows, slot, None])
    return out


def _messages(x: Tensor, w: Tensor) -> Tensor:
    source, target = torch.tensor([0, 1, 2, 3, 4, 5, 0]), torch.tensor([1, 2, 0, 5, 3, 4, 4])
    h = x
    for _ in range(2):
        sent = (h @ w).tanh()[source] * (h[source] * h[target]).sum(1, keepdim=True).sigmoid()
        h = h + torch.zeros_like(h).index_add_(0, target, sent)
    return h


TOKENS = torch.tensor([[1, 4, 4, 0], [9, 2, 4, 1]])
ZOO.module("embedding", lambda: nn.Embedding(10, 8, padding_idx=0), 2, 4, 8, call=lambda m, x: (m(TOKENS) * x).exp())
ZOO.module(
    "embedding_scaled",
    lambda: nn.Embedding(10, 8, scale_grad_by_freq=True),
    8,
    call=lambda m, x: m(TOKENS) * x,
)
ZOO.module(
    "embedding_sparse",
    lambda: nn.Embedding(10, 8, sparse=True),
    2,
    4,
    8,
    call=lambda m, x: (m(TOKENS) * x).exp(),
)
ZOO.module(
    "embedding_max_norm",
    lambda: nn.Embedding(10, 8, max_norm=1.0),
    8,
    call=lambda m, x: (m(TOKENS) * x).exp(),
)
ZOO.module(
    "embedding_bag",
    lambda: nn.EmbeddingBag(10, 8, mode="mean"),
    2,
    8,
    call=lambda m, x: (m(TOKENS) * x).exp(),
)
ZOO.module(
    "embedding_bag_max",
    lambda: nn.EmbeddingBag(10, 8, mode="max"),
    2,
    8,
    call=lambda m, x: m(TOKENS) * x.exp(),
)
ZOO.module(
    "embedding_bag_weighted",
    lambda: nn.EmbeddingBag(10, 8, mode="sum"),
    2,
    4,
    call=lambda m, x: m(TOKENS, per_sample_weights=x.exp()).sin(),
)
ZOO.module(
    "embedding_bag_offsets",
    lambda: nn.EmbeddingBag(10, 8, sparse=True),
    3,
    8,
    call=lambda m, x: (m(TOKENS.flatten(), torch.tensor([0, 3, 5])) * x).exp(),
)


@ZOO.program()
def tied_embedding_and_head() -> Program:
    model, x = nn.Embedding(10, 8), randn(2, 4, 8)

    def step() -> Tensor:
        h = (model(TOKENS) + prepare(x)).tanh()
        return F.cross_entropy(F.linear(h, model.weight).flatten(0, 1), TOKENS.roll(1, 1).flatten())

    return Program(step, model=model, leaves={"x": x})


@ZOO.program()
def index_tensor_overwritten_after_use() -> Program:
    x, places = randn(6, 8), torch.tensor([5, 3, 1])

    def step() -> Tensor:
        h = prepare(x)[places.clone()].exp()
        shift = torch.arange(6.0)[places] * 0.1
        y = (h * shift[:, None]).sin()
        places.copy_(places.roll(1))
        return weigh(y.exp())

    return Program(step, leaves={"x": x}, python_state=lambda: places)
