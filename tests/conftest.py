"""Fixtures every test file shares: one thread, known random state, and nothing left attached."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from harness import attached

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """Seed every generator, and fail a test that leaves a mode or a hook behind."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    before = attached()
    yield
    assert attached() == before
