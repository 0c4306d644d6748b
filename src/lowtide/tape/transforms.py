"""torch.func transforms refuse to run while saved-tensor hooks are set; a recorder's hooks step aside for them.

``torch.func.grad`` and ``vjp`` enter ``torch.autograd.graph.disable_saved_tensors_hooks``, which raises when a
hook is set. While anybody records, that function is replaced by one that first takes the recorder's own hooks
off this thread's stack and puts them back afterwards. What a transform saves inside is kept.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_autograd = torch._C._autograd
_lock = threading.Lock()
_users = 0
_original: Any = None
_hooks = threading.local()


def push_hooks(pack: Any, unpack: Any) -> None:
    """Set saved-tensor hooks on this thread that step aside for torch.func transforms."""
    global _users, _original
    _autograd._push_saved_tensors_default_hooks(pack, unpack)
    _stack().append((pack, unpack))
    with _lock:
        _users += 1
        if _users == 1:
            _original = torch.autograd.graph.disable_saved_tensors_hooks
            torch.autograd.graph.disable_saved_tensors_hooks = _disable  # type: ignore[assignment]


def pop_hooks() -> None:
    """Take off what ``push_hooks`` set."""
    global _users
    _autograd._pop_saved_tensors_default_hooks()
    _stack().pop()
    with _lock:
        _users -= 1
        if _users == 0:
            torch.autograd.graph.disable_saved_tensors_hooks = _original


def hooks_allowed() -> bool:
    """Whether saved-tensor hooks may be set now; inside a torch.func transform they may not."""
    return _autograd._saved_tensors_hooks_get_disabled_error_message() is None


def _stack() -> list[tuple[Any, Any]]:
    if not hasattr(_hooks, "stack"):
        _hooks.stack = []
    stack: list[tuple[Any, Any]] = _hooks.stack
    return stack


@contextmanager
def _disable(error_message: str) -> Iterator[None]:
    own = list(_stack())
    top = _autograd._top_saved_tensors_default_hooks(True) if own and hooks_allowed() else None
    if top is None or top[0] != own[-1][0]:
        with _original(error_message):
            yield
        return
    _autograd._pop_saved_tensors_default_hooks()
    try:
        with _original(error_message):
            yield
    finally:
        _autograd._push_saved_tensors_default_hooks(*own[-1])
