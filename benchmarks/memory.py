"""Exact peak bytes of a step, and a second witness for them.

The counter itself is the demo's: the profiler's memory events, summed in the order of time.
`tests/test_benchmarks.py` holds it against sums done by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from lowtide.demo.memory import StepMemory, measure_memory

__all__ = ["StepMemory", "measure_accelerator_peak", "measure_memory", "track_peak"]


def track_peak(forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> int:
    """Return the peak bytes of `backward(forward())` as PyTorch's MemTracker sees them, from shapes alone.

    Unlike `measure_memory` it has the parameters and the batch in it, and not what a kernel allocates inside.
    """
    tracker = MemTracker()
    with tracker:
        backward(forward())
    snapshot = tracker.get_tracker_snapshot("peak")
    return int(snapshot[torch.device("cpu")]["Total"])


def measure_accelerator_peak(forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> int:
    """Return the peak bytes of `backward(forward())` on the current CUDA device, above what lived before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward(forward())
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
