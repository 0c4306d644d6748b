"""Backward passes that start while somebody records: who wants to look on, and who steps aside.

loss.backward() ─▶ torch.autograd._engine_run_backward ─▶ replaced while anybody asks for it
                    recorder of this thread: off the mode stack, unless the backward is itself recorded
                    an observer: on the mode stack, to see what backward computes
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Wrap = Callable[[bool, Callable[[], Any]], Any]
"""Called with (the graph of the backward pass is kept for another one, run); runs it and returns its result."""


class Backwards:
    """Replaces the function through which torch starts backward passes while anybody wants to wrap them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wraps: list[Wrap] = []
        self._original: Any = None

    def wrap(self, wrap: Wrap) -> None:
        """Run every backward pass from now on inside ``wrap``."""
        with self._lock:
            self._wraps.append(wrap)
            if len(self._wraps) == 1:
                self._original = torch.autograd._engine_run_backward
                torch.autograd._engine_run_backward = self._run

    def unwrap(self, wrap: Wrap) -> None:
        """Undo ``wrap``."""
        with self._lock:
            if wrap in self._wraps:
                self._wraps.remove(wrap)
                if not self._wraps:
                    torch.autograd._engine_run_backward = self._original

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        original, wraps = self._original, reversed(self._wraps)
        creates_graph = bool(args[3]) if len(args) > 3 else bool(kwargs.get("create_graph", False))

        run = partial(original, *args, **kwargs)
        for wrap in wraps:  # no closure that refers to itself: a cycle would hold the graph
            run = partial(wrap, creates_graph, run)
        return run()


backwards = Backwards()
