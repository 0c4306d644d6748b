"""Hand policies: what people know from the field, as values.

A policy is any callable ``policy(op) -> bool``; True keeps the results of ``op`` for backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lowtide.errors import PolicyError
from lowtide.structure import Structure, prefixes, repeated_blocks
from lowtide.tape.policy import Op, Policy, as_policy

__all__ = ["by_module", "every", "keep_all", "keep_matmuls", "recompute_all", "segments", "sqrt"]


class _Constant(Policy):
    def __init__(self, name: str, keep: bool) -> None:
        self._name = name
        self._keep = keep

    @property
    def keeps_all(self) -> bool:
        return self._keep

    def __call__(self, op: Op) -> bool:
        return self._keep

    def by_name(self, name: str) -> bool:
        return self._keep

    def __repr__(self) -> str:
        return f"lowtide.policies.{self._name}"


keep_all = _Constant("keep_all", True)
"""Keep everything: plain autograd."""

recompute_all = _Constant("recompute_all", False)
"""Keep only what must be kept: inputs, parameters, and what cannot be recomputed safely."""


class _KeepMatmuls(Policy):
    """Keep the results of matrix products, convolutions, attention and recurrent layers."""

    def __call__(self, op: Op) -> bool:
        return self.by_name(op.name)

    def by_name(self, name: str) -> bool:
        short = name.rsplit(".", 1)[-1]
        return short in _MATMULS or any(part in short for part in _MATMUL_PARTS)

    def __repr__(self) -> str:
        return "lowtide.policies.keep_matmuls"


_MATMULS = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "linear",
    "matmul",
    "_grouped_mm",
    "_scaled_mm",
    "addmv",
    "mv",
}
_MATMUL_PARTS = ("convolution", "scaled_dot_product", "attention", "mkldnn_linear", "rnn", "lstm", "gru")

keep_matmuls = _KeepMatmuls()
"""Keep matrix products, convolutions and attention; recompute the cheap operations between them."""


def matches(pattern: str, path: str) -> bool:
    """Whether the end of a module path matches ``pattern``, name by name; ``*`` stands for one name."""
    wanted, names = pattern.split("."), path.split(".")
    tail = names[-len(wanted) :]
    return len(tail) == len(wanted) and all(fnmatchcase(n, w) for n, w in zip(tail, wanted, strict=True))


@dataclass(frozen=True)
class _Segments(Policy):
    """Restore points at module boundaries; everything between them is recomputed."""

    pattern: str | None
    n: int | str
    keep_last: bool

    def __post_init__(self) -> None:
        if isinstance(self.n, int) and self.n < 1:
            raise PolicyError(f"a segment spans at least one module, not {self.n}")

    def __repr__(self) -> str:
        return f"lowtide.policies.segments({self.pattern!r}, n={self.n!r}, keep_last={self.keep_last})"

    def __call__(self, op: Op) -> bool:
        return True  # outside of segments

    def by_name(self, name: str) -> bool:
        return True

    def bind(self, structure: Structure) -> Policy:
        blocks = self._blocks(structure)
        n = max(1, math.isqrt(len(blocks))) if self.n == "sqrt" else int(self.n)
        groups = [blocks[i : i + n] for i in range(0, len(blocks), n)]
        kept = groups.pop() if self.keep_last and len(groups) > 1 else []
        ends = {group[-1] for group in groups} | set(kept[-1:])
        return _BoundSegments(frozenset(path for group in groups for path in group), frozenset(ends))

    def _blocks(self, structure: Structure) -> list[str]:
        if self.pattern is None:
            return repeated_blocks(structure)
        found = [path for path, _ in structure if path and matches(self.pattern, path)]
        if not found:
            known = ", ".join(repeated_blocks(structure)[:3]) or "none"
            raise PolicyError(f"no module matches {self.pattern!r}; repeated blocks found: {known}")
        return found


@dataclass(frozen=True)
class _BoundSegments(Policy):
    """Segments of one model: the modules to recompute, and those whose outputs are restore points."""

    dropped: frozenset[str]
    ends: frozenset[str]

    def __call__(self, op: Op) -> bool:
        return self.within(op.module)(op)

    def by_name(self, name: str) -> bool:
        return True

    def within(self, path: str) -> Policy:
        return keep_all if self.dropped.isdisjoint(prefixes(path)) else recompute_all

    def restores(self, path: str) -> bool:
        return path in self.ends


def segments(pattern: str | None = None, n: int = 1, keep_last: bool = True) -> Policy:
    """Restore points after every ``n`` modules that match ``pattern``; everything inside is recomputed.

    Args:
        pattern: matched against the end of module paths, name by name: ``"layers.*"`` matches
            ``model.layers.0``. None finds the model's repeated blocks.
        n: how many of these modules one segment spans. More is coarser: fewer restore points, a longer stretch
            to recompute at once.
        keep_last: keep the last segment whole; it is the first that backward needs, so recomputing it saves
            nothing at the peak.

    Raises:
        PolicyError: no module matches, or ``n`` is less than 1.

    Example:
        >>> lowtide.policies.segments("layers.*", n=2)
        lowtide.policies.segments('layers.*', n=2, keep_last=True)
    """
    return _Segments(pattern, n, keep_last)


def every(n: int) -> Policy:
    """Restore points after every ``n``-th of the model's repeated blocks."""
    return _Segments(None, n, True)


sqrt: Policy = _Segments(None, "sqrt", True)
"""Restore points after every sqrt(L)-th of the model's L repeated blocks."""


@dataclass(frozen=True)
class _ByModule(Policy):
    """One policy inside the modules that match, keep everything outside."""

    pattern: str
    policy: Policy

    def __repr__(self) -> str:
        return f"lowtide.policies.by_module({self.pattern!r}, {self.policy!r})"

    def __call__(self, op: Op) -> bool:
        return self.within(op.module)(op)

    def by_name(self, name: str) -> bool:
        return True  # outside of the modules that match

    def bind(self, structure: Structure) -> Policy:
        if not any(matches(self.pattern, path) for path, _ in structure):
            raise PolicyError(f"no module matches {self.pattern!r}")
        return _ByModule(self.pattern, self.policy.bind(structure))

    def within(self, path: str) -> Policy:
        inside = any(matches(self.pattern, prefix) for prefix in prefixes(path))
        return self.policy.within(path) if inside else keep_all

    def restores(self, path: str) -> bool:
        inside = any(matches(self.pattern, prefix) for prefix in prefixes(path))
        return inside and self.policy.restores(path)


def by_module(pattern: str, policy: Policy | Callable[[Op], bool]) -> Policy:
    """Use ``policy`` inside the modules whose path ends in ``pattern`` (``"blocks.*.mlp"``), keep the rest.

    Raises:
        PolicyError: no module matches, found when the model first runs.
    """
    return _ByModule(pattern, as_policy(policy))
