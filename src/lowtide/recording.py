"""``lowtide.record``: run a forward pass under a policy that says what to keep for backward."""

from __future__ import annotations

import sys
import threading
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from lowtide.errors import RecomputeWarning
from lowtide.plan import Plan
from lowtide.tape.backwards import backwards
from lowtide.tape.compilation import keep_untraced
from lowtide.tape.following import Follower
from lowtide.tape.functions import trusted_codes
from lowtide.tape.interrupts import HeldBack, Leaving
from lowtide.tape.ledger import Ledger, Report
from lowtide.tape.library import Shelf, may_follow, shelf_of
from lowtide.tape.operators import declare
from lowtide.tape.policy import Op, Policy, as_policy
from lowtide.tape.recorder import Recorder
from lowtide.tape.scribing import ScribingRecorder
from lowtide.tape.sharding import sharding
from lowtide.tape.sites import Counts, Home, Tree, names_of, watch
from lowtide.tape.tickets import unpack
from lowtide.tape.transforms import hooks_allowed, pop_hooks, push_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

Check = Literal["new", "always", "never"]

_local = threading.local()


def active() -> Recorder | Follower | None:
    """The recorder of this thread, if one is recording."""
    return getattr(_local, "recorder", None)


def begin(recorder: Recorder) -> None:
    """Let ``recorder`` see this thread's modules, operations and saved tensors."""
    keep_untraced()
    recorder.outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    push_hooks(recorder.pack, unpack)
    try:
        watch.start(recorder.enter_module, recorder.leave_module)
        sharding.start()
        backwards.wrap(recorder.step_aside)
        recorder.__enter__()
    except BaseException:
        backwards.unwrap(recorder.step_aside)
        sharding.stop()
        watch.stop()
        pop_hooks()
        raise
    _local.recorder = recorder


def end(recorder: Recorder) -> None:
    """Undo ``begin``."""
    _local.recorder = None
    try:
        recorder.__exit__(None, None, None)
    finally:
        backwards.unwrap(recorder.step_aside)
        sharding.stop()
        watch.stop()
        pop_hooks()
        recorder.seal()


def _captured() -> bool:
    """Whether a CUDA graph is being captured. Random state cannot be read then, nor values compared: no recording."""
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return False
    text = (
        "a CUDA graph is being captured, which forbids reading random state: nothing is recomputed in it, all is kept"
    )
    warnings.warn(text, RecomputeWarning, stacklevel=3)
    return True


_Entry = tuple["Recorder | Follower | None", "Policy | None"]


class _Exit:
    """How a recording is left, see ``Leaving``."""

    def __get__(self, recording: Recording | None, owner: type[Recording]) -> Any:
        if recording is None:
            return owner._leave
        mine: list[_Entry] = []
        recording._entering = mine
        return Leaving(partial(recording._leave_entry, mine), partial(recording._is_last, mine))


class Recording:
    """A context manager that records the forward passes inside it; may be entered once per step, many times."""

    def __init__(
        self, policy: Policy, *, strict: bool, check: Check, check_every: int, names: Tree | None = None
    ) -> None:
        self.policy = policy
        self.names = names
        self.before: Counts | None = None
        """What ran before in the same step, where one step is recorded in several parts."""
        self.strict = strict
        self.check = check
        self.check_every = check_every
        self.steps = 0
        self._ledger = Ledger()
        self._home = Home("", None)
        self._open: list[_Entry] = []
        self._entering: list[_Entry] | None = None  # of the next entry, where a with statement keeps it

    def __enter__(self) -> Recording:
        outer = active()
        if outer is not None:
            self._push((None, outer.use(self.policy)))
        elif self.policy.keeps_all or not torch.is_grad_enabled() or not hooks_allowed() or _captured():
            self._push((None, None))
        else:
            depth = len(self._open)
            try:
                with HeldBack():
                    self._start()
            except BaseException:
                if len(self._open) > depth:  # it had begun when Ctrl-C was let through
                    self._leave()
                raise
        return self

    def _start(self) -> None:
        self.steps += 1
        again = self.check_every > 0 and self.steps % self.check_every == 0
        shelf = self._shelf() if not again else None
        check = "always" if again else self.check
        kind = Recorder if shelf is None else ScribingRecorder
        recorder = kind(self.policy, self._home, self._ledger, check=check, strict=self.strict)
        recorder.names = self.names
        if self.before is not None:
            recorder.calls, recorder.frame.counts = self.before.calls, self.before.operations
        if shelf is None:
            begin(recorder)
            self._push((recorder, None))
        else:
            assert isinstance(recorder, ScribingRecorder)
            follower = Follower(shelf, recorder, begin, end)
            self._push((follower, None))
            _local.recorder = follower.start()

    def _shelf(self) -> Shelf | None:
        """What is known of steps like the one that begins; None if it is to be recorded whatever is known."""
        if self.check == "always" or not may_follow():
            return None
        if self.before is not None and (self.before.calls or self.before.operations):
            return None
        place = sys._getframe(3)  # whoever enters this recording
        shelf = shelf_of(self.policy, self.names, self.strict, id(place.f_code), place.f_lineno)
        return None if shelf.hopeless else shelf

    if TYPE_CHECKING:

        def __exit__(self, *exc: object) -> None: ...

    else:
        __exit__ = _Exit()

    def _push(self, entry: _Entry) -> None:
        self._open.append(entry)
        if self._entering is not None:
            self._entering.append(entry)
            self._entering = None

    def _is_last(self, mine: list[_Entry]) -> bool:
        return bool(mine and self._open and self._open[-1] is mine[-1])

    def _leave(self, *exc: object) -> None:
        self._leave_entry([])

    def _leave_entry(self, mine: list[_Entry], *exc: object) -> None:
        """End the innermost recording; a with statement forgets its entry once that has begun."""
        depth = len(self._open)
        if not depth:
            raise RuntimeError("a recording is left that was not entered, or was left before")
        try:
            with HeldBack():
                mine.clear()
                self._stop()
        except BaseException:
            if len(self._open) == depth:  # Ctrl-C came before it was held back
                self._stop()
            raise

    def _stop(self) -> None:
        recorder, before = self._open.pop()
        if recorder is None:
            outer = active()
            if before is not None and outer is not None:
                outer.use(before)
            return
        if isinstance(recorder, Follower):
            _local.recorder = None
            recorder.stop()
        else:
            end(recorder)

    def report(self) -> Report:
        """What was kept against the policy so far, and why."""
        return self._ledger.report()


def record(
    policy: Policy | Callable[[Op], bool] | Plan | None = None,
    *,
    strict: bool = False,
    check: Check = "new",
    check_every: int = 0,
    model: nn.Module | Sequence[nn.Module] | None = None,
) -> Recording:
    """Record the forward passes inside a ``with`` block and recompute in backward what ``policy`` does not keep.

    The loss, gradients, buffers and random state are those of the plain step, bit for bit; user code runs once.
    Backward may run inside or after the block.

    Args:
        policy: a callable ``policy(op) -> bool``, True keeps the results of ``op``; see ``lowtide.policies``.
            Or a plan, from ``lowtide.solve``. Default: recompute everything that can be recomputed.
        strict: raise ``ReplayMismatch`` instead of warning when an operation is found not to be reproducible.
        check: ``"new"`` proves each operation of each module the first time it is dropped (it is run twice and
            compared bit for bit), ``"always"`` proves every operation, ``"never"`` none.
        check_every: prove every operation again at each N-th use of this recording.
        model: the model, or models, whose module paths the policy or the plan means. Needed where the step calls
            parts of it that look alike one by one; otherwise the outermost module that runs is the model.

    Raises:
        TypeError: ``policy`` is not callable.
        PlanMismatch: when the model runs, if the plan was made for a model with other modules.
        ValueError: ``check`` is not one of the three words.
        ReplayMismatch: under ``strict``, or in backward when a recomputed value differs from the first one.
        RootChanged: in backward, when something a recomputation reads was modified in place in between.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
        >>> with lowtide.record(policy=lowtide.policies.keep_matmuls):
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> loss.backward()
    """
    if check not in ("new", "always", "never"):
        raise ValueError(f'check must be "new", "always" or "never", not {check!r}')
    if policy is None:
        from lowtide.policies import recompute_all

        policy = recompute_all
    elif isinstance(policy, Plan):
        from lowtide.planned import policy_of

        policy = policy_of(policy)
    names = names_of(model)
    return Recording(as_policy(policy), strict=strict, check=check, check_every=check_every, names=names)


def recomputable(subject: Any) -> Any:
    """Declare a custom autograd Function or a registered custom operator safe to recompute.

    Safe means: its forward computes its results from its arguments alone, by operations that torch sees
    (Function), or reproducibly and without writing anything that its schema does not declare (operator).

    Args:
        subject: a ``torch.autograd.Function`` subclass, an operator such as ``torch.ops.mine.fused``, a function
            made by ``torch.library.custom_op``, or a name such as ``"mine::fused"``.

    Returns:
        ``subject``, so that it can be used as a decorator.

    Raises:
        TypeError: ``subject`` is none of these.
    """
    if isinstance(subject, type) and issubclass(subject, torch.autograd.Function):
        trusted_codes.add(subject.forward.__code__)
    elif isinstance(subject, str) and "::" in subject:
        declare(subject.replace("::", "."))
    elif isinstance(subject, torch._ops.OpOverload):
        declare(subject._schema.name.replace("::", "."))
    elif isinstance(subject, torch._ops.OpOverloadPacket):
        declare(subject._qualified_op_name.replace("::", "."))
    elif isinstance(subject, torch.library.CustomOpDef):
        declare(subject._qualname.replace("::", "."))
    else:
        raise TypeError(
            "recomputable takes a torch.autograd.Function subclass, a registered operator or its name "
            f'("namespace::op"), not {subject!r}'
        )
    return subject
