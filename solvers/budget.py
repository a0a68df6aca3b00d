"""Budgets as people write them, and bytes as people read them."""

from __future__ import annotations

import math
import numbers
import re
from fractions import Fraction

LARGEST = 10**100
"""Bytes of anything, at most: a float holds them."""

_UNITS = {
    "": 1,
    "B": 1,
    "BYTES": 1,  # as errors write them
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}

# Commas only between thousands: elsewhere "1,5" is one and a half.
_AMOUNT = (
    r"\s*([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)"
    r"\s*([A-Za-z]*|%)\s*"
)


def parse_budget(budget: int | float | str, plain_peak: int) -> int:
    """A budget in bytes.

    Args:
      budget: bytes as an ``int``; a fraction of ``plain_peak`` as a ``float``
        in (0, 1]; or text: "4GiB", "900MB", "123456", "50%", "0.5".
      plain_peak: peak in bytes of running every node once, in the given order.

    Returns:
      Whole bytes, rounded down.

    Raises:
      ValueError: if it is none of these.

    Example:
      >>> parse_budget("50%", 1000), parse_budget("2KiB", 1000), parse_budget(0.25, 1000)
      (500, 2048, 250)
    """
    if isinstance(budget, str):
        match = re.fullmatch(_AMOUNT, budget)
        unit = match[2].upper() if match else ""
        if match is None or (unit != "%" and unit not in _UNITS):
            raise ValueError(
                f"budget {budget!r} is not an amount of memory; write bytes (4294967296), "
                "'4GiB', '900MB' or '50%'"
            )
        amount = Fraction(match[1].replace(",", "").replace("_", ""))
        if is_share(budget):
            return _share(amount / 100 if unit == "%" else amount, plain_peak, budget)
        return parse_budget(int(amount * _UNITS[unit]), plain_peak)
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise ValueError(f"a budget is a number of bytes, a fraction or text, not {budget!r}")
    if isinstance(budget, numbers.Integral):
        if budget < 0:
            raise ValueError(f"budget is {budget} bytes; it must not be negative")
        if budget > LARGEST:
            raise ValueError(f"a budget of {len(str(int(budget)))} digits is more than any memory")
        return int(budget)
    budget = float(budget)  # a share
    if not math.isfinite(budget):
        raise ValueError(f"a budget must be finite, not {budget!r}")
    return _share(Fraction(repr(budget)), plain_peak, budget)


def is_share(budget: int | float | str) -> bool:
    """Whether a budget that ``parse_budget`` takes is a share of the plain peak."""
    if isinstance(budget, str):
        match = re.fullmatch(_AMOUNT, budget)
        return match is not None and (match[2] == "%" or (not match[2] and "." in match[1]))
    return not isinstance(budget, numbers.Integral)


def format_bytes(count: int) -> str:
    """Bytes for people, exact where they are few.

    Example:
      >>> format_bytes(999), format_bytes(3 * 2**30)
      ('999 B', '3.00 GiB')
    """
    value, unit = float(min(count, LARGEST)), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def _share(share: Fraction, plain_peak: int, written: int | float | str) -> int:
    # Exact: a float would be off above 2**53 bytes, and 0.7 of 10 bytes below 7.
    if not 0 < share <= 1:
        raise ValueError(
            f"budget {written!r} is not in (0, 1] (or 0-100 %) of the plain peak; "
            "write a whole number for bytes"
        )
    return int(share * plain_peak)
