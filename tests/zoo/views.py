"""Views, layouts and storages: what a tensor is beside its numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Program
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("views")

ZOO.flow("transpose_matmul", lambda x: (x.exp().T @ x.sin()).T.cos())
ZOO.flow("reshape_copies", lambda x: x.exp().T.reshape(4, 12).sin() * x.T.contiguous().view(4, 12))
ZOO.flow("expand", lambda x: x.sin()[:, None].expand(6, 5, 8).exp())
ZOO.flow("expand_saved", lambda x, y: x.sin().expand(6, 8) * y.exp(), x=(1, 8), y=(6, 8))
ZOO.flow("expand_negative", lambda x: (x[:1].exp().expand(6, -1) * x).sin())
ZOO.flow(
    "broadcast_tensors",
    lambda x, y: torch.mul(*torch.broadcast_tensors(x.exp(), y.sin())),
    x=(6, 1),
    y=(1, 8),
)
ZOO.flow("as_strided", lambda x: x.exp().as_strided((5, 4), (3, 2), 1).sin())
ZOO.flow("as_strided_overlapping", lambda x: x.exp().as_strided((8, 6), (4, 3), 0).sin())
ZOO.flow("unfold", lambda x: (x.exp().unfold(1, 3, 2) * torch.arange(3.0)).sin())
ZOO.flow(
    "unfold_fold_images",
    lambda x: F.fold(F.unfold(x.sin(), 3, padding=1).exp(), 6, 3, padding=1),
    x=(2, 3, 6, 6),
)
ZOO.flow(
    "permute_movedim_flip",
    lambda x: (x.permute(2, 0, 1).exp() * x.movedim(0, 1).sin().sum()).flip(0),
    x=(3, 4, 5),
)
ZOO.flow("narrow_select_squeeze", lambda x: x.exp().narrow(1, 2, 4).select(0, 3).unsqueeze(0).squeeze().sin())
ZOO.flow("slice_of_slice", lambda x: x.exp()[1:][:, 2:][::2, 1:4].sin() * x.exp()[1:4, 5:].cos())
ZOO.flow("diagonal_embed_trace", lambda x: torch.diag_embed(x.exp().diagonal()).sin() + x[:6, :6].sin().trace())
ZOO.flow("diagonal_scatter", lambda x: torch.diagonal_scatter(x.exp(), x[:, 0].sin()).cos())
ZOO.flow(
    "slice_and_select_scatter",
    lambda x: x.exp().slice_scatter(x[:2].sin(), 0, 1, 3).select_scatter(x[0], 0, 5).cos(),
)
ZOO.flow("split_parts_used_apart", lambda x: _split(x))
ZOO.flow("unbind_scan", lambda x: _scan(x))
ZOO.flow("qkv_in_one", lambda x: _attention(x), x=(2, 6, 24))
ZOO.flow("rotary_halves", lambda x: torch.cat([-x.exp()[..., 4:], x.sin()[..., :4]], -1) * x.cos())
ZOO.flow("channels_last", lambda x: F.conv2d(_last(x).exp(), torch.ones(2, 3, 2, 2) / 3).sin(), x=(2, 3, 5, 4))
ZOO.flow("channels_last_through_pointwise", lambda x: (_last(x).exp() * 2).relu().add(_last(x)), x=(2, 3, 5, 4))
ZOO.flow("channels_last_cloned", lambda x: _last(x).sin().clone() + _last(x).contiguous().exp(), x=(2, 3, 5, 4))
ZOO.flow("dtype_view_round_trip", lambda x: x.exp().detach().view(torch.int32).view(torch.float32) * x.sin())
ZOO.flow("dtype_view_smaller", lambda x: x.exp().detach().view(torch.int16)[:, ::2].float().tanh() * x.sin())
ZOO.flow("dtype_view_bits_changed", lambda x: _bits_changed(x))
ZOO.flow("view_of_leaf", lambda x: (x.view(-1).exp().view(8, 6) * x.T).sin())
ZOO.flow(
    "window_partition",
    lambda x: x.exp().view(2, 2, 3, 2, 3, 4).transpose(2, 3).reshape(-1, 9, 4).sin(),
    x=(2, 6, 6, 4),
)
ZOO.flow("roll_pixel_shuffle", lambda x: F.pixel_shuffle(x.exp(), 2).roll((1, 2), (2, 3)).sin(), x=(2, 8, 3, 3))
ZOO.flow("pad_modes", lambda x: F.pad(x.exp(), (1, 2), "reflect").sin() + F.pad(x, (1, 2), "circular"), x=(2, 3, 6))
ZOO.flow("negative_padding", lambda x: F.pad(x.exp(), (-1, 2, 1, -2)).sin())
ZOO.flow("tile_repeat_interleave", lambda x: (x.exp().repeat(2, 1) * x.repeat_interleave(2, 0)).sin())
ZOO.flow("alias_and_view_as", lambda x: torch.ops.aten.alias(x.exp()).view_as(x).sin() * x.exp().expand_as(x))
ZOO.flow("contiguous_is_self", lambda x: x.exp().contiguous().contiguous().sin())
ZOO.flow("zero_stride_saved", lambda x: (x.sum(1, keepdim=True).expand(6, 8) * x.exp()).sin())
ZOO.flow("mean_and_var_views", lambda x: (x - x.exp().mean(1, keepdim=True)) / x.var(1, keepdim=True).sqrt())
ZOO.flow("empty_tensor", lambda x: torch.cat([x.exp()[:0], x.sin()[:0], x[3:].cos()]) * x[:0].exp().sum().exp())
ZOO.flow("only_empty", lambda x: [(x.exp() * 2).sin(), x.sum()], x=(0, 5))
ZOO.flow("empty_matmul", lambda x: (x.exp()[:, :0] @ x[:0].sin()).cos(), x=(6, 6))
ZOO.flow("zero_dim", lambda x: (x.exp() * x.sin()).sqrt().cos().exp(), x=())
ZOO.flow("zero_dim_times_matrix", lambda s, x: (s.exp() * x.sin()).exp() * s.item(), s=(), x=(6, 8))
ZOO.flow("zero_dim_of_matrix", lambda x: x.exp() / x.sin().norm() + x.exp().amax().log())
ZOO.flow("view_as_real_of_pairs", lambda x: torch.view_as_complex(x.exp().view(6, 4, 2)).abs().sin())
ZOO.flow("identical_layouts_of_one_storage", lambda x: _same_layout(x))
ZOO.flow("storage_dies_address_returns", lambda x: _address_reuse(x))
ZOO.flow("results_of_equal_shape_in_turn", lambda x: _equal_shapes(x))
ZOO.flow(
    "grid_of_views",
    lambda x: torch.stack([x.exp()[i::2, j::3].sum() for i in range(2) for j in range(3)]).sin(),
)
ZOO.flow("large_tensor", lambda x: (x.exp().sin() * x).relu().exp().mean(1), x=(64, 512))


def _last(x: Tensor) -> Tensor:
    return x.sin().contiguous(memory_format=torch.channels_last)


def _split(x: Tensor) -> Tensor:
    a, b, c = x.exp().split([2, 3, 3], dim=1)
    return torch.cat([a.sin(), b.exp() * c, c.cos() @ b.T @ b], dim=1)


def _scan(x: Tensor) -> Tensor:
    state, outs = torch.zeros(8), []
    for row in x.exp().unbind():
        state = (state * 0.7 + row).tanh()
        outs.append(state * row.sin())
    return torch.stack(outs)


def _attention(x: Tensor) -> Tensor:
    q, k, v = x.exp().tanh().view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2)


def _bits_changed(x: Tensor) -> Tensor:
    y = x.exp().detach().clone()
    y.view(torch.int32).bitwise_and_(-65536)  # bfloat16 by truncation
    return y * x.sin()


def _same_layout(x: Tensor) -> Tensor:
    y = x.exp()
    a, b = y.view(6, 8), y.detach().view(6, 8)
    return a.sin() * b.cos() * y.view(6, 8)


def _address_reuse(x: Tensor) -> Tensor:
    total = x * 0
    for k in range(8):
        y = (x * (k + 1)).sin()  # every round's y likely lands where the last one was
        total = total + y.detach() * x.cos()
        del y
    return total.exp().tanh() * x


def _equal_shapes(x: Tensor) -> Tensor:
    y = x
    for k in range(6):
        y = (y + k).sin() if k % 2 else (y * k).tanh()
    return y.exp()


@ZOO.program()
def parameter_storage_freed_and_refilled() -> Program:
    shard, x = randn(8, 8, requires_grad=False), randn(6, 8)
    full = torch.empty(8, 8).requires_grad_()
    size = full.untyped_storage().nbytes()

    def gather() -> None:
        full.untyped_storage().resize_(size)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(full):
            full.copy_(shard)

    def step() -> Tensor:
        gather()
        out = weigh((prepare(x) @ full).sin().exp() @ full)
        full.untyped_storage().resize_(0)
        return out

    return Program(step, leaves={"x": x, "full": full}, after_forward=gather)


@ZOO.program()
def versions_bases_and_functions_as_plain() -> Program:
    x, notes = randn(6, 8), list[object]()

    def step() -> Tensor:
        h = prepare(x)
        y = h.exp()
        z = y.view(-1)[3:]
        w = h.sin().add_(1.0)
        for tensor in (h, y, z, w, x):
            name = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
            notes.append([tensor._version, tensor._is_view(), tensor.is_leaf, tensor.requires_grad, name])
        notes.append([z._base is y, z.untyped_storage().data_ptr() == y.data_ptr(), type(y).__name__])
        return weigh([y, z, w])

    return Program(step, leaves={"x": x}, python_state=lambda: notes)


@ZOO.program()
def flat_parameter_with_views() -> Program:
    flat, x = randn(8 * 8 + 8), randn(6, 8)

    def step() -> Tensor:
        weight, bias = flat[:64].view(8, 8), flat[64:]
        h = F.linear(prepare(x), weight, bias).tanh()
        return weigh(F.linear(h, weight.T, bias).exp())

    return Program(step, leaves={"flat": flat, "x": x})


@ZOO.program()
def expanded_parameter() -> Program:
    model, x = (
        nn.ParameterDict({"scale": nn.Parameter(torch.randn(1, 8)), "gate": nn.Parameter(torch.randn(()))}),
        randn(6, 8),
    )
    return Program(
        lambda: weigh((prepare(x) * model["scale"]).exp() * model["gate"].sigmoid()),
        model=model,
        leaves={"x": x},
    )
