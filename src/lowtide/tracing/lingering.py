"""Kept memory that the program has let go of while recipes of the traced step still read it.

A trace drops all that it can, so its recipes hold masks and indices that a step under a plan may not hold. Memory is
the program's for as long as anything but recipes refers to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lowtide.tape.buffers import HELD

_count = torch._C._storage_Use_Count


class Lingering:
    """Storages of kept results, looked at before every operation until only recipes hold them."""

    def __init__(self) -> None:
        self._watched: dict[int, weakref.ref[Any]] = {}  # by number
        self._gone: set[int] = set()

    def watch(self, storage: torch.UntypedStorage, number: int) -> None:
        """Look after ``storage`` from now on."""
        self._watched[number] = weakref.ref(storage)

    def saved(self, number: int) -> None:
        """Autograd holds it: it is let go of when it dies."""
        self._watched.pop(number, None)

    def forget(self, number: int) -> bool:
        """Its memory is gone; returns whether that was said before."""
        self._watched.pop(number, None)
        return number in self._gone

    def look(self, gone: Callable[[int], object]) -> None:
        """Tell ``gone`` about every storage that only recipes hold."""
        for number, ref in list(self._watched.items()):
            storage = ref()
            if storage is not None and _only_read_again(storage):
                del self._watched[number]
                self._gone.add(number)
                gone(number)


def _only_read_again(storage: torch.UntypedStorage) -> bool:
    held = getattr(storage, HELD, None)
    if held is None:
        return False
    key = storage._cdata
    aliases = 0
    for ref in held:
        buffer = ref()
        value = None if buffer is None else buffer.value
        aliases += value is not None and value.untyped_storage()._cdata == key
    return bool(aliases) and _count(key) == 1 + aliases  # its Python object is one
