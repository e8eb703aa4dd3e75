"""Files of the reference implementation: we read them, and it would read ours.

``tests/golden/quiver`` holds files that the reference implementation wrote, and ``INDEX.json`` says
what it put into them. ``reference_reader`` is a second reader that shares no code with ours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from bundles import bundles, same_values
from hypothesis import given, settings
from tests.compat import reference_reader as reference

from quiver.bundle import RecordBundle
from quiver.config import WalConfig
from quiver.disk import RealDisk
from quiver.ipc import Validation
from quiver.segment.layout import Region
from quiver.segment.reader import SegmentReader
from quiver.segment.tables import BundleEntry
from quiver.segment.writer import OpenSegment
from quiver.subscriber.progress import (
    Progress,
    SegmentProgress,
    decode_progress,
    encode_progress,
)
from quiver.wal.cursor import CURSOR_SIZE, decode_cursor, encode_cursor
from quiver.wal.entry import prepare_entry
from quiver.wal.files import find_files
from quiver.wal.header import HEADER_SIZE, WalHeader, decode_header, encode_header
from quiver.wal.replay import ReplayedEntry, replay
from quiver.wal.scan import Found, scan
from quiver.wal.writer import WalWriter

GOLDEN = Path(__file__).parents[1] / "golden" / "quiver"
INDEX: dict[str, dict[str, Any]] = json.loads((GOLDEN / "INDEX.json").read_text())
WALS = [name for name, facts in INDEX.items() if "wal_position_start" in facts]
CURSORS = [name for name, facts in INDEX.items() if "wal_position" in facts]
PROGRESS = [name for name, facts in INDEX.items() if "hex" in facts]
SEGMENTS = [name for name, facts in INDEX.items() if "manifest" in facts]
START_NS = 1_700_000_000_000_000_000


class Slot(NamedTuple):
    """What one slot of a golden bundle holds: fingerprint (one byte, 32 times), type, values."""

    fingerprint: int
    type: pa.DataType
    values: list[Any]


def _ints(fingerprint: int, *values: int) -> Slot:
    return Slot(fingerprint, pa.int64(), list(values))


def _keys(fingerprint: int, *values: str) -> Slot:
    return Slot(fingerprint, _U8_KEYS, list(values))


def _g6(bundle: int, first: pa.DataType, second: pa.DataType) -> dict[int, Slot]:
    return {
        1: Slot(0x01, first, [f"v{bundle}_{i}" for i in range(100)]),
        2: Slot(0x02, second, ["x", "y"]),
    }


_U8_KEYS = pa.dictionary(pa.uint8(), pa.string())
_G2 = [
    {30: _ints(0xA1, 1, 2, 3), 31: _keys(0xB1, "a", "b", "a")},
    {1: _ints(0xC1, 9), 30: _ints(0xA1, 4, 5), 31: _keys(0xB1, "c", "a")},
    {60: Slot(0xD1, pa.binary(), [b"otlp-bytes"])},
    {30: _ints(0xA2, 7)},
]
_G3 = [{0: _ints(0x11, *range(i, i + 50))} for i in range(7)]
_G4 = [{0: _ints(0x00, 42)}]
CONTENT: dict[str, list[dict[int, Slot]]] = {
    "g1_wal_only/wal/quiver.wal": [{0: _ints(0x11, i, i + 1)} for i in range(3)],
    "g2_segment_progress/wal/quiver.wal": _G2,
    "g2_segment_progress/segments/0000000000000000.qseg": _G2,
    "g3_rotation/wal/quiver.wal.1": _G3[0:2],
    "g3_rotation/wal/quiver.wal.2": _G3[2:4],
    "g3_rotation/wal/quiver.wal.3": _G3[4:6],
    "g3_rotation/wal/quiver.wal": _G3[6:7],
    "g4_min_segment/wal/quiver.wal": _G4,
    "g4_min_segment/segments/0000000000000000.qseg": _G4,
    "g5_no_item_count/wal/quiver.wal": _G4,
    "g5_no_item_count/segments/0000000000000000.qseg": _G4,
    "g6_dicts/wal/quiver.wal": [
        _g6(i, _U8_KEYS, pa.dictionary(pa.int32(), pa.string())) for i in range(3)
    ],
    # The reference widens keys that no longer fit, and drops large dictionaries.
    "g6_dicts/segments/0000000000000000.qseg": [
        _g6(i, pa.dictionary(pa.uint16(), pa.string()), pa.string()) for i in range(3)
    ],
    "g7_order/wal/quiver.wal": [{31: _ints(0x31, 31), 2: _ints(0x02, 2), 30: _ints(0x30, 30)}],
}
ITEM_COUNTS: dict[str, list[int | None]] = {
    "g2_segment_progress": [3, 2, 1, 1],
    "g4_min_segment": [1],
    "g5_no_item_count": [None],
    "g6_dicts": [100, 100, 100],
}


def read(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def entries_of(data: bytes, source: str) -> list[Found]:
    start = decode_header(data, source=source).header_size
    found = []
    for item in scan(pa.py_buffer(data), start, source=source):
        assert isinstance(item, Found), item
        found.append(item)
    return found


def reader_of(data: bytes, source: str) -> SegmentReader:
    return SegmentReader(pa.py_buffer(data), source=source, validation=Validation.FULL)


def bundles_of(name: str) -> list[RecordBundle]:
    if name in SEGMENTS:
        reader = reader_of(read(name), name)
        return [reader.bundle(i) for i in range(reader.bundle_count)]
    return [found.entry.bundle() for found in entries_of(read(name), name)]


def segment_bytes(members: Iterable[RecordBundle]) -> bytes:
    segment = OpenSegment()
    for sequence, bundle in enumerate(members):
        segment.append(bundle, sequence)
    return b"".join(bytes(piece) for piece in segment.encode())


def wal_bytes(members: Iterable[RecordBundle], position: int = 0) -> bytes:
    pieces = [encode_header(WalHeader(position))]
    for sequence, bundle in enumerate(members):
        pieces += [bytes(piece) for piece in prepare_entry(bundle).seal(sequence)]
    return b"".join(pieces)


def assert_same_bundle(left: RecordBundle, right: RecordBundle, *, in_order: bool) -> None:
    assert set(left.payloads) == set(right.payloads)
    if in_order:
        assert list(left.payloads) == list(right.payloads)
    for slot, payload in left.payloads.items():
        assert payload.fingerprint == right.payloads[slot].fingerprint
        assert same_values(payload.batch, right.payloads[slot].batch)


# --- reading what the reference wrote ----------------------------------------------------------


def test_the_index_names_every_golden_file() -> None:
    files = {p.relative_to(GOLDEN).as_posix(): p for p in GOLDEN.rglob("*") if p.is_file()}
    del files["INDEX.json"]
    assert set(files) == set(INDEX) == {*WALS, *CURSORS, *PROGRESS, *SEGMENTS}
    for name, path in files.items():
        assert path.stat().st_size == INDEX[name]["size"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == INDEX[name]["sha256"]


@pytest.mark.parametrize("name", WALS)
def test_entries_decode_to_the_fields_of_the_index(name: str) -> None:
    data = read(name)
    assert decode_header(data, source=name) == WalHeader(INDEX[name]["wal_position_start"])
    found = entries_of(data, name)
    for item, expected in zip(found, INDEX[name]["entries"], strict=True):
        assert item.offset == expected["offset"]
        assert item.end - item.offset == expected["entry_len"] + 8
        assert f"{item.crc:08x}" == expected["crc"]
        assert item.entry.ingestion_time_ns == expected["ts"]
        assert item.entry.sequence == expected["seq"]
        assert item.entry.slot_bitmap == expected["bitmap"]
        slots = [
            {
                "slot": block.slot,
                "fingerprint": block.fingerprint.hex(),
                "rows": block.row_count,
                "payload_len": block.payload.size,
            }
            for block in item.entry.slots
        ]
        assert slots == expected["slots"]


@pytest.mark.parametrize("name", CONTENT)
def test_bundles_hold_what_was_put_into_them(name: str) -> None:
    in_order = name in WALS  # the reference writes the references of a segment in any order
    for bundle, expected in zip(bundles_of(name), CONTENT[name], strict=True):
        if in_order:
            assert list(bundle.payloads) == list(expected)
        assert set(bundle.payloads) == set(expected)
        for slot, (fingerprint, data_type, values) in expected.items():
            payload = bundle.payloads[slot]
            assert payload.fingerprint == bytes([fingerprint]) * 32
            assert payload.batch.schema.types == [data_type]
            assert payload.batch.column(0).to_pylist() == values


def test_every_bundle_file_has_its_content_written_down() -> None:
    assert set(CONTENT) == {*WALS, *SEGMENTS}


def test_rotated_files_are_one_log_with_contiguous_positions() -> None:
    files = find_files(RealDisk(), GOLDEN / "g3_rotation" / "wal")
    assert [(f.rotation, f.start, f.problem) for f in files] == [
        (1, 0, None),
        (2, 1958, None),
        (3, 3916, None),
        (None, 5874, None),
    ]
    assert [f.end for f in files] == [1958, 3916, 5874, 6853]
    replayed = list(replay(RealDisk(), files))
    assert all(isinstance(item, ReplayedEntry) for item in replayed)
    entries = [item for item in replayed if isinstance(item, ReplayedEntry)]
    assert [item.entry.sequence for item in entries] == list(range(7))
    assert [item.entry.ingestion_time_ns for item in entries] == [START_NS + i for i in range(7)]
    assert [item.position for item in entries] == [979 * i for i in range(7)]
    assert [item.end_position for item in entries] == [979 * (i + 1) for i in range(7)]


@pytest.mark.parametrize("name", CURSORS)
def test_cursors_decode_to_the_index_and_back_to_the_same_bytes(name: str) -> None:
    position = decode_cursor(read(name), source=name)
    assert position == INDEX[name]["wal_position"]
    assert encode_cursor(position) == read(name)
    assert reference.read_cursor(read(name)) == position


def test_the_cursor_that_the_notes_of_the_format_spell_out() -> None:
    expected = bytes.fromhex("51554956455200540100180080000000000000006df90d37")
    assert encode_cursor(128) == expected
    assert decode_cursor(expected, source="cursor") == 128
    assert len(expected) == CURSOR_SIZE


def test_the_header_that_the_notes_of_the_format_spell_out() -> None:
    expected = "5155495645520057414c010026005155495645525f5345474346470000000000000000000000"
    assert encode_header(WalHeader(0)).hex() == expected


@pytest.mark.parametrize("name", WALS)
def test_headers_are_written_back_to_the_same_bytes(name: str) -> None:
    header = decode_header(read(name), source=name)
    assert encode_header(header) == read(name)[:HEADER_SIZE]


@pytest.mark.parametrize("name", PROGRESS)
def test_progress_decodes_to_the_index_and_back_to_the_same_bytes(name: str) -> None:
    assert read(name).hex() == INDEX[name]["hex"]
    progress = decode_progress(read(name), source=name)
    entries = [
        {"seg": entry.segment, "bundles": entry.bundle_count, "words": [entry.resolved]}
        for entry in progress.entries
    ]
    assert entries == INDEX[name]["entries"]
    assert [progress.entries[0].is_resolved(i) for i in range(4)] == [True, True, False, True]
    assert encode_progress(progress) == read(name)


def test_the_empty_progress_file_that_the_notes_of_the_format_spell_out() -> None:
    expected = "51554956535542000100200000000000000000000000000000000000000000005d29f376"
    assert encode_progress(Progress()).hex() == expected
    assert decode_progress(bytes.fromhex(expected), source="empty") == Progress()


@pytest.mark.parametrize("name", SEGMENTS)
def test_envelopes_decode_to_the_fields_of_the_index(name: str) -> None:
    expected = INDEX[name]
    reader = reader_of(read(name), name)
    reader.verify()
    envelope = reader.envelope
    assert envelope.version == expected["version"]
    assert envelope.stream_count == len(reader.streams) == expected["streams"]
    assert envelope.bundle_count == len(reader.manifest) == expected["bundles"]
    assert envelope.directory == Region(*expected["directory"])
    assert envelope.manifest == Region(*expected["manifest"])
    assert envelope.footer == Region(expected["size"] - 50, 34)
    assert f"{envelope.crc:08x}" == expected["crc"]
    assert envelope.metadata_crc is None


@pytest.mark.parametrize("name", SEGMENTS)
def test_manifests_tell_item_counts_and_nothing_that_the_reference_does_not_store(
    name: str,
) -> None:
    reader = reader_of(read(name), name)
    rows = list(reader.manifest)
    assert [row.item_count for row in rows] == ITEM_COUNTS[name.partition("/")[0]]
    for row in rows:
        assert row == BundleEntry(row.bundle_index, row.slot_refs, row.item_count)
    assert all(stream.crc32 is None for stream in reader.streams)


# --- what we write again, and what the reference would make of it ------------------------------


@pytest.mark.parametrize("name", WALS)
def test_entries_written_again_mean_the_same(name: str) -> None:
    originals = entries_of(read(name), name)
    again = b"".join(
        bytes(piece)
        for found in originals
        for piece in prepare_entry(found.entry.bundle()).seal(found.entry.sequence)
    )
    header = decode_header(read(name), source=name)
    written = entries_of(encode_header(header) + again, name)
    for new, old in zip(written, originals, strict=True):
        assert new.entry.ingestion_time_ns == old.entry.ingestion_time_ns
        assert new.entry.sequence == old.entry.sequence
        assert new.entry.slot_bitmap == old.entry.slot_bitmap
        for left, right in zip(new.entry.slots, old.entry.slots, strict=True):
            assert left[:3] == right[:3]  # slot, fingerprint, rows
        assert_same_bundle(new.entry.bundle(), old.entry.bundle(), in_order=True)


@pytest.mark.parametrize("name", [*WALS, *SEGMENTS])
def test_segments_built_from_golden_bundles_hold_equal_bundles(name: str) -> None:
    """Also where the reference changes types: 300 keys of eight bits stay keys of eight bits."""
    originals = bundles_of(name)
    data = segment_bytes(originals)
    ours = reader_of(data, name)
    ours.verify()
    for index, original in enumerate(originals):
        assert_same_bundle(ours.bundle(index), original, in_order=True)
    theirs = reference.read_segment(data)
    for bundle, original in zip(theirs.bundles, originals, strict=True):
        assert set(bundle.payloads) == set(original.payloads)
        for slot, (fingerprint, batch) in bundle.payloads.items():
            assert fingerprint == original.payloads[slot].fingerprint
            assert same_values(batch, original.payloads[slot].batch)


@pytest.mark.parametrize("name", SEGMENTS)
def test_the_second_reader_takes_the_segments_of_the_reference(name: str) -> None:
    segment = reference.read_segment(read(name))
    assert (segment.stream_count, segment.bundle_count) == (
        INDEX[name]["streams"],
        INDEX[name]["bundles"],
    )
    assert [bundle.item_count for bundle in segment.bundles] == ITEM_COUNTS[name.partition("/")[0]]
    ours = reader_of(read(name), name)
    for index, bundle in enumerate(segment.bundles):
        for slot, (_, batch) in bundle.payloads.items():
            assert ours.bundle(index).payloads[slot].batch.equals(batch)


@pytest.mark.parametrize("name", WALS)
def test_the_second_reader_takes_the_logs_of_the_reference(name: str) -> None:
    wal = reference.read_wal(read(name))
    assert wal.position_start == INDEX[name]["wal_position_start"]
    for entry, expected in zip(wal.entries, INDEX[name]["entries"], strict=True):
        assert (entry.offset, entry.entry_len, entry.ts, entry.seq, entry.bitmap) == tuple(
            expected[key] for key in ("offset", "entry_len", "ts", "seq", "bitmap")
        )


@given(members=bundles())
@settings(max_examples=60)
def test_the_second_reader_takes_every_log_that_we_write(members: list[RecordBundle]) -> None:
    wal = reference.read_wal(wal_bytes(members, position=977))
    assert (wal.position_start, wal.header_size) == (977, 38)
    for sequence, (entry, bundle) in enumerate(zip(wal.entries, members, strict=True)):
        assert (entry.seq, entry.ts) == (sequence, bundle.ingestion_time_ns)
        assert entry.bitmap == sum(1 << slot for slot in bundle.payloads)
        assert [slot.slot for slot in entry.slots] == list(bundle.payloads)
        for slot in entry.slots:
            payload = bundle.payloads[slot.slot]
            assert slot.fingerprint == payload.fingerprint
            assert slot.rows == payload.batch.num_rows
            assert same_values(slot.batch, payload.batch)


@given(members=bundles())
@settings(max_examples=60)
def test_the_second_reader_takes_every_segment_that_we_write(members: list[RecordBundle]) -> None:
    segment = reference.read_segment(segment_bytes(members))
    for read_back, bundle in zip(segment.bundles, members, strict=True):
        assert read_back.item_count == bundle.item_count
        assert set(read_back.payloads) == set(bundle.payloads)
        for slot, (fingerprint, batch) in read_back.payloads.items():
            assert fingerprint == bundle.payloads[slot].fingerprint
            assert same_values(batch, bundle.payloads[slot].batch)


def test_the_second_reader_takes_a_directory_of_the_writer_after_rotation(tmp_path: Path) -> None:
    members = bundles_of("g3_rotation/wal/quiver.wal.1")
    config = WalConfig(rotation_target=600, max_size=2**20)
    writer = WalWriter.open(RealDisk(), tmp_path, config)
    for bundle in members * 3:
        writer.append([prepare_entry(bundle)])
    writer.sync()
    writer.advance_cursor(writer.end_position // 2)
    writer.close()
    paths = [tmp_path / f"quiver.wal.{n}" for n in range(1, 6)]
    paths = [*(path for path in paths if path.exists()), tmp_path / "quiver.wal"]
    wals = [reference.read_wal(path.read_bytes()) for path in paths]
    assert len(wals) == 3
    for before, after in pairwise(wals):
        assert after.position_start == before.position_start + before.end - before.header_size
    sequences = [entry.seq for wal in wals for entry in wal.entries]
    assert sequences == list(range(sequences[0], 6))
    cursor = reference.read_cursor((tmp_path / "quiver.wal.cursor").read_bytes())
    assert cursor == writer.cursor == writer.end_position // 2


def test_the_second_reader_takes_the_progress_that_we_write() -> None:
    progress = Progress(
        (SegmentProgress(3, 4, 0b1011), SegmentProgress(9, 65, 1 << 64 | 1)),
        oldest_incomplete_segment=3,
    )
    read_back = reference.read_progress(encode_progress(progress))
    assert read_back == reference.ProgressFile(
        0,
        3,
        [reference.ProgressEntry(3, 4, [0b1011]), reference.ProgressEntry(9, 65, [1, 1])],
    )
    golden = reference.read_progress(read(PROGRESS[0]))
    assert golden.entries == [reference.ProgressEntry(0, 4, [0b1011])]
