"""The few numbers that a frontier comes down to, interpolated between measured points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Point:
    """Peak bytes of a step, and its CPU time over plain's."""

    peak_bytes: float
    ratio: float


@dataclass(frozen=True)
class Headlines:
    """What is held against the bars. NaN where there is nothing to compare with.

    overhead: lowtide's extra time at torch per block's peak, over torch per block's own extra time.
    reduction_at_2, reduction_at_15: how far under plain's peak with 2 % and with 15 % more time.
    lowest: lowtide's lowest peak over torch per block's.
    """

    overhead: float
    reduction_at_2: float
    reduction_at_15: float
    lowest: float

    def rows(self) -> Iterator[tuple[str, str, str, bool]]:
        """What, reached, bar, and whether it was met."""
        what = "extra time at the peak of torch per block, over torch's own"
        yield what, f"{self.overhead:.2f}", "at most 0.55 (aim 0.40)", self.overhead <= 0.55
        for percent, value, bar in ((2, self.reduction_at_2, 0.3), (15, self.reduction_at_15, 0.6)):
            yield f"peak under plain's at +{percent} % time", f"{value:.0%}", f"at least {bar:.0%}", value >= bar
        yield "lowest peak over torch per block's", f"{self.lowest:.2f}", "at most 0.90", self.lowest <= 0.9


def headlines(plain: Point, frontier: Sequence[Point], per_block: Point | None) -> Headlines:
    """Work the numbers out from measured points."""
    points = best([plain, *frontier])
    nothing = float("nan")
    overhead = lowest = nothing
    if per_block is not None:
        lowest = min(point.peak_bytes for point in frontier) / per_block.peak_bytes
        if per_block.ratio > 1:
            overhead = (ratio_at(points, per_block.peak_bytes) - 1) / (per_block.ratio - 1)
    at_2, at_15 = (1 - peak_at(points, ratio) / plain.peak_bytes for ratio in (1.02, 1.15))
    return Headlines(overhead, at_2, at_15, lowest)


def best(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both, from the fastest to the smallest."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.ratio, p.peak_bytes)):
        if not kept or point.peak_bytes < kept[-1].peak_bytes:
            kept.append(point)
    return kept


def peak_at(points: Sequence[Point], ratio: float) -> float:
    """Least peak bytes within a time ratio, on the line through `points` as `best` gives them."""
    for before, after in pairwise(points):
        if ratio < after.ratio:
            share = max(0.0, (ratio - before.ratio) / (after.ratio - before.ratio))
            return before.peak_bytes + share * (after.peak_bytes - before.peak_bytes)
    return points[-1].peak_bytes


def ratio_at(points: Sequence[Point], peak_bytes: float) -> float:
    """Least time ratio within a peak, on the same line; NaN below the lowest."""
    if peak_bytes >= points[0].peak_bytes:
        return points[0].ratio
    for before, after in pairwise(points):
        if peak_bytes >= after.peak_bytes:
            share = (before.peak_bytes - peak_bytes) / (before.peak_bytes - after.peak_bytes)
            return before.ratio + share * (after.ratio - before.ratio)
    return float("nan")
