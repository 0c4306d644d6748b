"""Measurement: peaks and times of a step in several ways, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lowtide.errors import GraphError
from lowtide.graph import check_schema
from lowtide.plan import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One way to run the step, and what that cost."""

    name: str
    """``"plain"``, ``"lowtide"``, or the name of a peer."""
    peak_bytes: int = 0
    step_seconds: float = 0.0
    exact: bool | None = None
    """Whether loss, gradients, buffers and random states are those of the plain step; None if unknown."""
    difference: str = ""
    """The first that is not."""
    peak_ratio: float | None = None
    """To the plain step, as is the next; None if that did not run."""
    seconds_ratio: float | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    failure: str = ""
    """The error that this way ended in; then there are no numbers."""


@dataclass(frozen=True)
class Measurement:
    """What a step really costs, plainly, under a plan, and with PyTorch's own checkpointing."""

    rows: tuple[Row, ...]
    """The plain step, then lowtide, then the peers."""
    resident_bytes: int
    """Of the peaks, what is there all the time: parameters, buffers, optimizer states, inputs."""
    rounds: int
    device: str
    threads: int
    irreproducible: tuple[str, ...] = ()
    """What differs between two runs of the plain step; it was not compared."""
    plan: Plan | None = None
    """The plan that was measured; None for a hand policy."""

    def row(self, name: str) -> Row:
        """The row of that name.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no row is called {name!r}; there are {', '.join(row.name for row in self.rows)}")

    @property
    def peak_bytes(self) -> int:
        """The peak under the plan."""
        return self.row("lowtide").peak_bytes

    @property
    def step_seconds(self) -> float:
        """The time of a step under the plan."""
        return self.row("lowtide").step_seconds

    def __rich__(self) -> RenderableType:
        from lowtide.measurement_table import render

        return render(self)

    def __str__(self) -> str:
        from lowtide.reports import text_of

        return text_of(self.__rich__())

    def _repr_html_(self) -> str:
        from lowtide.reports import html_of

        return html_of(self.__rich__())

    def to_json(self) -> dict[str, Any]:
        """The measurement as plain lists and dictionaries; nothing is rounded."""
        return {
            "kind": "lowtide.Measurement",
            "schema": SCHEMA,
            "rows": [asdict(row) for row in self.rows],
            "resident_bytes": self.resident_bytes,
            "rounds": self.rounds,
            "device": self.device,
            "threads": self.threads,
            "irreproducible": list(self.irreproducible),
            "plan": self.plan.to_json() if self.plan is not None else None,
        }

    @staticmethod
    def from_json(data: Any, source: str = "this data") -> Measurement:
        """The measurement that ``to_json`` described; ``source`` names it in errors.

        Raises:
            GraphError: it is no measurement, is broken, or was written by a newer version.
        """
        check_schema(data, "lowtide.Measurement", SCHEMA, source)
        try:
            return Measurement(
                rows=tuple(Row(**row) for row in data["rows"]),
                resident_bytes=data["resident_bytes"],
                rounds=data["rounds"],
                device=data["device"],
                threads=data["threads"],
                irreproducible=tuple(data["irreproducible"]),
                plan=Plan.from_json(data["plan"], source) if data["plan"] else None,
            )
        except (KeyError, TypeError) as error:
            raise GraphError(f"{source} is a broken lowtide measurement: {error!r}") from None
