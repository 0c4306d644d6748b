"""Shelf: the plans of an attached model, by the kind of step that they are for.

A step is a sequence of calls, such as (encoder, encoder, decoder). While it is under way only its beginning is known,
so what follows is guessed: what came after the last step when that kind was seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lowtide.attached_step import Call
from lowtide.graph import StepGraph
from lowtide.ladder import Ladder, accumulating
from lowtide.plan import Plan

Form = tuple[int, ...]
"""Which models a step calls, in order."""

_MOST_KINDS = 8
_MOST_WATCHED = 48
"""How often steps that call the same models may be watched because one was larger than all before."""
_MOST_SURPRISES = 3
"""How often they may be watched because the first call gave nothing away."""


class Kind:
    """One watched step, and its ladders: with and without gradients that are there already."""

    def __init__(self, graph: StepGraph, calls: Sequence[Call]) -> None:
        self.graph = graph
        self.calls = tuple(calls)
        self.ladders: dict[bool, Ladder] = {}

    @property
    def form(self) -> Form:
        """Which models the step calls."""
        return tuple(call.model for call in self.calls)

    def fraction(self, calls: Sequence[Call]) -> float:
        """The share of this step that one beginning with ``calls`` takes; more than 1 if it is another or larger."""
        if len(calls) > len(self.calls):
            return float("inf")
        return max(own.fraction_of(seen) for own, seen in zip(calls, self.calls, strict=False))

    def ladder(self, accumulates: bool, budget: Callable[[StepGraph], int]) -> Ladder:
        """The ladder of plans, made once."""
        if accumulates not in self.ladders:
            graph = accumulating(self.graph) if accumulates else self.graph
            self.ladders[accumulates] = Ladder(graph, budget(graph))
        return self.ladders[accumulates]


class Shelf:
    """Kinds of steps, latest first, and which follows which."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self._after: dict[Form, Form] = {}
        self._last: Form = ()
        self._wanted: dict[Form, int] = {}
        self._missed: set[Form] = set()

    @property
    def next_form(self) -> Form:
        """The form that the next step is expected to have."""
        return self._after.get(self._last, self._last)

    def wants_to_watch(self, first: Call) -> bool:
        """Whether a step that begins with ``first`` should be watched."""
        if not self.kinds:
            return True
        form = self.next_form
        if form and form[0] != first.model:
            form = ()
        known = any(kind.fraction([first]) <= 1 and (not form or kind.form == form) for kind in self.kinds)
        if known and form not in self._missed:
            return False
        wanted = self._wanted.get(form, 0)  # by what was expected: the step may turn out to be another
        if wanted >= (_MOST_SURPRISES if known else _MOST_WATCHED):
            return False
        self._wanted[form] = wanted + 1
        return True

    def put(self, kind: Kind) -> None:
        """Add a kind; those that it is as good for go."""
        others = [one for one in self.kinds if one.form != kind.form or kind.fraction(one.calls) > 1]
        self.kinds = [kind, *others][:_MOST_KINDS]
        self._missed.discard(kind.form)

    def ended(self, calls: Sequence[Call]) -> None:
        """Remember what a step turned out to be."""
        form = tuple(call.model for call in calls)
        self._after[self._last] = form
        self._last = form
        exact = any(kind.form == form and kind.fraction(calls) <= 1 for kind in self.kinds)
        if self.kinds and not exact:
            self._missed.add(form)

    def find(self, calls: Sequence[Call]) -> tuple[Kind, float] | None:
        """The kind that a step that began with ``calls`` is taken for, and what share of it; None if it is none."""
        fits = [(kind, share) for kind in self.kinds if (share := kind.fraction(calls)) <= 1]
        expected = self.next_form
        return max(fits, key=lambda pair: (pair[0].form == expected, len(pair[0].calls)), default=None)

    def renew(self, optimizer_bytes: int) -> None:
        """Plan anew for optimizer states of this size."""
        for kind in self.kinds:
            kind.graph = replace(kind.graph, optimizer_bytes=optimizer_bytes)
            kind.ladders.clear()

    def plans(self) -> list[Plan]:
        """All plans made so far."""
        return [p for kind in self.kinds for ladder in kind.ladders.values() for p in ladder.plans.values()]
