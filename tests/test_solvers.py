"""Solvers against the exhaustive search, on steps that are small enough for it."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache

import pytest

from graphs import blocks, chain, droppable_ops, random_graph
from lowtide.graph import Event, StepGraph
from lowtide.planning import Planner
from lowtide.simulation import simulate
from lowtide.solvers.bounds import LowerBound
from lowtide.solvers.chain import ChainSolver
from lowtide.solvers.exhaustive import ExhaustiveSolver, Found, fastest
from lowtide.solvers.menu import Cut, Facts, again_seconds
from lowtide.solvers.milp import MilpSolver, Programme
from lowtide.solvers.moments import Decisions, Moments
from lowtide.solvers.segmentation import chain_of
from tiny import TINY, gpt_step


def drawn(seed: int) -> Callable[[], StepGraph]:
    return lambda: random_graph(seed, 4 + seed % 7)


def much_in_place(seed: int) -> Callable[[], StepGraph]:
    return lambda: random_graph(1000 + seed, 4 + seed % 7, writes=0.5, outputs=0.4)


def with_host(seed: int) -> Callable[[], StepGraph]:
    """The host's time for recording and replaying weighs about as much as a quick operation."""
    return lambda: replace(random_graph(2000 + seed, 4 + seed % 7), host_seconds=0.4, recording_seconds=1.0)


def sharded(seed: int) -> Callable[[], StepGraph]:
    return lambda: random_graph(3000 + seed, 4 + seed % 7, gathers=0.5)


def equal_blocks(seed: int) -> Callable[[], StepGraph]:
    count, length = ((3, 3), (2, 5), (4, 2))[seed % 3]
    return lambda: blocks(count, seed, length=length)


SMALL: dict[str, Callable[[], StepGraph]] = {
    **{f"random {seed}": drawn(seed) for seed in range(20)},
    **{f"in place {seed}": much_in_place(seed) for seed in range(12)},
    **{f"host {seed}": with_host(seed) for seed in range(8)},
    **{f"sharded {seed}": sharded(seed) for seed in range(8)},
    **{f"blocks {seed}": equal_blocks(seed) for seed in range(6)},
    "chain": lambda: chain(9),
}
MANY: dict[str, Callable[[], StepGraph]] = {
    **{f"random {seed}": drawn(seed) for seed in range(20, 150)},
    **{f"in place {seed}": much_in_place(seed) for seed in range(12, 120)},
    **{f"host {seed}": with_host(seed) for seed in range(8, 80)},
    **{f"sharded {seed}": sharded(seed) for seed in range(8, 80)},
    **{f"blocks {seed}": equal_blocks(seed) for seed in range(6, 24)},
}
TRACED = [name for name in TINY if name not in ("recurrent", "unrolled")]
"""Of at most 14 operations to decide about."""

CASES = [
    *(pytest.param(build, id=name) for name, build in SMALL.items()),
    *(pytest.param(build, id=name, marks=pytest.mark.slow) for name, build in MANY.items()),
    *(pytest.param(lambda name=name: traced(name), id=name) for name in TRACED),
]


@cache
def traced(name: str) -> StepGraph:
    return TINY[name]().trace(hardware="a100-80")


@cache
def front_of(build: Callable[[], StepGraph]) -> tuple[StepGraph, list[Found]]:
    graph = build()
    return graph, ExhaustiveSolver().front(graph)


def budgets(front: list[Found], seed: int = 0, count: int = 3) -> list[int]:
    """The lowest feasible budget, that of keeping everything, some between them, and the corners next to those."""
    rng = random.Random(seed)
    low, high = front[-1][1].peak_bytes, front[0][1].peak_bytes
    corners = [found[1].peak_bytes for found in front]
    return sorted({low, high, *rng.choices(corners, k=2), *(rng.randint(low, high) for _ in range(count))})


# ---- the exhaustive search itself ------------------------------------------------------------------------------


def test_the_front_is_the_front() -> None:
    graph = random_graph(7, 7)
    front = ExhaustiveSolver().front(graph)
    ops = droppable_ops(graph)
    for size in range(len(ops) + 1):
        for chosen in itertools.combinations(ops, size):
            timeline = simulate(graph, chosen)
            best = fastest(front, timeline.peak_bytes)
            assert best is not None
            assert best[1].step_seconds <= timeline.step_seconds
    peaks = [found[1].peak_bytes for found in front]
    seconds = [found[1].step_seconds for found in front]
    assert peaks == sorted(set(peaks), reverse=True)
    assert seconds == sorted(set(seconds))
    assert front[0][0] == frozenset()


def test_nothing_fits_less_than_the_least() -> None:
    front = ExhaustiveSolver().front(chain(4))
    assert fastest(front, front[-1][1].peak_bytes - 1) is None


def test_too_many_operations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2\^20 choices; at most 14"):
        ExhaustiveSolver().front(chain(19))


# ---- the rows of the programme are what simulate counts --------------------------------------------------------


@pytest.mark.parametrize("build", [*SMALL.values()][:34:3])
def test_rows_give_the_bytes_that_simulate_counts(build: Callable[[], StepGraph]) -> None:
    graph = build()
    decisions = Decisions(graph)
    rng = random.Random(1)
    chosen = {i for i in decisions.ops if rng.random() < 0.7}
    whole = [float(i not in chosen) for i in decisions.ops]
    timeline = simulate(graph, chosen)
    for event, (kind, _) in enumerate(graph.events):
        if kind not in (Event.RUN, Event.UNPACK):
            continue
        most = 0.0
        for running in (-1, *(decisions.ops if kind == Event.UNPACK else ())):
            moments = Moments(decisions)
            constant, terms = moments.bytes_at(event, running)
            values = moments.rows.least(whole)
            most = max(most, constant + sum(size * values[column] for column, size in terms.items()))
            rows = zip(moments.rows.low, moments.rows.terms, strict=True)
            assert all(low <= sum(v * values[c] for c, v in row.items()) + 1e-9 for low, row in rows)
        assert most == timeline.highs[event], event


# ---- milp ------------------------------------------------------------------------------------------------------


def programme_of(graph: StepGraph, **settings: float) -> Programme:
    programme = MilpSolver(**settings).prepare(graph)  # type: ignore[arg-type]
    assert programme is not None
    return programme


@pytest.mark.parametrize("build", CASES)
def test_milp_finds_the_optimum_at_every_budget(build: Callable[[], StepGraph]) -> None:
    graph, front = front_of(build)
    programme = programme_of(graph)
    for budget in budgets(front):
        best = fastest(front, budget)
        answer = programme.best(budget)
        assert best is not None
        assert answer.found is not None
        assert answer.proven
        chosen, timeline = answer.found
        assert timeline == simulate(graph, chosen)
        assert timeline.peak_bytes <= budget
        assert timeline.step_seconds == pytest.approx(best[1].step_seconds, rel=1e-4)
        assert answer.bound <= (best[1].step_seconds - graph.seconds) * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("build", CASES)
def test_milp_finds_the_least_peak_and_proves_that_less_is_impossible(build: Callable[[], StepGraph]) -> None:
    graph, front = front_of(build)
    programme = programme_of(graph)
    least = programme.least()
    assert least.proven
    assert least.found is not None
    assert least.found[1].peak_bytes == front[-1][1].peak_bytes
    below = programme.best(front[-1][1].peak_bytes - 1)
    assert (below.found, below.bound, below.proven) == (None, float("inf"), True)


def test_milp_improves_on_a_start_or_gives_it_back() -> None:
    graph = random_graph(3, 9)
    front = ExhaustiveSolver().front(graph)
    programme = programme_of(graph)
    budget = front[-1][1].peak_bytes
    slow = frozenset(Decisions(graph).ops)
    start = slow, simulate(graph, slow)
    improved = programme.best(start[1].peak_bytes, start)
    best = fastest(front, start[1].peak_bytes)
    assert improved.found is not None
    assert best is not None
    assert improved.found[1].step_seconds == pytest.approx(best[1].step_seconds)
    assert programme.best(budget, front[-1]).found == front[-1]


def test_milp_stops_in_time_with_what_it_has() -> None:
    graph = gpt_step(blocks=5).trace(hardware="a100-80")
    everything = frozenset(Decisions(graph).ops)
    start = everything, simulate(graph, everything)
    plain = simulate(graph, ())
    programme = programme_of(graph, seconds=0.3)
    begun = time.process_time()
    answer = programme.best((plain.peak_bytes + 3 * graph.resident_bytes) // 4, start)
    assert time.process_time() - begun < 5
    assert answer.found is not None
    assert answer.bound <= answer.found[1].step_seconds - graph.seconds + 1e-12


def test_milp_counts_the_hosts_time_for_every_recorded_operation() -> None:
    graph = replace(random_graph(5, 9), host_seconds=0.7)
    front = ExhaustiveSolver().front(graph)
    programme = programme_of(graph)
    for budget in budgets(front):
        best, answer = fastest(front, budget), programme.best(budget)
        assert best is not None
        assert answer.found is not None
        assert answer.found[1].step_seconds == pytest.approx(best[1].step_seconds)
        assert answer.bound == pytest.approx(best[1].step_seconds - graph.seconds, rel=1e-4, abs=1e-6)


def test_milp_takes_no_step_that_is_too_large_or_has_nothing_to_decide() -> None:
    assert MilpSolver(largest=5).prepare(chain(6)) is None
    assert MilpSolver().prepare(TINY["perceptron"]().trace()) is not None
    assert MilpSolver().prepare(random_graph(0, 1, writes=0)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
def test_milp_proves_the_optimum_of_a_small_transformer(blocks: int) -> None:
    graph = gpt_step(blocks=blocks, width=64, length=64, batch=4, vocabulary=256).trace(hardware="a100-80")
    programme = programme_of(graph, seconds=60)
    least = programme.least()
    assert least.proven
    assert least.found is not None
    low, high = least.found[1].peak_bytes, simulate(graph, ()).peak_bytes
    seconds = []
    for part in (0, 0.1, 0.3, 0.6, 0.9):
        answer = programme.best(low + part * (high - low))
        assert answer.proven
        assert answer.found is not None
        seconds.append(answer.found[1].step_seconds)
    assert seconds == sorted(seconds, reverse=True)


# ---- bounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", CASES)
def test_no_lower_bound_is_above_the_optimum(build: Callable[[], StepGraph]) -> None:
    graph, front = front_of(build)
    bound = LowerBound(graph, chain_of(graph), any_plan=True)
    for budget in budgets(front, count=6):
        best = fastest(front, budget)
        assert best is not None
        assert bound.seconds(budget) <= (best[1].step_seconds - graph.seconds) * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize("build", [*SMALL.values()])
def test_the_bound_for_kept_boundaries_is_not_above_the_optimum_that_keeps_them(
    build: Callable[[], StepGraph], rebuilt: bool
) -> None:
    graph = build()
    chain = chain_of(graph)
    front = ExhaustiveSolver().front(graph, keep=chain.boundaries)
    bound = LowerBound(graph, chain, rebuilt=rebuilt)
    for budget in budgets(front, count=6):
        best = fastest(front, budget)
        assert best is not None
        assert bound.seconds(budget) <= (best[1].step_seconds - graph.seconds) * (1 + 1e-6) + 1e-12


# ---- what solvers minimise is what simulate counts ----------------------------------------------------------------


def on_top(graph: StepGraph, chosen: Collection[int]) -> float:
    """Seconds on top of the plain step and of recording at all."""
    recording = graph.recording_seconds if chosen else 0.0
    return simulate(graph, chosen, trail=False).step_seconds - graph.seconds - recording


@pytest.mark.parametrize("seed", range(12))
def test_a_cut_pays_for_what_it_recomputes_as_simulate_does(seed: int) -> None:
    graph = with_host(seed)()
    whole = chain_of(graph)
    for segment in whole.segments:
        cut = Cut(Facts.of(graph, whole), segment)
        for lam in (1e-5, 1e-4, 1e-3) if cut.free else ():
            chosen = {segment.first + offset for offset in cut.solve(lam, 0.0)}
            assert on_top(graph, chosen) == pytest.approx(sum(again_seconds(graph, i) for i in chosen))


@pytest.mark.parametrize("seed", range(6))
def test_the_seconds_of_choices_add_up_to_those_of_simulate(seed: int) -> None:
    graph = replace(blocks(4, seed, length=5), host_seconds=0.3, recording_seconds=2.0)
    tables = ChainSolver().prepare(graph)
    rng = random.Random(seed)
    for _ in range(20):
        picks = [rng.choice(row) for row in tables.rows]
        segments = zip(tables.chain.segments, picks, strict=True)
        chosen = {segment.first + offset for segment, pick in segments for offset in pick.recompute}
        assert on_top(graph, chosen) == pytest.approx(sum(pick.seconds for pick in picks))


# ---- the chain -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", CASES)
def test_the_chain_never_beats_the_optimum_and_is_seldom_far_from_it(build: Callable[[], StepGraph]) -> None:
    graph, front = front_of(build)
    planner = Planner(graph, solver="chain")
    low, deep = planner.lowest.peak, any(planner.lowest.chosen.values())
    assert low >= front[-1][1].peak_bytes or deep  # the optimum is that of one level
    for budget in budgets(front):
        best = fastest(front, budget)
        assert best is not None
        if budget >= low:
            plan = planner.solve(budget)
            assert plan.prediction is not None
            assert plan.prediction.peak_bytes <= budget
            assert plan.prediction.step_seconds / best[1].step_seconds >= 1 - 1e-9
            assert plan.depths or plan.prediction.step_seconds / best[1].step_seconds < 1.4


# ---- HiGHS -----------------------------------------------------------------------------------------------------


def test_highs_says_nothing_and_starts_no_threads() -> None:
    program = """
from lowtide.solvers.highs import silent
import numpy as np
solver = silent()
solver.addVars(9, np.zeros(9), np.ones(9))
solver.changeColsIntegrality(9, np.arange(9, dtype=np.int32), np.ones(9, dtype=np.uint8))
solver.run()
assert "Threads:\\t1\\n" in open("/proc/self/status").read()
print("mine")
"""
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert (run.returncode, run.stdout) == (0, "mine\n"), run.stderr


def test_highs_works_where_others_have_started_its_threads() -> None:
    program = """
import highspy, numpy as np
from lowtide.solvers.highs import silent
other = highspy.Highs()
other.setOptionValue("output_flag", False)
for solver in (other, silent()):
    solver.addVars(9, np.zeros(9), np.ones(9))
    solver.changeColsIntegrality(9, np.arange(9, dtype=np.int32), np.ones(9, dtype=np.uint8))
    assert solver.run() == highspy.HighsStatus.kOk
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
