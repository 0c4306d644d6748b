"""Other machinery at work meanwhile: checkpoints, saved-tensor hooks, modes, subclasses, grad modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from harness import Case, Program, inner
from zoo.state import Mlp, Stack
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("contexts")

MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def _stack() -> Program:
    model, x = Stack(), randn(6, 8)
    return Program(lambda: weigh(model(prepare(x))), model=model, leaves={"x": x}, python_state=lambda: model.notes)


class Counting(TorchDispatchMode):
    """Count the operators that are called, without the detach by which torch itself saves for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


class Renaming(TorchFunctionMode):
    """Turn every relu into a gelu, above autograd."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (F.gelu if func is torch.relu else func)(*args, **(kwargs or {}))


def _doubling_hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: (t.clone() * 2, t.is_floating_point()), lambda p: p[0] / 2)


def _refusing_hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.numpy().copy() if t.dim() else t, lambda a: torch.as_tensor(a))


@contextmanager
def _grad_off_then_on() -> Iterator[None]:
    with torch.no_grad(), torch.enable_grad():
        yield


@contextmanager
def _function_mode() -> Iterator[None]:
    with Renaming():
        yield


AROUND: dict[str, Any] = {
    "counting_mode": Counting,
    "flop_counter": partial(FlopCounterMode, display=False),
    "doubling_hooks": _doubling_hooks,
    "save_on_cpu": save_on_cpu,
    "anomaly_mode": partial(torch.autograd.detect_anomaly, check_nan=False),
    "grad_off_then_on": _grad_off_then_on,
    "function_mode": _function_mode,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "mutation_allowed": allow_mutation_on_saved_tensors,
    "deterministic_fill": partial(torch.random.fork_rng, devices=[]),
}
for _name, _around in AROUND.items():
    ZOO.append(Case(f"contexts-{_name}_around", _stack, around=_around))

INSIDE: dict[str, Any] = {
    "doubling_hooks": _doubling_hooks,
    "save_on_cpu": save_on_cpu,
    "flop_counter": partial(FlopCounterMode, display=False),
    "function_mode": _function_mode,
    "grad_off_then_on": _grad_off_then_on,
    "anomaly_mode": partial(torch.autograd.detect_anomaly, check_nan=False),
    "hooks_disabled": partial(disable_saved_tensors_hooks, "not here"),
    "inner_recording": inner,
    "profiler": partial(torch.profiler.record_function, "block"),
}


def _partly_inside(make: Any) -> Program:
    model, x = Stack(), randn(6, 8)

    def step() -> Tensor:
        h = model.blocks[0](prepare(x)).exp().tanh()
        with make():
            h = model.blocks[1](h).relu().sin()
            h = model.blocks[2](h)
        return weigh(model.blocks[3](h).exp())

    return Program(step, model=model, leaves={"x": x})


for _name, _inside in INSIDE.items():
    ZOO.add(f"{_name}_inside", partial(_partly_inside, _inside))


@ZOO.program()
def counting_mode_inside() -> Program:
    model, x, mode = Stack(), randn(6, 8), Counting()

    def step() -> Tensor:
        h = model.blocks[0](prepare(x))
        with mode:
            h = model.blocks[1](h).exp().tanh()
        return weigh(model.blocks[2](h))

    return Program(step, model=model, leaves={"x": x}, python_state=lambda: mode.counts)


def _checkpointed(name: str, **options: Any) -> None:
    def build() -> Program:
        model, x = Stack(), randn(6, 8)

        def step() -> Tensor:
            h = prepare(x)
            for block in model.blocks:
                h = checkpoint(block, h, **options).sin()
            return weigh(h)

        return Program(step, model=model, leaves={"x": x})

    ZOO.add(name, build)


_checkpointed("checkpoint_inside", use_reentrant=False)
_checkpointed("checkpoint_without_early_stop_inside", use_reentrant=False, early_stop=False)
_checkpointed("checkpoint_reentrant_inside", use_reentrant=True)
_checkpointed(
    "checkpoint_selective_inside",
    use_reentrant=False,
    context_fn=partial(create_selective_checkpoint_contexts, MATMULS),
)


@ZOO.program()
def checkpoint_nested_inside() -> Program:
    model, x = Stack(), randn(6, 8)

    def pair(h: Tensor) -> Tensor:
        h = checkpoint(model.blocks[0], h, use_reentrant=False)
        return checkpoint(model.blocks[1], h, use_reentrant=False).exp()

    return Program(
        lambda: weigh(checkpoint(pair, prepare(x), use_reentrant=False).tanh()), model=model, leaves={"x": x}
    )


@ZOO.program()
def checkpoint_sequential_inside() -> Program:
    model, x = nn.Sequential(*(Mlp() for _ in range(4))), randn(6, 8)
    return Program(
        lambda: weigh(checkpoint_sequential(model, 2, prepare(x), use_reentrant=False)),
        model=model,
        leaves={"x": x},
    )


@ZOO.program()
def no_grad_part() -> Program:
    model, x = Stack(), randn(6, 8)

    def step() -> Tensor:
        h = prepare(x)
        with torch.no_grad():
            target = model.blocks[0](h).exp()
        with torch.inference_mode():
            scale = model.blocks[1](h.detach()).mean().item()
        return weigh(model(h) * target * scale)

    return Program(step, model=model, leaves={"x": x})


@ZOO.program()
def recording_opened_without_grad() -> Program:
    model, x = Stack(), randn(6, 8)

    def step() -> Tensor:
        with torch.no_grad(), inner():
            target = model(prepare(x))
            with torch.enable_grad():
                h = model(prepare(x).sin())
        return weigh(h * target)

    return Program(step, model=model, leaves={"x": x})


@ZOO.program()
def set_grad_enabled_back_and_forth() -> Program:
    x = randn(6, 8)

    def step() -> Tensor:
        h = prepare(x).exp().tanh()
        torch.set_grad_enabled(False)
        shift = h.sin().exp()
        torch.set_grad_enabled(True)
        return weigh((h + shift).sin() * shift)

    return Program(step, leaves={"x": x})


@ZOO.program()
def evaluation_then_training() -> Program:
    model, x, scores = Stack(), randn(6, 8), list[float]()

    def step() -> Tensor:
        model.eval()
        with torch.no_grad(), inner():
            scores.append(float(weigh(model(prepare(x)))))
        model.train()
        return weigh(model(prepare(x)))

    return Program(step, model=model, leaves={"x": x}, python_state=lambda: scores)


@ZOO.program()
def eval_mode_with_grad() -> Program:
    model, x = nn.Sequential(Mlp(), nn.BatchNorm1d(8), Mlp()).eval(), randn(6, 8)
    return Program(lambda: weigh(model(prepare(x))), model=model, leaves={"x": x})


@ZOO.program()
def mutation_of_saved_tensors_allowed() -> Program:
    x = randn(6, 8)

    def step() -> Tensor:
        with allow_mutation_on_saved_tensors():
            h = prepare(x).exp()
            y = h.sin()
            h.mul_(0.5)
            loss = weigh(y * h)
            loss.backward(retain_graph=False)
        return weigh(prepare(x).tanh())

    return Program(step, leaves={"x": x})


class Tagged(Tensor):
    """A subclass that only carries its type along."""


@ZOO.program()
def subclass_by_type() -> Program:
    x = randn(6, 8)

    def step() -> Tensor:
        h = prepare(x).as_subclass(Tagged)
        return weigh(F.dropout((h.exp() @ h.T).sin(), 0.3).as_subclass(Tensor))

    return Program(step, leaves={"x": x})


@ZOO.program()
def subclass_wrapping_two_tensors() -> Program:
    pair, weight = TwoTensor(torch.randn(6, 8), torch.randn(6, 8)).requires_grad_(), randn(8, 8)

    def step() -> Tensor:
        h = prepare(pair)
        return ((h.exp() @ weight).sin() * h.exp()).tanh().sum()

    return Program(step, leaves={"pair": pair, "weight": weight})


@ZOO.program()
def nested_jagged_tensors() -> Program:
    weight, parts = randn(8, 8), [randn(3, 8), randn(5, 8)]

    def step() -> Tensor:
        jagged = torch.nested.as_nested_tensor([prepare(part) for part in parts], layout=torch.jagged)
        return weigh([part.exp() for part in torch.sin(jagged @ weight).unbind()])

    return Program(step, leaves={"weight": weight, "a": parts[0], "b": parts[1]})


@ZOO.program()
def sparse_matrices() -> Program:
    x = randn(6, 8)
    graph = torch.sparse_coo_tensor(torch.tensor([[0, 2, 5, 1], [1, 1, 0, 4]]), torch.rand(4), (6, 6))

    def step() -> Tensor:
        h = torch.sparse.mm(graph, prepare(x).exp()).sin()
        return weigh(torch.sparse.mm(graph.to_sparse_csr(), h) + h)

    return Program(step, leaves={"x": x})


@ZOO.program()
def sparse_values_with_gradient() -> Program:
    x, values = randn(6, 8), randn(4)

    def step() -> Tensor:
        graph = torch.sparse_coo_tensor(torch.tensor([[0, 2, 5, 1], [1, 1, 0, 4]]), prepare(values).exp(), (6, 6))
        return weigh(torch.sparse.mm(graph, prepare(x)).sin().exp() * graph.to_dense().sum())

    return Program(step, leaves={"x": x, "values": values})


@ZOO.program()
def opaque_layout() -> Program:
    x = randn(6, 8)
    return Program(lambda: weigh(prepare(x).exp().to_mkldnn().relu().to_dense().sin()), leaves={"x": x})


@ZOO.program()
def script_and_trace() -> Program:
    x = randn(6, 8)
    traced = torch.jit.trace(lambda h: (h.exp() * h).sin().tanh(), torch.randn(6, 8))
    return Program(lambda: weigh(traced(prepare(x)) * prepare(x).exp()), leaves={"x": x})


@ZOO.program()
def hooks_object_saved_by_hand() -> Program:
    x = randn(6, 8)

    def step() -> Tensor:
        h = prepare(x).exp()
        y = h.sin()
        h.register_hook(lambda gradient: gradient * h.detach().cos())
        return weigh(y.exp() * h)

    return Program(step, leaves={"x": x})


@ZOO.program()
def inference_tensor_as_input() -> Program:
    x = randn(6, 8)
    with torch.inference_mode():
        shift = torch.randn(6, 8)
    return Program(lambda: weigh((prepare(x) + shift).sin().exp()), leaves={"x": x})


@ZOO.program()
def symbolic_graph() -> Program:
    graph = torch.fx.symbolic_trace(nn.Sequential(Mlp(), nn.BatchNorm1d(8), Mlp()))
    x = randn(6, 8)
    return Program(lambda: weigh(graph(prepare(x)).exp()), model=graph, leaves={"x": x})


@ZOO.program()
def higher_order_operator() -> Program:
    q, bias = randn(2, 2, 8, 16), randn(2)

    def step() -> Tensor:
        h = prepare(q)
        seen = h.detach()  # on CPU it has no backward
        out = flex_attention(seen, seen.sin(), seen.cos(), score_mod=lambda score, b, head, i, j: score + i - j)
        return weigh((out * h).exp() * bias[:, None, None].sin())

    return Program(step, leaves={"q": q, "bias": bias})
