"""Running out of memory: recognise it, and say on the error itself what filled the memory and what would fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lowtide.units import format_bytes

_ALLOCATOR = "DefaultCPUAllocator"
_NOTE = "lowtide: "
_SHOWN = 6


def is_exhaustion(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out: an accelerator's, the CPU allocator's, or Python's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (_ALLOCATOR in text or "out of memory" in text.lower())


def add_note(error: BaseException, lines: Iterable[str]) -> None:
    """Add ``lines`` to what is printed under the error, once."""
    if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        add_line(error, "\n".join(lines))


def add_line(error: BaseException, text: str) -> None:
    """Add one more note to the error."""
    if hasattr(error, "add_note"):
        error.add_note(_NOTE + text)
    else:  # Python 3.10 carries notes, but does not print them
        error.__notes__ = [*getattr(error, "__notes__", ()), _NOTE + text]


def largest(sizes: Mapping[str, int]) -> str:
    """The largest of ``sizes`` by name, as one line."""
    rows = sorted(((name, size) for name, size in sizes.items() if size), key=lambda row: (-row[1], row[0]))
    shown = [f"{name} {format_bytes(size)}" for name, size in rows[:_SHOWN]]
    rest = sum(size for _, size in rows[_SHOWN:])
    return ", ".join([*shown, *([f"others {format_bytes(rest)}"] if rest else [])])
