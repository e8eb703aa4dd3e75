"""A second reader of all Quiver files, written from a description of the reference implementation.

It shares no code with ``quiver``: only ``struct``, ``zlib.crc32`` and pyarrow. It accepts what the
reference reader accepts and checks in the order in which that one does; whatever it does not accept
is a ``Refused``. What our writers produce has to pass here.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

import pyarrow as pa

MAX_ENTRY = 256 * 1024 * 1024
CFG_HASH = b"QUIVER_SEGCFG\0\0\0"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class Refused(Exception):
    """The reference reader would not take these bytes."""


def require(condition: object, reason: str) -> None:
    if not condition:
        raise Refused(reason)


# --- the log -----------------------------------------------------------------------------------


class Slot(NamedTuple):
    slot: int
    fingerprint: bytes
    rows: int
    payload_len: int
    batch: pa.RecordBatch


class Entry(NamedTuple):
    offset: int
    entry_len: int
    ts: int
    seq: int
    bitmap: int
    crc: int
    slots: list[Slot]


class Wal(NamedTuple):
    position_start: int
    header_size: int
    entries: list[Entry]
    end: int


def read_wal(data: bytes) -> Wal:
    require(len(data) >= 38, "shorter than a header")
    magic, version, header_size, cfg_hash, start = struct.unpack_from("<10sHH16sQ", data)
    require(magic == b"QUIVER\0WAL", "magic")
    require(version == 1, "unsupported version")
    require(38 <= header_size <= len(data), "header size")
    require(cfg_hash == CFG_HASH, "segment_cfg_hash mismatch")
    entries = []
    offset = header_size
    while offset < len(data):
        entry = _read_entry(data, offset)
        entries.append(entry)
        offset += 4 + entry.entry_len + 4
    return Wal(start, header_size, entries, offset)


def _read_entry(data: bytes, offset: int) -> Entry:
    require(offset + 4 <= len(data), "the length of an entry is cut off")
    (entry_len,) = struct.unpack_from("<I", data, offset)
    require(entry_len <= MAX_ENTRY, "entry longer than 256 MiB")
    require(offset + 4 + entry_len + 4 <= len(data), "entry longer than the file")
    body = data[offset + 4 : offset + 4 + entry_len]
    (crc,) = struct.unpack_from("<I", data, offset + 4 + entry_len)
    require(zlib.crc32(body) == crc, "CRC of an entry")
    require(len(body) >= 25, "body shorter than its head")
    entry_type, ts, seq, bitmap = struct.unpack_from("<BqQQ", body)
    require(entry_type == 0, "unsupported entry type")
    require(ts >= 0, "a time before 1970 is not written")
    slots = []
    position = 25
    for _ in range(bitmap.bit_count()):
        require(position + 42 <= len(body), "slot header cut off")
        slot, fingerprint, rows, payload_len = struct.unpack_from("<H32sII", body, position)
        position += 42
        require(position + payload_len <= len(body), "payload cut off")
        batch = _read_stream(body[position : position + payload_len])
        slots.append(Slot(slot, fingerprint, rows, payload_len, batch))
        position += payload_len
    require(position == len(body), "unexpected trailing bytes")
    return Entry(offset, entry_len, ts, seq, bitmap, crc, slots)


def _read_stream(payload: bytes) -> pa.RecordBatch:
    """Exactly one batch, and the end marker behind it."""
    require(payload.endswith(END_OF_STREAM), "payload without end marker")
    with pa.ipc.open_stream(payload) as reader:
        batches = list(reader)
    require(len(batches) == 1, "payload with another number of batches than one")
    batches[0].validate(full=True)
    return batches[0]


# --- the cursor and the progress file ----------------------------------------------------------


def read_cursor(data: bytes) -> int:
    require(len(data) == 24, "a cursor of version 1 has 24 bytes")
    magic, version, size, position, crc = struct.unpack("<8sHHQI", data)
    require(magic == b"QUIVER\0T", "magic")
    require((version, size) == (1, 24), "version and size")
    require(zlib.crc32(data[:20]) == crc, "CRC")
    return int(position)


class ProgressEntry(NamedTuple):
    seg: int
    bundles: int
    words: list[int]


class ProgressFile(NamedTuple):
    flags: int
    oldest: int
    entries: list[ProgressEntry]


def read_progress(data: bytes) -> ProgressFile:
    require(len(data) >= 36, "shorter than header and CRC")
    require(zlib.crc32(data[:-4]) == struct.unpack("<I", data[-4:])[0], "CRC")
    magic, version, header_size, flags, oldest, count = struct.unpack_from("<8sHHHQI", data)
    require(magic == b"QUIVSUB\0", "magic")
    require(version == 1, "version")
    require(header_size >= 32, "header size")
    require(data[26:32] == bytes(6), "reserved bytes are written as zero")
    require(count <= 1_000_000, "too many entries")
    entries: list[ProgressEntry] = []
    position = header_size
    for _ in range(count):
        require(position + 14 <= len(data) - 4, "entry cut off")
        seg, bundles, word_count = struct.unpack_from("<QIH", data, position)
        require(word_count <= 1024, "too many bitmap words")
        require(word_count == (bundles + 63) // 64, "bitmap words do not fit the bundles")
        require(position + 14 + 8 * word_count <= len(data) - 4, "bitmap cut off")
        words = list(struct.unpack_from(f"<{word_count}Q", data, position + 14))
        require(not entries or entries[-1].seg < seg, "segments are written in ascending order")
        entries.append(ProgressEntry(seg, bundles, words))
        position += 14 + 8 * word_count
    return ProgressFile(flags, oldest, entries)


# --- segments ----------------------------------------------------------------------------------

DIRECTORY_COLUMNS: dict[str, pa.DataType] = {
    "stream_id": pa.uint32(),
    "slot_id": pa.uint16(),
    "schema_fingerprint": pa.binary(32),
    "byte_offset": pa.uint64(),
    "byte_length": pa.uint64(),
    "row_count": pa.uint64(),
    "chunk_count": pa.uint32(),
}
REF_FIELDS: dict[str, pa.DataType] = {
    "slot_id": pa.uint16(),
    "stream_id": pa.uint32(),
    "chunk_index": pa.uint32(),
}


class Stream(NamedTuple):
    stream_id: int
    slot_id: int
    fingerprint: bytes
    offset: int
    length: int
    rows: int
    chunks: list[pa.RecordBatch]


class Bundle(NamedTuple):
    item_count: int | None
    payloads: dict[int, tuple[bytes, pa.RecordBatch]]


class Segment(NamedTuple):
    version: int
    stream_count: int
    bundle_count: int
    directory: tuple[int, int]
    manifest: tuple[int, int]
    footer_size: int
    crc: int
    streams: list[Stream]
    bundles: list[Bundle]


def read_segment(data: bytes) -> Segment:
    """Trailer, footer, sum of the whole file, regions, directory, streams, manifest."""
    require(len(data) >= 16, "shorter than a trailer")
    footer_size, magic, crc = struct.unpack("<I8sI", data[-16:])
    require(magic == b"QUIVER\0S", "trailer magic")
    footer_at = len(data) - 16 - footer_size
    require(footer_at >= 0, "footer larger than the file")
    require(footer_size >= 34, "footer shorter than version 1")
    version, streams, bundles, *regions = struct.unpack_from("<HIIQIQI", data, footer_at)
    require(version == 1, "footer version")
    require(zlib.crc32(data[:-4]) == crc, "CRC of the file")
    directory, manifest = (regions[0], regions[1]), (regions[2], regions[3])
    for offset, length in (directory, manifest):
        require(offset + length <= footer_at, "region outside the file")
    stream_list = _read_directory(data, directory)
    bundle_list = _read_manifest(data, manifest, stream_list)
    require(len(stream_list) == streams, "stream_count")
    require(len(bundle_list) == bundles, "bundle_count")
    return Segment(
        version,
        streams,
        bundles,
        directory,
        manifest,
        footer_size,
        crc,
        stream_list,
        bundle_list,
    )


def _only_batch(region: bytes) -> pa.RecordBatch:
    with pa.ipc.open_file(region) as reader:
        require(reader.num_record_batches == 1, "a table is one batch")
        batch = reader.get_batch(0)
    batch.validate(full=True)
    return batch


def _column(batch: pa.RecordBatch, name: str, data_type: pa.DataType) -> list[Any]:
    """A column that every reader needs: exact type, declared non-null, once."""
    require(batch.schema.names.count(name) == 1, f"one column {name}")
    field = batch.schema.field(name)
    require(field.type == data_type, f"{name} is {field.type}, not {data_type}")
    require(not field.nullable, f"{name} is declared nullable")
    return batch.column(name).to_pylist()


def _read_directory(data: bytes, region: tuple[int, int]) -> list[Stream]:
    batch = _only_batch(data[region[0] : sum(region)])
    require(batch.schema.metadata is None, "the tables carry no metadata")
    require(batch.num_rows <= 100_000, "too many streams")
    require(batch.schema.names[:7] == list(DIRECTORY_COLUMNS), "order of the directory's columns")
    columns = [_column(batch, name, kind) for name, kind in DIRECTORY_COLUMNS.items()]
    streams: list[Stream] = []
    for stream_id, slot_id, fingerprint, offset, length, rows, chunk_count in zip(
        *columns, strict=True
    ):
        require(stream_id == len(streams), "stream ids count up from 0")
        require(slot_id < 64, "slot id")
        require(offset % 64 == 0, "streams start at multiples of 64")
        require(offset + length <= region[0], "streams lie before the directory")
        before = streams[-1].offset + streams[-1].length if streams else 0
        require(data[before:offset] == bytes(offset - before), "padding is zero")
        chunks = _read_file(data[offset : offset + length])
        require(len(chunks) == chunk_count, "chunk_count")
        require(sum(chunk.num_rows for chunk in chunks) == rows, "row_count")
        streams.append(Stream(stream_id, slot_id, fingerprint, offset, length, rows, chunks))
    return streams


def _read_file(region: bytes) -> list[pa.RecordBatch]:
    with pa.ipc.open_file(region) as reader:
        chunks = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    for chunk in chunks:
        chunk.validate(full=True)
    return chunks


def _read_manifest(data: bytes, region: tuple[int, int], streams: list[Stream]) -> list[Bundle]:
    batch = _only_batch(data[region[0] : sum(region)])
    require(batch.schema.metadata is None, "the tables carry no metadata")
    require(batch.num_rows <= 10_000_000, "too many bundles")
    indices = _column(batch, "bundle_index", pa.uint32())
    require(indices == list(range(batch.num_rows)), "bundle_index counts up from 0")
    bundles = []
    for refs, item_count in zip(_slot_refs(batch), _item_counts(batch), strict=True):
        require(len(refs) <= 64, "too many slots in a bundle")
        payloads = {}
        for ref in refs:
            require(ref["stream_id"] < len(streams), "slot_refs to a stream that is not there")
            stream = streams[ref["stream_id"]]
            require(stream.slot_id == ref["slot_id"], "slot of the stream and of the reference")
            require(ref["chunk_index"] < len(stream.chunks), "chunk that is not there")
            require(ref["slot_id"] not in payloads, "slot twice in one bundle")
            payloads[ref["slot_id"]] = (stream.fingerprint, stream.chunks[ref["chunk_index"]])
        bundles.append(Bundle(item_count, payloads))
    return bundles


def _slot_refs(batch: pa.RecordBatch) -> list[list[dict[str, int]]]:
    field = batch.schema.field("slot_refs")
    require(not field.nullable, "slot_refs is declared nullable")
    require(isinstance(field.type, pa.ListType), "slot_refs is not a list")
    struct_type: Any = field.type.value_type
    require(pa.types.is_struct(struct_type), "slot_refs is not a list of structs")
    fields = {item.name: item for item in struct_type}
    require(list(fields) == list(REF_FIELDS), "fields of slot_refs")
    for name, data_type in REF_FIELDS.items():
        require(fields[name].type == data_type, f"type of slot_refs.{name}")
        require(not fields[name].nullable, f"slot_refs.{name} is declared nullable")
    refs: list[Any] = batch.column("slot_refs").to_pylist()
    require(all(ref is not None for row in refs for ref in row), "null in slot_refs")
    return refs


def _item_counts(batch: pa.RecordBatch) -> list[int | None]:
    """Absent, of another type, or null: unknown."""
    if "item_count" not in batch.schema.names:
        return [None] * batch.num_rows
    if batch.schema.field("item_count").type != pa.uint64():
        return [None] * batch.num_rows
    return batch.column("item_count").to_pylist()
