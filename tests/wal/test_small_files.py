"""The WAL header and the cursor: their bytes, their limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.checksum import crc32
from quiver.errors import ChecksumMismatch, FormatError, Truncated, UnsupportedVersion
from quiver.testing import SimulatedDisk
from quiver.wal.cursor import decode_cursor, encode_cursor, load_cursor, store_cursor
from quiver.wal.header import HEADER_SIZE, WalHeader, decode_header, encode_header

POSITIONS = st.integers(0, 2**62)
HEADER_AT_0 = "5155495645520057414c010026005155495645525f5345474346470000000000000000000000"
CURSOR_AT_128 = "51554956455200540100180080000000000000006df90d37"


def _with_sum(body: bytes) -> bytes:
    return body + crc32(body).to_bytes(4, "little")


def test_header_has_the_bytes_of_the_reference() -> None:
    assert encode_header(WalHeader(0)).hex() == HEADER_AT_0


@given(POSITIONS, st.binary(max_size=50))
def test_header_round_trip(position: int, behind: bytes) -> None:
    data = encode_header(WalHeader(position)) + behind
    assert decode_header(data, source="f") == WalHeader(position, HEADER_SIZE)


def test_a_larger_header_is_skipped_to_its_end() -> None:
    data = bytearray(encode_header(WalHeader(7)) + b"more")
    data[12] = 42
    assert decode_header(data, source="f") == WalHeader(7, 42)


@pytest.mark.parametrize(
    ("offset", "value", "error", "reason"),
    [
        (0, b"Q" * 10, FormatError, "starts with"),
        (10, b"\x02\x00", UnsupportedVersion, "version 2"),
        (12, b"\x25\x00", FormatError, "header_size 37"),
        (12, b"\xff\xff", Truncated, "needs 65535 bytes"),
        (14, b"x" * 16, FormatError, "another slot layout"),
    ],
)
def test_headers_that_are_refused(
    offset: int, value: bytes, error: type[FormatError], reason: str
) -> None:
    data = bytearray(encode_header(WalHeader(0)))
    data[offset : offset + len(value)] = value
    with pytest.raises(error, match=reason) as caught:
        decode_header(data, source="some.wal")
    assert caught.value.source == "some.wal"
    assert caught.value.offset == offset


def test_a_short_header_is_truncated() -> None:
    with pytest.raises(Truncated, match="needs 38 bytes, only 37 are left"):
        decode_header(encode_header(WalHeader(0))[:-1], source="f")


def test_cursor_has_the_bytes_of_the_reference() -> None:
    assert encode_cursor(128).hex() == CURSOR_AT_128


@given(POSITIONS)
def test_cursor_round_trip(position: int) -> None:
    assert decode_cursor(encode_cursor(position), source="f") == position


def test_a_cursor_of_a_later_version_is_understood() -> None:
    later = bytearray(encode_cursor(99)[:-4] + b"new field")
    later[8] = 2
    later[10] = len(later) + 4
    assert decode_cursor(_with_sum(bytes(later)), source="f") == 99


@pytest.mark.parametrize(
    ("offset", "value", "error"),
    [
        (0, b"X", FormatError),
        (8, b"\x00", UnsupportedVersion),
        (10, b"\x19", FormatError),
        (10, b"\x17", FormatError),
    ],
)
def test_cursors_that_are_refused(offset: int, value: bytes, error: type[FormatError]) -> None:
    body = bytearray(encode_cursor(5)[:-4])
    body[offset : offset + 1] = value
    with pytest.raises(error) as caught:
        decode_cursor(_with_sum(bytes(body)), source="f")
    assert caught.value.offset == offset


@given(st.integers(0, 24 * 8 - 1))
def test_any_changed_bit_of_a_cursor_is_noticed(bit: int) -> None:
    data = bytearray(encode_cursor(5))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        decode_cursor(data, source="f")


def test_cursor_sum_is_verified() -> None:
    data = bytearray(encode_cursor(5))
    data[12] ^= 1
    with pytest.raises(ChecksumMismatch, match="the cursor has checksum"):
        decode_cursor(data, source="f")


def test_cursor_on_disk() -> None:
    disk = SimulatedDisk()
    directory = Path("/wal")
    disk.make_directory(directory)
    assert load_cursor(disk, directory) is None
    store_cursor(disk, directory, 7)
    store_cursor(disk, directory, 8)
    assert load_cursor(disk, directory) == 8
    assert disk.list_directory(directory) == ["quiver.wal.cursor"]
