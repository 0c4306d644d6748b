"""Metadata or counts that do not match: a second run of the function would have to do what the first did."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import lowtide
from lowtide.errors import ReplayMismatch, RootChanged
from troubles.ways import Way, exact, finish, grads, ours, recorded, torch_differs, torch_raises, torchs


def cached_attention(way: Way) -> object:
    layer, cache, x = nn.Linear(8, 8), list[Tensor](), torch.randn(5, 8, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        cache.append(layer(x))
        keys = torch.cat(cache)
        return (x @ keys.T).softmax(-1) @ keys

    out = way(attend, x)
    finish(out.sum())
    return out, grads(layer, x), len(cache)


def test_B19_recomputed_attention_has_twice_the_length_because_a_cache_grew_on_both_passes() -> None:
    exact(cached_attention)
    torch_raises(cached_attention, "different metadata", error=CheckpointError)


class CacheObject:
    """A cache that a model switches on by default; it lives as long as the step."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.seen = 0

    def update(self, layer: int, keys: Tensor) -> Tensor:
        self.keys[layer] = torch.cat([self.keys[layer], keys], 1) if layer in self.keys else keys
        self.seen += keys.shape[1]
        return self.keys[layer]


def test_B20_a_cache_object_that_is_on_by_default_breaks_checkpointed_training() -> None:
    def program(way: Way) -> object:
        layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))
        x, cache = torch.randn(2, 4, 8, requires_grad=True), CacheObject()

        def block(index: int, h: Tensor) -> Tensor:
            q, k, v = layers[index](h).chunk(3, -1)
            return h + F.scaled_dot_product_attention(q, cache.update(2 * index, k), cache.update(2 * index + 1, v))

        h = x
        for index in range(3):
            h = way(block, index, h)
        finish(h.sum())
        return h, grads(layers, x), cache.seen, {key: t.shape for key, t in cache.keys.items()}

    exact(program)
    torch_raises(program, "different metadata|different number", error=CheckpointError)


def test_B21_a_hook_swaps_a_parameter_for_an_empty_one_after_forward_as_sharding_engines_do() -> None:
    """Plain autograd goes through with what is there in backward; a replay says what it missed, never guesses."""

    def program(way: Way) -> object:
        layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        whole = layer.weight.data

        def gather(*_: object) -> None:
            layer.weight.data = whole

        def release(*_: object) -> None:
            layer.weight.data = torch.empty(0)

        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(release)
        out = way(lambda x: layer(x.sin()).tanh().exp(), x)
        out.register_hook(gather)
        finish(out.sum())
        return out, x.grad, layer.weight.grad

    exact(program)


def shorter_the_second_time(way: Way) -> object:
    layer, x, rows = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True), SimpleNamespace(n=3)

    def take(x: Tensor) -> Tensor:
        out = layer(x[: rows.n].sin()).tanh()
        rows.n -= 1
        return out.exp()

    out = way(take, x)
    finish(out.sum())
    return out, grads(layer, x), rows.n


def test_B22_a_region_whose_shapes_change_on_the_second_run_has_no_second_run() -> None:
    exact(shorter_the_second_time)
    torch_raises(shorter_the_second_time, "different metadata", error=CheckpointError)


class Unsteady(nn.Module):
    """An operator in it gives other values when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.lowtide_troubles.unsteady(self.proj(x)).exp()


@pytest.fixture
def unsteady() -> list[float]:
    """Register an operator whose result moves with each call."""
    if not hasattr(torch.ops.lowtide_troubles, "unsteady"):

        @torch.library.custom_op("lowtide_troubles::unsteady", mutates_args=())
        def move(x: Tensor) -> Tensor:
            moved.append(1.0 + len(moved))
            return x * moved[-1]

        move.register_autograd(lambda ctx, g: g * 1.0)
        lowtide.recomputable("lowtide_troubles::unsteady")
    moved.clear()
    return moved


moved: list[float] = []


def test_B22_a_mismatch_is_told_with_module_operation_line_and_cure(unsteady: list[float]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Unsteady())
    with (
        pytest.raises(ReplayMismatch, match=r"lowtide_troubles\.unsteady in 1, test_metadata\.py:\d+ is kept instead"),
        lowtide.record(lowtide.policies.recompute_all, strict=True),
    ):
        model(torch.ones(2, 4))
    model = nn.Sequential(nn.Linear(4, 4), Unsteady())
    with pytest.warns(lowtide.errors.RecomputeWarning, match="two runs on the same input gave different results"):
        loss = recorded(lambda: model(torch.ones(2, 4)).sum())
    loss.backward()
    out = model(torch.ones(2, 4))
    assert out.shape == (2, 4)


def sparse_experts(way: Way, tie: SimpleNamespace) -> object:
    """Experts in a loop that skips those without a token; one near-tie flips between two runs of the router."""
    experts, x = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), torch.randn(6, 8, requires_grad=True)
    tie.runs = 0

    def mlp(x: Tensor) -> Tensor:
        tie.runs += 1
        choice = torch.zeros(6, dtype=torch.long)
        choice[0] = tie.runs  # the second run sends the only token of expert 1 to expert 2
        choice[1] = 2
        out = torch.zeros_like(x)
        for which, expert in enumerate(experts):
            (rows,) = torch.where(choice == which)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]).tanh())
        return out.exp()

    out = way(mlp, x)
    finish(out.sum())
    return out, grads(experts, x), tie.runs


def test_B24_another_number_of_tensors_is_saved_when_the_sparse_part_is_checkpointed() -> None:
    program = partial(sparse_experts, tie=SimpleNamespace())
    exact(program)
    torch_raises(program, "different number of tensors|different metadata", error=CheckpointError)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("where", ["inside", "around"])
def test_B25_compiled_code_inside_or_around_a_region_saves_other_tensors_on_recompute(where: str) -> None:
    """What compiled code saves is kept, so it is never asked to save the same tensors twice."""
    torch._dynamo.reset()
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8, requires_grad=True)
    fast = torch.compile(layer, backend="aot_eager")

    def plain() -> list[Tensor | None]:
        layer.zero_grad()
        x.grad = None
        fast(x.sin()).exp().sum().backward()
        return [t.clone() for t in grads(layer, x) if t is not None]

    wanted = plain()
    for way in (ours, recorded):
        layer.zero_grad()
        x.grad = None
        out = way(lambda x: fast(x.sin()).exp(), x) if where == "inside" else way(fast, x.sin()).exp()
        finish(out.sum())
        assert all(torch.equal(a, b) for a, b in zip(wanted, grads(layer, x), strict=True) if b is not None)


# ---- probed ---------------------------------------------------------------------------------------------------


def test_P02_model_eval_between_forward_and_backward() -> None:
    def program(way: Way) -> object:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh())
        out = way(model, torch.randn(4, 8))
        finish(out.sum(), model.eval)
        return out, grads(model)

    exact(program)
    torch_raises(program, "different number of tensors", error=CheckpointError)


def test_P02_a_switch_to_eval_that_keeps_the_counts() -> None:
    def program(way: Way) -> object:
        model, x = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Tanh()), torch.randn(4, 8, requires_grad=True)
        scale = nn.Linear(8, 8)
        out = way(lambda x: scale(model(x)) if model.training else scale(model(x) * 2), x)
        finish(out.sum(), model.eval)
        return out, grads(scale, x), list(model.buffers())

    exact(program)


def test_P03_a_layer_frozen_between_forward_and_backward() -> None:
    def program(way: Way) -> object:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        out = way(model, torch.randn(4, 8))
        finish(out.sum(), lambda: model[2].requires_grad_(False))
        return out, grads(model)

    exact(program)
    torch_raises(program, "different number of tensors|A different number", error=CheckpointError)


def test_P11_determinism_check_none_gives_a_later_size_error_far_from_the_cause() -> None:
    exact(shorter_the_second_time, partial(ours, determinism_check="none"))
    torch_raises(shorter_the_second_time, "size|shape", partial(torchs, determinism_check="none"))


def test_relative_what_backward_needs_was_written_in_place_the_message_says_which_and_what_to_do() -> None:
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    out = recorded(lambda x: (x @ w).tanh().exp(), x)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RootChanged, match=r"shape \(8, 8\) .* modified in place between forward and backward"):
        out.sum().backward()


def test_P10_a_value_of_the_same_shape_changes_between_the_passes_and_nobody_notices() -> None:
    def program(way: Way) -> object:
        setting, x = {"power": 2}, torch.randn(4, requires_grad=True)
        out = way(lambda x: (x.exp() ** setting["power"]).sin(), x)
        finish(out.sum(), lambda: setting.update(power=3))
        return out, x.grad

    exact(program)
    torch_differs(program)  # shapes agree, values do not: nobody notices


def test_relative_an_argument_list_is_emptied_before_backward() -> None:
    def program(way: Way) -> object:
        parts = [torch.randn(4, requires_grad=True) for _ in range(3)]
        given = list(parts)
        out = way(lambda tensors: torch.stack([t.exp() for t in tensors]).sum(0).sin(), given)
        finish(out.sum(), given.clear)
        return out, grads(*parts)

    exact(program)
    torch_raises(program, "stack expects|different|non-empty")


def test_relative_the_loop_count_is_an_attribute_that_training_raises() -> None:
    def program(way: Way) -> object:
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
        model.steps = 2

        def think(x: Tensor) -> Tensor:
            for _ in range(model.steps):
                x = model(x).tanh()
            model.steps += 1
            return x

        out = way(think, x)
        finish(out.sum())
        return out, grads(model), model.steps

    exact(program)
