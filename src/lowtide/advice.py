"""advise: what fills the memory, what each remedy would give, what to do, and when not to checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide import hardware as catalogue
from lowtide.estimation.estimates import ACTIVATIONS, GRADIENTS, STATES, TEMPORARIES, WEIGHTS, memory_of
from lowtide.estimation.fitting import Fit, fit_with
from lowtide.estimation.limits import Limit, limit
from lowtide.estimation.setups import Setup, SetupError, Tensor, Traced, Workload
from lowtide.estimation.trials import CHECKPOINTING, LEVERS, SHARDING, Option, Told, Trials
from lowtide.hardware import Accelerator
from lowtide.tracing import trace
from lowtide.tracing.stepping import Step
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = 1
LITTLE = 0.2
"""Below this share of the peak, what checkpointing can save is little."""


@dataclass(frozen=True)
class Costs:
    """What an option costs beside the step that keeps everything, for each step and for a run."""

    steps: int
    """Optimizer steps of the run; 0 where that was not said."""
    step_seconds: float
    extra_seconds: float
    extra_flops: int
    """Recomputed in each step."""
    throughput: float
    """Samples a second as a part of what the plain step would reach, if it fitted."""
    step_joules: float
    """Of all ranks, at the hardware's power; 0 where that is unknown."""
    extra_joules: float

    @property
    def run_seconds(self) -> float:
        """Of the whole run."""
        return self.steps * self.step_seconds

    @property
    def run_joules(self) -> float:
        """Of the whole run."""
        return self.steps * self.step_joules


@dataclass(frozen=True)
class Advice:
    """What to do about memory, with the numbers behind it. Prints as a text."""

    fit: Fit
    """The step as asked, and all that was tried."""
    least: Option
    """As asked, with as much recomputed as saves memory."""
    recommended: Option | None
    """None where nothing that was tried fits."""
    costs: Costs
    """Of what is recommended, or of the step as asked."""
    limits: tuple[Limit, ...] = ()

    @property
    def saving(self) -> float:
        """The part of the peak that checkpointing can save at most."""
        peak = self.fit.estimate.peak_bytes
        return 1 - self.least.estimate.peak_bytes / peak if peak else 0.0

    @property
    def filled_by(self) -> str:
        """What fills most of the peak: activations (temporaries included), weights, gradients or optimizer states."""
        kinds = dict(self.fit.estimate.kinds)
        groups = {
            ACTIVATIONS: kinds[ACTIVATIONS] + kinds[TEMPORARIES],
            **{kind: kinds[kind] for kind in (WEIGHTS, GRADIENTS, STATES)},
        }
        return max(groups, key=lambda kind: groups[kind])

    @property
    def checkpoint(self) -> bool:
        """Whether to checkpoint."""
        return self.recommended is not None and CHECKPOINTING in self.recommended.levers

    @property
    def alone(self) -> tuple[Option, ...]:
        """Each remedy by itself, in the order in which to look at them, fitting or not."""
        found: dict[str, Option] = {}
        for option in self.fit.tried:
            if len(option.levers) == 1:
                found[option.levers[0]] = option
        return tuple(found[lever] for lever in LEVERS if lever in found)

    @property
    def diagnosis(self) -> str:
        """What fills the memory, and how much checkpointing could help."""
        peak, least = self.fit.estimate.peak_bytes, self.least.estimate.peak_bytes
        saved = f"from {format_bytes(peak)} to {format_bytes(least)}"
        if self.saving < LITTLE:
            return f"Mostly {self.filled_by}: checkpointing helps little, at most {saved}."
        return f"Mostly {self.filled_by}: checkpointing can bring the peak {saved}."

    @property
    def verdict(self) -> str:
        """What to do, in a sentence."""
        best = self.recommended
        if best is None:
            return f"Nothing that was tried fits. Nearest is {self.fit.nearest.name}."
        if not best.levers:
            return "It fits as it is: leave checkpointing off, it would only cost time."
        if not self.checkpoint:
            return f"Take {best.name}: it fits, and needs no checkpointing."
        return f"Take {best.name}."

    def __str__(self) -> str:
        from lowtide.reports import advice_text

        return advice_text(self)

    def _repr_html_(self) -> str:
        from lowtide.reports import html_of

        return html_of(str(self))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "kind": "lowtide.Advice",
            "schema": SCHEMA,
            "verdict": self.verdict,
            "diagnosis": self.diagnosis,
            "filled_by": self.filled_by,
            "checkpoint": self.checkpoint,
            "recommended": self.recommended.to_json() if self.recommended else None,
            "alone": [option.to_json() for option in self.alone],
            "costs": asdict(self.costs) | {"run_seconds": self.costs.run_seconds, "run_joules": self.costs.run_joules},
            "limits": [asdict(one) for one in self.limits],
            "fit": self.fit.to_json(),
        }


def advise(
    step: Step,
    model: nn.Module,
    *,
    budget: int | str | None = None,
    hardware: Accelerator | str | None = None,
    optimizer: str = "adamw",
    batch: int = 1,
    length: int = 0,
    remake: Callable[..., Step] | None = None,
    steps: int = 0,
    search: bool = True,
) -> Advice:
    """Say what fills the memory of a step, what each remedy would give, and what to do.

    Every number comes from a trace on fake tensors and ``simulate``; nothing runs on an accelerator.

    Args:
        step: a callable without arguments that runs the forward pass and returns the loss.
        model: the model that it trains.
        budget: memory to fit into, such as ``"12 GiB"`` or ``"90%"`` of the hardware's; by default all of that.
        hardware: an accelerator, or its name in the catalogue; by default the one that the model is on.
        optimizer: its name: ``"adamw"``, ``"adamw-fused"``, ``"adamw-8bit"``, ``"sgd"``, ...
        batch: how many samples the step handles; 1 where that is not said.
        length: how many tokens a sample has, where it has any.
        remake: makes the step for another size: ``remake(batch=...)``, or ``remake(batch=..., length=...)``.
            Without it, smaller batches and the largest sizes are not looked at.
        steps: how many optimizer steps the training takes, for time and energy of all of it.
        search: look for the largest batch and the longest sequence; several traces each.

    Raises:
        GraphError: fake tensors cannot follow the step.
        UnknownHardware, UnitError, SetupError: what was asked for is not known.

    Example:
        >>> print(lowtide.advise(step, model, budget="12 GiB", hardware="a100-80"))  # doctest: +SKIP
    """
    accelerator = _accelerator(hardware, model)
    memory = memory_of(budget, accelerator)
    precision = str(next(model.parameters()).dtype).removeprefix("torch.")
    own = OfStep(step, model, accelerator, remake)
    setup = Setup(batch=batch, length=length, precision=precision, attention=own.attention, optimizer=optimizer)
    return advise_on(own, setup, accelerator, memory, steps=steps, search=search)


def advise_on(
    workload: Workload,
    setup: Setup,
    accelerator: Accelerator,
    memory: int,
    *,
    steps: int = 0,
    search: bool = True,
    tell: Told = lambda text: None,
) -> Advice:
    """The same for any workload and setup."""
    trials = Trials(workload, accelerator, memory, tell)
    found = fit_with(trials, setup, always=True)
    best = _recommended(found)
    limits = [limit(trials, setup, what) for what in _sizes(workload, setup)] if search else []
    return Advice(found, trials.least(setup), best, _costs(best or found.asked, found.asked, steps), tuple(limits))


def _sizes(workload: Workload, setup: Setup) -> Iterator[str]:
    for what in ("batch", "length"):
        if what in workload.changes and getattr(setup, what):
            yield what


def _recommended(found: Fit) -> Option | None:
    """What was asked for if it fits; else the fastest that gives the same results on as many devices; else one that
    gives other results on as many; else one on more."""
    if found.fits:
        return found.asked
    ranks = found.estimate.setup.ranks
    fitting = found.options
    same = [option for option in fitting if option.estimate.setup.ranks == ranks]
    exact = [option for option in same if option.exact]
    elsewhere = [option for option in fitting if SHARDING in option.levers and option.exact]
    return next(iter([*exact, *same, *elsewhere, *fitting]), None)


def _costs(option: Option, asked: Option, steps: int) -> Costs:
    estimate = option.estimate
    share = estimate.plain_seconds / estimate.step_seconds if estimate.step_seconds else 1.0
    return Costs(
        steps=steps,
        step_seconds=estimate.step_seconds,
        extra_seconds=estimate.step_seconds - estimate.plain_seconds,
        extra_flops=estimate.extra_flops,
        throughput=asked.estimate.device_seconds / estimate.device_seconds if estimate.device_seconds else 1.0,
        step_joules=estimate.joules,
        extra_joules=estimate.joules * (1 - share),
    )


def _accelerator(hardware: Accelerator | str | None, model: nn.Module) -> Accelerator:
    if isinstance(hardware, Accelerator):
        return hardware
    if hardware is not None:
        return catalogue.find(hardware)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return catalogue.find(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")


class OfStep:
    """A step and its model as a workload."""

    def __init__(
        self, step: Step, model: nn.Module, accelerator: Accelerator, remake: Callable[..., Step] | None = None
    ) -> None:
        self.step, self.model, self.accelerator, self.remake = step, model, accelerator, remake
        self.sizes = _sizes_of(remake)
        self.first: Setup | None = None
        self.traces: dict[Setup, Traced] = {}

    @property
    def name(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    @property
    def changes(self) -> frozenset[str]:
        """The sizes that ``remake`` takes, precision, and the attention of models of transformers."""
        return self.sizes | {"precision"} | ({"attention"} if self._switch is not None else set())

    @property
    def longest(self) -> int | None:
        """Nobody says."""
        return None

    @property
    def attention(self) -> str:
        """How the model computes attention now."""
        kind = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        return "plain" if self._switch is not None and kind == "eager" else "efficient"

    @property
    def _switch(self) -> Callable[[str], None] | None:
        return getattr(self.model, "set_attn_implementation", None)

    def trace(self, setup: Setup) -> Traced:
        """The step under ``setup`` on fake tensors."""
        key = setup.trace_key
        self.first = self.first or key
        if key not in self.traces:
            self.traces[key] = self._trace(key, self.first)
        return self.traces[key]

    def _trace(self, setup: Setup, first: Setup) -> Traced:
        step = self.step
        if self.remake is not None and (setup.batch, setup.length) != (first.batch, first.length):
            step = self.remake(**{size: getattr(setup, size) for size in self.sizes})
        mixed = setup.precision.endswith("-mixed")
        lower = {"bfloat16-mixed": torch.bfloat16, "float16-mixed": torch.float16}.get(setup.precision)

        def run() -> torch.Tensor:
            with torch.autocast(self._device, lower) if mixed else nullcontext():
                return step()

        with self._attention(setup.attention), self._gradients(setup.accumulation > 1):
            graph = trace(run, model=self.model, fake=True, hardware=self.accelerator)
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return Traced(graph, tuple(Tensor(name, tuple(p.shape), p.element_size()) for name, p in trained))

    @property
    def _device(self) -> str:
        return next((p.device.type for p in self.model.parameters()), "cpu")

    @contextmanager
    def _attention(self, wanted: str) -> Iterator[None]:
        before = self.attention
        if wanted == before or self._switch is None:
            yield
            return
        self._switch("sdpa" if wanted == "efficient" else "eager")
        try:
            yield
        finally:
            self._switch("sdpa" if before == "efficient" else "eager")

    @contextmanager
    def _gradients(self, there: bool) -> Iterator[None]:
        """Gradients of an earlier batch, or none; without contents, so they take no memory."""
        before = [(p, p.grad) for p in self.model.parameters() if p.requires_grad]
        for parameter, _ in before:
            parameter.grad = torch.zeros((), dtype=parameter.dtype).expand_as(parameter) if there else None
        try:
            yield
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient


def _sizes_of(remake: Callable[..., Step] | None) -> frozenset[str]:
    if remake is None:
        return frozenset()
    takes = inspect.signature(remake).parameters
    found = frozenset({"batch", "length"} & takes.keys())
    if not found:
        raise SetupError(f"remake takes {', '.join(takes) or 'nothing'}; it must take batch, or batch and length")
    return found
