"""What a program is run under: nothing, or lowtide with a policy drawn from a seed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.tape.backwards import backwards
from lowtide.tape.interrupts import without

from .programs import Decisions, Setting


class Policy:
    """Ask `Decisions` about every op by its name and running count, and note what was asked and dropped."""

    def __init__(self, decisions: Decisions) -> None:
        self.decisions = decisions
        self.asked: Counter[str] = Counter()
        self.dropped: list[tuple[str, int]] = []

    def __call__(self, op: Any) -> bool:
        """Return whether the op's results are kept."""
        count = self.asked[op.name]
        self.asked[op.name] += 1
        keeps = self.decisions.keeps(op.name, count)
        if not keeps:
            self.dropped.append((op.name, count))
        return keeps


class Recorder:
    """Make the contexts one program runs in; afterwards `policy` and `kept` tell what happened."""

    def __init__(
        self,
        setting: Setting,
        make: Callable[[Policy], AbstractContextManager[Any]],
        checkpoint: Callable[..., Any] | None = None,
    ) -> None:
        self.policy = Policy(setting.decisions)
        self._make = make
        self._checkpoint = checkpoint
        self._shared = make(self.policy) if setting.one_recording else None
        self.recordings: list[Any] = []

    def __call__(self) -> AbstractContextManager[Any]:
        recording = self._shared or self._make(self.policy)
        if recording not in self.recordings:
            self.recordings.append(recording)
        return recording

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, as a checkpointed region where the recorder knows such."""
        return self._checkpoint(function, *args) if self._checkpoint else function(*args)

    def kept(self) -> Counter[str]:
        """Count, as "op: reason", what was kept against the policy."""
        rows: Counter[str] = Counter()
        for recording in self.recordings:
            if hasattr(recording, "report"):
                for row in recording.report().kept:
                    rows[f"{row.op}: {row.reason}"] += row.count
        return rows


MakeRecorder: TypeAlias = Callable[[Setting], Recorder]


def plain_recorder(setting: Setting) -> Recorder:
    """Record nothing."""
    return Recorder(setting, lambda policy: contextlib.nullcontext())


@contextlib.contextmanager
def copying(policy: Policy) -> Iterator[None]:
    """Save copies for backward."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        yield


def copying_recorder(setting: Setting) -> Recorder:
    """Save copies for backward, so that overwriting a saved tensor harms nothing."""
    return Recorder(dataclasses.replace(setting, one_recording=False), copying)


class Bystander(TorchDispatchMode):
    """Run every op as it is; step aside for backward passes as a recorder does."""

    def __enter__(self) -> Bystander:
        backwards.wrap(self.step_aside)
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        backwards.unwrap(self.step_aside)

    def step_aside(self, creates_graph: bool, run: Callable[[], Any]) -> Any:
        """Run a backward pass that begins inside, without looking on unless it makes a graph."""
        depth = torch._C._len_torch_dispatch_stack()
        on_top = depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is self
        return without(self, run) if on_top and not creates_graph else run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op."""
        return func(*args, **(kwargs or {}))


def bystander_recorder(setting: Setting) -> Recorder:
    """Only have a dispatch mode on: tells PyTorch's own doing from a recorder's."""
    return Recorder(dataclasses.replace(setting, one_recording=False), lambda policy: Bystander())


def lowtide_recorder(setting: Setting) -> Recorder:
    """Record with lowtide."""
    import lowtide

    from .support import Declared

    lowtide.recomputable(Declared)

    def make(policy: Policy) -> AbstractContextManager[Any]:
        return lowtide.record(
            policy=policy, strict=setting.strict, check=setting.check, check_every=setting.check_every
        )

    return Recorder(setting, make, lowtide.checkpoint)
