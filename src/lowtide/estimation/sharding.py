"""What is left of a step's memory on each of several ranks, and what they have to say to each other.

fsdp     every rank holds 1/N of parameters, gradients and states. A block's parameters are gathered while it runs
         (the next block's already too), its gradients are whole until they are scattered, with a copy to send
zero2    1/N of gradients and states; a block's gradients are whole until they are scattered
zero1    1/N of the states
none     DDP: everything everywhere, and buckets to send gradients
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from lowtide.estimation.setups import Setup, Tensor
from lowtide.graph import Buffer, StepGraph, Storage
from lowtide.structure import prefixes, repeated_blocks

BUCKETS_BYTES = 25 * 2**20
"""DDP's default bucket; gradients are views of the buckets, so one more is in flight."""

LINKS = {"H100": 450e9, "H200": 450e9, "B200": 900e9, "A100-40": 300e9, "A100-80": 300e9, "MI300X": 448e9}
"""Bytes/s that a board can send to its neighbours: NVLink and Infinity Fabric, one direction, from the data sheets."""
SLOW_LINK = 25.6e9
"""PCI Express 4 with 16 lanes, four fifths of it: for all others."""
LINK_EFFICIENCY = 0.7
"""Assumed, as collectives on large messages usually get."""


def sharded(graph: StepGraph, setup: Setup) -> StepGraph:
    """``graph`` as one of ``setup.ranks`` ranks holds it."""
    if setup.ranks == 1:
        return graph
    if setup.sharding == "none":
        return _with_extra(graph, BUCKETS_BYTES, "(communication)")
    kinds = {"fsdp": ("parameter", "gradient"), "zero2": ("gradient",), "zero1": ()}[setup.sharding]
    units = unit_bytes(graph)
    outer, largest = units.get("", 0), max((size for path, size in units.items() if path), default=0)
    extra = {
        "fsdp": outer + 2 * largest + 2 * largest,
        "zero2": 2 * largest,
        "zero1": BUCKETS_BYTES,
    }[setup.sharding]
    ranks = setup.ranks
    storages = tuple(replace(s, bytes=math.ceil(s.bytes / ranks)) if s.kind in kinds else s for s in graph.storages)
    smaller = replace(
        graph,
        storages=storages,
        optimizer_bytes=math.ceil(graph.optimizer_bytes / ranks),
        gradient_bytes=math.ceil(graph.gradient_bytes / (ranks if "gradient" in kinds else 1)),
    )
    return _with_extra(smaller, extra, "(gathered)")


def unit_bytes(graph: StepGraph) -> dict[str, int]:
    """Bytes of the parameters of each repeated block, and of all outside of them under ""."""
    blocks = set(repeated_blocks(graph.structure))
    sizes: dict[str, int] = {}
    for storage in graph.storages:
        if storage.kind != "parameter":
            continue
        unit = next((path for path in prefixes(storage.owner) if path in blocks), "")
        sizes[unit] = sizes.get(unit, 0) + storage.bytes
    return sizes


def traffic_bytes(setup: Setup, parameter_bytes: int, trained: Iterable[Tensor]) -> float:
    """Bytes that a rank sends in one optimizer step: a ring, so (N - 1) / N of what is gathered or scattered."""
    if setup.ranks == 1:
        return 0.0
    gradients = sum(tensor.bytes for tensor in trained)
    part = (setup.ranks - 1) / setup.ranks
    if setup.sharding == "fsdp":
        return part * setup.accumulation * (2 * parameter_bytes + gradients)
    return part * 2 * gradients


def link(hardware: str) -> float:
    """Bytes/s that a collective gets between boards of this name."""
    return LINKS.get(hardware, SLOW_LINK) * LINK_EFFICIENCY


def _with_extra(graph: StepGraph, size: int, owner: str) -> StepGraph:
    """``graph`` with memory of ``size`` bytes that is there all the time."""
    buffers = (*graph.buffers, Buffer(len(graph.storages), -1, droppable=False))
    return replace(graph, storages=(*graph.storages, Storage(size, "buffer", owner)), buffers=buffers)
