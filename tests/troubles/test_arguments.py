"""Arguments and outputs that are not plain tensors."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import lowtide
from troubles.ways import (
    OURS,
    Way,
    exact,
    finish,
    grads,
    outcome,
    plainly,
    reentrant,
    torch_differs,
    torch_raises,
    tried,
)


@dataclasses.dataclass
class Result:
    hidden: Tensor
    extra: list[Tensor | None]


def dataclass_back(way: Way) -> object:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    result = way(lambda x: Result(layer(x).tanh(), [None, x.exp()]), x)
    requires = result.hidden.requires_grad
    if requires:
        finish(result.hidden.sum() + result.extra[1].sin().sum())
    return requires, grads(layer, x)


def test_B37_a_dataclass_output_loses_requires_grad() -> None:
    exact(dataclass_back)
    torch_differs(dataclass_back, reentrant)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Bag:
    """An object that no tree walk knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


NESTED: dict[str, Callable[[Tensor], tuple[Callable[..., Tensor], tuple[Any, ...]]]] = {
    "dict": lambda h: (lambda d: d["a"].exp().sin(), ({"a": h},)),
    "list": lambda h: (lambda t: t[1].exp().sin(), ([None, h],)),
    "dict of lists of tuples": lambda h: (lambda d: d["a"][0][1].exp().sin(), ({"a": [(1, h)]},)),
    "dataclass": lambda h: (lambda r: r.hidden.exp().sin(), (Result(h, []),)),
    "named tuple": lambda h: (lambda p: (p.left * p.right).exp(), (Pair(h, h.cos()),)),
    "namespace": lambda h: (lambda n: n.x.exp().sin(), (SimpleNamespace(x=h),)),
    "object": lambda h: (lambda bag: bag.x.exp().sin(), (Bag(h),)),
    "ordered dict": lambda h: (lambda d: d["x"].exp().sin(), (collections.OrderedDict(x=h),)),
    "deque": lambda h: (lambda d: d[0].exp().sin(), (collections.deque([h]),)),
    "set": lambda h: (lambda s: next(iter(s)).exp().sin(), ({h},)),
    "iterator": lambda h: (lambda g: next(g).exp().sin(), (iter([h]),)),
    "closure only": lambda h: (lambda: h.exp().sin(), ()),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
def test_B39_nested_containers_are_asked_for_again_and_again(make: Callable[..., Any]) -> None:
    def program(way: Way) -> object:
        x = torch.randn(2, 4, requires_grad=True)
        function, args = make(x.sin())
        out = way(function, *args)
        if out.requires_grad:
            finish(out.sum())
        return out, x.grad

    exact(program)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_B39_as_torch_shows_it() -> None:
    def program(way: Way) -> object:
        layer, h = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        out = way(lambda d: layer(d["a"]), {"a": h})
        finish(out.sum())
        return grads(layer, h)

    exact(program)
    torch_raises(program, "does not require grad", reentrant)


def keyword_mask(way: Way) -> object:
    layer, x, mask = nn.Linear(4, 4), torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)

    def forward(x: Tensor, *, mask: Tensor, nested: dict[str, Tensor] | None = None) -> Tensor:
        out = layer(x) * mask.sigmoid()
        return out if nested is None else out * nested["scale"].exp()

    scale = torch.randn(4, requires_grad=True)
    finish(way(forward, x, mask=mask, nested={"scale": scale}).sum())
    return grads(layer, mask, scale)


def test_B40_keyword_tensors_are_dropped_or_bound_as_constants() -> None:
    exact(keyword_mask)
    torch_raises(keyword_mask, "Unexpected keyword arguments", reentrant, ValueError)


def test_B40_gradients_of_keyword_tensors_do_not_reach_through_an_older_graph() -> None:
    def program(way: Way) -> object:
        w, total = torch.randn(4, requires_grad=True), []
        for _ in range(2):
            out = way(lambda x, *, gate: (x * gate.sigmoid()).exp(), torch.ones(4), gate=w * 2)
            finish(out.sum())
            total.append(w.grad.clone() if w.grad is not None else None)
        return total

    exact(program)


TABLE: dict[str, tuple[Any, ...]] = {
    "tensor and int": (3,),
    "tensor and None": (None,),
    "tensor, None, True": (None, True),
    "tensor, None, float": (None, 0.5),
    "tensor, None, bool, tensor": (None, False, torch.full((3,), 2.0)),
    "tensor, str, dtype, device": ("name", torch.float32, torch.device("cpu")),
    "tensor, empty containers": ([], {}, ()),
    "tensor, tensor that needs no grad": (torch.ones(3), None),
}


@pytest.mark.parametrize("rest", TABLE.values(), ids=TABLE)
def test_B41_B42_none_and_plain_objects_arrive_as_they_were_given(rest: tuple[Any, ...]) -> None:
    def program(way: Way) -> object:
        x, seen = torch.randn(3, requires_grad=True), []

        def function(x: Tensor, *given: Any) -> tuple[Tensor, tuple[Any, ...]]:
            seen.append(given)
            return x.exp().sin(), given

        out, back = way(function, x, *rest)
        finish(out.sum())
        assert len(seen) == 1
        assert all(a is b for a, b in zip(seen[0], rest, strict=True))
        assert all(a is b for a, b in zip(back, rest, strict=True))
        return out, x.grad

    exact(program)


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, image: Tensor, text: Tensor, *, time: Tensor | None = None) -> tuple[Tensor, Tensor]:
        both = self.norm(image + text)
        return self.a(both).tanh(), self.b(both * (1 if time is None else time)).sin()


def test_B43_a_block_that_returns_a_tuple_breaks_the_checkpointed_path() -> None:
    def program(way: Way) -> object:
        blocks = nn.ModuleList(TwoStreams() for _ in range(3))
        image, text = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
        i, t = image, text
        for block in blocks:
            i, t = way(block, i, t, time=image.detach())
        finish((i * t).sum())
        return i, t, grads(blocks, image, text)

    exact(program)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return self.layer(x).tanh() * mask, mask


class One(Two):
    def forward(self, only: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[override]
        (x,) = only
        return (self.layer(x).tanh(),)


@pytest.mark.parametrize("kind", [Two, One])
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_B44_checkpoint_sequential_follows_the_call_rules_of_sequential(kind: type[Two], segments: int) -> None:
    def program(way: Way) -> object:
        net, x = nn.Sequential(*(kind() for _ in range(3))), torch.randn(2, 4, requires_grad=True)
        given = (x, torch.ones(4)) if kind is Two else (x,)
        out = net(given) if way is plainly else way(net, segments, given, use_reentrant=False)
        finish(out[0].sum())
        return out, grads(net, x)

    assert outcome(program, lowtide.checkpoint_sequential) == outcome(program, plainly)
    if tried and kind is Two and segments == 3:
        outcome(program, checkpoint_sequential)  # today's torch passes a tuple on as well


def test_B44_a_layer_of_two_arguments_is_refused_in_the_words_of_sequential() -> None:
    class Add(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    net, pair = nn.Sequential(Add(), nn.Tanh()), (torch.ones(2), torch.ones(2))
    for call in (net, lambda pair: lowtide.checkpoint_sequential(net, 2, pair)):
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            call(pair)


# ---- relatives -----------------------------------------------------------------------------------------------


def test_relative_default_arguments_and_partials_and_bound_methods() -> None:
    def program(way: Way) -> object:
        model, x = TwoStreams(), torch.randn(2, 4, requires_grad=True)
        bound = way(model.forward, x, x.cos())
        partial = way(functools.partial(model, time=x.detach()), x, text=x.sin())
        finish(sum(t.sum() for t in (*bound, *partial)))  # type: ignore[arg-type]
        return grads(model, x)

    exact(program)


def test_relative_a_tensor_that_comes_in_goes_out_itself() -> None:
    x = torch.randn(3, requires_grad=True)
    h = x.exp()
    for way in OURS:
        out, same, view = way(lambda h: (h.sin(), h, h[1:]), h)
        assert same is h
        assert view._base is h
        assert out.grad_fn is not None


def test_relative_a_generator_function_is_driven_by_the_caller() -> None:
    def program(way: Way) -> object:
        layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

        def layers(x: Tensor) -> Any:
            for _ in range(3):
                x = layer(x).tanh()
                yield x

        *_, last = way(lambda x: list(layers(x)), x)
        finish(last.exp().sum())
        return grads(layer, x)

    exact(program)
