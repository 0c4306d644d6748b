"""In-place writes; training and evaluation mode; weights that change before backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.errors import RootChanged
from troubles.ways import (
    OURS,
    Way,
    exact,
    finish,
    grads,
    ours,
    outcome,
    plainly,
    reentrant,
    torch_differs,
    torch_raises,
    torchs,
    tried,
)

ENDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "a view, then relu_": lambda h: h[:].relu_(),
    "a transposed view, then tanh_": lambda h: h.t().tanh_(),
    "a slice written": lambda h: h[1:].mul_(2.0),
    "the whole after its slice was written": lambda h: (h[1:].sin_(), h)[1],
    "a narrow view": lambda h: h.narrow(1, 0, 3).exp_(),
    "masked_fill_": lambda h: h.masked_fill_(h > 0, 0.3),
    "norm, then relu in place": lambda h: F.relu(F.instance_norm(h[None]), inplace=True),
    "add_ of itself": lambda h: h.add_(h.detach().sin()),
    "copy_ into a part": lambda h: (h[0].copy_(h[1].detach()), h)[1],
    "index_put_": lambda h: h.index_put_((torch.tensor([0, 2]),), torch.tensor(0.5)),
}


def ending(last: Callable[[Tensor], Tensor]) -> Callable[[Way], object]:
    def program(way: Way) -> object:
        t, p = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
        out = way(lambda t: last((t * p).exp() + p), t)
        finish(out.square().sum())
        return out, grads(t, p)

    return program


@pytest.mark.parametrize("last", ENDINGS.values(), ids=ENDINGS)
def test_B67_an_in_place_op_on_a_view_as_the_last_op_cuts_the_graph(last: Callable[[Tensor], Tensor]) -> None:
    exact(ending(last))


def edited_outside(way: Way) -> object:
    t, p = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    out = way(lambda t: ((t * p).exp() + p)[:], t)
    out.mul_(3.0)
    out[0].add_(1.0)
    finish(out.square().sum())
    return out, grads(t, p)


def test_B67_editing_a_returned_view_in_place() -> None:
    exact(edited_outside)
    torch_raises(edited_outside, "inplace|in-place", reentrant)


# ---- training and evaluation mode ----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def recomputed(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """How many operations a policy was asked about."""
    asked = []

    def policy(op: object) -> bool:
        asked.append(op)
        return False

    with lowtide.attach(model, policy=policy):
        out = run()
        if out.requires_grad:
            out.sum().backward()
    return len(asked)


def test_B69_checkpointing_depends_on_grad_mode_not_on_the_training_flag() -> None:
    model, x = Net(), torch.randn(8, 16, requires_grad=True)
    training = recomputed(model, lambda: model(x))
    model.eval()
    evaluating = recomputed(model, lambda: model(x))
    frozen = recomputed(model.requires_grad_(False), lambda: model(x))
    assert training > 0
    assert evaluating == frozen > 0  # guidance and adversarial inputs need the memory as well


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_B70_nothing_is_recorded_during_validation(off: Callable[[], object]) -> None:
    model, x = Net(), torch.randn(8, 16)

    def validate() -> Tensor:
        with off():  # type: ignore[attr-defined]
            return model(x)

    assert recomputed(model.train(), validate) == 0
    assert recomputed(model.eval(), validate) == 0
    with off(), lowtide.record(lowtide.policies.recompute_all) as recording:  # type: ignore[attr-defined]
        depth = torch._C._len_torch_dispatch_stack()
        model(x)
    assert depth == 0
    assert not recording.report().kept


def test_B70_the_drop_in_calls_the_function_once_and_attaches_nothing_without_grad() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch._C._len_torch_dispatch_stack())
        return x.exp()

    with torch.no_grad():
        lowtide.checkpoint(function, torch.ones(3, requires_grad=True))
    assert seen == [0]


# ---- weights that change in between --------------------------------------------------------------------------


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "an optimizer step": lambda layer: torch.optim.SGD([layer.weight], lr=0.5).step(),
    "an average swapped in": lambda layer: layer.weight.copy_(layer.weight * 0.9),
    "a clip": lambda layer: layer.weight.clamp_(-0.1, 0.1),
    "a foreach update": lambda layer: torch._foreach_mul_([layer.weight], 0.9),
    "a load_state_dict": lambda layer: layer.load_state_dict(nn.Linear(6, 6).state_dict()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_P01_weights_changed_between_forward_and_backward(change: Callable[[nn.Linear], object]) -> None:
    """Plain autograd raises its version error; so does a replay. Torch's checkpoint says nothing."""

    def program(way: Way) -> object:
        first, second, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(4, 6)
        second.weight.grad = torch.ones(6, 6)
        out = way(lambda x: second(first(x).tanh()).tanh(), x)
        with torch.no_grad():
            change(second)
        finish(out.sum())
        return grads(first)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(plainly)
    for way in OURS:
        with pytest.raises(RootChanged):
            program(way)
    if tried:
        outcome(program, torchs)  # goes through, with the gradient of another function


def test_P01_weights_written_where_autograd_does_not_look_give_what_the_plain_step_gives() -> None:
    def program(way: Way) -> object:
        layer, x = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
        out = way(lambda x: layer(x.sin()).tanh(), x)
        layer.weight.data = layer.weight.data * 2  # other memory: autograd keeps the old one
        finish(out.sum())
        return grads(layer, x)

    exact(program)
    torch_differs(program)


# ---- relatives -----------------------------------------------------------------------------------------------


def test_relative_an_input_is_overwritten_by_the_next_batch_before_backward() -> None:
    """A loader that reuses its memory. Plain autograd raises where it saved the input; so does a replay."""

    def program(way: Way, reads_input: bool) -> object:
        w, batch = torch.randn(6, 6, requires_grad=True), torch.randn(4, 6)
        out = way(lambda given: ((given["x"] if reads_input else given["x"].clone()) @ w).tanh(), {"x": batch})
        batch.normal_()
        finish(out.sum())
        return grads(w)

    exact(partial(program, reads_input=False), partial(recorded_by, lambda op: op.name == "aten.clone"))
    for way in OURS:
        with pytest.raises(RuntimeError, match="modified"):
            program(way, reads_input=True)
    torch_differs(partial(program, reads_input=False))


def recorded_by(policy: Callable[[object], bool], function: Way, *args: object) -> object:
    with lowtide.record(policy):
        return function(*args)


def test_relative_a_residual_stream_updated_in_place_through_many_blocks() -> None:
    def program(way: Way) -> object:
        layers, x = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), torch.randn(4, 6, requires_grad=True)

        def run(x: Tensor) -> Tensor:
            stream = x.clone()
            for layer in layers:
                stream = stream.add_(layer(stream.clone()).tanh_())
            return stream

        out = way(run, x)
        finish(out.square().sum())
        return out, grads(layers, x)

    exact(program)


def test_relative_a_switch_of_the_training_flag_inside_the_region() -> None:
    def program(way: Way) -> object:
        model, x = Net(), torch.randn(8, 16, requires_grad=True)

        def both(x: Tensor) -> Tensor:
            out = model.train()(x)
            return out * model.eval()(x).sigmoid()

        out = way(both, x)
        finish(out.sum())
        return out, grads(model, x), model.training

    exact(program, ours)


# ---- found by the fuzzer ------------------------------------------------------------------------------------


def test_detaching_in_inference_mode_writes_nothing() -> None:
    def step(context: Any) -> Tensor:
        rows = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        with context:
            turned = rows.mT.contiguous()
            out = turned.sin()
            with torch.inference_mode():
                turned.detach_()
        del turned
        out.square().sum().backward()
        assert rows.grad is not None
        return rows.grad

    assert torch.equal(step(nullcontext()), step(lowtide.record(lowtide.policies.recompute_all)))


@pytest.mark.parametrize("copy", [False, True])
def test_a_gradient_that_the_forward_pass_reads_is_refused_and_a_copy_is_not(copy: bool) -> None:
    """Backward adds to the gradient, perhaps before what was computed from it is computed again."""

    def steps(context: Any) -> list[Tensor | None]:
        one, two = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        for _ in range(3):
            with context:
                scale = 1.0 if one.grad is None else (one.grad.clone() if copy else one.grad).sum()
                scaled = two * scale
                loss = one.sum() + scaled.sum()
            del scale  # else the tensor itself is still there
            loss.backward()
        return [one.grad, two.grad]

    plain, recording = steps(nullcontext()), lowtide.record(lambda op: op.name != "aten.sum")
    if copy:
        assert all(map(torch.equal, plain, steps(recording)))
    else:
        with pytest.raises(RootChanged, match="modified in place between forward and backward"):
            steps(recording)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "past the counter": lambda made: made.data.mul_(2.0),
    "a part of it": lambda made: made.data[:1].fill_(0.25),
    "counted": lambda made: made.mul_(2.0),
}


@pytest.mark.parametrize("number", [1, 8], ids=["recorded", "followed"])
@pytest.mark.parametrize("write", WRITES)
def test_another_recording_writes_what_the_first_dropped(write: str, number: int) -> None:
    """Plain autograd uses the new contents, or refuses: so does a ticket, though its recording is over."""

    def step(first: Any, second: Any) -> Tensor:
        rows = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        with first:
            made = rows.softmax(-1)
        with second:
            WRITES[write](made)
            loss = (made * 3.0).sum()
        del made
        loss.backward()
        assert rows.grad is not None
        return rows.grad

    recordings = [lowtide.record(lowtide.policies.recompute_all) for _ in range(2)]
    for _ in range(number):
        if write == "counted":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step(nullcontext(), nullcontext())
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step(*recordings)
        else:
            assert torch.equal(step(nullcontext(), nullcontext()), step(*recordings))
