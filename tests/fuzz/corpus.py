"""What mutations start from: golden files, and files of our own with every kind of Arrow data."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.fuzz.segments import Codec, build, ipc_file, ipc_stream, part

from quiver.bundle import RecordBundle
from quiver.segment.reader import SegmentReader
from quiver.segment.writer import OpenSegment
from quiver.subscriber.progress import Progress, SegmentProgress, encode_progress
from quiver.wal.cursor import encode_cursor
from quiver.wal.entry import prepare_entry
from quiver.wal.header import WalHeader, encode_header

CODECS: tuple[Codec, ...] = ("zstd", "lz4")
GOLDEN = Path(__file__).parents[1] / "golden" / "quiver"


@dataclass(frozen=True)
class StreamSum:
    """Where the directory of a segment keeps the sum of a stream, and what the sum covers."""

    sum_at: int
    start: int
    end: int


@dataclass(frozen=True)
class Seed:
    """A good file. ``kind`` is a key of ``decoders.DECODERS``."""

    name: str
    kind: str
    data: bytes
    stream_sums: tuple[StreamSum, ...] = ()


# --- Arrow data --------------------------------------------------------------------------------


def _flat() -> dict[str, Any]:
    return {
        "i64": pa.array([1, None, -3], pa.int64()),
        "u8": pa.array([1, 2, 255], pa.uint8()),
        "f64": pa.array([0.5, None, float("inf")], pa.float64()),
        "f16": pa.array([1.0, 2.0, None], pa.float16()),
        "bool": pa.array([True, None, False]),
        "null": pa.nulls(3),
        "time": pa.array([0, 1_700_000_000_000_000_000, None], pa.timestamp("ns", "UTC")),
        "date": pa.array([0, 19_000, None], pa.date32()),
        "decimal": pa.array([1, None, 3], pa.decimal128(12, 2)),
        "fixed": pa.array([b"abcd", None, b"wxyz"], pa.binary(4)),
    }


def _texts() -> dict[str, Any]:
    words = ["", None, "a longer text that does not fit into a view, é"]
    raw = [b"", None, b"\xff\x00 longer than twelve bytes"]
    return {
        "string": pa.array(words, pa.string()),
        "large": pa.array(words, pa.large_string()),
        "view": pa.array(words, pa.string_view()),
        "binary": pa.array(raw, pa.binary()),
        "binary_view": pa.array(raw, pa.binary_view()),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", None, "[1]"])),
    }


def _keys(key_type: pa.DataType, values: list[Any]) -> pa.Array[Any]:
    indices: Any = pa.array([0, 1, None], key_type)
    return pa.DictionaryArray.from_arrays(indices, pa.array(values))


def _dictionaries() -> dict[str, Any]:
    inner = _keys(pa.int8(), ["x", "y"])
    return {
        "u8": _keys(pa.uint8(), ["a", "b"]),
        "i32": _keys(pa.int32(), [10, 20]),
        "in_struct": pa.StructArray.from_arrays([inner, pa.array([1, 2, 3])], ["k", "v"]),
        "in_list": pa.ListArray.from_arrays(pa.array([0, 1, 1, 3], pa.int32()), inner),
        "of_structs": _keys(pa.uint16(), [{"a": 1}, {"a": None}]),
    }


def _nested() -> dict[str, Any]:
    lists = [[1, 2], None, []]
    kinds = pa.array([0, 1, 0], pa.int8())
    numbers, words = pa.array([1, 2, 3]), pa.array(["a", "b", "c"])
    return {
        "list": pa.array([[{"a": 1, "b": ["x"]}], None, []]),
        "large_list": pa.array(lists, pa.large_list(pa.int16())),
        "list_view": pa.array(lists, pa.list_view(pa.int64())),
        "fixed_list": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
        "struct": pa.array([{"s": {"t": None}}, None, {"s": {"t": "u"}}]),
        "sparse": pa.UnionArray.from_sparse(kinds, [numbers, words]),
        "dense": pa.UnionArray.from_dense(kinds, pa.array([0, 0, 1], pa.int32()), [numbers, words]),
        "runs": pa.RunEndEncodedArray.from_arrays(
            pa.array([2, 3], pa.int16()), pa.array(["p", None])
        ),
    }


@cache
def batches() -> dict[str, pa.RecordBatch]:
    """One batch per family of types, each with three rows."""
    families = {"flat": _flat, "texts": _texts, "dictionaries": _dictionaries, "nested": _nested}
    return {name: pa.record_batch(make()) for name, make in families.items()}


# --- files -------------------------------------------------------------------------------------


def wal_entry(sequence: int, slots: dict[int, tuple[int, bytes]], *, time_ns: int = 1) -> bytes:
    """An entry from (rows, payload) of each slot, correct in everything that is summed."""
    bitmap = sum(1 << slot for slot in slots)
    body = struct.pack("<BqQQ", 0, time_ns, sequence, bitmap)
    for slot, (rows, payload) in slots.items():
        body += struct.pack("<H32sII", slot, bytes(32), rows, len(payload)) + payload
    return frame(body)


def frame(body: bytes) -> bytes:
    """A body with its length and its sum."""
    return struct.pack("<I", len(body)) + body + struct.pack("<I", zlib.crc32(body))


def wal_file(*entries: bytes, position: int = 0) -> bytes:
    return encode_header(WalHeader(position)) + b"".join(entries)


def _bundle() -> RecordBundle:
    by_slot = dict(enumerate(batches().values(), start=30))
    return RecordBundle.from_batches(by_slot, ingestion_time_ns=1, item_count=3)


def _our_wals() -> Iterator[tuple[str, bytes]]:
    entries = [b"".join(map(bytes, prepare_entry(_bundle()).seal(i))) for i in range(2)]
    yield "ours", wal_file(*entries)
    for codec in CODECS:
        slots = {
            slot: (batch.num_rows, ipc_stream(batch, codec))
            for slot, batch in enumerate(batches().values())
        }
        yield codec, wal_file(wal_entry(0, slots), wal_entry(1, slots), position=977)


def _our_segments() -> Iterator[tuple[str, bytes]]:
    segment = OpenSegment()
    for sequence in range(3):
        segment.append(_bundle(), sequence)
    yield "ours", b"".join(map(bytes, segment.encode()))
    for codec in CODECS:
        yield codec, build([part(batch, batch, codec=codec) for batch in batches().values()])


def _stream_sums(data: bytes) -> tuple[StreamSum, ...]:
    """Find the column of sums in the directory by its address."""
    buffer = pa.py_buffer(data)
    reader = SegmentReader(buffer, source="seed")
    region = reader.envelope.directory
    with pa.ipc.open_file(buffer.slice(region.offset, region.length)) as directory:
        batch = directory.get_batch(0)
    if "crc32" not in batch.schema.names:
        return ()
    values = batch.column("crc32").buffers()[1]
    assert values is not None
    first = values.address - buffer.address
    return tuple(
        StreamSum(first + 4 * i, stream.byte_offset, stream.byte_offset + stream.byte_length)
        for i, stream in enumerate(reader.streams)
    )


def _seeds() -> Iterator[Seed]:
    for name, facts in json.loads((GOLDEN / "INDEX.json").read_text()).items():
        data = (GOLDEN / name).read_bytes()
        if "wal_position_start" in facts:
            yield Seed(name, "wal", data)
        elif "wal_position" in facts:
            yield Seed(name, "cursor", data)
        elif "manifest" in facts:
            yield Seed(name, "segment", data)
        else:
            yield Seed(name, "progress", data)
    for name, data in _our_wals():
        yield Seed(f"wal/{name}", "wal", data)
    for name, data in _our_segments():
        yield Seed(f"segment/{name}", "segment", data, _stream_sums(data))
    for name, batch in batches().items():
        for codec in (None, *CODECS):
            stream = ipc_stream(batch, codec)
            yield Seed(f"stream/{name}/{codec}", "stream", stream)
            yield Seed(f"file/{name}/{codec}", "file", ipc_file([batch] * 2, codec))
    yield Seed("file/deltas", "file", _file_with_deltas())
    yield Seed("cursor/ours", "cursor", encode_cursor(2**40))
    entries = (SegmentProgress(3, 4, 0b1011), SegmentProgress(9, 130, 1 << 129))
    yield Seed("progress/ours", "progress", encode_progress(Progress(entries, 3, 5, b"more")))


def _file_with_deltas() -> bytes:
    def batch(values: list[str]) -> pa.RecordBatch:
        return pa.record_batch({"k": pa.DictionaryArray.from_arrays(pa.array([0]), values)})

    return ipc_file([batch(["a"]), batch(["a", "b"])], deltas=True)


@cache
def seeds() -> dict[str, list[Seed]]:
    """All seeds by kind."""
    by_kind: dict[str, list[Seed]] = {}
    for seed in _seeds():
        by_kind.setdefault(seed.kind, []).append(seed)
    return by_kind
