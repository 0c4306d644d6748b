"""fit_retry: when a training step runs out of memory, plan for less and run it again from the same state.

state ─▶ step ─▶ done
  ▲        └──▶ out of memory ─▶ free what is left of it ─▶ put the state back ─▶ plan for less ─┐
  └──────────────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import functools
import gc
import logging
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from lowtide import exhaustion
from lowtide.errors import AttachError, InfeasibleBudget, RecomputeWarning
from lowtide.handle import Handle
from lowtide.snapshot import Snapshot
from lowtide.sources import Budgeted
from lowtide.tape.sites import Models
from lowtide.units import format_bytes

log = logging.getLogger("lowtide")

Args = ParamSpec("Args")
Result = TypeVar("Result")


def fit_retry(
    step: Callable[Args, Result],
    handle: Handle,
    *,
    tries: int = 3,
    factor: float = 0.85,
    generators: Sequence[torch.Generator] = (),
) -> Callable[Args, Result]:
    """Wrap a training step: where it runs out of memory, tighten the plan and run it again from the same state.

    Put back before each try: random state (torch's, python's, numpy's, and ``generators``), the buffers and other
    attributes of the attached models, and gradients. Weights are not: a step that ran out of memory after an
    optimizer had begun to write them is not run again. The arguments are those of the first try, so the batch is
    the same; it is never made smaller.

    Gradients that are there when a step begins are copied first. Let it find None there, by
    ``optimizer.zero_grad()`` at the end of a step, and there is nothing to copy.

    Args:
        step: one training step, forward and backward, with or without the optimizer's.
        handle: from ``lowtide.attach`` with a budget.
        tries: how often the same step is run at most.
        factor: what the next plan may need of what the last one expected to need.
        generators: random generators that the step draws from, beside the default ones.

    Returns:
        ``step``, with the same arguments and result.

    Raises:
        AttachError: the handle has no budget that could be tightened.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
        >>> handle = lowtide.attach(model, budget="1 GiB")
        >>> train = lowtide.fit_retry(lambda batch: model(batch).sum().backward(), handle)
        >>> train(torch.ones(2, 4))
        >>> handle.detach()
    """
    source = handle.source
    if not isinstance(source, Budgeted):
        raise AttachError("fit_retry needs a model attached with a budget: a plan or a policy cannot be tightened")
    if tries < 1 or not 0 < factor < 1:
        raise ValueError("fit_retry needs at least one try, and a factor between 0 and 1")

    @functools.wraps(step)
    def fitted(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        for left in range(tries - 1, -1, -1):
            state = _State(handle, generators)
            try:
                return step(*args, **kwargs)
            except Exception as error:
                if not exhaustion.is_exhaustion(error):
                    raise
                if left == 0:
                    _add(error, f"not run again: that was try {tries}")
                    raise
                if not _again(error, state, handle, source, factor):
                    raise
        raise AssertionError("not reached")

    return fitted


class _State:
    """What a step may have changed before it failed."""

    def __init__(self, handle: Handle, generators: Sequence[torch.Generator]) -> None:
        models = handle.models()
        self.snapshot = Snapshot(Models(models), weights=False)
        for generator in generators:
            self.snapshot.add_generator(generator)
        self._weights = [p for model in models for p in model.parameters()]
        self._versions = [p._version for p in self._weights]

    def weights_changed(self) -> bool:
        """Whether something has written into a parameter since."""
        return [p._version for p in self._weights] != self._versions


def _again(error: Exception, state: _State, handle: Handle, source: Budgeted, factor: float) -> bool:
    """Make ready for another try; False, with a note on the error, where there can be none."""
    traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
    handle.drop_step()
    gc.collect()
    if state.weights_changed():
        _add(error, "not run again: weights were written before memory ran out")
        return False
    state.snapshot.restore()
    _empty_caches()
    try:
        bytes_ = source.tighten(factor)
    except InfeasibleBudget:
        bytes_ = None
    if bytes_ is None:
        _add(error, "not run again: there is no plan that needs less")
        return False
    text = f"a step ran out of memory; planned for {format_bytes(bytes_[1])} instead of {format_bytes(bytes_[0])}"
    source.note(f"{text}, and run again")
    warnings.warn(f"{text}, it is run again from the same state", RecomputeWarning, stacklevel=3)
    return True


def _add(error: Exception, text: str) -> None:
    log.info(text)
    exhaustion.add_line(error, text)


def _empty_caches() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
