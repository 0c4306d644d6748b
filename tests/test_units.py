"""Amounts as text: what is read, what is refused and why, and that writing and reading agree."""

from __future__ import annotations

import contextlib
import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lowtide.units
from lowtide.errors import LowtideError, UnitError
from lowtide.units import BYTES_PER_UNIT, format_bytes, format_seconds, parse_bytes

READ = {
    "12 GiB": 12 * 2**30,
    "12GiB": 12 * 2**30,
    "12GB": 12 * 10**9,
    "800MB": 800 * 10**6,
    "512 KiB": 512 * 2**10,
    "1 kB": 1000,
    "1 KB": 1000,
    "0 B": 0,
    "  7   B ": 7,
    "1.5 GiB": 3 * 2**29,
    "0.3 GB": 300_000_000,
    "2 TiB": 2**41,
    "1 PB": 10**15,
}


@pytest.mark.parametrize(("text", "count"), READ.items())
def test_a_number_with_a_unit_is_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("count", [0, 1, 12 * 2**30, np.int64(5)])
def test_an_int_is_bytes(count: int) -> None:
    assert parse_bytes(count) == count
    assert type(parse_bytes(count)) is int


def test_a_part_of_a_byte_is_cut_off() -> None:
    assert parse_bytes("1.9999 KB") == 1999
    assert parse_bytes("0.9 B") == 0


@pytest.mark.parametrize("text", ["12", "12 G", "12g", "12 gb", "12 gib", "12 Gb", "12 M", "12 GBs", "12 elephants"])
def test_an_unclear_unit_is_refused_and_the_accepted_ones_are_named(text: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bytes(text)
    message = str(caught.value)
    assert repr(text) in message
    for unit in BYTES_PER_UNIT.keys() - {"kB"}:
        assert unit in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("12", "the unit is missing"),
        ("12 G", "did you mean GB or GiB?"),
        ("12g", "did you mean GB or GiB?"),
        ("12 elephants", "'elephants' is not a unit of bytes here."),
        ("GiB", "not one number and one unit"),
        ("", "not one number and one unit"),
        ("-1 GiB", "not one number and one unit"),
        ("1,000 MB", "not one number and one unit"),
        ("80%", "not one number and one unit"),
        ("1e9 B", "not one number and one unit"),
        ("١٢ GiB", "not one number and one unit"),
        ("9" * 5000 + " B", "not one number and one unit"),
    ],
)
def test_the_refusal_says_why(text: str, reason: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bytes(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize("amount", [-1, True, 12.0, None, b"12 GiB", math.nan])
def test_what_is_neither_text_nor_a_whole_number_is_refused(amount: object) -> None:
    with pytest.raises(UnitError, match="Accepted: a whole number of bytes"):
        parse_bytes(amount)  # type: ignore[arg-type]


def test_the_refusal_is_caught_as_a_value_error_and_as_ours() -> None:
    assert issubclass(UnitError, ValueError)
    assert issubclass(UnitError, LowtideError)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (999 * 1024, "999 KiB"),
        (1000 * 1024, "0.977 MiB"),
        (12_000_000_000, "11.2 GiB"),
        (128 * 2**30, "128 GiB"),
        (3 * 2**60, "3072 PiB"),
        (-1536, "-1.50 KiB"),
        (-5, "-5 B"),
        (math.inf, "inf B"),
    ],
)
def test_bytes_are_written_with_three_significant_figures(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0, "0 s"),
        (2.5e-10, "0.250 ns"),
        (12.34e-9, "12.3 ns"),
        (1e-6, "1.00 µs"),
        (999.6e-6, "1.00 ms"),
        (0.01234, "12.3 ms"),
        (1.5, "1.50 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3599.6, "1 h 0 min"),
        (3780, "1 h 3 min"),
        (-0.002, "-2.00 ms"),
        (-90, "-1 min 30 s"),
        (math.inf, "inf s"),
        (math.nan, "nan s"),
    ],
)
def test_seconds_are_written_with_three_significant_figures(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(0, 10**18))
def test_written_and_read_again_bytes_differ_by_half_a_percent_at_most(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= max(1, 0.0051 * count)


@given(st.integers(0, 2**70), st.sampled_from(sorted(BYTES_PER_UNIT)))
def test_whole_numbers_are_read_exactly(number: int, unit: str) -> None:
    if number < 10**18:
        assert parse_bytes(f"{number} {unit}") == number * BYTES_PER_UNIT[unit]


@given(st.floats(1e-9, 59.9))
def test_a_short_time_never_takes_more_than_three_figures(seconds: float) -> None:
    number, _ = format_seconds(seconds).split()
    assert len(number.replace(".", "").lstrip("0")) <= 3


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(UnitError):
        assert parse_bytes(text) >= 0


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert doctest.testmod(lowtide.units).failed == 0
