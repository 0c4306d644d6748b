"""simulate: what a plan costs, in bytes over time and in seconds. The one judge; a pure function without torch.

It follows the rules of the tape, which ``simulated_step`` spells out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lowtide.graph import StepGraph
from lowtide.plan import Plan, Prediction
from lowtide.simulated_step import SimulatedStep


@dataclass(frozen=True)
class Timeline:
    """Bytes over the moments of a step under a plan, and what the step costs."""

    bytes: tuple[int, ...]
    """Live bytes after each event of the graph, all kinds together."""
    highs: tuple[int, ...]
    """Most bytes live in the course of each event."""
    peak_bytes: int
    peak_event: int
    """Index of the event in whose course the peak is reached."""
    peak_where: str
    """Phase and module path of the peak."""
    step_seconds: float
    recompute_seconds: float
    extra_flops: int
    replays: tuple[int, ...] = field(repr=False, default=())
    """The operations that are run again, in the order in which that happens."""
    live_at_peak: tuple[int, ...] = field(repr=False, default=())
    """Storages that live at the peak; a rebuilt one is its storage."""

    @property
    def replayed(self) -> int:
        """How many operations are run again."""
        return len(self.replays)

    @property
    def prediction(self) -> Prediction:
        """The costs alone."""
        return Prediction(self.peak_bytes, self.step_seconds, self.recompute_seconds, self.extra_flops)

    def __str__(self) -> str:
        from lowtide.reports import timeline_text

        return timeline_text(self)

    def _repr_html_(self) -> str:
        from lowtide.reports import html_of

        return html_of(str(self))


def simulate(
    graph: StepGraph, plan: Plan | Mapping[int, int] | Collection[int], *, trail: bool = True, live: bool = True
) -> Timeline:
    """Run the step of ``graph`` on paper under ``plan``.

    Args:
        graph: what the step computes.
        plan: a plan, or the indices of the operations to recompute, with their depths or all at depth 0.
        trail: also give the bytes at every event and what lives at the peak.
        live: of those, also what lives at the peak, which takes as long again.

    Returns:
        Bytes over time (parameters, gradients, optimizer states and inputs included), the peak and where it is,
        seconds, and extra flops.

    Example:
        >>> timeline = lowtide.simulate(graph, plan)  # doctest: +SKIP
        >>> timeline.peak_bytes, timeline.step_seconds  # doctest: +SKIP
    """
    chosen = depths_of(graph, plan)
    dropped = _dropped(graph, chosen)
    run = SimulatedStep(graph, chosen, dropped)
    run.go(trail)
    recompute = sum(graph.ops[i].again_seconds for i in run.replays)
    tape = graph.host_seconds * (run.recorded + len(run.replays)) + (graph.recording_seconds if run.recorded else 0.0)
    there: tuple[int, ...] = ()
    if trail and live:
        again = SimulatedStep(graph, chosen, dropped)
        again.stop_at = (run.peak_event, run.peak)
        again.go(trail=False)
        there = again.live
    return Timeline(
        bytes=tuple(run.trail),
        highs=tuple(run.highs),
        peak_bytes=run.peak,
        peak_event=run.peak_event,
        peak_where=run.where(),
        step_seconds=graph.seconds + recompute + tape,
        recompute_seconds=recompute,
        extra_flops=sum(graph.ops[i].flops for i in run.replays),
        replays=tuple(run.replays),
        live_at_peak=there,
    )


def depths_of(graph: StepGraph, plan: Plan | Mapping[int, int] | Collection[int]) -> dict[int, int]:
    """The operations that ``plan`` recomputes, with their depths."""
    if isinstance(plan, Plan):
        deep = dict(plan.depths)
        return {i: deep.get(op.site, 0) for i, op in graph.forward_ops() if op.site in plan.recompute}
    if isinstance(plan, Mapping):
        return dict(plan)
    return dict.fromkeys(plan, 0)


def _dropped(graph: StepGraph, chosen: Collection[int]) -> list[bool]:
    """Which buffers the tape drops when it is told to recompute ``chosen``."""
    dropped = [False] * len(graph.buffers)
    for index in sorted(chosen):
        op = graph.ops[index]
        for buffer in op.makes:
            dropped[buffer] = graph.buffers[buffer].droppable
        for old, new in op.writes:
            dropped[new] = dropped[old] and graph.buffers[new].droppable
    return dropped
