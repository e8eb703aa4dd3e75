"""Batches: the bytes of the other implementation, what comes back, and what is refused."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from quiver.buffer.batch import batch_crc32c, decode_batch, encode_batch
from quiver.config import BatchCompression
from quiver.errors import FormatError, LimitExceeded, Truncated, UnsupportedVersion

GOLDEN = Path(__file__).parents[1] / "golden" / "buffer"
SOURCE = "ingest/some.batch"
LIMIT = 2**20
NONE, ZSTD = BatchCompression.NONE, BatchCompression.ZSTD


def decode(data: bytes, limit: int = LIMIT) -> tuple[bytes, ...]:
    return decode_batch(data, source=SOURCE, limit=limit)


def framed(*records: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(record)) + record for record in records)


def footer(compression: int, count: int, version: int = 1) -> bytes:
    return struct.pack("<BIH", compression, count, version)


def zstd(raw: bytes) -> bytes:
    """A frame with its size."""
    return zstandard.ZstdCompressor(level=3).compress(raw)


def unsized(raw: bytes) -> bytes:
    """A frame without its size."""
    writer = zstandard.ZstdCompressor(level=3).compressobj()
    frame = writer.compress(raw) + writer.flush()
    assert zstandard.get_frame_parameters(frame).content_size == zstandard.CONTENTSIZE_UNKNOWN
    return frame


def skippable(content: bytes) -> bytes:
    return struct.pack("<II", 0x184D2A50, len(content)) + content


# --- what comes back ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "records"), [("B0_empty", ()), ("B1_none", (b"hello", b"", b"wor"))]
)
def test_bytes_of_the_other_implementation(name: str, records: tuple[bytes, ...]) -> None:
    data = (GOLDEN / f"{name}.bin").read_bytes()
    assert encode_batch(records, NONE) == data
    assert decode(data) == records


@given(st.lists(st.binary(max_size=300)), st.sampled_from(BatchCompression))
def test_records_come_back(records: list[bytes], compression: BatchCompression) -> None:
    data = encode_batch(records, compression)
    assert decode(data) == tuple(records)
    assert data[-7:] == footer(1 if compression is ZSTD else 0, len(records))


def test_a_compressed_block_is_one_frame_that_tells_its_size() -> None:
    data = encode_batch([b"a" * 5000, b"b"], ZSTD)
    assert zstandard.ZstdDecompressor().decompress(data[:-7], allow_extra_data=False) == framed(
        b"a" * 5000, b"b"
    )


FIRST, SECOND = framed(b"one", b""), framed(b"two" * 5000)


@pytest.mark.parametrize(
    "block",
    [
        zstd(FIRST + SECOND),
        unsized(FIRST + SECOND),
        zstd(FIRST) + zstd(SECOND),
        unsized(FIRST) + unsized(SECOND),
        zstd(FIRST) + unsized(SECOND),
        zstd(FIRST + SECOND[:9]) + zstd(SECOND[9:]),
        skippable(b"") + zstd(FIRST + SECOND),
        skippable(b"x" * 3000) + zstd(FIRST) + skippable(b"y") + zstd(SECOND) + skippable(b"z"),
        zstd(b"") + zstd(FIRST + SECOND) + zstd(b""),
    ],
)
def test_frames_that_others_may_write(block: bytes) -> None:
    assert decode(block + footer(1, 3)) == (b"one", b"", b"two" * 5000)


def test_bytes_after_the_last_record_are_ignored() -> None:
    assert decode(framed(b"one") + b"extension" + footer(0, 1)) == (b"one",)
    assert decode(framed(b"one", b"two") + footer(0, 1)) == (b"one",)
    assert decode(b"extension" + footer(0, 0)) == ()
    assert decode(zstd(framed(b"one") + b"extension") + footer(1, 1)) == (b"one",)


def test_a_compressed_block_may_be_empty() -> None:
    assert decode(footer(1, 0)) == ()
    assert decode(zstd(b"") + footer(1, 0)) == ()


def test_the_sum_is_crc32c() -> None:
    assert batch_crc32c(b"123456789") == 0xE3069283
    assert batch_crc32c(b"") == 0


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "error", "offset"),
    [
        (b"", Truncated, 0),
        (footer(0, 0)[1:], Truncated, 0),
        (framed(b"one") + footer(0, 1, version=2), UnsupportedVersion, 12),
        (framed(b"one") + footer(0, 1, version=0x0101), UnsupportedVersion, 12),
        (framed(b"one") + footer(2, 1), UnsupportedVersion, 7),
        (framed(b"one") + footer(0, 2), LimitExceeded, 7),
        (framed(b"onetwo") + footer(0, 2), Truncated, 10),
        (framed(b"one") + b"\x01\x00\x00" + footer(0, 2), Truncated, 7),
        (framed(b"one") + framed(b"two")[:-1] + footer(0, 2), Truncated, 11),
        (framed(b"one") + footer(0, 2**32 - 1), LimitExceeded, 7),
        (b"\xff\xff\xff\xff" + footer(0, 1), Truncated, 4),
        (zstd(framed(b"one")) + footer(1, 2**32 - 1), LimitExceeded, 7),
        (zstd(framed(b"one")[:-1]) + footer(1, 1), Truncated, 4),
    ],
)
def test_damage_is_refused(data: bytes, error: type[FormatError], offset: int) -> None:
    with pytest.raises(error) as caught:
        decode(data)
    assert type(caught.value) is error
    assert (caught.value.source, caught.value.offset) == (SOURCE, offset)


@pytest.mark.parametrize("make", [zstd, unsized])
def test_no_cut_frame_is_taken(make: Callable[[bytes], bytes]) -> None:
    """Even where all records are there: only the end of the frame tells that nothing is missing."""
    raw = framed(b"one", b"two" * 40) + b"x" * 200
    block = make(raw)
    for size in range(1, len(block)):
        with pytest.raises(FormatError):
            decode(block[:size] + footer(1, 2))
        with pytest.raises(FormatError):
            decode(block + block[:size] + footer(1, 2))


@pytest.mark.parametrize("block", [b"x", b"not zstd at all", zstd(FIRST) + b"junk", bytes(2000)])
def test_a_block_that_is_not_zstd(block: bytes) -> None:
    with pytest.raises(FormatError):
        decode(block + footer(1, 1))


def test_limits_count_what_is_stored_and_what_it_becomes() -> None:
    plain = encode_batch([b"a" * 1000], NONE)
    assert decode(plain, limit=len(plain)) == (b"a" * 1000,)
    with pytest.raises(LimitExceeded):
        decode(plain, limit=len(plain) - 1)
    for make in (zstd, unsized):
        packed = make(framed(b"a" * 1000)) + footer(1, 1)
        assert decode(packed, limit=1004) == (b"a" * 1000,)
        with pytest.raises(LimitExceeded):
            decode(packed, limit=1003)
        with pytest.raises(LimitExceeded):
            decode(packed[:-7] + packed, limit=2007)


@pytest.mark.parametrize("make", [zstd, unsized])
def test_a_bomb_is_refused_before_it_is_in_memory(make: Callable[[bytes], bytes]) -> None:
    bomb = make(bytes(400 * 2**20)) + footer(1, 1)
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded):
            decode(bomb)
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()


def test_a_claim_above_the_limit_is_refused_without_a_try() -> None:
    bomb = zstd(bytes(4 * 2**20))
    with pytest.raises(LimitExceeded, match="claims 4194304 bytes") as caught:
        decode(bomb + footer(1, 1))
    assert caught.value.offset == 0


def test_a_claimed_size_is_not_allocated() -> None:
    """A few bytes that claim to be a gigabyte, within the limit."""
    claim = struct.pack("<IBQ", 0xFD2FB528, 0xE0, 2**30) + b"\x01\x00\x00"
    assert zstandard.get_frame_parameters(claim).content_size == 2**30
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode(claim + footer(1, 1), limit=2**30)
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()


def test_a_record_that_is_too_long_is_not_written() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return 2**32

    with pytest.raises(LimitExceeded):
        encode_batch([Long()], NONE)
