"""Handle: what ``attach`` returns, and what runs the calls of the attached models."""

from __future__ import annotations

import logging
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lowtide import exhaustion
from lowtide.attach_report import AttachReport
from lowtide.attached_step import Call, Step, call_of
from lowtide.errors import AttachError, PlanMismatch
from lowtide.interception import interception
from lowtide.interception import optimizers as watched_optimizers
from lowtide.plan import Plan, site_parts
from lowtide.planned import seats
from lowtide.sources import Budgeted, Given, Source
from lowtide.step_count import StepCount, countable, states_of
from lowtide.tape.backwards import backwards
from lowtide.tape.operators import tensors_in
from lowtide.tape.policy import Op, Policy
from lowtide.tape.sites import Tree, structure_of, tree_of
from lowtide.tape.transforms import hooks_allowed
from lowtide.units import format_bytes

log = logging.getLogger("lowtide")


class Handle:
    """What ``attach`` returns: the plan in force, a report, and ``detach``; also a context manager."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        source: Plan | Policy | Callable[[Op], bool] | int | str,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        strict: bool = False,
        together: bool = False,
    ) -> None:
        self._models = [weakref.ref(model) for model in models]
        names = _names(models, source if isinstance(source, Plan) else None, together)
        self.source: Source
        if isinstance(source, (int, str)):
            self.source = Budgeted(source, self.models, names, given=optimizers, several=together, strict=strict)
        else:
            self.source = Given(source, names, strict=strict)
        self._calls = self._planned_calls = self._steps = 0
        self._step: Step | None = None
        self._local = threading.local()
        self._lock = threading.Lock()
        self._in_force = _InForce()
        _refuse_nested(models, self)
        interception.add(models, self)
        watched_optimizers.watch()

    # ---- what people use ------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None until there is one, and under a policy."""
        return self.source.plan

    @property
    def smallest_budget(self) -> int | None:
        """The smallest budget that a plan fits, in bytes; None before there is a plan, and without a budget."""
        return self.source.smallest_budget() if isinstance(self.source, Budgeted) else None

    def models(self) -> list[nn.Module]:
        """The attached models that are still alive."""
        return [model for ref in self._models if (model := ref()) is not None]

    def detach(self) -> None:
        """Take everything off the models again; graphs that are still alive can be run backward."""
        interception.remove([ref() for ref in self._models], self)
        self._close_step()

    def report(self) -> AttachReport:
        """The plan in force, what it costs, how many calls it served, and what went another way."""
        reports = [recording.report() for recording in self.source.recordings.values()]
        predicted = self.plan.prediction if self.plan is not None else None
        policy = self.source.source if isinstance(self.source, Given) and self.plan is None else None
        return AttachReport(
            plan=self.plan,
            policy=repr(policy) if policy is not None else "",
            calls=self._calls,
            planned_calls=self._planned_calls,
            steps=self._steps,
            steps_since=self._in_force.steps,
            budget_bytes=self.plan.budget_bytes if self.plan is not None else None,
            predicted_peak_bytes=predicted.peak_bytes if predicted else None,
            measured_peak_bytes=self._in_force.peak_bytes,
            predicted_seconds=predicted.step_seconds if predicted else None,
            measured_seconds=statistics.median(self._in_force.seconds) if self._in_force.seconds else None,
            fallbacks=(*self.source.notes, *self._strangers()),
            kept=tuple(dict.fromkeys(row for report in reports for row in report.kept)),
            warnings=tuple(dict.fromkeys(text for report in reports for text in report.warnings)),
        )

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        names = ", ".join(type(model).__name__ for model in self.models())
        return f"Handle({names}, {self.plan or 'no plan'})"

    # ---- one call of a model --------------------------------------------------------------------------------

    def run(self, number: int, original: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the model as it is, under a plan where there is something to plan."""
        if getattr(self._local, "inside", False) or not torch.is_grad_enabled() or not _recordable(model, args, kwargs):
            return original(model, *args, **kwargs)
        if not self._lock.acquire(blocking=False):
            self.source.note("called from two threads at once: one call is planned, the other keeps everything")
            return original(model, *args, **kwargs)
        self._local.inside = True
        try:
            with self._noting(), self._recorded(number, args, kwargs) as follow:
                output = original(model, *args, **kwargs)
                follow(output)
                return output
        finally:
            self._local.inside = False
            self._lock.release()

    @contextmanager
    def _recorded(self, number: int, args: Any, kwargs: Any) -> Iterator[Callable[[Any], None]]:
        """One call, under the plan of the step that it belongs to."""
        call, accumulates = call_of(number, self.models(), args, kwargs)
        step = self._step_of(call, accumulates)
        step.calls.append(call)
        self._calls += 1
        context = self.source.context(step)
        self._planned_calls += step.planned
        try:
            with ExitStack() as stack:
                for one in self._counting(step, args, kwargs):
                    stack.enter_context(one)
                stack.enter_context(context)
                yield step.follow
        except BaseException:
            step.failed = True
            raise

    def _step_of(self, call: Call, accumulates: bool) -> Step:
        step = self._step
        if step is None or step.over:
            self._close_step()
            step = self._step = self.source.begin(call, accumulates=accumulates)
            backwards.wrap(self._backward)
        return step

    def _close_step(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        backwards.unwrap(self._backward)
        self.source.ended(step)
        if step.began_backward:
            self._steps += 1
            self._in_force.ended(step, self.plan)

    def drop_step(self) -> None:
        """Forget the step under way, which failed and is run again."""
        if self._step is not None:
            self._step.failed = True
            self._step.reached.clear()
            self._close_step()

    def _counting(self, step: Step, args: Any, kwargs: Any) -> list[Any]:
        """A count of the step's memory, in the first step under a plan."""
        if step.count is None and len(step.calls) == 1 and step.planned and self.plan is not None:
            models = self.models()
            new = self._in_force.to_be_counted(self.plan, states_of(models))
            if new and countable(models, tensors_in((args, kwargs))):
                step.count = StepCount(models)
        return [step.count] if step.count is not None else []

    def _backward(self, creates_graph: bool, run: Callable[[], Any]) -> Any:
        """Run a backward pass, which may be that of the step under way."""
        del creates_graph
        step = self._step
        if step is None:
            return run()
        try:
            with self._noting(step):
                if step.watched is not None:
                    result = step.watched.backward(run)
                else:
                    with step.count or nullcontext():
                        result = run()
        except BaseException:
            step.failed = True
            raise
        step.seconds = time.perf_counter() - step.start
        return result

    def model_died(self) -> None:
        """One of the models is gone: nothing is left to plan for."""
        if not self.models():
            self._close_step()

    def _strangers(self) -> list[str]:
        """Modules that ran under the plan, but that it does not know."""
        plan, names = self.plan, self.source.names
        if plan is None or not plan.structure:
            return []
        known = {path for path, _ in plan.structure} | {site_parts(site)[0] for site in plan.recompute}
        graph = self.source.graph_in_force() if isinstance(self.source, Budgeted) else None
        if graph is not None:  # a loss that is made anew in each forward is no part of the model, but was watched
            known |= {op.module for op in graph.ops}
        paths = dict.fromkeys(home.path for home in names.homes.values() if home.path not in known)
        return [f"the plan does not know {path}: what it makes is kept" for path in paths]

    # ---- out of memory --------------------------------------------------------------------------------------

    @contextmanager
    def _noting(self, step: Step | None = None) -> Iterator[None]:
        """Say on an error that memory ran out what filled it, and what would fit."""
        try:
            yield
        except Exception as error:
            if exhaustion.is_exhaustion(error) and (step is None or step.calls):
                exhaustion.add_note(error, self._on_exhaustion())
            raise

    def _on_exhaustion(self) -> Iterator[str]:
        try:
            yield from self._memory_lines()
        except Exception as error:  # memory is short: what can be said is said, the error itself counts
            log.debug("no more about the memory: %r", error)

    def _memory_lines(self) -> Iterator[str]:
        models = self.models()
        weights = {t.untyped_storage()._cdata: t.nbytes for m in models for t in (*m.parameters(), *m.buffers())}
        gradients = sum(p.grad.nbytes for m in models for p in m.parameters() if p.grad is not None)
        there = {"parameters and buffers": sum(weights.values()), "gradients": gradients}
        yield f"memory ran out in a training step; {exhaustion.largest(there)}"
        step, source = self._step, self.source
        if step is not None and step.watched is not None:
            held = exhaustion.largest(step.watched.tracer.held())
            yield f"the step was being watched, nothing is planned yet; it held {held}"
        if isinstance(source, Budgeted):
            yield from _planned_lines(source)
        elif self.plan is None:
            yield f"the hand policy in force was {source.source!r}"  # type: ignore[attr-defined]


def _planned_lines(source: Budgeted) -> Iterator[str]:
    graph, plan = source.graph_in_force(), source.plan
    if graph is None or plan is None:
        return
    table = graph.memory_table(plan)
    sizes: dict[str, int] = {}
    for row in table.rows:
        name = f"{row.module or 'no module'} ({row.kind})"
        sizes[name] = sizes.get(name, 0) + row.bytes
    yield f"the plan in force expects a peak of {format_bytes(table.total_bytes)} {table.where}:"
    yield f"  {exhaustion.largest(sizes)}"
    lowest = source.smallest_budget()
    if lowest is not None:
        yield f"the smallest budget that a plan fits is {format_bytes(lowest)} ({lowest} bytes)"


class _InForce:
    """What is known of the steps under the plan in force."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.steps = 0
        self.peak_bytes: int | None = None
        self.states = 0
        """How many parameters had optimizer states when the peak was counted."""
        self.seconds: deque[float] = deque(maxlen=15)

    def to_be_counted(self, plan: Plan | None, states: int) -> bool:
        """Whether no step under ``plan`` was counted yet, or only before optimizers had these states."""
        return plan is not self.plan or states != self.states

    def ended(self, step: Step, plan: Plan | None) -> None:
        """A step is over that ended under ``plan``."""
        if not step.planned or step.failed:
            return
        if plan is not self.plan:
            self.__init__()  # type: ignore[misc]
            self.plan = plan
        self.steps += 1
        if step.count is not None:
            self.peak_bytes, self.states = step.count.peak_bytes, step.count.states
        elif step.seconds:
            self.seconds.append(step.seconds)


def _recordable(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether this call needs a tape: something requires grad, and it is not itself run by a backward pass."""
    if torch._C._current_graph_task_id() != -1 or not hooks_allowed():
        return False
    return any(p.requires_grad for p in model.parameters()) or any(t.requires_grad for t in tensors_in((args, kwargs)))


def _names(models: Sequence[nn.Module], plan: Plan | None, together: bool) -> Tree:
    """What the modules are called in the plan: as in the models, unless it was made for more or less than them."""
    if together:
        tree = Tree([(str(number), model) for number, model in enumerate(models)])
        if plan is not None:
            plan.check(tree.structure() or ())
        return tree
    model = models[0]
    if plan is None or not plan.structure:
        return tree_of(model)
    structure = structure_of(model)
    above, below = seats(structure, plan.structure)
    if not above and not below:
        plan.check(structure)
    if len(above) + len(below) > 1:
        raise PlanMismatch(
            f"this {type(model).__name__} may be {' or '.join(above or below)} of the model that the plan was made "
            "for; attach that model, or trace this one and solve again"
        )
    return tree_of(model.get_submodule(below[0]) if below else model, above[0] if above else "")


def _refuse_nested(models: Sequence[nn.Module], handle: Handle) -> None:
    """Refuse a budget inside of a budget: neither could be kept.

    Raises:
        AttachError: one of the models is a part of an attached one, or has one in it.
    """
    if not isinstance(handle.source, Budgeted):
        return
    mine = {id(part): part for model in models for part in model.modules()}
    for other, model in interception.attached():
        if not isinstance(other, Handle) or not isinstance(other.source, Budgeted) or id(model) in map(id, models):
            continue
        theirs = {id(part) for part in model.modules()}
        if id(model) in mine or any(id(one) in theirs for one in models):
            raise AttachError(
                f"a {type(model).__name__} with a budget of its own and this one have parts in common; detach it "
                "first, and give the outer one the budget"
            )
