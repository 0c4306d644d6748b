"""One run of a step, what it left behind, and where two runs differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.discovery import leaves_of
from lowtide.snapshot import Snapshot, equal, host_copy, parts_of
from lowtide.tracing.stepping import Step
from lowtide.tracing.stepping import _loss as loss_of
from lowtide.verdict import Difference

Around = Callable[[], AbstractContextManager[Any]]
"""Makes what a forward pass runs inside."""


class What(NamedTuple):
    """One thing that a step leaves behind."""

    kind: str
    """``"loss"``, ``"gradient"``, ``"buffer"``, ``"random state"``, ``"parameter"`` or ``"optimizer state"``.
    """
    name: str
    module: str
    """Path of the module that owns it, "" outside of modules."""
    step: int
    """In which step, from 1."""

    def __str__(self) -> str:
        return " of ".join(filter(None, (self.kind, self.name.removeprefix("of "))))


Observation = dict[What, Any]
"""What is there after a run: tensors (copies in host memory), None, or values that compare with ``==``."""


class Trial:
    """Takes steps of one program and looks at what each leaves behind."""

    def __init__(self, step: Step, model: nn.Module, snapshot: Snapshot, optimizer: Any = None) -> None:
        self.step = step
        self.model = model
        self.snapshot = snapshot
        self.optimizer = optimizer
        self.names = {id(tensor): name for name, tensor in model.named_parameters()}

    def take(
        self, around: Around = nullcontext, between: Callable[[set[torch.device]], object] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Forward inside ``around``, ``between``, then backward; the loss, and leaves that are no parameters.

        ``between`` gets the devices of the step.

        Raises:
            GraphError: the step returns no scalar that requires grad.
        """
        with around():
            loss = loss_of(self.step)
        leaves = [leaf for leaf in leaves_of(loss) if id(leaf) not in self.names]
        if between is not None:
            between(self.snapshot.devices)
        torch.autograd.backward(loss)
        return loss.detach(), leaves

    def run(
        self,
        around: Around = nullcontext,
        *,
        steps: int = 1,
        between: Callable[[set[torch.device]], object] | None = None,
    ) -> Observation:
        """Take ``steps`` steps from the snapshot's state, with the optimizer if there is one, and look."""
        self.snapshot.restore()
        seen: Observation = {}
        for number in range(1, steps + 1):
            seen |= self.look(*self.take(around, between), number)
            if self.optimizer is not None:
                self.optimizer.step()
                if number < steps:
                    self.optimizer.zero_grad()
        return seen | self.look_at_end(steps)

    def look(self, loss: Tensor, leaves: list[Tensor], number: int = 1) -> Observation:
        """The loss, all gradients and all buffers."""
        seen: Observation = {What("loss", "", "", number): host_copy(loss)}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or parameter.grad is not None:
                seen[_what("gradient", name, number)] = _copied(parameter.grad)
        for index, leaf in enumerate(leaves, 1):
            name = f"tensor {index} of shape {tuple(leaf.shape)} outside of the model"
            seen[What("gradient", name, "", number)] = _copied(leaf.grad)
        for name, buffer in self.model.named_buffers():
            seen[_what("buffer", name, number)] = host_copy(buffer)
        return seen

    def look_at_end(self, number: int = 1) -> Observation:
        """All random states; with an optimizer the parameters and its states."""
        states = self.snapshot.random_states().items()
        seen: Observation = {What("random state", name, "", number): state for name, state in states}
        if self.optimizer is None:
            return seen
        for name, parameter in self.model.named_parameters():
            seen[_what("parameter", name, number)] = host_copy(parameter)
        for parameter, state in self.optimizer.state.items():
            owner = self.names.get(id(parameter), "another parameter")
            for key, value in state.items():
                held = host_copy(value) if isinstance(value, Tensor) else value
                seen[What("optimizer state", f"{key} of {owner}", owner.rpartition(".")[0], number)] = held
        return seen

    def differences(self, plain: Observation, other: Observation) -> dict[What, Difference]:
        """Where ``other`` differs from ``plain``, in the order in which things were looked at."""
        kinds = {path: type(module).__name__ for path, module in self.model.named_modules()}
        found: dict[What, Difference] = {}
        for what in dict.fromkeys((*plain, *other)):
            how = _how(plain.get(what), other.get(what))
            if how is not None:
                where = f"{what.module} ({kinds[what.module]})" if what.module in kinds and what.module else ""
                found[what] = Difference(str(what), where, what.step, *how)
        return found


def _what(kind: str, name: str, number: int) -> What:
    return What(kind, name, name.rpartition(".")[0], number)


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else host_copy(tensor)


# ---- how two things differ ---------------------------------------------------------------------------------


def _how(plain: Any, other: Any) -> tuple[str, float | None] | None:
    """How ``other`` differs, in words and as the largest difference; None where it does not."""
    if plain is None or other is None:
        return None if plain is other else ("missing" if other is None else "there, but not in the plain step", None)
    if not (isinstance(plain, Tensor) and isinstance(other, Tensor)):
        return None if plain == other else ("differs", None)
    if equal(plain, other):
        return None
    ours, theirs = _described(plain), _described(other)
    if ours != theirs:
        return f"{theirs} instead of {ours}", None
    pairs = [pair for pair in zip(parts_of(plain), parts_of(other), strict=True) if not equal(*pair)]
    if not pairs or any(a.shape != b.shape or a.dtype == torch.uint8 for a, b in pairs):
        return "differs", None
    return _counted([_elements(a, b) for a, b in pairs])


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f"{tensor.layout} ".removeprefix("torch.")
    return f"{layout}{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.")


def _elements(plain: Tensor, other: Tensor) -> tuple[int, int, float]:
    """Elements whose bits differ, all elements, and the largest difference."""
    bits = [t.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (plain, other)]
    differ = (bits[0] != bits[1]).view(plain.numel(), -1).any(1)
    wide = torch.complex128 if plain.is_complex() else torch.float64
    apart = (plain.to(wide) - other.to(wide)).abs().reshape(-1)[differ]
    return int(differ.sum()), plain.numel(), float(apart.max())


def _counted(counts: list[tuple[int, int, float]]) -> tuple[str, float | None]:
    differ, total = sum(count[0] for count in counts), sum(count[1] for count in counts)
    largest = max((count[2] for count in counts), key=lambda value: (math.isnan(value), value))
    text = f"{differ} of {total} elements differ" if total > 1 else "differs"
    if math.isnan(largest) or math.isinf(largest):
        return f"{text}, some are NaN or infinite", None
    return f"{text}, by at most {largest:.3g}", largest
