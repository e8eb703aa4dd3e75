"""Sizes and durations as people write them.

==========  ========================================================================  ==========
what        units                                                                     plain
==========  ========================================================================  ==========
a size      ``B``, ``KB`` = 1000, ``KiB`` = 1024, and so on with M, G, T, P           bytes
a duration  ``ns``, ``us``, ``ms``, ``s``, ``m``, ``h``, ``d``, ``w``: ``1h 30m``     seconds
==========  ========================================================================  ==========

Capitals do not matter, and the last letter of a size may be left out: ``4G`` is ``4GB``.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

from quiver.errors import InvalidConfig

MAX_SIZE: Final = 2**63 - 1
MAX_DURATION: Final = 100 * 365 * 86_400.0

_NUMBER = r"[0-9]{1,20}(?:\.[0-9]{1,20})?"
_SIZE: Final = re.compile(rf"({_NUMBER})\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_PART: Final = re.compile(rf"({_NUMBER})\s*([a-zµ]+)\s*")
_PLAIN: Final = re.compile(rf"{_NUMBER}(?:e[+-]?[0-9]{{1,2}})?", re.IGNORECASE | re.ASCII)

_PREFIXES: Final = "kmgtp"
_SIZE_UNITS: Final = {"": 1, "b": 1} | {
    f"{prefix}{infix}{suffix}": base**power
    for power, prefix in enumerate(_PREFIXES, start=1)
    for infix, base in (("", 1000), ("i", 1024))
    for suffix in ("", "b")
}
_SECOND_UNITS: Final = {
    name: seconds
    for names, seconds in (
        ("ns nsec nanosecond nanoseconds", Fraction(1, 10**9)),
        ("us µs usec microsecond microseconds", Fraction(1, 10**6)),
        ("ms msec millisecond milliseconds", Fraction(1, 1000)),
        ("s sec secs second seconds", Fraction(1)),
        ("m min mins minute minutes", Fraction(60)),
        ("h hr hrs hour hours", Fraction(3600)),
        ("d day days", Fraction(86_400)),
        ("w week weeks", Fraction(7 * 86_400)),
    )
    for name in names.split()
}


def parse_size(text: str) -> int:
    """Bytes: ``32MB`` is 32,000,000, ``32MiB`` is 33,554,432, ``32`` is 32."""
    match = _SIZE.fullmatch(text.strip())
    factor = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InvalidConfig("a size is a number with a unit, as 32MB, 4GiB or 500GB")
    size = Fraction(match[1]) * factor
    if size.denominator != 1:
        raise InvalidConfig("a size is a whole number of bytes")
    if size > MAX_SIZE:
        raise InvalidConfig("a size is less than 2^63 bytes")
    return int(size)


def parse_duration(text: str) -> float:
    """Seconds: ``25ms`` is 0.025, ``72h`` is 259,200, ``1h 30m`` is 5,400, ``2.5`` is 2.5."""
    text = text.strip()
    seconds = Fraction(text) if _PLAIN.fullmatch(text) else _sum_of_parts(text)
    if seconds > MAX_DURATION:
        raise InvalidConfig("a duration is at most a hundred years")
    return float(seconds)


def _sum_of_parts(text: str) -> Fraction:
    seconds = Fraction(0)
    rest = text.lower()
    while True:
        match = _PART.match(rest)
        unit = _SECOND_UNITS.get(match[2]) if match else None
        if match is None or unit is None:
            raise InvalidConfig("a duration is a number with a unit, as 25ms, 15s, 5m, 72h or 7d")
        seconds += Fraction(match[1]) * unit
        rest = rest[match.end() :]
        if not rest:
            return seconds


def size_text(size: int) -> str:
    """The shortest way to write a size: ``32MiB``, ``500GB``, ``1234B``."""
    ways = [f"{size}B"]
    for infix, base in (("i", 1024), ("", 1000)):
        for power, prefix in enumerate(_PREFIXES.upper(), start=1):
            count, rest = divmod(size, base**power)
            if count and not rest:
                ways.append(f"{count}{prefix}{infix}B")
    return min(ways, key=len)


def duration_text(seconds: float) -> str:
    """The shortest way to write a duration: ``25ms``, ``30s``, ``72h``."""
    if seconds and seconds % 3600 == 0:
        return f"{int(seconds) // 3600}h"
    if math.floor(seconds) == seconds:
        return f"{int(seconds)}s"
    return f"{seconds * 1000:.6f}".rstrip("0").rstrip(".") + "ms"
