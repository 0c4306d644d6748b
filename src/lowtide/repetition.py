"""What repeats in a model, written once: ``layers.0-11.mlp`` for the same module of twelve blocks.

A path is split into a pattern and the numbers in its places, None standing for a place:

    layers.3.mlp        (layers, None, mlp) and (3,)
    things at places    same thing, same pattern: the places become boxes, a box ranges: layers.0-11,14.mlp
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any, TypeVar

Structure = tuple[tuple[str, str], ...]
"""Path and class name of every module of a model, each before those inside it."""
Pattern = tuple[str | None, ...]
Indices = tuple[int, ...]
Box = tuple[tuple[int, ...], ...]
"""Ascending numbers for each place of a pattern: every combination of them."""
Thing = TypeVar("Thing", bound=Hashable)

# ---- paths -------------------------------------------------------------------------------------------------


def number(name: str) -> int | None:
    """The number that ``name`` writes, None where it is another name."""
    return int(name) if name.isascii() and name.isdigit() and str(int(name)) == name else None


def lists_in(structure: Structure) -> frozenset[str]:
    """Paths of the modules that repeat something: their children are numbered, and some are alike.

    Alike are children of one class throughout, or two of a class that has children itself. So the layers of a
    plain ``Sequential`` are no repetition.
    """
    parents = {path.rpartition(".")[0] for path, _ in structure if path}
    children: dict[str, list[tuple[str, str]]] = {}
    for path, kind in structure:
        if path:
            children.setdefault(path.rpartition(".")[0], []).append((path, kind))
    return frozenset(parent for parent, below in children.items() if _repeats(below, parents))


def _repeats(below: list[tuple[str, str]], parents: set[str]) -> bool:
    if len(below) < 2 or any(number(path.rpartition(".")[2]) is None for path, _ in below):
        return False
    counts = Counter(kind for _, kind in below)
    return len(counts) == 1 or any(counts[kind] > 1 and path in parents for path, kind in below)


def first_numbers(paths: Iterable[str]) -> frozenset[str]:
    """What may be lists where no structure is known: what comes before the first number of each path."""
    found = set()
    for path in paths:
        names = path.split(".")
        at = next((i for i, name in enumerate(names) if number(name) is not None), None)
        if at is not None:
            found.add(".".join(names[:at]))
    return frozenset(found)


def split(path: str, lists: Collection[str] | None = None) -> tuple[Pattern, Indices]:
    """``path`` as a pattern and its numbers; only numbers right below ``lists`` count, if those are given.

    >>> split("layers.3.mlp.0", {"layers"})
    (('layers', None, 'mlp', '0'), (3,))
    """
    if not path:
        return (), ()
    names = path.split(".")
    pattern: list[str | None] = []
    indices: list[int] = []
    for i, name in enumerate(names):
        value = number(name)
        if value is not None and (lists is None or ".".join(names[:i]) in lists):
            pattern.append(None)
            indices.append(value)
        else:
            pattern.append(name)
    return tuple(pattern), tuple(indices)


def join(*paths: str) -> str:
    """One path of several, empty ones left out."""
    return ".".join(path for path in paths if path)


# ---- ranges ------------------------------------------------------------------------------------------------


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as text.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def numbers_of(text: str) -> tuple[int, ...]:
    """The numbers that ``ranges`` wrote.

    Raises ValueError for other text.
    """
    found: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def boxes(points: Iterable[Indices]) -> list[Box]:
    """Points, all equally long, as a few boxes that hold each of them once.

    >>> boxes([(0, 1), (0, 2), (1, 1), (1, 2), (2, 5)])
    [((0, 1), (1, 2)), ((2,), (5,))]
    """
    below: dict[int, set[Indices]] = {}
    for point in points:
        if not point:
            return [()]
        below.setdefault(point[0], set()).add(point[1:])
    alike: dict[frozenset[Indices], list[int]] = {}
    for first in sorted(below):
        alike.setdefault(frozenset(below[first]), []).append(first)
    return [(tuple(firsts), *box) for rest, firsts in alike.items() for box in boxes(rest)]


def label(pattern: Pattern, box: Box) -> str:
    """The paths of a box as one.

    >>> label(("layers", None, "mlp"), ((0, 1, 2),))
    'layers.0-2.mlp'
    """
    places = iter(box)
    return ".".join(ranges(next(places)) if name is None else name for name in pattern)


def labels(pattern: Pattern, points: Iterable[Indices]) -> str:
    """The paths of points of one pattern, as few as possible."""
    return ", ".join(label(pattern, box) for box in boxes(points))


def gather(
    things: Iterable[tuple[Pattern, Indices, Thing]],
) -> dict[tuple[Pattern, frozenset[Indices]], list[Thing]]:
    """The things that sit at the same places of a pattern, by those places, in the order of first mention."""
    places: dict[tuple[Pattern, Thing], set[Indices]] = {}
    for pattern, indices, thing in things:
        places.setdefault((pattern, thing), set()).add(indices)
    found: dict[tuple[Pattern, frozenset[Indices]], list[Thing]] = {}
    for (pattern, thing), points in places.items():
        found.setdefault((pattern, frozenset(points)), []).append(thing)
    return found


# ---- structures --------------------------------------------------------------------------------------------


def fold(structure: Structure) -> list[Any]:
    """``structure`` for JSON: equal blocks once, as ``{"in": path, "at": range, "modules": rows}``."""
    rows = _fold(structure)
    return rows if tuple(unfold(rows)) == structure else [list(row) for row in structure]


def _fold(structure: Structure) -> list[Any]:
    rows: list[Any] = []
    at = 0
    while at < len(structure):
        path, kind = structure[at]
        parent, _, name = path.rpartition(".")
        first = number(name)
        block, after = _block(structure, at)
        last = first
        while last is not None and after < len(structure) and structure[after][0] == join(parent, str(last + 1)):
            same, end = _block(structure, after)
            if same != block:
                break
            last, after = last + 1, end
        if first is None or last is None or last == first:
            rows.append([path, kind])
            at += 1
        else:
            rows.append({"in": parent, "at": ranges(range(first, last + 1)), "modules": _fold(block)})
            at = after
    return rows


def _block(structure: Structure, at: int) -> tuple[Structure, int]:
    """The module at position ``at`` with all inside it, by relative path, and the position after them."""
    path = structure[at][0]
    end = at + 1
    while end < len(structure) and structure[end][0].startswith(f"{path}."):
        end += 1
    return tuple((inner[len(path) + 1 :], kind) for inner, kind in structure[at:end]), end


def unfold(rows: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """The structure that ``fold`` wrote.

    Raises KeyError, TypeError or ValueError for rows that it did not write.
    """
    for row in rows:
        if not isinstance(row, dict):
            path, kind = row
            yield path, kind
            continue
        block = tuple(unfold(row["modules"]))
        for index in numbers_of(row["at"]):
            for path, kind in block:
                yield join(row["in"], str(index), path), kind
