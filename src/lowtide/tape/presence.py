"""Some of torch's modules look whether a function mode is in force and then compute otherwise; ours must not show.

``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` take their fast path only where
``torch.overrides.has_torch_function`` says no, and a mode makes it say yes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterable

_disabled = torch._C._disabled_torch_function_impl


class Presence:
    """Replaces torch's question while modes that only look on are in force on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._original: Any = None
        self._local = threading.local()

    def start(self, mode: object) -> None:
        """Do not let ``mode``, the only one of this thread, show."""
        self._local.mode = mode
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._original = torch.overrides.has_torch_function
                torch.overrides.has_torch_function = self._asks  # type: ignore[assignment]

    def stop(self) -> None:
        """Undo ``start``."""
        self._local.mode = None
        with self._lock:
            self._users -= 1
            if self._users == 0:
                torch.overrides.has_torch_function = self._original

    def _asks(self, relevant: Iterable[Any]) -> bool:
        relevant = tuple(relevant)
        mode = getattr(self._local, "mode", None)
        alone = mode is not None and torch._C._len_torch_function_stack() == 1
        if not alone or torch._C._get_function_stack_at(0) is not mode:
            return bool(self._original(relevant))
        return any(_has_its_own(type(value)) for value in relevant)


def _has_its_own(kind: type) -> bool:
    if kind is Tensor or kind is Parameter:
        return False
    return getattr(kind, "__torch_function__", _disabled) is not _disabled


presence = Presence()
