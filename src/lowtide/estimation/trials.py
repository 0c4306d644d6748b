"""Trials: a workload under many setups, each traced, and simulated or planned; nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lowtide.errors import InfeasibleBudget
from lowtide.estimation.estimates import Estimate, Prepared, room_bytes
from lowtide.estimation.setups import Setup, Workload
from lowtide.hardware import Accelerator
from lowtide.planning import Planner

MIXED = "mixed precision"
SMALLER = "smaller batch, accumulated"
EFFICIENT = "efficient attention"
CHECKPOINTING = "checkpointing"
SHARDING = "sharding"
FUSED = "fused optimizer"
EIGHT_BIT = "8-bit optimizer"
LEVERS = (MIXED, SMALLER, EFFICIENT, CHECKPOINTING, SHARDING, FUSED, EIGHT_BIT)
"""What can be done about memory, in the order in which it is looked at."""
APPROXIMATE = {MIXED, EIGHT_BIT}
"""These change what is computed; the others change at most the order of sums."""
RANKS = (2, 4, 8, 16, 32, 64)

Told = Callable[[str], None]


@dataclass(frozen=True)
class Option:
    """One way to train, and what it needs and takes."""

    levers: tuple[str, ...]
    """What is other than asked; empty for what was asked."""
    estimate: Estimate

    @property
    def name(self) -> str:
        """In a few words, such as ``"fsdp over 8 ranks and checkpointing"``."""
        return " and ".join(self._word(lever) for lever in self.levers) or "as asked"

    @property
    def exact(self) -> bool:
        """Whether it computes what was asked for."""
        return not APPROXIMATE & set(self.levers)

    def _word(self, lever: str) -> str:
        setup = self.estimate.setup
        if lever == SHARDING:
            return f"{setup.sharding} over {setup.ranks} ranks"
        if lever == SMALLER:
            return f"batch {setup.batch}, accumulated over {setup.accumulation}"
        return lever

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"name": self.name, "levers": list(self.levers), "exact": self.exact} | self.estimate.to_json()


class Trials:
    """Tries setups of one workload on one accelerator; what was traced or planned once is not again."""

    def __init__(
        self, workload: Workload, accelerator: Accelerator, memory: int, tell: Told = lambda text: None
    ) -> None:
        self.workload = workload
        self.accelerator = accelerator
        self.memory = memory
        self.room = room_bytes(memory, accelerator)
        self.tell = tell
        self._prepared: dict[Setup, Prepared] = {}
        self._planners: dict[Setup, Planner] = {}

    def prepared(self, setup: Setup) -> Prepared:
        """The trace under ``setup``."""
        if setup not in self._prepared:
            self.tell(f"tracing {setup.text}")
            self._prepared[setup] = Prepared.of(self.workload.trace(setup), setup, self.accelerator)
        return self._prepared[setup]

    def plain(self, setup: Setup, levers: tuple[str, ...] = ()) -> Option:
        """With everything kept."""
        return Option(levers, self.prepared(setup).estimate(self.memory))

    def checkpointed(self, setup: Setup, levers: tuple[str, ...] = ()) -> Option:
        """With the fastest plan that fits, or the plan of the least memory where none does."""
        planner = self._planner(setup)
        try:
            plan = planner.solve(self.room)
        except InfeasibleBudget:
            plan = planner.plan(planner.lowest, planner.lowest.peak)
        return Option((*levers, CHECKPOINTING), self.prepared(setup).estimate(self.memory, plan))

    def least(self, setup: Setup) -> Option:
        """With the plan of the least memory."""
        planner = self._planner(setup)
        plan = planner.plan(planner.lowest, planner.lowest.peak)
        return Option((CHECKPOINTING,), self.prepared(setup).estimate(self.memory, plan))

    def _planner(self, setup: Setup) -> Planner:
        if setup not in self._planners:
            prepared = self.prepared(setup)
            self.tell(f"planning {setup.text}")
            self._planners[setup] = prepared.planner()
        return self._planners[setup]


Change = Callable[[Setup], Setup]


def levers_for(workload: Workload, setup: Setup, accelerator: Accelerator) -> dict[str, list[Change]]:
    """What can be changed, as functions of a setup; of each lever several degrees, the mildest first."""
    found: dict[str, list[Change]] = {}
    can = workload.changes
    if "precision" in can and setup.precision == "float32":
        found[MIXED] = [partial(replace, precision=mixed_precision(accelerator))]
    if "batch" in can and setup.batch > 1:
        halves = [n for n in (2**k for k in range(1, 12)) if setup.batch % n == 0]
        found[SMALLER] = [partial(_smaller, parts=n) for n in halves]
    if "attention" in can and setup.attention == "plain":
        found[EFFICIENT] = [partial(replace, attention="efficient")]
    if setup.sharding != "fsdp":
        ranks = (setup.ranks,) if setup.ranks > 1 else RANKS
        found[SHARDING] = [partial(replace, sharding="fsdp", ranks=n) for n in ranks]
    if setup.optimizer == "adamw":
        found[FUSED] = [partial(replace, optimizer="adamw-fused")]
    if setup.optimizer in ("adamw", "adamw-fused"):
        found[EIGHT_BIT] = [partial(replace, optimizer="adamw-8bit")]
    return found


def mixed_precision(accelerator: Accelerator) -> str:
    """The lower precision that this accelerator is fast in."""
    listed = accelerator.flops
    return "float16-mixed" if "bfloat16" not in listed and "float16" in listed else "bfloat16-mixed"


def _smaller(setup: Setup, parts: int) -> Setup:
    return replace(setup, batch=setup.batch // parts, accumulation=setup.accumulation * parts)
