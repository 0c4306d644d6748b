"""What is in memory at one moment of the step under any plan, as linear rows over the decisions.

A moment is the course of one event, and for an unpack also of one operation that is run again for it. With k_i = 1
where the results of operation i are kept, all that is there follows in the manner of a closure:

    done_i     run again before the moment   >= 1 - k_i               a result of i was asked for
                                             >= done_n - k_i          n reads a result of i
                                             <= 1 - k_i, and <= the sum of done_n where no result was asked for
    alive_i    its recipe is still there     >= 1 - k_i - done_i      a result of i is saved, or the program has it
                                             >= alive_n - k_i - done_i    n reads a result of i
    rebuilt_b  its memory is there again     >= done_i                it is saved
                                             >= done_i + alive_n - 1  n reads it
    held_s     kept memory is there          >= k_i                   it is saved
                                             >= k_i + alive_n - 1     n reads it
    running    i is run again at the moment  >= done_i after the event - done_i before it

Every row bounds one variable from below by variables before it, so the least solution is found row by row; for
decisions that are whole numbers it is what ``simulate`` counts. It knows plans in which no operation runs again twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lowtide.graph import Event, StepGraph

Terms = dict[int, float]
"""Column of a variable to its coefficient."""


@dataclass
class Rows:
    """Variables between 0 and 1, the decisions first, and rows ``low <= terms``; they grow moment by moment."""

    columns: int
    low: list[float] = field(default_factory=list)
    terms: list[Terms] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    """The variable that a row bounds from below, -1 where it bounds none."""

    def variable(self) -> int:
        """A new variable."""
        self.columns += 1
        return self.columns - 1

    def at_least(self, variable: int, constant: float, terms: Terms) -> None:
        """variable >= constant + terms."""
        row = {variable: 1.0}
        for column, value in terms.items():
            row[column] = row.get(column, 0.0) - value
        self.low.append(constant)
        self.terms.append(row)
        self.target.append(variable)

    def largest(self, bounds: list[tuple[float, Terms]]) -> int:
        """A new variable that is at least each of ``bounds``, constants and terms."""
        new = self.variable()
        for constant, terms in bounds:
            self.at_least(new, constant, terms)
        return new

    def true(self, constant: float, terms: Terms) -> None:
        """Constant <= terms, where that defines no variable."""
        self.low.append(constant)
        self.terms.append(terms)
        self.target.append(-1)

    def least(self, decisions: list[float]) -> list[float]:
        """The smallest values of all variables when the first are ``decisions``."""
        values = [*decisions, *[0.0] * (self.columns - len(decisions))]
        for low, terms, target in zip(self.low, self.terms, self.target, strict=True):
            if target >= 0:
                rest = sum(value * values[column] for column, value in terms.items() if column != target)
                values[target] = max(values[target], low - rest)
        return values

    def shorten(self, rows: int, columns: int) -> None:
        """Forget what was added since there were so many rows and columns."""
        del self.low[rows:], self.terms[rows:], self.target[rows:]
        self.columns = columns


class Decisions:
    """Which operations' results can be dropped, a column each, and who reads them."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        can = [False] * len(graph.buffers)
        self.results: dict[int, list[int]] = {}  # of each operation, those that can be dropped
        for i, op in graph.forward_ops():
            for b in op.makes:
                can[b] = graph.buffers[b].droppable
            for old, new in op.writes:
                can[new] = can[old] and graph.buffers[new].droppable
            if results := [b for b in (*op.makes, *(new for _, new in op.writes)) if can[b]]:
                self.results[i] = results
        self.can = can
        self.ops = list(self.results)
        self.column = {op: n for n, op in enumerate(self.ops)}
        self.readers: list[list[int]] = [[] for _ in can]
        for i in self.ops:
            for b in dict.fromkeys(graph.ops[i].reads):
                self.readers[b].append(i)
        self.versions: list[list[int]] = [[] for _ in graph.storages]
        for b, buffer in enumerate(graph.buffers):
            self.versions[buffer.storage].append(b)

    def start(self) -> tuple[Rows, dict[int, int]]:
        """Rows between the decisions, and for each result that can be dropped the column of "it is kept"."""
        rows = Rows(len(self.ops))
        kept: dict[int, int] = {}
        for i in self.ops:
            column, op = self.column[i], self.graph.ops[i]
            kept |= {b: column for b in op.makes if self.can[b]}
            olds = [(old, new) for old, new in op.writes if self.can[new]]
            for old, new in olds:  # what is written in place is dropped only if its old version is
                if len(self.results[i]) == 1:
                    kept[new] = column
                else:
                    kept[new] = rows.variable()
                    rows.at_least(kept[new], 0.0, {column: 1.0})
                    rows.at_least(kept[new], 0.0, {kept[old]: 1.0})
                    rows.true(0.0, {column: 1.0, kept[old]: 1.0, kept[new]: -1.0})
            if olds and len(olds) == len(self.results[i]):  # with all olds kept, to drop is to keep
                rows.at_least(column, 1.0 - len(olds), {kept[old]: 1.0 for old, _ in olds})
        return rows, kept

    def size(self, buffer: int) -> int:
        """Bytes of the memory behind ``buffer``."""
        return self.graph.storages[self.graph.buffers[buffer].storage].bytes


@dataclass(frozen=True)
class State:
    """What is there before an event whatever the plan is."""

    ran: int
    """Operations with a smaller index have run."""
    sealed: bool
    user: frozenset[int]
    """Storages that the program holds."""
    current: dict[int, int]
    """Storage to its current version."""
    saved: frozenset[int]
    """Buffers that autograd holds."""
    ever: frozenset[int]
    """Buffers that autograd has ever held."""
    past: frozenset[int]
    """Buffers that forward operations have overwritten."""
    asked: tuple[int, ...]
    """Buffers that backward asked for while the program no longer had them, in that order."""

    def asks(self, graph: StepGraph, buffer: int) -> bool:
        """Whether backward, unpacking ``buffer`` now, does not find it with the program."""
        storage = graph.buffers[buffer].storage
        return storage not in self.user or self.current[storage] != buffer


def state_before(graph: StepGraph, event: int) -> State:
    """What is there before ``event``."""
    user = {b.storage for b in graph.buffers if b.maker < 0}
    current = {b.storage: n for n, b in enumerate(graph.buffers) if b.maker < 0}
    saves: dict[int, int] = {}
    ever: set[int] = set()
    past: set[int] = set()
    asked: list[int] = []
    ran, sealed = 0, False
    for kind, index in graph.events[:event]:
        if kind == Event.RUN:
            op = graph.ops[index]
            ran = index + 1
            past |= set() if sealed else {old for old, _ in op.writes}
            current |= {graph.buffers[b].storage: b for b in (*op.makes, *(new for _, new in op.writes))}
            user |= {graph.buffers[b].storage for b in op.makes}
        elif kind == Event.SAVE:
            saves[index] = graph.saves[index]
            ever.add(graph.saves[index])
        elif kind == Event.UNPACK:
            b = graph.saves[index]
            if graph.buffers[b].storage not in user or current[graph.buffers[b].storage] != b:
                asked.append(b)
        elif kind == Event.RELEASE:
            saves.pop(index, None)
        elif kind == Event.FREE:
            user.discard(index)
        else:
            sealed = True
    held = frozenset(user), current, frozenset(saves.values()), frozenset(ever), frozenset(past)
    return State(ran, sealed, *held, tuple(asked))


class Moments:
    """The rows of all moments that were asked for."""

    def __init__(self, decisions: Decisions) -> None:
        self.decisions = decisions
        self.graph = decisions.graph
        self.rows, self.kept = decisions.start()
        self.done: dict[int, dict[int, int]] = {}  # how many results were asked for: columns of done_i
        self.asked = state_before(self.graph, len(self.graph.events)).asked
        self.again = self.done_after(len(self.asked))
        """Columns of "it is run again in the course of the step", by operation."""

    def forget(self, rows: int, columns: int) -> None:
        """Forget moments that came after there were so many rows and columns."""
        self.rows.shorten(rows, columns)
        self.done = {n: found for n, found in self.done.items() if all(c < columns for c in found.values())}

    def bytes_at(self, event: int, running: int = -1) -> tuple[float, Terms]:
        """Bytes in the course of ``event``, while ``running`` is run again for it: a constant and terms."""
        graph = self.graph
        state = state_before(graph, event)
        before = after = self.done_after(len(state.asked))
        kind, index = graph.events[event]
        op = graph.ops[index] if kind == Event.RUN else None
        if op is not None and not state.sealed:  # copies are made before it writes
            state = replace(state, past=state.past | {old for old, _ in op.writes})
        if kind == Event.UNPACK and state.asks(graph, graph.saves[index]):
            after = self.done_after(len(state.asked) + 1)
        done = {i: c for i, c in before.items() if i >= running}
        done |= {i: c for i, c in after.items() if i < running}
        alive = self._alive(state, done)
        terms = self._rebuilt(state, done, alive)
        held, constant = self._held(state, alive)
        terms |= held
        if op is not None:
            fresh = {graph.buffers[b].storage for b in op.makes} - state.user
            constant += sum(graph.storages[s].bytes for s in fresh) + op.workspace_bytes
            terms |= self._copies(index) if not state.sealed else {}
        elif running in after:
            terms |= self._running(state, running, before, after)
        return constant, terms

    def done_after(self, asked: int) -> dict[int, int]:
        """Columns of "it was run again for the first ``asked`` results", for the operations that can be."""
        if asked in self.done:
            return self.done[asked]
        d, rows, kept = self.decisions, self.rows, self.kept
        wanted = set(self.asked[:asked])
        done: dict[int, int] = {}
        for i in reversed(d.ops):
            results = d.results[i]
            sources = [(b, n) for b in results for n in d.readers[b] if n in done]
            roots = [b for b in results if b in wanted]
            if not sources and not roots:
                continue
            done[i] = rows.variable()
            for b in roots:
                rows.at_least(done[i], 1.0, {kept[b]: -1.0})
            for b, n in sources:
                rows.at_least(done[i], 0.0, {done[n]: 1.0, kept[b]: -1.0})
            rows.true(-1.0, {done[i]: -1.0, d.column[i]: -1.0})
            if not roots:
                rows.true(0.0, {done[i]: -1.0} | {done[n]: 1.0 for _, n in sources})
            if self.done:  # the first is that of the whole step
                rows.true(0.0, {self.again[i]: 1.0, done[i]: -1.0})
        self.done[asked] = done
        return done

    def _alive(self, state: State, done: dict[int, int]) -> dict[int, int]:
        """Columns of "its recipe is there", for operations whose recipe can be."""
        d, rows = self.decisions, self.rows
        alive: dict[int, int] = {}
        for i in reversed(d.ops):
            if i >= state.ran:
                continue
            bounds: list[tuple[float, Terms]] = []
            for b in d.results[i]:
                base = {self.kept[b]: -1.0}
                if i in done:
                    base[done[i]] = -1.0
                storage = self.graph.buffers[b].storage
                attached = not state.sealed and storage in state.user and state.current[storage] == b
                if b in state.saved or attached:
                    bounds.append((1.0, base))
                bounds += [(0.0, base | {alive[n]: 1.0}) for n in d.readers[b] if n in alive]
            if bounds:
                alive[i] = rows.largest(bounds)
        return alive

    def _rebuilt(self, state: State, done: dict[int, int], alive: dict[int, int]) -> Terms:
        """Bytes of results that were made again and are still needed."""
        d, rows = self.decisions, self.rows
        terms: Terms = {}
        for i, column in done.items():
            for b in d.results[i]:
                readers = [n for n in d.readers[b] if n in alive]
                base = {column: 1.0}
                if self.kept[b] != d.column[i]:
                    base[self.kept[b]] = -1.0
                bounds = [(-1.0, base | {alive[n]: 1.0}) for n in readers]
                if b in state.saved:
                    bounds.append((0.0, base))
                if bounds:
                    terms[rows.largest(bounds)] = float(d.size(b))
        return terms

    def _held(self, state: State, alive: dict[int, int]) -> tuple[Terms, float]:
        """Bytes of kept memory: what depends on the plan, and what does not."""
        graph, d, rows = self.graph, self.decisions, self.rows
        roots = {b.storage for b in graph.buffers if b.maker < 0}
        constant = float(graph.resident_bytes - sum(graph.storages[s].bytes for s in roots))
        terms: Terms = {}
        for s, storage in enumerate(graph.storages):
            there = [b for b in d.versions[s] if graph.buffers[b].maker < state.ran]
            fixed = s in state.user or any(b in state.saved and not d.can[b] for b in there)
            if storage.kind == "gathered":  # given back whoever may read it later
                constant += storage.bytes if s in state.user else 0
                continue
            constant += storage.bytes if fixed else 0
            bounds: list[tuple[float, Terms]] = []
            for b in there:
                reads = self._read_kept(b, alive)
                if b in state.saved and d.can[b]:
                    bounds.append((0.0, {self.kept[b]: 1.0}))
                if b not in state.past or storage.kind == "parameter":
                    bounds += reads
                elif reads:  # recipes that read it were given a copy when it was overwritten
                    terms[rows.largest(reads)] = float(storage.bytes)
            if bounds and not fixed:
                terms[rows.largest(bounds)] = float(storage.bytes)
        return self._own(alive, terms), constant

    def _read_kept(self, b: int, alive: dict[int, int]) -> list[tuple[float, Terms]]:
        """Bounds of "it is kept and a recipe reads it"; an operation that overwrites it has a copy of its own."""
        writers = [n for n in self.decisions.readers[b] if any(old == b for old, _ in self.graph.ops[n].writes)]
        readers = [n for n in self.decisions.readers[b] if n in alive and n not in writers]
        if not self.decisions.can[b]:
            return [(0.0, {alive[n]: 1.0}) for n in readers]
        return [(-1.0, {self.kept[b]: 1.0, alive[n]: 1.0}) for n in readers]

    def _own(self, alive: dict[int, int], terms: Terms) -> Terms:
        """Add the bytes of kept memory that recipes copied before their operations wrote there."""
        d = self.decisions
        for i, column in alive.items():
            if self.graph.ops[i].state_bytes:
                terms[column] = terms.get(column, 0.0) + self.graph.ops[i].state_bytes
            for old, _ in self.graph.ops[i].writes:
                if not d.can[old]:
                    terms[column] = terms.get(column, 0.0) + d.size(old)
                elif len(d.results[i]) > 1:
                    both = self.rows.largest([(-1.0, {column: 1.0, self.kept[old]: 1.0})])
                    terms[both] = float(d.size(old))
        return terms

    def _copies(self, i: int) -> Terms:
        """Bytes of kept memory that ``i``, about to write there, copies for its own recipe, and of random state."""
        d, terms = self.decisions, Terms()
        if i in d.column:
            if self.graph.ops[i].state_bytes:
                state = self.rows.largest([(1.0, {d.column[i]: -1.0})])
                terms[state] = float(self.graph.ops[i].state_bytes)
            for old, _ in self.graph.ops[i].writes:
                bound = (0.0, {self.kept[old]: 1.0}) if d.can[old] else (1.0, Terms())
                bound[1][d.column[i]] = bound[1].get(d.column[i], 0.0) - 1.0
                terms[self.rows.largest([bound])] = float(d.size(old))
        return terms

    def _running(self, state: State, i: int, before: dict[int, int], after: dict[int, int]) -> Terms:
        """Bytes that ``i`` takes while it is run again: all it makes, and copies of what it writes in place."""
        graph, d, rows = self.graph, self.decisions, self.rows
        op = graph.ops[i]
        running = rows.largest([(0.0, {after[i]: 1.0} | ({before[i]: -1.0} if i in before else {}))])
        scratch = op.workspace_bytes + op.state_bytes
        terms: Terms = {running: float(sum(d.size(b) for b in op.makes) + scratch)}
        for old, _ in op.writes:
            if not d.can[old]:
                continue
            base = {running: 1.0} | ({self.kept[old]: -1.0} if len(d.results[i]) > 1 else {})
            others = [n for n in d.readers[old] if n != i and n < state.ran]
            bounds = [(0.0, base | {d.column[n]: -1.0}) for n in others]  # somebody else's recipe has read it
            if old in state.ever:
                bounds = [(0.0, base)]
            if bounds:
                terms[rows.largest(bounds)] = float(d.size(old))
        return terms
