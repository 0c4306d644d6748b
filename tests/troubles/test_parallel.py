"""Data parallel and sharded training, on one gloo process; two processes where the trouble needs two."""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from troubles.ways import Way, exact, finish, grads, ours, plainly, reentrant, torch_raises

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Encoder(nn.Module):
    """Blocks run through a way; one of them may be shared, one parameter may be unused."""

    def __init__(self, way: Way, *, shared: bool = False, unused: bool = False, aside: bool = False) -> None:
        super().__init__()
        self.way = [way]
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)]
        self.blocks = nn.ModuleList([blocks[0]] * 3 if shared else blocks)
        self.unused = nn.Linear(6, 6) if unused else None
        self.aside = nn.Linear(6, 6) if aside else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.way[0](block, x).sin()
        return x


def ddp(options: dict[str, Any], steps: int = 2, forwards: int = 1, **shape: bool) -> Callable[[Way], object]:
    def program(way: Way) -> object:
        model, x = DistributedDataParallel(Encoder(way, **shape), **options), torch.randn(4, 6, requires_grad=True)
        for _ in range(steps):
            outs = [model(x * (n + 1)) for n in range(forwards)]
            loss = outs[0].sum() if forwards == 1 else (outs[0] * outs[1]).sum()
            finish(loss)
        return grads(model)

    return program


FINDING, STATIC = {"find_unused_parameters": True}, {"static_graph": True}


@pytest.mark.parametrize("options", [{}, FINDING, STATIC], ids=["plain", "find unused", "static graph"])
@pytest.mark.parametrize("shared", [False, True])
def test_B46_marked_ready_only_once(options: dict[str, bool], shared: bool) -> None:
    exact(ddp(options, shared=shared), ours)
    if options == FINDING:
        torch_raises(ddp(options, shared=shared), "marked.* ready|ready only once", reentrant)


@pytest.mark.parametrize("options", [{}, FINDING, STATIC], ids=["plain", "find unused", "static graph"])
def test_B47_two_forwards_then_one_backward(options: dict[str, bool]) -> None:
    exact(ddp(options, forwards=2), ours)
    if options == FINDING:
        torch_raises(ddp(options, forwards=2), "ready", reentrant)


def test_B48_a_module_that_was_copied_to_be_saved_leaves_unused_parameters() -> None:
    exact(ddp(FINDING, unused=True), ours)
    torch_raises(ddp(FINDING, unused=True), "ready", reentrant)


def test_B46_a_whole_wrapped_model_recorded_or_attached() -> None:
    def program(way: Way) -> object:
        inner = Encoder(plainly)
        model, x = DistributedDataParallel(inner), torch.randn(4, 6)
        handle = lowtide.attach(inner, policy=lowtide.policies.segments("blocks.*")) if way is ours else nullcontext()
        with handle:
            for _ in range(2):
                finish(model(x).square().sum())
        return grads(model)

    exact(program, ours)


TWO = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import lowtide

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
rank = dist.get_rank()

def train(way):
    torch.manual_seed(0)
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = a, b
        def forward(self, x):
            x = x + way(lambda x: self.a(x).tanh(), x)
            return x + way(lambda x: self.b(x).tanh(), x)
    model = DDP(Net())
    torch.manual_seed(rank + 1)
    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])

plain = train(lambda f, x: f(x))
own = train(lowtide.checkpoint)
everyone = [torch.empty_like(own) for _ in range(2)]
dist.all_gather(everyone, own)
assert torch.equal(everyone[0], everyone[1]), "ranks differ"
assert torch.equal(plain, own), "not the plain run's"
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_B50_gradients_are_equal_on_all_ranks_and_those_of_the_plain_run(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [subprocess.Popen([sys.executable, script, str(rank), port], cwd=ROOT) for rank in range(2)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


class Physics(nn.Module):
    """The loss is a derivative of the network with respect to its input."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = [way]
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        potential = self.way[0](self.net, x)
        (slope,) = torch.autograd.grad(potential.sum(), x, create_graph=True)
        return slope.square().sum() + potential.sum()


def test_B51_checkpoint_sequential_with_an_inner_gradient_under_data_parallel() -> None:
    def program(way: Way) -> object:
        if way is ours:
            way = lambda net, x: lowtide.checkpoint_sequential(net, 3, x)  # noqa: E731
        model = DistributedDataParallel(Physics(way))
        for _ in range(2):
            finish(model(torch.randn(4, 6)))
        return grads(model)

    exact(program, ours)


# ---- sharded ---------------------------------------------------------------------------------------------------


def sharded(
    way_outside: bool = True, forwards: int = 1, nested: bool = False, half: bool = False
) -> Callable[[Way], object]:
    def program(way: Way) -> object:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
        model = Encoder(way if way_outside else plainly)
        counts = {"gathers": 0}
        for block in model.blocks:
            if nested:
                fully_shard(block[0], mp_policy=policy)
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        before, group = count_gathers(counts)
        try:
            for _ in range(2):
                x = torch.randn(4, 6)
                outs = [model(x * (n + 1)).float() for n in range(forwards)]
                loss = outs[0].square().sum() if forwards == 1 else (outs[0] - outs[1]).square().sum()
                loss.backward()
        finally:
            group.unshard = before
        full = [p.grad.full_tensor() if p.grad is not None else None for p in model.parameters()]  # type: ignore[attr-defined]
        return full, counts["gathers"]

    return program


def count_gathers(counts: dict[str, int]) -> tuple[Any, Any]:
    """Count how often FSDP2 gathers parameters that are not there."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    original = FSDPParamGroup.unshard

    def unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["gathers"] += not self.is_unsharded
        return original(self, *args, **kwargs)

    FSDPParamGroup.unshard = unshard  # type: ignore[method-assign]
    return original, FSDPParamGroup


def test_B52_an_extra_all_gather_when_the_region_is_outside_of_the_sharded_unit() -> None:
    exact(sharded(), ours)  # the number of gathers is that of the plain run


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested units"])
@pytest.mark.parametrize("forwards", [1, 2])
def test_B53_B56_regions_around_sharded_units_two_forwards_then_backward(nested: bool, forwards: int) -> None:
    exact(sharded(nested=nested, forwards=forwards), ours)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested units"])
def test_B17_B18_a_sharded_unit_with_a_precision_policy_under_autocast(nested: bool) -> None:
    def program(way: Way, half: bool) -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=not half):
            return sharded(nested=nested, half=half)(way)

    exact(partial(program, half=True), ours)
    exact(partial(program, half=False), ours)
    exact(partial(program, half=False), ours)


def test_B55_no_name_changes() -> None:
    model = Encoder(plainly)
    names = [list(dict(model.named_parameters())), list(dict(model.named_modules())), list(model.state_dict())]
    plain = copy.deepcopy(model)
    with lowtide.attach(model, policy=lowtide.policies.segments("blocks.*")):
        model(torch.randn(4, 6)).sum().backward()
        seen = [list(dict(model.named_parameters())), list(dict(model.named_modules())), list(model.state_dict())]
        assert seen == names
        assert type(model) is Encoder
        plain.load_state_dict(model.state_dict())
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = nn.ModuleDict({"a": checkpoint_wrapper(nn.Linear(2, 2))})
    assert [name for name, _ in wrapped.named_modules() if "_checkpoint_wrapped_module" in name]


def test_B54_every_child_wrapped_instead_of_the_layer() -> None:
    """There is nothing to wrap: a policy for layers keeps only what lies between layers, in however many parts."""
    from lowtide.demo.memory import measure_memory

    layers = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    model = nn.Sequential()
    model.blocks = nn.Sequential(*layers)
    x = torch.randn(64, 64)

    def held(pattern: str | None) -> int:
        def forward() -> Tensor:
            policy = lowtide.policies.segments(pattern, keep_last=False) if pattern else lowtide.policies.keep_all
            with lowtide.record(policy):
                return model(x).square().mean()

        forward().backward()
        return measure_memory(forward, Tensor.backward).held_bytes

    per_layer, per_child = held("blocks.*"), held("blocks.*.*")
    assert per_layer < 0.3 * held(None)
    assert per_layer < 0.5 * per_child


# ---- relatives ------------------------------------------------------------------------------------------------


def test_relative_gradient_accumulation_without_synchronisation() -> None:
    def program(way: Way) -> object:
        model = DistributedDataParallel(Encoder(way))
        for n in range(4):
            with model.no_sync() if n % 2 == 0 else nullcontext():
                finish(model(torch.randn(4, 6)).square().sum())
        return grads(model)

    exact(program, ours)


def test_relative_a_frozen_part_in_a_sharded_unit() -> None:
    def program(way: Way) -> object:
        model = Encoder(way)
        model.blocks[1].requires_grad_(False)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model(torch.randn(4, 6)).square().sum().backward()
        return [p.grad.full_tensor() if p.grad is not None else None for p in model.parameters()]  # type: ignore[attr-defined]

    exact(program, ours)
