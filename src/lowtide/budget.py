"""A budget in any of its forms, as bytes."""

from __future__ import annotations

from lowtide.errors import UnitError
from lowtide.graph import StepGraph
from lowtide.simulation import simulate
from lowtide.units import parse_bytes


def budget_bytes(budget: int | str, graph: StepGraph) -> int:
    """``budget`` in bytes; a percentage is of the peak when everything is kept.

    Raises:
        UnitError: it is not an amount of bytes.
    """
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1])
        except ValueError:
            raise UnitError(f"{budget!r} is not a percentage; write for example '80%'") from None
        if not 0 < share <= 100:
            raise UnitError(f"a budget of {budget!r} makes no sense; give more than 0% and at most 100%")
        return int(simulate(graph, frozenset(), trail=False).peak_bytes * share / 100)
    return parse_bytes(budget)
