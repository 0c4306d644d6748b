"""Programs that reach over several steps, forwards, backwards, threads; modules that change on the way."""

from __future__ import annotations

import copy
import functools
import threading
import weakref

import torch
from torch import Tensor, nn

from harness import Program, inner
from zoo.state import Mlp, Stack, stepping
from zoo.table import Zoo, prepare, randn, weigh

ZOO = Zoo("steps")


@ZOO.program()
def hidden_state_carried_over_steps() -> Program:
    cell, x, carried = nn.GRUCell(8, 8), randn(3, 6, 8), {"state": torch.zeros(6, 8)}

    def step() -> Tensor:
        state, outs = carried["state"].detach(), []
        for part in prepare(x):
            state = cell(part, state)
            outs.append(state.exp())
        carried["state"] = state
        return weigh(outs)

    return Program(step, model=cell, leaves={"x": x}, python_state=lambda: carried)


@ZOO.program()
def truncated_backward_through_time() -> Program:
    cell, x = nn.LSTMCell(8, 8), randn(4, 6, 8)

    def step() -> Tensor:
        state = (torch.zeros(6, 8), torch.zeros(6, 8))
        for part in x[:-1]:
            state = cell(prepare(part), (state[0].detach(), state[1].detach()))
            weigh([state[0].exp(), state[1].sin()]).backward()
        return weigh(cell(prepare(x[-1]), (state[0].detach(), state[1].detach())))

    return Program(step, model=cell, leaves={"x": x})


@ZOO.program()
def gradients_accumulated_over_micro_batches() -> Program:
    model, x = Stack(), randn(4, 6, 8)

    def step() -> Tensor:
        for part in prepare(x.detach())[:-1]:
            (weigh(model(part)) / 4).backward()
        return weigh(model(prepare(x[-1]))) / 4

    return Program(step, model=model, leaves={"x": x})


@ZOO.program()
def two_forwards_one_backward() -> Program:
    model, x = Stack(), randn(6, 8)
    return stepping(model, lambda: [model(prepare(x)), model(prepare(x) * 0.5).sin()])


@ZOO.program()
def two_recordings_one_backward() -> Program:
    model, x = Stack(), randn(6, 8)

    def step() -> Tensor:
        with inner():
            first = model(prepare(x))
        with inner():
            second = model(first.sin())
        return weigh([first, second])

    return Program(step, model=model, leaves={"x": x})


@ZOO.program()
def backwards_in_reverse_order() -> Program:
    model, x, losses = Stack(), randn(6, 8), list[Tensor]()

    def step() -> Tensor:
        losses[:] = [weigh(model(prepare(x) * scale)) for scale in (1.0, 0.5, 2.0)]
        return losses[0]

    def backward(loss: Tensor) -> None:
        for each in (losses[2], losses[0], losses[1]):
            each.backward()

    return Program(step, model=model, leaves={"x": x}, backward=backward)


@ZOO.program()
def module_switched_to_eval_between() -> Program:
    model = Stack()
    return stepping(model, after_forward=model.eval, after_step=model.train)


@ZOO.program()
def parameters_frozen_between() -> Program:
    model = Stack()
    freeze = functools.partial(model.blocks[1].requires_grad_, False)
    return stepping(model, after_forward=freeze, after_step=model.requires_grad_)


@ZOO.program()
def model_deleted_before_backward() -> Program:
    x = randn(6, 8)

    def step() -> Tensor:
        torch.manual_seed(4)
        return weigh(Stack()(prepare(x)))

    return Program(step, leaves={"x": x})


@ZOO.program()
def lazy_modules() -> Program:
    return stepping(nn.Sequential(nn.LazyLinear(8), nn.GELU(), nn.LazyBatchNorm1d(), nn.LazyLinear(4)))


@ZOO.program()
def module_grows_during_forward() -> Program:
    model = nn.ModuleList([Mlp()])

    def call() -> Tensor:
        if len(model) < 4:
            model.append(Mlp())
        return functools.reduce(lambda h, block: block(h), model, prepare(x))

    x = randn(6, 8)
    return Program(lambda: weigh(call()), model=model, leaves={"x": x}, python_state=lambda: len(model))


@ZOO.program()
def results_cached_by_identity() -> Program:
    model, x, hits = nn.Linear(8, 8), randn(6, 8), list[bool]()
    cache: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def features(h: Tensor) -> Tensor:
        known = cache.get(id(h))
        hits.append(known is not None)
        if known is None:
            known = cache[id(h)] = model(h).exp().tanh()
        return known

    def step() -> Tensor:
        h = prepare(x)
        first, second = features(h), None
        second = features(h)
        return weigh([first.sin(), second.cos(), first is second and h])

    return Program(step, model=model, leaves={"x": x}, python_state=lambda: hits)


@ZOO.program()
def backward_in_another_thread() -> Program:
    def backward(loss: Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    return stepping(Stack(), backward=backward)


@ZOO.program()
def forward_part_in_another_thread() -> Program:
    model, x = Stack(), randn(6, 8)

    def call() -> Tensor:
        h, out = model.blocks[0](prepare(x)), list[Tensor]()
        thread = threading.Thread(target=lambda: out.append(model.blocks[1](h).exp()))
        thread.start()
        thread.join()
        return model.blocks[2](out[0]) * h

    return Program(lambda: weigh(call()), model=model, leaves={"x": x})


@ZOO.program()
def exception_caught_by_the_model() -> Program:
    model, x = Stack(), randn(6, 8)

    def call() -> Tensor:
        h = prepare(x)
        try:
            h = model.blocks[0](h)
            model.blocks[1](h[:, :3])
        except RuntimeError:
            h = model.blocks[2](h.sin())
        return h

    return Program(lambda: weigh(call()), model=model, leaves={"x": x})


@ZOO.program()
def optimizer_steps_inside() -> Program:
    model, x = Stack(), randn(6, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> Tensor:
        for _ in range(2):
            weigh(model(prepare(x))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return weigh(model(prepare(x)))

    return Program(step, model=model, leaves={"x": x}, python_state=lambda: optimizer.state_dict()["state"])


@ZOO.program()
def teacher_deep_copied_inside() -> Program:
    model, x, teachers = Stack(), randn(6, 8), list[Stack]()

    def step() -> Tensor:
        h = model(prepare(x))
        teachers.append(copy.deepcopy(model))
        return weigh([h, teachers[0](prepare(x)).detach() * h.sin(), teachers[-1](h)])

    return Program(step, model=model, leaves={"x": x})


class Tree(nn.Module):
    """Call itself on both halves of its input, down to single rows."""

    def __init__(self) -> None:
        super().__init__()
        self.join, self.leaf = nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return self.leaf(x).tanh()
        middle = len(x) // 2
        return self.join(torch.cat([self(x[:middle]), self(x[middle:])], dim=1)).sin().exp()


@ZOO.program()
def module_calling_itself() -> Program:
    return stepping(Tree())
