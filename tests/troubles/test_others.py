"""Flags, warnings, models without support, exports, and checkpoints within checkpoints."""

from __future__ import annotations

import copy
import io
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from harness import freeze
from lowtide.errors import RecomputeWarning
from lowtide.tape import randomness
from troubles.ways import OURS, Way, exact, finish, grads, ours, plainly, torchs, tried


def graphed(way: Way) -> object:
    """Something that draws, as people capture it."""
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    loss = way(lambda x: F.rrelu(F.gelu(x @ weight), training=True).sin(), x).square().sum()
    finish(loss)
    return [loss, *grads(x, weight)]


def test_B119_nothing_reads_random_state_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the capture, in which the generators answer as they do then."""

    def forbidden(device: torch.device) -> Tensor:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    monkeypatch.setattr(randomness, "get_state", forbidden)
    with pytest.raises(RuntimeError, match="during CUDA graph capture"):
        graphed(ours)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(RecomputeWarning, match="a CUDA graph is being captured"):
        exact(graphed)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:a CUDA graph is being captured")
def test_B119_cuda_graphs_and_checkpoint() -> None:
    """Steps before the capture are recorded, the captured one is kept whole; replays are the plain graph's."""

    def replayed(way: Way) -> list[object]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 64)).cuda()
        x, graph, side = torch.randn(32, 64, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def step() -> Tensor:
            loss: Tensor = way(block, x).square().mean()
            loss.backward()
            return loss

        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                block.zero_grad(set_to_none=True)
                step()
        torch.cuda.current_stream().wait_stream(side)
        block.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = step()
        torch.cuda.manual_seed(1)
        seen: list[object] = []
        for _ in range(3):
            x.add_(0.1)
            graph.replay()
            seen += [freeze(loss.cpu()), *(freeze(p.grad.cpu()) for p in block.parameters() if p.grad is not None)]
        return seen

    wanted = replayed(plainly)
    assert wanted == replayed(plainly)
    for way in OURS:
        assert replayed(way) == wanted


@pytest.mark.parametrize("flag", [None, True, False], ids=str)
def test_B120_warnings_about_use_reentrant(flag: bool | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowtide.checkpoint(torch.exp, torch.ones(2, requires_grad=True), use_reentrant=flag).sum().backward()
    if tried and flag is None:
        with pytest.warns(UserWarning, match="use_reentrant"):
            checkpoint(torch.exp, torch.ones(2, requires_grad=True))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + F.dropout(self.proj(x).tanh() * scale, 0.1, self.training)


class Uncommon(nn.Module):
    """No gradient_checkpointing_enable, no hook of any library: just a list of layers."""

    def __init__(self, name: str = "stages", depth: int = 3) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList(Layer() for _ in range(depth)))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        for layer in getattr(self, self.name):
            x = layer(x, scale=0.5)
        return x


@pytest.mark.parametrize("name", ["layers", "h", "stages", "encoder_blocks"])
@pytest.mark.parametrize("how", ["found", "named", "budget"])
def test_B121_model_does_not_support_gradient_checkpointing(name: str, how: str) -> None:
    torch.manual_seed(0)
    model, x = Uncommon(name), torch.randn(64, 8)

    def run() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = run()
    model.zero_grad(set_to_none=True)
    options: dict[str, dict[str, Any]] = {
        "found": {"policy": lowtide.policies.segments()},
        "named": {"policy": lowtide.policies.segments(f"{name}.*")},
        "budget": {"budget": "95%"},
    }
    with lowtide.attach(model, **options[how]):
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(wanted, run(), strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_B122_the_threads_of_nn_data_parallel() -> None:
    """Its slowness with many regions is CUDA's synchronising at each; there are no regions here. Results are exact."""

    def program(way: Way) -> object:
        model, x = nn.DataParallel(Uncommon()), torch.randn(4, 8)
        finish(way(model, x).sum())
        return grads(model)

    exact(program)


def count_policy_calls(way: Any) -> list[bool]:
    asked: list[bool] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(ctx.is_recompute)
        return CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(4, requires_grad=True)
    way(lambda x: x.sin().exp().tanh().cos(), x, context_fn=partial(create_selective_checkpoint_contexts, policy))
    asked_in_forward = list(asked)
    del asked_in_forward
    return asked


def test_P13_a_selective_policy_is_called_in_forward_only() -> None:
    """Here too: a policy decides once, and what it decided is what is done."""
    assert set(count_policy_calls(ours)) == {False}
    assert len(count_policy_calls(ours)) >= 4
    if tried:
        assert set(count_policy_calls(torchs)) == {False}


NESTINGS: dict[str, Any] = {
    "ours in ours": (ours, ours),
    "torch's in ours": (ours, torchs),
    "ours in torch's": (torchs, ours),
}


@pytest.mark.parametrize("nesting", NESTINGS.values(), ids=NESTINGS)
def test_P14_two_checkpointing_switches_nest_without_any_warning(nesting: tuple[Way, Way]) -> None:
    """Nested, both are exact, and only torch's own runs code twice."""
    runs: list[int] = []

    def program(way: Way) -> object:
        outer, inner = (plainly, plainly) if way is plainly else nesting
        layers, x = nn.ModuleList(Layer() for _ in range(2)), torch.randn(4, 8, requires_grad=True)
        runs.clear()

        def block(x: Tensor) -> Tensor:
            runs.append(1)
            return inner(layers[1], inner(layers[0], x)).exp()

        finish(outer(block, x).sum())
        return grads(layers, x)

    exact(program, ours)
    assert len(runs) == (2 if nesting[0] is torchs else 1)


def test_P14_attached_and_checkpointed_by_the_model_itself() -> None:
    class Own(Uncommon):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.stages:  # type: ignore[union-attr]
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    model, x = Own(), torch.randn(4, 8)

    def run() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = run()
    with lowtide.attach(model, policy=lowtide.policies.segments("stages.*")):
        assert all(torch.equal(a, b) for a, b in zip(wanted, run(), strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_P15_torch_export_of_an_attached_model() -> None:
    torch.manual_seed(0)
    model, x = Uncommon().eval(), torch.randn(4, 8)
    wanted = model(x)
    with lowtide.attach(model, policy=lowtide.policies.segments("stages.*")):
        exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_P15_torch_jit_of_an_attached_model() -> None:
    torch.manual_seed(0)
    model, x = Uncommon().eval(), torch.randn(4, 8)
    wanted = model(x)
    with lowtide.attach(model, policy=lowtide.policies.segments("stages.*")), torch.no_grad():
        traced = torch.jit.trace(model, (x,))
    assert torch.equal(traced(x), wanted)


# ---- relatives ------------------------------------------------------------------------------------------------


def test_relative_saved_copied_and_pickled_while_attached() -> None:
    torch.manual_seed(0)
    model, x = Uncommon(), torch.randn(4, 8)
    with lowtide.attach(model, policy=lowtide.policies.segments("stages.*")):
        model(x).sum().backward()
        file = io.BytesIO()
        torch.save(model, file)
        twin = copy.deepcopy(model)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    for other in (twin, again):
        assert list(other.state_dict()) == list(model.state_dict())
        assert torch.equal(other.eval()(x), model.eval()(x))


def test_relative_a_model_that_sets_grad_mode_by_itself() -> None:
    def program(way: Way) -> object:
        layers, x = nn.ModuleList(Layer() for _ in range(3)), torch.randn(4, 8, requires_grad=True)

        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                warm = layers[0](x)
            with torch.enable_grad():
                h = layers[1](x + warm)
            with torch.set_grad_enabled(False):
                gate = layers[2](h).sigmoid()
            return h * gate

        finish(way(run, x).sum())
        return grads(layers, x)

    exact(program, *OURS)
