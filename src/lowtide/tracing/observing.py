"""Watch one training step of somebody else's loop: its forward here, its backward wherever it is started.

with observation:            the tracer records, drops thriftily, proves
    model(...)
loss = ...                   outside: not seen, but what backward reads of it is counted
loss.backward()              torch.autograd's entry is replaced meanwhile, so that the tracer sees it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowtide.graph import StepGraph
from lowtide.recording import begin, end
from lowtide.tape.backwards import backwards
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
            backwards.wrap(self.backward)
        else:
            self.complete = True
            self.tracer.saves.clear()

    def cancel(self) -> None:
        """Stop waiting."""
        backwards.unwrap(self.backward)

    def backward(self, creates_graph: bool, run: Any) -> Any:
        """Run a backward pass under the tracer."""
        del creates_graph
        seen = len(self.tracer.events)
        with self.tracer:
            result = run()
        if any(kind == 2 for kind, _ in self.tracer.events[seen:]):  # something of the forward was unpacked
            self.complete = True
            backwards.unwrap(self.backward)
        return result

    def graph(self, optimizer: torch.optim.Optimizer | None) -> StepGraph | None:
        """What was seen, or None if there was nothing to see."""
        if not self.tracer.saves:
            return None
        return graph_of(self.tracer, self.model, optimizer, gradient_bytes=0)
