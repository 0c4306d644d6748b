"""Contexts, selective checkpointing, the wrapper (test_autograd.py and test_checkpoint_wrapper.py of PyTorch)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lowtide
from lowtide import checkpoint
from torch_laws.table import Table, equal, gradients, layers, leaf, same_gradients, saving

TABLE = Table()
law = TABLE.law

# ---- contexts and selective checkpointing ----------------------------------------------------------------


@law("test_checkpointing_without_reentrant_with_context_fn", difference="only the forward context is entered, once")
def _contexts() -> None:
    entered: list[str] = []

    class Note:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *_: object) -> None:
            entered.append(f"left {self.name}")

    checkpoint(torch.exp, leaf(), context_fn=lambda: (Note("forward"), Note("recompute"))).sum().backward()
    assert entered == ["forward", "left forward"]


@TABLE.law("context_fn that suppresses an exception of the function")
def _suppressed() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("lost")

    with pytest.raises(RuntimeError, match="suppressed an exception"):
        checkpoint(fail, leaf(), context_fn=lambda: (suppress(ValueError), nullcontext()))


def selective(policy: Any) -> Callable[..., Any]:
    return partial(checkpoint, context_fn=partial(create_selective_checkpoint_contexts, policy))


@law("test_policy_with_state", "test_can_only_trigger_recompute_once", difference="backward may run more than once")
def _policy_is_asked_for_each_operation() -> None:
    asked: list[Any] = []

    def every_second(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(op)
        return CheckpointPolicy.MUST_SAVE if len(asked) % 2 else CheckpointPolicy.MUST_RECOMPUTE

    x = leaf()
    function = lambda x: x.sin().sin().sin().exp()  # noqa: E731
    out = selective(every_second)(function, x).sum()
    assert asked.count(torch.ops.aten.sin.default) == 3
    out.backward(retain_graph=True)
    first = x.grad.clone() if x.grad is not None else None
    x.grad = None
    out.backward()
    assert equal([first], [x.grad])


@law("test_bad_inputs")
def _bad_inputs() -> None:
    with pytest.raises(TypeError):
        create_selective_checkpoint_contexts(2)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        checkpoint(torch.sin, leaf(), context_fn=lambda: 3)  # type: ignore[arg-type, return-value]
    for saved in ([torch.ops.aten.sin.default], [torch.ops.aten.exp.default, torch.ops.aten.sin.default]):
        checkpoint(torch.sin, leaf(), context_fn=partial(create_selective_checkpoint_contexts, saved)).sum().backward()


@law("test_version_counter", difference="what was kept and then written in place is an error in backward, as in plain")
def _kept_results_are_watched() -> None:
    save = lambda ctx, op, *a, **k: CheckpointPolicy.MUST_SAVE  # noqa: E731
    seen: list[Tensor] = []
    out = selective(save)(lambda x: (seen.append(x.exp()), seen[0].sin())[1], leaf()).sum()
    seen[0].detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@law("test_output_already_has_autograd_meta", "test_function_with_non_tensor_output", "test_subclass_dispatching_sizes")
def _views_numbers_and_subclasses() -> None:
    class Tagged(Tensor):
        pass

    save = saving("sin")

    def function(x: Tensor) -> Tensor:
        view = x.view_as(x).sin()
        return (view[1:].exp() * float(view.detach().sum()) * x.size(0)).cos()

    for x in (leaf(), torch.randn(4, 6).as_subclass(Tagged).requires_grad_()):
        same_gradients(lambda x=x: function(x), lambda x=x: selective(save)(function, x), x)  # type: ignore[misc]


# ---- the wrapper of torch.distributed --------------------------------------------------------------------


@law(
    "test_load_activation_checkpointed_module",
    "test_fqn",
    "test_forward_missing_attributes",
    "test_checkpoint_wrapper_parity",
    "test_apply_activation_checkpointing",
    difference="nothing is wrapped: attach leaves the model, its names and its attributes as they are",
)
def _attached_instead_of_wrapped() -> None:
    model, x = layers(), leaf()
    names, plain = list(model.state_dict()), copy.deepcopy(model)
    with lowtide.attach(model, policy=lowtide.policies.segments("*")):
        assert list(model.state_dict()) == names
        assert not hasattr(model, "no_such_attribute")
        plain.load_state_dict(model.state_dict())
        wanted = gradients(lambda: plain(x), x, *plain.parameters())
        assert equal(wanted, gradients(lambda: model(x), x, *model.parameters()))
