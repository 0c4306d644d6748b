"""State that Python sees: caches, lists, counters, hooks, shared and frozen parts, containers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Program
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("state")


class Mlp(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.drop = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.Dropout(0.2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Stack(nn.Module):
    """Equal blocks in a list, an auxiliary loss each, and notes taken on the way."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(depth))
        self.notes: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for index, block in enumerate(self.blocks):
            x = block(x)
            losses.append(x.pow(2).mean() * 0.01)
            self.notes.append((index, float(x.detach().mean())))
        return x + torch.stack(losses).sum()


def stepping(model: nn.Module, call: Any = None, notes: Any = None, **about: Any) -> Program:
    """Make the program that runs `call`, or the model on a prepared leaf."""
    x = randn(6, 8)
    run = call or (lambda: model(prepare(x)))
    return Program(lambda: weigh(run()), model=model, leaves={"x": x}, python_state=lambda: notes, **about)


@ZOO.program(blocks="blocks.*")
def blocks_with_notes() -> Program:
    model = Stack()
    return stepping(model, notes=model.notes)


@ZOO.program(blocks="blocks.*")
def one_block_shared_by_all_layers() -> Program:
    model = Stack()
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)
    return stepping(model, notes=model.notes)


@ZOO.program(blocks="blocks.*")
def weights_shared_between_blocks() -> Program:
    model = Stack()
    for block in model.blocks[1:]:
        block.up.weight = model.blocks[0].up.weight
        block.down.bias = model.blocks[0].down.bias
    return stepping(model)


@ZOO.program(blocks="blocks.*")
def frozen_blocks() -> Program:
    model = Stack()
    model.blocks[0].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    return stepping(model)


@ZOO.program()
def only_the_last_bias_trains() -> Program:
    model, x = Stack().requires_grad_(False), torch.randn(6, 8)
    model.blocks[3].down.bias.requires_grad_()
    return Program(lambda: weigh(model(x)), model=model)


@ZOO.program()
def low_rank_adapter_on_frozen_layer() -> Program:
    model = nn.ModuleDict({"base": nn.Linear(8, 8), "a": nn.Linear(8, 2, bias=False), "b": nn.Linear(2, 8, bias=False)})
    model["base"].requires_grad_(False)
    x, tokens = nn.Embedding(10, 8).requires_grad_(False), torch.tensor([1, 4, 2])

    def step() -> Tensor:
        h = x(tokens)
        for _ in range(3):
            h = (model["base"](h) + model["b"](F.dropout(model["a"](h), 0.2))).tanh()
        return weigh(h)

    return Program(step, model=model)


@ZOO.program()
def key_value_cache() -> Program:
    model, x, cache = nn.Linear(8, 24), randn(2, 3, 8), list[tuple[Tensor, Tensor]]()

    def step() -> Tensor:
        h = prepare(x)
        for _ in range(3):
            q, k, v = model(h).chunk(3, -1)
            if cache:
                k, v = torch.cat([cache[-1][0], k], 1), torch.cat([cache[-1][1], v], 1)
            cache.append((k.detach()[:, -4:], v.detach()[:, -4:]))
            h = F.scaled_dot_product_attention(q, k, v)
        return weigh(h)

    return Program(step, model=model, leaves={"x": x}, python_state=lambda: cache)


@ZOO.program()
def key_value_cache_written_in_place() -> Program:
    model, x, cache = nn.Linear(8, 24), randn(2, 3, 8), torch.zeros(2, 2, 12, 8)

    def step() -> Tensor:
        h = prepare(x)
        for turn in range(3):
            q, k, v = model(h).chunk(3, -1)
            with torch.no_grad():
                cache[:, :, 3 * turn : 3 * turn + 3] = torch.stack([k, v])
            h = F.scaled_dot_product_attention(q, *cache[:, :, : 3 * turn + 3].clone()) + k * v.sin()
        return weigh(h)

    return Program(step, model=model, leaves={"x": x}, python_state=lambda: cache)


@ZOO.program()
def list_appended_and_kept_alive() -> Program:
    model, seen = Stack(), list[Tensor]()

    def call() -> Tensor:
        h = prepare(x)
        for block in model.blocks:
            h = block(h)
            seen.append(h)
        return torch.stack(seen[-4:]).sum(0)

    x = randn(6, 8)
    return Program(lambda: weigh(call()), model=model, leaves={"x": x}, python_state=lambda: seen)


@ZOO.program()
def hooks_that_count() -> Program:
    model, counts = Stack(), dict[str, int]()

    def count(kind: str, *_: object) -> None:
        counts[kind] = counts.get(kind, 0) + 1

    for module in model.modules():
        module.register_forward_pre_hook(functools.partial(count, "before"))
        module.register_forward_hook(functools.partial(count, "after"))
        module.register_full_backward_pre_hook(functools.partial(count, "backward before"))
        module.register_full_backward_hook(functools.partial(count, "backward after"))
    for parameter in model.parameters():
        parameter.register_hook(functools.partial(count, "gradient"))
        parameter.register_post_accumulate_grad_hook(functools.partial(count, "accumulated"))
    return stepping(model, notes=counts)


@ZOO.program()
def hooks_that_replace() -> Program:
    model = Stack()
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
    model.blocks[1].register_forward_hook(lambda module, args, out: F.dropout(out, 0.1))
    model.blocks[2].register_full_backward_hook(lambda module, into, out: (into[0] * 0.9,))
    return stepping(model)


@ZOO.program()
def order_of_gradient_hooks() -> Program:
    model, order = Stack(), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    return stepping(model, notes=order)


@ZOO.program()
def optimizer_in_backward() -> Program:
    model = Stack()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    return stepping(model)


@ZOO.program()
def multi_gradient_and_node_hooks() -> Program:
    x, seen = randn(6, 8), list[object]()

    def step() -> Tensor:
        h = prepare(x)
        y, z = h.exp(), h.sin()
        torch.autograd.graph.register_multi_grad_hook((y, z), lambda grads: seen.append(len(grads)))
        y.grad_fn.register_prehook(lambda grads: seen.append(float(grads[0].sum())))
        z.grad_fn.register_hook(lambda into, out: seen.append(float(into[0].sum())))
        return weigh(y * z)

    return Program(step, leaves={"x": x}, python_state=lambda: seen)


@ZOO.program()
def intermediate_gradients_retained() -> Program:
    x, kept = randn(6, 8), list[Tensor]()

    def step() -> Tensor:
        kept[:] = [prepare(x)]
        kept.append(kept[0].exp())
        for tensor in kept:
            tensor.retain_grad()
        return weigh(kept[1].sin())

    return Program(step, leaves={"x": x}, python_state=lambda: [tensor.grad for tensor in kept])


@dataclasses.dataclass
class Batch:
    """A container of the kind that models pass around."""

    features: Tensor
    mask: Tensor | None
    extra: dict[str, Any]


class Nested(nn.Module):
    """Take and return nested containers, keywords, None and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()

    def forward(
        self, batch: Batch, rows: Iterator[int], *, scale: Tensor | None = None, **extra: Any
    ) -> dict[str, Any]:
        h = self.block(batch.features) * batch.extra["weights"][0]
        h = h if batch.mask is None else h.masked_fill(batch.mask, 0.3)
        picked = torch.stack([h[row] for row in rows])
        return {"out": (picked.exp(), [h * (scale if scale is not None else 1.0)]), "none": None, **extra}


@ZOO.program()
def nested_containers() -> Program:
    model, x, weight = Nested(), randn(6, 8), randn(8)

    def step() -> Tensor:
        h = prepare(x)
        first = model(Batch(h, None, {"weights": [weight.exp()]}), iter([0, 2, 3]), also=h.sin())
        second = model(Batch(first["out"][1][0], h > 0.5, {"weights": (weight,)}), (r for r in range(6)), scale=weight)
        return weigh([first, second])

    return Program(step, model=model, leaves={"x": x, "weight": weight})
