"""What an attached model does, as text and as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lowtide.plan import Plan
from lowtide.tape.ledger import KeptRow
from lowtide.units import format_bytes, format_seconds

SCHEMA = 1


@dataclass(frozen=True)
class AttachReport:
    """What an attached model does: the plan in force, what it costs, and what went another way than planned."""

    plan: Plan | None
    """None until there is one, and under a policy."""
    policy: str
    """The hand policy in force; "" under a budget or a plan."""
    calls: int
    """Training calls of the model, or models."""
    planned_calls: int
    """Those under a plan or a hand policy."""
    steps: int
    """Training steps: one or more calls, then backward."""
    steps_since: int
    """Steps since the plan is in force."""
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    """Counted in the first step under this plan: tensors, with parameters, gradients and optimizer states."""
    predicted_seconds: float | None
    measured_seconds: float | None
    """Median of the latest steps under this plan, from the call of the model to the end of backward."""
    fallbacks: tuple[str, ...]
    kept: tuple[KeptRow, ...]
    """What was kept against the plan, and why."""
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self._in_force(), f"{self.calls} training calls in {self.steps} steps, {self._under()}"]
        lines += _measured("peak", format_bytes, self.measured_peak_bytes, self.predicted_peak_bytes)
        lines += _measured("step", format_seconds, self.measured_seconds, self.predicted_seconds)
        lines += [f"fall-back: {text}" for text in self.fallbacks]
        lines += [f"kept {row.op} in {row.module or 'no module'} ({row.count}x): {row.reason}" for row in self.kept]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])

    def _in_force(self) -> str:
        if self.plan is not None:
            return str(self.plan)
        return self.policy or "no plan yet: the first training step is being watched"

    def _under(self) -> str:
        under = f"{self.planned_calls} of them under {'a policy' if self.policy else 'a plan'}"
        return f"{under}; this one is in force for {self.steps_since} steps" if self.plan is not None else under

    def to_json(self) -> dict[str, Any]:
        """The report as plain lists and dictionaries."""
        data = asdict(self) | {"kept": [asdict(row) for row in self.kept]}
        data["plan"] = self.plan.to_json() if self.plan is not None else None
        data["fallbacks"], data["warnings"] = list(self.fallbacks), list(self.warnings)
        return {"kind": "lowtide.AttachReport", "schema": SCHEMA, **data}


def _measured(name: str, text: Any, measured: float | None, predicted: float | None) -> list[str]:
    if measured is None:
        return []
    beside = f", predicted {text(predicted)}" if predicted else ""
    return [f"{name} {text(measured)} measured{beside}"]
