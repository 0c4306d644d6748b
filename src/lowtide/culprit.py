"""Which operation is to blame when a step under a plan is not exact: the first whose recomputation makes a difference.

recompute the first k of what the plan recomputes, keep the rest      k = all: differs      k = 0: does not
halve the stretch between until one operation is left
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.structure import Structure
from lowtide.tape.policy import Op, Policy
from lowtide.tape.sites import source_line


class _Count:
    """Operations that a policy has let go of so far, and where the last of them ran."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.dropped = 0
        self.last = ""


class FirstOnes(Policy):
    """Recompute what another policy recomputes, but no more than the first ``limit`` operations of a forward pass."""

    def __init__(self, inner: Policy, count: _Count) -> None:
        self.inner = inner
        self.count = count
        self.places = inner.places

    def __call__(self, op: Op) -> bool:
        return self.depth(op) < 0

    def depth(self, op: Op) -> int:
        depth, count = self.inner.depth(op), self.count
        if depth < 0 or count.dropped == count.limit:
            return -1
        count.dropped += 1
        count.last = f"{op.name} in {op.module or 'no module'}, {source_line()}"
        return depth

    def within(self, path: str) -> Policy:
        return FirstOnes(self.inner.within(path), self.count)

    def restores(self, path: str) -> bool:
        return self.inner.restores(path)

    def place(self, structure: Structure) -> tuple[str, str] | None:
        return self.inner.place(structure)

    def bind(self, structure: Structure) -> Policy:
        return FirstOnes(self.inner.bind(structure), self.count)


def culprit(policy: Policy, differs: Callable[[Policy], bool]) -> str:
    """Name, module path and source line of the operation to blame; "" if the difference does not come back.

    Args:
        policy: says what is recomputed.
        differs: runs one step under a policy and says whether it is not exact.
    """

    def fails(limit: int | None) -> _Count | None:
        count = _Count(limit)
        return count if differs(FirstOnes(policy, count)) else None

    found = fails(None)
    if found is None:
        return ""
    good, bad = 0, found.dropped
    while bad - good > 1:
        middle = (good + bad) // 2
        count = fails(middle)
        if count is None:
            good = middle
        else:
            bad, found = middle, count
    return found.last if found.dropped == bad else ""
