"""Work the dispatcher does not see: memory written behind its back, custom Functions and operators, numpy."""

from __future__ import annotations

import copy
import ctypes
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

from harness import Program
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("hidden")


def _by_numpy(target: Tensor, value: np.ndarray) -> Tensor:
    target.detach().numpy()[...] = value
    return target


def _by_pointer(target: Tensor, value: np.ndarray) -> Tensor:
    source = np.ascontiguousarray(value, dtype=np.float32)
    ctypes.memmove(target.data_ptr(), source.ctypes.data, source.nbytes)
    return target


def _sin(x: Tensor) -> np.ndarray:
    return np.sin(np.array(x.tolist(), dtype=np.float32))


ZOO.flow("empty_filled_by_numpy", lambda x: (_by_numpy(torch.empty(6, 8), _sin(x)) * x).exp(), needs_proof=True)
ZOO.flow("empty_filled_by_pointer", lambda x: (_by_pointer(torch.empty(6, 8), _sin(x)) * x).exp(), needs_proof=True)
ZOO.flow(
    "zeros_changed_by_pointer",
    lambda x: (_by_pointer(torch.zeros(6, 8), _sin(x)) * x).exp(),
    needs_proof=True,
)
ZOO.flow("result_changed_by_pointer", lambda x: _result_changed(x, _by_pointer), needs_proof=True)
ZOO.flow("result_changed_by_numpy", lambda x: _result_changed(x, _by_numpy), needs_proof=True)
ZOO.flow("copy_changed_by_pointer", lambda x: _through_copy(x), needs_proof=True)
ZOO.flow("part_changed_by_pointer", lambda x: _part_changed(x), needs_proof=True)
ZOO.flow("scratch_reused_by_pointer", lambda x: _scratch(x), needs_proof=True, may_refuse=True)
ZOO.flow(
    "random_result_changed_by_pointer",
    lambda x: _by_pointer(torch.rand(6, 8), _sin(x)) * x.exp(),
    needs_proof=True,
)
ZOO.flow("storage_filled", lambda x: _storage_filled(x), needs_proof=True)
ZOO.flow("storage_copied", lambda x: _storage_copied(x), needs_proof=True)
ZOO.flow("storage_bytes_set", lambda x: _storage_bytes(x), needs_proof=True)
ZOO.flow("applied_in_place", lambda x: x.detach().clone().apply_(lambda v: v * 2).mul(x).sin(), needs_proof=True)
ZOO.flow(
    "mapped_in_place",
    lambda x: x.detach().clone().map_(x.detach(), lambda a, b: a + b).mul(x).sin(),
    needs_proof=True,
)
ZOO.flow("deep_copied", lambda x: (copy.deepcopy(x.detach().exp()) * x).sin(), needs_proof=True)
ZOO.flow("saved_and_loaded", lambda x: (_reloaded(x.detach().exp()) * x).sin(), needs_proof=True)
ZOO.flow("numpy_in_the_middle", lambda x: (torch.from_numpy(np.exp(x.detach().numpy())) * x).sin())
ZOO.flow("numpy_function_on_tensor", lambda x: (torch.as_tensor(np.tanh(x.detach())) * x).sin())
ZOO.flow("numpy_result_written_in_place", lambda x: _written_in_place(x))
ZOO.flow("numpy_reads_result", lambda x: x.exp() * float(np.median(x.sin().detach().numpy())))
ZOO.flow("dlpack_alias_written", lambda x: _dlpack(x), needs_proof=True)
ZOO.flow("frombuffer", lambda x: (torch.frombuffer(bytearray(192), dtype=torch.float32).view(6, 8) + x).exp())
ZOO.flow(
    "constants_made_inside",
    lambda x: (x * torch.tensor(1.5) + torch.tensor([[0.1] * 8])).exp() * torch.tensor(np.pi),
)
ZOO.flow("constant_list_of_numbers", lambda x: (x @ torch.tensor([[i * 0.1 for i in range(8)]] * 8)).exp().sin())
ZOO.flow("constant_changed_in_place", lambda x: (torch.tensor([0.5] * 8).mul_(3).add(x).exp() * x).sin())
ZOO.flow("tensor_of_items", lambda x: torch.tensor([float(v) for v in x.exp()[0]]) * x.sin().exp())
ZOO.flow("nested_python_round_trip", lambda x: torch.tensor(x.exp().tolist()).sin() * x.exp())


def _result_changed(x: Tensor, write: Callable[[Tensor, np.ndarray], Tensor]) -> Tensor:
    y = x.exp()
    z = y + 1.0
    write(z, _sin(x))
    return z.sin() * x


def _through_copy(x: Tensor) -> Tensor:
    y = x.sin() * 2
    _by_pointer(y, _sin(x))
    z = y.clone()
    return (z + 1.0).exp() * z


def _part_changed(x: Tensor) -> Tensor:
    y = torch.zeros(6, 8)
    y[:3] = x[:3].sin().detach()
    _by_pointer(y[3:], _sin(x)[3:])
    return (y * x).exp()


def _scratch(x: Tensor) -> Tensor:
    scratch, total = torch.empty(6, 8), x.sin()
    for k in range(3):
        _by_pointer(scratch, _sin(x) * (k + 1))
        total = (total + scratch).sin() * x
    return total


def _storage_filled(x: Tensor) -> Tensor:
    y = torch.empty(6, 8)
    y.untyped_storage().fill_(63)
    return (y * x).exp()


def _storage_copied(x: Tensor) -> Tensor:
    y = torch.empty(6, 8)
    y.untyped_storage().copy_(x.detach().exp().untyped_storage())
    return (y * x).sin()


def _storage_bytes(x: Tensor) -> Tensor:
    y = torch.zeros(6, 8)
    storage = y.untyped_storage()
    for place in range(3, 64, 4):
        storage[place] = 62
    return (y + x).exp()


def _reloaded(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def _written_in_place(x: Tensor) -> Tensor:
    array = np.linspace(0, 1, 48, dtype=np.float32).reshape(6, 8)
    shared = torch.from_numpy(array)
    y = (x + shared).exp()
    array += 1.0
    z = (y * 0.1 + shared).sin()
    array *= 0.0
    return y * z


def _dlpack(x: Tensor) -> Tensor:
    y = x.detach().exp()
    z = y + 0.0
    np.from_dlpack(z)[...] if False else torch.from_dlpack(z.__dlpack__()).mul_(0.5)
    return (z * x).sin()


class Doubling(Function):
    """Save the input, the output and something in between; keep numbers on the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        between = x.sin() * factor
        out = between.exp()
        ctx.save_for_backward(x, between, out)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, between, out = ctx.saved_tensors
        return gradient * out * x.cos() * ctx.factor + 0 * between, None


class OnContext(Function):
    """Keep tensors as attributes of the context instead of saving them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask, ctx.squashed = x > 0.1, x.tanh()
        return ctx.squashed * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.mask * (1 - ctx.squashed * ctx.squashed)


class ByNumpy(Function):
    """Compute in numpy, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        array = np.cos(x.detach().numpy())
        out = torch.from_numpy(np.sin(x.detach().numpy()))
        ctx.save_for_backward(torch.from_numpy(array))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.from_numpy(gradient.numpy() * ctx.saved_tensors[0].numpy())


class HiddenKernel(Function):
    """Fill an empty output through its address, as a foreign kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _by_pointer(out, _sin(x))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return gradient * (1 - out * out)


class InPlace(Function):
    """Change the argument and say so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2.0).sin_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return gradient * 2 * (1 - out * out)


class TwoOutputs(Function):
    """Return two outputs, one of them without gradient, and draw random numbers; new-style context."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand_like(x)
        return x * noise * scale, noise

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, noise = ctx.saved_tensors
        return gradient * noise * scale, (gradient * noise * x).sum(0)


class Reversible(Function):
    """Save nothing but the output; rebuild the input in backward and differentiate there."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        left = left + (right @ weight).tanh()
        right = right + left.sin()
        ctx.save_for_backward(left, right, weight)
        return left, right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        left, right, weight = ctx.saved_tensors
        with torch.no_grad():
            right = right - left.sin()
            left = left - (right @ weight).tanh()
        with torch.enable_grad():
            before = [tensor.detach().requires_grad_() for tensor in (left, right, weight)]
            middle = before[0] + (before[1] @ before[2]).tanh()
            return torch.autograd.grad((middle, before[1] + middle.sin()), before, gradients)


def _reversed(x: Tensor, w: Tensor) -> Tensor:
    left, right = x.exp().tanh().chunk(2, 1)
    for _ in range(3):
        left, right = Reversible.apply(left, right, w.sin())
    return left * right.exp()


ZOO.flow("function_reversible", lambda x, w: _reversed(x, w), x=(6, 8), w=(4, 4))
ZOO.flow("function_saving_all_kinds", lambda x: Doubling.apply(x.sin(), 1.5).tanh() * x)
ZOO.flow("function_twice", lambda x: Doubling.apply(Doubling.apply(x.sin(), 0.5).sin(), 0.7).tanh())
ZOO.flow("function_on_context", lambda x: OnContext.apply(x.exp()).sin() * x.exp())
ZOO.flow("function_by_numpy", lambda x: ByNumpy.apply(x.exp()).tanh() * x.exp())
ZOO.flow("function_hidden_kernel", lambda x: HiddenKernel.apply(x.exp()).tanh() * x.exp(), needs_proof=True)
ZOO.flow("function_in_place", lambda x: (InPlace.apply(x.exp() + 1) * x).exp().tanh())
ZOO.flow(
    "function_two_outputs",
    lambda x, s: (lambda a, b: (a.exp() * b).sin())(*TwoOutputs.apply(x.exp(), s.exp())),
    x=(6, 8),
    s=(8,),
)


@torch.library.custom_op("lowtide_zoo::swish", mutates_args=())
def swish(x: Tensor, slope: float) -> Tensor:
    """x * sigmoid(slope * x), by numpy."""
    array = x.detach().numpy()
    return torch.from_numpy(array / (1 + np.exp(-slope * array)))


@torch.library.custom_op("lowtide_zoo::accumulate", mutates_args=("total",))
def accumulate(total: Tensor, x: Tensor) -> None:
    """Add x to total, by numpy."""
    total.numpy()[...] += x.detach().numpy()


def _swish_setup(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.slope = inputs[1]


def _swish_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    x, out = ctx.saved_tensors
    return gradient * (ctx.slope * out + torch.sigmoid(ctx.slope * x) * (1 - ctx.slope * out)), None


swish.register_autograd(_swish_backward, setup_context=_swish_setup)

ZOO.flow("custom_operator", lambda x: swish(x.exp(), 1.3).sin() * swish(x.sin(), 0.5))
ZOO.flow("custom_operator_that_mutates", lambda x: _accumulated(x))


def _accumulated(x: Tensor) -> Tensor:
    total = torch.zeros(6, 8) + x.detach()[0]
    y = (total * x).sin()
    other = total * 1.0
    accumulate(other, x.exp())
    return y * (other + x).exp()


@ZOO.program(may_refuse=True)
def numpy_input_overwritten_after_forward() -> Program:
    array, x = np.random.randn(6, 8).astype(np.float32), randn(6, 8)
    shared = torch.from_numpy(array)

    def overwrite() -> None:
        array[...] = 7.0

    return Program(lambda: weigh((prepare(x) + shared).sin().exp()), leaves={"x": x}, after_forward=overwrite)


@ZOO.program(may_refuse=True)
def numpy_view_taken_and_overwritten_after_use() -> Program:
    x = randn(6, 8)

    def step() -> Tensor:
        shift = torch.randn(6, 8)
        out = weigh((prepare(x) + shift).sin().exp())
        shift.numpy()[...] = 7.0
        return out

    return Program(step, leaves={"x": x})


@ZOO.program(may_refuse=True)
def buffer_refilled_by_numpy_after_forward() -> Program:
    x, batch = randn(6, 8), torch.zeros(6, 8)
    batch.numpy()[...] = np.random.randn(6, 8)

    def refill() -> None:
        batch.numpy()[...] = np.random.randn(6, 8)

    return Program(lambda: weigh((prepare(x) + batch).sin().exp()), leaves={"x": x}, after_forward=refill)


@ZOO.program()
def shared_memory_input() -> Program:
    x, batch = randn(6, 8), torch.randn(6, 8).share_memory_()

    def step() -> Tensor:
        y = (prepare(x) + batch).sin().exp()
        batch.add_(1.0)
        return weigh(y * batch)

    return Program(step, leaves={"x": x}, python_state=lambda: batch)


@ZOO.program()
def function_inside_blocks() -> Program:
    model, x = nn.Linear(8, 8), randn(6, 8)

    def step() -> Tensor:
        h = prepare(x)
        for k in range(3):
            h = h + OnContext.apply(Doubling.apply(model(h).tanh(), 0.1 * k))
        return weigh(h)

    return Program(step, model=model, leaves={"x": x})
