"""Watch one training step of somebody else's loop: its forward passes here, its backward wherever it is started.

with observation:            the tracer records, drops thriftily, proves; once for each call of a model
    model(...)
loss = ...                   outside: not seen, but what backward reads of it is counted
loss.backward()              torch.autograd's entry is replaced meanwhile, so that the tracer sees it
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lowtide.graph import Event, StepGraph
from lowtide.recording import begin, end
from lowtide.tape.sharding import local, sharding
from lowtide.tape.sites import Tree
from lowtide.tracing.counting import distinct_bytes
from lowtide.tracing.stepping import graph_of
from lowtide.tracing.tracer import Tracer


class Observation:
    """A context manager around each forward pass of one step; it is shown the backward passes as well."""

    def __init__(self, model: nn.Module, names: Tree, tracer: Tracer | None = None) -> None:
        self.model = model
        self.failed = False
        self.tracer = tracer or Tracer(repeats=1, check="new")
        self.tracer.names = names
        self._gradients: dict[int, str] = {}
        self._untouched_bytes = 0
        self._complete = False

    @property
    def complete(self) -> bool:
        """Whether backward has asked for something of the forward passes."""
        return self._complete and not self.failed

    def __enter__(self) -> Observation:
        self.tracer.reopen()
        begin(self.tracer)
        return self

    def __exit__(self, *exc: object) -> None:
        end(self.tracer)
        self.failed = self.failed or exc[0] is not None

    def backward(self, run: Any) -> Any:
        """Run a backward pass under the tracer."""
        seen = len(self.tracer.events)
        sharding.start()
        try:
            with self.tracer:
                result = run()
        except BaseException:
            self.failed = True
            raise
        finally:
            sharding.stop()
        if any(kind == Event.UNPACK for kind, _ in self.tracer.events[seen:]):
            self._complete = True
            self._name_gradients()
        return result

    def _name_gradients(self) -> None:
        """Now, because the loop may let go of them before the next step begins."""
        there = [(name, local(p.grad)) for name, p in self.model.named_parameters() if p.grad is not None]
        numbers = ((self.tracer.known_storage(gradient), name) for name, gradient in there)
        self._gradients |= {number: name for number, name in numbers if number is not None}
        self._untouched_bytes = distinct_bytes(g for _, g in there if self.tracer.known_storage(g) is None)

    def graph(self) -> StepGraph | None:
        """What was seen, without optimizer states, or None if there was nothing to see."""
        if not self.tracer.saves or not self.complete:
            return None
        for number, name in self._gradients.items():
            self.tracer.storages[number][1:] = ["gradient", name]
        return graph_of(self.tracer, self.model, None, gradient_bytes=self._untouched_bytes)
