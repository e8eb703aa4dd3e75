"""Entries and headers of the log that are wrong in one way each."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.fuzz.corpus import batches, frame, wal_entry, wal_file
from tests.fuzz.decoders import SOURCE, check_error, exercise
from tests.fuzz.segments import ipc_stream

from quiver.bundle import RecordBundle
from quiver.config import WalConfig
from quiver.disk import RealDisk
from quiver.errors import (
    FormatError,
    InvalidBundle,
    Truncated,
    UnsupportedVersion,
)
from quiver.ipc import Validation
from quiver.ipc_guard import MAX_DICTIONARIES
from quiver.wal.cursor import encode_cursor
from quiver.wal.entry import MAX_ENTRY_SIZE, MAX_SEQUENCE, WalEntry, decode_body, prepare_entry
from quiver.wal.header import HEADER_SIZE, WalHeader, decode_header, encode_header
from quiver.wal.replay import ReplayedEntry
from quiver.wal.scan import Damaged, Found, Scanned, Skipped, scan
from quiver.wal.writer import WalWriter

ROWS = 3
PAYLOAD = ipc_stream(batches()["flat"])


def entry(sequence: int = 0) -> bytes:
    return wal_entry(sequence, {5: (ROWS, PAYLOAD)})


def head(bitmap: int, *, kind: int = 0, time_ns: int = 1, sequence: int = 0) -> bytes:
    return struct.pack("<BqQQ", kind, time_ns, sequence, bitmap)


def slot(number: int, payload: bytes = PAYLOAD, *, rows: int = ROWS, size: int = -1) -> bytes:
    length = len(payload) if size < 0 else size
    return struct.pack("<H32sII", number, bytes(32), rows, length) + payload


def scanned(data: bytes) -> list[Scanned]:
    exercise("wal", encode_header(WalHeader(0)) + data)
    return list(scan(pa.py_buffer(data), 0, source=SOURCE))


def decoded(body: bytes) -> WalEntry:
    return decode_body(pa.py_buffer(body), 0, len(body), source=SOURCE)


def refused(body: bytes) -> FormatError:
    """Why ``decode_body`` does not take a body; a scan reports it as damage."""
    with pytest.raises(FormatError) as caught:
        decoded(body)
    check_error(caught.value)
    (item,) = scanned(frame(body))
    assert isinstance(item, Damaged)
    assert item.torn
    assert caught.value.reason in item.reason
    return caught.value


# --- lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length", [0, 0xFFFFFFFF, MAX_ENTRY_SIZE + 1, MAX_ENTRY_SIZE, 2**31, len(entry()) + 1]
)
def test_a_length_that_cannot_be_is_damage_to_the_end_of_the_file(length: int) -> None:
    data = struct.pack("<I", length) + entry()[4:]
    assert [item[:2] for item in scanned(data)] == [(0, len(data))]
    (item,) = scanned(data)
    assert isinstance(item, Damaged)
    assert item.torn


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF, MAX_ENTRY_SIZE + 1, 2**31])
def test_entries_behind_a_length_that_cannot_be_are_found(length: int) -> None:
    data = struct.pack("<I", length) + entry(1)[4:] + entry(2)
    damaged, found = scanned(data)
    assert isinstance(damaged, Damaged)
    assert not damaged.torn
    assert isinstance(found, Found)
    assert found.entry.sequence == 2


def test_an_entry_above_the_limit_is_not_read_even_if_its_sum_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quiver.wal.scan.MAX_ENTRY_SIZE", 100)
    fits, large = frame(b"\x09" + bytes(99)), frame(b"\x09" + bytes(100))
    assert scanned(fits) == [Skipped(0, 108, 9)]
    (item,) = scanned(large)
    assert isinstance(item, Damaged)


@pytest.mark.parametrize("size", [*range(1, 40), len(entry()) - 1])
def test_an_entry_that_is_cut_short_is_a_torn_tail(size: int) -> None:
    found, torn = scanned(entry() + entry(1)[:size])
    assert isinstance(found, Found)
    assert torn[:2] == (len(entry()), len(entry()) + size)
    assert isinstance(torn, Damaged)
    assert torn.torn


def test_no_flipped_bit_of_an_entry_goes_unseen() -> None:
    good = entry()
    for bit in range(0, 8 * len(good), 5):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        items = scan(pa.py_buffer(bytes(data)), 0, source=SOURCE)
        assert all(isinstance(item, Damaged) for item in items), f"bit {bit}"


def test_a_body_shorter_than_its_head() -> None:
    assert isinstance(refused(head(0)[:-1]), Truncated)
    assert isinstance(refused(b"\0"), Truncated)


def test_an_empty_bundle_is_an_entry() -> None:
    assert decoded(head(0)).bundle().payloads == {}


@pytest.mark.parametrize(
    "count",
    [
        10,
        100,
        1000,
    ],
)
def test_a_long_run_of_damage_does_not_hide_what_comes_after_more_of_it(count: int) -> None:
    """Looking for the next entry has a budget. It must do for damage as disks make it."""
    bad = [entry(i)[:-6] + b"damage" for i in range(count + 2)]
    data = b"".join(bad[:count]) + entry(count) + bad[count + 1] + entry(count + 2)
    found = [item.entry.sequence for item in scanned(data) if isinstance(item, Found)]
    assert found == [count, count + 2]


# --- slots -------------------------------------------------------------------------------------


def test_a_bitmap_that_announces_more_slots_than_there_are() -> None:
    assert isinstance(refused(head(0b11) + slot(0)), Truncated)
    assert isinstance(refused(head(2**64 - 1) + slot(0)), Truncated)


def test_a_bitmap_that_announces_fewer_slots_than_there_are() -> None:
    assert "behind the last slot" in refused(head(0b1) + slot(0) + slot(1)).reason
    assert "behind the last slot" in refused(head(0) + slot(0)).reason


@pytest.mark.parametrize("numbers", [(0, 0), (0, 2), (1, 64), (65_535, 0)])
def test_slots_that_the_bitmap_does_not_announce(numbers: tuple[int, int]) -> None:
    body = head(0b11) + slot(numbers[0]) + slot(numbers[1])
    assert "the bitmap announces" in refused(body).reason


@pytest.mark.parametrize("size", [len(PAYLOAD) + 1, 2**31, 2**32 - 1])
def test_a_payload_that_reaches_behind_the_entry(size: int) -> None:
    error = refused(head(0b1) + slot(0, size=size))
    assert isinstance(error, Truncated)
    assert (error.need, error.have) == (size, len(PAYLOAD))


def test_trailing_bytes() -> None:
    assert "1 bytes behind the last slot" in refused(head(0b1) + slot(0) + b"\0").reason


@pytest.mark.parametrize("rows", [0, ROWS - 1, ROWS + 1, 2**32 - 1])
def test_a_row_count_that_lies(rows: int) -> None:
    with pytest.raises(FormatError, match=f"says {rows} rows and holds 3") as caught:
        decoded(head(0b1) + slot(0, rows=rows)).bundle()
    check_error(caught.value)


@pytest.mark.parametrize("payload", [b"", b"\0" * 8, b"\xff" * 8, PAYLOAD[:40], PAYLOAD[8:]])
def test_a_payload_that_is_no_stream(payload: bytes) -> None:
    entry_of_junk = decoded(head(0b1) + slot(0, payload))
    with pytest.raises(FormatError) as caught:
        entry_of_junk.bundle()
    check_error(caught.value)
    assert caught.value.offset >= len(head(0)) + 42


def test_a_slot_that_cannot_be_read_does_not_take_its_entry_out_of_the_scan() -> None:
    bad = wal_entry(0, {1: (ROWS, PAYLOAD), 2: (ROWS, b"no stream")})
    first, second = scanned(bad + entry(1))
    assert isinstance(first, Found)
    assert isinstance(second, Found)


# --- types, times, numbers ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [1, 127, 128, 255])
def test_entries_of_unknown_type_are_skipped(kind: int) -> None:
    unknown = frame(head(0, kind=kind) + b"anything")
    skipped, found = scanned(unknown + entry(1))
    assert skipped == Skipped(0, len(unknown), kind)
    assert isinstance(found, Found)


@pytest.mark.parametrize("time_ns", [-1, -(2**63)])
def test_a_time_before_1970_counts_as_1970(time_ns: int) -> None:
    assert decoded(head(0, time_ns=time_ns)).ingestion_time_ns == 0
    assert decoded(head(0, time_ns=time_ns)).bundle().ingestion_time_ns == 0


def test_the_largest_numbers_are_read() -> None:
    largest = decoded(head(0, time_ns=2**63 - 1, sequence=MAX_SEQUENCE))
    assert largest.sequence == MAX_SEQUENCE
    assert largest.bundle().ingestion_time_ns == 2**63 - 1


@pytest.mark.parametrize("sequence", [MAX_SEQUENCE + 1, 2**64 - 1])
def test_a_sequence_number_that_leaves_no_room_for_the_next(sequence: int) -> None:
    assert "is not possible" in refused(head(0, sequence=sequence)).reason


# --- headers -----------------------------------------------------------------------------------


def header(*, version: int = 1, size: int = HEADER_SIZE) -> bytes:
    return struct.pack("<10sHH16sQ", b"QUIVER\0WAL", version, size, b"QUIVER_SEGCFG\0\0\0", 9)


def test_a_larger_header_is_skipped() -> None:
    data = header(size=65_535) + bytes(65_535 - HEADER_SIZE) + entry()
    assert decode_header(data, source=SOURCE) == WalHeader(9, 65_535)
    (found,) = scan(pa.py_buffer(data), 65_535, source=SOURCE)
    assert isinstance(found, Found)


def test_a_larger_header_that_is_not_there() -> None:
    with pytest.raises(Truncated) as caught:
        decode_header(header(size=65_535) + bytes(65_535 - HEADER_SIZE - 1), source=SOURCE)
    assert (caught.value.need, caught.value.have) == (65_535, 65_534)


@pytest.mark.parametrize("size", [0, 13, 14, 37])
def test_a_header_size_below_the_header(size: int) -> None:
    with pytest.raises(FormatError, match=f"header_size {size} is below 38"):
        decode_header(header(size=size), source=SOURCE)


@pytest.mark.parametrize("version", [0, 2, 65_535])
def test_a_version_that_is_not_known(version: int) -> None:
    with pytest.raises(UnsupportedVersion):
        decode_header(header(version=version), source=SOURCE)


def test_another_slot_layout_is_refused_with_advice() -> None:
    with pytest.raises(FormatError, match="drain this log with the program that wrote it"):
        decode_header(header().replace(b"SEGCFG", b"OTHERS"), source=SOURCE)


# --- opening a log with such numbers -----------------------------------------------------------


def test_a_log_opens_whatever_position_a_file_claims(tmp_path: Path) -> None:
    (tmp_path / "quiver.wal.1").write_bytes(wal_file(entry(0), position=2**64 - 1))
    (tmp_path / "quiver.wal").write_bytes(wal_file(entry(1)))
    WalWriter.open(RealDisk(), tmp_path).close()


@pytest.mark.parametrize("sequence", [MAX_SEQUENCE, 2**64 - 1])
def test_a_log_takes_entries_after_a_very_large_sequence_number(
    tmp_path: Path, sequence: int
) -> None:
    (tmp_path / "quiver.wal").write_bytes(wal_file(entry(sequence)))
    writer = WalWriter.open(RealDisk(), tmp_path)
    writer.append([prepare_entry(decoded(head(0b1) + slot(0)).bundle())])
    writer.close()
    assert WalWriter.open(RealDisk(), tmp_path).next_sequence == writer.next_sequence


@pytest.mark.parametrize("position", [2**61, 2**63, 2**64 - 1])
def test_a_log_takes_entries_and_a_cursor_whatever_position_it_claims(
    tmp_path: Path, position: int
) -> None:
    (tmp_path / "quiver.wal").write_bytes(wal_file(entry(0), position=position))
    writer = WalWriter.open(RealDisk(), tmp_path, WalConfig(rotation_target=1))
    for _ in range(3):
        writer.append([prepare_entry(decoded(head(0b1) + slot(0)).bundle())])
    writer.advance_cursor(writer.end_position)
    writer.close()
    assert WalWriter.open(RealDisk(), tmp_path).end_position == writer.end_position


@pytest.mark.parametrize(
    "position",
    [
        2**61,
        2**63,
        2**64 - 1,
    ],
)
def test_a_log_takes_entries_whatever_position_its_cursor_claims(
    tmp_path: Path, position: int
) -> None:
    (tmp_path / "quiver.wal").write_bytes(wal_file(entry(0)))
    (tmp_path / "quiver.wal.cursor").write_bytes(encode_cursor(position))
    writer = WalWriter.open(RealDisk(), tmp_path, WalConfig(rotation_target=1))
    for _ in range(3):
        writer.append([prepare_entry(decoded(head(0b1) + slot(0)).bundle())])
    writer.advance_cursor(writer.end_position)
    writer.close()


def test_no_flipped_bit_of_a_header_hides_entries_behind_the_cursor(tmp_path: Path) -> None:
    """The header has no sum. Entries may come twice for it, but each comes."""
    hidden = []
    for bit in (*range(8 * 12), *range(8 * 14, 8 * HEADER_SIZE)):  # all but header_size
        data = bytearray(wal_file(*(entry(i) for i in range(7, 10)), position=5000))
        data[bit // 8] ^= 1 << bit % 8
        directory = tmp_path / str(bit)
        directory.mkdir()
        (directory / "quiver.wal").write_bytes(data)
        (directory / "quiver.wal.cursor").write_bytes(encode_cursor(5000))
        seen: list[ReplayedEntry] = []
        WalWriter.open(RealDisk(), directory, on_entry=seen.append).close()
        if [item.entry.sequence for item in seen] != [7, 8, 9]:
            hidden.append(bit)
    assert hidden == []


# --- what the log takes, it gives back ---------------------------------------------------------


def stored_and_read(array: pa.Array[Any], columns: int = 1) -> None:
    """A bundle is refused when it is handed in, or can be read for ever."""
    batch = pa.RecordBatch.from_arrays([array] * columns, [f"c{i}" for i in range(columns)])
    try:
        pieces = prepare_entry(RecordBundle.from_batches({5: batch}, ingestion_time_ns=1)).seal(0)
    except InvalidBundle:
        return
    (found,) = scan(pa.py_buffer(b"".join(map(bytes, pieces))), 0, source=SOURCE)
    assert isinstance(found, Found)
    assert found.entry.bundle().row_count == 1


@pytest.mark.parametrize("count", [MAX_DICTIONARIES, MAX_DICTIONARIES + 1])
def test_a_batch_with_as_many_dictionaries_as_are_read_or_one_more(count: int) -> None:
    stored_and_read(pa.array(["a"]).dictionary_encode(), columns=count)


def test_text_that_was_not_valid_when_it_came_is_given_back_as_it_was() -> None:
    """A store trusts the sum, and does not lose what it took. Whoever trusts nothing is told."""
    offsets, text = pa.py_buffer(struct.pack("<2i", 0, 2)), pa.py_buffer(b"\xff\xfe")
    batch = pa.RecordBatch.from_arrays(
        [pa.Array.from_buffers(pa.string(), 1, [None, offsets, text])], ["c"]
    )
    pieces = prepare_entry(RecordBundle.from_batches({5: batch}, ingestion_time_ns=1)).seal(0)
    (found,) = scan(pa.py_buffer(b"".join(map(bytes, pieces))), 0, source=SOURCE)
    assert isinstance(found, Found)
    assert found.entry.bundle(Validation.LAYOUT).row_count == 1
    with pytest.raises(FormatError, match="not valid Arrow IPC"):
        found.entry.bundle(Validation.FULL)
