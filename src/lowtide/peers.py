"""What a plan is measured against: the plain step, and PyTorch's own checkpointing on a model's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowtide.errors import PolicyError
from lowtide.observation import Around
from lowtide.policies import keep_matmuls
from lowtide.structure import repeated_blocks
from lowtide.tape.sites import structure_of

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Contender:
    """A way to run a step: what its forward runs inside, and what each repeated block's forward becomes."""

    name: str
    around: Around = nullcontext
    wrap: Callable[[Forward], Forward] | None = None

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Wrap the blocks of ``model`` for the length of the ``with``.

        Raises:
            PolicyError: the model has no repeated blocks.
        """
        with ExitStack() as undo:
            if self.wrap is not None:
                for block in _blocks(model, self.name):
                    undo.callback(_put_back, block, dict(vars(block)))
                    vars(block)["forward"] = self.wrap(block.forward)
            yield


def _blocks(model: nn.Module, name: str) -> list[nn.Module]:
    paths = repeated_blocks(structure_of(model))
    if not paths:
        raise PolicyError(f"{name} needs repeated blocks (a list of modules of one class); this model has none")
    return [model.get_submodule(path) for path in paths]


def _put_back(block: nn.Module, attributes: dict[str, Any]) -> None:
    """Give ``block`` the forward that it had: its own one, or its class's."""
    if "forward" in attributes:
        vars(block)["forward"] = attributes["forward"]
    else:
        del vars(block)["forward"]


def _per_block(forward: Forward) -> Forward:
    return partial(checkpoint, forward, use_reentrant=False)


def _selective(forward: Forward) -> Forward:
    contexts = partial(create_selective_checkpoint_contexts, _keeps_matmuls)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _keeps_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep matrix products, convolutions and attention, as ``policies.keep_matmuls`` does."""
    expensive = keep_matmuls.by_name(str(getattr(op, "overloadpacket", op)))
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


PLAIN = Contender("plain")

PEERS = {
    peer.name: peer
    for peer in (
        PLAIN,
        Contender("torch-per-block", wrap=_per_block),
        Contender("torch-selective", wrap=_selective),
    )
}
"""By the names that ``measure`` accepts."""


def peers_of(names: Sequence[str]) -> list[Contender]:
    """The peers of these names beside the plain step, each once.

    Raises:
        ValueError: there is no such peer.
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"no peer is called {unknown[0]!r}; known: {', '.join(PEERS)}")
    return [PEERS[name] for name in dict.fromkeys(names) if name != PLAIN.name]
