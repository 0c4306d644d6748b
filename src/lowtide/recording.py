"""``lowtide.record``: run a forward pass under a policy that says what to keep for backward."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal

import torch

from lowtide.plan import Plan
from lowtide.tape.backwards import backwards
from lowtide.tape.functions import trusted_codes
from lowtide.tape.ledger import Ledger, Report
from lowtide.tape.operators import declare
from lowtide.tape.policy import Op, Policy, as_policy
from lowtide.tape.recorder import Recorder
from lowtide.tape.sites import Home, watch
from lowtide.tape.tickets import unpack
from lowtide.tape.transforms import hooks_allowed, pop_hooks, push_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

Check = Literal["new", "always", "never"]

_local = threading.local()


def active() -> Recorder | None:
    """The recorder of this thread, if one is recording."""
    return getattr(_local, "recorder", None)


def begin(recorder: Recorder) -> None:
    """Let ``recorder`` see this thread's modules, operations and saved tensors."""
    recorder.outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    push_hooks(recorder.pack, unpack)
    try:
        watch.start(recorder.enter_module, recorder.leave_module)
        backwards.wrap(recorder.step_aside)
        recorder.__enter__()
    except BaseException:
        backwards.unwrap(recorder.step_aside)
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
        watch.stop()
        pop_hooks()
        recorder.seal()


class Recording:
    """A context manager that records the forward passes inside it; may be entered once per step, many times."""

    def __init__(self, policy: Policy, *, strict: bool, check: Check, check_every: int) -> None:
        self.policy = policy
        self.strict = strict
        self.check = check
        self.check_every = check_every
        self.steps = 0
        self._ledger = Ledger()
        self._home = Home("", None)
        self._open: list[tuple[Recorder | None, Policy | None]] = []

    def __enter__(self) -> Recording:
        outer = active()
        if outer is not None:
            self._open.append((None, outer.use(self.policy)))
        elif not torch.is_grad_enabled() or not hooks_allowed():
            self._open.append((None, None))
        else:
            self._start()
        return self

    def _start(self) -> None:
        self.steps += 1
        again = self.check_every > 0 and self.steps % self.check_every == 0
        recorder = Recorder(
            self.policy, self._home, self._ledger, check="always" if again else self.check, strict=self.strict
        )
        begin(recorder)
        self._open.append((recorder, None))

    def __exit__(self, *exc: object) -> None:
        recorder, before = self._open.pop()
        if recorder is None:
            outer = active()
            if before is not None and outer is not None:
                outer.use(before)
            return
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
    return Recording(as_policy(policy), strict=strict, check=check, check_every=check_every)


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
