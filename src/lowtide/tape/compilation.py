"""Keeping Dynamo away from lowtide's own code, which runs in the middle of compiled models.

It would trace it, give up at each function, and do so again for each shape: correct, and very slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_done: list[bool] = []


def keep_untraced() -> None:
    """Tell Dynamo, if it is there, to leave this package alone; importing it for that would take seconds."""
    if _done:
        return
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and hasattr(rules, "_recompile_re"):
        _done.append(True)
        rules.add("lowtide")


def skip(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that compiled code may call before Dynamo could be told."""
    dynamo = torch._C._dynamo.eval_frame
    action = dynamo._FrameAction
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT))
    return function
