"""Watch one training step of somebody else's loop: its forward here, its backward wherever it is started.

    with observation:            the tracer records, drops thriftily, proves
        model(...)
    loss = ...                   outside: not seen, but what backward reads of it is counted
    loss.backward()              torch.autograd's entry is replaced meanwhile, so that the tracer sees it
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from lowtide.graph import StepGraph
from lowtide.recording import begin, end
from lowtide.tracing.stepping import graph_of
from lowtide.tracing.tracer import Tracer


class Observation:
    """A context manager around one forward pass; afterwards it waits for the backward pass."""

    def __init__(self, model: nn.Module, size: Any) -> None:
        self.model = model
        self.size = size
        self.complete = False
        self.tracer = Tracer(repeats=1, check="new")
        self._existing = sum(p.grad is not None for p in model.parameters())

    def __enter__(self) -> Observation:
        begin(self.tracer)
        return self

    def __exit__(self, *exc: object) -> None:
        end(self.tracer)
        if exc[0] is None:
            _backwards.expect(self)
        else:
            self.complete = True
            self.tracer.saves.clear()

    def cancel(self) -> None:
        """Stop waiting."""
        _backwards.forget(self)

    def backward(self, run: Any) -> Any:
        """Run a backward pass under the tracer."""
        seen = len(self.tracer.events)
        with self.tracer:
            result = run()
        if any(kind == 2 for kind, _ in self.tracer.events[seen:]):  # something of the forward was unpacked
            self.complete = True
            _backwards.forget(self)
        return result

    def graph(self, optimizer: torch.optim.Optimizer | None) -> StepGraph | None:
        """What was seen, or None if there was nothing to see."""
        if not self.tracer.saves:
            return None
        return graph_of(self.tracer, self.model, optimizer, gradient_bytes=0)


class _Backwards:
    """Replaces the function through which torch starts backward passes while somebody waits for one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Observation] = []
        self._original: Any = None

    def expect(self, observation: Observation) -> None:
        """Let ``observation`` see the backward passes to come."""
        with self._lock:
            self._waiting.append(observation)
            if len(self._waiting) == 1:
                self._original = torch.autograd._engine_run_backward
                torch.autograd._engine_run_backward = self._run

    def forget(self, observation: Observation) -> None:
        """``observation`` has seen enough."""
        with self._lock:
            if observation in self._waiting:
                self._waiting.remove(observation)
                if not self._waiting:
                    torch.autograd._engine_run_backward = self._original

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        original = self._original
        waiting = list(self._waiting)

        def nested(rest: list[Observation]) -> Any:
            if not rest:
                return original(*args, **kwargs)
            return rest[0].backward(lambda: nested(rest[1:]))

        return nested(waiting)


_backwards = _Backwards()
