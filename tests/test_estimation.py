"""Estimates: optimizers, shards, the band, what is listed first, and the search for the largest size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from estimates import GIB, SETUP, made, too_large
from lowtide import hardware
from lowtide.errors import UnitError
from lowtide.estimation import Setup, Tensor, Traced, estimate, room_bytes
from lowtide.estimation.estimates import around, memory_of
from lowtide.estimation.limits import largest
from lowtide.estimation.optimizers import OPTIMIZERS, state_bytes, step_bytes
from lowtide.estimation.setups import SetupError
from lowtide.estimation.sharding import sharded, traffic_bytes, unit_bytes
from tiny import gpt_step

H100, CPU = hardware.find("h100"), hardware.find("cpu")
TORCH = {
    "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", TORCH)
def test_states_are_as_large_as_pytorchs(name: str) -> None:
    layer = nn.Linear(300, 200)
    optimizer = TORCH[name](layer.parameters())
    layer(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    real = sum(
        v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()
    )
    trained = [Tensor(n, tuple(p.shape), p.element_size()) for n, p in layer.named_parameters()]
    assert state_bytes(name, trained) == real


def test_the_step_of_adamw_holds_one_copy_of_all_parameters() -> None:
    from benchmarks.memory import measure_memory

    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
    optimizer = torch.optim.AdamW(layers.parameters(), foreach=True)
    for _ in range(2):
        for layer in layers:
            layer(torch.ones(1, 256)).sum().backward()
        optimizer.step()
    held = measure_memory(lambda: None, lambda _: optimizer.step()).peak_bytes
    trained = [Tensor(n, tuple(p.shape), 4) for n, p in layers.named_parameters()]
    assert held == pytest.approx(step_bytes("adamw", trained), rel=0.02)


def test_eight_bit_states_take_a_byte_an_element_and_their_scales() -> None:
    assert state_bytes("adamw-8bit", [Tensor("w", (1024, 1024), 2)]) == 2 * (2**20 + 4 * 2**20 // 256)
    assert state_bytes("adamw-8bit", [Tensor("b", (1024,), 2)]) == 2 * 4 * 1024, "small tensors stay in float32"


def test_an_unknown_optimizer_is_refused_with_the_nearest() -> None:
    with pytest.raises(SetupError, match=r"Nearest: adamw-8bit\. Known: adamw, "):
        state_bytes("adamw8bit", [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch is 0; at least 1"),
        ({"precision": "int8"}, "unknown precision 'int8'; known: fp32"),
        ({"sharding": "zero4"}, "unknown sharding 'zero4'; known: none, zero1"),
    ],
)
def test_a_setup_refuses_what_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        Setup(**settings)  # type: ignore[arg-type]


# ---- shards -------------------------------------------------------------------------------------------------


def traced() -> Traced:
    own = gpt_step(blocks=4, width=64)
    graph = own.trace(hardware="h100")
    trained = tuple(Tensor(n, tuple(p.shape), p.element_size()) for n, p in own.model.named_parameters())
    return Traced(graph, trained)


def kinds(setup: Setup) -> dict[str, int]:
    return dict(estimate(traced(), setup, H100).kinds)


def test_units_are_the_blocks_and_the_rest() -> None:
    one = traced()
    units = unit_bytes(one.graph)
    assert sum(units.values()) == one.trained_bytes
    assert len(units) == 1 + 4
    assert len({units[path] for path in units if path}) == 1


def test_fsdp_leaves_each_rank_its_part_and_gathers_two_blocks() -> None:
    one = traced()
    setup = Setup(ranks=8, sharding="fsdp")
    part = sharded(one.graph, setup)
    own = sum(s.bytes for s in part.storages if s.kind == "parameter")
    assert own == pytest.approx(one.trained_bytes / 8, rel=0.01)
    units = unit_bytes(one.graph)
    (gathered,) = [s.bytes for s in part.storages if s.owner == "(gathered)"]
    assert gathered == units[""] + 4 * units["blocks.0"], (
        "two blocks' parameters; a block's gradients and a copy to send"
    )


@pytest.mark.parametrize(
    ("sharding", "divided"), [("zero1", {"optimizer states"}), ("zero2", {"optimizer states", "gradients"})]
)
def test_zero_divides_what_it_says(sharding: str, divided: set[str]) -> None:
    alone = kinds(Setup(optimizer="adamw"))
    shared = kinds(Setup(optimizer="adamw", ranks=4, sharding=sharding))
    assert {kind for kind in ("weights", "optimizer states") if shared[kind] < alone[kind]} == divided - {"gradients"}
    assert shared["optimizer states"] == pytest.approx(alone["optimizer states"] / 4, rel=0.01)


def test_a_ring_sends_what_it_must() -> None:
    trained = [Tensor("w", (1000,), 4)]
    assert traffic_bytes(Setup(), 4000, trained) == 0
    assert traffic_bytes(Setup(ranks=4), 4000, trained) == 2 * 4000 * 3 / 4
    assert traffic_bytes(Setup(ranks=4, sharding="fsdp"), 4000, trained) == 3 * 4000 * 3 / 4


# ---- the answer ---------------------------------------------------------------------------------------------


def test_what_surely_fits_is_at_the_upper_end_of_the_band() -> None:
    room = room_bytes(H100.memory_bytes, H100)
    assert around(room, H100)[1] == pytest.approx(H100.memory_bytes, rel=1e-6)
    assert around(room_bytes(GIB, CPU), CPU)[1] <= GIB


def test_a_budget_is_an_amount_or_a_share_of_the_hardware() -> None:
    assert memory_of(None, H100) == H100.memory_bytes
    assert memory_of("50%", H100) == H100.memory_bytes // 2
    assert memory_of("12 GiB", H100) == 12 * GIB
    with pytest.raises(UnitError, match="'half%' is not a percentage"):
        memory_of("half%", H100)


@pytest.mark.parametrize(("gibibytes", "verdict"), [(70, "fits"), (78, "may fit"), (90, "does not fit")])
def test_the_verdict_knows_the_error(gibibytes: float, verdict: str) -> None:
    assert made(gibibytes).verdict == verdict


def test_the_options_that_fit_come_fastest_first() -> None:
    found = too_large()
    assert not found.fits
    assert [option.name for option in found.options] == [
        "fsdp over 8 ranks",
        "8-bit optimizer and checkpointing",
        "checkpointing",
    ]
    assert [option.exact for option in found.options] == [True, False, True]


def test_accumulated_batches_count_as_one_step() -> None:
    whole = Setup(batch=4)
    parts = replace(whole, batch=2, accumulation=2)
    one = traced()
    a, b = (estimate(one, setup, H100) for setup in (whole, parts))
    assert a.samples == b.samples
    assert a.step_seconds < b.step_seconds < 2 * a.step_seconds, "the optimizer steps once"


def test_the_optimizers_step_can_be_the_peak() -> None:
    own = gpt_step(blocks=4, width=128, batch=1, length=4)
    trained = tuple(Tensor(n, tuple(p.shape), p.element_size()) for n, p in own.model.named_parameters())
    found = estimate(Traced(own.trace(hardware="h100"), trained), Setup(), H100)
    assert found.peak_where == "in the optimizer's step"
    fused = estimate(Traced(own.trace(hardware="h100"), trained), Setup(optimizer="adamw-fused"), H100)
    assert found.peak_bytes - fused.peak_bytes > 0


# ---- the largest size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [1, 3, 8, 64, 1000])
@pytest.mark.parametrize(("fixed", "each"), [(10, 1.0), (10, 3.7), (60, 0.1), (79, 40)])
def test_the_largest_batch_fits_and_the_next_does_not(start: int, fixed: float, each: float) -> None:
    def need(setup: Setup) -> lowtide.estimation.Estimate:
        calls.append(setup.batch)
        return made((fixed + each * setup.batch) / 1.06)

    calls: list[int] = []
    found = largest(replace(SETUP, batch=start), "batch", 1, 80 * GIB, need)
    assert found == int((80 - fixed) / each + 1e-6)
    assert len(calls) <= 9


def test_the_longest_sequence_is_found_where_memory_grows_with_its_square() -> None:
    def need(setup: Setup) -> lowtide.estimation.Estimate:
        return made((10 + 1e-3 * setup.length + 1e-7 * setup.length**2) / 1.06)

    found = largest(replace(SETUP, length=1024), "length", 128, 80 * GIB, need)
    assert need(replace(SETUP, length=found)).fits
    assert not need(replace(SETUP, length=found + 256)).fits


def test_every_optimizer_has_numbers() -> None:
    for name in OPTIMIZERS:
        assert state_bytes(name, [Tensor("w", (64, 64), 4)]) >= 0
        assert step_bytes(name, [Tensor("w", (64, 64), 4)]) in (0, 64 * 64 * 4)
