"""Memory goes when it is no longer needed: over a step, over a thousand steps, and when things go wrong."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import lowtide
from harness import attached

POLICIES = {
    "keep_all": lowtide.policies.keep_all,
    "recompute_all": lowtide.policies.recompute_all,
    "keep_matmuls": lowtide.policies.keep_matmuls,
    "segments": lowtide.policies.segments("blocks.*", n=1),
}
MARK = "after block"
Wrap = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """A transformer block: x of shape (batch, length, width) to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout)


class Gpt(nn.Module):
    """A GPT on token ids of shape (batch, length); `wrap` runs each block, plainly by default."""

    def __init__(self, depth: int = 6, width: int = 256, vocabulary: int = 256, wrap: Wrap | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4, 0.1) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)
        self.wrap: Wrap = wrap or (lambda block, x: block(x))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.wrap(block, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def per_block(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, x, use_reentrant=False)
    return out


def memory_events(run: Callable[[], object]) -> list[Any]:
    """Run under the profiler; return its memory events and marks in the order of time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]" or MARK in e.name()]
    return sorted(events, key=lambda event: event.start_ns())


def live_bytes(events: list[Any]) -> list[int]:
    """Add up the memory events: bytes above those at the start, after each event."""
    return list(itertools.accumulate(e.nbytes() if e.name() == "[memory]" else 0 for e in events))


def peak_bytes(run: Callable[[], object]) -> int:
    return max(live_bytes(memory_events(run)))


def bytes_left(run: Callable[[], object]) -> int:
    """Bytes that are still allocated after `run` and were not before."""
    return sum(event.nbytes() for event in memory_events(run) if event.name() == "[memory]")


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def train(model: nn.Module, ids: Tensor, context: AbstractContextManager[Any]) -> None:
    with context:
        loss = model(ids)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def step_peak(model: nn.Module, context: AbstractContextManager[Any]) -> int:
    """Peak bytes of the second step, gradients included, parameters and input not."""
    ids = torch.randint(0, 256, (2, 256))
    step = functools.partial(train, model, ids, context)
    step()
    return peak_bytes(step)


def small() -> tuple[Gpt, Tensor]:
    return Gpt(depth=3, width=32, vocabulary=64), torch.randint(0, 64, (2, 16))


def test_segments_of_one_block_peak_below_checkpoint_per_block() -> None:
    torchs = step_peak(Gpt(wrap=per_block), contextlib.nullcontext())
    ours = step_peak(Gpt(), lowtide.record(POLICIES["segments"]))
    assert ours < torchs, f"{ours / 2**20:.2f} MiB against {torchs / 2**20:.2f} MiB"


def test_segments_hold_no_more_after_forward_than_checkpoint_per_block() -> None:
    def held(model: nn.Module, policy: Any) -> int:
        losses: list[Tensor] = []

        def forward() -> None:
            with policy:
                losses.append(model(ids))

        ids = torch.randint(0, 256, (2, 256))
        train(model, ids, policy)
        return bytes_left(forward)

    torchs = held(Gpt(wrap=per_block), contextlib.nullcontext())
    every_block = lowtide.policies.segments("blocks.*", n=1, keep_last=False)
    ours = held(Gpt(), lowtide.record(every_block))
    model = Gpt()
    ids = torch.randint(0, 256, (2, 256))
    drawn = sum(op.state_bytes for op in lowtide.trace(lambda: model(ids), model).ops)
    torchs += drawn  # where there is one random state a block
    assert ours <= torchs, f"{ours / 2**20:.2f} MiB against {torchs / 2**20:.2f} MiB"


@pytest.mark.parametrize("policy", POLICIES)
def test_live_bytes_fall_with_every_block_of_backward(policy: str) -> None:
    def mark(_: Tensor) -> None:
        with record_function(MARK):
            pass

    def marked(block: nn.Module, x: Tensor) -> Tensor:
        x.register_hook(mark)
        out: Tensor = block(x)
        return out

    model, ids = Gpt(width=128, wrap=marked), torch.randint(0, 256, (2, 128))
    for parameter in model.parameters():  # gradients are not what is looked at here
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    step = functools.partial(train, model, ids, lowtide.record(POLICIES[policy]))
    step()
    events = memory_events(step)
    live = [after for event, after in zip(events, live_bytes(events), strict=True) if MARK in event.name()]
    assert len(live) == len(model.blocks)
    falls = [before - after for before, after in itertools.pairwise(live)]
    assert all(fall > 0 for fall in falls), [round(each / 2**20, 3) for each in live]


def kept_by_lot(op: Any) -> bool:
    return zlib.crc32(op.site.encode()) % 2 == 0


@pytest.mark.parametrize("policy", [lowtide.policies.recompute_all, kept_by_lot], ids=["recompute_all", "by_lot"])
@pytest.mark.parametrize("fresh", [False, True], ids=["one_recording", "fresh_recordings"])
@pytest.mark.parametrize("collecting", [True, False], ids=["collector_on", "collector_off"])
def test_a_thousand_steps_leave_nothing(policy: Any, fresh: bool, collecting: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.Linear(4, 1))
    x = torch.randn(3, 4)
    recording = lowtide.record(policy)

    def step() -> None:
        with lowtide.record(policy) if fresh else recording:
            loss = model(x).sum()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    with contextlib.nullcontext() if collecting else without_collector():
        steps(20)
        counts = [objects()]
        for _ in range(2):
            steps(490)
            counts.append(objects())
        assert bytes_left(lambda: steps(3)) == 0
    # What grows once (caches of the interpreter and of torch) is no leak; what a step leaves behind grows both times.
    growths = [(after - before) for before, after in itertools.pairwise(counts)]
    grown = {kind: count for kind, count in (growths[0] & growths[1]).items() if count > 50}
    assert not grown, grown


def objects() -> Counter[str]:
    """Count the live Python objects by type, garbage in cycles included if the collector is off."""
    if gc.isenabled():
        gc.collect()
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_without_backward_is_freed_at_once(policy: str) -> None:
    model, ids = small()
    recording = lowtide.record(POLICIES[policy])

    def forward() -> None:
        with recording:
            model(ids)

    train(model, ids, recording)
    with without_collector():
        assert bytes_left(forward) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_half_run_backward_is_freed_at_once(policy: str) -> None:
    model, ids = small()
    recording = lowtide.record(POLICIES[policy])

    def half() -> None:
        with recording:
            loss = model(ids)
        torch.autograd.grad(loss, list(model.blocks[2].parameters()))

    train(model, ids, recording)
    with without_collector():
        assert bytes_left(half) == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("retain", [False, True], ids=["freed", "retained"])
def test_a_whole_step_is_freed_at_once(policy: str, retain: bool) -> None:
    model, ids = small()
    recording = lowtide.record(POLICIES[policy])

    def step() -> None:
        with recording:
            loss = model(ids)
        loss.backward(retain_graph=retain)
        for parameter in model.parameters():
            parameter.grad = None

    step()
    with without_collector():
        assert bytes_left(step) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_gone_when_backward_ends_though_the_loss_lives(policy: str) -> None:
    model, ids = small()
    recording, losses = lowtide.record(POLICIES[policy]), list[Tensor]()

    def step() -> None:
        with recording:
            loss = model(ids)
        loss.backward()
        losses.append(loss)
        for parameter in model.parameters():
            parameter.grad = None

    step()
    with without_collector():
        left = bytes_left(step)
    assert left <= 64, left  # the loss itself


class Trouble(Exception):
    """What the programs below raise."""


def _raise(*_: object) -> None:
    raise Trouble


def _global_hooks() -> list[int]:
    registries = nn.modules.module
    return [len(registries._global_forward_hooks), len(registries._global_forward_pre_hooks)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["module", "backward", "backward_inside", "after_model"])
def test_an_exception_leaves_nothing_attached_and_nothing_grows(policy: str, where: str) -> None:
    model, ids = small()
    recording, before = lowtide.record(POLICIES[policy]), (attached(), _global_hooks())

    def failing() -> None:
        with contextlib.suppress(Trouble):
            _fail(model, ids, recording, where)
        model.zero_grad()

    train(model, ids, recording)
    failing()
    assert (attached(), _global_hooks()) == before
    with without_collector():
        bytes_left(failing)  # torch itself holds on to the last failed backward until the next one
        assert bytes_left(failing) == 0
    assert_still_exact(model, ids, recording)


def _fail(model: Gpt, ids: Tensor, recording: lowtide.Recording, where: str) -> None:
    up, handles = model.blocks[1].up, []
    if where == "module":
        handles.append(up.register_forward_hook(_raise))
    elif where != "after_model":
        handles.append(up.weight.register_hook(_raise))
    try:
        with recording:
            loss = model(ids)
            if where == "after_model":
                raise Trouble
            if where == "backward_inside":
                loss.backward()
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()


def assert_still_exact(model: Gpt, ids: Tensor, recording: lowtide.Recording) -> None:
    gradients = []
    for context in (contextlib.nullcontext(), recording):
        torch.manual_seed(1)
        with context:
            loss = model(ids)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_nothing_is_attached_between_steps() -> None:
    model, ids = small()
    recording, before = lowtide.record(POLICIES["segments"]), (attached(), _global_hooks())
    for _ in range(2):
        train(model, ids, recording)
        assert (attached(), _global_hooks()) == before
