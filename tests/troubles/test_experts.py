"""Mixture of experts: what was routed once stays routed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lowtide
from lowtide.errors import RecomputeWarning
from troubles.ways import Way, exact, finish, grads, ours, recorded, torch_differs, torch_raises, torchs


class Router(nn.Module):
    """Scores tie; how a tie is broken depends on how often the router ran, as it does between two GPU kernels."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.score = nn.Linear(8, experts)
        self.runs = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.score(x).mul(0.0).softmax(-1)  # all equal
        self.runs += 1
        order = torch.roll(torch.arange(weights.shape[-1]), self.runs)
        values, picked = weights[:, order].topk(1)
        return values.squeeze(1), order[picked.squeeze(1)]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.router(x)
        out = torch.zeros_like(x)
        for which, expert in enumerate(self.experts):
            rows = (choice == which).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, F.silu(expert(x[rows])) * weights[rows, None])
        return x + out.sin()


def routed(way: Way) -> object:
    model, x = Experts(), torch.randn(6, 8, requires_grad=True)
    out = way(model, x)
    finish(out.sum())
    return out, grads(model, x), model.router.runs


def test_B26_the_router_is_recomputed_and_token_counts_drift() -> None:
    exact(routed)
    torch_differs(routed)  # the other expert gets the gradient, or shapes differ


def test_B26_a_policy_that_saves_topk_by_name_is_not_needed_but_accepted() -> None:
    def save_topk(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = op in (torch.ops.aten.topk.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    exact(routed, partial(ours, context_fn=partial(create_selective_checkpoint_contexts, save_topk)))


def test_B26_what_decides_is_kept_and_the_report_says_so() -> None:
    model = Experts()
    with lowtide.record(lowtide.policies.recompute_all) as recording:
        model(torch.randn(6, 8)).sum().backward()
    kept = {row.op: row.reason for row in recording.report().kept}
    assert "integer or bool results" in kept["aten.topk"]
    assert "aten.nonzero" in kept


class Gate(nn.Module):
    """Keeps a running load that is None until the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 4)
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score(x).softmax(-1)
        now = weights.detach().sum(0)
        if self.load is None:
            self.load = now
        else:
            self.load += now
        return (weights.exp() @ torch.ones(4, 8)).sin() * x


def gated(way: Way) -> object:
    gate, x = Gate(), torch.randn(6, 8, requires_grad=True)
    out = way(gate, x)
    finish(out.sum())
    return out, grads(gate, x), gate.load


def save_additions(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = op in (torch.ops.aten.add_.Tensor, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def test_B27_the_expert_load_counter_is_doubled_and_selective_checkpointing_aborts() -> None:
    contexts = partial(create_selective_checkpoint_contexts, save_additions)
    exact(gated)
    exact(gated, partial(ours, context_fn=contexts))
    torch_differs(gated)
    torch_raises(gated, "storage", partial(torchs, context_fn=contexts))


def test_B29_peers_recompute_in_different_order_and_collectives_pair_wrongly() -> None:
    """A replay issues no collective, so there is no order to keep: seen here with a counting stand-in."""
    sent = SimpleNamespace(count=0)
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        library.define("lowtide_stand_in(Tensor x) -> Tensor")

        def send(x: Tensor) -> Tensor:
            sent.count += 1
            return x.flip(0)

        library.impl("lowtide_stand_in", send, "CPU")
        exchange = torch.ops._c10d_functional.lowtide_stand_in

        def program(way: Way, backwards: int = 1) -> object:
            w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
            sent.count = 0
            losses = [way(lambda x: (exchange(x @ w.detach()) @ w).tanh().exp(), x + n).sum() for n in range(2)]
            for loss in losses[::backwards]:
                loss.backward()
            return grads(w), sent.count

        for order in (1, -1):
            exact(partial(program, backwards=order))
        torch_differs(program)  # each collective is issued twice
    with lowtide.record(lowtide.policies.recompute_all) as recording:
        torch.ops._c10d_functional.wait_tensor(torch.ones(2, requires_grad=True) * 2)
    assert {row.reason for row in recording.report().kept} == {"communication between processes"}


# ---- relatives -----------------------------------------------------------------------------------------------


def test_relative_a_near_tie_that_flips_by_one_bit_between_two_kernels() -> None:
    def program(way: Way) -> object:
        w, x, runs = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8), [0]

        def function(x: Tensor) -> Tensor:
            runs[0] += 1
            h = x @ w
            return h[(h.sum(1) + 1e-7 * runs[0]).argsort()[:2]].tanh().exp() * (h > h.mean()).sum()

        out = way(function, x)
        finish(out.sum())
        return out, grads(w), runs[0]

    exact(program)


def test_relative_capacity_buckets_and_dropped_tokens() -> None:
    def program(way: Way) -> object:
        model, x, dropped = nn.Linear(8, 8), torch.randn(12, 8, requires_grad=True), list[int]()

        def function(x: Tensor) -> Tensor:
            choice = (x.sum(1) > 0).long()
            place = F.one_hot(choice, 2).cumsum(0).gather(1, choice[:, None]).squeeze(1) - 1
            keep = place < 4
            dropped.append(int((~keep).sum()))
            buckets = torch.zeros(2, 4, 8).index_put((choice[keep], place[keep]), x[keep])
            return model(buckets).tanh()[choice, place.clamp(max=3)] * keep[:, None]

        out = way(function, x)
        finish(out.sum())
        return out, grads(model, x), dropped

    exact(program)
    torch_differs(program)  # the note is taken twice


def test_relative_a_straight_through_estimator_rounds_once() -> None:
    def program(way: Way) -> object:
        x = torch.randn(6, 8, requires_grad=True)
        codes = torch.randn(5, 8, requires_grad=True)

        def quantize(x: Tensor) -> Tensor:
            nearest = codes[torch.cdist(x, codes).argmin(1)]
            return (x + (nearest - x).detach()).exp() * nearest.sigmoid()

        out = way(quantize, x)
        finish(out.sum())
        return out, grads(x, codes)

    exact(program)


@pytest.mark.parametrize("way", [ours, recorded])
def test_relative_an_expert_kernel_that_does_not_repeat_itself_is_kept_with_a_warning(way: Way) -> None:
    runs = [0]
    with torch.library._scoped_library("lowtide_experts", "FRAGMENT") as library:
        library.define("grouped(Tensor x) -> Tensor")

        def grouped(x: Tensor) -> Tensor:
            runs[0] += 1
            return x + 0.01 * runs[0]

        library.impl("grouped", grouped, "CPU")
        lowtide.recomputable("lowtide_experts::grouped")
        w = torch.randn(8, requires_grad=True)
        with pytest.warns(RecomputeWarning, match=r"lowtide_experts\.grouped .* two runs"):
            loss = way(lambda x: (torch.ops.lowtide_experts.grouped(x) * w).tanh().sum(), torch.ones(8))
        finish(loss)
        ours_grad, w.grad = w.grad, None
        ((torch.ones(8) + 0.01) * w).tanh().sum().backward()  # what the first of the two runs gave
        assert ours_grad is not None
        assert w.grad is not None
        assert torch.equal(ours_grad, w.grad)
