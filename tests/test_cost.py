"""The roofline, computed by hand."""

from __future__ import annotations

import doctest

import pytest

from lowtide import cost, hardware
from lowtide.cost import operation_seconds
from lowtide.hardware import CATALOGUE, Accelerator, find

ROUND = Accelerator(
    name="round",
    memory_bytes=2**30,
    bandwidth=100e9,
    flops={"float32": 1e12, "bfloat16": 8e12},
    watts=100,
    source="round numbers",
    efficiency_flops=0.5,
    efficiency_bandwidth=0.8,
    launch_seconds=4e-6,
)
"""Half a Tflop/s in float32, 4 in bfloat16, 80 GB/s, 4 µs a launch."""


@pytest.mark.parametrize(
    ("flops", "bytes_", "dtype", "launch", "seconds"),
    [
        (1e9, 0, "float32", 0, 2e-3),  # 1e9 / (1e12 · 0.5)
        (1e9, 0, "bfloat16", 0, 0.25e-3),  # 1e9 / (8e12 · 0.5)
        (0, 8e6, "float32", 0, 0.1e-3),  # 8e6 / (100e9 · 0.8)
        (1e9, 8e6, "float32", 0, 2e-3),  # arithmetic is slower, memory overlaps
        (1e6, 8e6, "float32", 0, 0.1e-3),  # memory is slower, arithmetic overlaps
        (0, 0, "float32", None, 4e-6),  # a view: the hardware's launch
        (0, 0, "float32", 7e-6, 7e-6),  # another launch
        (1e9, 8e6, "float32", None, 2.004e-3),
        (2e9, 8e6, "float64", 0, 8e-3),  # no rate: half of float32's
        (1e9, 0, "complex64", 0, 8e-3),  # no rate: a quarter of float32's
    ],
)
def test_an_op_takes_the_longer_of_arithmetic_and_memory_and_a_launch(
    flops: float, bytes_: float, dtype: str, launch: float | None, seconds: float
) -> None:
    assert operation_seconds(ROUND, flops=flops, bytes=bytes_, dtype=dtype, launch=launch) == pytest.approx(seconds)


def test_the_ridge_is_where_both_take_the_same_time() -> None:
    flops_per_byte = (1e12 * 0.5) / (100e9 * 0.8)
    both = operation_seconds(ROUND, flops=flops_per_byte * 1e6, bytes=1e6, dtype="float32")
    assert both == pytest.approx(operation_seconds(ROUND, flops=0, bytes=1e6, dtype="float32"))
    more = operation_seconds(ROUND, flops=flops_per_byte * 1.01e6, bytes=1e6, dtype="float32")
    assert more > both


def test_a_large_matrix_product_on_an_h100_as_computed_by_hand() -> None:
    # 2 · 8192³ = 1.0995e12 flop at 989.4e12 · 0.80 flop/s: 1.3891 ms; 3 · 8192² · 2 bytes take only 0.1414 ms
    seconds = operation_seconds(
        find("h100"), flops=2 * 8192**3, bytes=3 * 8192**2 * 2, dtype="torch.bfloat16", launch=0
    )
    assert seconds == pytest.approx(1.3891e-3, rel=1e-4)


def test_a_sum_on_an_a100_is_bound_by_memory_as_computed_by_hand() -> None:
    # 3 · 2**30 bytes at 2039e9 · 0.85 bytes/s: 1.85858 ms, and 5 µs
    seconds = operation_seconds(find("a100-80"), flops=2**28, bytes=3 * 2**30, dtype="float32")
    assert seconds == pytest.approx(1.86358e-3, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "part", "of"),
    [
        ("h100", "float32", 1, "float32"),
        ("h100", "torch.float16", 1, "float16"),
        ("h100", "float8_e4m3fn", 1, "float8"),
        ("h100", "torch.float8_e5m2", 1, "float8"),
        ("h100", "tf32", 1, "tf32"),
        ("h100", "float64", 1, "float64"),
        ("h100", "complex128", 1 / 4, "float64"),
        ("a100-80", "float8_e4m3fn", 1, "bfloat16"),
        ("t4", "bfloat16", 1, "float32"),
        ("t4", "float8", 1, "float32"),
        ("t4", "tf32", 1, "float32"),
        ("m4 max", "float64", 1 / 2, "float32"),
        ("m4 max", "complex128", 1 / 8, "float32"),
        ("cpu", "complex64", 1 / 4, "float32"),
        ("cpu", "int64", 1, "float32"),
        ("cpu", "bool", 1, "float32"),
        ("cpu", "something new", 1, "float32"),
    ],
)
def test_a_dtype_without_a_rate_gets_the_stated_part_of_another_s(name: str, dtype: str, part: float, of: str) -> None:
    accelerator = find(name)
    assert accelerator.flops_rate(dtype) == part * accelerator.flops[of]


@pytest.mark.parametrize("accelerator", CATALOGUE, ids=lambda each: each.name)
def test_more_work_never_takes_less_time(accelerator: Accelerator) -> None:
    sizes = [0, 1, 1e3, 1e6, 1e9, 1e12]
    seconds = [operation_seconds(accelerator, flops=size, bytes=size, dtype="bfloat16") for size in sizes]
    assert seconds == sorted(seconds)
    assert seconds[0] == accelerator.launch_seconds


@pytest.mark.parametrize("module", [cost, hardware])
def test_the_examples_in_the_docstrings_are_true(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
