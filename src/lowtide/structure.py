"""The structure of a model: the paths and classes of its modules, and the blocks that repeat in it."""

from __future__ import annotations

Structure = tuple[tuple[str, str], ...]
"""Path and class name of every module below the outermost one, in order, itself first with path ""."""


def prefixes(path: str) -> list[str]:
    """The path and the paths of all modules around it, outermost first."""
    names = path.split(".")
    return [".".join(names[: i + 1]) for i in range(len(names))]


def repeated_blocks(structure: Structure) -> list[str]:
    """The paths of the model's repeated blocks: of every list of two or more modules of one class.

    Lists inside a block do not count; of lists side by side (an encoder and a decoder) all do.
    """
    children: dict[str, list[tuple[str, str]]] = {}
    for path, kind in structure[1:]:
        children.setdefault(path.rpartition(".")[0], []).append((path, kind))
    found: list[str] = []
    for path, kind in structure:
        below = children.get(path, [])
        if kind not in ("ModuleList", "Sequential") or len(below) < 2:
            continue
        if not set(prefixes(path)).isdisjoint(found):
            continue
        if len({kind for _, kind in below}) == 1 and below[0][0] in children:
            found += [child for child, _ in below]
    return found
