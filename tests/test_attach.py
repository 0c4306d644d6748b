"""attach: the training loop stays as it is, the numbers stay as they are, and nothing is left behind."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.demo.memory import measure_memory
from lowtide.errors import AttachError, InfeasibleBudget, UnitError

WIDTH, WORDS = 48, 60


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    def __init__(self, inside: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS)
        self.inside = inside
        self.calls = 0

    def forward(self, words: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), words.flatten()) if self.inside else logits


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = torch.autograd._engine_run_backward
    yield
    assert "__call__" not in Net.__dict__
    assert torch.autograd._engine_run_backward is before
    assert torch._C._len_torch_dispatch_stack() == 0


def batches(count: int, sizes: tuple[int, ...] = (16,), length: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, WORDS, (sizes[n % len(sizes)], length), generator=generator) for n in range(count)]


def train(
    data: list[Tensor], *, inside: bool = True, micro: int = 1, **attached: object
) -> tuple[list[float], list[Tensor], int]:
    torch.manual_seed(0)
    model = Net(inside)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    with lowtide.attach(model, **attached) if attached else nullcontext():  # type: ignore[arg-type]
        for number, words in enumerate(data):
            out = model(words)
            loss = out if inside else F.cross_entropy(out.flatten(0, 1), words.flatten())
            loss.backward()
            losses.append(loss.item())
            if (number + 1) % micro == 0:
                optimizer.step()
                optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()], model.calls


CASES: dict[str, dict[str, object]] = {
    "a budget": {"budget": "70%"},
    "a policy": {"policy": lowtide.policies.segments()},
    "a callable": {"policy": lambda op: "mm" in op.name},
}


@pytest.mark.parametrize("attached", CASES.values(), ids=CASES)
@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
@pytest.mark.parametrize("micro", [1, 2], ids=["every step", "accumulated"])
def test_training_is_the_same_bit_for_bit(attached: dict[str, object], inside: bool, micro: int) -> None:
    data = batches(6, sizes=(16, 16, 5, 20))
    plain = train(data, inside=inside, micro=micro)
    ours = train(data, inside=inside, micro=micro, **attached)
    assert plain[0] == ours[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], ours[1], strict=True))
    assert plain[2] == ours[2]


def test_the_peak_stays_within_the_budget_from_the_second_step_on() -> None:
    model = Net()
    words = batches(1, sizes=(32,), length=64)[0]
    resident = sum(p.numel() * p.element_size() for p in model.parameters()) + words.numel() * 8

    def step() -> int:
        return measure_memory(lambda: model(words), Tensor.backward).peak_bytes

    graph = lowtide.trace(lambda: model(words), model=model)
    budget = int(lowtide.simulate(graph, frozenset()).peak_bytes * 0.6)
    with lowtide.attach(model, budget=budget) as handle:
        step()
        for _ in range(3):
            model.zero_grad()
            assert step() + resident <= budget
        assert handle.plan is not None
        assert handle.plan.recompute
        assert "under a plan" in str(handle.report())


def test_the_first_step_is_thrifty() -> None:
    words = batches(1, sizes=(32,), length=64)[0]

    def peak(attach: bool) -> int:
        model = Net()
        handle = lowtide.attach(model, budget="50%") if attach else None
        found = measure_memory(lambda: model(words), Tensor.backward).peak_bytes
        if handle is not None:
            handle.detach()
        return found

    assert peak(attach=True) < 0.8 * peak(attach=False)


def test_without_grad_nothing_is_recorded_and_nothing_is_counted() -> None:
    model = Net()
    with lowtide.attach(model, policy=lowtide.policies.recompute_all) as handle:
        with torch.no_grad():
            model(batches(1)[0])
        with torch.inference_mode():
            model(batches(1)[0])
        assert handle.report().calls == 0
        model.eval()
        model(batches(1)[0]).backward()
        assert handle.report().calls == 1


def test_model_copies_pickles_and_names_are_untouched() -> None:
    model = Net()
    before = (type(model), list(model.state_dict()), sorted(vars(model)), pickle.dumps(model.state_dict()))
    with lowtide.attach(model, policy=lowtide.policies.recompute_all) as handle:
        assert before == (type(model), list(model.state_dict()), sorted(vars(model)), pickle.dumps(model.state_dict()))
        twin = copy.deepcopy(model)
        twin(batches(1)[0]).backward()
        assert handle.report().calls == 0
        torch.save(model.state_dict(), io.BytesIO())
        pickle.loads(pickle.dumps(model))


def test_attaching_twice_says_how_to_get_out_of_it() -> None:
    model = Net()
    with lowtide.attach(model, budget="1 GiB"), pytest.raises(AttachError, match="detach"):
        lowtide.attach(model, budget="1 GiB")
    lowtide.attach(model, budget="1 GiB").detach()


def test_unclear_requests_are_refused() -> None:
    model = Net()
    with pytest.raises(AttachError, match="exactly one"):
        lowtide.attach(model)
    with pytest.raises(AttachError, match="exactly one"):
        lowtide.attach(model, budget="1 GiB", policy=lowtide.policies.keep_all)
    with pytest.raises(UnitError):
        lowtide.attach(model, budget="1 G")
    with pytest.raises(AttachError, match="Module"):
        lowtide.attach(lambda x: x, budget="1 GiB")  # type: ignore[arg-type]


def test_an_impossible_budget_is_an_error_that_names_the_smallest() -> None:
    model = Net()
    with lowtide.attach(model, budget="1 MB"):
        model(batches(1)[0]).backward()
        with pytest.raises(InfeasibleBudget, match="smallest"):
            model(batches(1)[0])


def test_an_exception_in_forward_leaves_nothing_behind() -> None:
    model = Net()
    handle = lowtide.attach(model, budget="1 GiB")
    with pytest.raises(IndexError):
        model(torch.full((2, 3), WORDS))
    model(batches(1)[0]).backward()
    model(batches(1)[0]).backward()
    handle.detach()


def test_two_forwards_before_one_backward() -> None:
    def run(attach: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        with lowtide.attach(model, budget="80%") if attach else nullcontext():
            for words in batches(3):
                (model(words) + model(words.flip(0)) * 2).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_a_model_that_dies_takes_its_attachment_along() -> None:
    def attach_and_drop() -> None:
        lowtide.attach(Net(), budget="1 GiB")

    attach_and_drop()
    assert "__call__" not in Net.__dict__


def test_a_graph_that_is_alive_when_the_handle_is_detached_still_runs_backward() -> None:
    def run(attach: Callable[[nn.Module], lowtide.Handle] | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        handle = attach(model) if attach is not None else None
        loss = model(batches(1)[0])
        if handle is not None:
            handle.detach()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    ours = run(lambda model: lowtide.attach(model, policy=lowtide.policies.recompute_all))
    assert all(torch.equal(a, b) for a, b in zip(run(None), ours, strict=True))


class Bomb(torch.autograd.Function):
    """Passes on what it gets, and fails in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("in backward")


@pytest.mark.parametrize("steps", [0, 2], ids=["while watched", "under a plan"])
@pytest.mark.parametrize("where", ["forward", "backward", "loop"])
def test_an_exception_in_the_with_block_takes_everything_off_the_model(where: str, steps: int) -> None:
    torch.manual_seed(0)
    model, words = Net(), batches(1)[0]
    error = {"forward": IndexError, "backward": ArithmeticError, "loop": KeyError}[where]
    hooks = dict(torch.nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(error), lowtide.attach(model, budget="80%"):  # noqa: PT012
        for _ in range(steps):
            model(words).backward()
        loss = model(words + WORDS if where == "forward" else words)
        if where == "loop":
            raise KeyError
        Bomb.apply(loss).backward()
    assert "__call__" not in Net.__dict__
    assert dict(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    model.zero_grad()

    def gradients(attach: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        with lowtide.attach(model, budget="80%") if attach else nullcontext():
            for _ in range(3):
                model(words).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_after_an_exception_the_attached_model_trains_on() -> None:
    model, words = Net(), batches(1)[0]
    with lowtide.attach(model, budget="80%") as handle:
        for number in range(6):
            loss = model(words)
            if number % 3 == 1:
                with pytest.raises(ArithmeticError):
                    Bomb.apply(loss).backward()
            else:
                loss.backward()
        assert handle.plan is not None
        assert handle.report().planned_calls >= 3
