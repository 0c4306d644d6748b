"""Drop-ins for ``torch.utils.checkpoint``: the same calls, but the function runs once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide.errors import PolicyError
from lowtide.policies import recompute_all
from lowtide.recording import active, record

if TYPE_CHECKING:
    from lowtide.tape.policy import Policy

_NOTHING = object()


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    determinism_check: str = "default",
    preserve_rng_state: bool = True,
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Call ``function`` and keep only its inputs and outputs for backward; the rest is recomputed.

    The same call as ``torch.utils.checkpoint.checkpoint``. Because the recorded operations are replayed and the
    function itself is never called again, any arguments are allowed (nested containers, dataclasses, None,
    generators), side effects happen once, and random numbers are the same by construction.

    Args:
        function: any callable.
        *args: passed on.
        use_reentrant: accepted and without effect: there is only one way here, and it has no restrictions.
        context_fn: as for torch: returns two context managers. The first is entered around the call. If they are
            those of ``create_selective_checkpoint_contexts``, their policy decides what is kept.
        determinism_check: accepted and without effect: values, not shapes, are compared when an operation is
            first dropped.
        preserve_rng_state: accepted; random state is replayed exactly either way, since False would only
            give wrong gradients.
        debug: accepted and without effect: errors name module and source line anyway.
        early_stop: accepted and without effect: only what is needed is ever recomputed.
        **kwargs: passed on.

    Returns:
        What ``function`` returns, unchanged.

    Raises:
        ValueError: ``determinism_check`` is none of torch's words.
        RuntimeError: ``context_fn``'s context swallowed an exception of ``function``.

    Example:
        >>> import torch, lowtide
        >>> x = torch.ones(3, requires_grad=True)
        >>> lowtide.checkpoint(lambda x: x.exp().sin(), x).sum().backward()
    """
    del use_reentrant, preserve_rng_state, debug, early_stop
    if determinism_check not in ("default", "none"):
        raise ValueError(f'determinism_check must be "default" or "none", not {determinism_check!r}')
    policy: Policy = recompute_all
    around: Any = nullcontext()
    if context_fn is not None:
        policy, around = _selective(context_fn)
    out: Any = _NOTHING
    with record(policy):
        with around:
            out = function(*args, **kwargs)
        if out is _NOTHING:
            raise RuntimeError(
                "the forward context of context_fn suppressed an exception of the checkpointed function, so there is "
                "nothing to return. Let the exception pass."
            )
        recorder = active()
        if recorder is not None:
            recorder.restore_point(out)
    return out


def _selective(context_fn: Callable[[], tuple[Any, Any]]) -> tuple[Policy, Any]:
    """The policy and the forward context of torch's ``context_fn``."""
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

    from lowtide.tape.policy import CallablePolicy

    forward, _ = context_fn()
    choose = getattr(forward, "policy_fn", None)
    if choose is None:
        return recompute_all, forward
    drops = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)

    def keep(op: Any) -> bool:
        func = getattr(getattr(torch.ops, op.name.split(".")[0]), op.name.split(".")[1])
        func = getattr(func, op.overload or "default")
        return choose(SelectiveCheckpointContext(is_recompute=False), func) not in drops

    return CallablePolicy(keep), nullcontext()


def checkpoint_sequential(
    functions: nn.Sequential | list[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a sequence of functions in ``segments`` parts, keeping only the tensors between the parts.

    The same call as ``torch.utils.checkpoint.checkpoint_sequential``, with the call rules of ``nn.Sequential``:
    each function gets what the one before returned. The last part is kept whole, as in torch.

    Args:
        functions: a ``nn.Sequential`` or a list of callables.
        segments: how many parts, at least 1.
        input: what the first function gets.
        use_reentrant: accepted and without effect.
        **kwargs: options of ``checkpoint``.

    Raises:
        PolicyError: ``segments`` is less than 1 or more than there are functions.
    """
    children = functions.children() if isinstance(functions, nn.Sequential) else functions
    steps: list[Callable[..., Any]] = list(children)
    if not 1 <= segments <= max(1, len(steps)):
        raise PolicyError(f"{len(steps)} functions cannot be run in {segments} segments")
    size = len(steps) // segments
    cuts = [i * size for i in range(segments)] + [len(steps)]
    for first, last in pairwise(cuts[:-1]):
        input = checkpoint(_chain(steps[first:last]), input, **kwargs)
    return _chain(steps[cuts[-2] :])(input)


def _chain(steps: list[Callable[..., Any]]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for step in steps:
            value = step(value)
        return value

    return run
