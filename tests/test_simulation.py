"""simulate against timelines worked out by hand, against laws, and against rehearsals of traced models."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import lowtide
from graphs import Sketch, blocks, chain, droppable_ops, random_graph
from lowtide.graph import Event, StepGraph
from lowtide.plan import Plan
from lowtide.simulation import simulate
from tiny import TINY, Tiny

# ---- by hand: bytes after each event, and the most in its course where that is more --------------------------
#
#            x ──▶ 0 ──▶ a ──▶ 1 ──▶ b ──▶ 2 ──▶ loss         x 100, a 200, b 300 bytes; each operation saves its input
#
#                         keep all       recompute 0        recompute 0 and 1
#   save x                x      100     x       100        x         100
#   run 0                 xa     300     xa      300        xa        300
#   save a                xa     300     xa      300        xa        300
#   run 1                 xab    600     xab     600        xab       600
#   free a                xab    600     xb      400        xb        400
#   save b                xab    600     xb      400        xb        400
#   run 2                 xabl   604     xbl     404        xbl       404
#   free b, loss          xab    600     xb      400        x         100
#   seal                  xab    600     xb      400        x         100
#   unpack b              xab    600     xb      400        x+0a+1b   600
#   run backward of 2     xabB   900     xbB     700        xabB      900
#   release b             xaB    600     xB      400        xaB       600
#   unpack a              xaB    600     xB+0a   600        xaB       600
#   run backward of 1     xaBA   800     xaBA    800        xaBA      800
#   release a, free B     xA     300     xA      300        xA        300
#   unpack x, release x   xA     300     xA      300        xA        300
#   free A                x      100     x       100        x         100

STRAIGHT = {
    (): [100, 300, 300, 600, 600, 600, 604, 604, 600, 600, 600, 900, 600, 600, 800, 600, 300, 300, 300, 100],
    (0,): [100, 300, 300, 600, 400, 400, 404, 404, 400, 400, 400, 700, 400, 600, 800, 600, 300, 300, 300, 100],
    (0, 1): [100, 300, 300, 600, 400, 400, 404, 104, 100, 100, 600, 900, 600, 600, 800, 600, 300, 300, 300, 100],
}


def straight() -> StepGraph:
    sketch = Sketch()
    x = sketch.root(100)
    (a,) = sketch.op([x], 200, saves=[x], seconds=1)
    (b,) = sketch.op([a], 300, saves=[a], seconds=2)
    sketch.op([b], 4, saves=[b], seconds=4)
    return sketch.graph()


@pytest.mark.parametrize("chosen", STRAIGHT)
def test_a_straight_line_is_as_drawn(chosen: tuple[int, ...]) -> None:
    graph = straight()
    timeline = simulate(graph, chosen)
    assert list(timeline.bytes) == STRAIGHT[chosen]
    assert timeline.peak_bytes == max(STRAIGHT[chosen])
    assert timeline.bytes[timeline.peak_event] == timeline.peak_bytes
    assert timeline.replays == chosen
    assert timeline.recompute_seconds == sum((1, 2, 4)[i] for i in chosen)
    assert timeline.step_seconds == graph.seconds + timeline.recompute_seconds


# ---- written in place ----------------------------------------------------------------------------------------
#
#            x ──▶ 0 ──▶ h ──▶ 2 (in place) ──▶ r ──▶ 3 ──▶ loss       h and r are one memory of 200 bytes, r is saved
#                        └──▶ 1 ──▶ q ─────────────────┘              q has 50 bytes
#
#   nobody else reads h     replay: 0 makes 200, 2 writes there                   +200
#   1 is recorded as well   replay: 0 makes 200, 2 writes a copy; h goes          +400, then +200


def in_place(*, fork: bool) -> StepGraph:
    sketch = Sketch()
    x = sketch.root(100)
    (h,) = sketch.op([x], 200)
    ends = sketch.op([h], 50, name="toy.fork.default") if fork else []
    (r,) = sketch.op([h], writes=[h], saves_own=[0])
    sketch.op([r, *ends], 4, saves=ends)
    return sketch.graph()


def high_of_replay(graph: StepGraph, chosen: set[int]) -> tuple[int, int]:
    """Bytes that the first replay takes at most, and those that it leaves."""
    timeline = simulate(graph, chosen)
    unpacks = [e for e, (kind, _) in enumerate(graph.events) if kind == Event.UNPACK]
    event = next(e for e in unpacks if timeline.highs[e] > timeline.bytes[e - 1])
    before = timeline.bytes[event - 1]
    return timeline.highs[event] - before, timeline.bytes[event] - before


def test_a_replay_writes_in_place_where_nobody_else_reads_the_old_version() -> None:
    assert high_of_replay(in_place(fork=False), {0, 1}) == (200, 200)


def test_a_replay_copies_what_somebody_else_reads_before_it_writes() -> None:
    graph = in_place(fork=True)
    assert high_of_replay(graph, {0, 2}) == (200, 200)
    # q is asked for first: 0 and 1 run again (h stays for 2), q goes with its ticket; then 2 copies h.
    timeline = simulate(graph, {0, 1, 2})
    assert timeline.replays == (0, 1, 2)
    copied = next(
        e for e, (k, i) in enumerate(graph.events) if k == Event.UNPACK and graph.saves[i] == graph.ops[2].writes[0][1]
    )
    assert timeline.highs[copied] - timeline.bytes[copied - 1] == 200
    assert timeline.bytes[copied] == timeline.bytes[copied - 1]  # the copy stays, h goes


def test_kept_memory_is_copied_before_it_is_overwritten_for_a_recipe_that_reads_it() -> None:
    #   y (kept) ──▶ 1 ──▶ z (dropped, saved)        2 writes y: recipe 1 takes a copy of 200 along
    sketch = Sketch()
    x = sketch.root(100)
    (y,) = sketch.op([x], 200)
    (z,) = sketch.op([y], 300, saves_own=[0])
    (y,) = sketch.op([y], writes=[y], droppable=False)
    sketch.op([y, z], 4)
    graph = sketch.graph()
    kept, dropped = simulate(graph, ()), simulate(graph, {1})
    wrote = graph.events.index((Event.RUN, 2))
    assert dropped.highs[wrote] - kept.highs[wrote] == 200
    seal = graph.events.index((Event.SEAL, 0))
    assert kept.bytes[seal] == 100 + 300
    assert dropped.bytes[seal] == 100 + 200
    assert dropped.bytes[-1] == kept.bytes[-1]


# ---- recipes ---------------------------------------------------------------------------------------------------


def test_a_recipe_holds_what_it_reads_until_it_has_run() -> None:
    #   x ──▶ 0 ──▶ a (kept, not saved) ──▶ 1 ──▶ b (dropped, saved by 2)
    sketch = Sketch()
    x = sketch.root(100)
    (a,) = sketch.op([x], 200)
    (b,) = sketch.op([a], 300)
    sketch.op([b], 4, saves=[b])
    graph = sketch.graph()
    seal = graph.events.index((Event.SEAL, 0))
    unpack = graph.events.index((Event.UNPACK, 0))
    assert simulate(graph, ()).bytes[seal] == 100 + 300  # a goes: backward does not need it
    timeline = simulate(graph, {1})
    assert timeline.bytes[seal] == 100 + 200  # a stays for the recipe
    assert timeline.highs[unpack] == 100 + 200 + 300
    assert timeline.bytes[unpack] == 100 + 300  # and goes with it


def test_a_ticket_that_is_let_go_of_unasked_takes_its_recipe_along() -> None:
    graph = straight()
    unasked = tuple(event for event in graph.events if event[0] != Event.UNPACK)
    graph = StepGraph(graph.ops, graph.buffers, graph.storages, graph.saves, unasked)
    timeline = simulate(graph, {0, 1})
    assert timeline.replays == ()
    assert timeline.bytes[-1] == 100


def test_several_results_are_made_again_at_once_and_each_stays_as_long_as_it_is_needed() -> None:
    #   x ──▶ 0 ─┬─▶ p 200 (saved by 1)        q is asked for first
    #            ├─▶ q 300 (saved by 2)
    #            └─▶ s 500 (saved by nobody)
    sketch = Sketch()
    x = sketch.root(100)
    p, q, s = sketch.op([x], 200, 300, 500)
    (u,) = sketch.op([p], 8, saves=[p])
    (v,) = sketch.op([q, s], 8, saves=[q])
    sketch.op([u, v], 4)
    graph = sketch.graph()
    timeline = simulate(graph, {0})
    first = next(e for e, (k, i) in enumerate(graph.events) if k == Event.UNPACK and graph.saves[i] == q)
    second = next(e for e, (k, i) in enumerate(graph.events) if k == Event.UNPACK and graph.saves[i] == p)
    assert timeline.replays == (0,)
    assert timeline.highs[first] - timeline.bytes[first - 1] == 200 + 300 + 500
    assert timeline.bytes[first] - timeline.bytes[first - 1] == 200 + 300
    assert timeline.bytes[second] == timeline.bytes[second - 1]


def test_what_the_program_still_holds_is_not_made_again() -> None:
    sketch = Sketch()
    x = sketch.root(100)
    (a,) = sketch.op([x], 200)
    sketch.op([a], 4, saves=[a])
    assert simulate(sketch.graph(), {0}).replays == (0,)
    sketch.held.add(a)
    assert simulate(sketch.graph(), {0}).replays == ()


# ---- laws ------------------------------------------------------------------------------------------------------

SEEDS = range(40)


def natural_peak(graph: StepGraph) -> int:
    """Bytes of the plain step by a count of its own: memory lives while the program or autograd holds it."""
    program = {b.storage for b in graph.buffers if b.maker < 0}
    rest = graph.resident_bytes - sum(graph.storages[s].bytes for s in program)
    saved: Counter[int] = Counter()
    peak = 0
    for kind, index in graph.events:
        workspace = 0
        if kind == Event.RUN:
            program |= {graph.buffers[b].storage for b in graph.ops[index].makes}
            workspace = graph.ops[index].workspace_bytes
        elif kind == Event.FREE:
            program.discard(index)
        elif kind in (Event.SAVE, Event.RELEASE):
            saved[graph.buffers[graph.saves[index]].storage] += 1 if kind == Event.SAVE else -1
        held = {s for s, count in saved.items() if count}
        peak = max(peak, rest + sum(graph.storages[s].bytes for s in program | held) + workspace)
    return peak


def some(graph: StepGraph, rng: random.Random) -> set[int]:
    share = rng.choice((0.2, 0.5, 0.8, 1.0))
    return {i for i in droppable_ops(graph) if rng.random() < share}


@pytest.mark.parametrize("seed", SEEDS)
def test_keeping_everything_gives_the_natural_peak_and_costs_nothing(seed: int) -> None:
    graph = random_graph(seed, 20)
    timeline = simulate(graph, ())
    assert timeline.peak_bytes == natural_peak(graph)
    assert timeline.replays == ()
    assert timeline.step_seconds == graph.seconds
    assert timeline.recompute_seconds == timeline.extra_flops == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_recomputing_more_replays_more(seed: int) -> None:
    graph, rng = random_graph(seed, 20), random.Random(seed)
    more = some(graph, rng)
    fewer = {i for i in more if rng.random() < 0.7}
    assert set(simulate(graph, fewer).replays) <= set(simulate(graph, more).replays)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_timeline_adds_up(seed: int) -> None:
    graph, rng = random_graph(seed, 20), random.Random(seed)
    chosen = some(graph, rng)
    timeline = simulate(graph, chosen)
    assert len(timeline.bytes) == len(timeline.highs) == len(graph.events)
    assert all(high >= now for high, now in zip(timeline.highs, timeline.bytes, strict=True))
    assert timeline.peak_bytes == max(timeline.highs) == timeline.highs[timeline.peak_event]
    assert min(timeline.bytes) >= graph.resident_bytes
    assert timeline.bytes[-1] == simulate(graph, ()).bytes[-1]  # nothing that a plan holds outlives the step
    assert set(timeline.replays) <= chosen
    assert len(set(timeline.replays)) == len(timeline.replays)
    assert timeline.recompute_seconds == pytest.approx(sum(graph.ops[i].seconds for i in timeline.replays))
    assert timeline.extra_flops == sum(graph.ops[i].flops for i in timeline.replays)
    assert simulate(graph, chosen) == timeline
    assert simulate(graph, chosen, trail=False).prediction == timeline.prediction


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_by_sites_costs_what_its_operations_cost(seed: int) -> None:
    graph = random_graph(seed, 20)
    chosen = some(graph, random.Random(seed))
    plan = Plan(frozenset(graph.ops[i].site for i in chosen))
    assert simulate(graph, plan) == simulate(graph, chosen) == simulate(graph, dict.fromkeys(chosen, 0))


def test_sites_that_a_graph_does_not_have_cost_nothing() -> None:
    graph = blocks(2)
    assert simulate(graph, Plan(frozenset({"elsewhere/0:aten.mul.Tensor/0"}))) == simulate(graph, ())


def test_a_long_chain_of_recipes_is_forgotten_at_once() -> None:
    graph = chain(3000)
    unasked = tuple(event for event in graph.events if event[0] != Event.UNPACK)
    graph = StepGraph(graph.ops, graph.buffers, graph.storages, graph.saves, unasked)
    timeline = simulate(graph, range(3000))
    assert timeline.replays == ()
    assert timeline.bytes[-1] == graph.resident_bytes


# ---- tickets that follow writes that autograd did not count ------------------------------------------------------
#
#   x ──▶ 0 ──▶ h ──▶ 1 (in place) ──▶ g ──▶ 2 ──▶ loss       h is saved, then another part of its memory is written


def saved_then_written(*, droppable: bool = True) -> StepGraph:
    sketch = Sketch()
    x = sketch.root(100)
    (h,) = sketch.op([x], 200, saves_own=[0])
    (g,) = sketch.op([h], writes=[h], droppable=droppable)
    sketch.op([g], 4)
    return sketch.graph()


def test_a_ticket_follows_to_the_last_version_and_holds_both() -> None:
    graph = saved_then_written()
    timeline = simulate(graph, {0, 1})
    unpack = graph.events.index((Event.UNPACK, 0))
    assert timeline.replays == (0, 1)
    assert timeline.bytes[unpack] - timeline.bytes[unpack - 1] == 200 + 200  # h stays for its ticket: 1 writes a copy
    assert timeline.bytes[-1] == 100


def test_a_ticket_that_follows_to_kept_memory_holds_that() -> None:
    graph = saved_then_written(droppable=False)
    kept, dropped = simulate(graph, ()), simulate(graph, {0})
    assert dropped.replays == ()
    assert dropped.bytes == kept.bytes


def test_a_deep_chain_recomputed_whole_holds_one_gradient_and_everything_again() -> None:
    graph = chain(50, size=1000)
    assert simulate(graph, range(50)).peak_bytes == simulate(graph, ()).peak_bytes


# ---- rehearsals ------------------------------------------------------------------------------------------------


def disagreements(tiny: Tiny, tries: int, *, fake: bool) -> list[tuple[set[int], int, int]]:
    """Random decisions whose simulated and rehearsed peaks are more than 0.1 % apart."""
    tiny.trace(fake=fake, repeats=0)  # torch shares memory between some results the first time it fakes an operation
    graph = tiny.trace(fake=fake, repeats=0)
    ops = [i for i, _ in graph.forward_ops()]
    rng = random.Random(0)
    found = []
    for _ in range(tries):
        share = rng.choice((0.0, 0.3, 0.6, 0.9, 1.0))
        chosen = {i for i in ops if rng.random() < share}
        plan = Plan(frozenset(graph.ops[i].site for i in chosen))
        simulated, rehearsed = simulate(graph, plan, trail=False).peak_bytes, tiny.rehearse(plan, fake=fake)
        if fake and simulated != rehearsed:  # as above, for operations that only a replay runs
            rehearsed = tiny.rehearse(plan, fake=fake)
        if abs(simulated - rehearsed) > 0.001 * rehearsed:
            found.append((chosen, simulated, rehearsed))
    return found


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("name", TINY)
def test_simulate_agrees_with_rehearsals(name: str, fake: bool) -> None:
    assert disagreements(TINY[name](), 10, fake=fake) == []


@pytest.mark.slow
@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("name", TINY)
def test_simulate_agrees_with_many_rehearsals(name: str, fake: bool) -> None:
    assert disagreements(TINY[name](), 150, fake=fake) == []


@pytest.mark.parametrize("name", TINY)
def test_a_rehearsal_of_the_empty_plan_counts_the_natural_peak(name: str) -> None:
    tiny = TINY[name]()
    graph = tiny.trace(fake=False, repeats=0)
    assert tiny.rehearse(Plan(frozenset()), fake=False) == pytest.approx(natural_peak(graph), rel=0.001)


def test_a_hand_policy_costs_what_its_rehearsal_counts() -> None:
    tiny = TINY["attention"]()
    graph = tiny.trace()
    plan = lowtide.solve(graph, policy=lowtide.policies.keep_matmuls)
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes == pytest.approx(tiny.rehearse(plan), rel=0.001)
