"""A hand policy written down as a Plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType

from lowtide.graph import Operation, StepGraph
from lowtide.plan import Plan
from lowtide.simulation import simulate
from lowtide.tape.policy import Op, Policy, as_policy


def plan_of(graph: StepGraph, policy: Policy | Callable[[Op], bool]) -> Plan:
    """The plan that makes the decisions of ``policy``, restore points included."""
    bound = as_policy(policy).bind(graph.structure)
    chosen = {i for i, op in graph.forward_ops() if not op.keep and not _keeps(graph, op, bound)}
    for call in graph.calls:
        if bound.restores(call.path):
            chosen -= {graph.buffers[buffer].maker for buffer in call.outputs}
    plan = Plan(
        recompute=frozenset(graph.ops[i].site for i in chosen),
        fingerprint=graph.fingerprint,
        structure=graph.structure,
        solver=_name(policy),
        hardware=graph.hardware,
    )
    plain = simulate(graph, frozenset(), trail=False)
    prediction = replace(
        simulate(graph, plan, trail=False).prediction,
        plain_seconds=plain.step_seconds,
        plain_peak_bytes=plain.peak_bytes,
    )
    return replace(plan, prediction=prediction)


def _name(policy: Policy | Callable[[Op], bool]) -> str:
    """The same in every process, unlike a function's repr."""
    return policy.__qualname__ if isinstance(policy, FunctionType) else repr(policy)


def _keeps(graph: StepGraph, op: Operation, bound: Policy) -> bool:
    scoped = bound.within(op.module)
    name, _, overload = op.name.rpartition(".")
    decision = scoped.by_name(name)
    if decision is None:
        made = [*op.makes, *(new for _, new in op.writes)]
        size = sum(graph.storages[graph.buffers[buffer].storage].bytes for buffer in made)
        decision = scoped(Op(name, overload, op.module, op.call, op.index, bytes=size))
    return decision
