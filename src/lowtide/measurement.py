"""measure: what a plan really costs, beside its prediction, the plain step and PyTorch's own checkpointing.

    snapshot ─▶ forward, that discovers generators, leaves and inputs
    restore  ─▶ under the plan: proofs run
    restore  ─▶ plain, twice: bytes, and what of the results it repeats
    restore  ─▶ each contender: bytes, and where its results differ from the plain ones
    rounds   ─▶ each contender in turn, another one first each round: seconds
    restore

All that the rounds need is done once before.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lowtide.discovery import Discovery
from lowtide.measured import Measurement, Row
from lowtide.observation import Observation, Trial, What
from lowtide.peers import PLAIN, Contender, peers_of
from lowtide.plan import Plan
from lowtide.recording import Recording, record
from lowtide.snapshot import Snapshot
from lowtide.tape.sites import together
from lowtide.tracing.counting import distinct_bytes
from lowtide.tracing.stepping import Step
from lowtide.verdict import Difference
from lowtide.verification import AnyPlan, refuse_lazy, resolve, undisturbed


def measure(
    step: Step,
    model: nn.Module | Sequence[nn.Module],
    plan: AnyPlan,
    *,
    against: Sequence[str] = ("plain",),
    rounds: int = 7,
    optimizer: torch.optim.Optimizer | None = None,
) -> Measurement:
    """Measure peak and time of ``step`` under ``plan``, and compare its results with those of the plain step.

    Gradients are None before each step and made anew in it. In the end parameters, buffers, gradients, random
    state and the rest are as they were, also when the step raises.

    Bytes: on the CPU all that the allocator hands out in one step (activations, gradients, temporaries, also
    inside of kernels), from the profiler's memory events, and what is there all the time (parameters,
    buffers, optimizer states, inputs). On an accelerator ``max_memory_allocated`` after a reset, which is the
    whole process, libraries' workspaces included.

    Seconds: medians of whole steps, forward and backward, contenders in turn. On the CPU they are CPU seconds
    of the process, which other processes disturb little; those of several threads add up. On an accelerator
    they are elapsed seconds, synchronised. Ratios are medians of the ratios within each round.

    Args:
        step: a callable without arguments that runs the forward pass and returns the loss, a scalar tensor.
        model: the model, or models, that the step trains. What is attached to it does nothing meanwhile.
        plan: a plan; a budget (int bytes, ``"12 GiB"``, ``"80%"``), for which one is made; or a hand policy.
        against: peers: ``"torch-per-block"`` (``torch.utils.checkpoint`` around each of the model's repeated
            blocks), ``"torch-selective"`` (the same, keeping matrix products, convolutions and attention).
            ``"plain"`` is always among them. A peer that fails has its error in its row, and so has the
            plain step where it runs out of memory.
        rounds: how often each step is timed.
        optimizer: its states count as memory, as they are. It takes no step.

    Returns:
        The measurement, one row each; it prints as a table.

    Raises:
        GraphError: the step returns no scalar that requires grad, or a parameter has no contents yet.
        ValueError: there is no such peer, or ``rounds`` is less than 1.
        InfeasibleBudget: no plan fits the budget.
        PlanMismatch: the plan was made for another model.

    Example:
        >>> print(lowtide.measure(step, model, plan, against=["torch-per-block"]))  # doctest: +SKIP
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    peers = peers_of(against)
    whole = together(model)
    refuse_lazy(whole)
    with Snapshot(whole, optimizer) as snapshot, undisturbed(whole), _little_garbage():
        bench = _Bench(Trial(step, whole, snapshot), optimizer)
        policy, made = resolve(bench.watched, whole, plan, optimizer)
        recording = record(policy, model=whole)
        bench.warm_up(recording)
        plain, seen, irreproducible = bench.reference()
        others = [Contender("lowtide", lambda: recording), *peers]
        results = [plain, *(bench.judge(one, seen, irreproducible) for one in others)]
        bench.race(results, rounds)
    return Measurement(
        rows=tuple(_with_prediction(result.row(plain), made) for result in results),
        resident_bytes=bench.resident,
        rounds=rounds,
        device=bench.device,
        threads=torch.get_num_threads(),
        irreproducible=tuple(map(str, irreproducible)),
        plan=made,
    )


@dataclass
class _Result:
    """What is known of one contender so far."""

    contender: Contender
    peak: int = 0
    exact: bool | None = None
    difference: str = ""
    failure: str = ""
    seconds: list[float] = field(default_factory=list)

    def row(self, plain: _Result) -> Row:
        """As a row, beside the plain step."""
        if self.failure:
            return Row(self.contender.name, failure=self.failure)
        row = Row(self.contender.name, self.peak, median(self.seconds), self.exact, self.difference)
        if plain.failure:
            return row
        pairs = zip(self.seconds, plain.seconds, strict=True)
        return replace(
            row, peak_ratio=self.peak / plain.peak, seconds_ratio=median(own / other for own, other in pairs)
        )


def _with_prediction(row: Row, plan: Plan | None) -> Row:
    predicted = plan.prediction if plan is not None else None
    if predicted is None or row.failure:
        return row
    if row.name == "lowtide":
        return replace(row, predicted_peak_bytes=predicted.peak_bytes, predicted_seconds=predicted.step_seconds)
    if row.name == "plain" and predicted.plain_peak_bytes:
        return replace(row, predicted_peak_bytes=predicted.plain_peak_bytes, predicted_seconds=predicted.plain_seconds)
    return row


class _Bench:
    """Runs one step in many ways, and counts."""

    def __init__(self, trial: Trial, optimizer: torch.optim.Optimizer | None) -> None:
        self.trial = trial
        self.model = model = trial.model
        self.optimizer = optimizer
        devices = {t.device for t in (*model.parameters(), *model.buffers())}
        self.accelerators = sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
        self.device = ", ".join(map(str, self.accelerators)) or "cpu"
        self.resident = 0
        self.discovery = Discovery(trial.snapshot)
        self.watched = self.discovery.watch(trial.step)
        self.fresh()

    def fresh(self) -> None:
        """Put everything back as it was, but leave no gradients."""
        self.trial.snapshot.restore()
        self.clear()

    def clear(self) -> None:
        """Leave no gradients, and nothing that the garbage collector would free in the course of a step."""
        for tensor in self.trial.snapshot.owners():
            tensor.grad = None
        gc.collect()

    def warm_up(self, recording: Recording) -> None:
        """Do what is only done once, and count what is there all the time, now that the inputs are known."""
        self.fresh()
        self.trial.take(lambda: recording)
        self.fresh()
        known = [*self.model.parameters(), *self.model.buffers(), *self._states()]
        self.resident = distinct_bytes(known) + self.discovery.inputs(known)

    def _states(self) -> list[Tensor]:
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    # ---- bytes and results ---------------------------------------------------------------------------------

    def reference(self) -> tuple[_Result, Observation | None, dict[What, Difference]]:
        """The plain step, what it leaves behind, and where it differs from itself."""
        result = _Result(PLAIN)
        try:
            result.peak, plain = self._observe(PLAIN)
            self.fresh()
            again = self.trial.look(*self.trial.take()) | self.trial.look_at_end()
        except torch.OutOfMemoryError as error:
            result.failure = f"{type(error).__name__}: {error}"
            return result, None, {}
        irreproducible = self.trial.differences(plain, again)
        result.exact = not irreproducible
        return result, plain, irreproducible

    def judge(self, contender: Contender, plain: Observation | None, irreproducible: Collection[What]) -> _Result:
        """The peak of one contender, and whether its results are the plain ones."""
        result = _Result(contender)
        try:
            result.peak, seen = self._observe(contender)
        except Exception as error:
            if contender.wrap is None:
                raise
            result.failure = f"{type(error).__name__}: {error}"
        if plain is not None and not result.failure:
            found = self.trial.differences(plain, seen).items()
            differences = [difference for what, difference in found if what not in irreproducible]
            result.exact = not differences
            result.difference = str(differences[0]) if differences else ""
        return result

    def _observe(self, contender: Contender) -> tuple[int, Observation]:
        """Peak bytes of one step, and what it leaves behind."""
        self.fresh()
        with contender.on(self.model):
            if self.accelerators:
                peak, done = self._accelerator_peak(lambda: self.trial.take(contender.around))
            else:
                peak, done = _allocated_peak(lambda: self.trial.take(contender.around))
                peak += self.resident
        return peak, self.trial.look(*done) | self.trial.look_at_end()

    def _accelerator_peak(self, take: Callable[[], Any]) -> tuple[int, Any]:
        for device in self.accelerators:
            torch.accelerator.synchronize(device)
            torch.accelerator.reset_peak_memory_stats(device)
        done = take()
        for device in self.accelerators:
            torch.accelerator.synchronize(device)
        return sum(map(torch.accelerator.max_memory_allocated, self.accelerators)), done

    # ---- seconds -------------------------------------------------------------------------------------------

    def race(self, results: list[_Result], rounds: int) -> None:
        """Time the steps of all who run, in turn."""
        running = [result for result in results if not result.failure]
        self.fresh()
        for number in range(rounds):
            first = number % len(running)
            for result in (*running[first:], *running[:first]):
                result.seconds.append(self._seconds(result.contender))

    def _seconds(self, contender: Contender) -> float:
        self.clear()
        with contender.on(self.model):
            begin = self._now()
            with contender.around():
                loss = self.trial.step()
            torch.autograd.backward(loss)
            return self._now() - begin

    def _now(self) -> float:
        if not self.accelerators:
            return time.process_time()
        for device in self.accelerators:
            torch.accelerator.synchronize(device)
        return time.perf_counter()


def _allocated_peak(take: Callable[[], Any]) -> tuple[int, Any]:
    """Most bytes that the CPU allocator had handed out at once in ``take``, and its result."""
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        done = take()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert results is not None
    live = peak = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, done


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Make the collector look at new objects alone, so that calling it before each step costs little."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the profiler from writing two lines to standard error; it looks when it is first used."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
