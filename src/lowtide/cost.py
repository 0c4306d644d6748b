"""What an op costs on an accelerator that is not at hand: the roofline, and a launch."""

from __future__ import annotations

from lowtide.hardware import Accelerator

__all__ = ["operation_seconds"]


def operation_seconds(
    hardware: Accelerator, *, flops: float, bytes: float, dtype: str, launch: float | None = None
) -> float:
    """Return the seconds that one op takes on `hardware`.

    `flops` counts floating-point operations, a multiply-add as two; `bytes` what the op reads and writes in
    the accelerator's memory; `dtype` names what it computes in, such as "bfloat16", and
    `Accelerator.flops_rate` says what happens to those without a rate; `launch` is the time in seconds that
    passes for any op, by default the hardware's own.

    The roofline model (Williams, Waterman, Patterson, 2009): arithmetic and memory traffic overlap, so the
    slower of the two decides. It knows no caches: an op on small tensors may be faster. One that computes
    much without being a matrix multiplication, such as an exact GELU on a CPU, is slower.

    >>> from lowtide.hardware import find
    >>> operation_seconds(find("h100"), flops=0, bytes=3.35e9 * 0.85, dtype="bfloat16", launch=0)
    0.001
    """
    compute_seconds = flops / (hardware.flops_rate(dtype) * hardware.efficiency_flops)
    memory_seconds = bytes / (hardware.bandwidth * hardware.efficiency_bandwidth)
    return max(compute_seconds, memory_seconds) + (hardware.launch_seconds if launch is None else launch)
