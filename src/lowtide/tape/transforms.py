"""torch.func transforms refuse to run while saved-tensor hooks are set; a recorder's hooks step aside for them.

``torch.func.grad`` and ``vjp`` disable saved-tensor hooks, which raises when one is set. While anybody records, the
two functions through which torch does that are replaced: the first takes the recorder's own hooks off this thread's
stack, the second puts them back. What a transform saves inside is kept.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_autograd = torch._C._autograd


class _Hooks:
    """The recorders' saved-tensor hooks, by thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._local = threading.local()
        self._disable: Any = None
        self._enable: Any = None

    def push(self, pack: Any, unpack: Any) -> None:
        """Set hooks on this thread that step aside for torch.func transforms."""
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
        self._local.own = (pack, unpack)
        self._local.aside = False
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._disable = _autograd._saved_tensors_hooks_disable
                self._enable = _autograd._saved_tensors_hooks_enable
                _autograd._saved_tensors_hooks_disable = self._step_aside
                _autograd._saved_tensors_hooks_enable = self._step_back

    def pop(self) -> None:
        """Take off what ``push`` set."""
        _autograd._pop_saved_tensors_default_hooks()
        self._local.own = None
        with self._lock:
            self._users -= 1
            if self._users == 0:
                _autograd._saved_tensors_hooks_disable = self._disable
                _autograd._saved_tensors_hooks_enable = self._enable

    def _step_aside(self, message: str, *rest: Any, **options: Any) -> None:
        own = getattr(self._local, "own", None)
        if own is not None and not self._local.aside and hooks_allowed():
            top = _autograd._top_saved_tensors_default_hooks(True)
            if top is not None and top[0] == own[0]:
                _autograd._pop_saved_tensors_default_hooks()
                self._local.aside = True
        try:
            self._disable(message, *rest, **options)
        except BaseException:
            self._put_back()
            raise

    def _step_back(self) -> None:
        self._enable()
        self._put_back()

    def _put_back(self) -> None:
        if getattr(self._local, "own", None) is not None and self._local.aside:
            self._local.aside = False
            _autograd._push_saved_tensors_default_hooks(*self._local.own)


def hooks_allowed() -> bool:
    """Whether saved-tensor hooks may be set now; inside a torch.func transform they may not."""
    return _autograd._saved_tensors_hooks_get_disabled_error_message() is None


_hooks = _Hooks()
push_hooks = _hooks.push
pop_hooks = _hooks.pop
