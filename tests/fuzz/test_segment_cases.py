"""Segments that are wrong in one way each. Their sums are right: nothing else gives them away."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from tests.fuzz import arrow_bytes as arrow
from tests.fuzz.corpus import batches
from tests.fuzz.decoders import SOURCE, check_error, exercise
from tests.fuzz.segments import (
    FOOTER_SIZE,
    TRAILER_SIZE,
    Part,
    build,
    enclose,
    ipc_file,
    part,
    place,
    reference_footer,
)

from quiver.bundle import Signal
from quiver.errors import (
    ChecksumMismatch,
    FormatError,
    LimitExceeded,
    Truncated,
    UnsupportedVersion,
)
from quiver.ipc import Validation
from quiver.segment.layout import MAGIC, encode_trailer
from quiver.segment.reader import SegmentReader
from quiver.segment.tables import (
    BundleEntry,
    SlotRef,
    StreamEntry,
    encode_directory,
    encode_manifest,
)

FLAT = batches()["flat"]
PARTS = [part(FLAT, FLAT), part(FLAT, slot=31)]
STREAMS, DIRECTORY = place(PARTS)


def opened(data: bytes, validation: Validation = Validation.FULL) -> SegmentReader:
    return SegmentReader(pa.py_buffer(data), source=SOURCE, validation=validation)


def refused(data: bytes, call: Callable[[SegmentReader], object] = lambda _: None) -> FormatError:
    """The error of opening, or of the call on what was opened; no decoder does harm."""
    exercise("segment", data)
    with pytest.raises(FormatError) as caught:
        call(opened(data))
    check_error(caught.value)
    assert caught.value.offset <= len(data)
    return caught.value


def first_bundle(reader: SegmentReader) -> object:
    return reader.bundle(0)


def manifest(reader: SegmentReader) -> object:
    return list(reader.manifest)


def verified(reader: SegmentReader) -> None:
    manifest(reader)
    reader.verify()


def test_the_segment_that_the_others_differ_from() -> None:
    reader = opened(build(PARTS))
    reader.verify()
    assert [list(reader.bundle(i).payloads) for i in range(3)] == [[30], [30], [31]]


# --- trailer and footer ------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [b"\0", b"\xff", MAGIC])
def test_files_of_up_to_64_bytes(fill: bytes) -> None:
    for size in range(65):
        error = refused((fill * 65)[:size])
        assert isinstance(error, Truncated) == (size < TRAILER_SIZE)


@pytest.mark.parametrize("extra", range(50))
def test_a_trailer_with_too_little_before_it(extra: int) -> None:
    refused(bytes(extra) + encode_trailer(34, zlib.crc32(bytes(extra))))


@pytest.mark.parametrize(
    "footer_size", [0, 1, 33, len(build(PARTS)) - TRAILER_SIZE + 1, 2**31, 2**32 - 1]
)
def test_a_footer_size_that_cannot_be(footer_size: int) -> None:
    body = build(PARTS)[:-TRAILER_SIZE]
    data = body + encode_trailer(footer_size, zlib.crc32(body))
    assert f"a footer of {footer_size} bytes" in refused(data).reason


def test_a_footer_as_long_as_the_file_is_only_a_footer() -> None:
    body = struct.pack("<HIIQIQI", 1, 0, 0, 0, 0, 0, 0)
    refused(body + encode_trailer(34, zlib.crc32(body)))


def test_bytes_that_a_longer_footer_adds_are_ignored() -> None:
    body = build(PARTS)[:-TRAILER_SIZE] + b"from the future"
    data = body + encode_trailer(FOOTER_SIZE + 15, zlib.crc32(body))
    assert opened(data).bundle_count == 3


@pytest.mark.parametrize("version", [0, 2, 65_535])
def test_a_version_that_is_not_known(version: int) -> None:
    good = build(PARTS)
    at = len(good) - TRAILER_SIZE - FOOTER_SIZE
    body = good[:at] + struct.pack("<H", version) + good[at + 2 : -TRAILER_SIZE]
    data = body + encode_trailer(FOOTER_SIZE, zlib.crc32(body))
    assert isinstance(refused(data), UnsupportedVersion)


@pytest.mark.parametrize("counts", [(100_001, 3), (2**32 - 1, 3), (2, 10_000_001), (2, 2**32 - 1)])
def test_counts_above_the_limits(counts: tuple[int, int]) -> None:
    data = build(PARTS, stream_count=counts[0], bundle_count=counts[1])
    assert isinstance(refused(data), LimitExceeded)


def test_counts_that_do_not_fit_the_tables() -> None:
    assert "the footer says 3" in refused(build(PARTS, stream_count=3)).reason
    assert "the footer says 2" in refused(build(PARTS, bundle_count=2), manifest).reason
    assert "the footer says 4" in refused(build(PARTS, bundle_count=4), first_bundle).reason


@pytest.mark.parametrize("bit", [0, 5, 31])
def test_a_changed_byte_is_seen_where_it_matters(bit: int) -> None:
    good = build(PARTS)
    for at in range(0, len(good), 97):
        data = bytearray(good)
        data[at] ^= 1 << bit % 8
        refused(bytes(data), verified)


def test_the_tables_are_summed_before_they_are_believed() -> None:
    good = build(PARTS)
    for at in range(len(STREAMS), len(good) - TRAILER_SIZE - 8, 41):
        data = bytearray(good)
        data[at] ^= 0x10
        error = refused(bytes(data))
        assert isinstance(error, ChecksumMismatch) or error.offset >= len(good) - 58


# --- regions -----------------------------------------------------------------------------------

HUGE = 2**64 - 1


def with_regions(*regions: int) -> bytes:
    directory = bytes(encode_directory(DIRECTORY))
    rows = [BundleEntry(0, (SlotRef(30, 0, 0),))]
    body = STREAMS + directory + bytes(encode_manifest(rows))
    places = len(STREAMS), len(directory), len(STREAMS) + len(directory), 0
    given = list(regions) + list(places[len(regions) :])
    if len(regions) < 4:
        given[3] = len(body) - given[2]
    return reference_footer(body, (given[0], given[1], given[2], given[3]), counts=(2, 1))


def test_regions_of_the_reference_are_read() -> None:
    assert opened(with_regions()).bundle(0).payloads[30].batch.equals(FLAT)


@pytest.mark.parametrize(
    "regions",
    [
        (HUGE, 1),
        (HUGE, 2**32 - 1),
        (0, 2**32 - 1),
        (2**63, 0),
        (0, 0, HUGE, HUGE >> 32),
        (0, 0, 0, 2**32 - 1),
    ],
)
def test_regions_outside_the_file(regions: tuple[int, ...]) -> None:
    assert "is said to lie at" in refused(with_regions(*regions)).reason


@pytest.mark.parametrize("regions", [(0, 0), (0, 16), (0, len(STREAMS)), (len(STREAMS), 0)])
def test_regions_that_hold_no_table(regions: tuple[int, int]) -> None:
    refused(with_regions(*regions))


def test_regions_that_overlap() -> None:
    """Directory and manifest in the same place: one of them has the wrong columns."""
    directory = bytes(encode_directory(DIRECTORY))
    place_of_both = (len(STREAMS), len(directory)) * 2
    assert "has no column slot_refs" in refused(with_regions(*place_of_both), manifest).reason
    body = STREAMS + directory
    regions = (len(STREAMS), len(directory), len(STREAMS) + 8, len(directory) - 8)
    refused(reference_footer(body, regions, counts=(2, 1)), manifest)


# --- the directory -----------------------------------------------------------------------------


def with_directory(*rows: StreamEntry) -> bytes:
    directory = bytes(encode_directory(rows))
    return build(PARTS, directory=directory, stream_count=len(rows))


def test_a_directory_above_the_limit_of_rows() -> None:
    one = _directory_batch().slice(0, 1)
    many = one.take(pa.array([0] * 100_001))
    data = build(PARTS, directory=ipc_file([many]), stream_count=100_000)
    assert isinstance(refused(data), LimitExceeded)


def test_streams_with_the_same_id() -> None:
    data = with_directory(DIRECTORY[0], DIRECTORY[1]._replace(stream_id=0))
    assert "the same id" in refused(data).reason


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 2**64 - 1), (2**64 - 1, 1), (2**64 - 1, 2**64 - 1), (2**63, 0), (len(STREAMS) * 9, 0)],
)
def test_streams_outside_the_file(offset: int, length: int) -> None:
    changed = DIRECTORY[0]._replace(byte_offset=offset, byte_length=length)
    assert "outside the file's streams" in refused(with_directory(changed, DIRECTORY[1])).reason


@pytest.mark.parametrize(("slot", "chunks"), [(64, 2), (65_535, 2), (30, 10_000_001)])
def test_streams_above_the_limits(slot: int, chunks: int) -> None:
    changed = DIRECTORY[0]._replace(slot_id=slot, chunk_count=chunks)
    assert isinstance(refused(with_directory(changed, DIRECTORY[1])), LimitExceeded)


@pytest.mark.parametrize("chunks", [1, 3])
def test_another_number_of_chunks_than_the_directory_says(chunks: int) -> None:
    changed = DIRECTORY[0]._replace(chunk_count=chunks)
    error = refused(with_directory(changed, DIRECTORY[1]), first_bundle)
    assert f"the directory says {chunks}" in error.reason


def test_a_stream_that_does_not_have_its_sum() -> None:
    changed = DIRECTORY[0]._replace(crc32=7)
    error = refused(with_directory(changed, DIRECTORY[1]), first_bundle)
    assert isinstance(error, ChecksumMismatch)
    assert error.offset == DIRECTORY[0].byte_offset


@pytest.mark.parametrize(("shift", "size"), [(8, 0), (0, -8), (0, -1), (64, -64)])
def test_a_stream_whose_place_is_wrong_by_a_little(shift: int, size: int) -> None:
    start = DIRECTORY[0].byte_offset + shift
    end = start + DIRECTORY[0].byte_length + size
    changed = DIRECTORY[0]._replace(
        byte_offset=start, byte_length=end - start, crc32=zlib.crc32(STREAMS[start:end])
    )
    refused(with_directory(changed, DIRECTORY[1]), first_bundle)


def _directory_batch() -> pa.RecordBatch:
    with pa.ipc.open_file(encode_directory(DIRECTORY)) as reader:
        return reader.get_batch(0)


REQUIRED = _directory_batch().schema.names[:7]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_directory_without_a_column_or_with_another_type(name: str) -> None:
    batch = _directory_batch()
    retyped = batch.set_column(batch.schema.get_field_index(name), name, pa.array(["text", "text"]))
    renamed = batch.rename_columns([f"{n}_" if n == name else n for n in batch.schema.names])
    twice = batch.append_column(name, batch.column(name))
    for changed, reason in (
        (batch.drop_columns([name]), f"has no column {name}"),
        (renamed, f"has no column {name}"),
        (twice, f"has no column {name}, or more than one"),
        (retyped, f"has {name} as string"),
    ):
        assert reason in refused(build(PARTS, directory=ipc_file([changed]))).reason


def test_a_directory_with_nulls() -> None:
    batch = _directory_batch()
    nulls = batch.set_column(0, "stream_id", pa.array([0, None], pa.uint32()))
    assert "has nulls in stream_id" in refused(build(PARTS, directory=ipc_file([nulls]))).reason


def test_a_directory_in_two_batches() -> None:
    batch = _directory_batch()
    data = build(PARTS, directory=ipc_file([batch.slice(0, 1), batch.slice(1)]))
    assert "has 2 batches, not one" in refused(data).reason


def test_our_own_columns_may_be_missing_or_strange() -> None:
    batch = _directory_batch()
    strange = batch.set_column(7, "crc32", pa.array(["no", "sum"]))
    for changed in (strange, batch.select(REQUIRED)):
        reader = opened(build(PARTS, directory=ipc_file([changed])))
        assert [stream.crc32 for stream in reader.streams] == [None, None]
        assert reader.bundle(0).payloads[30].batch.equals(FLAT)


# --- the manifest ------------------------------------------------------------------------------


def with_refs(*bundles: list[SlotRef]) -> bytes:
    rows = [BundleEntry(i, tuple(refs)) for i, refs in enumerate(bundles)]
    return build(PARTS, manifest=bytes(encode_manifest(rows)), bundle_count=len(rows))


@pytest.mark.parametrize(
    "ref",
    [
        SlotRef(30, 2, 0),
        SlotRef(30, 2**32 - 1, 0),
        SlotRef(30, 0, 2),
        SlotRef(30, 0, 2**32 - 1),
        SlotRef(31, 0, 0),
        SlotRef(64, 0, 0),
        SlotRef(65_535, 1, 0),
    ],
)
def test_references_to_what_is_not_there(ref: SlotRef) -> None:
    reader_error = refused(with_refs([SlotRef(31, 1, 0)], [ref]), lambda r: r.bundle(1))
    assert "which the directory does not have" in reader_error.reason
    assert list(opened(with_refs([SlotRef(31, 1, 0)], [ref])).bundle(0).payloads) == [31]


def test_a_bundle_with_more_slots_than_there_are() -> None:
    assert "has 65 slots" in refused(with_refs([SlotRef(30, 0, 0)] * 65), first_bundle).reason


def _manifest_batch() -> pa.RecordBatch:
    rows = [
        BundleEntry(0, (SlotRef(30, 0, 0),), item_count=3, ingestion_time_ns=5, signal=Signal.LOGS)
    ]
    with pa.ipc.open_file(encode_manifest(rows)) as reader:
        return reader.get_batch(0)


def with_manifest(batch: pa.RecordBatch) -> bytes:
    return build(PARTS, manifest=ipc_file([batch]), bundle_count=batch.num_rows)


def _refs_column(item: pa.DataType, values: list[Any]) -> pa.Array[Any]:
    return pa.array([values], pa.list_(item))


REF_TYPE = pa.struct(
    [("slot_id", pa.uint16()), ("stream_id", pa.uint32()), ("chunk_index", pa.uint32())]
)


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([0]), "has no column slot_refs that is a list of structs"),
        (_refs_column(pa.uint16(), [30]), "has no column slot_refs that is a list of structs"),
        (_refs_column(REF_TYPE, [None]), "has nulls in slot_refs"),
        (pa.array([None], pa.list_(REF_TYPE)), "has nulls in slot_refs"),
        (_refs_column(REF_TYPE, [{"slot_id": 30, "stream_id": 0}]), "has nulls in chunk_index"),
        (_refs_column(pa.struct([("slot_id", pa.uint16())]), [{"slot_id": 30}]), "no stream_id"),
        (
            _refs_column(pa.struct([*REF_TYPE, pa.field("slot_id", pa.uint16())]), []),
            "has no slot_id in slot_refs, or more than one",
        ),
        (_refs_column(pa.struct([("slot_id", pa.int16())]), [{"slot_id": 3}]), "slot_id as int16"),
        (_refs_column(pa.struct([]), [{}]), "has no slot_id"),
    ],
)
def test_references_of_another_shape(column: pa.Array[Any], reason: str) -> None:
    batch = _manifest_batch()
    changed = batch.set_column(batch.schema.get_field_index("slot_refs"), "slot_refs", column)
    assert reason in refused(with_manifest(changed), manifest).reason


@pytest.mark.parametrize("offsets", [(0, 4), (0, 2**31 - 1), (3, 0), (-1, 3), (-3, 0)])
def test_references_whose_offsets_lie(offsets: tuple[int, int]) -> None:
    rows = [BundleEntry(0, (SlotRef(30, 0, 0), SlotRef(31, 1, 0), SlotRef(30, 0, 1)))]
    table = bytes(encode_manifest(rows))
    at = table.index(struct.pack("<2i", 0, 3))
    table = table[:at] + struct.pack("<2i", *offsets) + table[at + 8 :]
    refused(build(PARTS, manifest=table, bundle_count=1), manifest)


@pytest.mark.parametrize("offsets", [(0, 2**30), (-5, 4), (7, 4)])
def test_texts_in_a_manifest_whose_offsets_lie(offsets: tuple[int, int]) -> None:
    table = ipc_file([_manifest_batch()])
    at = table.index(struct.pack("<2i", 0, 4))
    table = table[:at] + struct.pack("<2i", *offsets) + table[at + 8 :]
    refused(build(PARTS, manifest=table, bundle_count=1), manifest)


def test_texts_in_a_manifest_that_are_not_utf8() -> None:
    table = ipc_file([_manifest_batch()]).replace(b"logs", b"\xff\xfe\xfd\xfc")
    refused(build(PARTS, manifest=table, bundle_count=1), manifest)


def test_a_manifest_without_references() -> None:
    batch = _manifest_batch().drop_columns(["slot_refs"])
    assert "has no column slot_refs" in refused(with_manifest(batch), manifest).reason


def test_counts_and_times_may_be_missing_or_strange() -> None:
    batch = _manifest_batch()
    for name in ("item_count", "ingestion_time_ns", "sequence", "signal"):
        index = batch.schema.get_field_index(name)
        for changed in (
            batch.drop_columns([name]),
            batch.set_column(index, name, pa.array([[1]])),
            batch.set_column(index, name, pa.nulls(1)),
            batch.append_column(name, batch.column(name)),
        ):
            row = opened(with_manifest(changed)).manifest[0]
            assert getattr(row, name) is None


def test_a_signal_that_is_not_known_and_a_time_before_1970() -> None:
    batch = _manifest_batch()
    index = batch.schema.get_field_index
    batch = batch.set_column(index("signal"), "signal", pa.array(["profiles"]))
    batch = batch.set_column(index("ingestion_time_ns"), "ingestion_time_ns", pa.array([-5]))
    reader = opened(with_manifest(batch))
    assert reader.manifest[0].signal is None
    assert reader.bundle(0).ingestion_time_ns == 0


def test_a_slot_twice_in_one_bundle() -> None:
    error = refused(with_refs([SlotRef(30, 0, 0), SlotRef(30, 0, 1)]), first_bundle)
    assert "slot 30 twice" in error.reason


# --- streams -----------------------------------------------------------------------------------


def test_null_rows_take_no_memory() -> None:
    rows = arrow.batch(2**31, [(2**31, 2**31)], [])
    data = arrow.file([arrow.column("n", arrow.NULL)], [arrow.message(arrow.RECORD_BATCH, rows)])
    segment = build([Part(data, rows=2**31)])
    assert opened(segment).bundle(0).row_count == 2**31


def test_streams_that_are_no_arrow_files() -> None:
    for data in (b"", b"ARROW1", b"ARROW1ARROW1", b"\xff" * 64, STREAMS[:100]):
        segment = build([Part(data, rows=1)])
        refused(segment, first_bundle)


def test_a_good_stream_beside_a_bad_one_is_read() -> None:
    data = build([Part(b"no stream", rows=1), part(FLAT, slot=31)])
    refused(data, first_bundle)
    assert opened(data).bundle(1).payloads[31].batch.equals(FLAT)


def test_tables_that_are_not_there() -> None:
    for directory, table in ((b"", None), (None, b""), (b"ARROW1ARROW1", None)):
        refused(build(PARTS, directory=directory, manifest=table), manifest)
    refused(enclose(b"", b"", b"", stream_count=0, bundle_count=0))
