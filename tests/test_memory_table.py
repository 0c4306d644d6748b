"""Who holds what at the peak: nothing is left out, nothing counts twice, repeated blocks are one row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowtide
from blocks import KILO, WIDTH, net
from lowtide.demo.model import GPT, GPTShape
from lowtide.graph import StepGraph
from lowtide.memory_table import MemoryRow, MemoryTable
from lowtide.tape.policy import Policy

POLICIES = [
    lowtide.policies.keep_all,
    lowtide.policies.recompute_all,
    lowtide.policies.keep_matmuls,
    lowtide.policies.segments(),
]


@pytest.fixture(scope="module")
def gpt() -> StepGraph:
    torch.manual_seed(0)
    model = GPT(GPTShape(vocabulary=32, length=8, width=16, blocks=3, heads=2))
    tokens = torch.randint(0, 32, (2, 9))
    return lowtide.trace(lambda: model.loss(tokens), model=model, optimizer="adamw", repeats=0)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("source", ["drawn", "traced"])
def test_the_rows_add_up_to_the_peak(source: str, policy: Policy, gpt: StepGraph) -> None:
    graph = net() if source == "drawn" else gpt
    plan = lowtide.solve(graph, policy=policy)
    table = graph.memory_table(plan)
    timeline = lowtide.simulate(graph, plan)
    assert sum(row.bytes for row in table.rows) == table.total_bytes == timeline.peak_bytes
    assert table.where == timeline.peak_where
    assert all(row.bytes > 0 and row.count > 0 for row in table.rows)


def test_a_peak_inside_of_a_replay_is_counted_to_the_byte() -> None:
    graph = _with_larger_products(net())
    plan = lowtide.solve(graph, policy=lowtide.policies.recompute_all)
    table = graph.memory_table(plan)
    assert "recomputation" in table.where
    assert sum(row.bytes for row in table.rows) == table.total_bytes
    assert [row for row in table.rows if row.op == "recomputation"] == [
        MemoryRow("head", "temporaries", "recomputation", WIDTH, 1)
    ]


def _with_larger_products(graph: StepGraph) -> StepGraph:
    """Make what backward does not need itself the largest of all."""
    larger = {graph.buffers[b].storage for op in graph.ops if op.name == "aten.mul.Tensor" for b in op.makes}
    storages = [replace(s, bytes=s.bytes * (20 if i in larger else 1)) for i, s in enumerate(graph.storages)]
    return replace(graph, storages=tuple(storages))


def test_without_a_plan_everything_is_kept() -> None:
    graph = net()
    assert graph.memory_table() == graph.memory_table(lowtide.solve(graph, policy=lowtide.policies.keep_all))


def test_repeated_blocks_are_one_row_and_others_go_by_their_name(gpt: StepGraph) -> None:
    modules = dict(gpt.memory_table().modules)
    assert {"blocks.0-2", "tokens", "norm", "(optimizer states)", "(inputs)"} <= set(modules)
    assert not any(module.startswith("blocks.") for module in modules if module != "blocks.0-2")


def test_each_kind_is_as_large_as_it_is(gpt: StepGraph) -> None:
    kinds = dict(gpt.memory_table().kinds)
    model = GPT(GPTShape(vocabulary=32, length=8, width=16, blocks=3, heads=2))
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert kinds["parameters"] == parameters
    assert kinds["optimizer states"] == 2 * parameters
    assert kinds["inputs"] == 2 * 9 * 8


def test_a_shared_parameter_counts_once() -> None:
    embedding, head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, head)
    graph = lowtide.trace(lambda: model(torch.arange(4)).sum(), model=model, repeats=0)
    rows = [row for row in graph.memory_table().rows if row.kind == "parameters"]
    assert rows == [MemoryRow("0", "parameters", "", 16 * 8 * 4, 1)]


def test_gradients_from_before_the_step_count() -> None:
    graph = replace(net(), gradient_bytes=7 * KILO)
    table = graph.memory_table()
    assert MemoryRow("", "gradients", "", 7 * KILO, 1) in table.rows
    assert sum(row.bytes for row in table.rows) == table.total_bytes


def test_a_mask_is_called_after_what_filled_it(gpt: StepGraph) -> None:
    assert "bernoulli_" in dict(gpt.memory_table().ops("saved activations"))


def test_a_step_without_a_model_goes_by_the_modules_that_ran() -> None:
    graph = replace(net(), structure=())
    assert graph.memory_table() == net().memory_table()


def test_without_repeated_blocks_the_children_of_the_model_are_told_apart() -> None:
    assert "blocks" in dict(net(1).memory_table().modules)


def test_a_step_that_computes_nothing_holds_what_was_there() -> None:
    graph = StepGraph((), (), (), (), (), optimizer_bytes=3)
    assert graph.memory_table() == MemoryTable((MemoryRow("", "optimizer states", "", 3, 1),), 3, "at the start")
