"""trace and rehearse: run a step once, for real or on fake tensors, and say what it computes and holds."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import GraphError
from lowtide.graph import StepGraph
from lowtide.plan import Plan
from lowtide.recording import begin, end
from lowtide.tape import randomness
from lowtide.tape.sharding import local
from lowtide.tape.sites import names_of, structure_of, together
from lowtide.tracing.counting import CallCount, LiveBytes, distinct_bytes
from lowtide.tracing.timing import step_clock
from lowtide.tracing.tracer import Tracer
from lowtide.tracing.values import KnownValues

Step = Callable[[], Tensor]


def trace(
    step: Step,
    model: nn.Module | Sequence[nn.Module] | None = None,
    *,
    fake: bool = False,
    optimizer: torch.optim.Optimizer | str | None = None,
    hardware: Any = None,
    repeats: int = 3,
    plain_steps: int = 0,
) -> StepGraph:
    """Run ``step`` once and write down what it computes, what it holds, and for how long.

    Args:
        step: a callable without arguments that runs the forward pass and returns the loss, a scalar tensor.
            Backward is run here; gradients, buffers and random state are put back afterwards.
        model: names parameters and modules; several are numbered. Without it, operations have no module paths
            below the modules called.
        fake: run on fake tensors: no memory, no accelerator, no values but those of small integers. Times then come
            from ``hardware``. What kernels take for themselves while they run is tried out on the CPU; for another
            ``hardware`` it is unknown and counts nothing (``graph.workspaces``).
        optimizer: an optimizer, or the name of one, whose states count: ``"adamw"``, ``"sgd"``, ...
        hardware: name of an accelerator, or an ``Accelerator``, for times by a roofline instead of measured ones.
        repeats: how often each operation is timed.
        plain_steps: how often ``step`` is also run whole and timed, one more time than that, so that the seconds of
            the plain step are measured ones; it must fit as it is. With 0, ``step`` is run once, and what its Python,
            its modules and autograd take is estimated from a small step.

    Returns:
        The graph.

    Raises:
        GraphError: ``step`` returns no scalar that requires grad, or does what fake tensors cannot follow.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
        >>> graph = lowtide.trace(lambda: model(torch.ones(2, 4)).sum(), model=model)
    """
    from lowtide.tracing.costing import with_costs

    tracer = Tracer(0 if fake or hardware is not None else repeats)
    whole = None if model is None else together(model)
    tracer.names = names_of(whole)
    plain, calls = _plain_seconds(step, whole, plain_steps) if tracer.repeats and plain_steps else (0.0, 0)
    tracer.try_kernels = fake and _is_cpu(hardware)
    try:
        with _on_fakes(whole, tracer.values) if fake else nullcontext() as tracer.fakes, _untouched(whole):
            existing = _gradients(whole)
            _run(tracer, step)
            unseen = distinct_bytes(g for g in existing if tracer.known_storage(g) is None)
            graph = graph_of(tracer, whole, optimizer, gradient_bytes=unseen, plain_seconds=plain, calls=calls)
    except _FAKE_ERRORS as error:
        if not fake:
            raise
        raise GraphError(
            f"fake tensors cannot follow this step: {error}. It looks at values (item(), a branch on data, nonzero). "
            "Trace it for real with fake=False, on a small batch if memory is short."
        ) from error
    return with_costs(graph, hardware) if tracer.repeats == 0 else graph


def _is_cpu(hardware: Any) -> bool:
    """Whether the step is meant to run on a CPU such as the one at hand."""
    return hardware is None or getattr(hardware, "name", hardware) == "cpu"


def graph_of(
    tracer: Tracer,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | str | None,
    *,
    gradient_bytes: int,
    plain_seconds: float = 0.0,
    calls: int = 0,
) -> StepGraph:
    """What ``tracer`` saw as a graph; ``plain_seconds`` are those of the plain step, and ``calls`` how many of torch's
    functions its forward pass called, if they are known."""
    from lowtide.tracing.host import HostCosts, host_costs

    # An accelerator works while the host prepares what comes next.
    host = host_costs() if tracer.repeats and tracer.on_cpu else HostCosts()
    return StepGraph(
        **_label(tracer, model),
        structure=_structure(model),
        optimizer_bytes=optimizer_bytes(optimizer, model),
        gradient_bytes=gradient_bytes,
        measured=tracer.repeats > 0,
        workspaces=tracer.workspaces,
        torch_version=torch.__version__,
        host_seconds=host.tape_seconds,
        recording_seconds=host.step_seconds
        + host.recording_seconds * ((calls or tracer.dispatched[0]) + len(tracer.saves)),
        outside_seconds=_outside(tracer, host.outside_seconds, plain_seconds),
    )


def _outside(tracer: Tracer, each: float, plain: float) -> float:
    """Seconds outside of operations: what is left of the plain step's, or ``each`` for every operation and view.

    Less than nothing is possible: what Python adds to the timing of an operation is in its seconds.
    """
    inside = sum(op.seconds for op in tracer.ops)
    return plain - inside if plain else max(each * sum(tracer.dispatched), -inside / 2)


def _plain_seconds(step: Step, model: nn.Module | None, steps: int) -> tuple[float, int]:
    """Median seconds of the plain step, after one that is not timed, in which torch's functions are counted."""
    times = []
    counter = CallCount()
    for nth in range(steps + 1):
        with _untouched(model):
            clock = step_clock(model)
            start = clock()
            with counter if nth == 0 else nullcontext():
                loss = _loss(step)
            loss.backward()
            del loss
            times.append(clock() - start)
    return statistics.median(times[1:]), counter.calls


_FAKE_ERRORS = (
    torch._subclasses.fake_tensor.DataDependentOutputException,
    torch._subclasses.fake_tensor.DynamicOutputShapeException,
    torch._subclasses.fake_tensor.UnsupportedOperatorException,
)


def rehearse(step: Step, model: nn.Module | Sequence[nn.Module], plan: Plan, *, fake: bool = True) -> int:
    """Run ``step`` under ``plan`` on fake tensors and count: the exact second opinion on its peak.

    Args:
        step: as for ``trace``.
        model: the model that the step trains.
        plan: the plan to rehearse.
        fake: False runs it for real.

    Returns:
        The peak in bytes, with parameters, buffers and inputs.

    Example:
        >>> peak = lowtide.rehearse(step, model, plan)  # doctest: +SKIP
    """
    from lowtide.planned import policy_of
    from lowtide.recording import record

    whole = together(model)
    with _on_fakes(whole, KnownValues()) if fake else nullcontext(), _untouched(whole):
        there = [*whole.parameters(), *whole.buffers(), *_gradients(whole)]
        resident = distinct_bytes(there)
        counter = LiveBytes(workspaces=True, fake=fake)
        for tensor in there:
            counter.ignore(tensor)
        with counter, _told_of_states(counter.see):
            with record(policy_of(plan), check="never", model=whole):
                loss = _loss(step)
            loss.backward()
            del loss
    return counter.peak + counter.inputs + resident


@contextmanager
def _told_of_states(watch: Callable[[Tensor], object]) -> Iterator[None]:
    randomness.watchers.append(watch)
    try:
        yield
    finally:
        randomness.watchers.remove(watch)


def _run(tracer: Tracer, step: Step) -> None:
    """Forward and backward under ``tracer``."""
    collecting = gc.isenabled()
    gc.disable()  # lifetimes are by reference counting alone
    try:
        begin(tracer)
        try:
            loss = _loss(step)
        finally:
            end(tracer)
        with tracer:
            loss.backward()
            del loss
    finally:
        if collecting:
            gc.enable()


def _loss(step: Step) -> Tensor:
    loss = step()
    if not isinstance(loss, Tensor):
        raise GraphError(f"the step must return the loss, a scalar tensor; it returned {type(loss).__name__}")
    if loss.numel() != 1:
        raise GraphError(f"the step must return a scalar loss; it returned a tensor of shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise GraphError(
            "the loss does not require grad: nothing trainable leads to it (frozen parameters, torch.no_grad, or a "
            "detach on the way)"
        )
    return loss


@contextmanager
def _untouched(model: nn.Module | None) -> Iterator[None]:
    """Put gradients, buffers and random state back afterwards."""
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    states = randomness.states_of({torch.device("cpu"), *(t.device for t in tensors if t.device.type != "meta")})
    gradients = [] if model is None else [(p, p.grad) for p in model.parameters()]
    for parameter, gradient in gradients:
        parameter.grad = None if gradient is None else gradient.clone()
    contents = [] if model is None else [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        randomness.leave(states)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)


def _gradients(model: nn.Module | None) -> list[Tensor]:
    return [] if model is None else [p.grad for p in model.parameters() if p.grad is not None]


def _label(tracer: Tracer, model: nn.Module | None) -> dict[str, Any]:
    """Name the memory that belongs to the model."""
    named: list[tuple[str, str, Tensor]] = []
    if model is not None:
        named += [("parameter", name, p) for name, p in model.named_parameters()]
        named += [("buffer", name, b) for name, b in model.named_buffers()]
        named += [("gradient", name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    for kind, name, whole in named:
        tensor = local(whole)
        number = tracer.known_storage(tensor)
        if number is None and kind != "gradient":
            tracer.buffer_of(tensor)
            number = tracer.known_storage(tensor)
        if number is not None:
            tracer.storages[number][1:] = [kind, name]
    return tracer.rows()


def _structure(model: nn.Module | None) -> tuple[tuple[str, str], ...]:
    return () if model is None else structure_of(model)


_STATES = {
    "adam": 2,
    "adamw": 2,
    "sgd": 0,
    "sgd-momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "lion": 1,
    "adafactor": 0,
}


def optimizer_bytes(optimizer: torch.optim.Optimizer | str | None, model: nn.Module | None) -> int:
    """Bytes of the optimizer's states: as they are, or as they will be after the first step."""
    if optimizer is None:
        return 0
    if isinstance(optimizer, torch.optim.Optimizer):
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return distinct_bytes(states)
    if optimizer.lower() not in _STATES:
        raise GraphError(f"unknown optimizer {optimizer!r}; known: {', '.join(_STATES)}")
    trained = [] if model is None else [p for p in model.parameters() if p.requires_grad]
    return _STATES[optimizer.lower()] * distinct_bytes(trained)


@contextmanager
def _on_fakes(model: nn.Module | None, values: KnownValues) -> Iterator[Any]:
    """Run what follows on fake tensors; a real model's parameters are swapped for fake ones meanwhile."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    fakes = [t for t in tensors if isinstance(t, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
    swapped = [] if model is None or fakes else _swap_in_fakes(model, mode)
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        with mode, values:
            yield mode
    finally:
        mode.allow_non_fake_inputs = before
        for table, name, original in swapped:
            table[name] = original


def _swap_in_fakes(model: nn.Module, mode: Any) -> list[tuple[dict[str, Any], str, Any]]:
    known: dict[int, Any] = {}
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    fake = mode.from_tensor(tensor)
                    known[id(tensor)] = fake
                swapped.append((table, name, tensor))
                table[name] = known[id(tensor)]
    return swapped
