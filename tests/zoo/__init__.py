"""Hand-made hazards: small programs that a recording could get wrong, by subject."""

from __future__ import annotations

from harness import Case
from zoo import (
    contexts,
    dtypes,
    hidden,
    indexing,
    inplace,
    layers,
    norms,
    outputs,
    random_ops,
    state,
    steps,
    transforms,
    views,
)

_SUBJECTS = (
    random_ops,
    inplace,
    views,
    indexing,
    outputs,
    dtypes,
    norms,
    state,
    steps,
    hidden,
    transforms,
    layers,
    contexts,
)

CASES: list[Case] = [case for subject in _SUBJECTS for case in subject.ZOO]
