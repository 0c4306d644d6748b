"""Small integers have their values on fake tensors too, so that a step that asks them goes its usual way.

Lengths, positions, masks and labels decide what a model computes: a mask that lets all pass is left out, a length is
asked for as a number. What is made of such numbers alone is computed for real, and costs next to nothing.

    arange(256) ──▶ positions ──▶ positions[:, None] >= positions ──▶ all()     real
    pixels, parameters ──▶ whatever is computed with them                       fake
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lowtide.tape.operators import Operator, operator, tensors_at, tensors_in
from lowtide.tracing.shapes import RULES

MOST_BYTES = 2**24
"""Of one tensor that is computed for real."""
_VALUES = "_lowtide_values"


class KnownValues(TorchDispatchMode):
    """A dispatch mode between a fake mode and what looks on above it: runs for real what reads no fake tensor.

    Integers, booleans, and single numbers that were drawn. What was there before is read, never written; what is
    written with something fake has no values from then on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._token = object()  # marks storages of this run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = operator(func)
        if op.keep is not None and not op.name.startswith("aten."):
            return func(*args, **kwargs)
        read = [*tensors_in(args), *tensors_in(kwargs)]
        written = tensors_at((*op.writes, *op.undeclared), args, kwargs) if op.writes or op.undeclared else []
        if all(map(self.knows, read)) and all(map(self._made, written)):
            return self._known(op, func, args, kwargs)
        for tensor in written:
            self._mark(tensor, known=False)
        if written and not any(isinstance(tensor, FakeTensor) for tensor in read):
            args, kwargs = _as_fakes((args, kwargs))  # torch would write what is real
        rule = RULES.get(f"{op.name}.{op.overload}")
        return func(*args, **kwargs) if rule is None else rule(func, args, kwargs, self.knows)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor`` are there."""
        if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        if tensor.requires_grad or not (_counts(tensor) or tensor.numel() == 1):
            return False
        storage = tensor.untyped_storage()
        token, known = getattr(storage, _VALUES, (None, True))
        if token is not self._token:
            return _counts(tensor) and storage.nbytes() <= MOST_BYTES
        return bool(known)

    def _made(self, tensor: Tensor) -> bool:
        return getattr(tensor.untyped_storage(), _VALUES, (None, True)) == (self._token, True)

    def _mark(self, tensor: Tensor, *, known: bool) -> None:
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            setattr(tensor.untyped_storage(), _VALUES, (self._token, known))

    def _known(self, op: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Run for real what reads and writes known values; where its results are no such, they are fake."""
        if not op.writes and not op.view:
            try:
                fake = func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                pass  # a number, or as many as there are: not more than was read
            else:
                if not all(_worth(t, op.random) for t in _results(fake)):
                    return fake
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
        if not op.view:
            for tensor in _results(out):
                self._mark(tensor, known=True)
        return out


def _as_fakes(arguments: tuple[Any, Any]) -> Any:
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return arguments if mode is None else tree_map_only(Tensor, mode.from_tensor, arguments)


def _results(out: Any) -> Iterable[Tensor]:
    return tensors_in(out, 2)


def _counts(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _worth(tensor: Tensor, drawn: bool) -> bool:
    if tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() > MOST_BYTES:
        return False
    return _counts(tensor) or (drawn and tensor.numel() == 1)
