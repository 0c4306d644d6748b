"""Ctrl-C waits while a recording begins or ends, so that nothing stays half attached.

    SIGINT ─▶ noted ─▶ (the section ends) ─▶ handed to the handler that was there: KeyboardInterrupt, usually

Only the main thread runs Python's signal handlers. Elsewhere nothing is done, nor under handlers that are not Python's.
"""

from __future__ import annotations

# What the module signal wraps: there each call looks names up, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import sys
import threading
from collections.abc import Callable
from typing import Any

_main = threading.main_thread


class HeldBack:
    """A context manager that holds back SIGINT until it is left."""

    __slots__ = ("before", "noted")

    def __enter__(self) -> None:
        self.before: Any = None
        self.noted = False
        if threading.get_ident() == _main().ident:
            before = _signal.getsignal(_signal.SIGINT)
            if callable(before):
                self.before = before
                _signal.signal(_signal.SIGINT, self._note)

    def __exit__(self, *exc: object) -> None:
        if self.before is not None:
            _signal.signal(_signal.SIGINT, self.before)
            if self.noted:
                self.before(_signal.SIGINT, sys._getframe(1))

    def _note(self, *_: object) -> None:
        self.noted = True


def without(mode: Any, run: Callable[[], Any]) -> Any:
    """Run without ``mode``, the topmost of the dispatch modes, and put it back."""
    off = False
    try:
        with HeldBack():
            mode.__exit__(None, None, None)
            off = True
        return run()
    finally:
        if off:
            with HeldBack():
                mode.__enter__()
