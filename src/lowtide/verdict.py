"""Verdict: whether a step under a plan leaves behind what the plain step does, and where not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lowtide.errors import GraphError
from lowtide.graph import check_schema
from lowtide.plan import Plan

SCHEMA = 1
_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """Where a run differs from the plain one."""

    what: str
    """Such as ``"gradient of blocks.3.mlp.0.weight"``."""
    module: str
    """Path and class of the module that owns it, such as ``"blocks.3.mlp.0 (Linear)"``; "" if none does."""
    step: int
    """In which step, from 1."""
    text: str
    """How it differs."""
    largest: float | None = None
    """The largest difference of two elements; None where that is no finite number."""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.what}{where}: {self.text}"


@dataclass(frozen=True)
class Verdict:
    """Whether a step under a plan leaves behind what the plain step does, bit for bit. True where it does."""

    compared: tuple[tuple[str, int], ...]
    """How many things of each kind were compared, such as ``("gradient", 148)``."""
    differences: tuple[Difference, ...] = ()
    irreproducible: tuple[str, ...] = ()
    """What differs between two runs of the plain step; it was not compared."""
    failure: str = ""
    """The error that the step raised under the plan, but not plainly."""
    steps: int = 1
    warnings: tuple[str, ...] = ()
    """What was kept against the plan because recomputing it is not safe."""
    plan: Plan | None = None
    """The plan that was verified; None for a hand policy."""
    culprit: str = ""
    """The operation whose recomputation makes the difference: name, module path and source line."""

    @property
    def reproducible(self) -> bool:
        """Whether the plain step equals itself."""
        return not self.irreproducible

    @property
    def exact(self) -> bool:
        """Whether all that is reproducible is the same; False where no gradient is."""
        return not self.differences and not self.failure and dict(self.compared).get("gradient", 0) > 0

    def __bool__(self) -> bool:
        return self.exact

    def __str__(self) -> str:
        lines = [*_reproducibility(self), self._headline()]
        lines += [f"  {self._step(one)}{one}" for one in self.differences[:_SHOWN]]
        lines += _others(len(self.differences) - _SHOWN)
        lines += [f"it comes of recomputing {self.culprit}"] if self.culprit else []
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])

    def _headline(self) -> str:
        span = f" over {self.steps} steps" if self.steps > 1 else ""
        if self.failure:
            return f"not exact{span}: {self.failure}"
        compared = ", ".join(_amount(kind, count) for kind, count in self.compared)
        if self.exact:
            return f"exact{span}: {compared}"
        if not self.differences:
            return f"not known to be exact{span}: no gradient is reproducible"
        return f"not exact{span}: {len(self.differences)} differ; compared: {compared}"

    def _step(self, difference: Difference) -> str:
        return f"step {difference.step}, " if self.steps > 1 else ""

    def _repr_html_(self) -> str:
        from lowtide.reports import html_of

        return html_of(str(self))

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain lists and dictionaries."""
        return {
            "kind": "lowtide.Verdict",
            "schema": SCHEMA,
            "exact": self.exact,
            "compared": [list(pair) for pair in self.compared],
            "differences": [asdict(difference) for difference in self.differences],
            "irreproducible": list(self.irreproducible),
            "failure": self.failure,
            "steps": self.steps,
            "warnings": list(self.warnings),
            "plan": self.plan.to_json() if self.plan is not None else None,
            "culprit": self.culprit,
        }

    @staticmethod
    def from_json(data: Any, source: str = "this data") -> Verdict:
        """The verdict that ``to_json`` described; ``source`` names it in errors.

        Raises:
            GraphError: it is no verdict, is broken, or was written by a newer version.
        """
        check_schema(data, "lowtide.Verdict", SCHEMA, source)
        try:
            return Verdict(
                compared=tuple((kind, count) for kind, count in data["compared"]),
                differences=tuple(Difference(**row) for row in data["differences"]),
                irreproducible=tuple(data["irreproducible"]),
                failure=data["failure"],
                steps=data["steps"],
                warnings=tuple(data["warnings"]),
                plan=Plan.from_json(data["plan"], source) if data["plan"] else None,
                culprit=data.get("culprit", ""),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise GraphError(f"{source} is a broken lowtide verdict: {error!r}") from None


# ---- text --------------------------------------------------------------------------------------------------


def _amount(kind: str, count: int) -> str:
    return kind if kind == "loss" else f"{count} {kind}{'' if count == 1 else 's'}"


def _reproducibility(verdict: Verdict) -> list[str]:
    if verdict.reproducible:
        return []
    lines = ["the plain step differs from itself when it is run twice from the same state, in"]
    lines += [f"  {name}" for name in verdict.irreproducible[:_SHOWN]]
    lines += _others(len(verdict.irreproducible) - _SHOWN)
    return [*lines, "compared is the rest (fix the batch; try torch.use_deterministic_algorithms)"]


def _others(count: int) -> list[str]:
    return [f"  and {count} more"] if count > 0 else []
