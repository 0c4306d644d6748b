"""The names a random program may use beside torch: sources, losses, small modules, custom functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BLOCKS = [*range(16, 1025, 16), *range(1088, 4097, 64)]  # bytes: the sizes of a program's tensors
GARBAGE = 0xFF  # as a byte: NaN in every floating dtype, -1 in every integer one


def seeded(seed: int) -> torch.Generator:
    """Make a generator of its own."""
    return torch.Generator().manual_seed(seed)


def constant(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw a tensor of normal numbers."""
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


def leaf(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw a tensor of normal numbers that requires grad."""
    return constant(shape, seed, dtype).requires_grad_()


def weigh(*tensors: Any) -> Any:
    """Sum, in float64 and with a weight of its own for every entry, all tensors that require grad."""
    total: Any = 0.0
    for t in tensors:
        if not (isinstance(t, Tensor) and t.requires_grad):
            continue
        parts = [t.real, t.imag] if t.is_complex() else [t]
        for i, part in enumerate(parts):
            weights = torch.arange(part.numel(), dtype=torch.float64).mul_(0.7).add_(i + 1).cos_()
            total = total + (part.double() * weights.view(part.shape)).sum()
    return total


def dirty_memory() -> None:
    """Fill freed memory with NaN, past every dispatch mode, so that stale reads show."""
    blocks = [torch.UntypedStorage(size) for size in BLOCKS for _ in range(4)]
    for block in blocks:
        ctypes.memset(block.data_ptr(), GARBAGE, block.nbytes())


def run_backward(loss: Tensor, times: int) -> None:
    """Run the backward pass of one loss several times."""
    for i in range(times):
        loss.backward(retain_graph=i + 1 < times)


def hook(t: Tensor, function: Callable[[Tensor], Any]) -> None:
    """Register a gradient hook, after making sure of the node it hangs on: torch 2.13 crashes without one.

    A view whose base was overwritten by the view itself says it requires grad but may have lost its node.
    """
    if t.is_leaf or t.grad_fn is not None:
        t.register_hook(function)


def work(t: Tensor) -> Tensor:
    """Do a little of everything; what inner checkpoints wrap."""
    return (t * 2).tanh() * t.sigmoid() + F.dropout(t, 0.3).exp().clamp_max(3)


def route(t: Tensor, best: int) -> Tensor:
    """Send each row, (rows, width), to experts chosen by its largest entries, as mixtures of experts do."""
    scores, chosen = t.softmax(-1).topk(min(best, t.shape[-1]), -1)
    out = torch.zeros_like(t)
    for expert in chosen.unique().tolist():
        rows, slot = torch.where(chosen == expert)
        out.index_add_(0, rows, (t[rows] * (1 + expert)).tanh() * scores[rows, slot, None])
    return out


def sub_step(a: Tensor, b: Tensor) -> Tensor:
    """Fit a scalar for two steps, with an optimizer, inside the step; return `a` scaled by it."""
    scale = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([scale], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ((a.detach() * scale - b.detach()) ** 2).mean().backward()
        optimizer.step()
    return a * scale.detach()


class SavedExp(torch.autograd.Function):
    """Save the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clamp_max(2).exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grad * y * (x < 2)


class Declared(SavedExp):
    """The same, but declared recomputable by the recorder under test."""


class ScaledProduct(torch.autograd.Function):
    """Save two inputs and a number."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return a * b * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        return grad * b * ctx.scale, grad * a * ctx.scale, None


class HiddenWork(torch.autograd.Function):
    """Fill an empty tensor past the dispatcher, as a Triton or C++ kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        source = x.detach().contiguous()
        out = torch.empty_like(source)
        ctypes.memmove(out.data_ptr(), source.data_ptr(), source.nbytes)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * out.cos()


class OnContext(torch.autograd.Function):
    """Keep a tensor on the context instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.slope


class WithIndex(torch.autograd.Function):
    """Return a value and an index that is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        value, index = x.max(dim, keepdim=True)
        ctx.save_for_backward(index)
        ctx.shape, ctx.dim = x.shape, dim
        ctx.mark_non_differentiable(index)
        return value, index

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(ctx.dim, index, grad), None


class Dirty(torch.autograd.Function):
    """Write into the input and save the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class StraightThrough(torch.autograd.Function):
    """Round forward, pass gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class RandomMask(torch.autograd.Function):
    """Draw a mask, save it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.4
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return grad * mask


class Reversed(torch.autograd.Function):
    """Return the input itself, turn the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Small(nn.Module):
    """A module of one width, initialised from its own seed without touching the default generator."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.width = width
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.build(width)

    def build(self, width: int) -> None:
        raise NotImplementedError

    def accepts(self, t: Tensor) -> bool:
        """Say whether the module can take this tensor, (..., width)."""
        return t.dim() in (2, 3) and t.shape[-1] == self.width and t.shape[0] > 1


class Mlp(Small):
    def build(self, width: int) -> None:
        self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2))
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.net(x))


class Normed(Small):
    """Linear, batch norm with running statistics, ReLU in place; forward hooks that count."""

    def build(self, width: int) -> None:
        self.inner, self.norm = nn.Linear(width, width, bias=False), nn.BatchNorm1d(width)
        self.calls = 0
        self.norm.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(self.inner(x).reshape(-1, self.width))
        return F.relu(flat, inplace=True).reshape(x.shape)


class Counter(nn.Module):
    """Count calls in Python and in a buffer, and use both."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def accepts(self, t: Tensor) -> bool:
        return t.numel() > 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.detach().mean().tanh()
        return x * self.seen + x.sin() * self.calls


class Cache(nn.Module):
    """Append to a list, as a key-value cache does, and read all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Tensor] = []

    def accepts(self, t: Tensor) -> bool:
        return t.numel() > 0

    def forward(self, x: Tensor) -> Tensor:
        self.items.append(x.detach().mean().tanh())
        return x * torch.stack(self.items).sum()


class Recurrent(Small):
    def build(self, width: int) -> None:
        self.lstm, self.gru = nn.LSTM(width, width, batch_first=True), nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 3 else x[None]
        out, (last, _) = self.lstm(rows)
        return out + self.gru(rows[:, -1], last[0])[:, None]


class Attention(Small):
    def build(self, width: int) -> None:
        self.attention = nn.MultiheadAttention(width, 1, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 3 else x[None]
        return self.attention(rows, rows, rows)[0] + rows


class Convolution(Small):
    def build(self, width: int) -> None:
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        images = (x if x.dim() == 3 else x[None])[:, None]
        return F.max_pool2d(F.silu(self.norm(self.conv(images)), inplace=True), (1, 2))


class Gated(Small):
    def __init__(self, width: int, seed: int, *, bias: bool) -> None:
        self.biased = bias
        super().__init__(width, seed)

    def build(self, width: int) -> None:
        self.up, self.down = (
            nn.Linear(width, 4 * width, self.biased),
            nn.Linear(2 * width, width, self.biased),
        )
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Tied(Small):
    """Use one weight as embedding and as projection."""

    def build(self, width: int) -> None:
        self.table = nn.Embedding(5, width)

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.table.weight)
        return x + self.table(logits.argmax(-1)) + logits.softmax(-1) @ self.table.weight


__all__ = [
    "Attention",
    "Cache",
    "Convolution",
    "Counter",
    "Declared",
    "Dirty",
    "Gated",
    "HiddenWork",
    "Mlp",
    "Normed",
    "OnContext",
    "RandomMask",
    "Recurrent",
    "Reversed",
    "SavedExp",
    "ScaledProduct",
    "StraightThrough",
    "Tied",
    "WithIndex",
    "checkpoint",
    "constant",
    "dirty_memory",
    "hook",
    "leaf",
    "route",
    "run_backward",
    "seeded",
    "sub_step",
    "weigh",
    "work",
]
