"""Programs: a tape that was written twice alike, ready to be replayed without looking at each operation.

    step k    Scribe writes the calls, ScribingRecorder the tape; compiling.py joins them
    later     Follower checks the calls and collects what replays need from outside (roots, copies, random states);
              the first ticket that is redeemed begins a replay by numbers (numbered.py), or, where the step left the
              program, or replays in several levels, lets the tape be written after all

Every buffer that a ticket leads to has a number, its slot. A root's slot is filled during the forward pass, by the
call that its first reader belongs to; all others are described by blueprints.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide.errors import ReplayMismatch
from lowtide.tape import randomness
from lowtide.tape.bits import pack
from lowtide.tape.buffers import (
    MADE,
    SAVED,
    Buffer,
    Layout,
    clone_storage,
    hold,
    register,
    release_held,
    shifted,
)
from lowtide.tape.buffers import place as laid_out
from lowtide.tape.numbered import NumberedReplay
from lowtide.tape.recipes import FullRecipe, Recipe
from lowtide.tape.replay import lock
from lowtide.tape.tickets import Save, Ticket, still_there
from lowtide.tape.transcript import COPIED, HELD, Call, Meta, byte_offset, meta_of
from lowtide.tape.transcript import at as item_at

if TYPE_CHECKING:
    from lowtide.tape.operators import Operator
    from lowtide.tape.recorder import Recorder


class Blueprint:
    """One recipe of a program, with slots in place of buffers."""

    __slots__ = (
        "args",
        "draws",
        "fills",
        "grad",
        "kind",
        "kwargs",
        "level",
        "made",
        "op",
        "outs",
        "reads",
        "straight",
        "wants",
        "written",
    )

    def __init__(self, recipe: Recipe, draws: int) -> None:
        self.op: Operator = recipe.op
        self.args, self.kwargs = recipe.args, recipe.kwargs  # shared by all recipes that are made from it
        self.grad, self.level = recipe.grad, recipe.level
        self.kind = type(recipe)
        self.draws = draws  # the call before which its random state was taken, -1 if it draws nothing
        self.reads: list[tuple[Any, int, Layout]] = []
        self.fills: list[int] = []
        self.outs: list[tuple[int, int]] = []
        self.made: list[tuple[int, int]] = []
        self.written: dict[int, bool] = {}
        self.wants: tuple[int, ...] = ()  # the slots that it reads, each once
        self.straight: list[bool] = []  # by read: what is read never has to be laid out anew

    def seal(self) -> None:
        """All its reads and fills are known."""
        self.wants = tuple(dict.fromkeys(slot for _, slot, _ in self.reads))
        self.straight = [False] * len(self.reads)
        if not self.outs and not self.made:
            self.outs = [(-1, self.fills[0])]

    def write(
        self, buffers: dict[int, Buffer], needed: set[int], states: dict[int, Any], shifts: dict[int, int]
    ) -> None:
        """Make the recipe, and buffers that it fills, where they are needed."""
        reads = [(position, buffers[slot], layout) for position, slot, layout in self.reads]
        if shifts:
            reads = [
                (position, read, shifted(layout, shifts.get(slot, 0)))
                for (position, read, layout), (_, slot, _) in zip(reads, self.reads, strict=True)
            ]
        recipe = self.kind(self.op, self.args, self.kwargs, reads)
        recipe.grad, recipe.level = self.grad, self.level
        for slot in self.fills:
            if slot in needed:
                buffers[slot] = Buffer(recipe)
        if self.kind is FullRecipe:
            self._complete(recipe, buffers, states)  # type: ignore[arg-type]

    def _complete(self, recipe: FullRecipe, buffers: dict[int, Buffer], states: dict[int, Any]) -> None:
        recipe.outs = [(which, weakref.ref(buffers[slot])) for which, slot in self.outs if slot in buffers]
        recipe.made = [(id(buffers[old]), weakref.ref(buffers[new])) for old, new in self.made if new in buffers]
        if self.written:
            recipe.written = {id(buffers[slot]): alone for slot, alone in self.written.items()}
        if self.draws >= 0:
            recipe.states = states[self.draws]


class Program:
    """A step that is known: its calls, and the tape that follows from them."""

    def __init__(self, calls: list[Call], notes: dict[Any, int]) -> None:
        self.calls = calls
        self.followed = self.missed = 0
        self.notes = notes  # what the recorder noted for its report
        self.tensors = 1 + max(
            (number for call in calls for number in (*call.externals(), *(returned[1] for returned in call.results))),
            default=0,
        )
        parameters = {id(ref()): (ref, meta) for call in calls for ref, meta in call.parameters()}
        self.parameters: list[tuple[weakref.ref[Tensor], Meta]] = list(parameters.values())
        self.writes = any(call.writes for call in calls)
        self.blueprints: list[Blueprint] = []
        self.makers: list[int] = []  # by slot: the blueprint that fills it, -1 of a root
        self.uses: list[int] = []  # by slot: tickets to it and blueprints that read it
        self.tickets = 0
        self.last: dict[int, int] = {}  # by slot: the last call in which something is saved that leads to it
        self.weights: list[tuple[int, weakref.ref[Tensor], Layout]] = []  # parameters among the roots, by slot
        self.deep = False  # what a replay passes through may be dropped again

    def seal(self, blueprints: list[Blueprint], slots: int) -> None:
        """All that makes the tape is known."""
        self.blueprints = blueprints
        self.makers, self.uses = [-1] * slots, [0] * slots
        for nth, blueprint in enumerate(blueprints):
            blueprint.seal()
            for slot in blueprint.fills:
                self.makers[slot] = nth
            for slot in blueprint.wants:
                self.uses[slot] += 1
        for at in reversed(range(len(self.calls))):
            pending = [pack[0] for pack in self.calls[at].packs if pack[0] >= 0]
            self.tickets += len(pending)
            for slot in pending:
                self.uses[slot] += 1
            while pending:
                slot = pending.pop()
                if slot not in self.last:
                    self.last[slot] = at
                    pending += blueprints[self.makers[slot]].wants if self.makers[slot] >= 0 else ()
        self.deep = any(blueprint.level for blueprint in blueprints)

    def fits(self) -> bool:
        """Whether all its parameters are there and are what they were in all but their values."""
        for ref, meta in self.parameters:
            parameter = ref()
            if parameter is None or (*meta_of(parameter), parameter.storage_offset()) != meta:
                return False
        return not self.writes or len(self.storages()) == len(self.parameters)

    def storages(self) -> set[int]:
        """The memory of its parameters."""
        return {ref().untyped_storage()._cdata for ref, _ in self.parameters}  # type: ignore[union-attr]


class Weight(Buffer):
    """The memory of a parameter that a program reads and does not write, as it was when the step began."""

    __slots__ = ("layout", "storage")

    def __init__(self, parameter: Tensor, layout: Layout) -> None:
        super().__init__(None, parameter, parameter._version)
        self.layout = layout
        self.storage = parameter.untyped_storage()
        register(self, self.storage)

    def contents(self) -> Tensor:
        value = self.value
        if (
            value is not None
            and value._version == self.version
            and value.untyped_storage()._cdata != self.storage._cdata
        ):  # the parameter was given other memory since
            size, stride, offset, dtype, _ = self.layout
            self.value = torch.empty(0, dtype=dtype, device=self.storage.device)
            self.value.set_(self.storage, offset, size, stride)
            self.version = self.value._version
        return super().contents()


class Instance:
    """One step of a program: what it took from outside, until it is replayed or its tape is written."""

    __slots__ = ("dead", "open", "program", "replay", "roots", "shifts", "states", "tickets")

    def __init__(self, program: Program) -> None:
        self.program = program
        self.open = True  # the step goes on
        self.dead = 0  # tickets that nobody will redeem
        self.roots: dict[int, Buffer] = {
            slot: Weight(ref(), layout)  # type: ignore[arg-type]  # fits() has seen that it is there
            for slot, ref, layout in program.weights
        }
        self.shifts: dict[int, int] = {}  # bytes by which a root lies elsewhere in its storage than in the known step
        self.states: dict[int, Any] = {}
        self.tickets: list[TicketRef] = []
        self.replay: NumberedReplay | None = None

    def hold(self, slot: int, tensor: Tensor, offset: int) -> None:
        """Fill ``slot`` with the memory that ``tensor`` lies in, at ``offset`` bytes in the known step."""
        self.keep(slot, hold(tensor, tensor.untyped_storage()), tensor, offset)

    def keep(self, slot: int, buffer: Buffer, tensor: Tensor, offset: int) -> None:
        """Fill ``slot``, see ``hold``."""
        self.roots[slot] = buffer
        shift = byte_offset(tensor) - offset
        if shift:
            self.shifts[slot] = shift

    def take(self, tensor: Tensor, slot: int, offset: int, how: int) -> None:
        """Fill ``slot`` with ``tensor`` as it is, a copy, or what was drawn into it, packed."""
        if how == HELD:
            self.hold(slot, tensor, offset)
        elif how == COPIED:
            self.keep(slot, Buffer(None, clone_storage(tensor)), tensor, offset)
        else:
            packed = pack(tensor)
            self.keep(slot, Buffer(None, packed), packed, 0)

    def collect(self, call: Call, nth: int, args: Any, kwargs: Any) -> None:
        """Take hold of what the tape needs of the ``nth`` call's arguments, and of the random state."""
        for place, slot, offset in call.roots:
            tensor = (kwargs if place[0] else args)[place[1]] if len(place) == 2 else item_at((args, kwargs), place)
            self.hold(slot, tensor, offset)
        for place, slot, offset in call.copies:
            self.take(item_at((args, kwargs), place), slot, offset, COPIED)
        for place in call.writes:
            tensor = item_at((args, kwargs), place)
            release_held(tensor.untyped_storage(), tensor)  # for other recordings, and other steps of this one
        if 8 * self.dead > len(self.tickets):
            self._drop_roots(nth)
        if call.draws:
            self.states[nth] = randomness.states_of(call.draws)

    def close(self) -> None:
        """The step goes on no more; what it dropped and others still hold may be written."""
        if not self.open:
            return
        self.open = False
        for ref in self.tickets:
            ticket = ref()
            storage = None if ticket is None else ticket.storage()
            if ticket is not None and storage is not None:
                ticket.save = Save(ticket.origin, ticket.version, ticket)
                others = [save for save in getattr(storage, SAVED, ()) if save.ticket() is not None]
                setattr(storage, SAVED, [*others, ticket.save])

    def ticket(self, slot: int, layout: Layout, tensor: Tensor) -> LateTicket:
        """A ticket for ``tensor``, which is what ``slot`` holds."""
        ticket = LateTicket(self, slot, layout, tensor)
        ref = TicketRef(ticket, self._died)
        ref.slot = slot
        self.tickets.append(ref)
        return ticket

    def _died(self, ref: TicketRef) -> None:
        if self.replay is None:
            self.dead += 1
        else:
            with lock:
                self.replay.release(ref.slot)

    def _drop_roots(self, nth: int) -> None:
        """Let go of what no ticket leads to, and none will from the ``nth`` call on: a graph died halfway."""
        self.tickets = [ref for ref in self.tickets if ref() is not None]
        self.dead = 0
        uses = self._uses()
        last = self.program.last
        for slot in [slot for slot in self.roots if not uses[slot] and last.get(slot, nth) < nth]:
            del self.roots[slot]

    def _uses(self) -> list[int]:
        """By slot: tickets that are there and blueprints that lead to one and read it."""
        if not self.dead and len(self.tickets) == self.program.tickets:
            return self.program.uses.copy()
        uses = [0] * len(self.program.uses)
        for ref in self.tickets:
            if ref() is not None:
                uses[ref.slot] += 1
        for blueprint in reversed(self.program.blueprints):
            if any(uses[slot] for slot in blueprint.fills):
                for slot in blueprint.wants:
                    uses[slot] += 1
        return uses

    def contents(self, ticket: LateTicket) -> Tensor | None:
        """What a ticket stands for; None if it has got a buffer instead."""
        replay = self.replay
        if replay is None:
            with lock:
                if self.replay is None and ticket.instance is not None:
                    self._prepare()
                replay = self.replay
        if replay is None or ticket.instance is None:
            return None
        value = replay.contents(ticket.slot)
        shift = self.shifts.get(ticket.slot, 0) if self.shifts else 0
        return laid_out(value, shifted(ticket.layout, shift) if shift else ticket.layout)

    def _prepare(self) -> None:
        if self.open or self.program.deep:
            self.write()
            return
        program, uses = self.program, self._uses()
        self.tickets = [ref for ref in self.tickets if ref() is not None]  # they tell when they die
        roots = {slot: root for slot, root in self.roots.items() if uses[slot]}
        self.replay = NumberedReplay(program.blueprints, program.makers, uses, roots, self.states, self.shifts)
        self.roots, self.states = {}, {}

    def hand_over(self, recorder: Recorder) -> None:
        """Let a recorder know what was dropped so far and still lives: it may be written."""
        if self.replay is not None:
            return
        with contextlib.suppress(KeyError, ReplayMismatch):  # said when it is redeemed
            alive = [ticket for ref in self.tickets if (ticket := ref()) is not None]
            self.write()
            for ticket in alive:
                storage, buffer, save = ticket.storage(), ticket.buffer, ticket.save
                if storage is None or buffer.recipe is None or save is None:
                    continue
                if getattr(storage, MADE, buffer) is buffer:
                    buffer.used = True
                    buffer.saves = [*(buffer.saves or ()), save]
                    recorder.adopt(storage, buffer)

    def write(self) -> None:
        """Write the part of the tape that leads to tickets that are still there."""
        self.dead = 1  # count them
        tickets = [ticket for ref in self.tickets if (ticket := ref()) is not None]
        uses = self._uses()
        buffers = {slot: root for slot, root in self.roots.items() if uses[slot]}
        needed = {slot for slot, count in enumerate(uses) if count}
        for blueprint in self.program.blueprints:
            if not needed.isdisjoint(blueprint.fills):
                blueprint.write(buffers, needed, self.states, self.shifts)
        for ticket in tickets:
            if ticket.slot not in buffers:
                raise ReplayMismatch("a step ended halfway and its activations cannot be recomputed; run it again")
            ticket.save = ticket.save or Save(ticket.origin, ticket.version, ticket)
            ticket.move(buffers[ticket.slot])
        self.tickets = []
        if not self.open:
            self.roots, self.states = {}, {}


class TicketRef(weakref.ref["LateTicket"]):
    """A weak reference that knows the slot of its ticket when that is gone."""

    __slots__ = ("slot",)
    slot: int


class LateTicket(Ticket):
    """A ticket of a followed step, which has no tape unless one is written for it."""

    __slots__ = ("instance", "origin", "slot", "storage", "version")

    def __init__(self, instance: Instance, slot: int, layout: Layout, tensor: Tensor) -> None:
        self.buffer = None  # type: ignore[assignment]
        self.layout = layout
        self.save = None
        self.origin = weakref.ref(tensor)
        self.version = tensor._version
        self.storage = weakref.ref(tensor.untyped_storage())
        self.instance: Instance | None = instance
        self.slot = slot

    def move(self, buffer: Buffer) -> None:
        """Stand for ``buffer`` from now on, and for no slot."""
        if self.instance is not None:
            self.layout = shifted(self.layout, self.instance.shifts.get(self.slot, 0))
            self.instance = None
        super().move(buffer)

    def redeem(self) -> Tensor:
        instance = self.instance
        if instance is not None and (self.save is None or not self.save.stale):
            value = still_there(self.origin, self.version, self.layout)
            if value is None:
                value = instance.contents(self)
            if value is not None:
                return value
        return super().redeem()
