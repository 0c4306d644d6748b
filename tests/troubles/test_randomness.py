"""Randomness: what was drawn in forward is what backward computes with."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import lowtide
from lowtide.tape import randomness
from troubles.ways import (
    Way,
    exact,
    finish,
    grads,
    ours,
    plainly,
    reentrant,
    torch_differs,
    torch_raises,
    torchs,
    tried,
    without_rng_state,
)


def draw_some() -> None:
    torch.rand(5)
    random.random()
    np.random.rand(3)


def dropout(way: Way) -> object:
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()), torch.randn(4, 8)
    out = way(lambda x: layer(x).square(), x)
    finish(out.sum(), draw_some)
    return out, grads(layer), torch.get_rng_state()


@pytest.mark.parametrize("flag", [True, False])
def test_B01_recompute_draws_a_new_dropout_mask_when_the_trainer_turned_preserve_rng_state_off(flag: bool) -> None:
    exact(dropout, lambda *args, **kwargs: ours(*args, preserve_rng_state=flag, **kwargs))
    exact(dropout)
    torch_differs(dropout, without_rng_state(torchs))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x.sin(), 0.5).square(),
    "alpha dropout": lambda x: F.alpha_dropout(x.sin(), 0.5, training=True).square(),
    "feature dropout": lambda x: F.dropout1d(x.sin(), 0.5).square(),
    "rand_like": lambda x: (x.sin() * torch.rand_like(x)).square(),
    "randn": lambda x: (x.sin() + torch.randn(x.shape)).square(),
    "bernoulli_": lambda x: (x.sin() * torch.empty_like(x).bernoulli_(0.5)).square(),
    "uniform_ through .data": lambda x: (x.sin() * torch.zeros_like(x).data.uniform_()).square(),
    "rrelu": lambda x: F.rrelu(x.sin(), training=True).square(),
    "gumbel": lambda x: F.gumbel_softmax(x.sin(), tau=0.7).square(),
    "normal of tensors": lambda x: (x.sin() * torch.normal(torch.zeros_like(x), 1.0)).square(),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x[None].sin(), x[None], x[None], dropout_p=0.5),
    "rows in random order": lambda x: x.sin()[torch.randperm(len(x))] * x.cos(),
    "multinomial rows": lambda x: x.sin()[torch.multinomial(torch.ones(len(x)), 3)].square(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_B02_a_random_op_is_added_where_preserve_rng_state_was_off_for_speed(draw: Callable[[Tensor], Tensor]) -> None:
    def program(way: Way) -> object:
        x = torch.randn(8, 6, requires_grad=True)
        out = way(draw, x)
        finish(out.sum(), draw_some)
        return out, x.grad, torch.get_rng_state()

    exact(program, without_rng_state(ours), ours)
    exact(program)
    torch_differs(program, without_rng_state(torchs))


class HandWritten(torch.autograd.Function):
    """What people write by hand: keep the inputs, run forward again in backward, forget the random state."""

    @staticmethod
    def forward(ctx: Any, function: Way, x: Tensor, *parameters: Tensor) -> Any:
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        return None, *torch.autograd.grad(out, (x, *ctx.parameters), gradient)


def test_B03_a_hand_written_helper_never_restores_the_random_state() -> None:
    def program(way: Way) -> object:
        layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8, requires_grad=True)
        function = lambda x: layer(x).square()  # noqa: E731
        out = HandWritten.apply(function, x, *layer.parameters()) if way is torchs else way(function, x)
        finish(out.sum())
        return grads(layer, x)

    exact(program)
    torch_differs(program)


def compiled(budget: float) -> Callable[[Tensor], Tensor]:
    from torch._dynamo import reset
    from torch._functorch import config

    reset()

    def run(x: Tensor) -> Tensor:
        with config.patch(activation_memory_budget=budget):
            return torch.compile(lambda x: F.dropout(x.sin(), 0.5), backend="aot_eager_decomp_partition")(x)

    return run


def mask_agreement(function: Callable[[Tensor], Tensor]) -> float:
    x = (torch.rand(4096) + 0.1).requires_grad_()
    out = function(x)
    out.sum().backward()
    assert x.grad is not None
    return float(((out == 0) == (x.grad == 0)).float().mean())


def test_B04_a_compiler_budget_below_1_recomputes_dropout_with_fresh_numbers() -> None:
    def run(x: Tensor) -> Tensor:
        with lowtide.record(lowtide.policies.recompute_all):
            return F.dropout(x.sin(), 0.5)

    assert mask_agreement(run) == 1.0


@pytest.mark.slow
@pytest.mark.skipif(not tried, reason="seen on torch 2.13")
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_B04_as_the_compiler_of_torch_shows_it() -> None:
    assert mask_agreement(compiled(1.0)) == 1.0
    assert mask_agreement(compiled(0.0)) < 0.9


# ---- devices that are not here: stand-ins --------------------------------------------------------------------


def stand_in(*devices: str) -> list[Tensor]:
    """Tensors that say they are on devices which this machine does not have. No autograd may touch them."""
    mode = FakeTensorMode()
    return [FakeTensor(mode, torch.empty(2, device="meta"), torch.device(device)) for device in devices]


class Device:
    """A device module with the two calls that every backend has, and nothing of CUDA's."""

    def __init__(self) -> None:
        self.states = {0: torch.zeros(4, dtype=torch.uint8), 1: torch.ones(4, dtype=torch.uint8)}

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.states[device.index].clone()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.states[device.index] = state.clone()


def test_B05_the_device_of_tensors_in_a_list_argument_is_found() -> None:
    (x, y), cpu = stand_in("xpu:0", "xpu:1"), torch.ones(2)
    assert randomness.devices_of(([x, y], 0.5), {}) == {torch.device("xpu:0"), torch.device("xpu:1")}
    assert randomness.devices_of((), {"tensors": (cpu, x)}) == {torch.device("cpu"), torch.device("xpu:0")}
    assert randomness.devices_of((None, [None, y]), {}) == {torch.device("xpu:1")}


def nested_draws(device: str) -> Callable[[Way], object]:
    def program(way: Way) -> object:
        x = torch.randn(6, 6, device=device, requires_grad=True)
        inner = {"layers": [{"in": [x.sin(), None]}, "name"]}
        out = way(lambda tree: F.dropout(tree["layers"][0]["in"][0], 0.5).square(), inner)
        finish(out.sum(), lambda: torch.rand(3, device=device))
        return out.cpu(), x.grad.cpu() if x.grad is not None else None

    return program


def test_B05_draws_on_tensors_in_nested_containers_are_replayed() -> None:
    exact(nested_draws("cpu"))


@pytest.mark.cuda
def test_B05_draws_on_device_tensors_in_nested_containers_are_replayed() -> None:
    exact(nested_draws("cuda"))
    torch_differs(nested_draws("cuda"))


@pytest.mark.parametrize("kind", ["mps", "xpu", "privateuseone"])
def test_B06_B07_any_device_with_the_generic_calls_has_its_random_state_put_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    device = torch.device(kind, 1)
    states = randomness.states_of({device})
    module.states[1] = torch.full((4,), 7, dtype=torch.uint8)  # something is drawn
    before = randomness.enter(states)
    assert module.states[1].tolist() == [1, 1, 1, 1]  # what the operation saw
    randomness.leave(before)
    assert module.states[1].tolist() == [7, 7, 7, 7]  # as if nothing had happened
    assert module.states[0].tolist() == [0, 0, 0, 0]


def test_B07_the_device_comes_from_the_tensors_not_from_what_is_installed() -> None:
    (x,) = stand_in("mps:0")
    assert randomness.devices_of((x,), {}) == {torch.device("mps:0")}
    assert randomness.devices_of(((3, 3),), {"device": torch.device("xpu:1")}) == {torch.device("xpu:1")}
    assert randomness.devices_of(((3, 3),), {}) == {torch.device("cpu")}


CONVENTIONS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one tensor": ((), {}),
    "a flag first": ((True,), {}),
    "numbers and None": ((0.5, None, 3), {}),
    "keywords": ((), {"scale": 2.0, "mask": None}),
}


@pytest.mark.parametrize(("args", "kwargs"), CONVENTIONS.values(), ids=CONVENTIONS)
@pytest.mark.parametrize("flag", [None, True, False], ids=str)
def test_B08_a_wrapper_shifts_its_arguments_by_one(args: Any, kwargs: Any, flag: bool | None) -> None:
    seen = []

    def function(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return x.exp().sin()

    x = torch.randn(3, requires_grad=True)
    options = {} if flag is None else {"preserve_rng_state": flag}
    for way in (plainly, ours):
        out = way(function, x, *args, **(kwargs if way is plainly else {**kwargs, **options}))
        assert torch.equal(out, x.exp().sin())
    assert seen == [(args, kwargs)] * 2


def test_B09_with_inputs_on_two_devices_the_states_of_both_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"mps": Device(), "xpu": Device()}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[torch.device(device).type])
    x, y = stand_in("mps:0", "xpu:1")
    states = randomness.states_of(randomness.devices_of((x, [y], torch.ones(2)), {}))
    assert {device.type for device, _ in states} == {"mps", "xpu", "cpu"}
    drawn = torch.full((4,), 9, dtype=torch.uint8)
    modules["mps"].states[0], modules["xpu"].states[1] = drawn, drawn
    torch.rand(3)
    before = randomness.enter(states)
    assert (modules["mps"].states[0].sum(), modules["xpu"].states[1].sum()) == (0, 4)
    randomness.leave(before)
    assert torch.equal(modules["mps"].states[0], drawn)
    assert torch.equal(modules["xpu"].states[1], drawn)


def test_B11_one_line_says_whether_checkpointing_is_safe_with_many_dropout_layers() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU()) for _ in range(6)))
    x = torch.randn(4, 8)
    assert lowtide.verify(lambda: model(x).square().sum(), model, lowtide.policies.recompute_all)


# ---- relatives -----------------------------------------------------------------------------------------------


def own_generators(way: Way) -> object:
    own = SimpleNamespace(
        torch=torch.Generator().manual_seed(3), numpy=np.random.default_rng(4), python=random.Random(5)
    )
    w = torch.randn(6, 6, requires_grad=True)

    def noisy(x: Tensor) -> Tensor:
        h = (x @ w).tanh() * torch.rand(6, generator=own.torch) + float(own.numpy.random())
        return h.square() * own.python.random()

    out = way(noisy, torch.ones(3, 6))
    finish(out.sum(), draw_some)
    return out, w.grad, own.torch, own.numpy, own.python


def test_P08_pythons_random_numpys_and_an_explicit_generator_are_not_replayed() -> None:
    def global_ones(way: Way) -> object:
        random.seed(1)
        np.random.seed(2)
        w = torch.randn(6, 6, requires_grad=True)
        out = way(lambda x: (x @ w * random.random() * np.random.rand()).tanh().square(), torch.ones(3, 6))
        finish(out.sum(), draw_some)
        return out, w.grad, random.getstate()[1], np.random.get_state()

    exact(own_generators)
    torch_differs(own_generators)
    exact(global_ones)
    torch_differs(global_ones)


def test_relative_a_sampler_object_that_hands_out_noise_from_a_buffer_it_moves_through() -> None:
    def program(way: Way) -> object:
        noise, place, w = torch.randn(64), [0], torch.randn(6, requires_grad=True)

        def take(count: int) -> Tensor:
            place[0] += count
            return noise[place[0] - count : place[0]]

        out = way(lambda x: ((x * w).sin() * take(6)).square(), torch.ones(6))
        finish(out.sum())
        return out, w.grad, place[0]

    exact(program)
    torch_differs(program)


def test_relative_a_region_that_seeds_by_itself_leaves_the_state_that_the_plain_step_leaves() -> None:
    def program(way: Way) -> object:
        w, states = torch.randn(6, requires_grad=True), []

        def seeded(x: Tensor) -> Tensor:
            torch.manual_seed(7)
            return (F.dropout(x * w, 0.5) * torch.rand(6)).square()

        out = way(seeded, torch.ones(6))
        states.append(torch.get_rng_state())
        finish(out.sum())
        return out, w.grad, *states, torch.get_rng_state()

    exact(program)


def test_relative_a_reentrant_region_refuses_keywords_that_ours_passes_on() -> None:
    def program(way: Way) -> object:
        x = torch.randn(6, requires_grad=True)
        out = way(lambda x, rate: F.dropout(x, rate).square(), x, rate=0.5)
        finish(out.sum())
        return out, x.grad

    exact(program)
    torch_raises(program, "Unexpected keyword", reentrant, ValueError)
