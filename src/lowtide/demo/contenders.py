"""The ways to spend memory that are compared: each is put on a model's blocks and taken off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]
Around = Callable[[], AbstractContextManager[Any]]
"""Makes what a forward pass runs inside; backward runs after it has ended."""


@dataclass(frozen=True)
class Contender:
    """A name, and a new forward for every block or a lowtide recording around the whole forward pass."""

    name: str
    replace_forward: Callable[[Forward], Forward] | None = None
    start_recording: Around | None = None

    @contextmanager
    def on(self, blocks: Sequence[nn.Module]) -> Iterator[Around]:
        """Put it on `blocks` for the length of the `with`; gives what each forward pass has to run inside."""
        with ExitStack() as undo:
            if self.replace_forward is not None:
                for block in blocks:
                    undo.callback(block.__dict__.pop, "forward", None)
                    block.forward = self.replace_forward(block.forward)
            if self.start_recording is None:
                yield nullcontext
            else:
                recording = self.start_recording()
                yield lambda: recording

    def with_one_recording(self) -> Contender:
        """The same contender, but every later `on` goes on with one and the same recording."""
        if self.start_recording is None:
            return self
        recording = self.start_recording()
        return replace(self, start_recording=lambda: recording)


PLAIN = Contender("plain")


def torch_per_block() -> Contender:
    """PyTorch's own: keep each block's input, run the block again in backward."""
    return Contender(
        "torch per block", replace_forward=lambda forward: partial(checkpoint, forward, use_reentrant=False)
    )


def lowtide_segments(pattern: str, n: int) -> Contender:
    """Keep the stream at every n-th block whose path matches `pattern`; recompute between."""

    def start() -> AbstractContextManager[Any]:
        import lowtide

        return lowtide.record(policy=lowtide.policies.segments(pattern, n=n))

    return Contender(f"lowtide segments n={n}", start_recording=start)


def lowtide_policy(name: str) -> Contender:
    """Record under the hand policy of that name."""

    def start() -> AbstractContextManager[Any]:
        import lowtide

        return lowtide.record(policy=getattr(lowtide.policies, name))

    return Contender(f"lowtide {name}", start_recording=start)


def demo_contenders() -> list[Contender]:
    """What the demo trains, `PLAIN` first."""
    return [
        PLAIN,
        torch_per_block(),
        lowtide_segments("blocks.*", n=1),
        lowtide_segments("blocks.*", n=4),
        lowtide_policy("keep_matmuls"),
    ]
