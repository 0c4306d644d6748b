"""The largest batch and the longest sequence that fit, searched for on fake traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lowtide.estimation.estimates import Estimate
from lowtide.estimation.setups import Setup
from lowtide.estimation.trials import Trials

MOST_TRACES = 9
STEP = {"batch": 1, "length": 128}
"""What the answer is a multiple of, where it is large enough."""


@dataclass(frozen=True)
class Limit:
    """How far one number of a setup can grow."""

    what: str
    """``batch`` or ``length``."""
    plain: int
    """With everything kept; 0 where even the smallest does not fit."""
    checkpointed: int
    """With checkpointing."""
    step: int
    """The next larger multiple of this does not fit."""


def limit(trials: Trials, setup: Setup, what: str) -> Limit:
    """The largest ``what`` that fits, without and with checkpointing."""
    step = STEP[what] if getattr(setup, what) >= 4 * STEP[what] else max(1, STEP[what] // 16)
    most = trials.workload.longest if what == "length" else None
    plain = largest(setup, what, step, trials.memory, lambda s: trials.plain(s).estimate)
    checkpointed = largest(setup, what, step, trials.memory, lambda s: trials.least(s).estimate)
    if most is not None:
        plain, checkpointed = min(plain, most), min(checkpointed, most)
    return Limit(what, plain, checkpointed, step)


def largest(setup: Setup, what: str, step: int, memory: int, need: Callable[[Setup], Estimate]) -> int:
    """The largest multiple of ``step`` (or what was asked for) at which ``need`` fits.

    Between a size that fits and one that does not the next is guessed by a line through the two: bytes grow at
    least linearly, so few traces suffice.
    """
    known: dict[int, int] = {}

    def over(value: int) -> int:
        if value not in known:
            known[value] = need(sized(setup, what, value)).high_bytes - memory
        return known[value]

    low, high = 0, 0
    value = getattr(setup, what)
    while len(known) < MOST_TRACES and not (low and high and high - low <= step):
        if over(value) <= 0:
            low = max(low, value)
        else:
            high = value if not high else min(high, value)
        if high and not low and high <= step:
            return 0
        value = _next(low, high, step, known)
        if value in (low, high):
            break
    return low


def sized(setup: Setup, what: str, value: int) -> Setup:
    """``setup`` with another batch or length."""
    return replace(setup, batch=value) if what == "batch" else replace(setup, length=value)


def _next(low: int, high: int, step: int, known: dict[int, int]) -> int:
    if not high:
        room, sizes = -known[low], sorted(known)
        if len(sizes) > 1:
            a, b = sizes[-2:]
            slope = max(1.0, (known[b] - known[a]) / (b - a))
            return max(low + step, _rounded(low + room / slope * 1.02, step))
        return low * 2
    if not low:
        return max(step, _rounded(high / 2, step)) if high > step else high
    line = low + (high - low) * -known[low] / (known[high] - known[low])
    return min(max(_rounded(line, step), low + 1 if low % step else low + step), max(low, _down(high, step)))


def _rounded(value: float, step: int) -> int:
    return int(value // step) * step


def _down(high: int, step: int) -> int:
    return (high - 1) // step * step
