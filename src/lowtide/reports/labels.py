"""Where the names of points go in a chart, so that none is written over another. Pixels, from the upper left corner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LETTER, _HEIGHT, _RADIUS = 6.3, 12, 4
"""Of a text of 11 pixels, and of a point."""
_RISES = (-10, 13, -23, 26, -36, 39, -49, 52)
_SIDES = ("right", "left")


@dataclass(frozen=True)
class Box:
    """A rectangle that is taken."""

    left: float
    right: float
    top: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether the two overlap."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


@dataclass(frozen=True)
class Place:
    """Where a name goes relative to its point: up to it (``right``) or from it on (``left``), and how far below."""

    align: str
    rise: int

    def box(self, x: float, y: float, text: str) -> Box:
        """What the text takes up."""
        length = _LETTER * len(text)
        left = x + 4 - length if self.align == "right" else x - 4
        return Box(left, left + length, y + self.rise - _HEIGHT / 2, y + self.rise + _HEIGHT / 2)


def places(
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    width: float,
    height: float,
    taken: Sequence[Box] = (),
) -> list[Place]:
    """A place for the name of each point; a point without a name is only kept clear.

    Names stay inside of the chart where there is room, clear of points, of what is ``taken`` and of each other, as
    close to their points as that allows.
    """
    full = [*taken, *(Box(x - _RADIUS, x + _RADIUS, y - _RADIUS, y + _RADIUS) for x, y in points)]
    found: list[Place] = []
    for (x, y), name in zip(points, names, strict=True):
        if not name:
            found.append(Place(_SIDES[0], _RISES[0]))
            continue
        candidates = [Place(align, rise) for rise in _RISES for align in _SIDES]
        boxes = {place: place.box(x, y, name) for place in candidates}
        inside = [p for p in candidates if boxes[p].left >= 0 and boxes[p].right <= width and boxes[p].top >= 0]
        inside = [place for place in inside if boxes[place].bottom <= height] or candidates
        free = [place for place in inside if not any(boxes[place].meets(box) for box in full)]
        found.append((free or inside)[0])
        full.append(boxes[found[-1]])
    return found


def box_of(text: str, right: float, y: float) -> Box:
    """What a text takes up that ends at ``right`` and stands above ``y``."""
    return Box(right - _LETTER * len(text), right, y - 5 - _HEIGHT, y)
