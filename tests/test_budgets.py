"""What a step really takes is within the budget that it was planned for, with the same gradients, all over a zoo.

peak measured   the profiler's memory events of one step, and what is there all the time
peak allowed    eight budgets from the least that a plan fits to the peak of keeping everything
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from benchmarks.memory import measure_memory
from harness import freeze
from lowtide.graph import StepGraph
from lowtide.plan import Plan
from lowtide.planned import policy_of
from lowtide.planning import Planner
from tiny import Tiny, gpt_step

transformers = pytest.importorskip("transformers")

# transformers warns about kernels that are not installed; none of it concerns what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

BUDGETS = 8
SCALARS = 0.001
"""Of the peak: numbers that kernels wrap into tensors of a few bytes."""

TOKENS = 128
SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def of_transformers(model: nn.Module, **inputs: Tensor) -> Tiny:
    return Tiny(model, lambda: model(**inputs).loss)


def tokens(batch: int = 4, length: int = 48) -> dict[str, Tensor]:
    ids = torch.randint(3, TOKENS, (batch, length))
    return {"input_ids": ids, "labels": ids}


def gpt() -> Tiny:
    return gpt_step(blocks=4, width=64, length=64, batch=4, vocabulary=TOKENS)


def llama() -> Tiny:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
    return of_transformers(transformers.LlamaForCausalLM(config), **tokens())


def mixtral() -> Tiny:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, output_router_logits=True)
    return of_transformers(transformers.MixtralForCausalLM(config), **tokens())


def t5() -> Tiny:
    config = transformers.T5Config(
        vocab_size=TOKENS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    labels = torch.randint(3, TOKENS, (4, 24))
    return of_transformers(transformers.T5ForConditionalGeneration(config), **(tokens() | {"labels": labels}))


def resnet() -> Tiny:
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=4
    )
    model = transformers.ResNetForImageClassification(config)
    return of_transformers(model, pixel_values=torch.randn(8, 3, 64, 64), labels=torch.randint(4, (8,)))


class UNet(nn.Module):
    """Two levels down and up with skips, batch norm and in-place activations, (B, 3, H, W) -> (B, 2, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.convolutions(3, 8), self.convolutions(8, 16)])
        self.middle = self.convolutions(16, 16)
        self.up = nn.ModuleList([self.convolutions(32, 8), self.convolutions(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    @staticmethod
    def convolutions(before: int, after: int) -> nn.Module:
        layers: list[nn.Module] = []
        for width in (before, after):
            layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2, mode="bilinear"), skips.pop()], 1))
        return self.head(x)


def unet() -> Tiny:
    model, x = UNet(), torch.randn(4, 3, 32, 32)
    target = torch.randint(2, (4, 32, 32))
    return Tiny(model, lambda: F.cross_entropy(model(x), target))


class OneBlock(nn.Module):
    """The same encoder block six times over, as ALBERT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(64, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(6):
            x = self.block(x)
        return self.head(x)


def shared_block() -> Tiny:
    model, ids = OneBlock(), torch.randint(TOKENS, (4, 48))
    return Tiny(model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))


class LSTM(nn.Module):
    """A token model on two recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 32)
        self.layer = nn.LSTM(32, 48, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(48, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(ids))[0])


def lstm() -> Tiny:
    model, ids = LSTM(), torch.randint(TOKENS, (4, 40))
    return Tiny(model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))


class Heads(nn.Module):
    """A trunk and three heads of different widths, one of them early, whose losses are added."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)) for _ in range(5))
        self.heads = nn.ModuleDict({"early": nn.Linear(64, 10), "wide": nn.Linear(64, 300), "last": nn.Linear(64, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = {}
        for number, block in enumerate(self.trunk):
            x = x + block(F.layer_norm(x, (64,)))
            if number == 1:
                outputs["early"] = self.heads["early"](x.tanh())
        return outputs | {"wide": self.heads["wide"](x).exp(), "last": self.heads["last"](x)}


def heads() -> Tiny:
    model, x = Heads(), torch.randn(128, 64)

    def step() -> Tensor:
        out = model(x)
        return out["early"].square().mean() + out["wide"].log1p().mean() + out["last"].sigmoid().sum()

    return Tiny(model, step)


ZOO: dict[str, Callable[[], Tiny]] = {
    build.__name__: build for build in (gpt, llama, mixtral, t5, resnet, unet, shared_block, lstm, heads)
}
QUICK = {"gpt": (0, 3, 6), "unet": (0, 3), "heads": (0, 3)}
"""Which budgets of which models are tried by default."""


@dataclass(frozen=True)
class Trial:
    """What a model did within one budget: the peak of a step that proves nothing, and what each step left behind."""

    graph: StepGraph
    plan: Plan
    budget: int
    peak: int
    plain: dict[str, object]
    proving: dict[str, object]
    proven: dict[str, object]


def run(tiny: Tiny, around: AbstractContextManager[Any]) -> tuple[int, dict[str, object]]:
    """Peak bytes of one step, without what is there all the time, and its gradients and buffers bit for bit."""
    state = {name: tensor.clone() for name, tensor in tiny.model.state_dict().items()}
    tiny.model.zero_grad(set_to_none=True)
    torch.manual_seed(1)

    def forward() -> Tensor:
        with around:
            return tiny.step()

    peak = measure_memory(forward, lambda loss: loss.backward()).peak_bytes
    named = {name: p.grad for name, p in tiny.model.named_parameters()} | dict(tiny.model.named_buffers())
    seen = {name: freeze(tensor) for name, tensor in named.items()}
    tiny.model.load_state_dict(state)
    tiny.model.zero_grad(set_to_none=True)
    return peak, seen


@cache
def planned(name: str) -> tuple[Tiny, Planner, dict[str, object]]:
    """The model, its planner and what the plain step leaves behind."""
    torch.manual_seed(0)
    tiny = ZOO[name]()
    tiny.model.train()
    planner = Planner(tiny.trace(fake=False, repeats=1))
    run(tiny, nullcontext())
    return tiny, planner, run(tiny, nullcontext())[1]


@cache
def tried(name: str, n: int) -> Trial:
    """The ``n``-th of the budgets from the least to that of keeping everything."""
    tiny, planner, plain = planned(name)
    low, high = planner.lowest.peak, planner.plain.peak
    budget = low + (high - low) * n // (BUDGETS - 1)
    plan = planner.solve(budget)
    recording = lowtide.record(policy_of(plan))
    _, proving = run(tiny, recording)
    peak, proven = run(tiny, recording)
    return Trial(planner.graph, plan, budget, peak + planner.graph.resident_bytes, plain, proving, proven)


CASES = [
    pytest.param(name, n, id=f"{name} {n}", marks=[] if n in QUICK.get(name, ()) else [pytest.mark.slow])
    for name in ZOO
    for n in range(BUDGETS)
]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_gradients_are_those_of_the_plain_step(name: str, n: int) -> None:
    trial = tried(name, n)
    assert trial.proving == trial.plain
    assert trial.proven == trial.plain


@pytest.mark.parametrize(("name", "n"), CASES)
def test_a_step_stays_within_its_budget(name: str, n: int) -> None:
    trial = tried(name, n)
    assert trial.peak <= trial.budget * (1 + SCALARS)
    assert trial.plan.prediction is not None
    assert trial.plan.prediction.peak_bytes <= trial.budget


@pytest.mark.parametrize(("name", "n"), CASES)
def test_a_rehearsal_counts_what_was_predicted(name: str, n: int) -> None:
    trial = tried(name, n)
    assert trial.plan.prediction is not None
    rehearsed = planned(name)[0].rehearse(trial.plan, fake=False)
    assert rehearsed == pytest.approx(trial.plan.prediction.peak_bytes, rel=0.001)
