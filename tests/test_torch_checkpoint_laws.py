"""What PyTorch's own tests ask of torch.utils.checkpoint, asked of lowtide.checkpoint.

The rows are in torch_laws/: test_utils.py (TestCheckpoint), test_autograd.py (checkpointing, TestNestedCheckpoint,
TestSelectiveActivationCheckpoint) and test_checkpoint_wrapper.py of PyTorch, written anew. Where lowtide differs on
purpose, the row says how.
"""

from __future__ import annotations

import pytest
import torch

from torch_laws import LAWS
from torch_laws.calls import same_on
from torch_laws.table import Law


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("row", LAWS, ids=lambda row: row.theirs)
def test_law(row: Law) -> None:
    torch.manual_seed(0)
    row.check()


@pytest.mark.cuda
def test_checkpoint_rng_gpu_and_preserves_device_context() -> None:
    same_on("cuda")


def test_rows_are_told_apart_and_differences_are_few() -> None:
    names = [row.theirs for row in LAWS]
    assert len(set(names)) == len(names)
    assert len({row.check for row in LAWS if row.difference}) <= len({row.check for row in LAWS}) / 2
