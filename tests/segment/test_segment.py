"""A segment gives back the bundles that were put in, from the mapping, and nothing that changed."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bundles import bundles, dictionary, numbers, plain_bundle, same_values
from hypothesis import given

from quiver.bundle import Payload, RecordBundle, Signal
from quiver.disk import RealDisk
from quiver.errors import ChecksumMismatch, FormatError, InvalidBundle
from quiver.ipc import Validation
from quiver.segment import layout
from quiver.segment import writer as writer_module
from quiver.segment.layout import segment_file_name, segment_sequence
from quiver.segment.reader import SegmentReader
from quiver.segment.writer import OpenSegment, write_segment
from quiver.testing import SimulatedDisk, explore

SEED = 20261115


def segment_of(*made: RecordBundle) -> OpenSegment:
    segment = OpenSegment()
    for sequence, bundle in enumerate(made):
        segment.append(bundle, sequence)
    return segment


def read_back(segment: OpenSegment) -> SegmentReader:
    data = pa.py_buffer(b"".join(segment.encode()))
    return SegmentReader(data, source="f", validation=Validation.FULL)


def assert_same(back: RecordBundle, bundle: RecordBundle) -> None:
    assert list(back.payloads) == list(bundle.payloads)
    assert back.ingestion_time_ns == bundle.ingestion_time_ns
    assert back.item_count == bundle.item_count
    for slot, payload in bundle.payloads.items():
        assert back.payloads[slot].fingerprint == payload.fingerprint
        assert same_values(back.payloads[slot].batch, payload.batch)


@given(bundles())
def test_round_trip(made: list[RecordBundle]) -> None:
    reader = read_back(segment_of(*made))
    reader.verify()
    assert reader.bundle_count == len(made)
    for index, bundle in enumerate(made):
        assert_same(reader.bundle(index), bundle)
        entry = reader.manifest[index]
        assert (entry.bundle_index, entry.sequence) == (index, index)
        assert entry.signal is bundle.signal
    for stream in reader.streams:
        assert stream.byte_offset % 64 == 0


def test_streams_are_numbered_as_they_are_first_seen() -> None:
    first = RecordBundle.from_batches({31: numbers(1), 2: numbers(2)}, ingestion_time_ns=0)
    second = RecordBundle.from_batches(
        {2: numbers(3), 7: pa.record_batch({"x": ["a"]})}, ingestion_time_ns=0
    )
    reader = read_back(segment_of(first, second))
    assert [(s.stream_id, s.slot_id, s.chunk_count) for s in reader.streams] == [
        (0, 31, 1),
        (1, 2, 2),
        (2, 7, 1),
    ]


def test_equal_fingerprints_with_different_schemas_get_their_own_streams() -> None:
    """Nullability and metadata are not in the fingerprint, and still have to come back."""
    nullable = pa.schema([pa.field("v", pa.int64())])
    required = pa.schema([pa.field("v", pa.int64(), nullable=False)])
    tagged = nullable.with_metadata({"k": "v"})
    made = [
        RecordBundle({1: Payload(pa.record_batch([[i]], schema=schema), bytes(32))}, i)
        for i, schema in enumerate([nullable, required, tagged, nullable])
    ]
    reader = read_back(segment_of(*made))
    assert len(reader.streams) == 3
    for index, bundle in enumerate(made):
        assert_same(reader.bundle(index), bundle)


def test_facts_of_bundles_and_streams() -> None:
    def logs(*times: int) -> RecordBundle:
        column = pa.array(times, pa.timestamp("ns"))
        return RecordBundle.from_batches(
            {30: pa.record_batch({"time_unix_nano": column})}, ingestion_time_ns=9, item_count=4
        )

    reader = read_back(segment_of(logs(50, 20), logs(70)))
    first, second = reader.manifest
    assert first.signal is Signal.LOGS
    assert (first.item_count, first.ingestion_time_ns, first.sequence) == (4, 9, 0)
    assert (first.min_event_time_ns, first.max_event_time_ns) == (20, 50)
    assert (second.min_event_time_ns, second.max_event_time_ns) == (70, 70)
    (stream,) = reader.streams
    assert (stream.min_event_time_ns, stream.max_event_time_ns) == (20, 70)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([None, None], pa.timestamp("ns")),
        pa.array([2**62], pa.timestamp("s")),
        pa.array(["yesterday"]),
    ],
)
def test_event_times_that_cannot_be_told_are_unknown(
    column: pa.Array[Any],
) -> None:
    made = RecordBundle.from_batches(
        {30: pa.record_batch({"time_unix_nano": column})}, ingestion_time_ns=0
    )
    entry = read_back(segment_of(made)).manifest[0]
    assert (entry.min_event_time_ns, entry.max_event_time_ns) == (None, None)


def test_item_counts_are_unknown_one_by_one() -> None:
    known, unknown = RecordBundle({}, 0, 7), RecordBundle({}, 0)
    assert [e.item_count for e in read_back(segment_of(known, unknown)).manifest] == [7, None]
    reader = read_back(segment_of(unknown))
    assert reader.manifest[0].item_count is None
    region = reader.envelope.manifest
    data = b"".join(segment_of(unknown).encode())[region.offset : region.end]
    assert "item_count" not in pa.ipc.open_file(data).schema.names


def test_only_the_streams_asked_for_are_looked_at() -> None:
    made = RecordBundle.from_batches({1: numbers(5), 30: numbers(6)}, ingestion_time_ns=0)
    data = bytearray(b"".join(segment_of(made).encode()))
    intact = SegmentReader(pa.py_buffer(bytes(data)), source="f")
    data[intact.streams[1].byte_offset + 300] ^= 1
    reader = SegmentReader(pa.py_buffer(bytes(data)), source="f")
    assert reader.bundle(0, slots=[1]).batch(1) == numbers(5)
    with pytest.raises(ChecksumMismatch, match="stream 1 has checksum"):
        reader.bundle(0)
    with pytest.raises(ChecksumMismatch, match="the segment has checksum"):
        reader.verify()


def test_batches_are_views_into_the_mapping(tmp_path: Path) -> None:
    """No copies: every buffer of every batch, dictionaries included, lies in the mapping."""
    batch = pa.record_batch(
        {
            "n": pa.array(range(1000)),
            "s": pa.array([f"text {i}" for i in range(1000)]),
            "d": pa.array([f"word {i % 7}" for i in range(1000)]).dictionary_encode(),
            "l": pa.array([[i, None] for i in range(1000)]),
        }
    )
    made = [RecordBundle.from_batches({30: batch}, ingestion_time_ns=i) for i in range(3)]
    path = tmp_path / segment_file_name(0)
    disk = RealDisk()
    write_segment(disk, path, segment_of(*made))
    mapping = disk.map(path)
    reader = SegmentReader(mapping, source=str(path))
    inside = range(mapping.address, mapping.address + mapping.size)
    before = pa.total_allocated_bytes()
    seen = 0
    for index in range(3):
        back = reader.bundle(index).batch(30)
        assert back is not None
        for column in back.columns:
            for buffer in _buffers(column):
                assert buffer.address in inside
                assert buffer.address + buffer.size - 1 in inside
                seen += 1
    assert seen >= 3 * 8
    assert pa.total_allocated_bytes() == before


def _buffers(column: pa.Array[Any]) -> list[pa.Buffer]:
    arrays = [column]
    if isinstance(column, pa.DictionaryArray):
        arrays.append(column.dictionary)
    return [b for array in arrays for b in array.buffers() if b is not None and b.size]


def test_several_threads_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "0.qseg"
    made = [plain_bundle(index, rows=50) for index in range(200)]
    write_segment(RealDisk(), path, segment_of(*made))
    reader = SegmentReader.open(RealDisk(), path)
    with ThreadPoolExecutor(8) as pool:
        for index, back in enumerate(pool.map(reader.bundle, [*range(200)] * 5)):
            assert_same(back, made[index % 200])


def test_a_bundle_outlives_reader_and_file(tmp_path: Path) -> None:
    path = tmp_path / "0.qseg"
    write_segment(RealDisk(), path, segment_of(plain_bundle(5)))
    back = SegmentReader.open(RealDisk(), path).bundle(0)
    RealDisk().unlink(path)
    assert_same(back, plain_bundle(5))


def test_the_published_file_is_read_only(tmp_path: Path) -> None:
    path = tmp_path / "0.qseg"
    size = write_segment(RealDisk(), path, segment_of(plain_bundle(5)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o440
    assert path.stat().st_size == size
    assert [p.name for p in tmp_path.iterdir()] == ["0.qseg"]


def test_a_power_cut_leaves_the_whole_segment_or_none() -> None:
    directory = Path("/segments")
    path = directory / "0.qseg"

    def script(disk: SimulatedDisk, acknowledge: object) -> None:
        disk.make_directory(directory)
        write_segment(disk, path, segment_of(*(plain_bundle(i) for i in range(3))))
        assert callable(acknowledge)
        acknowledge("published")

    def check(disk: SimulatedDisk, promises: object) -> None:
        if promises or (disk.exists(directory) and disk.exists(path)):
            reader = SegmentReader.open(disk, path)
            reader.verify()
            for index in range(3):
                assert_same(reader.bundle(index), plain_bundle(index))

    report = explore(script, check, limit_per_point=200, seed=SEED)
    assert report.violations == [], str(report)
    assert report.states > 200


def test_an_empty_segment_is_not_written() -> None:
    with pytest.raises(InvalidBundle, match="without bundles"):
        write_segment(SimulatedDisk(), Path("/0.qseg"), OpenSegment())


def test_a_segment_has_room_for_as_many_bundles_as_a_progress_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert layout.MAX_BUNDLES_WRITTEN == 65_536
    monkeypatch.setattr(writer_module, "MAX_BUNDLES_WRITTEN", 2)
    segment = segment_of(plain_bundle(0), plain_bundle(1))
    with pytest.raises(InvalidBundle, match="is full"):
        segment.append(plain_bundle(2))


def test_a_bundle_or_chunk_that_is_not_there() -> None:
    reader = read_back(segment_of(plain_bundle(0)))
    for call in (
        lambda: reader.bundle(1),
        lambda: reader.bundle(-1),
        lambda: reader.batch(0, 1),
        lambda: reader.batch(9, 0),
    ):
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize(
    ("name", "sequence"),
    [
        ("0000000000000007.qseg", 7),
        ("7.qseg", 7),
        ("18446744073709551615.qseg", 2**64 - 1),
        ("18446744073709551616.qseg", None),
        ("7.qseg.tmp", None),
        ("-7.qseg", None),
        ("x.qseg", None),
    ],
)
def test_file_names(name: str, sequence: int | None) -> None:
    assert segment_sequence(name) == sequence


def test_file_names_sort_as_their_numbers() -> None:
    names = [segment_file_name(n) for n in (0, 9, 10, 123456)]
    assert names == sorted(names)
    assert [segment_sequence(name) for name in names] == [0, 9, 10, 123456]


def test_the_metadata_sum_is_verified_when_the_file_is_opened() -> None:
    data = bytearray(b"".join(segment_of(plain_bundle(0)).encode()))
    reader = SegmentReader(pa.py_buffer(bytes(data)), source="f")
    for region in (reader.envelope.directory, reader.envelope.manifest, reader.envelope.footer):
        changed = bytearray(data)
        changed[region.offset + 20] ^= 1
        with pytest.raises(FormatError):
            SegmentReader(pa.py_buffer(bytes(changed)), source="f")


def test_estimated_size_and_counts_grow() -> None:
    segment = OpenSegment()
    assert (segment.bundle_count, segment.stream_count, segment.estimated_size) == (0, 0, 0)
    segment.append(plain_bundle(0, rows=100))
    assert (segment.bundle_count, segment.stream_count) == (1, 1)
    assert segment.estimated_size == 800


def test_dictionary_batches_may_share_a_stream_with_their_union() -> None:
    made = [
        RecordBundle.from_batches(
            {1: pa.record_batch({"k": dictionary([f"a{i}", "same"])})}, ingestion_time_ns=i
        )
        for i in range(5)
    ]
    reader = read_back(segment_of(*made))
    assert len(reader.streams) == 1
    column = reader.batch(0, 4).column(0)
    assert isinstance(column, pa.DictionaryArray)
    assert len(column.dictionary) == 6
    assert column.type.index_type == pa.uint8()
