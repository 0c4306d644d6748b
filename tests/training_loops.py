"""Training loops as people write them, each to be run plainly and with something attached.

A situation is a function that gets ``put``, with which it attaches its model or models (or does nothing), trains, and
returns everything that is left: the two must be equal bit for bit.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from situations import WIDTH, WORDS, Left, Tower, Words, left, rows, words

Put = Callable[..., AbstractContextManager[Any]]
Situation = Callable[[Put], Left]

SITUATIONS: dict[str, Situation] = {}
TIGHT = {"gradients of gradients": "100%", "generator and discriminator": "90%"}
"""Budgets where the usual one is too small: their peaks are not those of what forward keeps."""


def situation(run: Situation) -> Situation:
    SITUATIONS[run.__name__.replace("_", " ")] = run
    return run


# ---- one model ---------------------------------------------------------------------------------------------


@situation
def loss_inside_forward(put: Put) -> Left:
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    with put(model):
        for _ in range(4):
            data = words()
            losses.append(model(data, targets=data))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return left(losses, model)


@situation
def loss_outside_of_forward_with_accumulation_and_clipping(put: Put) -> Left:
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, norms = [], {}
    with put(model):
        for step in range(6):
            data = words()
            losses.append(F.cross_entropy(model(data).flatten(0, 1), data.flatten()) / 2)
            losses[-1].backward()
            if step % 2:
                norms[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    return left(losses, model, **norms)


@situation
def buffers_and_another_size_each_time(put: Put) -> Left:
    model = Tower()
    losses = []
    with put(model):
        for batch in (24, 24, 7, 40, 40, 12, 24):
            losses.append(model(rows(batch)).square().mean())
            losses[-1].backward()
    return left(losses, model)


@situation
def a_frozen_part(put: Put) -> Left:
    model = Words()
    for parameter in (*model.embed.parameters(), *model.blocks[0].parameters()):
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    with put(model):
        for step in range(5):
            if step == 3:
                model.blocks[0].requires_grad_(True)
            losses.append(model(data := words(), data))
            losses[-1].backward()
            optimizer.step()
    return left(losses, model)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank addition."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a, self.b = nn.Linear(inner.in_features, 4, bias=False), nn.Linear(4, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.b(self.a(x))


@situation
def adapters_put_in_while_attached(put: Put) -> Left:
    model = Words()
    losses = []
    with put(model):
        for step in range(6):
            if step == 3:
                model.requires_grad_(False)
                for block in model.blocks:
                    block.up, block.down = Adapted(block.up), Adapted(block.down)
            losses.append(model(data := words(), data))
            losses[-1].backward()
    return left(losses, model)


@situation
def evaluation_in_between(put: Put) -> Left:
    model = Tower()
    losses = []
    with put(model):
        for _ in range(3):
            losses.append(model(rows()).square().mean())
            losses[-1].backward()
            model.eval()
            with torch.no_grad():
                losses.append(model(rows()).sum())
            with torch.inference_mode():
                losses.append(model(rows()).sum().clone())
            saliency = rows().requires_grad_()
            losses.extend(torch.autograd.grad(model(saliency).sum(), saliency))
            losses.append(model(rows()).sum())  # somebody forgot no_grad
            model.train()
    return left([loss.detach() for loss in losses], model)


@situation
def autocast_on_and_off(put: Put) -> Left:
    model = Words()
    losses = []
    with put(model):
        for step in range(6):
            with torch.autocast("cpu", dtype=torch.bfloat16) if step != 3 else nullcontext():
                losses.append(model(data := words(), data))
            losses[-1].backward()
    return left(losses, model)


@situation
def a_gradient_scaler(put: Put) -> Left:
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    losses = []
    with put(model):
        for _ in range(5):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(data := words(), data)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss)
    return left(losses, model, scale=scaler.get_scale())


@situation
def hooks_of_every_kind(put: Put) -> Left:
    model = Tower()
    seen: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *_: seen.append(name)

    model.register_forward_pre_hook(noted("before the model"))
    model.register_forward_hook(lambda module, args, out: out * 1.5)
    model.blocks[1].register_forward_hook(noted("after block 1"))
    model.blocks[1].register_full_backward_hook(noted("backward of block 1"))
    model.stem.weight.register_hook(lambda gradient: gradient * 2)
    model.stem.weight.register_post_accumulate_grad_hook(noted("accumulated"))
    losses = []
    with put(model):
        for _ in range(3):
            out = model(rows())
            out.register_hook(noted("of the output"))
            losses.append(out.square().mean())
            losses[-1].backward()
    return left(losses, model, seen=seen)


@situation
def copies_pickles_and_loaded_states(put: Put) -> Left:
    model = Tower()
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    with put(model):
        for step in range(5):
            losses.append(model(rows()).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for one, other in zip(average.parameters(), model.parameters(), strict=True):
                    one.lerp_(other, 0.1)
            if step == 1:
                file = io.BytesIO()
                torch.save(model.state_dict(), file)
                twin = pickle.loads(pickle.dumps(model))
                losses.append(twin(rows()).sum())
            if step == 2:
                file.seek(0)
                model.load_state_dict(torch.load(file))
                losses.append(copy.deepcopy(model)(rows()).sum())
                losses[-1].backward()
    return left(losses, model, average)


@situation
def another_dtype_later(put: Put) -> Left:
    model = Tower()
    losses = []
    with put(model):
        for step in range(6):
            dtype = (torch.float32, torch.bfloat16, torch.float64)[step // 2]
            if step % 2 == 0:
                model.to(dtype)
            losses.append(model(rows().to(dtype)).square().mean().float())
            losses[-1].backward()
            model.zero_grad()
    return left(losses, model)


class Numbered(Dataset[Tensor]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


@situation
def data_from_worker_processes(put: Put) -> Left:
    model = Tower()
    losses = []
    with put(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of fork in a process with threads
        for data in DataLoader(Numbered(), batch_size=96, num_workers=1, shuffle=True):
            losses.append(model(data).square().mean())
            losses[-1].backward()
    return left(losses, model)


@situation
def only_a_part_is_attached(put: Put) -> Left:
    tower, head = Tower(), nn.Linear(WIDTH, 3)
    model = nn.Sequential(tower, head)
    losses = []
    with put(tower):
        for _ in range(4):
            losses.append(model(rows()).logsumexp(1).mean())
            losses[-1].backward()
    return left(losses, model)


@situation
def gradients_of_gradients(put: Put) -> Left:
    model = Tower()
    losses = []
    with put(model):
        for _ in range(3):
            data = rows().requires_grad_()
            score = model(data).tanh().sum()
            (slope,) = torch.autograd.grad(score, data, create_graph=True)
            losses.append(score + slope.square().sum())
            losses[-1].backward()
    return left(losses, model)


@situation
def exceptions_on_the_way(put: Put) -> Left:
    model = Words()
    losses = []
    with put(model):
        for step in range(6):
            if step in (0, 3):
                try:
                    model(torch.full((2, 2), WORDS))
                except IndexError:
                    losses.append(torch.zeros(()))
            losses.append(model(data := words(), data))
            if step == 2:
                continue  # this loss is never used
            losses[-1].backward()
    return left(losses, model)


# ---- several models, several calls -------------------------------------------------------------------------


@situation
def two_calls_before_one_backward(put: Put) -> Left:
    model = Tower()
    losses = []
    with put(model):
        for _ in range(4):
            one, two = model(rows()), model(rows())
            losses.append((one * two).mean() + two.square().mean())
            losses[-1].backward()
    return left(losses, model)


@situation
def two_encoders(put: Put) -> Left:
    pictures, texts = Tower(), Tower()
    optimizer = torch.optim.AdamW([*pictures.parameters(), *texts.parameters()], 1e-2)
    losses = []
    with put([pictures, texts]):
        for batch in (16, 16, 9, 16):
            scores = pictures(rows(batch)) @ texts(rows(batch)).T
            losses.append(F.cross_entropy(scores, torch.arange(8 * batch)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return left(losses, pictures, texts)


@situation
def teacher_and_student(put: Put) -> Left:
    teacher, student = Tower(5), Tower(2)
    losses = []
    with put([student, teacher]):
        for _ in range(4):
            data = rows()
            with torch.no_grad():
                wanted = teacher(data)
            losses.append(F.mse_loss(student(data), wanted))
            losses[-1].backward()
    return left(losses, student, teacher)


@situation
def generator_and_discriminator(put: Put) -> Left:
    maker, judge = Tower(2), nn.Sequential(Tower(2), nn.Linear(WIDTH, 1))
    for_maker, for_judge = (torch.optim.Adam(m.parameters(), 1e-3) for m in (maker, judge))
    losses = []
    with put([maker, judge]):
        for _ in range(5):
            fake = maker(rows())
            losses.append(F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(rows())).mean())
            losses[-1].backward()
            for_judge.step()
            for_judge.zero_grad()
            losses.append(F.softplus(-judge(fake)).mean())
            losses[-1].backward()
            for_maker.step()
            for_maker.zero_grad()
            for_judge.zero_grad()
    return left(losses, maker, judge)


@situation
def one_model_feeds_the_other(put: Put) -> Left:
    first, second = Tower(2), Tower(3)
    losses = []
    with put([first, second]):
        for _ in range(4):
            losses.append(second(first(rows())).square().mean())
            losses[-1].backward()
    return left(losses, first, second)


@situation
def two_losses_with_a_backward_each(put: Put) -> Left:
    model = Tower()
    losses = []
    with put(model):
        for _ in range(4):
            one, two = model(rows()).mean(), model(rows()).square().mean()
            one.backward()
            two.backward()
            losses += [one, two]
    return left(losses, model)
