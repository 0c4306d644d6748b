"""Offloading and lifetimes: lowtide moves nothing itself, and composes with who does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import lowtide
from lowtide.demo.memory import measure_memory
from troubles.ways import Way, exact, finish, grads, ours, recorded, reentrant, torch_raises


class Offloader:
    """Puts saved tensors away and takes each out once; what was taken out is overwritten afterwards."""

    def __init__(self) -> None:
        self.away: dict[int, Tensor] = {}
        self.taken: list[Tensor] = []
        self.count = 0

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        self.away[self.count] = tensor.detach().clone()
        return self.count

    def unpack(self, place: int) -> Tensor:
        return self.away.pop(place)


def test_B104_B105_an_offloaded_tensor_is_freed_while_a_recomputation_still_needs_it() -> None:
    """Each tensor that was put away is asked for as often as in the plain step, and not after it was given back."""

    def program(way: Way) -> object:
        model, x, place = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), torch.randn(4, 6), Offloader()
        x.requires_grad_()
        with saved_tensors_hooks(place.pack, place.unpack):
            out = way(lambda x: model(x).tanh().exp(), x)
        finish(out.sum())
        return grads(model, x), len(place.away)

    exact(program)


@pytest.mark.cuda
def test_B104_B106_saving_on_the_cpu_with_pinned_memory() -> None:
    def program(way: Way) -> object:
        model, x = nn.Linear(64, 64, device="cuda"), torch.randn(32, 64, device="cuda", requires_grad=True)
        with save_on_cpu(pin_memory=True):
            out = way(lambda x: model(x).tanh().exp(), x)
        out.sum().backward()
        return [t.cpu() if t is not None else None for t in grads(model, x)]

    exact(program)


def test_B106_pinned_memory_costs_nothing_where_nothing_is_moved() -> None:
    """Does not apply: lowtide allocates no host memory; recomputing takes from the device's own allocator."""
    x = torch.randn(1 << 12, requires_grad=True)
    recorded(lambda x: x.sin().exp().tanh(), x).sum().backward()
    memory = measure_memory(lambda: recorded(lambda x: x.sin().exp().tanh(), x).sum(), Tensor.backward)
    assert memory.held_bytes <= 4 * 4


def test_B107_an_offload_wrapper_moves_parameters_too() -> None:
    """A recording holds parameters as they are: no copy of them, before or after backward."""
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), torch.randn(2, 256)
    recorded(model, x).sum().backward()
    memory = measure_memory(lambda: recorded(model, x).sum(), Tensor.backward)
    weight = 256 * 256 * 4
    assert memory.held_bytes < weight / 4


def test_B107_every_tensor_comes_back_on_its_own_device() -> None:
    def program(way: Way) -> object:
        layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        with save_on_cpu():
            out = way(lambda x: layer(x.sin()).tanh(), x)
        finish(out.sum())
        return grads(layer, x)

    exact(program)


def cross_attention(way: Way) -> object:
    encoder, x, y = nn.Linear(6, 6), torch.randn(3, 6), torch.randn(2, 6)
    keys = encoder(x).tanh()  # shared by all layers of the decoder
    layers, h = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), y.requires_grad_()
    for layer in layers:
        h = way(lambda h, layer=layer: h + (layer(h) @ keys.T).softmax(-1) @ keys, h)
    finish(h.sum())
    return grads(encoder, layers, y)


def test_B108_cross_attention_states_are_captured_by_every_decoder_layer() -> None:
    exact(cross_attention)
    torch_raises(cross_attention, "second time", reentrant)


# ---- relatives ------------------------------------------------------------------------------------------------


def test_relative_hooks_that_compress_what_is_saved_give_their_own_plain_gradients() -> None:
    """Under keep_all a lossy hook sees what it sees in the plain step, so the result is the same lossy one."""

    def lossy(way: Way) -> object:
        layer, x = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
        with saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            out = way(lambda x: layer(x).tanh().exp(), x)
        finish(out.sum())
        return grads(layer, x)

    def kept(function: Way, *args: Any) -> Any:
        with lowtide.record(lowtide.policies.keep_all):
            return function(*args)

    exact(lossy, kept)


def test_relative_the_model_moves_to_another_dtype_between_steps() -> None:
    def program(way: Way) -> object:
        model, seen = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), list[Any]()
        for dtype in (torch.float32, torch.float64, torch.float32):
            model.to(dtype)
            model.zero_grad()
            finish(way(model, torch.ones(2, 6, dtype=dtype)).sum())
            seen.append([t.clone() if t is not None else None for t in grads(model)])
        return seen

    exact(program)


def test_relative_a_copy_of_a_recorded_model_trains_on_its_own() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(4, 6)
    for way in (ours, recorded):
        loss = way(model, x).sum()
        twin = copy.deepcopy(model)
        loss.backward()
        twin(x).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]
        model.zero_grad()
