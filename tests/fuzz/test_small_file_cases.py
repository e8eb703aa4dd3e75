"""Cursors and progress files that are wrong, or newer than we are, in one way each."""

from __future__ import annotations

import struct
import zlib

import pytest
from tests.fuzz.decoders import SOURCE, check_error

from quiver.errors import (
    ChecksumMismatch,
    FormatError,
    InvalidBundle,
    LimitExceeded,
    Truncated,
    UnsupportedVersion,
)
from quiver.subscriber.progress import (
    MAX_BUNDLES,
    Progress,
    SegmentProgress,
    decode_progress,
    encode_progress,
)
from quiver.wal.cursor import decode_cursor, encode_cursor


def summed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


# --- cursor ------------------------------------------------------------------------------------


def cursor(version: int, size: int, *, position: int = 128, more: bytes = b"") -> bytes:
    return summed(struct.pack("<8sHHQ", b"QUIVER\0T", version, size, position) + more)


def cursor_error(data: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        decode_cursor(data, source=SOURCE)
    check_error(caught.value)
    return caught.value


def test_a_later_version_may_be_longer() -> None:
    assert decode_cursor(cursor(2, 32, more=bytes(8)), source=SOURCE) == 128
    assert decode_cursor(cursor(2, 24), source=SOURCE) == 128
    assert decode_cursor(cursor(65_535, 65_535, more=bytes(65_511)), source=SOURCE) == 128


def test_version_1_has_one_size() -> None:
    assert "cannot have size 25" in cursor_error(cursor(1, 25, more=b"\0")).reason
    assert "cannot have size 32" in cursor_error(cursor(1, 32, more=bytes(8))).reason


def test_a_later_version_is_not_shorter() -> None:
    assert "cannot have size 23" in cursor_error(cursor(2, 23)).reason
    assert "cannot have size 0" in cursor_error(cursor(2, 0)).reason


def test_version_0_does_not_exist() -> None:
    assert isinstance(cursor_error(cursor(0, 24)), UnsupportedVersion)


def test_a_size_beyond_the_file() -> None:
    assert isinstance(cursor_error(cursor(2, 33, more=bytes(8))), Truncated)


@pytest.mark.parametrize("size", range(24))
def test_a_cursor_that_is_cut_short(size: int) -> None:
    assert isinstance(cursor_error(encode_cursor(7)[:size]), Truncated)


@pytest.mark.parametrize("bit", range(24 * 8))
def test_no_flipped_bit_of_a_cursor_goes_unseen(bit: int) -> None:
    data = bytearray(encode_cursor(2**63 + 1))
    data[bit // 8] ^= 1 << bit % 8
    cursor_error(bytes(data))


def test_bytes_behind_the_cursor_are_ignored() -> None:
    assert decode_cursor(encode_cursor(7) + b"more", source=SOURCE) == 7


# --- progress ----------------------------------------------------------------------------------


def progress(
    entries: bytes = b"",
    *,
    count: int = 0,
    version: int = 1,
    header_size: int = 32,
    flags: int = 0,
    oldest: int = 0,
) -> bytes:
    fields = version, header_size, flags, oldest, count
    return summed(struct.pack("<8sHHHQI6x", b"QUIVSUB\0", *fields) + entries)


def segment(number: int, bundles: int, words: int, bitmap: bytes = b"") -> bytes:
    return struct.pack("<QIH", number, bundles, words) + bitmap


def progress_error(data: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        decode_progress(data, source=SOURCE)
    check_error(caught.value)
    return caught.value


@pytest.mark.parametrize("count", [1_000_001, 2**31, 0xFFFFFFFF])
def test_more_segments_than_are_read(count: int) -> None:
    assert isinstance(progress_error(progress(count=count)), LimitExceeded)


@pytest.mark.parametrize("count", [1, 2, 999_999])
def test_more_segments_than_there_are(count: int) -> None:
    assert isinstance(progress_error(progress(count=count)), Truncated)
    one = segment(0, 4, 1, bytes(8))
    assert isinstance(progress_error(progress(one, count=count + 1)), Truncated)


@pytest.mark.parametrize(
    ("bundles", "words"), [(0, 1), (1, 0), (64, 2), (65, 1), (4, 1024), (2**32 - 1, 65_535)]
)
def test_a_bitmap_that_does_not_fit_its_bundles(bundles: int, words: int) -> None:
    data = progress(segment(0, bundles, words, bytes(8 * min(words, 2000))), count=1)
    assert f"{words} bitmap words for {bundles} bundles" in progress_error(data).reason


def test_a_segment_with_more_bundles_than_a_bitmap_addresses() -> None:
    """The reference writes such files and loses the progress; this one is refused as well."""
    data = progress(segment(0, 70_000, 1_094, bytes(8 * 1_094)), count=1)
    assert "70000 bundles" in progress_error(data).reason
    with pytest.raises(InvalidBundle):
        SegmentProgress(0, 70_000)
    largest = Progress((SegmentProgress(0, MAX_BUNDLES, 1 << (MAX_BUNDLES - 1)),))
    assert decode_progress(encode_progress(largest), source=SOURCE) == largest


def test_a_bitmap_that_is_cut_off() -> None:
    assert isinstance(progress_error(progress(segment(0, 65, 2, bytes(15)), count=1)), Truncated)


@pytest.mark.parametrize(("first", "second"), [(5, 5), (5, 4), (2**64 - 1, 0)])
def test_segments_that_are_not_in_order(first: int, second: int) -> None:
    entries = segment(first, 4, 1, bytes(8)) + segment(second, 4, 1, bytes(8))
    assert "is listed after" in progress_error(progress(entries, count=2)).reason


def test_flags_are_kept() -> None:
    decoded = decode_progress(progress(flags=0xA005), source=SOURCE)
    assert decoded.flags == 0xA005
    assert decoded.flag_names() == ["bit 0", "bit 2", "bit 13", "bit 15"]
    assert encode_progress(decoded) == progress(flags=0xA005)


def test_what_a_larger_header_adds_is_kept() -> None:
    entries = segment(7, 4, 1, b"\x0b" + bytes(7))
    data = progress(b"extension" + entries, count=1, header_size=41, oldest=7)
    decoded = decode_progress(data, source=SOURCE)
    assert decoded == Progress((SegmentProgress(7, 4, 0xB),), 7, 0, b"extension")
    assert encode_progress(decoded) == data


@pytest.mark.parametrize("size", [0, 31, 33, 65_535])
def test_a_header_size_that_cannot_be(size: int) -> None:
    assert "header_size" in progress_error(progress(header_size=size)).reason


@pytest.mark.parametrize("version", [0, 2, 65_535])
def test_a_version_that_is_not_known(version: int) -> None:
    assert isinstance(progress_error(progress(version=version)), UnsupportedVersion)


def test_bytes_behind_the_last_segment_are_ignored() -> None:
    assert decode_progress(progress(b"left over"), source=SOURCE) == Progress()


def test_bits_behind_the_last_bundle_are_ignored() -> None:
    decoded = decode_progress(progress(segment(0, 4, 1, b"\xff" * 8), count=1), source=SOURCE)
    assert decoded.entries == (SegmentProgress(0, 4, 0b1111),)


def test_no_flipped_bit_of_a_progress_file_goes_unseen() -> None:
    good = encode_progress(Progress((SegmentProgress(3, 130, 5),), 3))
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        error = progress_error(bytes(data))
        assert isinstance(error, ChecksumMismatch) or "starts with" in error.reason


def test_no_beginning_of_a_progress_file_is_one() -> None:
    good = encode_progress(Progress((SegmentProgress(3, 130, 5),), 3))
    for size in range(len(good)):
        progress_error(good[:size])
