"""From a transcript and a tape to a program: what each call has to leave, and how each dropped buffer is made.

Every buffer that a ticket leads to gets a number, its slot. Where a root comes from is found out: an argument of the
call that its first reader belongs to, or something that autograd saved.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lowtide.tape import randomness
from lowtide.tape.buffers import Buffer, layout_of
from lowtide.tape.program import Blueprint, Program
from lowtide.tape.recipes import FullRecipe, Recipe
from lowtide.tape.tickets import Kept, Ticket
from lowtide.tape.transcript import CONSTANT, COPIED, DRAWN, HELD, PARAMETER, Call, Flaw, name_of, tensors_with_places
from lowtide.tape.transcript import at as item_at

if TYPE_CHECKING:
    from lowtide.tape.scribing import Scribe, ScribingRecorder, Trace


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
        self.draws = recorder.draws
        self.slots: dict[int, int] = {}
        self.buffers: list[Buffer] = []
        self.readers: dict[int, list[Recipe]] = {}
        self.blueprints: dict[int, Blueprint] = {}
        self.held_at_pack: dict[tuple[int, int], tuple[int, int, int]] = {}

    def run(self, notes: dict[Any, int]) -> Program:
        """Number the buffers that tickets lead to, and describe how each is made."""
        for trace in self.traces:
            for _, packed in trace.packs:
                if isinstance(packed, Ticket):
                    self._number(_last_version(packed, trace))
        for buffer in self.buffers:
            if buffer.recipe is not None:
                self._describe(buffer, buffer.recipe)
        for buffer in self.buffers:
            if buffer.recipe is None and id(buffer) not in self.draws:
                self._find_source(buffer)
        for at in {where for _, where, _ in self.draws.values()}:
            self._find_drawn(at, self.calls[at], self.traces[at])
        for at, (call, trace) in enumerate(zip(self.calls, self.traces, strict=True)):
            call.writes = tuple(trace.writes)
            if call.catches or _must_look_on(trace):
                call.operations = tuple(trace.operations)
            call.chooses = any(part in name_of(call.func) for part in ("attention", "conv", "rnn", "lstm", "gru"))
            call.packs = [
                (
                    *self._pack(tensor, packed, self.held_at_pack.get((at, nth))),
                    trace.nodes[nth + 1] - trace.nodes[0],
                )
                for nth, (tensor, packed) in enumerate(trace.packs)
            ]
        program = Program(self.calls, notes)
        program.seal([self.blueprints[order] for order in sorted(self.blueprints)], len(self.buffers))
        if not program.writes:
            self._find_weights(program)
        for call in self.calls:
            call.collects = bool(call.roots or call.copies or call.draws or call.writes)
        return program

    def _find_weights(self, program: Program) -> None:
        """Parameters that nobody writes in the step need not be taken hold of by each call that reads one."""
        for call in self.calls:
            for root in call.roots:
                place, slot, _ = root
                pattern = item_at((call.args, call.kwargs), place) if len(place) == 2 else (CONSTANT, None, None)
                if pattern[0] == PARAMETER:
                    ref: Any = pattern[1]
                    program.weights.append((slot, ref, layout_of(ref())))
                    call.roots = [other for other in call.roots if other is not root]

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
                recipe.needs is not None
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
        if value is None:
            raise Flaw("memory that nothing is known of")
        readers = self.readers.get(id(held), ())
        first = min(map(self._call_of, readers), default=len(self.calls))
        storage = value.untyped_storage()._cdata
        if held.version is not None:
            changed = first < len(self.calls) and storage in self.traces[first].written
            if readers and not changed and self._find_at(first, storage, held.version, slot):
                return
            for at, trace in enumerate(self.traces[: first + 1]):
                for nth, (_, packed) in enumerate(trace.packs):
                    if _holds(packed, held, None if changed else storage):
                        if (at, nth) in self.held_at_pack:
                            raise Flaw("two versions of what was saved once")
                        self.held_at_pack[at, nth] = (slot, trace.offsets[nth], HELD)
                        return
        if not readers:
            raise Flaw("memory that no function was given")
        self._catch(min(readers, key=lambda recipe: recipe.order), first, held, slot)

    def _find_drawn(self, at: int, call: Call, trace: Trace) -> None:
        """Where a follower sees what a call draws: in what is saved, unless it looks on at the operations anyway."""
        drawn = [(held, nth) for held, where, nth in self.draws.values() if where == at and id(held) in self.slots]
        shown: dict[int, Buffer] = {}
        for held, _ in drawn:
            free = ((n, packed) for n, (_, packed) in enumerate(trace.packs) if (at, n) not in self.held_at_pack)
            shown |= {n: held for n, packed in free if _shows(packed, held)}
        if len({id(held) for held in shown.values()}) == len(drawn) and not call.catches and not _must_look_on(trace):
            first = {id(held): n for n, held in reversed(shown.items())}
            for held, _ in drawn:
                self.held_at_pack[at, first[id(held)]] = (self.slots[id(held)], 0, DRAWN)
        else:
            for held, nth in drawn:
                call.catches.setdefault(nth, []).append((0, self.slots[id(held)], 0, DRAWN))

    def _find_at(self, at: int, storage: int, version: int, slot: int) -> bool:
        """Whether a call was given the memory, or returned it after its own operations had read it."""
        call, trace = self.calls[at], self.traces[at]
        for leaves, held in ((trace.leaves, call.roots), (trace.returned, call.keeps)):
            for place, leaf, found, offset in leaves:
                if leaf == storage and found == version:
                    held.append((place, slot, offset))
                    return True
        return False

    def _catch(self, reader: Recipe, at: int, held: Buffer, slot: int) -> None:
        """The operation that reads it first takes hold of it: what was made below a call, or cannot be told apart."""
        nth = bisect_right(self.traces[at].orders, reader.order) - 1
        position, _, layout = next(read for read in reader.reads if read[1] is held)
        written = reader.written if isinstance(reader, FullRecipe) and reader.written else {}
        offset = layout[2] * layout[3].itemsize
        how = COPIED if id(held) in written else HELD
        self.calls[at].catches.setdefault(nth, []).append((position, slot, offset, how))

    def _pack(self, tensor: Tensor | None, packed: Kept | Ticket, held: Any) -> tuple[int, Any, bool, Any]:
        if isinstance(packed, Ticket):
            return (self.slots[id(packed.buffer)], packed.layout, False, held)
        return (-1, layout_of(packed[0]), tensor is None, held)


def _holds(packed: Kept | Ticket, held: Buffer, storage: int | None) -> bool:
    """Whether what was saved is what ``held`` is, whose memory is in ``storage``."""
    if isinstance(packed, Ticket):
        return packed.buffer is held and packed.save is not None and packed.save.version == held.version
    return packed[1] == held.version and packed[0].untyped_storage()._cdata == storage


def _must_look_on(trace: Trace) -> bool:
    """Whether the arguments of a call do not tell what it does."""
    return trace.overwrites or (trace.peeks and trace.results)


def _shows(packed: Kept | Ticket, drawn: Buffer) -> bool:
    """Whether what was saved is zero just where zero was drawn: as it was drawn, or scaled, as a dropout's mask is."""
    if not isinstance(packed, Ticket):
        return False
    recipe = packed.buffer.recipe
    if (
        recipe is not None
        and recipe.op.name in ("aten.div_", "aten.mul_")
        and isinstance(recipe.args[1], float)
        and not recipe.kwargs
    ):
        if recipe.reads[0][2] != packed.layout or not 1e-6 < abs(recipe.args[1]) < 1e6:
            return False
        recipe = recipe.reads[0][1].recipe
    return (
        recipe is not None and any(read is drawn for _, read, _ in recipe.reads) and recipe.reads[0][2] == packed.layout
    )


def _last_version(ticket: Ticket, trace: Trace) -> Buffer:
    """What a saved tensor holds in the end: its call may write it through aliases that have counters of their own.

    Raises:
        Flaw: it is written as no saved tensor may be, or after the call.
    """
    if ticket.save is None or ticket.save.stale:
        raise Flaw("a saved tensor is overwritten")
    buffer = ticket.buffer
    if buffer.recipe is not None and buffer.recipe.order >= trace.last:
        raise Flaw("a saved tensor is overwritten later")
    return buffer
