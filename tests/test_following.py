"""A step that is known is followed, not recorded; it gives the same bits, and a step that changes is noticed."""

from __future__ import annotations

import contextlib
import functools
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from harness import Case, Observation, assert_same, dirty_memory, freeze, observe
from lowtide.errors import LowtideError, RecomputeWarning
from lowtide.tape import library
from test_promptness import Gpt, bytes_left, peak_bytes, train, without_collector
from zoo import CASES

# The programs are what warns: of anomaly mode, sparse layouts, deprecated forms. They are here for that.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("shelves")]
STEPS = 7
POLICIES = {
    "recompute_all": lowtide.policies.recompute_all,
    "lot": lambda op: bool(zlib.crc32(f"{op.site} {op.name}".encode()) & 1),
}


@functools.cache
def plainly(case: Case) -> Observation:
    first, second = (observe(case, contextlib.nullcontext, steps=STEPS) for _ in range(2))
    assert_same(first, second)
    return first


@pytest.mark.parametrize(
    ("policy", "inside"),
    [
        pytest.param("recompute_all", False, id="recompute_all-after"),
        pytest.param("lot", True, id="lot-inside"),
        pytest.param("recompute_all", True, id="recompute_all-inside", marks=pytest.mark.slow),
        pytest.param("lot", False, id="lot-after", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_followed_steps_are_exact(
    case: Case, policy: str, inside: bool, shelves: OrderedDict[Any, library.Shelf]
) -> None:
    plain = plainly(case)
    make: Any = functools.partial(lowtide.record, POLICIES[policy])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecomputeWarning)
        other = observe(case, make, backward_inside=inside, steps=STEPS)
    if case.may_refuse and other.error is not None:
        assert isinstance(other.error, LowtideError), repr(other.error)
        return
    if case.fails:
        assert isinstance(other.error, RuntimeError), repr(other.error)
    assert_same(plain, other)


# ---- programs that change ------------------------------------------------------------------------------------


class Changing(nn.Module):
    """A small block whose forward can be told to do something else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.3)
        self.extra = nn.Linear(8, 8)
        self.scale = 1.5
        self.do: Callable[[Tensor], Tensor] = lambda x: x
        self.power: Any = 2
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc(self.norm(x)))
        h = self.do(h * self.scale).tanh() ** self.power
        return x + self.drop(self.out(h))


def steps_agree(change: Callable[[Changing, int], Any], *, steps: int = 12, policy: Any = None) -> list[Any]:
    """Train plainly and recorded, ``change`` called before each step; every bit must agree. Returns the programs."""
    library._local.shelves = OrderedDict()

    def train(context: Any) -> list[Any]:
        torch.manual_seed(0)
        model, seen = Changing(), []
        data = torch.randn(steps, 4, 8)
        for step in range(steps):
            around = change(model, step) or contextlib.nullcontext()
            x = data[step]
            model.zero_grad(set_to_none=True)
            with around, context:
                loss = model(x if step % 5 != 4 or not getattr(model, "short", False) else x[:2]).square().mean()
            garbage = dirty_memory()
            loss.backward()
            del garbage
            seen += [
                freeze(loss.detach()),
                *(freeze(p.grad) for p in model.parameters()),
                freeze(torch.get_rng_state()),
            ]
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
        return seen

    plain = train(contextlib.nullcontext())
    recorded = train(lowtide.record(policy or lowtide.policies.recompute_all))
    assert plain == recorded
    return [program for shelf in library._local.shelves.values() for program in shelf.programs]


def set_to(name: str, value: Any, at: int = 8) -> Callable[[Changing, int], Any]:
    def change(model: Changing, step: int) -> None:
        if step == at:
            setattr(model, name, value)

    return change


def test_a_step_that_stays_is_followed() -> None:
    (program,) = steps_agree(lambda model, step: None)
    assert program.followed == 8
    assert program.missed == 0


def inplace_on_intermediate(h: Tensor) -> Tensor:
    h.mul_(0.5)
    return h


def through_data(h: Tensor) -> Tensor:
    h.data.mul_(0.5)
    return h


def with_grad_off(h: Tensor) -> Tensor:
    with torch.no_grad():
        shift = h.mean()
    return h + shift


def through_transform(h: Tensor) -> Tensor:
    return h + torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(h.detach())


def through_packed(lengths: list[int]) -> Callable[[Tensor], Tensor]:
    """A recurrent layer over sequences whose lengths no shape shows."""
    wanted = torch.tensor(lengths)

    def do(h: Tensor) -> Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(h.new_ones(2, 3, 16) * h.sum(), wanted, True, False)
        torch.manual_seed(3)
        out, _ = nn.LSTM(16, 16, batch_first=True)(rows)
        return h + out.data

    return do


def through_numpy(h: Tensor) -> Tensor:
    shift = h.detach().numpy()
    shift *= 0.5
    return h + 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def recovered(h: Tensor) -> Tensor:
    with contextlib.suppress(RuntimeError):
        return h @ torch.ones(3, 3)
    return h.sin()


def under_hooks(h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        return h.sin().cos()


def recorded_inside(h: Tensor) -> Tensor:
    with lowtide.record(lowtide.policies.keep_all):
        return h.sin().cos()


def checkpointed(h: Tensor) -> Tensor:
    out: Tensor = lowtide.checkpoint(lambda x: x.sin().cos(), h)
    return out


CHANGES: dict[str, Callable[[Changing, int], Any]] = {
    "scalar": set_to("scale", 0.25),
    "scalar zero sign": set_to("scale", -0.0),
    "integer for float": set_to("power", 2.0),
    "another power": set_to("power", 3),
    "another op": set_to("do", torch.sin),
    "one op more at the end": set_to("do", lambda h: h + 1),
    "in place": set_to("do", inplace_on_intermediate),
    "through data": set_to("do", through_data),
    "no grad inside": set_to("do", with_grad_off),
    "random op": set_to("do", lambda h: F.dropout(h, 0.5)),
    "view": set_to("do", lambda h: h.t().contiguous().t()),
    "data decides": set_to("do", lambda h: h if float(h.detach().sum()) > 0 else -h, at=0),
    "argument from data": set_to("do", lambda h: h * float(h.detach().max()), at=0),
    "alternating": lambda model, step: setattr(model, "scale", 1.0 + step % 2),
    "now and then": lambda model, step: setattr(model, "scale", 1.0 + (step % 7 == 6)),
    "evaluation mode": lambda model, step: model.train(step < 8) and None,
    "frozen": lambda model, step: model.fc.requires_grad_(step < 8) and None,
    "frozen first layers": lambda model, step: (
        [part.requires_grad_(step < 8) for part in (model.norm, model.fc)] and None
    ),
    "autocast": lambda model, step: torch.autocast("cpu", torch.bfloat16) if step >= 8 else None,
    "autocast from the start": lambda model, step: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda model, step: None,
    "short batches": lambda model, step: setattr(model, "short", True),
    "a layer replaced": lambda model, step: setattr(model, "fc", nn.Linear(8, 16)) if step == 8 else None,
    "a parameter replaced": lambda model, step: (
        setattr(model.fc, "weight", nn.Parameter(torch.ones(16, 8))) if step == 8 else None
    ),
    "parameter data replaced": lambda model, step: (
        setattr(model.fc.weight, "data", torch.ones(16, 8)) if step == 8 else None
    ),
    "parameter strides": lambda model, step: (
        setattr(model.fc.weight, "data", model.fc.weight.data.t().contiguous().t()) if step == 8 else None
    ),
    "a hook": lambda model, step: (
        model.fc.register_forward_hook(lambda m, a, out: out * 2) and None if step == 8 else None
    ),
    "a tensor hook": set_to("do", lambda h: (h.register_hook(lambda g: g * 2), h)[1]),
    "compiled": set_to("do", torch.compile(lambda h: h.sin() * 2, backend="eager")),
    "packed sequences": lambda model, step: setattr(model, "do", through_packed([3, 1] if step % 7 < 5 else [2, 2])),
    "transform": set_to("do", through_transform),
    "transform from the start": set_to("do", through_transform, at=0),
    "numpy": set_to("do", through_numpy),
    "custom function": set_to("do", Doubled.apply),
    "saved-tensor hooks": set_to("do", under_hooks),
    "saved-tensor hooks from the start": set_to("do", under_hooks, at=0),
    "an exception": set_to("do", recovered),
    "an exception from the start": set_to("do", recovered, at=0),
    "another recording": set_to("do", recorded_inside),
    "another recording from the start": set_to("do", recorded_inside, at=0),
    "checkpoint": set_to("do", checkpointed),
    "checkpoint from the start": set_to("do", checkpointed, at=0),
    "deterministic algorithms": lambda model, step: torch.use_deterministic_algorithms(False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_step_that_changes_is_exact(change: Callable[[Changing, int], Any]) -> None:
    steps_agree(change)
    steps_agree(change, policy=POLICIES["lot"])


# ---- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [lowtide.policies.recompute_all, lowtide.policies.segments("blocks.*"), lowtide.policies.keep_matmuls]
)
def test_a_followed_step_holds_what_a_recorded_one_holds(policy: Any) -> None:
    model, ids = Gpt(depth=3, width=64), torch.randint(0, 256, (2, 64))
    recording = lowtide.record(policy)
    step = functools.partial(train, model, ids, recording)
    peaks = [peak_bytes(step) for _ in range(8)]
    (shelf,) = library._local.shelves.values()
    assert [program.followed for program in shelf.programs] == [4]
    assert max(peaks[4:]) <= peaks[1]
    with without_collector():
        assert bytes_left(step) == 0
        assert bytes_left(lambda: forward_only(model, ids, recording)) == 0


def forward_only(model: nn.Module, ids: Tensor, context: Any) -> None:
    with context:
        model(ids)


def test_a_followed_write_leaves_to_other_recordings_what_they_read() -> None:
    def train(make: Callable[[], Any]) -> list[Any]:
        first, second, seen = make(), make(), []
        shared, weight = torch.full((4, 4), 2.0), torch.ones(4, 4, requires_grad=True)
        for _ in range(STEPS):
            weight.grad = None
            with first:
                loss = ((shared + 0.1) * weight).exp().sum()
            with second:
                shared.mul_(0.5)
                loss = loss + (weight * 0.25).sin().sum()
            loss.backward()
            seen += [freeze(loss.detach()), freeze(weight.grad)]
        return seen

    assert train(contextlib.nullcontext) == train(lambda: lowtide.record(lowtide.policies.recompute_all))
    followed = [program.followed for shelf in library._local.shelves.values() for program in shelf.programs]
    assert followed == [STEPS - 4, STEPS - 4]


def test_models_that_begin_alike_are_told_apart() -> None:
    ids = torch.randint(0, 256, (2, 64))
    recording = lowtide.record(lowtide.policies.segments("blocks.*"))
    for width in (64, 96, 64):
        model = Gpt(depth=3, width=width)
        step = functools.partial(train, Shifted(model), ids, recording)
        peaks = [peak_bytes(step) for _ in range(9)]
        assert max(peaks[1:]) <= peaks[0], peaks
    (shelf,) = library._local.shelves.values()
    assert all(program.followed and not program.missed for program in shelf.programs)
    assert len(shelf.programs) == 3


class Shifted(nn.Module):
    """A model on all but the last token: its first call reads no parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.model(ids[:, :-1])
        return out
