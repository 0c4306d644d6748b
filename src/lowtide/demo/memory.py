"""Count the bytes a step takes from PyTorch's CPU allocator, exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

BACKWARD = "lowtide: backward begins"


@dataclass(frozen=True)
class StepMemory:
    """Bytes above what lived before the step.

    peak_bytes: the most at any moment: activations, gradients and temporaries. Parameters, optimizer states,
        the batch and gradients that were there before are not in it.
    held_bytes: what forward left behind for backward, the loss included.
    """

    peak_bytes: int
    held_bytes: int


def measure_memory(forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> StepMemory:
    """Run `backward(forward())` once under the profiler and return the bytes that lived.

    Set gradients to None before the call: one that is freed inside is subtracted, and the peak looks smaller.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = forward()
        with record_function(BACKWARD):
            pass
        backward(loss)
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = sorted(results.events(), key=lambda event: event.start_ns())
    live = peak = held = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        elif event.name() == BACKWARD:
            held = live
    return StepMemory(peak, held)
