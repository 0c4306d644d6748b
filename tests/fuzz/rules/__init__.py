"""What a random program may contain: one table row an instruction, grouped by kind, one kind a file."""

from __future__ import annotations

from . import control, indexing, layers, mutation, pointwise, randomness, reductions, sources, views
from .drawing import Constant, Draw, NoChoice, Rule

KINDS: dict[str, list[Rule]] = {
    "pointwise": pointwise.RULES,
    "views": views.RULES,
    "reductions": reductions.RULES,
    "indexing": indexing.RULES,
    "layers": layers.RULES,
    "mutation": mutation.RULES,
    "randomness": randomness.RULES,
    "control": control.RULES,
}
SOURCES = sources.RULES
RULES: dict[str, Rule] = {rule.name: rule for rules in [*KINDS.values(), SOURCES] for rule in rules}


assert len(RULES) == sum(map(len, KINDS.values())) + len(SOURCES), "two rules share a name"

__all__ = ["KINDS", "RULES", "SOURCES", "Constant", "Draw", "NoChoice", "Rule"]
