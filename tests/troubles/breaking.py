"""Break a step at its k-th operation, and say what must be true afterwards.

```
forward (recorded)          backward (replays)
op op op ... op ... op      op ... op ... op      k counts all of them, proofs and replays included
              ▲ raises
then: the very error arrives │ nothing is attached │ random state is nobody's leftover
      the same recording runs the next step exactly │ a second backward is exact or refuses
```
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from harness import attached, freeze


class Injected(Exception):
    """What the tests raise."""


def exhausted() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def allocator_failed() -> BaseException:
    return RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory (injected)")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "an exception": lambda: Injected("injected"),
    "out of memory on a device": exhausted,
    "out of memory on the CPU": allocator_failed,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
}


class Breaking(TorchDispatchMode):
    """Raises at the ``at``-th operation that arrives, once; ``allocating``: counts only those that make memory."""

    def __init__(self, at: int, make: Callable[[], BaseException], *, allocating: bool = False) -> None:
        super().__init__()
        self.at = at
        self.make = make
        self.allocating = allocating
        self.seen = 0
        self.raised: BaseException | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.allocating or any("Tensor" in str(r.type) and r.alias_info is None for r in func._schema.returns):
            self.seen += 1
            if self.seen == self.at:
                self.raised = self.make()
                raise self.raised
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Something of everything: norms with statistics, dropout, writes in place, a custom Function, a cache."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = F.dropout(F.gelu(self.up(self.norm(x))), 0.2)
        h = h.mul_(1.1).add_(torch.rand_like(h))
        y = torch.empty_like(h)
        y.copy_(h)
        order = y.sum(1).argsort()
        return x + self.down(y[order]).sin_()


@dataclass
class Step:
    """One training step that can be built anew, run under a recording, and looked at."""

    model: nn.Module
    x: Tensor

    @classmethod
    def build(cls) -> Step:
        torch.manual_seed(0)
        return cls(nn.Sequential(Block(), Block(), nn.Linear(8, 1)), torch.randn(6, 8, requires_grad=True))

    def state(self) -> list[Tensor]:
        """Parameters and statistics, to be put back after a broken step."""
        return [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]

    def restore(self, state: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor, before in zip((*self.model.parameters(), *self.model.buffers()), state, strict=True):
                tensor.copy_(before)
        self.model.zero_grad()
        self.x.grad = None

    def loss(self) -> Tensor:
        out: Tensor = self.model(self.x)
        return out.square().sum()

    def look(self, loss: Tensor) -> object:
        """All that the step left behind."""
        owners = [*self.model.parameters(), self.x]
        tracked = [t.grad is not None and t.grad.requires_grad for t in owners]
        return freeze([loss, *(t.grad for t in owners), *tracked, *self.model.buffers(), torch.get_rng_state()])


def run(step: Step, context: Any) -> object:
    """A whole step from a fixed random state."""
    torch.manual_seed(1)
    with context:
        loss = step.loss()
    loss.backward()
    return step.look(loss)


def operations(context: Any) -> tuple[int, int]:
    """How many operations the step runs in forward and in all, on the first use of a recording and later ones."""
    step, counts = Step.build(), []
    state = step.state()
    for _ in range(2):
        with Breaking(-1, Injected) as counter:
            with context:
                loss = step.loss()
            loss.backward(retain_graph=True)
        del loss
        counts.append(counter.seen)
        step.restore(state)
    return counts[0], counts[1]


@dataclass(frozen=True)
class Outcome:
    """What a broken step showed."""

    broke: bool
    where: str


def break_at(context: Any, at: int, make: Callable[[], BaseException], *, warm: bool, allocating: bool) -> Outcome:
    """Break a step and assert everything that must hold; returns where it broke."""
    step, plain = Step.build(), Step.build()
    before_state = step.state()
    if warm:
        run(step, context)
        step.restore(before_state)
    before, grad = attached(), torch.is_grad_enabled()
    breaking = Breaking(at, make, allocating=allocating)
    where, loss, random_state = "forward", None, None
    arrived: BaseException | None = None
    torch.manual_seed(1)
    try:
        with breaking:
            with context:
                loss = step.loss()
            where, random_state = "backward", torch.get_rng_state()
            loss.backward(retain_graph=True)
    except BaseException as error:  # KeyboardInterrupt and SystemExit are among those injected
        arrived = error
    assert arrived is breaking.raised, f"{arrived!r} arrived instead of the injected error"
    assert attached() == before
    assert torch.is_grad_enabled() is grad
    if random_state is not None:
        assert torch.equal(torch.get_rng_state(), random_state), "random state of a replay was left behind"
    wanted = run(plain, contextlib.nullcontext())
    if breaking.raised is not None and loss is not None and where == "backward":
        backward_again(step, loss, wanted)
    step.restore(before_state)
    assert run(step, context) == wanted, "the next step of the same recording is not exact"
    return Outcome(breaking.raised is not None, where)


def backward_again(step: Step, loss: Tensor, wanted: object) -> None:
    """A second backward over a half-run graph gives the right gradients or refuses; it never gives wrong ones."""
    step.model.zero_grad()
    step.x.grad = None
    try:
        loss.backward()
    except lowtide.errors.LowtideError:
        return
    assert step.look(loss) == wanted, "a backward after a broken one gave wrong gradients"


@contextlib.contextmanager
def interrupted_after(seconds: float, number: int = signal.SIGINT) -> Iterator[None]:
    """Send a signal after so much of the process's CPU time: its handler raises wherever the main thread is."""

    def press(*_: object) -> None:
        signal.raise_signal(number)

    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGVTALRM, press), signal.signal(number, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before[0])
        signal.signal(number, before[1])
