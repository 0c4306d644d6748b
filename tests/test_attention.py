"""Attention, and kernels from outside of PyTorch: kept unless declared, never run twice by accident, always exact."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide

HEADS, LENGTH, WIDTH = 2, 8, 16
runs: dict[str, int] = {}
"""How often each kernel ran."""


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, as a kernel computes them."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    scale = q.shape[-1] ** -0.5
    weights = (q @ k.transpose(-1, -2) * scale - lse[..., None]).exp()
    inner = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    return inner @ k * scale, inner.transpose(-1, -2) @ q * scale, weights.transpose(-1, -2) @ grad


def as_flash_attn(space: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Registered as flash-attn does: a custom op for the kernel, called by an autograd Function."""

    @torch.library.custom_op(f"{space}::forward", mutates_args=(), device_types="cpu")
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        runs[space] = runs.get(space, 0) + 1
        return attend(q, k, v)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = forward(q, k, v)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return attend_backward(grad, *ctx.saved_tensors)

    return Attention.apply  # type: ignore[no-any-return]


def as_registered_autograd(space: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Registered with ``register_autograd``, as newer packages do."""

    @torch.library.custom_op(f"{space}::forward", mutates_args=(), device_types="cpu")
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        runs[space] = runs.get(space, 0) + 1
        return attend(q, k, v)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output)

    forward.register_autograd(lambda ctx, grad, _: attend_backward(grad, *ctx.saved_tensors), setup_context=setup)
    return lambda q, k, v: forward(q, k, v)[0]


_libraries: list[Any] = []


def as_xformers(space: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Registered as xformers and bitsandbytes do: a library's schema, an implementation for a device."""
    library = torch.library.Library(space, "DEF")
    library.define("forward(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        runs[space] = runs.get(space, 0) + 1
        return attend(q, k, v)

    library.impl("forward", kernel, "CPU")
    _libraries.append(library)
    operator = getattr(torch.ops, space).forward

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = operator(q, k, v)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return attend_backward(grad, *ctx.saved_tensors)

    return Attention.apply  # type: ignore[no-any-return]


def as_hidden_kernel(space: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """As Liger and Unsloth do: a Function whose kernel fills memory that no operator is seen writing."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            runs[space] = runs.get(space, 0) + 1
            made = [t.contiguous() for t in attend(q, k, v)]
            out, lse = (torch.empty_like(t) for t in made)
            for target, source in ((out, made[0]), (lse, made[1])):
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return attend_backward(grad, *ctx.saved_tensors)

    return Attention.apply  # type: ignore[no-any-return]


KERNELS = {
    f.__name__.removeprefix("as_"): f for f in (as_flash_attn, as_registered_autograd, as_xformers, as_hidden_kernel)
}


class Block(nn.Module):
    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return x + F.gelu(self.out(self.attention(q, k, v).transpose(1, 2).reshape(x.shape)))


def train(attention: Callable[..., Tensor], policy: Any = None, steps: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(attention) for _ in range(3)))
    recording = lowtide.record(policy) if policy is not None else nullcontext()
    seen = []
    for _ in range(steps):
        with recording:
            loss = model(torch.randn(2, LENGTH, WIDTH)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return seen


def assert_same(plain: list[Tensor], ours: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_from_outside_is_kept_and_runs_once(kind: str) -> None:
    space = f"double{uuid.uuid4().hex}"
    attention = KERNELS[kind](space)
    plain = train(attention)
    count, runs[space] = runs[space], 0
    assert_same(plain, train(attention, lowtide.policies.recompute_all))
    assert runs[space] == count


@pytest.mark.parametrize("kind", ["flash_attn", "registered_autograd", "xformers"])
def test_a_declared_kernel_is_recomputed_once_in_backward(kind: str) -> None:
    space = f"double{uuid.uuid4().hex}"
    attention = KERNELS[kind](space)
    plain = train(attention, steps=1)
    count = runs[space]
    lowtide.recomputable(f"{space}::forward")
    runs[space] = 0
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(attention) for _ in range(3)))
    with lowtide.record(check="never"):
        loss = model(torch.randn(2, LENGTH, WIDTH)).square().mean()
    assert runs[space] == count
    loss.backward()
    assert_same(plain, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert runs[space] in (count, 2 * count)


def sdpa(backend: SDPBackend | None, **options: Any) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, **options)

    return attention


SDPA = {
    "default": sdpa(None, is_causal=True),
    "flash": sdpa(SDPBackend.FLASH_ATTENTION, is_causal=True),
    "math": sdpa(SDPBackend.MATH),
    "math with dropout": sdpa(SDPBackend.MATH, dropout_p=0.3),
    "dropout": sdpa(None, dropout_p=0.3, is_causal=True),
    "mask": sdpa(None, attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()),
}
POLICIES = {"all": lowtide.policies.recompute_all, "keep_matmuls": lowtide.policies.keep_matmuls}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", SDPA)
def test_attention_of_torch_is_exact_whatever_its_backend(kind: str, policy: str) -> None:
    assert_same(train(SDPA[kind]), train(SDPA[kind], POLICIES[policy]))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_exact() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def bias(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + (row - column) * 0.1

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flex_attention(q.detach(), k.detach(), v.detach(), score_mod=bias)  # no backward on the CPU
        assert isinstance(out, Tensor)
        return out * q

    assert_same(train(attention), train(attention, lowtide.policies.recompute_all))


class Attentions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts attention operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.count += "scaled_dot_product" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def test_a_kept_attention_keeps_its_log_sum_exp_and_is_not_run_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(SDPA["default"]) for _ in range(3)))
    counts = {}
    for name, policy in POLICIES.items():
        with Attentions() as seen, lowtide.record(policy, check="never"):
            model(torch.randn(2, LENGTH, WIDTH)).square().mean().backward()
        counts[name] = seen.count
    assert counts == {"all": 6, "keep_matmuls": 3}
