"""The interface through which the tape learns what to keep; it knows plans and hand policies only as this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lowtide.structure import Structure

if TYPE_CHECKING:
    import torch


class Op:
    """One operation as a policy sees it: what it is, where it is, what it made. Holds no tensors."""

    __slots__ = ("bytes", "call", "dtypes", "index", "module", "name", "overload", "shapes")

    def __init__(
        self,
        name: str,
        overload: str,
        module: str,
        call: int,
        index: int,
        results: Sequence[torch.Tensor] = (),
        bytes: int | None = None,
    ) -> None:
        self.name = name
        """Namespace and name, such as ``aten.addmm``."""
        self.overload = overload
        self.module = module
        """Path of the module whose forward runs the operation, "" outside of modules."""
        self.call = call
        """Which call of that module in this recording, from 0."""
        self.index = index
        """Which operation of this name in that call, from 0."""
        self.shapes = tuple(tuple(result.shape) for result in results)
        self.dtypes = tuple(result.dtype for result in results)
        self.bytes = sum(r.numel() * r.element_size() for r in results) if bytes is None else bytes
        """Bytes of the results."""

    @property
    def site(self) -> str:
        """Where in the program the operation sits; the same in every step of the same program."""
        return f"{self.module}/{self.call}:{self.name}.{self.overload}/{self.index}"

    def __repr__(self) -> str:
        return f"Op({self.site}, shapes={self.shapes}, bytes={self.bytes})"


class Policy:
    """What to keep. Subclass it, or give any callable ``policy(op) -> bool``; True keeps the op's results."""

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed, so that there is nothing to record."""
        return False

    def __call__(self, op: Op) -> bool:
        """Whether to keep the results of ``op``."""
        raise NotImplementedError

    def depth(self, op: Op) -> int:
        """How ``op`` is treated: -1 keeps its results; 0 recomputes them; above 0, a replay that only passes
        through drops them again unless nothing of a lower depth lies between them and what it is making."""
        return -1 if self(op) else 0

    def by_name(self, name: str) -> bool | None:
        """The decision for every operator called ``name``, or None to be asked for each operation."""
        return None

    def within(self, path: str) -> Policy:
        """The policy in force inside the module at ``path``."""
        return self

    def restores(self, path: str) -> bool:
        """Whether the outputs of the module at ``path`` are restore points, kept whatever made them."""
        return False

    places = False
    """Whether ``place`` has anything to say."""

    def place(self, structure: Structure) -> tuple[str, str] | None:
        """Where an outermost module of this structure sits in the model that the policy was made for.

        ``("", "")`` if it is that model, ``("encoder", "")`` if it is a part of it, ``("", "module")`` if that model is
        a part of it, None if that is not known.
        """
        return None

    def bind(self, structure: Structure) -> Policy:
        """The policy for a program whose outermost module has the modules of ``structure``."""
        return self


class CallablePolicy(Policy):
    """A plain callable as a policy."""

    def __init__(self, function: Callable[[Op], bool]) -> None:
        self.function = function

    def __call__(self, op: Op) -> bool:
        return bool(self.function(op))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallablePolicy) and self.function is other.function

    def __hash__(self) -> int:
        return hash(id(self.function))


def as_policy(policy: Policy | Callable[[Op], bool]) -> Policy:
    """Any accepted form of a policy as a Policy."""
    if isinstance(policy, Policy):
        return policy
    if not callable(policy):
        raise TypeError(f"a policy is a callable policy(op) -> bool, not {type(policy).__name__}: {policy!r}")
    return CallablePolicy(policy)
