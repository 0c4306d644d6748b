"""In-place ops: on results, on views, below grad mode, through out=, on lists, after saving."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Program
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("inplace")

ZOO.flow("relu", lambda x: x.relu_().exp())
ZOO.flow("relu_after_saved", lambda x: (x.exp() + 1).relu_().sin() * x)
ZOO.flow("activations", lambda x: _activations(x))
ZOO.flow("add_mul_sub_div", lambda x: x.add_(1.5).mul_(0.7).sub_(0.1).div_(1.3).sin())
ZOO.flow("add_tensor", lambda x, y: x.sin().add_(y, alpha=0.3).exp() * y, x=(6, 8), y=(6, 8))
ZOO.flow("broadcast_mul", lambda x, y: (x + 1).mul_(y).exp(), x=(6, 8), y=(8,))
ZOO.flow("addcmul_addcdiv_lerp", lambda x, y: _combined(x, y), x=(6, 8), y=(6, 8))
ZOO.flow("matmul_accumulate", lambda x, y: (x + 0).addmm_(y, y.T.sin() @ x.tanh()).exp(), x=(6, 8), y=(6, 6))
ZOO.flow("clamp_fill_zero", lambda x: x.sin().clamp_(-0.5, 0.6) + x.clone().fill_(0.3) * x + x.clone().zero_())
ZOO.flow("copy", lambda x: torch.empty(6, 8).copy_(x.sin()).exp())
ZOO.flow("copy_broadcast_other_dtype", lambda x: torch.empty(3, 6, 8, dtype=torch.float64).copy_(x.sin()).exp())
ZOO.flow("set_item", lambda x: _set_items(x))
ZOO.flow("built_piece_by_piece", lambda x: _pieces(x))
ZOO.flow("built_from_new_zeros", lambda x: _new_zeros(x))
ZOO.flow("empty_like_filled_in_loop", lambda x: _filled_in_loop(x))
ZOO.flow("view_select_add", lambda x: _on_view(x, lambda y: y[:, 0].add_(y[:, 1] * 0.3)))
ZOO.flow("view_flat_mul", lambda x: _on_view(x, lambda y: y.view(-1).mul_(1.4)))
ZOO.flow("view_slice_exp", lambda x: _on_view(x, lambda y: y[1:4, ::2].exp_()))
ZOO.flow("view_transposed_add", lambda x: _on_view(x, lambda y: y.T.add_(torch.arange(6.0))))
ZOO.flow("view_diagonal_sin", lambda x: _on_view(x, lambda y: y.diagonal().sin_()))
ZOO.flow("view_diagonal_fill", lambda x: _on_view(x, lambda y: y.fill_diagonal_(0.25)))
ZOO.flow("view_of_view", lambda x: _on_view(x, lambda y: y[2:].T[3:].tanh_()))
ZOO.flow("view_unfold_once", lambda x: _on_view(x, lambda y: y.unfold(1, 2, 4).mul_(0.5)))
ZOO.flow("view_as_strided", lambda x: _on_view(x, lambda y: y.as_strided((3, 3), (8, 2), 1).mul_(0.5)))
ZOO.flow("view_base_then_read_view", lambda x: _base_then_view(x))
ZOO.flow("view_rows_in_loop", lambda x: _on_view(x, lambda y: [y[i].mul_(i + 0.5) for i in range(6)]))
ZOO.flow("view_unsafe_split", lambda x: _on_view(x, lambda y: [c.mul_(2) for c in y.unsafe_split(2)]))
ZOO.flow("view_relu_at_end_of_block", lambda x: (x * x.exp())[:].relu_().sin())
ZOO.flow("no_grad_add", lambda x: _below_grad(x))
ZOO.flow("no_grad_normalised", lambda x: _normalised(x))
ZOO.flow("data_read", lambda x: (x.sin() * x.data.abs().sqrt()).exp() + x.sin().data)
ZOO.flow("data_written", lambda x: _data_written(x))
ZOO.flow("detached_written", lambda x: _detached_written(x))
ZOO.flow("data_swapped", lambda x: _data_swapped(x))
ZOO.flow("saved_free_tensor", lambda x: _free_of_savers(x))
ZOO.flow("old_version_still_needed", lambda x: _old_version(x))
ZOO.flow("three_versions_needed", lambda x: _three_versions(x))
ZOO.flow("input_of_dropped_op_overwritten", lambda x: _input_overwritten(x))
ZOO.flow("scratch_reused", lambda x: _scratch(x))
ZOO.flow("out_variants", lambda x: _out_variants(x))
ZOO.flow("out_resized", lambda x: torch.sin(x.detach() * 2, out=torch.empty(0)) * x.exp())
ZOO.flow("out_of_several", lambda x: _out_of_several(x))
ZOO.flow("foreach", lambda x, y: _foreach(x, y), x=(6, 8), y=(6, 8))
ZOO.flow("foreach_inplace_detached", lambda x, y: _foreach_detached(x, y), x=(6, 8), y=(6, 8))
ZOO.flow("masked_fill_scatter", lambda x: _masked(x))
ZOO.flow("index_ops", lambda x: _index_inplace(x))
ZOO.flow("squeeze_transpose_metadata", lambda x: (x + 1).t_().unsqueeze_(0).squeeze_(0).sin_().exp())
ZOO.flow("swapdims_then_write", lambda x: (x.exp() + 1).swapdims_(0, 1).add_(1.0).sin())
ZOO.flow("resize_as_scratch", lambda x: torch.zeros(2).resize_(6, 8).fill_(0.5).mul(x).exp())
ZOO.flow("set_to_other_storage", lambda x: torch.empty(0).set_(x.detach().exp()).mul(x).sin())
ZOO.flow("cumulative_inplace", lambda x: (x + 0).cumsum_(1).sin() + (x.sigmoid() + 0).cumprod_(0).exp())
ZOO.flow("sorted_inplace_parts", lambda x: (x + 0).triu_(1).sin() + (x * 1).tril_().exp())


def _on_view(x: Tensor, change: object) -> Tensor:
    y = x.exp() + x.sin()
    change(y)  # type: ignore[operator]
    return y.tanh() * x


def _activations(x: Tensor) -> Tensor:
    y = F.elu_(x * 1.5) + F.leaky_relu_((x + 0.1), 0.2) + F.hardtanh_(x * 2)
    return F.silu(y, inplace=True) + F.hardswish(x * 3, inplace=True) + torch.sigmoid_(x + 0.3) + torch.tanh_(x * 4)


def _combined(x: Tensor, y: Tensor) -> Tensor:
    z = x.sin().addcmul_(x, y, value=0.4)
    return (z + 0).addcdiv_(y, y.exp() + 1).exp() + (x + 1).lerp_(y, 0.3).sin()


def _set_items(x: Tensor) -> Tensor:
    y = x.exp() * 1.0
    y[0] = x[1].sin()
    y[:, 3] = 0.7
    y[torch.tensor([2, 4]), 1] = x[3, :2].cos()
    y[y > 1.5] = 0.1
    return (y * y).sin()


def _pieces(x: Tensor) -> Tensor:
    y = torch.zeros(6, 8)
    y[:2] = x[:2].sin()
    y[2:4] = x[2:4].exp()
    y[4:, :4] = x[4:, :4] * x[4:, 4:]
    return (y * y).tanh()


def _new_zeros(x: Tensor) -> Tensor:
    y = x.new_zeros(8, 10)
    y[1:-1, 1:-1] = x.exp()
    return y[:-2, 2:].sin() * y[2:, :-2]


def _filled_in_loop(x: Tensor) -> Tensor:
    y, state = torch.empty_like(x), x[0] * 0
    for row in range(6):
        state = (state * 0.5 + x[row]).tanh()
        y[row] = state * x[row]
    return y.exp()


def _base_then_view(x: Tensor) -> Tensor:
    y = x.exp() + 1
    view = y[2:5].T
    y.mul_(0.3)
    return view.sin() @ view.T.cos()


def _below_grad(x: Tensor) -> Tensor:
    y = x * 1.5
    with torch.no_grad():
        y.add_(1.0)
        y[:, 2].mul_(3.0)
    return y.exp().sin()


def _normalised(x: Tensor) -> Tensor:
    y = x.sin() + x
    with torch.no_grad():
        y.div_(y.norm(dim=1, keepdim=True))
    return (y @ y.T).exp()


def _data_written(x: Tensor) -> Tensor:
    y = x.sin() + 1
    y.data.mul_(1.1)
    z = y.exp()
    return z * y


def _detached_written(x: Tensor) -> Tensor:
    y = x.sin() + 1
    y.detach().clamp_(0.5, 1.2)
    return y.exp()


def _data_swapped(x: Tensor) -> Tensor:
    y = x.sin() + 1
    y.data = (x.exp() * 0.3).detach()
    return y.exp() * x


def _free_of_savers(x: Tensor) -> Tensor:
    y = x + x.sin()
    y.add_(x.cos())
    y.sub_(0.3)
    return y + y.sum(0)


def _old_version(x: Tensor) -> Tensor:
    y = x.exp() + 1
    copy = y + 0
    z = y.sum(0) * 2  # does not save y
    y.sin_()
    return z.sin() * y + copy.cos()


def _three_versions(x: Tensor) -> Tensor:
    y = x * 2
    a = y + 1
    y.add_(0.5)
    b = y + 1
    y.mul_(0.5)
    c = y + 1
    return a.sin() * b.exp() * c.cos() * y


def _input_overwritten(x: Tensor) -> Tensor:
    constant = torch.arange(48.0).view(6, 8) / 48
    y = (x + constant).sin()
    constant.neg_()
    z = (y + constant).exp()
    constant.zero_()
    return y * z + constant


def _scratch(x: Tensor) -> Tensor:
    scratch, out = torch.empty(6, 8), x.sin()
    for k in range(3):
        torch.mul(x.detach(), k + 0.5, out=scratch)
        out = out.exp().tanh() + scratch
    return out.sin()


def _out_variants(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.empty(6, 8)
        torch.add(x, 1.0, out=y)
        torch.exp(y[:3], out=y[3:])
        torch.matmul(y, y.T, out=(square := torch.zeros(6, 6)))
        torch.cat([y[:2], y[4:]], out=(joined := torch.empty(4, 8)))
    return (square @ x).sin() + joined.sum(0) * x.exp()


def _out_of_several(x: Tensor) -> Tensor:
    values, places = torch.empty(6), torch.empty(6, dtype=torch.int64)
    torch.max(x.detach().sin(), dim=1, out=(values, places))
    return x.exp()[torch.arange(6), places].sin() * values


def _foreach(x: Tensor, y: Tensor) -> list[Tensor]:
    a = torch._foreach_add([x, y], [y, x.sin()])
    b = torch._foreach_mul(a, 0.5)
    c = list(torch._foreach_exp(b))
    d = list(torch._foreach_neg(b))
    torch._foreach_add_(d, 1.0)
    torch._foreach_mul_(d, [x, y])
    return [z.sin() for z in c + d]


def _foreach_detached(x: Tensor, y: Tensor) -> Tensor:
    state = [x.detach().sin(), y.detach() * 2]
    torch._foreach_mul_(state, 0.9)
    torch._foreach_addcmul_(state, [x.detach(), y.detach()], [y.detach(), x.detach()], value=0.1)
    torch._foreach_lerp_(state, [y.detach(), x.detach()], 0.5)
    return (state[0] * x).exp() + (state[1] * y).sin() * torch._foreach_norm(state)[0]


def _masked(x: Tensor) -> Tensor:
    y = (x * 1.5).masked_fill_(x > 0.4, -0.2)
    z = (y + 0).masked_scatter_(x < -0.4, x.exp().flatten())
    return y.sin() * z.exp()


def _index_inplace(x: Tensor) -> Tensor:
    rows = torch.tensor([0, 2, 2, 5])
    y = (x * 1.0).index_add_(0, rows, x[:4].sin())
    y = (y + 0).index_copy_(0, rows[:2], x[4:].exp())
    y = (y + 0).index_fill_(1, torch.tensor([1, 3]), 0.4)
    y = (y + 0).scatter_(1, rows[None].expand(6, 4), x[:, :4].cos())
    y = (y + 0).scatter_add_(1, rows[None].expand(6, 4), x[:, 4:].tanh())
    y = (y + 0).scatter_reduce_(1, rows[None].expand(6, 4), x[:, 2:6], reduce="amax")
    return (y + 0).index_put_((rows, rows), x[0, :4], accumulate=True).exp().sin()


@ZOO.program()
def leaf_input_under_no_grad() -> Program:
    x = randn(6, 8)

    def step() -> Tensor:
        with torch.no_grad():
            x.mul_(0.9).add_(0.1)
        return weigh(prepare(x).exp())

    return Program(step, leaves={"x": x})


@ZOO.program()
def constant_input_overwritten_inside() -> Program:
    x, constant = randn(6, 8), randn(6, 8, requires_grad=False)

    def step() -> Tensor:
        y = (prepare(x) + constant).sin().exp()
        constant.add_(1.0)
        return weigh(y * constant + x)

    return Program(step, leaves={"x": x, "constant": constant})


@ZOO.program()
def gradient_buffers_summed_by_hand() -> Program:
    x, total = randn(6, 8), torch.zeros(6, 8)

    def step() -> Tensor:
        h = prepare(x)
        h.register_hook(lambda gradient: total.add_(gradient))
        return weigh(h.exp().sin() * total)

    return Program(step, leaves={"x": x, "total": total})


@ZOO.program(fails=True)
def saved_tensor_changed_later() -> Program:
    x = randn(6, 8)

    def step() -> Tensor:
        h = prepare(x)
        y = h.exp()
        z = y.sin()
        y.add_(1.0)
        return weigh(z)

    return Program(step, leaves={"x": x})


@ZOO.program(fails=True)
def saved_root_changed_after_forward() -> Program:
    x, factor = randn(6, 8), randn(6, 8, requires_grad=False)
    return Program(lambda: weigh((prepare(x) * factor).sin()), leaves={"x": x}, after_forward=lambda: factor.add_(1.0))


@ZOO.program(fails=True)
def parameter_changed_after_forward() -> Program:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), randn(6, 8)

    def decay() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    return Program(lambda: weigh(model(prepare(x))), model=model, leaves={"x": x}, after_forward=decay)


@ZOO.program(may_refuse=True)
def unsaved_root_changed_after_forward() -> Program:
    x, shift = randn(6, 8), randn(6, 8, requires_grad=False)
    return Program(
        lambda: weigh((prepare(x) + shift).sin().exp()),
        leaves={"x": x},
        after_forward=lambda: shift.add_(1.0),
    )


@ZOO.program(may_refuse=True)
def bias_changed_after_forward() -> Program:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), randn(6, 8)

    def move() -> None:
        with torch.no_grad():
            model[0].bias.add_(1.0)

    return Program(lambda: weigh(model(x)), model=model, after_forward=move)
