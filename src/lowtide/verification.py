"""verify: run a step plainly and under a plan from the same state, and compare all that is left, bit for bit.

    snapshot ─▶ under the plan (proofs run)  ─▶ seen ─┐
    restore  ─▶ plain                        ─▶ seen ─┼─▶ what differs between the plain runs is set aside,
    restore  ─▶ plain again                  ─▶ seen ─┤   the rest of all four must agree
    restore  ─▶ under the plan (as it stays) ─▶ seen ─┘
    restore

The run with the proofs comes first because it also discovers which generators there are.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowtide import attachment
from lowtide.discovery import Discovery
from lowtide.errors import GraphError, RecomputeWarning, ReplayMismatch, RootChanged
from lowtide.observation import Observation, Trial, What
from lowtide.plan import Plan
from lowtide.planned import policy_of
from lowtide.planning import solve
from lowtide.recording import Recording, record
from lowtide.snapshot import Snapshot
from lowtide.tape.policy import Op, Policy, as_policy
from lowtide.tracing import trace
from lowtide.tracing.stepping import Step
from lowtide.verdict import Difference, Verdict

AnyPlan = Plan | int | str | Policy | Callable[[Op], bool]
"""A plan, a budget, or a hand policy."""


def verify(
    step: Step,
    model: nn.Module,
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
        model: the model that the step trains. What is attached to it does nothing meanwhile.
        plan: a plan; a budget (int bytes, ``"12 GiB"``, ``"80%"``), for which one is made; or a hand policy.
        steps: how many steps to take. Gradients add up, unless there is an optimizer.
        optimizer: steps after each backward.

    Returns:
        The verdict: true where everything is equal. It prints as a short text and names what differs.

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
    refuse_lazy(model)
    with Snapshot(model, optimizer) as snapshot, undisturbed(model):
        discovery = Discovery(snapshot)
        watched = discovery.watch(step)
        policy, made = resolve(watched, model, plan, optimizer)
        recording = record(policy)
        planned = _Planned(recording, steps)
        first = planned.run(Trial(watched, model, snapshot, optimizer))
        trial = Trial(step, model, snapshot, optimizer)
        plain, irreproducible = reference(trial, steps)
        differences = _Differences(trial, plain, irreproducible)
        differences.add(first)
        differences.add(planned.run(trial))
    return Verdict(
        compared=_compared(plain, irreproducible),
        differences=tuple(differences.found.values()),
        irreproducible=tuple(dict.fromkeys(str(what) for what in irreproducible)),
        failure=planned.failure,
        steps=steps,
        warnings=recording.report().warnings,
        plan=made,
    )


def resolve(
    step: Step, model: nn.Module, plan: AnyPlan, optimizer: torch.optim.Optimizer | None
) -> tuple[Policy, Plan | None]:
    """``plan`` as a policy, and the plan itself; one is made for a budget, a hand policy has none."""
    if isinstance(plan, (int, str)):
        plan = solve(trace(step, model, optimizer=optimizer), plan)
    if isinstance(plan, Plan):
        return policy_of(plan), plan
    return as_policy(plan), None


def reference(trial: Trial, steps: int = 1) -> tuple[Observation, set[What]]:
    """Run the plain step twice from the same state: what it leaves behind, and what it does not repeat."""
    plain = trial.run(steps=steps, between=dirty_memory)
    again = trial.run(steps=steps, between=dirty_memory)
    return plain, {what for what, _ in trial.differences(plain, again)}


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
    known = attachment._interception._handles
    handles = [known[id(module)] for module in model.modules() if id(module) in known]
    before = [handle._inside for handle in handles]
    for handle in handles:
        handle._inside = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecomputeWarning)
            yield
    finally:
        for handle, inside in zip(handles, before, strict=True):
            handle._inside = inside


class _Planned:
    """The step under the plan, and the first error of lowtide's that it raised."""

    def __init__(self, recording: Recording, steps: int) -> None:
        self.recording = recording
        self.steps = steps
        self.failure = ""

    def run(self, trial: Trial) -> Observation | None:
        """What the step leaves behind under the plan; None where it failed."""
        try:
            return trial.run(lambda: self.recording, steps=self.steps, between=dirty_memory)
        except (ReplayMismatch, RootChanged) as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            return None


class _Differences:
    """Collects what differs from the plain step, each thing once."""

    def __init__(self, trial: Trial, plain: Observation, irreproducible: set[What]) -> None:
        self.trial = trial
        self.plain = plain
        self.irreproducible = irreproducible
        self.found: dict[What, Difference] = {}

    def add(self, seen: Observation | None) -> None:
        if seen is not None:
            for what, difference in self.trial.differences(self.plain, seen):
                if what not in self.irreproducible:
                    self.found.setdefault(what, difference)


def _compared(plain: Observation, irreproducible: set[What]) -> tuple[tuple[str, int], ...]:
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
