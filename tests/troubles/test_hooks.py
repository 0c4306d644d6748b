"""Hooks, counters, and who sees what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from troubles.ways import Way, exact, finish, grads, ours, plainly, reentrant, torch_differs, torchs, tried


def pairs(way: Way) -> object:
    block, x, events = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4), list[str]()
    x.requires_grad_()
    block[2].register_forward_pre_hook(lambda *_: events.append("push"))
    block[2].register_forward_hook(lambda *_: events.append("pop"))
    for _ in range(3):
        finish(way(block, x).sum())
    return events, events.count("push") - events.count("pop"), grads(block, x)


def test_B90_the_pre_forward_hook_fires_on_recompute_and_the_post_forward_hook_does_not() -> None:
    exact(pairs)
    torch_differs(pairs)
    torch_differs(pairs, reentrant)


def gathering(way: Way) -> object:
    """Weights that hooks fetch before forward and release after, as sharding engines with prefetch do."""
    blocks, x, state = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), torch.randn(2, 4), Counter[str]()
    x.requires_grad_()

    def fetch(index: int, *_: Any) -> None:
        state["fetched"] += 1
        for ahead in range(index, min(index + 2, 3)):
            state[f"here {ahead}"] = 1

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(fetch, index))
        block.register_forward_hook(lambda *_, index=index: state.update({f"here {index}": -1}))
    out = x
    for block in blocks:
        out = way(block, out).tanh()
    finish(out.sum())
    return dict(state), grads(blocks, x)


def test_B58_prefetch_during_recompute_leaves_weights_unsharded() -> None:
    """No hook can mistake a replay for a forward pass, because a replay calls no module."""
    exact(gathering)
    torch_differs(gathering)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).tanh()


def flops(way: Way) -> int:
    model, x = Two(), torch.randn(8, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        way(model, x).sum().backward()
    return int(counter.get_total_flops())


def keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_B92_flop_and_mfu_numbers_change_with_checkpointing() -> None:
    """Model flops are those of the plain step; what recomputation adds has a number of its own."""
    model, x = Two(), torch.randn(8, 16, requires_grad=True)

    def step() -> Tensor:
        return model(x).square().sum()

    graph = lowtide.trace(step, model=model)
    plain = lowtide.simulate(graph, lowtide.solve(graph, policy=lowtide.policies.keep_all))
    matmuls = lowtide.simulate(graph, lowtide.solve(graph, policy=lowtide.policies.keep_matmuls))
    none = lowtide.simulate(graph, lowtide.solve(graph, policy=lowtide.policies.recompute_all))
    one_linear = 2 * 8 * 16 * 16
    assert plain.extra_flops == 0
    assert matmuls.extra_flops < one_linear <= none.extra_flops
    if tried:
        keep = partial(torchs, context_fn=partial(create_selective_checkpoint_contexts, keep_matmuls))
        assert flops(torchs) > flops(plainly) == flops(keep)


def packed(way: Way) -> list[tuple[int, ...]]:
    model, x, shapes = Two(), torch.randn(8, 16, requires_grad=True), list[tuple[int, ...]]()

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor.detach().clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = way(model, x)
    finish(out.sum())
    return shapes


def test_B93_user_hooks_do_not_see_what_selective_checkpointing_saves() -> None:
    """Hooks around the recording, such as those of an offloader, get every tensor that is kept."""
    keep = partial(create_selective_checkpoint_contexts, keep_matmuls)
    assert (8, 16) in packed(partial(ours, context_fn=keep))
    exact(lambda way: sorted(packed(way)), lambda f, x: with_everything_kept(f, x))
    if tried:
        assert len(packed(partial(torchs, context_fn=keep))) < len(packed(partial(ours, context_fn=keep)))


def with_everything_kept(function: Callable[..., Any], x: Tensor) -> Any:
    with lowtide.record(lowtide.policies.keep_all):
        return function(x)


# ---- relatives -----------------------------------------------------------------------------------------------


def test_relative_module_timers_and_global_hooks_see_one_forward() -> None:
    def program(way: Way) -> object:
        model, x, seen = Two(), torch.randn(8, 16, requires_grad=True), Counter[str]()
        registry = nn.modules.module
        handles = [
            registry.register_module_forward_pre_hook(lambda module, _: seen.update([type(module).__name__])),
            registry.register_module_forward_hook(lambda module, *_: seen.update([type(module).__name__])),
        ]
        try:
            finish(way(model, x).sum())
        finally:
            for handle in handles:
                handle.remove()
        return dict(seen), grads(model, x)

    exact(program)
    torch_differs(program)


def test_relative_gradient_hooks_fire_once_and_in_the_plain_order() -> None:
    def program(way: Way) -> object:
        model, x, order = Two(), torch.randn(8, 16, requires_grad=True), list[str]()
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda _, name=name: order.append(name))
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(f"after {name}"))
        model.a.register_full_backward_hook(lambda *_: order.append("backward of a"))
        finish(way(model, x).sum())
        return order, grads(model, x)

    exact(program)


def test_relative_activation_statistics_by_a_dispatch_mode_of_the_users() -> None:
    """A mode inside the recording sees each forward operation once."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen = Counter[str]()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen[str(func)] += 1
            return func(*args, **(kwargs or {}))

    def program(way: Way) -> object:
        model, x, count = Two(), torch.randn(8, 16, requires_grad=True), Count()

        def function(x: Tensor) -> Tensor:
            with count:
                return model(x)

        finish(way(function, x).sum())
        seen = {name: times for name, times in count.seen.items() if "detach" not in name}
        return seen, grads(model, x)

    exact(program)
    torch_differs(program)
