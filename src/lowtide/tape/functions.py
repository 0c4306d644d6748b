"""Custom autograd Functions: whose forward is running, and whether it was declared recomputable."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from torch.autograd import Function


def _seen_apply() -> CodeType:
    """The code that calls a custom Function's forward and saves what it asks to be saved.

    Up to torch 2.13 ``Function.apply`` is written in Python, and its frame shows who saves. From 2.14 on it is not;
    then a frame is put around it. A ``Function.apply`` that was looked up before that is not recognised.
    """
    if hasattr(Function.apply, "__func__"):
        code: CodeType = Function.apply.__func__.__code__
        return code
    builtin = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return builtin.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    return apply.__code__


APPLY = _seen_apply()

trusted_codes: set[Any] = set()
"""Code objects of the forwards that were declared recomputable."""

trusted_operators: set[str] = set()
"""Operators that were declared recomputable, as ``namespace_name``."""

_GENERATED = "GeneratedBackwardFor_"  # torch._library.autograd puts namespace, name and overload behind it


def trusts(function: Any) -> bool:
    """Whether a custom Function was declared recomputable, or is torch's own around an operator that was."""
    if getattr(getattr(function, "forward", None), "__code__", None) in trusted_codes:
        return True
    name = getattr(function, "__name__", "")
    return name.startswith(_GENERATED) and name.removeprefix(_GENERATED).rpartition("_")[0] in trusted_operators


def runs_trusted() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in trusted_codes:
            return True
        if frame.f_code is APPLY:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False
