"""DeepSpeed's ZeRO under lowtide: the same bits on every rank, and nothing gathered for a replay or held for one."""

from __future__ import annotations

import functools
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_steps import Net, words
from ranks import on_ranks
from torch import Tensor, nn
from zero_steps import CASES, Case

import lowtide
from lowtide.demo.memory import measure_memory
from lowtide.tape import sharding

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

WAYS: dict[str, dict[str, Any]] = {
    "recompute_all": {"policy": lowtide.policies.recompute_all},
    "a budget": {"budget": "90%"},
}
COUNT = 7
"""Steps: those of stages 1 and 2 are followed from the fifth on."""


def collectives() -> int:
    """How many this rank has taken part in so far."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def train(case: Case, way: str | None) -> tuple[list[list[Tensor]], int]:
    """Losses, gradients, weights and buffers of some steps on this rank, and how many collectives they took."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    from lowtide.integrations.deepspeed import Lowtide

    engine = case.engine()
    session = Lowtide(**WAYS[way]) if way is not None else None
    torch.manual_seed(7)
    seen: list[list[Tensor]] = []
    sent = 0
    count = COUNT * engine.gradient_accumulation_steps()
    with session.on(engine) if session is not None else nullcontext():
        for number in range(count):
            last = number in (engine.gradient_accumulation_steps() - 1, count - 1)
            sent -= collectives()
            loss = case.loss_of(engine, number)
            engine.backward(loss)
            sent += collectives()
            step = [loss.detach(), *(buffer.clone() for buffer in engine.module.buffers())]
            trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
            step += [safe_get_full_grad(parameter).clone() for parameter in trained if last]
            sent -= collectives()
            engine.step()
            sent += collectives()
            step += [safe_get_full_fp32_param(parameter).clone() for parameter in trained if last]
            seen.append(step)
    if session is not None:
        assert session.report().planned_calls
    engine.destroy()
    return seen, sent


def compare(names: list[str]) -> dict[tuple[str, str], str]:
    """What is wrong with each case under each way, "" if nothing is."""
    found = {}
    for name in names:
        plain, sent = train(CASES[name], None)
        assert all(torch.isfinite(tensor).all() for step in plain for tensor in step)
        for way in WAYS:
            ours, ours_sent = train(CASES[name], way)
            wrong = [n for n, (one, other) in enumerate(zip(plain, ours, strict=True)) if not same(one, other)]
            found[name, way] = f"steps {wrong} differ" if wrong else ""
            if sent != ours_sent:
                found[name, way] += f" {ours_sent} collectives instead of {sent}"
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@functools.cache
def results(stage: int) -> list[dict[tuple[str, str], str]]:
    return on_ranks(compare, [name for name in CASES if CASES[name].stage == stage])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_same_and_sends_the_same(name: str, way: str) -> None:
    for rank in results(CASES[name].stage):
        assert not rank[name, way]


# ---- what is given back -----------------------------------------------------------------------------------------


def held_and_read() -> tuple[dict[str, int], dict[str, int], str, str]:
    """Whole parameters and bytes that a forward leaves behind, plainly and recorded; what replays meet with units and
    without."""
    import lowtide.integrations.deepspeed  # declares what stands in for linear

    assert lowtide.integrations.deepspeed.Lowtide
    alive: dict[str, int] = {}
    held: dict[str, int] = {}
    for way, recording in (("plain", nullcontext()), ("ours", lowtide.record())):
        engine = CASES["stage 3, whole blocks"].engine()
        whole: list[weakref.ref[Any]] = []
        for module in engine.module.modules():
            module.register_forward_pre_hook(partial(note_gathered, whole))

        def forward(recording: Any = recording, engine: Any = engine) -> Tensor:
            with recording:
                return engine(words(0))

        train_once(engine)
        whole.clear()
        held[way] = measure_memory(forward, partial(count_alive, alive, way, whole)).held_bytes
        engine.destroy()
    inside = caught(lambda: train_once(CASES["stage 3"].engine(), lowtide.record()))
    units, sharding._UNITS[:] = list(sharding._UNITS), []
    across = caught(lambda: train_once(CASES["stage 3"].engine(), lowtide.record()))
    sharding._UNITS[:] = units
    return alive, held, inside, across


def note_gathered(whole: list[Any], module: nn.Module, _: Any) -> None:
    whole += [weakref.ref(p.untyped_storage()) for p in module.parameters(recurse=False) if p.numel()]


def count_alive(alive: dict[str, int], way: str, whole: list[Any], _: Tensor) -> None:
    assert len(whole) > 10
    alive[way] = sum(ref() is not None for ref in whole)


def train_once(engine: Any, recording: Any = None) -> None:
    with recording or nullcontext():
        loss = engine(words(0))
    engine.backward(loss)
    engine.step()


def caught(step: Any) -> str:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_stage_3_gives_back_is_neither_held_nor_read() -> None:
    for alive, held, inside, across in on_ranks(held_and_read):
        assert alive["ours"] == alive["plain"] == 0
        assert held["ours"] < 0.6 * held["plain"]  # the model itself holds what its blocks leave behind
        assert not inside
        assert across.startswith("RootChanged")
        assert "given back" in across


# ---- its own checkpointing --------------------------------------------------------------------------------------


class Checkpointed(Net):
    """Each block under DeepSpeed's own checkpoint function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.ran = 0
        self.blocks[0].register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.ran += 1

    def forward(self, words: Tensor) -> Tensor:
        from deepspeed import checkpointing

        x = self.embed(words)
        for block in self.blocks:
            x = getattr(checkpointing, self.name)(block, x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), words.flatten())


def routed(name: str) -> list[tuple[bool, int]]:
    from deepspeed import checkpointing

    from lowtide.integrations.deepspeed import Lowtide, take_over

    before = getattr(checkpointing, name)
    plain, _ = train(CASES["stage 2"], None)
    case = Case(2, partial(Checkpointed, name))
    found = []
    for session in (take_over, Lowtide(budget="90%").on, Lowtide(policy=lowtide.policies.recompute_all).on):
        engine = case.engine()
        undo = session(engine)
        torch.manual_seed(7)
        with undo if hasattr(undo, "__enter__") else nullcontext():
            assert getattr(checkpointing, name) is not before
            losses = []
            for number in range(COUNT):
                losses.append(engine(words(number)))
                engine.backward(losses[-1])
                engine.step()
        if not hasattr(undo, "__enter__"):
            undo()
        assert getattr(checkpointing, name) is before
        same = all(torch.equal(loss.detach(), step[0]) for loss, step in zip(losses, plain, strict=True))
        found.append((same, engine.module.ran))
        engine.destroy()
    return found


@pytest.mark.parametrize("name", ["checkpoint", "non_reentrant_checkpoint"])
def test_its_checkpoint_function_is_sent_to_lowtide_and_put_back(name: str) -> None:
    for rank in on_ranks(routed, name):
        assert rank == [(True, COUNT)] * 3
