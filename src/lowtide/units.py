"""Amounts of bytes and seconds, between numbers and text."""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction
from typing import SupportsIndex

from lowtide.errors import UnitError

__all__ = ["format_bytes", "format_seconds", "parse_bytes"]

BYTES_PER_UNIT = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
ACCEPTED = "a whole number of bytes (an int), or a number with B, KB, MB, GB, TB or PB (powers of 1000), \
or KiB, MiB, GiB, TiB or PiB (powers of 1024), such as '12 GiB' or '1.5GB'"

AMOUNT = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*")
THREE_DIGITS = ((0.9995, 3), (9.995, 2), (99.95, 1), (math.inf, 0))
"""Below which value how many decimals make three significant figures."""
OVERFLOW = 999.5
"""From here on three significant figures would read 1000: the next unit takes over."""


def parse_bytes(amount: str | SupportsIndex) -> int:
    """Return how many bytes `amount` is: an int as it is, or a number and a unit, as in "12 GiB" or "800MB".

    A part of a byte is cut off, so a budget never grows by being read.

    Raises UnitError for anything that could be meant in two ways ("12", "12 G", "12 gb") or is no amount
    at all; the message names what is accepted.

    >>> parse_bytes("1.5 KiB")
    1536
    """
    if isinstance(amount, str):
        return parse_text(amount)
    try:
        count = operator.index(amount)
    except TypeError:
        raise unclear(amount, f"{type(amount).__name__} is neither text nor a whole number") from None
    if isinstance(amount, bool):
        raise unclear(amount, "a truth value is no amount")
    if count < 0:
        raise unclear(amount, "it is negative")
    return count


def parse_text(text: str) -> int:
    match = AMOUNT.fullmatch(text)
    if match is None:
        raise unclear(text, "it is not one number and one unit")
    number, unit = match.groups()
    if not unit:
        raise unclear(text, "the unit is missing")
    if unit not in BYTES_PER_UNIT:
        raise unclear(text, f"{unit!r} is not a unit of bytes here{suggest(unit)}")
    return int(Fraction(number) * BYTES_PER_UNIT[unit])


def suggest(unit: str) -> str:
    initial = unit[0].upper()
    close = [known for known in BYTES_PER_UNIT if known[0] == initial and initial in "KMGTP"]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def unclear(amount: object, reason: str) -> UnitError:
    return UnitError(f"Cannot read {amount!r} as an amount of bytes: {reason}. Accepted: {ACCEPTED}.")


def format_bytes(count: float) -> str:
    """Return `count` bytes as text with three significant figures in powers of 1024; whole bytes below 1 KiB.

    Negative counts (differences) keep their sign.

    >>> format_bytes(12_000_000_000)
    '11.2 GiB'
    """
    if not math.isfinite(count):
        return f"{count} B"
    size = abs(count)
    if size < 2**10:
        return f"{count:.0f} B"
    sign = "-" if count < 0 else ""
    unit = next((unit for unit in BINARY_UNITS if size / BYTES_PER_UNIT[unit] < OVERFLOW), BINARY_UNITS[-1])
    return f"{sign}{three_digits(size / BYTES_PER_UNIT[unit])} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: three significant figures up to a minute, then whole seconds or minutes.

    Negative durations (differences) keep their sign.

    >>> format_seconds(0.01234), format_seconds(125)
    ('12.3 ms', '2 min 5 s')
    """
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:.0f} s"
    sign, size = ("-" if seconds < 0 else ""), abs(seconds)
    for scale, unit in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        if size * scale < OVERFLOW:
            return f"{sign}{three_digits(size * scale)} {unit}"
    if size < 59.95:
        return f"{sign}{three_digits(size)} s"
    if size < 3599.5:
        return f"{sign}{round(size) // 60} min {round(size) % 60} s"
    return f"{sign}{round(size / 60) // 60} h {round(size / 60) % 60} min"


def three_digits(value: float) -> str:
    decimals = next(decimals for bound, decimals in THREE_DIGITS if value < bound)
    return f"{value:.{decimals}f}"
