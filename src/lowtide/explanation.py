"""explain: what a plan keeps, what it recomputes, and why, as far as the graph of the step tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.graph import Operation, StepGraph
from lowtide.plan import Plan, site_parts
from lowtide.plan_text import short
from lowtide.repetition import Indices, Pattern, first_numbers, labels, lists_in, split
from lowtide.simulation import _dropped, depths_of, simulate
from lowtide.units import format_bytes, format_seconds

KEPT = "kept"
RECOMPUTED = "recomputed"
FREE = "free"


@dataclass(frozen=True)
class Decision:
    """What happens to the results of one operation, or of the same one of several blocks."""

    module: str
    """Path of its module, with ranges: ``layers.0-11.mlp``."""
    op: str
    decision: str
    """``kept``, ``recomputed``, or ``free``: backward needs no result of it."""
    reason: str
    bytes: int
    """Of results that backward needs, all blocks together."""
    seconds: float
    """That the operation takes, run once in each of the blocks."""
    count: int
    """How many operations this row stands for."""


@dataclass(frozen=True)
class Explanation:
    """All decisions of a plan, in the order of the forward pass."""

    title: str
    rows: tuple[Decision, ...]

    def __str__(self) -> str:
        return "\n".join([self.title, *_lines(self.rows)])

    def _repr_html_(self) -> str:
        from lowtide.reports import html_of

        return html_of(str(self))


def explain(plan: Plan, graph: StepGraph | None = None) -> Explanation:
    """Say what ``plan`` keeps and recomputes, and with ``graph`` also why.

    Raises:
        PlanMismatch: the graph is of another model.
    """
    title = f"Plan ({plan.solver or 'by hand'}): what is kept, what is recomputed, and why"
    if graph is None:
        return Explanation(title.removesuffix(", and why"), _merged(plan, _listed(plan)))
    if graph.structure:
        plan.check(graph.structure)
    return Explanation(title, _merged(plan, _Reasons(plan, graph).rows()))


Row = tuple[str, str, str, str, int, float]
"""Module, operation, decision, reason, bytes, seconds."""


class _Reasons:
    """What the graph and the judge know about each operation."""

    def __init__(self, plan: Plan, graph: StepGraph) -> None:
        self.plan = plan
        self.graph = graph
        timeline = simulate(graph, plan)
        chosen = depths_of(graph, plan)
        self.dropped = _dropped(graph, chosen)
        self.replays = Counter(timeline.replays)
        self.at_peak = set(timeline.live_at_peak)
        self.saved = set(graph.saves)
        self.starts = {read for i in self.replays for read in graph.ops[i].reads}
        self.dearest = max((self._price(i) for i in self.replays), default=0.0)

    def rows(self) -> Iterator[Row]:
        """One row an operation of the forward pass."""
        for index, op in self.graph.forward_ops():
            decision, reason = self._decide(index, op)
            size = 0 if decision == FREE else self._bytes(op)
            yield op.module, short(op.name), decision, reason, size, op.again_seconds

    def _decide(self, index: int, op: Operation) -> tuple[str, str]:
        results = _results(op)
        if any(self.dropped[buffer] for buffer in results):
            if not self.replays[index]:
                return FREE, "backward does not need it"
            again = f", {self.replays[index]} times" if self.replays[index] > 1 else ""
            return RECOMPUTED, ("backward needs it" if self._bytes(op) else "others are computed from it") + again
        needed = [buffer for buffer in results if buffer in self.saved or buffer in self.starts]
        if not needed:
            return FREE, "backward does not need it"
        return KEPT, self._why_kept(index, op, needed)

    def _why_kept(self, index: int, op: Operation, needed: list[int]) -> str:
        if op.keep:
            return f"must be kept: {op.keep}"
        if any(buffer in self.starts for buffer in needed):
            return "restore point: others are computed from it"
        if not self.plan.recompute or self.plan.budget_bytes is None:
            return "saved: the policy says so" if self.plan.budget_bytes is None else "saved: it fits in the budget"
        if not any(self.graph.buffers[buffer].storage in self.at_peak for buffer in needed):
            return "saved: it is not there at the peak"
        if self._price(index) > self.dearest:
            return "saved: too costly to recompute"
        return "saved: it fits in the budget"

    def _price(self, index: int) -> float:
        """Seconds for a byte of what it makes."""
        return self.graph.ops[index].again_seconds / max(1, self._made(_results(self.graph.ops[index])))

    def _bytes(self, op: Operation) -> int:
        kept = [b for b in _results(op) if b in self.starts and not self.dropped[b]]
        return self._made((*kept, *(b for b in _results(op) if b in self.saved)))

    def _made(self, buffers: tuple[int, ...]) -> int:
        return sum(self.graph.storages[s].bytes for s in {self.graph.buffers[b].storage for b in buffers})


def _results(op: Operation) -> tuple[int, ...]:
    return (*op.makes, *(new for _, new in op.writes))


# ---- rows that repeat --------------------------------------------------------------------------------------


def _merged(plan: Plan, rows: Iterator[Row]) -> tuple[Decision, ...]:
    """Rows that differ only in the number of their block as one."""
    listed = list(rows)
    lists = lists_in(plan.structure) if plan.structure else first_numbers(row[0] for row in listed)
    places: dict[tuple[Pattern, str, str, str], set[Indices]] = {}
    sums: dict[tuple[Pattern, str, str, str], list[float]] = {}
    for module, op, decision, reason, size, seconds in listed:
        pattern, indices = split(module, lists)
        key = (pattern, op, decision, reason)
        places.setdefault(key, set()).add(indices)
        total = sums.setdefault(key, [0, 0.0, 0])
        total[0] += size
        total[1] += seconds
        total[2] += 1
    return tuple(
        Decision(labels(key[0], places[key]), *key[1:], int(size), seconds, int(count))
        for key, (size, seconds, count) in sums.items()
    )


def _listed(plan: Plan) -> Iterator[Row]:
    """What the plan alone tells, in the order of the model's modules."""
    order = {path: i for i, (path, _) in enumerate(plan.structure)}
    parts = sorted((order.get(module, -1), module, tail) for module, tail in map(site_parts, plan.recompute))
    for _, module, tail in parts:
        yield module, short(tail.partition(":")[2].rpartition("/")[0]), RECOMPUTED, "", 0, 0.0


# ---- text --------------------------------------------------------------------------------------------------


def _lines(rows: tuple[Decision, ...]) -> Iterator[str]:
    shown = [row for row in rows if row.decision != FREE]
    cells = [
        (row.module or "(model)", row.op if row.count == 1 else f"{row.op} ×{row.count}", row.decision,
         *_amounts(row), row.reason)
        for row in shown
    ]  # fmt: skip
    widths = [max((len(cell[i]) for cell in cells), default=0) for i in range(5)]
    for module, op, decision, size, seconds, reason in cells:
        line = f"  {module:<{widths[0]}}  {op:<{widths[1]}}  {decision:<{widths[2]}}"
        yield f"{line}  {size:>{widths[3]}}  {seconds:>{widths[4]}}  {reason}".rstrip()
    free = sum(row.count for row in rows if row.decision == FREE)
    if free:
        yield f"  {free} more whose results backward does not need"


def _amounts(row: Decision) -> tuple[str, str]:
    if not row.reason:
        return "", ""
    return format_bytes(row.bytes) if row.bytes else "", format_seconds(row.seconds) if row.seconds else ""
