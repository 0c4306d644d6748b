"""Plans as text and as files: repeated blocks are written once, nothing is lost, another model is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from blocks import BLOCK, net, structure
from lowtide.errors import GraphError, PlanMismatch
from lowtide.graph import structure_fingerprint
from lowtide.plan import Plan, Prediction
from lowtide.repetition import fold, unfold

PREDICTION = Prediction(
    peak_bytes=6 << 30,
    step_seconds=1.1,
    recompute_seconds=0.1,
    extra_flops=10**12,
    bound_seconds=1.09,
    gap=0.01,
    plain_seconds=1.0,
    plain_peak_bytes=12 << 30,
)


def sites(*rows: tuple[str, range, str]) -> frozenset[str]:
    """Sites of (path in a block, numbers of blocks, operation)."""
    return frozenset(
        f"{'.'.join(filter(None, [f'blocks.{n}', path]))}/0:{op}/0" for path, blocks, op in rows for n in blocks
    )


GELU, NORM, MATMUL = "aten.gelu.default", "aten.native_layer_norm.default", "aten.addmm.default"
ADD = "aten.add.Tensor"
TWO_KINDS = Plan(
    recompute=sites(
        ("mlp.1", range(32), GELU),
        ("norm", range(32), NORM),
        ("mlp.0", range(12, 32), MATMUL),
        ("", range(30, 32), ADD),
    )
    | {"head/0:aten.addmm.default/0", "/0:aten.mse_loss.default/0"},
    structure=structure(32),
    fingerprint=structure_fingerprint(structure(32)),
    solver="chain",
    budget_bytes=8 << 30,
    prediction=PREDICTION,
)


# ---- text --------------------------------------------------------------------------------------------------


def test_repeated_blocks_are_written_once() -> None:
    assert str(TWO_KINDS) == (
        "Plan (chain), for a budget of 8.00 GiB\n"
        "  peak       6.00 GiB   -50.0 %, plain is 12.0 GiB\n"
        "  step       1.10 s     +10.0 %, plain is 1.00 s\n"
        "  bound      1.09 s     no plan that keeps what blocks hand on is faster; this one is 1.0 % above\n"
        "  recompute  88 operations in 100 ms\n"
        "    blocks.0-31   norm, mlp.1\n"
        "    blocks.12-31  also mlp.0\n"
        "    blocks.30-31  also add\n"
        "    elsewhere     head, mse_loss"
    )


def test_a_wide_gap_to_the_bound_is_explained() -> None:
    narrow, wide = (str(replace(TWO_KINDS, prediction=replace(PREDICTION, gap=gap))) for gap in (0.02, 0.021))
    assert "what replays hold for a moment" in wide
    assert "what replays hold for a moment" not in narrow


def test_a_plan_without_a_prediction_says_what_it_recomputes() -> None:
    assert str(Plan(frozenset({"fc/0:aten.addmm.default/0"}))) == (
        "Plan (by hand)\n  recompute  1 operation\n    model  fc"
    )


def test_a_plan_that_keeps_everything_says_so() -> None:
    assert str(Plan(frozenset(), solver="keep all")) == "Plan (keep all)\n  recompute  nothing"


def test_where_only_a_part_of_a_module_is_recomputed_its_operations_are_named() -> None:
    norm = [("norm", range(4), f"aten.{op}") for op in ("pow.Tensor_Scalar", "mul.Tensor")]
    plan = Plan(sites(*norm, ("norm", range(2), "aten.rsqrt.default")), structure=structure(4))
    assert str(plan).splitlines()[2:] == [
        "    blocks.0-1  norm",
        "    blocks.2-3  norm (mul, pow)",
    ]


def test_without_a_structure_the_first_number_of_a_path_is_that_of_the_block() -> None:
    plan = Plan(sites(("mlp.1", range(3), GELU), ("mlp.0", range(3), MATMUL)))
    assert str(plan).splitlines()[2:] == ["    blocks.0-2  mlp.0-1"]


def test_lists_inside_of_lists_are_written_once() -> None:
    rows = [("", "Net"), ("layers", "ModuleList")]
    for layer in range(4):
        rows += [(f"layers.{layer}", "Layer"), (f"layers.{layer}.experts", "ModuleList")]
        for expert in range(8):
            rows += [(f"layers.{layer}.experts.{expert}{path}", kind) for path, kind in (("", "MLP"), (".act", "SiLU"))]
    chosen = {f"layers.{i}.experts.{k}.act/0:aten.silu.default/0" for i in range(4) for k in range(8)}
    plan = Plan(frozenset(chosen), structure=tuple(rows))
    assert str(plan).splitlines()[2:] == ["    layers.0-3.experts.0-7  act"]
    assert len(plan.to_json()["recompute"]) == 1
    assert Plan.from_json(plan.to_json()) == plan


def test_several_levels_are_mentioned() -> None:
    plan = Plan(sites(("norm", range(4), NORM)), depths=tuple((f"blocks.{n}.norm/0:{NORM}/0", n) for n in range(4)))
    assert "4 operations; 4 levels deep" in str(plan)


def test_long_lists_are_broken_between_names() -> None:
    plan = Plan(frozenset(f"layer{n}.with_a_long_name/0:{MATMUL}/0" for n in range(40)))
    assert max(map(len, str(plan).splitlines())) <= 100
    assert all(line.endswith(("name", ",")) for line in str(plan).splitlines()[2:])


# ---- explanation -------------------------------------------------------------------------------------------


def test_an_explanation_says_why() -> None:
    graph = net()
    plan = replace(lowtide.solve(graph, policy=lowtide.policies.segments()), solver="segments")
    assert f"{plan.explain(graph)}\n" == dedent(
        """\
        Plan (segments): what is kept, what is recomputed, and why
          embed             embedding             kept        64.0 KiB  1.00 ms  restore point: others are computed from it
          blocks.0-1.norm   native_layer_norm ×2  recomputed   128 KiB  2.00 ms  backward needs it
          blocks.0-1.mlp.0  addmm ×2              recomputed   512 KiB  8.00 ms  backward needs it
          blocks.0-1.mlp.1  gelu ×2               recomputed   512 KiB  2.00 ms  backward needs it
          blocks.0-2.mlp.2  ge ×3                 kept         192 KiB  3.00 ms  must be kept: bool results decide
          blocks.0          add                   kept        64.0 KiB  1.00 ms  restore point: others are computed from it
          blocks.1-2        add ×2                kept         128 KiB  2.00 ms  saved: the policy says so
          blocks.2.norm     native_layer_norm     kept        64.0 KiB  1.00 ms  saved: the policy says so
          blocks.2.mlp.0    addmm                 kept         256 KiB  4.00 ms  saved: the policy says so
          blocks.2.mlp.1    gelu                  kept         256 KiB  1.00 ms  saved: the policy says so
          head              addmm                 kept        64.0 KiB  1.00 ms  saved: the policy says so
          4 more whose results backward does not need
        """  # noqa: E501
    )


def test_under_a_budget_an_explanation_tells_what_is_dear_and_what_does_not_count_at_the_peak() -> None:
    graph = net()
    gelu = frozenset(op.site for op in graph.ops if op.name == GELU and op.module != "blocks.2.mlp.1")
    plan = Plan(gelu, structure=graph.structure, budget_bytes=3 << 20)
    reasons = {(row.module, row.op): row.reason for row in plan.explain(graph).rows if row.decision == "kept"}
    assert reasons == {
        ("embed", "embedding"): "saved: too costly to recompute",
        ("blocks.0-2.norm", "native_layer_norm"): "saved: too costly to recompute",
        ("blocks.0-1.mlp.0", "addmm"): "restore point: others are computed from it",
        ("blocks.2.mlp.0", "addmm"): "saved: too costly to recompute",
        ("blocks.2.mlp.1", "gelu"): "saved: it fits in the budget",
        ("blocks.0-2.mlp.2", "ge"): "must be kept: bool results decide",
        ("blocks.0-2", "add"): "saved: too costly to recompute",
        ("head", "addmm"): "saved: it is not there at the peak",
    }


def test_without_a_graph_an_explanation_lists_what_is_recomputed() -> None:
    explained = TWO_KINDS.explain()
    assert [(row.module, row.op, row.count) for row in explained.rows] == [
        ("", "mse_loss", 1),
        ("blocks.0-31.norm", "native_layer_norm", 32),
        ("blocks.0-31.mlp.1", "gelu", 32),
        ("blocks.12-31.mlp.0", "addmm", 20),
        ("blocks.30-31", "add", 2),
        ("head", "addmm", 1),
    ]


def test_the_counts_of_an_explanation_are_those_of_the_step() -> None:
    graph = net()
    for policy in (lowtide.policies.keep_matmuls, lowtide.policies.recompute_all):
        rows = lowtide.solve(graph, policy=policy).explain(graph).rows
        assert sum(row.count for row in rows) == sum(not op.backward for op in graph.ops)
        assert sum(row.seconds for row in rows) == pytest.approx(sum(s.seconds for _, s in graph.forward_ops()))


def test_the_graph_of_another_model_is_refused() -> None:
    with pytest.raises(PlanMismatch):
        TWO_KINDS.explain(net())


# ---- files -------------------------------------------------------------------------------------------------


def test_a_file_grows_with_what_differs_not_with_the_blocks(tmp_path: Path) -> None:
    TWO_KINDS.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == TWO_KINDS
    data = TWO_KINDS.to_json()
    assert data["structure"] == [
        ["", "Net"],
        ["embed", "Embedding"],
        ["blocks", "ModuleList"],
        {"in": "blocks", "at": "0-31", "modules": [list(row) for row in BLOCK]},
        ["head", "Linear"],
    ]
    assert data["recompute"] == [
        {"modules": "", "ops": ["0:aten.mse_loss.default/0"]},
        {"modules": "blocks.*.mlp.*", "ops": ["0:aten.gelu.default/0"], "at": [["0-31", "1"]]},
        {"modules": "blocks.*.norm", "ops": ["0:aten.native_layer_norm.default/0"], "at": [["0-31"]]},
        {"modules": "blocks.*.mlp.*", "ops": ["0:aten.addmm.default/0"], "at": [["12-31", "0"]]},
        {"modules": "blocks.*", "ops": ["0:aten.add.Tensor/0"], "at": [["30-31"]]},
        {"modules": "head", "ops": ["0:aten.addmm.default/0"]},
    ]


names = st.sampled_from(["a", "b", "0", "1", "2", "3", "7", "01", "*", "x-1", "0-3"])
paths = st.lists(names, max_size=4).map(".".join)
ops = st.sampled_from([GELU, NORM, ADD])
real = st.builds(lambda path, call, op, n: f"{path}/{call}:{op}/{n}", paths, st.integers(0, 2), ops, st.integers(0, 2))
structures = st.lists(st.tuples(paths, st.sampled_from("AB")), max_size=12).map(tuple)


@given(
    recompute=st.frozensets(real | st.text(max_size=6), max_size=30),
    structure=structures,
    depth=st.integers(0, 3),
    prediction=st.sampled_from([None, PREDICTION]),
)
@settings(deadline=None, max_examples=150)
def test_saved_and_loaded_a_plan_is_equal(
    recompute: frozenset[str], structure: Any, depth: int, prediction: Prediction | None
) -> None:
    depths = tuple((site, n % (depth + 1)) for n, site in enumerate(sorted(recompute)))
    plan = Plan(recompute, "f", structure, "s", 5, "h", prediction, depths)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert str(plan)
    assert str(plan.explain())


@given(structures)
@settings(deadline=None, max_examples=150)
def test_a_folded_structure_unfolds_to_itself(rows: Any) -> None:
    assert tuple(unfold(fold(rows))) == rows


def test_depths_are_kept_in_one_order_and_only_where_they_count() -> None:
    one, two = sorted(sites(("norm", range(2), NORM)))
    plan = Plan(frozenset({one, two}), depths=((two, 2), (one, 1), ("elsewhere", 3)))
    assert plan.depths == ((one, 1), (two, 2))
    assert Plan(plan.recompute, depths=((two, 0),)).depths == ()


def test_files_of_the_first_schema_are_read() -> None:
    data = {
        "kind": "lowtide.Plan", "schema": 1, "recompute": sorted(TWO_KINDS.recompute), "fingerprint": "",
        "structure": [["", "Net"]], "solver": "chain", "budget_bytes": None, "hardware": "",
        "prediction": {"peak_bytes": 1, "step_seconds": 1.0, "recompute_seconds": 0.0, "extra_flops": 0},
        "depths": [["head/0:aten.addmm.default/0", 1]],
    }  # fmt: skip
    plan = Plan.from_json(data)
    assert plan.recompute == TWO_KINDS.recompute
    assert plan.structure == (("", "Net"),)
    assert plan.depths == (("head/0:aten.addmm.default/0", 1),)


BROKEN: list[tuple[str, Any, str]] = [
    ("a list", [], "is not a lowtide.Plan"),
    ("a graph", {"kind": "lowtide.StepGraph", "schema": 1}, "found 'lowtide.StepGraph'"),
    ("newer", {"kind": "lowtide.Plan", "schema": 99}, "has schema 99"),
    ("empty", {"kind": "lowtide.Plan", "schema": 2}, "'recompute' is missing"),
    ("text for rows", TWO_KINDS.to_json() | {"recompute": "all"}, "broken"),
    (
        "too few numbers",
        TWO_KINDS.to_json() | {"recompute": [{"modules": "a.*", "ops": []}]},
        "'a.*' does not have 0",
    ),
    ("no range", TWO_KINDS.to_json() | {"structure": [{"in": "a", "at": "x", "modules": []}]}, "broken"),
    ("a wrong prediction", TWO_KINDS.to_json() | {"prediction": {"peak": 1}}, "broken"),
]


@pytest.mark.parametrize(("data", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_or_newer_file_is_refused_by_name(data: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(GraphError) as refused:
        Plan.load(path)
    assert message in str(refused.value)
    assert "plan.json" in str(refused.value)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(GraphError, match="is not a lowtide plan"):
        Plan.load(tmp_path / "plan.json")


# ---- planners ----------------------------------------------------------------------------------------------


def test_planners_say_what_the_plain_step_costs() -> None:
    graph = net()
    plain = lowtide.simulate(graph, frozenset())
    for plan in (lowtide.solve(graph, "90%"), lowtide.solve(graph, policy=lowtide.policies.keep_matmuls)):
        assert plan.prediction is not None
        assert plan.prediction.plain_seconds == plain.step_seconds
        assert plan.prediction.plain_peak_bytes == plain.peak_bytes


def test_a_policy_written_down_has_the_same_name_in_every_process() -> None:
    plan = lowtide.solve(net(), policy=lambda op: True)
    assert " at 0x" not in plan.solver
