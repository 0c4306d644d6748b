"""Discovery: what a step uses beside the model, seen while it runs once."""

from __future__ import annotations

import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lowtide.snapshot import Snapshot

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_MET = "_lowtide_met"
_PLAIN = (Tensor, nn.Parameter)


class Discovery(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees a step's generators before their first draw and its leaves before backward, for a snapshot.

    And how much memory was there before the step and is read by it.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._snapshot = snapshot
        self._mark = object()  # outlives this mode on the storages it saw, so it must hold nothing
        self._inputs: list[weakref.ref[torch.UntypedStorage]] = []

    def watch(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """``step``, seen from inside of any recording: what it calls, and neither proofs nor replays."""

        def watched() -> Any:
            with _eagerly(), self:
                loss = step()
            if isinstance(loss, Tensor) and loss.requires_grad:
                for leaf in leaves_of(loss):
                    self._snapshot.add_tensor(leaf)
            return loss

        return watched

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(kind in _PLAIN for kind in types):
            return NotImplemented
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self._meet(value, made=False)
            elif isinstance(value, torch.Generator):
                self._snapshot.add_generator(value)
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._meet(value, made=True)
        return out

    def _meet(self, tensor: Tensor, *, made: bool) -> None:
        if tensor.layout is not torch.strided or tensor.is_mkldnn:
            return
        storage = tensor.untyped_storage()
        if getattr(storage, _MET, None) is not self._mark:
            setattr(storage, _MET, self._mark)
            if not made:
                self._inputs.append(weakref.ref(storage))

    def inputs(self, known: list[Tensor]) -> int:
        """Bytes that the step read and did not make, which are still there and are not of ``known`` tensors.

        A constant that the step makes anew each time is gone by now.
        """
        own = {t.untyped_storage()._cdata for t in known if t.layout is torch.strided}
        living = [storage for ref in self._inputs if (storage := ref()) is not None]
        return sum(storage.nbytes() for storage in living if storage._cdata not in own)


def _eagerly() -> AbstractContextManager[Any]:
    """Let compiled models run uncompiled: under a mode Dynamo would give them up for good."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return nullcontext()
    eagerly: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eagerly


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The leaf tensors that backward of ``loss`` gives gradients to, in the order of the graph."""
    if loss.grad_fn is None:
        yield loss
        return
    waiting: list[Any] = [loss.grad_fn]
    met = {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node.name() == _ACCUMULATE:
            yield node.variable
        for child, _ in node.next_functions:
            if child is not None and child not in met:
                met.add(child)
                waiting.append(child)
