"""Fixtures every test file shares: one thread, known random state, and nothing left attached."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from harness import attached
from lowtide.tape import library

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


@pytest.fixture
def shelves() -> Iterator[OrderedDict[Any, library.Shelf]]:
    """Forget what is known of other tests' steps, and what they compiled, after which nothing is followed."""
    library._local.shelves = OrderedDict()
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()
    yield library._local.shelves
    library._local.shelves = OrderedDict()
