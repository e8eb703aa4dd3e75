"""Ways to damage a file, and to hide the damage by correcting the sums.

A case is named by run seed, kind and number alone: ``case(7, "wal", 1234)`` is the same bytes on
every machine, whatever ran before it.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.fuzz.corpus import Seed, seeds

EDGES: Final = (0, 1, 2, 7, 8, 24, 25, 34, 63, 64, 65, 127, 128, 255, 256, 1023, 1024, 65_535)
POWERS: Final = (15, 16, 20, 28, 31, 32, 40, 47, 62, 63, 64)
_NUMBER_FORMATS: Final = ("<H", "<I", "<I", "<Q")

Mutation = Callable[[random.Random, bytearray, bytes], None]


def _flip_bit(rng: random.Random, data: bytearray, other: bytes) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set_byte(rng: random.Random, data: bytearray, other: bytes) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 0xFF, 0x7F, 0x80, rng.randrange(256)))


def _cut_end(rng: random.Random, data: bytearray, other: bytes) -> None:
    del data[rng.randrange(len(data)) :]


def _cut_middle(rng: random.Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.choice((1, 4, 8, 64, rng.randrange(1, 512)))]


def _insert(rng: random.Random, data: bytearray, other: bytes) -> None:
    at = rng.randrange(len(data) + 1)
    size = rng.choice((1, 4, 8, 64, rng.randrange(1, 256)))
    data[at:at] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))


def _swap(rng: random.Random, data: bytearray, other: bytes) -> None:
    size = rng.choice((1, 2, 4, 8, 16, 64, 256))
    first, second = (rng.randrange(max(1, len(data) - size)) for _ in range(2))
    if abs(first - second) >= size:
        one, two = data[first : first + size], data[second : second + size]
        data[first : first + size], data[second : second + size] = two, one


def _copy_over(rng: random.Random, data: bytearray, other: bytes) -> None:
    size = rng.choice((2, 4, 8, 16, 64, 256))
    source, target = (rng.randrange(max(1, len(data) - size)) for _ in range(2))
    data[target : target + size] = data[source : source + size]


def _blank(rng: random.Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((4, 8, 64, 512)))
    data[start:end] = rng.choice((b"\0", b"\xff")) * (end - start)


def _attack_number(rng: random.Random, data: bytearray, other: bytes) -> None:
    """Put an extreme where a length, a count or an offset may stand."""
    form = rng.choice(_NUMBER_FORMATS)
    size = struct.calcsize(form)
    if len(data) >= size:
        at = rng.randrange(len(data) - size + 1)
        if rng.random() < 0.7:
            at -= at % min(size, 4)
        value = rng.choice((rng.choice(EDGES), 2 ** rng.choice(POWERS), len(data)))
        value += rng.choice((-1, 0, 0, 1))
        struct.pack_into(form, data, at, value % 2 ** (8 * size))


def _nudge_number(rng: random.Random, data: bytearray, other: bytes) -> None:
    """Move a number a little: offsets into the neighbour, counts off by one."""
    if len(data) >= 4:
        at = rng.randrange(len(data) - 3) & ~3
        value = struct.unpack_from("<I", data, at)[0] + rng.choice((-64, -8, -4, -1, 1, 4, 8, 64))
        struct.pack_into("<I", data, at, value % 2**32)


def _splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    at, start = rng.randrange(len(data)), rng.randrange(max(1, len(other)))
    data[at:] = other[start:]


def _graft(rng: random.Random, data: bytearray, other: bytes) -> None:
    """Overwrite a piece with a piece of another file, keeping the length."""
    size = min(rng.choice((8, 64, 256, 1024)), len(data), len(other))
    at = rng.randrange(len(data) - size + 1)
    start = rng.randrange(len(other) - size + 1)
    data[at : at + size] = other[start : start + size]


MUTATIONS: Final[dict[Mutation, int]] = {
    _flip_bit: 6,
    _set_byte: 4,
    _attack_number: 8,
    _nudge_number: 5,
    _copy_over: 3,
    _swap: 2,
    _blank: 2,
    _graft: 2,
    _insert: 1,
    _cut_middle: 1,
    _cut_end: 1,
    _splice: 1,
}
"""Those that keep the framing intact are tried more often: they reach deeper."""


def mutate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Damage the bytes in one place, or in a few."""
    damaged = bytearray(data)
    for mutation in rng.choices(
        list(MUTATIONS), list(MUTATIONS.values()), k=rng.choice((1, 1, 1, 1, 2, 2, 3))
    ):
        if damaged:
            mutation(rng, damaged, other)
    return bytes(damaged)


# --- sums --------------------------------------------------------------------------------------


def resum(seed: Seed, data: bytes) -> bytes:
    """Correct all sums that can be found, so that the damage reaches the decoders behind them."""
    fixed = bytearray(data)
    if seed.kind == "wal":
        _resum_entries(fixed)
    elif seed.kind == "cursor" and len(fixed) >= 24:
        size = struct.unpack_from("<H", fixed, 10)[0]
        _put_sum(fixed, 0, size - 4 if 24 <= size <= len(fixed) else 20)
    elif seed.kind == "progress" and len(fixed) >= 4:
        _put_sum(fixed, 0, len(fixed) - 4)
    elif seed.kind == "segment":
        _resum_segment(seed, fixed)
    return bytes(fixed)


def _put_sum(data: bytearray, start: int, end: int) -> None:
    struct.pack_into("<I", data, end, zlib.crc32(memoryview(data)[start:end]))


def _resum_entries(data: bytearray) -> None:
    offset = 38
    while offset + 8 <= len(data):
        end = offset + 4 + struct.unpack_from("<I", data, offset)[0]
        if end + 4 > len(data):
            return
        _put_sum(data, offset + 4, end)
        offset = end + 4


def _resum_segment(seed: Seed, data: bytearray) -> None:
    for item in seed.stream_sums:
        if max(item.end, item.sum_at + 4) <= len(data):
            value = zlib.crc32(memoryview(data)[item.start : item.end])
            struct.pack_into("<I", data, item.sum_at, value)
    if len(data) < 16:
        return
    footer_size = struct.unpack_from("<I", data, len(data) - 16)[0]
    footer = len(data) - 16 - footer_size
    if footer >= 0 and footer_size >= 42 and data[footer + 34 : footer + 38] == b"QMC1":
        directory, length, manifest, size = struct.unpack_from("<QIQI", data, footer + 10)
        summed = data[directory : directory + length] + data[manifest : manifest + size]
        value = zlib.crc32(summed + data[footer : footer + 34])
        struct.pack_into("<I", data, footer + 38, value)
    _put_sum(data, 0, len(data) - 4)


# --- cases -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Damaged bytes, and where they come from."""

    kind: str
    origin: str
    data: bytes


def case(run_seed: int, kind: str, number: int) -> Case:
    """One case of a run. Two of three have their sums corrected."""
    rng = random.Random(f"{run_seed}/{kind}/{number}")
    seed = rng.choice(seeds()[kind])
    other = rng.choice(seeds()[kind if rng.random() < 0.8 else rng.choice(list(seeds()))])
    data = mutate(rng, seed.data, other.data)
    if rng.random() < 2 / 3:
        data = resum(seed, data)
    return Case(kind, seed.name, data)
