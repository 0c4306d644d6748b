"""What every integration does when training begins and ends, and what a framework's own checkpointing calls instead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lowtide import attach, checkpoint, policies
from lowtide.recording import active

if TYPE_CHECKING:
    import torch
    from torch import nn
    from typing_extensions import Self

    from lowtide import Handle, Plan
    from lowtide.attachment import AttachReport
    from lowtide.tape.policy import Op, Policy

log = logging.getLogger("lowtide")

Undo = Callable[[], None]


class Session:
    """Attaches lowtide to a model while it is trained. Each ``Lowtide`` of a framework is one.

    Args:
        budget: int bytes, ``"12 GiB"``, ``"80%"`` of what the plain step needs, or ``"auto"``.
        plan: a plan instead of a budget, from ``lowtide.solve``.
        policy: a hand policy instead of a budget. Without any of the three: ``policies.segments()``, the same
            choice as a framework's own activation checkpointing.
        strict: raise instead of warn when an operation is found not to be reproducible.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        plan: Plan | None = None,
        policy: Policy | Callable[[Op], bool] | None = None,
        strict: bool = False,
    ) -> None:
        if budget is None and plan is None and policy is None:
            policy = policies.segments()
        self.wanted: dict[str, Any] = {"budget": budget, "plan": plan, "policy": policy, "strict": strict}
        self.handle: Handle | None = None
        self._undo: Undo | None = None

    take_over: Callable[[Any], Undo]
    """The framework's own, see there."""

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Attach to ``model``, in place of the framework's own activation checkpointing.

        Raises:
            AttachError: something else has attached the model.
        """
        self.end()
        self.handle = attach(model, optimizer=optimizer, **self.wanted)
        self._undo = self.take_over(model)

    def end(self) -> None:
        """Detach, and undo what was taken over. The handle's report stays."""
        if self.handle is not None:
            self.handle.detach()
        if self._undo is not None:
            self._undo()
            self._undo = None

    @contextmanager
    def on(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Self]:
        """Attach to ``model``, and detach at the end of the ``with`` block."""
        self.begin(model, optimizer)
        try:
            yield self
        finally:
            self.end()

    def report(self) -> AttachReport:
        """The plan in force, how many calls it served, and what went another way.

        Raises:
            RuntimeError: training has not begun.
        """
        if self.handle is None:
            raise RuntimeError("there is nothing to report before training has begun")
        return self.handle.report()


def stand_in(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` in place of a framework's checkpoint function.

    Under a plan or policy in force it is a plain call: those decide, and nothing is done twice. Otherwise it is
    ``lowtide.checkpoint``.
    """
    return checkpoint(function, *args, **kwargs) if active() is None else function(*args, **kwargs)


def replace(owners: Iterable[Any], name: str, value: Any, what: str = "") -> Undo:
    """Set ``name`` on every owner to ``value``, say ``what`` that is, and return what puts back what was there."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    for owner, _ in before:
        setattr(owner, name, value)
    if before and what:
        log.warning("%s is on (%d places): lowtide takes its place", what, len(before))

    def undo() -> None:
        for owner, original in before:
            setattr(owner, name, original)

    return undo


def take_over_wrappers(model: nn.Module) -> Undo:
    """Send the checkpoint wrappers of torch around parts of ``model`` to lowtide."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    return replace(wrappers, "checkpoint_fn", stand_in, "torch's checkpoint_wrapper")
