"""attach: put a budget, a plan or a policy on a model, or on several; the training loop stays as it is.

step 1    forward is recorded thriftily (a staircase of blocks) and proven; its backward is watched
step 2    a plan is made before the forward; from now on it is in force
later     smaller shapes climb down a ladder of plans; a larger shape, or another kind of step, is watched like step 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lowtide.agreement import require_same
from lowtide.attach_report import AttachReport
from lowtide.errors import AttachError
from lowtide.handle import Handle
from lowtide.plan import Plan
from lowtide.tape.policy import Op, Policy
from lowtide.units import parse_bytes

__all__ = ["AttachReport", "Handle", "attach"]


def attach(
    model: nn.Module | Sequence[nn.Module],
    budget: int | str | None = None,
    *,
    plan: Plan | None = None,
    policy: Policy | Callable[[Op], bool] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    strict: bool = False,
) -> Handle:
    """Fit the training steps of ``model`` into ``budget``; the training loop stays as it is.

    The first training step runs thriftily while it is watched; from the second step on a plan is in force. Without
    grad nothing is recorded.

    Args:
        model: the model, or a part of it, whose forward passes are planned; or several models, which then share
            the budget. A step may call any of them any number of times before backward.
        budget: int bytes, ``"12 GiB"``, ``"80%"`` of what the plain step needs, or ``"auto"``: what the device has
            free, less a reserve of 5 %. It counts parameters, buffers, gradients, optimizer states, inputs,
            activations and temporaries.
        plan: a plan instead of a budget, from ``lowtide.solve``. The model may be wrapped, or the one that a
            wrapper was traced with.
        policy: a hand policy instead of a budget, from ``lowtide.policies``.
        optimizer: whose states count, or several; found by themselves once they have made a step.
        strict: raise instead of warn when an operation is found not to be reproducible.

    Returns:
        A handle: ``handle.plan``, ``handle.report()``, ``handle.detach()``; a context manager that detaches.

    Raises:
        AttachError: a model is attached already, or not exactly one of budget, plan and policy is given.
        PlanMismatch: the plan was made for another model, or another rank was given another plan for it.
        InfeasibleBudget: when the second step begins, if no plan fits.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
        >>> with lowtide.attach(model, budget="1 GiB") as handle:
        ...     for _ in range(3):
        ...         model(torch.ones(2, 4)).sum().backward()
    """
    given = [source for source in (budget, plan, policy) if source is not None]
    if len(given) != 1:
        raise AttachError("attach needs exactly one of budget=, plan= and policy=")
    models = _models(model)
    if isinstance(budget, str) and budget != "auto" and not budget.strip().endswith("%"):
        parse_bytes(budget)
    if plan is not None:
        require_same(plan)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    return Handle(models, given[0], optimizers=optimizers, strict=strict, together=not isinstance(model, nn.Module))


def _models(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The models to attach, each once.

    Raises:
        AttachError: something among them is no module, or there is none.
    """
    if isinstance(model, nn.Module):
        return [model]
    if not isinstance(model, (list, tuple)) or not model:
        raise AttachError(f"attach takes a torch.nn.Module or a list of them, not {type(model).__name__}")
    for one in model:
        if not isinstance(one, nn.Module):
            raise AttachError(f"attach takes torch.nn.Modules; one of the list is a {type(one).__name__}")
    if len({id(one) for one in model}) < len(model):
        raise AttachError("the list has a model twice; name each once, and call it as often as you like")
    return list(model)
