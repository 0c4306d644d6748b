"""verify: run a step plainly and under a plan from the same state, and compare all that is left, bit for bit.

    snapshot ─▶ forward, that discovers generators and leaves
    restore  ─▶ plain                        ─▶ seen ─┐
    restore  ─▶ plain again                  ─▶ seen ─┼─▶ what differs between the plain runs is set aside,
    restore  ─▶ under the plan (proofs run)  ─▶ seen ─┤   the rest of all four must agree
    restore  ─▶ under the plan (as it stays) ─▶ seen ─┘
    restore

A plan is followed in two ways, so it is tried twice.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.culprit import culprit
from lowtide.discovery import Discovery
from lowtide.errors import GraphError, RecomputeWarning, ReplayMismatch, RootChanged
from lowtide.interception import interception
from lowtide.observation import Observation, Trial, What
from lowtide.plan import Plan
from lowtide.planned import policy_of, seats
from lowtide.planning import solve
from lowtide.recording import Recording, record
from lowtide.snapshot import Snapshot
from lowtide.tape.policy import Op, Policy, as_policy
from lowtide.tape.sites import structure_of, together
from lowtide.tracing import trace
from lowtide.tracing.stepping import Step
from lowtide.tracing.stepping import _loss as loss_of
from lowtide.verdict import Difference, Verdict

AnyPlan = Plan | int | str | Policy | Callable[[Op], bool]
"""A plan, a budget, or a hand policy."""


def verify(
    step: Step,
    model: nn.Module | Sequence[nn.Module],
    plan: AnyPlan,
    *,
    steps: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
) -> Verdict:
    """Run ``step`` plainly and under ``plan`` from the same state, and compare all that is left bit for bit.

    Compared are the loss, every gradient and buffer after each step, and at the end the states of all random
    generators (torch's on all devices, the step's own, python's, numpy's) and, with an optimizer, the
    parameters and its states. Memory that forward freed is filled with NaN before backward begins.

    Each of the two is run twice: what the plain step does not repeat is named and left out, and the plan is
    followed while its operations are proven and after that. In the end everything is as it was, also when the
    step raises; the copies needed for that are in host memory.

    Args:
        step: a callable without arguments that runs the forward pass and returns the loss, a scalar tensor.
            It must do the same at each call: one that takes the next batch from a loader is not reproducible.
        model: the model, or models, that the step trains. What is attached to it does nothing meanwhile.
        plan: a plan; a budget (int bytes, ``"12 GiB"``, ``"80%"``), for which one is made; or a hand policy.
        steps: how many steps to take. Gradients add up, unless there is an optimizer.
        optimizer: steps after each backward.

    Returns:
        The verdict: true where everything is equal. It prints as a short text and names what differs, and the
        operation whose recomputation makes the difference: name, module path and source line.

    Raises:
        GraphError: the step returns no scalar that requires grad, or a parameter has no contents yet.
        InfeasibleBudget: no plan fits the budget.
        PlanMismatch: the plan was made for another model.
        PolicyError: the policy does not fit the model.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
        >>> step = lambda: model(torch.ones(2, 4)).sum()
        >>> print(lowtide.verify(step, model, lowtide.policies.recompute_all))
        exact: loss, 4 gradients, 3 random states
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    whole = together(model)
    refuse_lazy(whole)
    with Snapshot(whole, optimizer) as snapshot, undisturbed(whole):
        policy, made = resolve(Discovery(snapshot).watch(step), whole, plan, optimizer)
        trial = Trial(step, whole, snapshot, optimizer)
        plain, irreproducible = _reference(trial, steps)
        recording = record(policy, model=whole)
        differences, failure = _under(recording, trial, plain, steps)
        wrong = tuple(one for what, one in differences.items() if what not in irreproducible)
        blamed = _blamed(policy, trial, plain, irreproducible, whole) if wrong and not failure else ""
    return Verdict(
        compared=_compared(plain, irreproducible),
        differences=wrong,
        culprit=blamed,
        irreproducible=tuple(dict.fromkeys(map(str, irreproducible))),
        failure=failure,
        steps=steps,
        warnings=recording.report().warnings,
        plan=made,
    )


def resolve(
    watched: Step, model: nn.Module, plan: AnyPlan, optimizer: torch.optim.Optimizer | None
) -> tuple[Policy, Plan | None]:
    """``plan`` as a policy, and the plan itself; one is made for a budget, a hand policy has none.

    In any case ``watched`` is called once, and what it computes is not kept for backward.
    """
    if isinstance(plan, (int, str)):
        plan = solve(trace(watched, model, optimizer=optimizer), plan)
        return policy_of(plan), plan
    if isinstance(plan, Plan) and plan.structure:
        structure = structure_of(model)
        if seats(structure, plan.structure) == ([], []):
            plan.check(structure)  # one that keeps everything is not looked at again
    policy = policy_of(plan) if isinstance(plan, Plan) else as_policy(plan)
    with record(policy, check="never", model=model):
        loss_of(watched)
    return policy, plan if isinstance(plan, Plan) else None


def _reference(trial: Trial, steps: int) -> tuple[Observation, dict[What, Difference]]:
    """What the plain step leaves behind, and where it differs from itself."""
    plain = trial.run(steps=steps, between=dirty_memory)
    again = trial.run(steps=steps, between=dirty_memory)
    return plain, trial.differences(plain, again)


def _under(recording: Recording, trial: Trial, plain: Observation, steps: int) -> tuple[dict[What, Difference], str]:
    """Where two runs under the plan differ from the plain one, and the error that one of them ended in."""
    found: dict[What, Difference] = {}
    for _ in range(2):
        try:
            seen = trial.run(lambda: recording, steps=steps, between=dirty_memory)
        except (ReplayMismatch, RootChanged) as error:
            return found, f"{type(error).__name__}: {error}"
        found = trial.differences(plain, seen) | found
    return found, ""


def _blamed(
    policy: Policy, trial: Trial, plain: Observation, irreproducible: Collection[What], model: nn.Module
) -> str:
    """The operation whose recomputation makes the difference."""

    def differs(other: Policy) -> bool:
        recording = record(other, check="never", model=model)
        steps = max(what.step for what in plain)
        try:
            seen = trial.run(lambda: recording, steps=steps, between=dirty_memory)
        except (ReplayMismatch, RootChanged):
            return True
        return any(what not in irreproducible for what in trial.differences(plain, seen))

    return culprit(policy, differs)


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model whose parameters get their shapes in the first forward pass.

    Raises:
        GraphError: it is one.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise GraphError(f"{name} has no contents yet: run the model forward once before")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Let ``model`` run as if nothing were attached to it; what a recording warns about is in its report."""
    with interception.paused(list(model.modules())), warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputeWarning)
        yield


def _compared(plain: Observation, irreproducible: Collection[What]) -> tuple[tuple[str, int], ...]:
    """How many different things of each kind were compared, whatever the number of steps."""
    things = dict.fromkeys((what.kind, what.name) for what in plain if what not in irreproducible)
    return tuple(Counter(kind for kind, _ in things).items())


# ---- freed memory ------------------------------------------------------------------------------------------

_SMALL_BYTES = [size for size in range(64, 4_097, 64) for _ in range(4)]
_LARGE_BYTES = [*range(4_608, 16_385, 512), *(2**k for k in range(15, 23))]
_NAN = 255
"""As a byte: NaN in every floating dtype, -1 in every signed integer."""


def dirty_memory(devices: set[torch.device]) -> None:
    """Fill freed memory with NaN: what is read where it used to be gives wrong numbers, not lucky ones."""
    with _disable_current_modes(), torch.no_grad():
        for device in devices:
            sizes = _freed_on_cuda(device) if device.type == "cuda" else [*_SMALL_BYTES, *_LARGE_BYTES]
            blocks = [torch.full((size,), _NAN, dtype=torch.uint8, device=device) for size in sizes]
            blocks.clear()


def _freed_on_cuda(device: torch.device) -> list[int]:
    """The sizes of the blocks that the caching allocator has and nobody uses, largest first."""
    segments = (s for s in torch.cuda.memory_snapshot() if s["device"] == device.index)
    free = (block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive")
    return sorted(free, reverse=True)
