"""What a recording noted: what was kept against the policy and why, and what it warned about."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowtide.errors import RecomputeWarning, ReplayMismatch

if TYPE_CHECKING:
    from lowtide.tape.operators import Operator
    from lowtide.tape.sites import Home


@dataclass(frozen=True)
class KeptRow:
    """One kind of operation that was kept against the policy."""

    op: str
    module: str
    reason: str
    count: int


@dataclass(frozen=True)
class Report:
    """What a recording kept against its policy, and why."""

    kept: tuple[KeptRow, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        if not self.kept and not self.warnings:
            return "everything that the policy wanted recomputed is recomputed"
        lines = ["kept against the policy:"] if self.kept else []
        lines += [f"  {row.op} in {row.module or 'no module'} ({row.count}x): {row.reason}" for row in self.kept]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


@dataclass
class Ledger:
    """Collects notes while recording; cheap enough for every operation."""

    notes: dict[tuple[str, str, str], int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def note(self, op: Operator, home: Home, reason: str) -> None:
        """Count an operation that was kept against the policy."""
        key = (op.name, home.path, reason)
        self.notes[key] = self.notes.get(key, 0) + 1

    def add(self, notes: dict[tuple[str, str, str], int]) -> None:
        """Count what is known of a step that is followed."""
        for key, count in notes.items():
            self.notes[key] = self.notes.get(key, 0) + count

    def warn(self, op: Operator, home: Home, reason: str, text: str, strict: bool) -> None:
        """Warn that an operation turned out not to be safe to recompute, or raise under ``strict``."""
        self.note(op, home, reason)
        self.warnings.append(text)
        if strict:
            raise ReplayMismatch(text)
        warnings.warn(text, RecomputeWarning, stacklevel=2)

    def report(self) -> Report:
        """What was noted so far."""
        rows = (KeptRow(op, module, reason, count) for (op, module, reason), count in self.notes.items())
        return Report(tuple(rows), tuple(self.warnings))
