"""Where the decisions for an attached model come from: a plan or policy that is given, or a budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.attached_step import Call, Step
from lowtide.budget import budget_bytes
from lowtide.errors import LowtideError
from lowtide.free_memory import free_bytes
from lowtide.graph import StepGraph
from lowtide.interception import optimizers
from lowtide.ladder import Ladder
from lowtide.plan import Plan, site_parts
from lowtide.policies import segments
from lowtide.recording import Recording, active, record
from lowtide.shelf import Kind, Shelf
from lowtide.tape.policy import Op, Policy
from lowtide.tape.sites import Tree, together
from lowtide.tracing.counting import distinct_bytes
from lowtide.tracing.observing import Observation
from lowtide.tracing.stepping import optimizer_bytes
from lowtide.units import format_bytes

log = logging.getLogger("lowtide")

Context = AbstractContextManager[Any]
Models = Callable[[], list[nn.Module]]
"""The attached models that are still alive."""


_MOST_RECORDINGS = 64
"""Plans whose recordings are remembered; the oldest are forgotten."""


class Source:
    """Decides what each call of a step runs inside."""

    plan: Plan | None = None
    """In force at the latest call."""

    def __init__(self, names: Tree, *, strict: bool) -> None:
        self.names = names
        self.strict = strict
        self.notes: dict[str, None] = {}
        self.recordings: dict[Any, Recording] = {}

    def begin(self, call: Call, *, accumulates: bool) -> Step:
        """The step that begins with ``call``."""
        del call
        return Step(accumulates=accumulates)

    def context(self, step: Step) -> Context:
        """What the latest call of ``step`` runs inside; says by ``step.planned`` whether that is a plan."""
        raise NotImplementedError

    def ended(self, step: Step) -> None:
        """``step`` is over."""

    def note(self, text: str) -> None:
        """Remember that something went another way than planned."""
        if text not in self.notes:
            self.notes[text] = None
            log.info(text)

    def recording(self, source: Plan | Policy | Callable[[Op], bool], step: Step) -> Recording:
        """The recording under ``source``, going on from what ran before in ``step``."""
        if source not in self.recordings:
            if len(self.recordings) >= _MOST_RECORDINGS:
                del self.recordings[next(iter(self.recordings))]
            recording = self.recordings[source] = record(source, strict=self.strict)
            recording.names = self.names
        recording = self.recordings[source]
        recording.before = step.counts
        return recording


class Given(Source):
    """A plan or a hand policy."""

    def __init__(self, source: Plan | Policy | Callable[[Op], bool], names: Tree, *, strict: bool) -> None:
        super().__init__(names, strict=strict)
        self.source = source
        self.plan = source if isinstance(source, Plan) else None
        self._each: bool | None = None

    def context(self, step: Step) -> Context:
        if len(step.calls) > 1 and self._each_by_itself(step):
            step.counts.calls.clear()
            step.counts.operations.clear()
        return self.recording(self.source, step)

    def _each_by_itself(self, step: Step) -> bool:
        """Whether the plan is for a step with one call: it decides nothing about what comes after the first."""
        if self._each is None and self.plan is not None:
            first = dict(step.counts.calls)
            parts = (site_parts(site) for site in self.plan.recompute)
            numbers = ((path, int(tail.partition(":")[0])) for path, tail in parts)
            self._each = not any(number >= first.get(path, 1) for path, number in numbers)
        return bool(self._each)


class Budgeted(Source):
    """A budget: steps are watched, planned for, and watched again when they are of another kind."""

    def __init__(
        self,
        budget: int | str,
        models: Models,
        names: Tree,
        *,
        given: Sequence[torch.optim.Optimizer] = (),
        several: bool = False,
        strict: bool = False,
    ) -> None:
        super().__init__(names, strict=strict)
        self.budget = budget
        self.models = models
        self.several = several
        self.shelf = Shelf()
        self._given = list(given)
        self._tightened = False
        self._planned_states: tuple[int, ...] = ()

    def begin(self, call: Call, *, accumulates: bool) -> Step:
        self._count_states()
        if active() is not None or not self.shelf.wants_to_watch(call):
            return Step(accumulates=accumulates)
        if self.shelf.kinds:
            self.note(f"another kind of step, or a larger shape ({call}): this step is watched and planned anew")
        return Step(accumulates=accumulates, watched=Observation(self._model(), self.names))

    def context(self, step: Step) -> Context:
        if step.watched is not None and not step.watched.failed:
            step.planned = False
            return step.watched
        found = self.shelf.find(step.calls)
        if found is None:
            step.planned = False
            if self.shelf.kinds:
                self.note(f"a call beyond the planned ones ({step.calls[-1]}): it ran thriftily, without a plan")
            return self.recording(_THRIFTY, step)
        kind, share = found
        ladder = kind.ladder(step.accumulates, self.bytes_for)
        plan = ladder.choose(share)
        if plan is not self.plan:
            log.info("planned for %s: %s", format_bytes(ladder.budget), plan.solver)
        self.plan = plan
        return self.recording(plan, step)

    def ended(self, step: Step) -> None:
        if step.watched is not None:
            graph = step.watched.graph()
            if graph is None:
                self.note("a watched step had no backward pass, or failed; another one is watched")
            else:
                graph = replace(graph, optimizer_bytes=self._state_bytes())
                self.shelf.put(Kind(graph, step.calls))
        if step.began_backward:
            self.shelf.ended(step.calls)
        if step.waiting:
            self.note("backward did not come to every call of a step; what those still hold is not in the next plan")

    # ---- bytes ----------------------------------------------------------------------------------------------

    def bytes_for(self, graph: StepGraph) -> int:
        """The budget in bytes for a step of ``graph``; one that was tightened for another is no less than it needs."""
        if self._tightened:
            bytes_ = budget_bytes(self.budget, graph)
            return max(bytes_, Ladder(graph, bytes_).lowest())
        if self.budget == "auto":
            first = next((p for model in self.models() for p in model.parameters()), None)
            device = first.device if first is not None else torch.device("cpu")
            return free_bytes(device) + graph.resident_bytes
        return budget_bytes(self.budget, graph)

    def tighten(self, factor: float) -> tuple[int, int] | None:
        """Lower the budget to ``factor`` of what the plan in force needs, or to the least that such a step fits.

        Returns:
            The bytes before and after; None if there is nothing to plan with, or nothing lower.
        """
        ladder = self._ladder_in_force()
        prediction = self.plan.prediction if self.plan is not None else None
        if ladder is None or prediction is None:
            return None
        before = prediction.peak_bytes
        lowest = ladder.lowest(max(rung for rung, plan in ladder.plans.items() if plan == self.plan))
        if before <= lowest:
            return None
        after = max(lowest, int(before * factor))
        self.budget, self._tightened = after, True
        for kind in self.shelf.kinds:
            kind.ladders.clear()
        return before, after

    def smallest_budget(self) -> int | None:
        """The smallest budget that a plan for the latest kind of step fits, in bytes."""
        ladder = self._ladder_in_force()
        return ladder.lowest() if ladder is not None else None

    def graph_in_force(self) -> StepGraph | None:
        """The step that the plan in force was made for."""
        ladder = self._ladder_in_force()
        return ladder.graph if ladder is not None else None

    def _ladder_in_force(self) -> Ladder | None:
        ladders = (ladder for kind in self.shelf.kinds for ladder in kind.ladders.values())
        return next((ladder for ladder in ladders if self.plan in ladder.plans.values()), None)

    def _model(self) -> nn.Module:
        models = self.models()
        return together(models) if self.several else models[0]

    def _count_states(self) -> None:
        """Plan anew where optimizers have got states since."""
        states = tuple(len(optimizer.state) for optimizer in self._optimizers())
        if states != self._planned_states:
            self._planned_states = states
            size = self._state_bytes()
            if any(kind.graph.optimizer_bytes != size for kind in self.shelf.kinds):
                self.shelf.renew(size)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return self._given or optimizers.of(self.models())

    def _state_bytes(self) -> int:
        """Bytes of optimizer states: as they are, or as those that were given will be."""
        found = self._optimizers()
        tensors = [v for one in found for state in one.state.values() for v in state.values() if isinstance(v, Tensor)]
        fresh = (one for one in self._given if not one.state)
        return distinct_bytes(tensors) + sum(_expected(one) for one in fresh)


_THRIFTY = segments(keep_last=False)


def _expected(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the states that an optimizer will have after its first step; 0 if its kind is not known."""
    parameters = nn.ParameterList(p for group in optimizer.param_groups for p in group["params"])
    try:
        return optimizer_bytes(type(optimizer).__name__, parameters)
    except LowtideError:
        return 0
