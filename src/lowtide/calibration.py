"""Measure the machine at hand: rates by dtype, memory traffic, launches. The result is an Accelerator."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from statistics import geometric_mean, median

import torch
from torch import Tensor
from torch.nn.functional import gelu

from lowtide import hardware
from lowtide.errors import UnknownHardware
from lowtide.hardware import Accelerator

__all__ = ["calibrate"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
MATMUL_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
STREAM_MEBIBYTES = {"cpu": (2, 16, 64), "cuda": (64, 256), "mps": (64, 256)}
"""Of one operand. The last exceeds the caches; the others are what models on such a device have."""

LAUNCH_SHARE, MATMUL_SHARE, STREAM_SHARE = 0.05, 0.6, 0.35
"""Of the seconds to spend."""
SAMPLE_SECONDS = 2e-3
"""Calls are timed together until they take this long: less would time the clock and the synchronisation."""
WARM_UPS, LEAST_REPEATS, MOST_REPEATS = 2, 3, 25
LAUNCHES = 20
"""An op that takes as long as this many launches says something about arithmetic or memory."""


@dataclass(frozen=True)
class Measured:
    """Median seconds of an op, and flop/s or bytes/s."""

    seconds: float
    rate: float


@dataclass(frozen=True)
class Bench:
    """How time is taken on a device."""

    device: torch.device
    clock: Callable[[], float]
    synchronize: Callable[[], object]

    def sample(self, run: Callable[[], object], calls: int) -> float:
        """Seconds of one call out of `calls`, from an idle device to an idle device."""
        self.synchronize()
        start = self.clock()
        for _ in range(calls):
            run()
        self.synchronize()
        return max(self.clock() - start, 1e-9) / calls

    def measure(self, run: Callable[[], object], work: float, allowance: float) -> Measured:
        """Time `run`, which does `work` flops or moves `work` bytes, for about `allowance` seconds."""
        once = min(self.sample(run, 1) for _ in range(WARM_UPS))
        calls = math.ceil(SAMPLE_SECONDS / once)
        repeats = min(max(int(allowance / (once * calls)), LEAST_REPEATS), MOST_REPEATS)
        seconds = median(self.sample(run, calls) for _ in range(repeats))
        return Measured(seconds, work / seconds)


def calibrate(seconds: float = 10, device: str | torch.device = "cpu") -> Accelerator:
    """Return what `device` ("cpu", "cuda", "cuda:1" or "mps") really does, measured for about `seconds`.

    A rate in `flops` is the best of square matrix products of growing size, for each of float32, bfloat16,
    float16 and float64 that the device knows; float32 is as precise as torch is set to. `bandwidth` is that
    of a sum into memory that is there already. The efficiencies are what all sizes, and ordinary elementwise
    ops, get of these, as geometric means; `launch_seconds` is an op on one element. Every number is a median
    over repeats after a warm-up. On a CPU with one thread the process's own time counts, so that others
    disturb little.

    Random state is left alone. A slow machine takes longer than `seconds`, for the smallest sizes are always
    measured. Raises UnknownHardware for a device that cannot be used.
    """
    bench = open_bench(device)
    one = torch.ones(1, device=bench.device)
    launch = bench.measure(partial(torch.add, one, one), 0, seconds * LAUNCH_SHARE).seconds
    share = seconds * MATMUL_SHARE / len(DTYPES)
    products = {name: list(measure_products(bench, dtype, share)) for name, dtype in DTYPES.items()}
    flops = {name: max(each.rate for each in measured) for name, measured in products.items() if measured}
    parts = [each.rate / flops[name] for name in flops for each in telling(products[name], launch)]
    bandwidth = measure_bandwidth(bench).rate
    streams = telling(list(measure_streams(bench, seconds * STREAM_SHARE)), launch)
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else bench.device.type
    return Accelerator(
        name=name,
        memory_bytes=memory_bytes(bench.device),
        bandwidth=bandwidth,
        flops=flops,
        watts=listed_watts(name),
        source=describe(bench.device),
        efficiency_flops=geometric_mean(parts),
        efficiency_bandwidth=min(1.0, geometric_mean([each.rate / bandwidth for each in streams])),
        launch_seconds=launch,
    )


def open_bench(device: str | torch.device) -> Bench:
    try:
        found = torch.ones(1, device=device).device
    except (AssertionError, RuntimeError) as error:  # torch asserts where it was built without CUDA
        reason = str(error).splitlines()[0]
        raise UnknownHardware(f"Device {str(device)!r} cannot be used: {reason}") from error
    if found.type not in STREAM_MEBIBYTES:
        raise UnknownHardware(f"Device {str(device)!r} cannot be calibrated; {', '.join(STREAM_MEBIBYTES)} can.")
    if found.type != "cpu":
        return Bench(found, time.perf_counter, partial(torch.accelerator.synchronize, found))
    # Other processes slow the wall clock down; the process's own clock adds up what all its threads use.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    return Bench(found, clock, lambda: None)


def measure_products(bench: Bench, dtype: torch.dtype, allowance: float) -> Iterator[Measured]:
    """Multiply square matrices, larger and larger while the next fits into the `allowance` seconds."""
    deadline = time.perf_counter() + allowance
    for size in MATMUL_SIZES:
        try:
            left, right = (random_numbers(bench, size * size, dtype).view(size, size) for _ in range(2))
            measured = bench.measure(partial(torch.mm, left, right), 2 * size**3, allowance / len(MATMUL_SIZES))
        except (RuntimeError, TypeError):
            return  # the device does not know this dtype, or has no room for this size
        yield measured
        if time.perf_counter() + 8 * measured.seconds * (WARM_UPS + LEAST_REPEATS) > deadline:
            return


def measure_bandwidth(bench: Bench) -> Measured:
    """Add two of the largest operands into a third."""
    size = STREAM_MEBIBYTES[bench.device.type][-1] * 2**20
    left, right, result = (random_numbers(bench, size // 4, torch.float32) for _ in range(3))
    return bench.measure(partial(torch.add, left, right, out=result), 3 * size, 0.5)


def measure_streams(bench: Bench, allowance: float) -> Iterator[Measured]:
    """Run elementwise ops as models do, each result in new memory, until `allowance` seconds are over."""
    deadline = time.perf_counter() + allowance
    sizes = STREAM_MEBIBYTES[bench.device.type]
    for size in (mebibytes * 2**20 for mebibytes in sizes):
        left, right = (random_numbers(bench, size // 4, torch.float32) for _ in range(2))
        ops: tuple[tuple[int, Callable[[], Tensor]], ...] = (
            (3, partial(torch.add, left, right)),
            (2, partial(torch.mul, left, 2)),
            (2, partial(torch.relu, left)),
            (2, partial(gelu, left)),
        )
        for operands, run in ops:
            yield bench.measure(run, operands * size, allowance / (len(ops) * len(sizes)))
            if time.perf_counter() > deadline:
                return


def telling(measured: Collection[Measured], launch: float) -> Collection[Measured]:
    """Leave out what is mostly a launch, unless nothing else is there."""
    return [each for each in measured if each.seconds >= LAUNCHES * launch] or measured


def random_numbers(bench: Bench, count: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, as an accelerator's clock depends on what it multiplies; from their own generator."""
    distinct = min(count, 2**20)
    numbers = torch.randn(distinct, generator=torch.Generator().manual_seed(0), device="cpu")
    return numbers.to(bench.device, dtype).repeat(count // distinct)


def memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows
        return hardware.find("cpu").memory_bytes


def listed_watts(name: str) -> float:
    """The power of a board in the catalogue; 0, not known, for any other, a CPU included."""
    try:
        return 0 if name == "cpu" else hardware.find(name).watts
    except UnknownHardware:
        return 0


def describe(device: torch.device) -> str:
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    where = f"threads: {threads}, {capability}" if device.type == "cpu" else str(device)
    system = f"{platform.system()} {platform.machine()}"
    return f"measured on {date.today()}: torch {torch.__version__}, {where}, {system}"
