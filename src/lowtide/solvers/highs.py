"""HiGHS without a word: its first instance prints two lines to stdout before any option can silence it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import highspy

_alone = threading.Lock()


def silent() -> highspy.Highs:
    """A HiGHS instance that prints nothing and starts no threads, so that a process may fork after it."""
    with _alone, _stdout_closed():
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    if solver.run() == highspy.HighsStatus.kError:
        solver.setOptionValue("threads", 0)  # this process runs HiGHS with threads elsewhere: then all must
    return solver


@contextmanager
def _stdout_closed() -> Iterator[None]:
    """Lead file descriptor 1 nowhere for a moment; HiGHS writes to it past Python's ``sys.stdout``."""
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # there is no stdout to write to
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)
