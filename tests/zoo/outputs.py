"""Ops with several, optional or list-valued results and arguments; reductions; linear algebra."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.table import Zoo

ZOO = Zoo("outputs")

ZOO.flow("topk", lambda x: x.exp().topk(3, dim=1).values.sin())
ZOO.flow("topk_both_used", lambda x: x.exp().topk(3)[0].sin() * x.cos().gather(1, x.exp().topk(3)[1]))
ZOO.flow("sort", lambda x: x.exp().sort(dim=1, descending=True).values.sin())
ZOO.flow("sort_both_used", lambda x: (lambda v, i: v.sin() * x.gather(0, i).exp())(*x.exp().sort(0)))
ZOO.flow("max_with_dim", lambda x: x.exp().max(dim=1).values.sin() + x.cos().min(dim=1, keepdim=True)[0].exp())
ZOO.flow("max_indices_only", lambda x: x.sin()[torch.arange(6), x.exp().max(1).indices].exp())
ZOO.flow("max_of_ties", lambda x: x.round().amax(1).sin() + x.round().max(1)[0].exp() + x.round().max().cos())
if torch.__version__ >= "2.10":  # before, torch cannot differentiate it
    ZOO.flow("aminmax", lambda x: (lambda low, high: (x - low) / (high - low))(*x.exp().sin().aminmax()).exp())
ZOO.flow(
    "var_mean_std_mean",
    lambda x: [t.sin() for t in (*torch.var_mean(x.exp(), 1), *torch.std_mean(x.sin(), 0))],
)
ZOO.flow("split_unequal", lambda x: [t.exp() * (i + 1) for i, t in enumerate(x.sin().split([1, 4, 3], 1))])
ZOO.flow("split_only_middle_used", lambda x: x.exp().split(2, 1)[1].sin())
ZOO.flow("chunk_gate", lambda x: (lambda a, b: a.tanh() * b.sigmoid())(*x.exp().chunk(2, 1)).sin())
ZOO.flow("unbind_some", lambda x: [t.sin() for t in x.exp().unbind(0)[1:4]])
ZOO.flow("tensor_split_hsplit", lambda x: [t.cos() for t in (*x.exp().tensor_split((1, 5), 1), *x.sin().hsplit(2))])
ZOO.flow(
    "meshgrid",
    lambda x: [t.exp() * (i + 2) for i, t in enumerate(torch.meshgrid(x[0].sin(), x[1], indexing="ij"))],
)
ZOO.flow("lstm_cell", lambda x, w: torch.lstm_cell(x, (x[:, :4].sin(), x[:, 4:]), w, w[:, :4]), x=(6, 8), w=(16, 8))
ZOO.flow("gru_cell", lambda x, w: torch.gru_cell(x, x[:, :4].exp(), w, w[:, :4]).sin(), x=(6, 8), w=(12, 8))
ZOO.flow("svd", lambda x: torch.linalg.svd(x.exp(), full_matrices=False)[1].sin(), x=(5, 4))
ZOO.flow("svd_vectors", lambda x: _low_rank(x), x=(5, 4))
ZOO.flow("eigh", lambda x: (lambda e, v: v @ (e * 0.3).exp().diag() @ v.T)(*torch.linalg.eigh(x @ x.T)), x=(4, 4))
ZOO.flow("qr", lambda x: (lambda q, r: q.sin() @ r.exp())(*torch.linalg.qr(x.exp())), x=(5, 4))
ZOO.flow("cholesky_solve", lambda x, y: _gaussian(x, y), x=(4, 4), y=(4, 2))
ZOO.flow(
    "inverse_det_slogdet",
    lambda x: (_spd(x).inverse().sin(), _spd(x).det().log(), _spd(x).slogdet()[1].cos()),
    x=(4, 4),
)
ZOO.flow(
    "solve_lstsq_pinv",
    lambda x: torch.linalg.solve(_spd(x), x.sin()).cos() + torch.linalg.pinv(x.exp()).T,
    x=(4, 4),
)
ZOO.flow(
    "lu_factor",
    lambda x: (lambda p, low, up: (p @ low).sin() @ up.exp())(*torch.linalg.lu(_spd(x))),
    x=(4, 4),
)
ZOO.flow(
    "matrix_exp_power",
    lambda x: torch.matrix_exp(x.sin() * 0.3) @ torch.linalg.matrix_power(x * 0.5, 3),
    x=(4, 4),
)
ZOO.flow("eigenvalues_complex", lambda x: torch.linalg.eigvals(x.exp()).abs().sin().sum(), x=(4, 4))
ZOO.flow("optional_bias_absent", lambda x, w: F.conv1d(x.exp(), w, None).sin(), x=(2, 3, 8), w=(4, 3, 3))
ZOO.flow("optional_affine_absent", lambda x: F.layer_norm(x.exp(), (8,)).sin() * F.group_norm(x.exp(), 2).cos())
ZOO.flow(
    "layer_norm_statistics",
    lambda x: [t.sin() for t in torch.native_layer_norm(x.exp(), [8], None, None, 1e-5)],
)
ZOO.flow("rms_norm", lambda x, w: F.rms_norm(x.exp(), (8,), w).sin(), x=(6, 8), w=(8,))
ZOO.flow("cat_many", lambda x: torch.cat([x.exp(), x.sin() * 2, x[:2].cos()], 0).sin())
ZOO.flow("cat_same_twice", lambda x: (lambda y: torch.cat([y, y, y.sin()], 1).exp())(x.exp().tanh()))
ZOO.flow("stack", lambda x: torch.stack([x.exp(), x.sin()]).cos() @ torch.stack([x.T, x.T.exp()], 0))
ZOO.flow(
    "block_diag_cartesian",
    lambda x: torch.block_diag(x[:2].exp(), x[2:].sin()).cos() * torch.cartesian_prod(x[0, :2], x[1, :2]).exp().sum(),
)
ZOO.flow("einsum", lambda x, y: torch.einsum("ij,jk,lk->il", x.exp(), y.sin(), y).cos(), x=(6, 8), y=(8, 8))
ZOO.flow(
    "einsum_of_three_orders",
    lambda x, y: torch.einsum("bij,bkj,k->bi", x.exp(), y.sin(), x[0, :, 0]),
    x=(2, 3, 4),
    y=(2, 3, 4),
)
ZOO.flow(
    "tensordot_bmm_chain",
    lambda x: torch.linalg.multi_dot([x, x.T.exp(), x.sin(), x.T]).tanh() + torch.tensordot(x, x, 2),
)
ZOO.flow(
    "outer_cross_kron",
    lambda x: torch.outer(x[0].exp(), x[1]).sin().sum() + torch.kron(x[:2, :2], x.sin()).exp(),
)
ZOO.flow("cdist_pdist", lambda x: torch.cdist(x.exp(), x.sin()).sin() * F.pdist(x.exp()).cos().sum())
ZOO.flow(
    "cosine_similarity",
    lambda x: F.cosine_similarity(x.exp(), x.sin(), dim=1) * F.pairwise_distance(x, x.exp()),
)
ZOO.flow("normalize_renorm", lambda x: F.normalize(x.exp(), dim=1).sin() * x.renorm(2, 0, 0.7).exp())
ZOO.flow(
    "logsumexp_softmax_family",
    lambda x: x.logsumexp(1).sin() * (x.softmax(0) * x.log_softmax(1)).sum() + F.softmin(x, 1).sum(1),
)
ZOO.flow(
    "prod_norms",
    lambda x: x.sigmoid().prod(1).sin() + x.norm(3, dim=1) + x.exp().norm() + torch.linalg.norm(x, "nuc"),
)
ZOO.flow(
    "multi_margin_prelu_glu",
    lambda x, a: F.prelu(x.exp() - 1, a).sin()[:, :4] * F.glu(x.sin(), 1).exp(),
    x=(6, 8),
    a=(8,),
)
ZOO.flow("bilinear", lambda x, w: F.bilinear(x[:, :3].exp(), x[:, 3:].sin(), w).cos(), x=(6, 8), w=(4, 3, 5))
ZOO.flow(
    "special_functions",
    lambda x: torch.special.i0(x).sin() * x.erf().exp() + x.exp().lgamma() + x.exp().digamma(),
)
ZOO.flow("results_unused", lambda x: (x.exp().sin(), x.cos().exp())[0] * 2)
ZOO.flow(
    "same_result_saved_by_many",
    lambda x: (lambda y: y.sin() * y.exp() * y.tanh() * y + y.sigmoid() @ y.T @ y)(x.exp()),
)
ZOO.flow("deep_chain", lambda x: _deep(x))
ZOO.flow("diamonds", lambda x: _diamonds(x))
ZOO.module(
    "adaptive_log_softmax",
    lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [3, 6]),
    6,
    8,
    call=lambda m, x: m(x.exp(), torch.arange(6) * 2).loss,
)


def _low_rank(x: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(x.exp(), full_matrices=False)
    return (u[:, :2] * s[:2].sin()) @ vh[:2]


def _spd(x: Tensor) -> Tensor:
    return x.exp() @ x.exp().T + 4 * torch.eye(4)


def _gaussian(x: Tensor, y: Tensor) -> Tensor:
    lower = torch.linalg.cholesky(_spd(x))
    solved = torch.cholesky_solve(y.exp(), lower)
    return solved.sin() * torch.linalg.solve_triangular(lower, y, upper=False) + lower.diagonal().log().sum()


def _deep(x: Tensor) -> Tensor:
    for k in range(60):
        x = (x * 1.1 + 0.01 * k).sin() if k % 3 else x.exp().tanh()
    return x


def _diamonds(x: Tensor) -> Tensor:
    for _ in range(8):
        x = (x.sin() + x.cos() * x).tanh()
    return x.exp()
