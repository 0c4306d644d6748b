"""Run functions in several processes that talk over gloo, and bring back what each of them returns.

    results = on_ranks(function, argument, ..., ranks=2)     results[r] is what rank r returned

A function is called as ``function(*arguments)`` with the process group already there; it must be importable by name.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

COMMUNICATION = ("c10d::", "_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::")
SILENT = ("wait_tensor", "_wrap_tensor_autograd")
"""These wait for what was sent, and send nothing."""


def on_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
    """Call ``function`` on every rank; the results in the order of the ranks.

    Raises:
        AssertionError: with the text of the exception that a rank raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, folder, tuple(sys.path), function, arguments), nprocs=ranks)
        found = [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]
    for error, _ in found:
        assert error is None, error
    return [result for _, result in found]


def _rank(
    rank: int, ranks: int, folder: str, path: tuple[str, ...], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        outcome = None, function(*arguments)
    except Exception:
        outcome = traceback.format_exc(), None
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(outcome))
    dist.destroy_process_group()


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is sent, by name of the operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: what it does inside comes here again
        name = func._schema.name
        if name.startswith(COMMUNICATION) and not name.endswith(SILENT):
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))
