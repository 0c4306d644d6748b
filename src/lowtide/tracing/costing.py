"""Seconds by a roofline for graphs whose operations were not timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowtide.graph import StepGraph


def with_costs(graph: StepGraph, hardware: Any) -> StepGraph:
    """``graph`` with the seconds that ``hardware`` would need by its roofline."""
    from lowtide import hardware as catalogue
    from lowtide.cost import operation_seconds

    accelerator = catalogue.find(hardware or "cpu") if not hasattr(hardware, "bandwidth") else hardware
    ops = tuple(
        replace(op, seconds=operation_seconds(accelerator, flops=op.flops, bytes=op.bytes, dtype=op.dtype))
        for op in graph.ops
    )
    return replace(graph, ops=ops, hardware=accelerator.name)
