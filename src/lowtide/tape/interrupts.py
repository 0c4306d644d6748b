"""Signals wait while a recording begins or ends, so that nothing stays half attached.

    SIGINT ─▶ noted ─▶ (the section ends) ─▶ handed to the handler that was there: KeyboardInterrupt, usually

So do those by which programs end a run, or a scheduler or a time limit does: their handlers may raise as well. Only the
main thread runs Python's signal handlers. Elsewhere nothing is done, nor under handlers that are not Python's.
"""

from __future__ import annotations

# What the module signal wraps: there each call looks names up, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import sys
import threading
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

_main = threading.main_thread


Handler = Callable[[int, Any], Any]
_SIGNALS = tuple(
    number
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2")
    if (number := getattr(_signal, name, None)) is not None
)


class HeldBack:
    """A context manager that holds back signals until it is left."""

    __slots__ = ("before", "noted")

    def __enter__(self) -> None:
        self.before: list[tuple[int, Handler]] = []  # handlers to put back
        self.noted: list[tuple[int, Handler]] = []
        if threading.get_ident() == _main().ident:
            try:
                for number in _SIGNALS:
                    handler = _signal.getsignal(number)
                    if callable(handler):
                        self.before.append((number, handler))
                        _signal.signal(number, partial(self._note, handler))
            except BaseException:  # by one that is not held back yet
                self._put_back()
                raise

    def __exit__(self, *exc: object) -> None:
        try:
            self._put_back()
        finally:
            self._put_back()  # one that was put back may have raised at once
            self._hand_over()

    def _put_back(self) -> None:
        while self.before:
            _signal.signal(*self.before[-1])
            self.before.pop()

    def _hand_over(self) -> None:
        while self.noted:
            number, handler = self.noted.pop(0)
            try:
                handler(number, sys._getframe(2))
            finally:
                self._hand_over()

    def _note(self, handler: Handler, number: int, _: object) -> None:
        self.noted.append((number, handler))


class Leaving:
    """What a ``with`` statement calls when it is left; ends what is open even if that call was interrupted.

    Python may run a signal's handler, which may raise, before the first instruction of ``__exit__``. The statement has
    asked for this object before it began, and lets go of it when it is over.
    """

    __slots__ = ("call", "undone")
    __call__: Any = property(attrgetter("call"))  # without a reference to itself, which a traceback would keep

    def __init__(self, call: Callable[..., object], undone: Callable[[], bool]) -> None:
        self.call = call
        self.undone = undone  # whether what was to be ended is open still

    def __del__(self) -> None:
        if self.undone():
            self.call()


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
