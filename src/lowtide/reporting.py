"""From a graph and a plan to a report: all that is shown is simulated here, nothing is shown here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtide import policies
from lowtide.course import course
from lowtide.graph import StepGraph
from lowtide.hand import plan_of
from lowtide.plan import Plan
from lowtide.plan_text import short
from lowtide.planning import Planner
from lowtide.reports.content import Cell, Content, Point
from lowtide.simulation import simulate
from lowtide.structure import prefixes, repeated_blocks
from lowtide.tape.policy import Policy

HAND: dict[str, Policy] = {
    "keep_matmuls": policies.keep_matmuls,
    "segments": policies.segments(),
    "sqrt": policies.sqrt,
    "torch per block": policies.segments(keep_last=False),
    "recompute_all": policies.recompute_all,
}
"""Hand policies to compare with."""
LARGEST = 18
"""Rows of the map of blocks."""


def report(
    graph: StepGraph, plan: Plan, *, title: str = "", assumptions: tuple[str, ...] = (), points: int = 12
) -> Content:
    """All that a report of ``plan`` on ``graph`` shows.

    Args:
        graph: what the step computes, from ``lowtide.trace``.
        plan: the plan to show.
        title: of the page.
        assumptions: what the numbers rest on, besides what the graph says itself.
        points: how many budgets the frontier is solved for; 0 leaves it out.

    Raises:
        PlanMismatch: the plan was made for another model.

    Example:
        >>> from lowtide.reporting import report  # doctest: +SKIP
        >>> from lowtide.reports import page  # doctest: +SKIP
        >>> Path("report.html").write_text(page(report(graph, plan)))  # doctest: +SKIP
    """
    if graph.structure:
        plan.check(graph.structure)
    plain = simulate(graph, frozenset(), trail=False)
    timeline = simulate(graph, plan, trail=False)
    prediction = replace(
        plan.prediction or timeline.prediction,
        peak_bytes=timeline.peak_bytes,
        step_seconds=timeline.step_seconds,
        plain_seconds=plain.step_seconds,
        plain_peak_bytes=plain.peak_bytes,
    )
    return Content(
        title=title or f"A step of {graph.structure[0][1] if graph.structure else 'the model'}",
        plan_text=str(plan),
        prediction=prediction,
        budget_bytes=plan.budget_bytes,
        plain=course(graph),
        planned=course(graph, plan),
        peak_where=timeline.peak_where,
        points=points_of(graph, plan, points),
        cells=tuple(_cells(graph, plan)),
        plain_table=graph.memory_table(),
        planned_table=graph.memory_table(plan),
        assumptions=(*assumptions, *_assumptions(graph)),
    )


def points_of(graph: StepGraph, plan: Plan, points: int) -> tuple[Point, ...]:
    """The frontier at ``points`` budgets, the hand policies, and at last ``plan``, as peaks and times."""
    return tuple(_points(graph, plan, points))


def _points(graph: StepGraph, plan: Plan, points: int) -> Iterator[Point]:
    plain = simulate(graph, frozenset(), trail=False).step_seconds

    def point(name: str, one: Plan, group: str) -> Point:
        timeline = simulate(graph, one, trail=False)
        return Point(name, timeline.peak_bytes, timeline.step_seconds / plain if plain else 1.0, group)

    if points:
        for one in Planner(graph, solver="chain").frontier(points):
            yield point("frontier", one, "frontier")
        for name, policy in HAND.items():
            yield point(name, plan_of(graph, policy), "by hand")
    yield point("this plan", plan, "this plan")


def _cells(graph: StepGraph, plan: Plan) -> Iterator[Cell]:
    """Operations inside of repeated blocks whose results backward needs; the largest ones."""
    numbers = {path: number for number, path in enumerate(repeated_blocks(graph.structure))}
    needed = {graph.buffers[buffer].storage for buffer in graph.saves}
    sizes: dict[tuple[str, int], list[int]] = {}
    for _, op in graph.forward_ops():
        block = next((path for path in prefixes(op.module) if path in numbers), None)
        made = [graph.buffers[b].storage for b in op.makes]
        size = sum(graph.storages[s].bytes for s in made if s in needed)
        if block is None or not size:
            continue
        inner = op.module[len(block) + 1 :]
        name = f"{inner}: {short(op.name)}" if inner else short(op.name)
        both = sizes.setdefault((name, numbers[block]), [0, 0])
        both[0] += size
        both[1] += size if op.site in plan.recompute else 0
    totals: dict[str, int] = {}
    for (name, _), (size, _) in sizes.items():
        totals[name] = totals.get(name, 0) + size
    shown = set(sorted(totals, key=lambda name: -totals[name])[:LARGEST])
    for (name, number), (size, again) in sizes.items():
        if name in shown:
            yield Cell(number, name, size, again / size)


def _assumptions(graph: StepGraph) -> Iterator[str]:
    yield "bytes are those of tensors; an allocator's fragments, a device's context and libraries come on top"
    if graph.measured:
        yield "times are sums of operations timed on this machine"
    else:
        yield f"times are a roofline of {graph.hardware or 'unnamed hardware'}: they rank plans, they do not promise"
    if not graph.optimizer_bytes:
        yield "no optimizer states are counted: the trace was given no optimizer"
