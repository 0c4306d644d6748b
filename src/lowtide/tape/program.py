"""Programs: a tape that was written twice alike, ready to be written again without looking at each operation.

    step k    Scribe writes the calls, ScribingRecorder the tape; program_of joins them
    later     Follower checks the calls and collects what the tape needs from outside (roots, copies, random states);
              Instance writes the tape when the first ticket is redeemed

Every buffer that a ticket leads to has a number, its slot. A root's slot is filled during the forward pass, by the
call that its first reader belongs to; all others are described by blueprints.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lowtide.errors import ReplayMismatch
from lowtide.tape import randomness
from lowtide.tape.buffers import MADE, Buffer, Layout, clone_storage, hold, layout_of, release_held
from lowtide.tape.recipes import FullRecipe, Recipe
from lowtide.tape.tickets import Save, Ticket
from lowtide.tape.transcript import Call, Flaw, Meta, byte_offset, meta_of, name_of, tensors_with_places
from lowtide.tape.transcript import at as item_at

if TYPE_CHECKING:
    from lowtide.tape.operators import Operator
    from lowtide.tape.recorder import Recorder
    from lowtide.tape.scribing import Scribe, ScribingRecorder, Trace


_lock = threading.RLock()


class Blueprint:
    """One recipe of a program, with slots in place of buffers."""

    __slots__ = ("args", "draws", "fills", "grad", "kind", "kwargs", "level", "made", "op", "outs", "reads", "written")

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


def shifted(layout: Layout, shift: int) -> Layout:
    """``layout``, ``shift`` bytes further on in its storage."""
    size, stride, offset, dtype, bits = layout
    return (size, stride, offset + shift // dtype.itemsize, dtype, bits)


class Program:
    """A step that is known: its calls, and the tape that follows from them."""

    def __init__(self, calls: list[Call], notes: dict[Any, int]) -> None:
        self.calls = calls
        self.followed = self.missed = 0
        self.notes = notes  # what the recorder noted for its report
        self.blueprints: list[Blueprint] = []
        self.tensors = 1 + max(
            (number for call in calls for number in (*call.externals(), *(n for _, n, _ in call.results))), default=0
        )
        parameters = {id(ref()): (ref, meta) for call in calls for ref, meta in call.parameters()}
        self.parameters: list[tuple[weakref.ref[Tensor], Meta]] = list(parameters.values())
        self.last: dict[int, int] = {}  # by slot: the last call in which something is saved that leads to it
        self.writes = any(call.writes for call in calls)

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


class Instance:
    """One step of a program: what it took from outside, until the tape is written from it."""

    __slots__ = ("blueprints", "dead", "last", "open", "roots", "shifts", "states", "tickets")

    def __init__(self, program: Program) -> None:
        self.blueprints = program.blueprints
        self.last = program.last
        self.open = True  # the step goes on
        self.dead = 0  # tickets that nobody will redeem
        self.roots: dict[int, Buffer] = {}
        self.shifts: dict[int, int] = {}  # bytes by which a root lies elsewhere in its storage than in the known step
        self.states: dict[int, Any] = {}
        self.tickets: list[weakref.ref[LateTicket]] = []

    def hold(self, slot: int, tensor: Tensor, offset: int) -> None:
        """Fill ``slot`` with the memory that ``tensor`` lies in, at ``offset`` bytes in the known step."""
        self.keep(slot, hold(tensor, tensor.untyped_storage()), tensor, offset)

    def keep(self, slot: int, buffer: Buffer, tensor: Tensor, offset: int) -> None:
        """Fill ``slot``, see ``hold``."""
        self.roots[slot] = buffer
        shift = byte_offset(tensor) - offset
        if shift:
            self.shifts[slot] = shift

    def collect(self, call: Call, nth: int, args: Any, kwargs: Any) -> None:
        """Take hold of what the tape needs of the ``nth`` call's arguments, and of the random state."""
        for place, slot, offset in call.roots:
            tensor = (kwargs if place[0] else args)[place[1]] if len(place) == 2 else item_at((args, kwargs), place)
            self.hold(slot, tensor, offset)
        for place, slot, offset in call.copies:
            tensor = item_at((args, kwargs), place)
            self.keep(slot, Buffer(None, clone_storage(tensor)), tensor, offset)
        for place in call.writes:
            tensor = item_at((args, kwargs), place)
            release_held(tensor.untyped_storage(), tensor)  # for other recordings, and other steps of this one
        if 8 * self.dead > len(self.tickets):
            self._drop_roots(nth)
        if call.draws:
            self.states[nth] = randomness.states_of(call.draws)

    def add(self, ticket: LateTicket) -> None:
        """A ticket was handed out."""
        self.tickets.append(weakref.ref(ticket, self._died))

    def _died(self, _: Any) -> None:
        self.dead += 1

    def _drop_roots(self, nth: int) -> None:
        """Let go of what no ticket leads to, and none will from the ``nth`` call on: a graph died halfway."""
        self.tickets = [ref for ref in self.tickets if ref() is not None]
        self.dead = 0
        needed, _ = self._needed([ticket for ref in self.tickets if (ticket := ref()) is not None])
        for slot in [slot for slot in self.roots if slot not in needed and self.last.get(slot, nth) < nth]:
            del self.roots[slot]

    def _needed(self, tickets: list[LateTicket]) -> tuple[set[int], list[Blueprint]]:
        """The slots that lead to ``tickets``, and the blueprints, the last first."""
        needed = {ticket.slot for ticket in tickets}
        chosen = []
        for blueprint in reversed(self.blueprints):
            if not needed.isdisjoint(blueprint.fills):
                chosen.append(blueprint)
                needed.update(slot for _, slot, _ in blueprint.reads)
        return needed, chosen

    def hand_over(self, recorder: Recorder) -> None:
        """Let a recorder know what was dropped so far and still lives: it may be written."""
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
        tickets = [ticket for ref in self.tickets if (ticket := ref()) is not None]
        needed, chosen = self._needed(tickets)
        buffers = {slot: buffer for slot, buffer in self.roots.items() if slot in needed}
        for blueprint in reversed(chosen):
            blueprint.write(buffers, needed, self.states, self.shifts)
        for ticket in tickets:
            if ticket.slot not in buffers:
                raise ReplayMismatch("a step ended halfway and its activations cannot be recomputed; run it again")
            ticket.buffer = buffers[ticket.slot]
            ticket.layout = shifted(ticket.layout, self.shifts.get(ticket.slot, 0))
            ticket.instance = None
        self.tickets = []
        if not self.open:
            self.roots, self.states = {}, {}


class LateTicket(Ticket):
    """A ticket of a followed step, whose tape is written when the first of them is redeemed."""

    __slots__ = ("instance", "slot", "storage")

    def __init__(self, instance: Instance, slot: int, layout: Layout, tensor: Tensor) -> None:
        self.buffer = None  # type: ignore[assignment]
        self.layout = layout
        self.save = Save(tensor)
        self.storage = weakref.ref(tensor.untyped_storage())
        self.instance: Instance | None = instance
        self.slot = slot

    def redeem(self) -> Tensor:
        with _lock:
            if self.instance is not None:
                self.instance.write()
        return super().redeem()


# ---- from a transcript and a tape ---------------------------------------------------------------------------


def program_of(scribe: Scribe, recorder: ScribingRecorder, notes: dict[Any, int]) -> Program:
    """The program that the transcript and the tape of one step show.

    Raises:
        Flaw: the tape does not follow from the calls.
    """
    for flaw in (scribe.flaw, recorder.flaw):
        if flaw is not None:
            raise Flaw(flaw)
    return _Compilation(scribe.calls, recorder).run(notes)


class _Compilation:
    def __init__(self, calls: list[Call], recorder: ScribingRecorder) -> None:
        self.calls = calls
        self.traces: list[Trace] = recorder.traces
        self.starts = [trace.first for trace in self.traces]
        self.private = recorder.private
        self.slots: dict[int, int] = {}
        self.buffers: list[Buffer] = []
        self.readers: dict[int, list[Recipe]] = {}
        self.blueprints: dict[int, Blueprint] = {}
        self.held_at_pack: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self, notes: dict[Any, int]) -> Program:
        """Number the buffers that tickets lead to, and describe how each is made."""
        for trace in self.traces:
            if trace.peeks and trace.results:
                raise Flaw("a function whose operations depend on data")
            for _, packed in trace.packs:
                if len(packed) == 3:
                    self._check_save(packed)
                    self._number(packed[0])
        for buffer in self.buffers:
            if buffer.recipe is not None:
                self._describe(buffer, buffer.recipe)
        for buffer in self.buffers:
            if buffer.recipe is None:
                self._find_source(buffer)
        for at, (call, trace) in enumerate(zip(self.calls, self.traces, strict=True)):
            call.writes = tuple(trace.writes)
            call.chooses = any(part in name_of(call.func) for part in ("attention", "conv", "rnn", "lstm", "gru"))
            call.packs = [
                (*self._pack(tensor, packed, self.held_at_pack.get((at, nth))), trace.nodes[nth + 1] - trace.nodes[0])
                for nth, (tensor, packed) in enumerate(trace.packs)
            ]
        for call in self.calls:
            call.collects = bool(call.roots or call.copies or call.draws or call.writes)
        program = Program(self.calls, notes)
        program.blueprints = [self.blueprints[order] for order in sorted(self.blueprints)]
        self._note_last_needs(program)
        return program

    def _note_last_needs(self, program: Program) -> None:
        makers = {slot: blueprint for blueprint in program.blueprints for slot in blueprint.fills}
        for at in reversed(range(len(self.calls))):
            pending = [pack[0] for pack in self.calls[at].packs]
            while pending:
                slot = pending.pop()
                if slot not in program.last:
                    program.last[slot] = at
                    pending += [read for _, read, _ in makers[slot].reads] if slot in makers else []

    def _check_save(self, packed: Any) -> None:
        buffer, _, save = packed
        if save.stale or (buffer.rare is not None and buffer.rare.next is not None):
            raise Flaw("a saved tensor is overwritten")

    def _number(self, first: Buffer) -> None:
        pending = [first]
        while pending:
            buffer = pending.pop()
            if id(buffer) in self.slots:
                continue
            self.slots[id(buffer)] = len(self.buffers)
            self.buffers.append(buffer)
            if buffer.recipe is not None:
                for _, read, _ in buffer.recipe.reads:
                    self.readers.setdefault(id(read), []).append(buffer.recipe)
                    pending.append(read)

    def _call_of(self, recipe: Recipe) -> int:
        at = bisect_right(self.starts, recipe.order) - 1
        if at < 0 or recipe.order >= self.traces[at].last:
            raise Flaw(f"{recipe.op.name} ran outside of a torch function")
        return at

    def _describe(self, buffer: Buffer, recipe: Recipe) -> None:
        blueprint = self.blueprints.get(recipe.order)
        if blueprint is None:
            at = self._call_of(recipe)
            if (
                recipe.unit is not None
                or "as_strided" in recipe.op.name
                or tensors_with_places((recipe.args, recipe.kwargs))
            ):
                raise Flaw(f"{recipe.op.name} reads what is not followed")
            blueprint = self.blueprints[recipe.order] = Blueprint(recipe, self._draws(recipe, at))
            blueprint.reads = [(position, self.slots[id(read)], layout) for position, read, layout in recipe.reads]
            if isinstance(recipe, FullRecipe):
                self._describe_full(blueprint, recipe)
        blueprint.fills.append(self.slots[id(buffer)])

    def _describe_full(self, blueprint: Blueprint, recipe: FullRecipe) -> None:
        slots = self.slots
        for which, ref in recipe.outs:
            if id(ref()) in slots and ref() is not None:
                blueprint.outs.append((which, slots[id(ref())]))
        for old, ref in recipe.made:
            if id(ref()) in slots and ref() is not None:
                blueprint.made.append((slots[old], slots[id(ref())]))
        blueprint.written = {slots[key]: alone for key, alone in (recipe.written or {}).items()}

    def _draws(self, recipe: Recipe, at: int) -> int:
        if not isinstance(recipe, FullRecipe) or (recipe.states is None and not recipe.generators):
            return -1
        states = self.traces[at].states
        if recipe.generators or recipe.states is None:
            raise Flaw("an explicit random generator")
        for device, state in recipe.states:
            if states.get(device) != randomness.digest(state):
                raise Flaw("a function that draws random numbers twice")
        devices = tuple(device for device, _ in recipe.states)
        if self.calls[at].draws not in ((), devices):
            raise Flaw("a function that draws random numbers on several devices")
        self.calls[at].draws = devices
        return at

    def _find_source(self, held: Buffer) -> None:
        slot = self.slots[id(held)]
        private = self.private.get(id(held))
        if private is not None:
            _, at, place, offset = private
            self.calls[at].copies.append((place, slot, offset))
            return
        value = held.value
        if value is None or held.version is None:
            raise Flaw("memory that was copied, or that has no version")
        storage = value.untyped_storage()._cdata
        readers = [self._call_of(recipe) for recipe in self.readers.get(id(held), ())]
        first = min(readers, default=len(self.calls))
        if readers:
            for place, leaf, version, offset in self.traces[first].leaves:
                if leaf == storage and version == held.version:
                    self.calls[first].roots.append((place, slot, offset))
                    return
        for at, trace in enumerate(self.traces[: first + 1]):
            for nth, (_, packed) in enumerate(trace.packs):
                version = packed[2].version if len(packed) == 3 else packed[1]
                if version == held.version and (
                    packed[0] is held if len(packed) == 3 else packed[0].untyped_storage()._cdata == storage
                ):
                    if (at, nth) in self.held_at_pack:
                        raise Flaw("two versions of what was saved once")
                    self.held_at_pack[at, nth] = (slot, trace.offsets[nth])
                    return
        raise Flaw("memory that no function was given")

    def _pack(self, tensor: Tensor | None, packed: Any, held: Any) -> tuple[int, Any, bool, Any]:
        if len(packed) == 3:
            return (self.slots[id(packed[0])], packed[1], False, held)
        return (-1, layout_of(packed[0]), tensor is None, held)
