"""torch.compile: compiled code runs compiled, and what it saves is kept; the eager parts are recomputed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lowtide
from lowtide.demo.memory import measure_memory
from troubles.ways import Way, finish, grads, ours, plainly, recorded, torchs, tried

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """A backend that counts graphs and the operations in them."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes))
        return graph.forward


def broken(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin()
    torch._dynamo.graph_break()
    return h.exp().tanh().cos()


def test_B71_a_graph_break_inside_a_region_drops_the_frame_to_eager() -> None:
    """Compile what is inside of the region; the region around it is lowtide's, and nothing falls back."""

    def program(way: Way, fast: Callable[..., Tensor]) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        finish(way(lambda x: fast(x, w).exp(), x).sum())
        return grads(x, w)

    backend = Compiled()
    fast = torch.compile(broken, backend=backend)
    wanted = program(plainly, fast)
    inside = sum(backend.graphs)
    assert inside >= 5  # both sides of the break are compiled
    for way in (ours, recorded):
        assert all(torch.equal(a, b) for a, b in zip(wanted, program(way, fast), strict=True))  # type: ignore[arg-type]
    assert sum(backend.graphs) <= 3 * inside  # compiled again where modes differ, which are guards; no more
    if tried:
        around = Compiled()
        program(plainly, torch.compile(lambda x, w: torchs(broken, x, w), backend=around))
        assert sum(around.graphs) < inside


class Blocks(nn.Module):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)
        self.calls = [torch.compile(block, backend="aot_eager") if compiled else block for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        for call in self.calls:
            x = (x + call(x)).sin().exp().tanh()
        return x


def test_B72_higher_peak_than_eager() -> None:
    """With compiled blocks the peak under lowtide is not above that of the compiled blocks alone."""
    model, x = Blocks(compiled=True), torch.randn(256, 32)

    def forward() -> Tensor:
        return model(x).square().mean()

    def with_lowtide() -> Tensor:
        with lowtide.record(lowtide.policies.recompute_all):
            return forward()

    for _ in range(2):
        forward().backward()
        with_lowtide().backward()
    plain, own = measure_memory(forward, Tensor.backward), measure_memory(with_lowtide, Tensor.backward)
    assert own.peak_bytes <= plain.peak_bytes
    assert own.held_bytes < plain.held_bytes


@pytest.mark.parametrize(("backend", "kept"), [("aot_eager", "all"), ("inductor", "all"), ("eager", "nothing")])
def test_B72_what_compiled_code_saves_is_kept_and_what_eager_code_makes_is_recomputed(backend: str, kept: str) -> None:
    x = torch.randn(1 << 12, requires_grad=True)
    fast = torch.compile(lambda x: x.sin().exp().tanh().cos().sin().exp(), backend=backend)

    def held(forward: Callable[[], Tensor], record: bool) -> float:
        def run() -> Tensor:
            with lowtide.record(lowtide.policies.recompute_all) if record else contextlib.nullcontext():
                return forward()

        for _ in range(3):
            run().backward()
        return measure_memory(run, Tensor.backward).held_bytes // x.nbytes

    plain, own = (held(lambda: fast(x).sum(), record) for record in (False, True))
    assert plain >= 1
    assert own == (plain if kept == "all" else 0)
    around, plain_around = (held(lambda: fast(x.sin().exp().tanh()).sum(), record) for record in (True, False))
    assert around <= own + 1  # its input
    assert around < plain_around


def test_B73_backend_eager_ignored_checkpoint() -> None:
    """The debugging backend saves less as well: the drop-in around a function compiled with it."""

    def saved(way: Way) -> int:
        kept = []
        x = torch.randn(4, requires_grad=True)
        function = torch.compile(lambda x: x.sin().exp().tanh().cos(), backend="eager")
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            way(function, x).sum().backward()
        return len(kept)

    assert saved(ours) <= saved(plainly)


class Sines(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            ctx.save_for_backward(x)
            x = x.sin()
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("declared", [False, True])
def test_B74_operations_in_a_custom_function_are_not_tagged(declared: bool) -> None:
    """Declared recomputable, what a custom Function saves is dropped like anything else."""

    class Own(Sines):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            h = x.exp()
            ctx.save_for_backward(h)
            return h.sin()

    if declared:
        lowtide.recomputable(Own)
    x = torch.randn(1 << 14, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        for _ in range(6):
            x = Own.apply(x)
        return x.sum()

    def with_lowtide() -> Tensor:
        with lowtide.record(lowtide.policies.recompute_all):
            return run(x)

    for _ in range(2):
        with_lowtide().backward()
    plain, own = (measure_memory(step, Tensor.backward).held_bytes for step in (lambda: run(x), with_lowtide))
    if declared:
        assert own < 0.3 * plain
    else:
        assert own <= plain


def test_B75_ambient_saved_tensor_hooks_are_silently_wrong_under_compile() -> None:
    """Hooks set around the recording see what is kept, whether or not the code in it is compiled, and give it back."""

    def program(way: Way, compiled: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        layer, x, places = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True), list[Tensor]()
        fast = torch.compile(layer, backend="aot_eager") if compiled else layer

        def pack(tensor: Tensor) -> int:
            places.append(tensor.detach().clone())
            return len(places) - 1

        with saved_tensors_hooks(pack, lambda place: places[place]):
            out = way(lambda x: fast(x.sin()).tanh().exp(), x)
        finish(out.sum())
        return grads(layer, x)

    wanted = program(plainly, False)
    for compiled in (False, True):
        for way in (ours, recorded):
            assert all(torch.equal(a, b) for a, b in zip(wanted, program(way, compiled), strict=True))  # type: ignore[arg-type]


def test_B76_side_effects_refused() -> None:
    seen: list[int] = []

    def region(x: Tensor) -> Tensor:
        seen.append(1)
        return x.sin().exp()

    x = torch.randn(4, requires_grad=True)
    finish(ours(region, x).sum())
    assert seen == [1]
    if tried:
        from torch._dynamo.exc import TorchDynamoException

        with pytest.raises(TorchDynamoException):
            torch.compile(lambda x: torchs(region, x), backend="eager", fullgraph=True)(x)


def test_B77_compiled_autograd_with_checkpointing_gives_no_savings() -> None:
    """Backward through compiled autograd redeems tickets like any other backward."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def step(way: Way) -> list[Tensor | None]:
        x.grad = w.grad = None
        loss = way(lambda x: (x @ w).sin().exp(), x).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        return [t.clone() if t is not None else None for t in grads(x, w)]

    wanted = step(plainly)
    for way in (ours, recorded):
        assert all(torch.equal(a, b) for a, b in zip(wanted, step(way), strict=True))  # type: ignore[arg-type]


# ---- relatives -----------------------------------------------------------------------------------------------


def test_relative_a_compiled_model_attached_with_a_budget_or_a_policy() -> None:
    model, x = Blocks(compiled=True), torch.randn(64, 32)

    def train() -> list[Tensor | None]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    train()
    wanted = train()
    with lowtide.attach(model, policy=lowtide.policies.recompute_all), warnings.catch_warnings():
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(wanted, train(), strict=True))  # type: ignore[arg-type]


def test_relative_a_function_compiled_inside_of_the_recording() -> None:
    x = torch.randn(4, 4, requires_grad=True)

    def step(way: Way) -> Tensor | None:
        x.grad = None
        finish(way(lambda x: torch.compile(lambda x: x.sin().exp(), backend="aot_eager")(x).tanh(), x).sum())
        return x.grad

    wanted = step(plainly)
    for way in (ours, recorded):
        seen = step(way)
        assert wanted is not None
        assert seen is not None
        assert torch.equal(wanted, seen)
