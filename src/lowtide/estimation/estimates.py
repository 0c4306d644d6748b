"""Estimate: what a step needs and takes under a setup, from its trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from lowtide.errors import UnitError
from lowtide.estimation.optimizers import state_bytes, step_bytes, step_traffic
from lowtide.estimation.setups import Setup, Traced
from lowtide.estimation.sharding import link, sharded, traffic_bytes
from lowtide.graph import StepGraph
from lowtide.hardware import Accelerator
from lowtide.plan import Plan
from lowtide.planning import Planner
from lowtide.simulation import simulate
from lowtide.units import parse_bytes

EXACT = 0.01
"""How far tensors' bytes may be off: what the trace is tested to."""
FRAGMENTED = 0.05
"""How much more the caching allocator of an accelerator may hold than the tensors in it."""
CONTEXT_BYTES = 700 * 2**20
"""What an accelerator's context and its libraries' workspaces take, outside of tensors."""

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
ACTIVATIONS, TEMPORARIES, OTHER = "activations", "temporaries", "inputs and buffers"
IN_OPTIMIZER = "in the optimizer's step"
KINDS = (WEIGHTS, GRADIENTS, STATES, ACTIVATIONS, TEMPORARIES, OTHER)
_KINDS = {
    "parameters": WEIGHTS,
    "gradients": GRADIENTS,
    "optimizer states": STATES,
    "saved activations": ACTIVATIONS,
    "temporaries": TEMPORARIES,
}


@dataclass(frozen=True)
class Estimate:
    """What one device needs and takes, from traces alone."""

    setup: Setup
    kinds: tuple[tuple[str, int], ...]
    """What fills the peak, by kind, in the order of ``KINDS``."""
    peak_bytes: int
    """Of tensors."""
    peak_where: str
    low_bytes: int
    """With everything around tensors: at least."""
    high_bytes: int
    """At most."""
    memory_bytes: int
    """What the hardware has, or the budget."""
    step_seconds: float
    """One optimizer step: all its batches, the optimizer and what communication does not overlap."""
    plain_seconds: float
    """The same without recomputation."""
    flops: int
    """Floating-point operations of one optimizer step."""
    extra_flops: int
    """How many of these are recomputation."""
    joules: float
    """At the hardware's power, of all ranks; 0 where the power is unknown."""
    hardware: str
    plan: Plan | None = None
    """What to recompute; None keeps everything."""

    @property
    def verdict(self) -> str:
        """``fits``, ``may fit`` (within the error), or ``does not fit``."""
        if self.high_bytes <= self.memory_bytes:
            return "fits"
        return "may fit" if self.low_bytes <= self.memory_bytes else "does not fit"

    @property
    def fits(self) -> bool:
        """Whether it fits even at the upper end of the error."""
        return self.high_bytes <= self.memory_bytes

    @property
    def samples(self) -> int:
        """Samples of one optimizer step, of all ranks."""
        return self.setup.batch * self.setup.accumulation * self.setup.ranks

    @property
    def samples_per_second(self) -> float:
        """Of all ranks."""
        return self.samples / self.step_seconds if self.step_seconds else 0.0

    @property
    def device_seconds(self) -> float:
        """Seconds that a device spends on a sample: what "fastest" means here."""
        return self.step_seconds * self.setup.ranks / self.samples

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "setup": asdict(self.setup),
            "verdict": self.verdict,
            "kinds": dict(self.kinds),
            **{
                name: getattr(self, name)
                for name in (
                    "peak_bytes", "peak_where", "low_bytes", "high_bytes", "memory_bytes", "step_seconds",
                    "plain_seconds", "samples_per_second", "flops", "extra_flops", "joules", "hardware",
                )
            },
            "recomputes": 0 if self.plan is None else len(self.plan.recompute),
        }  # fmt: skip


def memory_of(budget: int | str | None, accelerator: Accelerator) -> int:
    """The bytes to fit into: an amount, a share of the hardware's memory, or all of that.

    Raises:
        UnitError: it is neither.
    """
    if budget is None:
        return accelerator.memory_bytes
    if not isinstance(budget, str) or not budget.strip().endswith("%"):
        return parse_bytes(budget)
    try:
        share = float(budget.strip()[:-1])
    except ValueError:
        raise UnitError(f"{budget!r} is not a percentage; write for example '80%'.") from None
    return int(accelerator.memory_bytes * share / 100)


def room_bytes(memory: int, accelerator: Accelerator) -> int:
    """The peak of tensors that surely fits into ``memory`` bytes of this hardware."""
    if not _has_context(accelerator):
        return int(memory / (1 + EXACT))
    return max(0, int((memory - CONTEXT_BYTES) / (1 + EXACT + FRAGMENTED)))


def around(peak: int, accelerator: Accelerator) -> tuple[int, int]:
    """The least and the most that a process with this peak of tensors takes."""
    if not _has_context(accelerator):
        return int(peak * (1 - EXACT)), int(peak * (1 + EXACT))
    return int(peak * (1 - EXACT)), int(peak * (1 + EXACT + FRAGMENTED)) + CONTEXT_BYTES


def _has_context(accelerator: Accelerator) -> bool:
    return accelerator.name != "cpu"


@dataclass(frozen=True)
class Prepared:
    """A trace as one device holds it under a setup, ready to be planned."""

    traced: Traced
    setup: Setup
    accelerator: Accelerator
    graph: StepGraph

    @staticmethod
    def of(traced: Traced, setup: Setup, accelerator: Accelerator) -> Prepared:
        """With the optimizer's states, on one of the setup's ranks."""
        graph = replace(traced.graph, optimizer_bytes=state_bytes(setup.optimizer, traced.trained))
        return Prepared(traced, setup, accelerator, sharded(graph, setup))

    def estimate(self, memory: int, plan: Plan | None = None) -> Estimate:
        """What the step needs under ``plan``; without one everything is kept."""
        timeline = simulate(self.graph, frozenset() if plan is None else plan, trail=False)
        kinds, peak, where = self._peak(plan, timeline.peak_bytes, timeline.peak_where)
        low, high = around(peak, self.accelerator)
        setup = self.setup
        seconds = self._seconds(timeline.step_seconds)
        extra = setup.accumulation * timeline.extra_flops
        return Estimate(
            setup=setup,
            kinds=kinds,
            peak_bytes=peak,
            peak_where=where,
            low_bytes=low,
            high_bytes=high,
            memory_bytes=memory,
            step_seconds=seconds,
            plain_seconds=self._seconds(self.graph.seconds),
            flops=setup.accumulation * sum(op.flops for op in self.graph.ops) + extra,
            extra_flops=extra,
            joules=self.accelerator.watts * seconds * setup.ranks,
            hardware=self.accelerator.name,
            plan=plan,
        )

    @property
    def optimizer_bytes(self) -> int:
        """What is there at the highest moment of the optimizer's step."""
        return sum(self._in_optimizer().values())

    def planner(self) -> Planner:
        """Plans for this graph."""
        return Planner(self.graph, solver="chain")

    def _peak(self, plan: Plan | None, peak: int, where: str) -> tuple[tuple[tuple[str, int], ...], int, str]:
        at_rest = self._in_optimizer()
        total = sum(at_rest.values())
        if total > peak:
            return _ordered(at_rest), total, IN_OPTIMIZER
        found: dict[str, int] = {}
        for kind, size in self.graph.memory_table(plan).kinds:
            name = _KINDS.get(kind, OTHER)
            found[name] = found.get(name, 0) + size
        return _ordered(found), peak, where

    def _in_optimizer(self) -> dict[str, int]:
        """What is there while the optimizer steps."""
        setup, trained = self.setup, self.traced.trained
        roots = {buffer.storage for buffer in self.graph.buffers if buffer.maker < 0}
        sizes = {WEIGHTS: 0, OTHER: 0}
        for number in roots:
            storage = self.graph.storages[number]
            if storage.kind == "parameter":
                sizes[WEIGHTS] += storage.bytes
            elif storage.owner != "(gathered)" and storage.kind != "gradient":
                sizes[OTHER] += storage.bytes
        parted = setup.ranks if setup.sharding in ("fsdp", "zero2") else 1
        moment = step_bytes(setup.optimizer, trained, foreach=_has_context(self.accelerator))
        own = setup.ranks if setup.sharding != "none" else 1
        return sizes | {
            GRADIENTS: self.traced.trained_bytes // parted,
            STATES: self.graph.optimizer_bytes,
            TEMPORARIES: moment // own,
        }

    def _seconds(self, micro: float) -> float:
        setup, accelerator = self.setup, self.accelerator
        own = setup.ranks if setup.sharding != "none" else 1
        moved = step_traffic(setup.optimizer, self.traced.trained) / own
        busy = setup.accumulation * micro + moved / (accelerator.bandwidth * accelerator.efficiency_bandwidth)
        parameters = sum(s.bytes for s in self.traced.graph.storages if s.kind == "parameter")
        return max(busy, traffic_bytes(setup, parameters, self.traced.trained) / link(accelerator.name))


def estimate(traced: Traced, setup: Setup, accelerator: Accelerator, memory: int | None = None) -> Estimate:
    """What ``traced`` needs under ``setup`` when everything is kept."""
    return Prepared.of(traced, setup, accelerator).estimate(accelerator.memory_bytes if memory is None else memory)


def _ordered(found: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((kind, found.get(kind, 0)) for kind in KINDS)
