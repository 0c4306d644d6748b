"""Plan: which results to recompute, by site, and what that was predicted to cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import GraphError
from lowtide.graph import check_schema
from lowtide.units import format_bytes, format_seconds

SCHEMA = 1


@dataclass(frozen=True)
class Prediction:
    """What ``simulate`` says a plan costs."""

    peak_bytes: int
    step_seconds: float
    recompute_seconds: float
    extra_flops: int
    bound_seconds: float = 0.0
    """No plan within the budget can make a faster step."""
    gap: float = 0.0
    """How far the step is above that bound, as a fraction."""


@dataclass(frozen=True)
class Plan:
    """Decisions by site: results of the operations at these sites are recomputed, all others are kept."""

    recompute: frozenset[str]
    fingerprint: str = ""
    """Of the structure of the model that the plan was made for."""
    structure: tuple[tuple[str, str], ...] = ()
    solver: str = ""
    budget_bytes: int | None = None
    hardware: str = ""
    prediction: Prediction | None = None
    depths: tuple[tuple[str, int], ...] = ()
    """Sites with a depth above 0: replays that only pass through drop their results again."""

    def __str__(self) -> str:
        modules = {site.partition("/")[0] for site in self.recompute}
        lines = [f"Plan: recompute {len(self.recompute)} operations in {len(modules)} modules ({self.solver or 'by hand'})"]
        if self.prediction is not None:
            p = self.prediction
            lines.append(
                f"  predicted: peak {format_bytes(p.peak_bytes)}, step {format_seconds(p.step_seconds)}, "
                f"of which recomputation {format_seconds(p.recompute_seconds)}"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1))

    def to_json(self) -> dict[str, Any]:
        """The plan as plain lists and dictionaries."""
        return {
            "kind": "lowtide.Plan",
            "schema": SCHEMA,
            "recompute": sorted(self.recompute),
            "fingerprint": self.fingerprint,
            "structure": [list(item) for item in self.structure],
            "solver": self.solver,
            "budget_bytes": self.budget_bytes,
            "hardware": self.hardware,
            "prediction": asdict(self.prediction) if self.prediction else None,
            "depths": [list(item) for item in self.depths],
        }

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that ``save`` wrote.

        Raises:
            GraphError: the file is no plan, is broken, or was written by a newer version.
        """
        try:
            data = json.loads(Path(path).read_text())
        except ValueError as error:
            raise GraphError(f"{path} is not a lowtide plan: {error}") from None
        check_schema(data, "lowtide.Plan", SCHEMA, str(path))
        try:
            return Plan(
                recompute=frozenset(data["recompute"]),
                fingerprint=data["fingerprint"],
                structure=tuple((path, kind) for path, kind in data["structure"]),
                solver=data["solver"],
                budget_bytes=data["budget_bytes"],
                hardware=data["hardware"],
                prediction=Prediction(**data["prediction"]) if data["prediction"] else None,
                depths=tuple((site, depth) for site, depth in data["depths"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise GraphError(f"{path} is a broken lowtide plan: {type(error).__name__} {error}") from None
