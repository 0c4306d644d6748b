"""attach: put a budget, a plan or a policy on a model; the training loop stays as it is.

    step 1    forward is recorded thriftily (a staircase of blocks) and proven; its backward is watched
    step 2    a plan is made before the forward; from now on it is in force
    later     smaller shapes climb down a ladder of plans; a larger shape is watched like step 1

Calls of the model are seen through its class: ``type(model).__call__`` is replaced while any instance is attached,
so the instance itself, its names, its state_dict, copies and pickles are untouched.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.errors import AttachError
from lowtide.graph import StepGraph
from lowtide.ladder import Ladder, accumulating, ladder
from lowtide.plan import Plan
from lowtide.recording import Recording, active, record
from lowtide.simulation import simulate
from lowtide.tape.policy import Op, Policy
from lowtide.tape.recorder import tensors_in
from lowtide.tape.transforms import hooks_allowed
from lowtide.tracing.observing import Observation
from lowtide.units import format_bytes, parse_bytes

log = logging.getLogger("lowtide")


@dataclass(frozen=True)
class AttachReport:
    """What an attached model does: the plan in force, steps, and what went another way than planned."""

    plan: Plan | None
    calls: int
    planned_calls: int
    fallbacks: tuple[str, ...]
    kept: tuple[Any, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        lines = [str(self.plan) if self.plan is not None else "no plan yet: the first training step is being watched"]
        lines.append(f"{self.calls} training calls, {self.planned_calls} of them under a plan")
        lines += [f"fall-back: {text}" for text in self.fallbacks]
        lines += [f"kept {row.op} in {row.module or 'no module'} ({row.count}x): {row.reason}" for row in self.kept]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


class Handle:
    """What ``attach`` returns: the plan in force, a report, and ``detach``; also a context manager."""

    def __init__(
        self, model: nn.Module, source: Plan | Policy | Callable[[Op], bool] | int | str, **options: Any
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer: torch.optim.Optimizer | None = options["optimizer"]
        self._strict: bool = options["strict"]
        self._calls = self._planned_calls = 0
        self._inside = False
        self._fallbacks: dict[str, None] = {}
        self._recordings: dict[int, Recording] = {}
        self._observation: Observation | None = None
        self._rungs: list[_Rungs] = []
        self._budget: int | str | None = source if isinstance(source, (int, str)) else None
        self._fixed: Recording | None = None if self._budget is not None else self._recording(source)
        self.plan: Plan | None = source if isinstance(source, Plan) else None
        _interception.add(model, self)
        _optimizers.watch()

    # ---- what people use ------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Take everything off the model again; graphs that are still alive can be run backward."""
        model = self._model()
        if model is not None:
            _interception.remove(model, self)
        if self._observation is not None:
            self._observation.cancel()
            self._observation = None

    def report(self) -> AttachReport:
        """The plan in force, how many calls it served, and what went another way."""
        recordings = [*self._recordings.values(), *([self._fixed] if self._fixed is not None else [])]
        reports = [recording.report() for recording in recordings]
        return AttachReport(
            self.plan,
            self._calls,
            self._planned_calls,
            tuple(self._fallbacks),
            tuple(row for report in reports for row in report.kept),
            tuple(text for report in reports for text in report.warnings),
        )

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        model = self._model()
        return f"Handle({type(model).__name__}, {self.plan or 'no plan yet'})"

    # ---- one call of the model ------------------------------------------------------------------------------

    def run(self, original: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the model as it is, under a plan where there is something to plan."""
        if self._inside or not torch.is_grad_enabled() or not hooks_allowed() or not _trains(model, args, kwargs):
            return original(model, *args, **kwargs)
        self._inside = True
        try:
            self._calls += 1
            with self._context(model, args, kwargs):
                return original(model, *args, **kwargs)
        finally:
            self._inside = False

    def _context(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._fixed is not None:
            self._planned_calls += 1
            return self._fixed
        size = _Size(args, kwargs)
        accumulates = any(p.grad is not None for p in model.parameters() if p.requires_grad)
        self._finish_observation()
        for rungs in self._rungs:
            plan = rungs.choose(size, accumulates, self)
            if plan is not None:
                self.plan = plan
                self._planned_calls += 1
                return self._recording(plan)
        if self._rungs:
            self._note(f"a shape beyond the planned ones ({size}): this step is watched and planned anew")
        if self._observation is not None or active() is not None:
            return self._recording(_thrifty())
        self._observation = Observation(model, size)
        return self._observation

    def _finish_observation(self) -> None:
        seen = self._observation
        if seen is None or not seen.complete:
            return
        self._observation = None
        graph = seen.graph(self._find_optimizer())
        if graph is None:
            self._note("the watched step had no backward pass; the next one is watched")
            return
        self._rungs.insert(0, _Rungs(graph, seen.size))

    def _recording(self, source: Any) -> Recording:
        key = hash(source) if not callable(source) or isinstance(source, (Plan, Policy)) else id(source)
        if key not in self._recordings:
            self._recordings[key] = record(source, strict=self._strict)
        return self._recordings[key]

    def _note(self, text: str) -> None:
        if text not in self._fallbacks:
            self._fallbacks[text] = None
            log.info(text)

    def _find_optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer or _optimizers.of(self._model())

    def budget_bytes(self, graph: StepGraph) -> int:
        """The budget in bytes for a step of ``graph``."""
        from lowtide.budget import budget_bytes

        if self._budget == "auto":
            return free_bytes(self._model()) + graph.resident_bytes
        assert self._budget is not None
        return budget_bytes(self._budget, graph)


class _Rungs:
    """The ladders of one watched shape: with and without gradients that are there already; made when needed."""

    def __init__(self, graph: StepGraph, size: _Size) -> None:
        self.graph = graph
        self.size = size
        self.ladders: dict[bool, Ladder] = {}

    def choose(self, size: _Size, accumulates: bool, handle: Handle) -> Plan | None:
        """The plan for a call of this size, None if it is larger than what was watched."""
        fraction = size.fraction_of(self.size)
        if fraction is None:
            return None
        if accumulates not in self.ladders:
            graph = accumulating(self.graph) if accumulates else self.graph
            budget = handle.budget_bytes(graph)
            self.ladders[accumulates] = ladder(graph, budget)
            plain = simulate(graph, frozenset(), trail=False)
            log.info("planned for %s (plain step: %s)", format_bytes(budget), format_bytes(plain.peak_bytes))
        return self.ladders[accumulates].choose(fraction)


class _Size:
    """The shapes of a call's tensor arguments."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.shapes = tuple(tuple(t.shape) for t in tensors_in((args, kwargs)))

    def __str__(self) -> str:
        return ", ".join("x".join(map(str, shape)) for shape in self.shapes) or "no tensors"

    def fraction_of(self, other: _Size) -> float | None:
        """The share of ``other``'s elements, if no dimension is larger; else None."""
        if len(self.shapes) != len(other.shapes):
            return None
        worst = 0.0
        for one, two in zip(self.shapes, other.shapes, strict=True):
            if len(one) != len(two) or any(a > b for a, b in zip(one, two, strict=True)):
                return None
            share = 1.0
            for a, b in zip(one, two, strict=True):
                share *= a / b if b else 1.0
            worst = max(worst, share)
        return worst if self.shapes else 1.0


def attach(
    model: nn.Module,
    budget: int | str | None = None,
    *,
    plan: Plan | None = None,
    policy: Policy | Callable[[Op], bool] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = False,
) -> Handle:
    """Fit the training steps of ``model`` into ``budget``; the training loop stays as it is.

    The first training step runs thriftily while it is watched; from the second step on a plan is in force. Without
    grad nothing is recorded.

    Args:
        model: the model, or a part of it, whose forward passes are planned.
        budget: int bytes, ``"12 GiB"``, ``"80%"`` of what the plain step needs, or ``"auto"``: what the device has
            free, less a reserve of 5 %. It counts parameters, buffers, gradients, optimizer states, inputs,
            activations and temporaries.
        plan: a plan instead of a budget, from ``lowtide.solve``.
        policy: a hand policy instead of a budget, from ``lowtide.policies``.
        optimizer: whose states count; found by itself once it has made a step.
        strict: raise instead of warn when an operation is found not to be reproducible.

    Returns:
        A handle: ``handle.plan``, ``handle.report()``, ``handle.detach()``; a context manager that detaches.

    Raises:
        AttachError: the model is attached already, or not exactly one of budget, plan and policy is given.
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
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(budget, str) and budget != "auto" and not budget.strip().endswith("%"):
        parse_bytes(budget)
    return Handle(model, given[0], optimizer=optimizer, strict=strict)


def _trains(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether anything in this call requires grad."""
    return any(p.requires_grad for p in model.parameters()) or any(t.requires_grad for t in tensors_in((args, kwargs)))


def _thrifty() -> Policy:
    from lowtide.policies import segments

    return segments(keep_last=False)


def free_bytes(model: nn.Module | None) -> int:
    """Bytes that the model's device has free for a step, less a reserve of 5 % of the device."""
    tensor = next(iter(model.parameters()), None) if model is not None else None
    if tensor is not None and tensor.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(tensor.device)
        idle = torch.cuda.memory_reserved(tensor.device) - torch.cuda.memory_allocated(tensor.device)
        return max(0, free + idle - total // 20)
    import os

    page = os.sysconf("SC_PAGE_SIZE")
    return max(0, page * (os.sysconf("SC_AVPHYS_PAGES") - os.sysconf("SC_PHYS_PAGES") // 20))


# ---- seeing the calls ---------------------------------------------------------------------------------------


class _Interception:
    """Replaces ``__call__`` of the classes of attached models, and puts it back."""

    def __init__(self) -> None:
        self._handles: dict[int, Handle] = {}
        self._classes: dict[type, tuple[Any, int]] = {}

    def add(self, model: nn.Module, handle: Handle) -> None:
        known = self._handles.get(id(model))
        if known is not None and known._model() is model:
            raise AttachError(
                f"this {type(model).__name__} is attached already; call detach() on its handle first, or use the "
                "handle as a context manager"
            )
        kind = type(model)
        own, users = self._classes.get(kind, (kind.__dict__.get("__call__"), 0))
        if not users:
            kind.__call__ = self._wrapper(kind.__call__)  # type: ignore[method-assign]
        self._classes[kind] = (own, users + 1)
        self._handles[id(model)] = handle
        weakref.finalize(model, self._forget, id(model), kind)

    def remove(self, model: nn.Module, handle: Handle) -> None:
        if self._handles.get(id(model)) is handle:
            self._forget(id(model), type(model))

    def _forget(self, key: int, kind: type) -> None:
        if self._handles.pop(key, None) is None:
            return
        own, users = self._classes[kind]
        if users > 1:
            self._classes[kind] = (own, users - 1)
            return
        del self._classes[kind]
        if own is None:
            del kind.__call__
        else:
            kind.__call__ = own  # type: ignore[method-assign]

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        handles = self._handles

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            handle = handles.get(id(module))
            if handle is None or handle._model() is not module:
                return original(module, *args, **kwargs)
            return handle.run(original, module, args, kwargs)

        return __call__


class _Optimizers:
    """Remembers which optimizers make steps, by a hook of torch's own, from the first attach on."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hook: Any = None

    def watch(self) -> None:
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(lambda o, *_: self._seen.add(o))

    def of(self, model: nn.Module | None) -> torch.optim.Optimizer | None:
        """The optimizer that trains most of ``model``."""
        wanted = {id(p) for p in model.parameters()} if model is not None else set()
        best, most = None, 0
        for optimizer in self._seen:
            shared = sum(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
            if shared > most:
                best, most = optimizer, shared
        return best


_interception = _Interception()
_optimizers = _Optimizers()
