"""One step on paper: the rules by which memory lives, as the tape follows them. ``simulate`` runs it.

a storage           the program, autograd's saves of kept tensors, recipes that read it
a dropped buffer    autograd's tickets, recipes that read it; its recipe lives as long as it does
a rebuilt buffer    the same; its memory is freed with the last of them
a later version     the version before it, if that was saved: a ticket follows writes that autograd did not count
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.graph import Event, StepGraph


class SimulatedStep:
    """One step on paper. Written for speed: a planner calls it thousands of times."""

    def __init__(self, graph: StepGraph, chosen: dict[int, int], dropped: list[bool]) -> None:
        self.graph = graph
        self.size = [s.bytes for s in graph.storages]
        self.store = [b.storage for b in graph.buffers]
        self.dropped = dropped  # which buffers the tape drops
        self.depth = chosen if any(chosen.values()) else {}
        self.passing = [False] * len(self.store)  # there only until the replay has gone on
        self.moving = [s.kind == "gathered" for s in graph.storages]  # given back whoever may read it later
        self.user = [False] * len(self.size)  # the program holds the storage
        self.refs = [0] * len(self.size)  # saves and recipes that hold the storage
        self.holders = [0] * len(self.store)  # tickets and recipes that hold the buffer
        self.readers = [0] * len(self.store)  # all that ever held the buffer
        self.rebuilt = [False] * len(self.store)
        self.wanted = [0] * len(self.store)  # recipes that read kept memory
        self.copied: dict[int, int] = {}  # kept memory that was overwritten: recipes that hold a copy of it
        self.own: dict[int, int] = {}  # bytes of a recipe's own: random state, kept memory that it overwrites
        self.ticketed: set[int] = set()  # dropped buffers that autograd has saved, or whose tickets follow there
        self.uncounted: set[int] = set()  # the latter
        self.next: dict[int, int] = {}  # of those, what followed in the same memory, as long as they are there
        self.version = [-1] * len(self.size)  # current buffer of a storage
        self.reads: dict[int, tuple[int, ...]] = {}  # recipes that are still needed
        self.outs: dict[int, int] = {}  # how many living buffers a recipe has
        self.sealed = False
        self.memory = graph.resident_bytes
        self.high = self.peak = self.memory
        self.peak_event = 0
        self.replays: list[int] = []
        self.recorded = 0
        self.trail: list[int] = []
        self.highs: list[int] = []
        self.stop_at = (-1, 0)
        self.live: tuple[int, ...] = ()
        self.pending: list[int] = []  # what is being let go of: buffers, and ~ of recipes
        self.last_save = self.peak_save = -1
        for b, buffer in enumerate(graph.buffers):
            if buffer.maker < 0:
                self.user[buffer.storage] = True
                self.version[buffer.storage] = b

    def go(self, trail: bool) -> None:
        graph, saves = self.graph, self.graph.saves
        steps: tuple[Callable[[int], None], ...] = (
            self._run, lambda save: self._save(saves[save]), self._unpack,
            lambda save: self._let_go(saves[save]), self._free, self._seal,
        )  # fmt: skip
        for event, (kind, index) in enumerate(graph.events):
            self.high = self.memory
            steps[kind](index)
            if self.high > self.peak:
                self.peak, self.peak_event, self.peak_save = self.high, event, self.last_save
            if event == self.stop_at[0]:
                return
            if trail:
                self.trail.append(self.memory)
                self.highs.append(self.high)

    def _rise(self, more: int) -> None:
        """Note the most bytes so far: what is there and ``more``, which an operation takes while it runs."""
        if self.memory + more > self.high:
            self.high = self.memory + more
            if self.high == self.stop_at[1] and not self.live:
                self.live = (
                    *(i for i in range(len(self.size)) if self.user[i] or self.refs[i]),
                    *(self.store[b] for b, there in enumerate(self.rebuilt) if there),
                )

    def _run(self, index: int) -> None:
        op = self.graph.ops[index]
        store, size = self.store, self.size
        dropped = self.dropped
        living = sum([dropped[b] for b in op.makes]) + sum([dropped[new] for _, new in op.writes])
        reads = self._set_aside(index, living > 0) if op.writes and not self.sealed else op.reads
        for buffer in op.makes:
            storage = store[buffer]
            if not self.user[storage]:
                self.user[storage] = True
                self.memory += size[storage]
            self.version[storage] = buffer
        if living:
            self.recorded += 1
            if op.state_bytes:
                self.own[index] = self.own.get(index, 0) + op.state_bytes
                self.memory += op.state_bytes
        self._rise(op.workspace_bytes)
        if living:
            self.reads[index] = reads
            self.outs[index] = living
            for read in reads:
                self._hold(read)
                self.wanted[read] += 1
        for old, new in op.writes:
            self.version[store[new]] = new
            if dropped[old]:
                if old in self.ticketed and not self.sealed:
                    self._carry_on(old, new)
                if not self.holders[old]:
                    self._die(old)

    def _set_aside(self, index: int, recorded: bool) -> tuple[int, ...]:
        """Copy kept memory that is about to be overwritten for recipes that read it; the operation's own copies it
        for itself. Returns what else that recipe reads."""
        op, store = self.graph.ops[index], self.store
        kept = [old for old, _ in op.writes if not self.dropped[old]]
        for old in kept:
            count = self.wanted[old]
            if count and self.graph.storages[store[old]].kind != "parameter":  # those are read as they are
                self.wanted[old], self.copied[old] = 0, count
                self.refs[store[old]] -= count
                self.memory += self.size[store[old]]
        if not recorded or not kept:
            return op.reads
        self.own[index] = sum(self.size[store[old]] for old in kept)
        self.memory += self.own[index]
        return tuple(read for read in op.reads if read not in kept)

    def _save(self, buffer: int) -> None:
        self._hold(buffer)
        if self.dropped[buffer]:
            self.ticketed.add(buffer)

    def _carry_on(self, old: int, new: int) -> None:
        """``new`` lives as long as ``old``, whose tickets follow writes that autograd did not count: those of which
        backward asks for what was there before."""
        uncounted = old in self.uncounted or old in self.graph.asked
        if self.dropped[new]:
            self.holders[new] += 1
            if uncounted:
                self.ticketed.add(new)
                self.uncounted.add(new)
        elif uncounted:
            self.refs[self.store[new]] += 1
        else:
            return
        self.next[old] = new

    def _unpack(self, index: int) -> None:
        buffer = self.graph.saves[index]
        while buffer in self.next:
            buffer = self.next[buffer]
        self.last_save = index
        storage = self.store[buffer]
        there = self.user[storage] and self.version[storage] == buffer
        if self.dropped[buffer] and not self.rebuilt[buffer] and not there:
            self._replay(buffer)

    def _free(self, storage: int) -> None:
        if not self.user[storage]:
            return
        self.user[storage] = False
        buffer = self.version[storage]
        if self.dropped[buffer]:
            self.memory -= self.size[storage]
            if not self.holders[buffer] and not self.sealed:  # what nobody held then died when it was sealed
                self._die(buffer)
        elif not self.refs[storage]:
            self.memory -= self.size[storage]

    def _seal(self, _: int) -> None:
        self.sealed = True
        for storage, buffer in enumerate(self.version):
            if buffer >= 0 and self.user[storage] and self.dropped[buffer] and not self.holders[buffer]:
                self._die(buffer)

    def _hold(self, buffer: int) -> None:
        if self.dropped[buffer]:
            self.holders[buffer] += 1
            self.readers[buffer] += 1
        elif not self.moving[self.store[buffer]]:
            self.refs[self.store[buffer]] += 1

    def _let_go(self, buffer: int) -> None:
        storage = self.store[buffer]
        if self.dropped[buffer]:
            self.holders[buffer] -= 1
            if not self.holders[buffer]:
                attached = self.user[storage] and self.version[storage] == buffer and not self.sealed
                if not attached or self.rebuilt[buffer]:
                    self._die(buffer)
        elif not self.moving[storage]:
            self.refs[storage] -= 1
            if not self.refs[storage] and not self.user[storage]:
                self.memory -= self.size[storage]

    def _die(self, buffer: int) -> None:
        """Nobody needs ``buffer`` any more: its rebuilt memory goes, or its recipe if that has no other result."""
        if buffer in self.next:
            self._later(self.next.pop(buffer))
        if self.rebuilt[buffer]:
            self.rebuilt[buffer] = False
            self.memory -= self.size[self.store[buffer]]
            return
        maker = self.graph.buffers[buffer].maker
        living = self.outs.get(maker)
        if living is None:
            return
        if living > 1:
            self.outs[maker] = living - 1
        else:
            self._later(~maker)

    def _later(self, item: int) -> None:
        """Let go of a buffer, or forget a recipe (``~recipe``), after what is being let go of: chains are long."""
        self.pending.append(item)
        if len(self.pending) > 1:
            return
        for each in self.pending:  # grows meanwhile
            if each >= 0:
                self._let_go(each)
            else:
                self._forget(~each)
        self.pending.clear()

    def _forget(self, recipe: int) -> None:
        self.outs.pop(recipe, None)
        self.memory -= self.own.pop(recipe, 0)
        for read in self.reads.pop(recipe, ()):
            if read not in self.copied:
                self.wanted[read] -= 1
                self._let_go(read)
                continue
            self.copied[read] -= 1
            if not self.copied[read]:
                self.memory -= self.size[self.store[read]]

    def _replay(self, buffer: int) -> None:
        graph = self.graph
        needed: set[int] = set()
        stack = [graph.buffers[buffer].maker]
        while stack:
            recipe = stack.pop()
            if recipe in needed:
                continue
            needed.add(recipe)
            for read in self.reads[recipe]:
                if self.dropped[read] and not self.rebuilt[read]:
                    stack.append(graph.buffers[read].maker)
        order = sorted(needed)
        if self.depth:
            self._climb(order)
        else:
            for recipe in order:
                self._rerun(recipe)

    def _climb(self, order: list[int]) -> None:
        """Replay several levels deep: all but a staircase towards the last is dropped again."""
        depth, buffers = self.depth, self.graph.buffers
        lowest = depth[order[-1]]
        again: set[int] = set()
        for recipe in reversed(order[:-1]):
            if depth[recipe] > lowest:
                again.add(recipe)
            lowest = min(lowest, depth[recipe])
        last: dict[int, list[int]] = {}
        seen: set[int] = set()
        for recipe in reversed(order):
            for read in self.reads[recipe]:
                if read not in seen and buffers[read].maker in again and self.dropped[read] and not self.rebuilt[read]:
                    seen.add(read)
                    last.setdefault(recipe, []).append(read)
        for recipe in order:
            if recipe in again:
                self._pass(recipe, seen)
            else:
                self._rerun(recipe)
            for read in last.get(recipe, ()):
                if self.passing[read]:
                    self.passing[read] = False
                    self.memory -= self.size[self.store[read]]

    def _pass(self, recipe: int, wanted: set[int]) -> None:
        """Run a recipe whose results are dropped again; its own inputs stay held."""
        op = self.graph.ops[recipe]
        size, store = self.size, self.store
        self.memory += sum(size[store[b]] for b in op.makes)
        for old, new in op.writes:
            if self.passing[old] and self.readers[old] == 1:
                self.passing[old] = False
            else:
                self.memory += size[store[new]]
        self._rise(op.workspace_bytes + op.state_bytes)  # the present random state is set aside meanwhile
        self.replays.append(recipe)
        for buffer in (*op.makes, *(new for _, new in op.writes)):
            if buffer in wanted and self.dropped[buffer]:
                self.passing[buffer] = True
            else:
                self.memory -= size[store[buffer]]

    def _rerun(self, recipe: int) -> None:
        op = self.graph.ops[recipe]
        size, store = self.size, self.store
        self.memory += sum(size[store[b]] for b in op.makes)
        news = [(old, new) for old, new in op.writes if self.dropped[old]]  # of others it has a copy
        for old, _ in news:
            if (self.rebuilt[old] or self.passing[old]) and self.readers[old] == 1:
                self.rebuilt[old] = self.passing[old] = False
            else:
                self.memory += size[store[old]]
        self._rise(op.workspace_bytes + op.state_bytes)  # the present random state is set aside meanwhile
        self.replays.append(recipe)
        for buffer in (*op.makes, *(new for _, new in news)):
            if self.dropped[buffer] and self.holders[buffer]:
                self.rebuilt[buffer] = True
            else:
                self.memory -= size[store[buffer]]
        self._later(~recipe)

    def where(self) -> str:
        """Phase and module of the peak."""
        kind, index = self.graph.events[self.peak_event] if self.graph.events else (0, 0)
        if kind == Event.RUN and self.graph.ops:
            op = self.graph.ops[index]
            phase = "backward" if op.backward else "forward"
            return f"in {phase} of {op.module or 'the step'} ({op.name})"
        if self.peak_save >= 0:
            maker = self.graph.buffers[self.graph.saves[self.peak_save]].maker
            module = self.graph.ops[maker].module if maker >= 0 else ""
            return f"in backward of {module or 'the step'} (recomputation)"
        return "at the start"
