"""Replay of a followed step: by slots and counts instead of buffers and recipes.

    slot     0      1      2      3           values: what is there of it
    uses     2      1      1      1           tickets and blueprints that still want it
             root ─▶ b0 ─▶ b1 ─▶ ticket       b1 wants slots 0 and 1; when it has run, 1 goes, 0 loses a use

The rules are those of replay.py: what a replay makes is there as long as a ticket or a blueprint can use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide.errors import ReplayMismatch
from lowtide.tape import randomness
from lowtide.tape.buffers import INTERRUPTED, Buffer, clone_storage, place, shifted
from lowtide.tape.recipes import put
from lowtide.tape.replay import below, set_grad_enabled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lowtide.tape.program import Blueprint


class NumberedReplay:
    """The slots of one step: what was taken from outside, and what was made again of the rest."""

    __slots__ = ("_before", "_blueprints", "_done", "_makers", "_roots", "_shifts", "_states", "_uses", "_values")

    def __init__(
        self,
        blueprints: list[Blueprint],
        makers: list[int],
        uses: list[int],
        roots: dict[int, Buffer],
        states: dict[int, Any],
        shifts: dict[int, int],
    ) -> None:
        self._blueprints = blueprints
        self._makers = makers  # by slot: the blueprint that fills it, -1 of a root
        self._uses = uses
        self._roots = roots
        self._states = states
        self._shifts = shifts
        self._values: list[Tensor | None] = [None] * len(makers)
        self._done = bytearray(len(blueprints))
        self._before: dict[torch.device, Tensor] = {}  # states of random generators, while operations run

    def contents(self, slot: int) -> Tensor:
        """What ``slot`` holds, made again if it has to be."""
        if self._makers[slot] < 0:
            return self._root(slot)
        if self._values[slot] is None:
            below(self._make, slot)
        value = self._values[slot]
        if value is None:
            raise ReplayMismatch(INTERRUPTED)
        return value

    def release(self, slot: int) -> None:
        """A ticket to ``slot`` is gone."""
        uses = self._uses
        pending = [slot]
        while pending:
            slot = pending.pop()
            uses[slot] -= 1
            if uses[slot]:
                continue
            self._values[slot] = None
            nth = self._makers[slot]
            if nth < 0:
                self._roots.pop(slot, None)
            elif not self._done[nth] and not any(uses[other] for other in self._blueprints[nth].fills):
                self._done[nth] = 1  # nobody wants what it makes
                self._states.pop(self._blueprints[nth].draws, None)
                pending += self._blueprints[nth].wants

    def _root(self, slot: int) -> Tensor:
        root = self._roots.get(slot)
        if root is None:
            raise ReplayMismatch("a step ended halfway and its activations cannot be recomputed; run it again")
        return root.contents()

    def _make(self, slot: int) -> None:
        if self._values[slot] is not None:  # another thread was faster
            return
        try:
            for nth in self._missing(self._makers[slot]):
                self._run(nth)
        finally:
            if self._before:
                randomness.leave(self._before.items())
                self._before = {}

    def _missing(self, last: int) -> Iterable[int]:
        """The blueprints to run, from the first to ``last``."""
        values, makers = self._values, self._makers
        pending = [last]
        found: set[int] = set()
        while pending:
            nth = pending.pop()
            if self._done[nth]:
                raise ReplayMismatch(INTERRUPTED)
            found.add(nth)
            for slot in self._blueprints[nth].wants:
                if values[slot] is None and makers[slot] >= 0 and makers[slot] not in found:
                    pending.append(makers[slot])
        return sorted(found) if len(found) > 1 else found

    def _run(self, nth: int) -> None:
        """Run one operation and give its results to the slots that are still wanted."""
        blueprint = self._blueprints[nth]
        values, uses = self._values, self._uses
        written = blueprint.written
        bases = {slot: self._base(slot, alone) for slot, alone in written.items()} if written else {}
        args, kwargs = self._arguments(blueprint, bases)
        set_grad_enabled(blueprint.grad)
        if blueprint.draws >= 0:
            self._draw(blueprint.draws)
        result = blueprint.op.call(*args, **kwargs) if kwargs else blueprint.op.call(*args)
        del args, kwargs  # what is not wanted any more goes at once
        for which, slot in blueprint.outs:
            if uses[slot]:
                values[slot] = result[which] if which >= 0 else result
        for old, new in blueprint.made:
            if uses[new]:
                values[new] = bases[old]
        self._done[nth] = 1
        if blueprint.draws >= 0:
            self._states.pop(blueprint.draws, None)
        for slot in blueprint.wants:
            uses[slot] -= 1
            if not uses[slot]:
                values[slot] = None
                self._roots.pop(slot, None)

    def _arguments(self, blueprint: Blueprint, bases: dict[int, Tensor]) -> tuple[list[Any], dict[str, Any] | None]:
        values, straight = self._values, blueprint.straight
        args, kwargs = blueprint.args.copy(), blueprint.kwargs
        if kwargs:
            kwargs = dict(kwargs)
        for nth, (position, slot, _) in enumerate(blueprint.reads):
            value = bases[slot] if slot in bases else values[slot]
            if value is None:
                value = self._root(slot)
            if not straight[nth]:
                value = self._placed(blueprint, nth, value)
            if type(position) is int:
                args[position] = value
            else:
                put(args, kwargs, position, value)
        return args, kwargs

    def _placed(self, blueprint: Blueprint, nth_read: int, value: Tensor) -> Tensor:
        """``value`` as an operation reads it; notes where it always is as it should be."""
        _, slot, layout = blueprint.reads[nth_read]
        if self._shifts:
            layout = shifted(layout, self._shifts.get(slot, 0))
        placed = place(value, layout)
        if placed is value and slot not in self._roots:
            blueprint.straight[nth_read] = True
        return placed

    def _base(self, slot: int, alone: bool) -> Tensor:
        """The memory that an operation writes in place: a copy of the old version, or itself if only it reads it."""
        if self._makers[slot] < 0:
            root = self._roots[slot]
            value = root.contents()
            if not alone or root.version is not None:
                return clone_storage(value)
            root.value = None
            return value
        made = self._values[slot]
        assert made is not None
        if not alone:
            return clone_storage(made)
        self._values[slot] = None
        return made

    def _draw(self, nth_call: int) -> None:
        """Put the random generators into the states that the operation saw."""
        for device, state in self._states[nth_call]:
            if device not in self._before:
                self._before[device] = randomness.get_state(device)
            randomness.set_state(device, state)
