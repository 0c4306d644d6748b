"""Bytes that a kernel takes while it runs and gives back before it returns, which no tensor shows.

A convolution on the CPU reorders its input, its weight and its result; a batch norm, an LSTM, a sum in several
threads have buffers of their own.

    before  ──▶  inputs                     what lives
    inside  ──▶  inputs, results, scratch   the most that lives
    after   ──▶  inputs, results            what lives        workspace = the most - after
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _autograd

Result = TypeVar("Result")

_COUNTED = ("cuda", "xpu")
"""Accelerators whose allocator keeps a peak."""


def measurable() -> bool:
    """Whether workspaces can be measured now: not inside of somebody's profile, of which there is one a thread."""
    return hasattr(_autograd, "_enable_profiler_legacy") and not _autograd._profiler_enabled()


def run_measured(run: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Run an operation on ``device``; returns its result and its workspace in bytes, 0 where that is unknown.

    An accelerator's peak statistics start anew.
    """
    if device.type in _COUNTED:
        torch.accelerator.reset_peak_memory_stats(device)
        result = run()
        return result, torch.accelerator.max_memory_allocated(device) - torch.accelerator.memory_allocated(device)
    if device.type != "cpu" or not measurable():
        return run(), 0
    _autograd._enable_profiler_legacy(_CONFIG)
    try:
        result = run()
    finally:
        events = _autograd._disable_profiler_legacy()
    return result, _most_above_end(events)


def device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    """The device that an operation with these arguments runs on."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            return value[0].device
    device = kwargs.get("device")
    return device if isinstance(device, torch.device) else torch.device("cpu")


def _most_above_end(threads: list[list[Any]]) -> int:
    """How far the bytes that live rise above those that live in the end; each thread has a list of its events."""
    changes = [event for events in threads for event in events if event.kind() == "memory_alloc"]
    if len(threads) > 1:  # else they are in the order of time
        start = threads[0][0]
        changes.sort(key=start.cpu_elapsed_us)
    live = most = 0
    for change in changes:
        live += change.cpu_memory_usage()
        most = max(most, live)
    return most - live


def _config() -> Any:
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import ProfilerConfig, ProfilerState

    shapes, memory, stack, flops, modules = False, True, False, False, False
    return ProfilerConfig(ProfilerState.CPU, shapes, memory, stack, flops, modules, _ExperimentalConfig())


_CONFIG = _config()
