"""Ranks of a distributed job agree on plans, without a collective: by the store through which they met.

budget   ranks that planned the same step for the same budget take what the first of them found; times differ a
         little from rank to rank, so their own plans might. A rank whose step is another (a pipeline's stage,
         a longer batch) takes its own: no plan replays a collective, so none has to wait for another.
plan     ranks that are given different plans for models of the same structure are told so when they attach.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING

import torch.distributed as dist

from lowtide.errors import PlanMismatch
from lowtide.plan import Plan

if TYPE_CHECKING:
    from lowtide.graph import StepGraph

_given: Counter[str] = Counter()


def same_for_all(plan: Plan, graph: StepGraph, budget: int) -> Plan:
    """The plan that the first rank found for the step of ``graph`` within ``budget`` bytes; ``plan`` if this is it."""
    store = _store()
    if store is None:
        return plan
    key = f"lowtide/{_digest(_shape(graph), budget)}"
    found: bytes = store.compare_set(key, "", json.dumps(plan.to_json()))
    return Plan.from_json(json.loads(found), "the plan of another rank")


def require_same(plan: Plan) -> None:
    """Compare a plan that this rank was given with what the other ranks were given.

    Raises:
        PlanMismatch: a rank that attached before has another plan for a model of this structure.
    """
    store = _store()
    if store is None:
        return
    structure = _digest(plan.structure)
    _given[structure] += 1
    own = f"{dist.get_rank()} {_digest(sorted(plan.recompute), plan.depths)}"
    first, _, theirs = (
        store.compare_set(f"lowtide/given/{structure}/{_given[structure]}", "", own).decode().partition(" ")
    )
    if theirs != own.partition(" ")[2]:
        raise PlanMismatch(
            f"rank {dist.get_rank()} was given another plan than rank {first} for the same model. Load one file on "
            "all ranks, or give them a budget: then they take one plan."
        )


def _store() -> dist.Store | None:
    """The store of the job; None without one, and for a job that is only pretended."""
    if (
        not dist.is_available()
        or not dist.is_initialized()
        or dist.get_world_size() == 1
        or dist.get_backend() == "fake"
    ):
        return None
    return dist.distributed_c10d._get_default_store()


def _shape(graph: StepGraph) -> tuple[object, ...]:
    """All of a graph but its times."""
    ops = [(op.site, op.reads, op.makes, op.writes, op.keep) for op in graph.ops]
    return ops, [(s.bytes, s.kind) for s in graph.storages], graph.saves, graph.events, graph.resident_bytes


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
