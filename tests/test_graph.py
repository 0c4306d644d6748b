"""A StepGraph is a value: it is the same after a trip through a file, and a file that is none is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from graphs import blocks, chain, random_graph
from lowtide.errors import GraphError
from lowtide.graph import SCHEMA, StepGraph
from tiny import TINY, gpt_step

GRAPHS: dict[str, Callable[[], StepGraph]] = {
    "chain": lambda: chain(5),
    "blocks": lambda: blocks(3),
    "random": lambda: random_graph(1, 20),
    "traced": lambda: TINY["several_results"]().trace(),
    "timed": lambda: TINY["convolutions"]().trace(fake=False, repeats=1, optimizer="adamw"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_the_same_after_a_trip_through_a_file(name: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    graph.save(tmp_path / "graph.json")
    loaded = StepGraph.load(tmp_path / "graph.json")
    assert loaded == graph
    assert loaded.fingerprint == graph.fingerprint
    assert loaded.to_json() == graph.to_json()
    assert lowtide.simulate(loaded, frozenset()) == lowtide.simulate(graph, frozenset())


def test_a_graph_cannot_be_changed() -> None:
    graph = chain(2)
    with pytest.raises(AttributeError):
        graph.ops = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        graph.ops[0].seconds = 0.0  # type: ignore[misc]


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: {name: value for name, value in data.items() if name != key}


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another kind": (lambda data: data | {"kind": "lowtide.Plan"}, "found 'lowtide.Plan'"),
    "no kind": (without("kind"), "found None"),
    "a list": (lambda data: [data], "found 'list'"),
    "newer": (lambda data: data | {"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}.*reads up to {SCHEMA}.*Upgrade"),
    "no schema": (without("schema"), "schema None"),
    "no operations": (without("ops"), "KeyError 'ops'"),
    "no names": (without("names"), "KeyError 'names'"),
    "a name too few": (lambda data: data | {"names": data["names"][:-1]}, "IndexError"),
    "a short row": (lambda data: data | {"storages": [[1, 2]]}, "ValueError not enough values"),
    "half an event": (lambda data: data | {"events": data["events"][:-1]}, "ValueError"),
    "text for rows": (lambda data: data | {"buffers": 7}, "TypeError"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_graph_is_refused_and_the_message_says_why(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(change(chain(2).to_json())))
    with pytest.raises(GraphError, match=message) as caught:
        StepGraph.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"not json", b"\xff\xfe\x00\x01"])
def test_a_file_that_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(content)
    with pytest.raises(GraphError, match="is not a lowtide graph"):
        StepGraph.load(path)


@pytest.mark.parametrize("name", TINY)
def test_every_forward_operation_has_a_site_of_its_own(name: str) -> None:
    sites = [op.site for _, op in TINY[name]().trace().forward_ops()]
    assert len(set(sites)) == len(sites)


def test_sites_and_fingerprint_are_those_of_every_batch_size_and_length() -> None:
    small, large = (gpt_step(blocks=2, batch=b, length=n).trace() for b, n in ((2, 8), (5, 24)))
    assert [op.site for op in small.ops] == [op.site for op in large.ops]
    assert small.fingerprint == large.fingerprint
    other = gpt_step(blocks=3, batch=2, length=8).trace()
    assert other.fingerprint != small.fingerprint


def test_the_first_trace_of_a_process_sees_what_the_next_ones_see() -> None:
    import subprocess
    import sys

    program = """
import torch, lowtide
model = torch.nn.Linear(4, 4)
x = torch.randn(2, 4)
graphs = [lowtide.trace(lambda: model(x.sin().cos()).sum(), model, fake=True, hardware="h100") for _ in range(2)]
assert graphs[0] == graphs[1], [[op.name for op in graph.ops] for graph in graphs]
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_what_is_there_all_the_time_are_parameters_buffers_inputs_and_optimizer_states() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    graph = lowtide.trace(lambda: model(x).sum(), model, optimizer="adamw", repeats=0)
    parameters = sum(p.numel() * 4 for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert graph.optimizer_bytes == 2 * parameters
    assert graph.resident_bytes == 3 * parameters + buffers + x.numel() * 4


def test_the_graph_of_a_transformer_is_a_small_file() -> None:
    graph = gpt_step(blocks=4).trace()
    size = len(json.dumps(graph.to_json(), separators=(",", ":")))
    per_block = 2_000_000 / 32
    assert size < 4 * per_block


@pytest.mark.slow
def test_the_graph_of_32_blocks_is_below_2_megabytes() -> None:
    graph = gpt_step(blocks=32).trace()
    assert len(json.dumps(graph.to_json(), separators=(",", ":"))) < 2_000_000
