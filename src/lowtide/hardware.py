"""Accelerators as numbers: memory, bandwidth, rates by dtype; a catalogue, and files of measured ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from lowtide.errors import UnknownHardware

__all__ = ["CATALOGUE", "Accelerator", "as_record", "find", "from_record", "load", "save"]

SCHEMA = 1
"""Of the files that `save` writes. A file with a higher number is refused, never half understood."""

ASSUMED_EFFICIENCY_FLOPS = 0.75
ASSUMED_EFFICIENCY_BANDWIDTH = 0.85
ASSUMED_LAUNCH_SECONDS = 5e-6
"""These three are no data sheet's: what a large eager op typically gets, where nobody has measured it yet."""

FALLBACKS = {
    "float8": ("bfloat16", 1.0),
    "bfloat16": ("float32", 1.0),
    "float16": ("float32", 1.0),
    "tf32": ("float32", 1.0),
    "float64": ("float32", 1 / 2),
    "complex64": ("float32", 1 / 4),
    "complex128": ("float64", 1 / 4),
}
"""A dtype without a rate of its own -> the dtype whose rate it gets, and which part of that."""


@dataclass(frozen=True)
class Accelerator:
    """What one device can do; nothing here knows torch.

    `memory_bytes` is what a process is given, `bandwidth` the memory's bytes/s, `watts` the whole board's
    power, 0 where nobody knows it. `flops` holds flop/s by dtype name, dense (without structured sparsity);
    a multiply-add is two. "float32" must be there; "tf32", "bfloat16", "float16", "float8" and "float64" may.

    `efficiency_flops` and `efficiency_bandwidth`, above 0 and at most 1, are the parts of those rates that an
    op usually gets; `launch_seconds` passes for every op, however small. `source` names their origin.

    Raises UnknownHardware for a number that is no such number, or without a rate for float32.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    watts: float
    source: str
    efficiency_flops: float = ASSUMED_EFFICIENCY_FLOPS
    efficiency_bandwidth: float = ASSUMED_EFFICIENCY_BANDWIDTH
    launch_seconds: float = ASSUMED_LAUNCH_SECONDS

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))
        if "float32" not in self.flops:
            raise UnknownHardware(f"{self.name}: flops has no rate for float32.")
        for key, value in self.flops.items():
            check_number(f"{self.name}: flops[{key!r}]", value)
        check_number(f"{self.name}: memory_bytes", self.memory_bytes)
        check_number(f"{self.name}: bandwidth", self.bandwidth)
        check_number(f"{self.name}: efficiency_flops", self.efficiency_flops, most=1)
        check_number(f"{self.name}: efficiency_bandwidth", self.efficiency_bandwidth, most=1)
        check_number(f"{self.name}: watts", self.watts, zero=True)
        check_number(f"{self.name}: launch_seconds", self.launch_seconds, zero=True)

    def __reduce__(self) -> tuple[type[Accelerator], tuple[object, ...]]:
        # A mapping proxy cannot be copied nor pickled; what it shows can.
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return Accelerator, tuple({**values, "flops": dict(self.flops)}.values())

    def flops_rate(self, dtype: str) -> float:
        """Return the dense peak flop/s for `dtype`, a name such as "bfloat16" or "torch.float8_e4m3fn".

        Where the hardware lists no rate, what a framework does instead counts: float8 runs as bfloat16;
        bfloat16, float16 and tf32 as float32; float64 at half of float32. A complex multiplication is four
        real ones: complex64 gets a quarter of float32, complex128 of float64. Integers, bool and unknown
        names get float32's rate.

        >>> find("T4").flops_rate("bfloat16") == find("T4").flops["float32"]
        True
        """
        name = re.sub(r"^float8_.*", "float8", dtype.removeprefix("torch."))
        part = 1.0
        while name not in self.flops:
            name, factor = FALLBACKS.get(name, ("float32", 1.0))
            part *= factor
        return part * self.flops[name]


def check_number(what: str, value: object, most: float = math.inf, zero: bool = False) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        low_enough = value <= most
        high_enough = value >= 0 if zero else value > 0
        if low_enough and high_enough:
            return
    least = "at least 0" if zero else "above 0"
    above = f" and at most {most}" if math.isfinite(most) else ""
    raise UnknownHardware(f"{what} is {value!r}; a number {least}{above} is expected.")


def board(
    name: str,
    gibibytes: float,
    gigabytes_per_second: float,
    teraflops: Mapping[str, float],
    watts: float,
    source: str,
    matmul: float = ASSUMED_EFFICIENCY_FLOPS,
) -> Accelerator:
    flops = {dtype: rate * 1e12 for dtype, rate in teraflops.items()}
    bandwidth = gigabytes_per_second * 1e9
    return Accelerator(name, int(gibibytes * 2**30), bandwidth, flops, watts, source, efficiency_flops=matmul)


def rates(
    float32: float,
    half: float,
    float64: float,
    tf32: float | None = None,
    float8: float | None = None,
) -> dict[str, float]:
    """Teraflop/s by dtype; `half` is both bfloat16's and float16's."""
    listed = {"float32": float32, "tf32": tf32, "bfloat16": half, "float16": half, "float8": float8}
    return {dtype: rate for dtype, rate in {**listed, "float64": float64}.items() if rate is not None}


AMPERE = rates(19.5, 312, 19.5, tf32=156)
HOPPER = rates(66.9, 989.4, 66.9, tf32=494.7, float8=1978.9)
MATMUL_SOURCE = "matmul efficiency: S. Bekman, Machine Learning Engineering, 2026"

# Rates with structured sparsity, which data sheets print larger, are halved. GeForce boards add up float16
# products in float32 at half of their headline rate, and PyTorch asks for that. Memory is what PyTorch
# reports as the total, rounded down: the driver and error correction keep some of the gigabytes in the name.
# Apple: three quarters of the largest configuration, as Metal recommends; power of the whole machine.
CATALOGUE: tuple[Accelerator, ...] = (
    board("T4", 14.5, 320, {"float32": 8.1, "float16": 65, "float64": 0.254}, 70, "NVIDIA T4 data sheet, 2019"),
    board("A10G", 22.0, 600, rates(35, 70, 0.547, tf32=35), 300, "NVIDIA A10G data sheet for AWS, 2022"),
    board(
        "L4",
        22.0,
        300,
        rates(30.3, 121, 0.473, tf32=60, float8=242),
        72,
        "NVIDIA L4 data sheet, 2023, halved",
    ),
    board(
        "L40S",
        44.4,
        864,
        rates(91.6, 362, 1.43, tf32=183, float8=733),
        350,
        "NVIDIA L40S data sheet, 2023, the numbers without sparsity",
    ),
    board(
        "RTX 3090",
        23.6,
        936,
        rates(35.6, 71, 0.556, tf32=35.6),
        350,
        "NVIDIA Ampere GA102 white paper, 2020, float32 accumulate",
    ),
    board(
        "RTX 4090",
        23.5,
        1008,
        rates(82.6, 165.2, 1.29, tf32=82.6, float8=330.3),
        450,
        "NVIDIA Ada white paper, 2022, float32 accumulate",
    ),
    board(
        "RTX 5090",
        31.3,
        1792,
        rates(104.8, 209.5, 1.64, tf32=104.8, float8=419),
        575,
        "NVIDIA RTX Blackwell white paper, 2025, float32 accumulate; its clock exceeds the rated one, "
        "and so do matmuls: xzwgit/gpu-flops-bench, 2026",
        matmul=1.0,
    ),
    board("A100-40", 39.4, 1555, AMPERE, 400, f"NVIDIA A100 data sheet, 2020, SXM; {MATMUL_SOURCE}", matmul=0.87),
    board("A100-80", 79.1, 2039, AMPERE, 400, f"NVIDIA A100 data sheet, 2021, SXM; {MATMUL_SOURCE}", matmul=0.87),
    board(
        "H100",
        79.1,
        3350,
        HOPPER,
        700,
        f"NVIDIA H100 data sheet, 2023, SXM, halved; {MATMUL_SOURCE}",
        matmul=0.80,
    ),
    board(
        "H200",
        139.7,
        4800,
        HOPPER,
        700,
        f"NVIDIA H200 data sheet, 2024, SXM, halved; {MATMUL_SOURCE}",
        matmul=0.80,
    ),
    board(
        "B200",
        178.3,
        7672,
        rates(80, 2250, 40, tf32=1125, float8=4500),
        1000,
        "NVIDIA Blackwell architecture brief, 2024, HGX at 1000 W, halved; bandwidth: 7680 bits at 3996 MHz, "
        f"pytorch/ao pull request 4002, 2026; {MATMUL_SOURCE}",
        matmul=0.78,
    ),
    board(
        "MI300X",
        191.6,
        5300,
        rates(163.4, 1307.4, 163.4, tf32=653.7, float8=2614.9),
        750,
        f"AMD Instinct MI300X data sheet, 2023; {MATMUL_SOURCE}",
        matmul=0.51,
    ),
    board(
        "M2 Max",
        72,
        400,
        {"float32": 13.6, "bfloat16": 13.6, "float16": 13.6},
        145,
        "Apple, 17 January 2023: 38 cores, 96 GB; rate: cores × 128 lanes × 2 × 1.398 GHz; watts: Apple support 102027",
    ),
    board(
        "M3 Max",
        96,
        400,
        {"float32": 14.3, "bfloat16": 14.3, "float16": 14.3},
        145,
        "Apple, 30 October 2023: 40 cores, 128 GB; rate: cores × 128 lanes × 2 × 1.398 GHz; watts assumed",
    ),
    board(
        "M4 Max",
        96,
        546,
        {"float32": 17.2, "bfloat16": 17.2, "float16": 17.2},
        145,
        "Apple, 30 October 2024: 40 cores, 128 GB; rate: cores × 128 lanes × 2 × 1.678 GHz; watts assumed",
    ),
    board(
        "cpu",
        16,
        76.8,
        {"float32": 0.75, "bfloat16": 0.075, "float16": 0.075, "float64": 0.375},
        65,
        "assumed: 8 cores with AVX2 at 3 GHz, two channels of DDR5-4800, 16-bit matmuls emulated; "
        "`lowtide calibrate` measures yours",
    ),
)

WITHOUT_MEANING = re.compile(r"nvidia|geforce|tesla|rtx|amd|instinct|apple|gpu|tensor|core|gi?b|sxm\d?|hbm\d?e?")
ALIASES = {
    "h10080": "h100",
    "h200141": "h200",
    "t416": "t4",
    "a10g24": "a10g",
    "l424": "l4",
    "l40s48": "l40s",
}
"""Names that say the memory where only one size exists."""


def reduce_name(name: str) -> str:
    """Leave what tells boards apart: of "NVIDIA GeForce RTX 4090" 4090, of "A100-SXM4-80GB" a10080."""
    words = (re.sub(r"(?<=\d)gi?b$", "", word) for word in re.findall(r"[a-z0-9]+", name.lower()))
    joined = "".join(word for word in words if not WITHOUT_MEANING.fullmatch(word))
    key = re.sub(r"^(nvidia|geforce|tesla|rtx|amd|apple)+", "", joined)
    return ALIASES.get(key, key)


BY_KEY = {reduce_name(accelerator.name): accelerator for accelerator in CATALOGUE}


def find(name: str) -> Accelerator:
    """Return the accelerator of the catalogue with this name.

    Case, spaces and dashes do not count, nor do the maker's words: "h100", "A100-80GB", "rtx 4090" and what
    PyTorch calls a device, "NVIDIA H100 80GB HBM3", are found. A variant with other numbers, such as
    "H100 PCIe", is not.

    Raises UnknownHardware that lists the known names, the nearest first.

    >>> find("a100 80gb").bandwidth
    2039000000000.0
    """
    key = reduce_name(name)
    if key in BY_KEY:
        return BY_KEY[key]
    close = [BY_KEY[each].name for each in get_close_matches(key, BY_KEY, n=2)]
    nearest = f" Nearest: {' or '.join(close)}." if close else ""
    known = ", ".join(accelerator.name for accelerator in CATALOGUE)
    raise UnknownHardware(
        f"Unknown hardware {name!r}.{nearest} Known: {known}. `lowtide calibrate` measures the machine at hand."
    )


def as_record(accelerator: Accelerator) -> dict[str, object]:
    """Return the accelerator as plain values for JSON, with the schema's number."""
    values = {each.name: getattr(accelerator, each.name) for each in fields(accelerator)}
    return {"schema": SCHEMA, **values, "flops": dict(accelerator.flops)}


def from_record(record: object) -> Accelerator:
    """Return the accelerator that `as_record` wrote down.

    Raises UnknownHardware that names what is missing, wrong or newer than this version.
    """
    if not isinstance(record, dict) or not isinstance(record.get("schema"), int):
        raise UnknownHardware('a JSON object with a whole number "schema" is expected')
    if record["schema"] != SCHEMA:
        raise UnknownHardware(
            f"it has schema {record['schema']}, and this version of lowtide reads schema {SCHEMA}: "
            "update lowtide, or calibrate again"
        )
    values = {key: value for key, value in record.items() if key != "schema"}
    known = {each.name for each in fields(Accelerator)}
    for problem, keys in (("lacks", known - values.keys()), ("has unknown", values.keys() - known)):
        if keys:
            raise UnknownHardware(f"it {problem} {', '.join(sorted(keys))}")
    for key, kind in (("name", str), ("source", str), ("memory_bytes", int), ("flops", dict)):
        if not isinstance(values[key], kind):
            raise UnknownHardware(f"{key} is {values[key]!r}; {kind.__name__} is expected")
    return Accelerator(**values)


def save(accelerator: Accelerator, path: str | Path) -> None:
    """Write the accelerator to `path` as JSON; what was there is replaced. Loaded again it is equal."""
    Path(path).write_text(json.dumps(as_record(accelerator), indent=2) + "\n", encoding="utf-8")


def load(path: str | Path) -> Accelerator:
    """Return the accelerator that `save` wrote to `path`.

    Raises UnknownHardware where there is no such file, it is not one of these, or a newer version wrote it.
    """
    try:
        return from_record(json.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UnknownHardware(f"{path}: no such file. `lowtide calibrate` writes one.") from None
    except ValueError as error:  # UnknownHardware, text that is no JSON, bytes that are no text
        reason = str(error).rstrip(".")
        raise UnknownHardware(f"{path} does not describe hardware: {reason}.") from error
