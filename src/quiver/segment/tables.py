"""The two tables of a segment: which streams it has, and which chunks make up each bundle.

Stream directory, one row per stream:

====================  ==================  ======================================================
column                type                meaning
====================  ==================  ======================================================
stream_id             uint32              0, 1, 2 ... in the order of the file
slot_id               uint16
schema_fingerprint    fixed binary of 32
byte_offset           uint64              where the stream starts in the file
byte_length           uint64              without padding
row_count             uint64              of all its chunks
chunk_count           uint32              record batches
crc32                 uint32              of its bytes (ours)
min_event_time_ns     int64, nullable     of the event time column, where the slot has one (ours)
max_event_time_ns     int64, nullable     likewise
====================  ==================  ======================================================

Batch manifest, one row per bundle, in order of arrival:

====================  ==================  ======================================================
bundle_index          uint32              the row number
item_count            uint64, nullable    left out when no bundle of the segment knows it
slot_refs             list of struct      (slot_id uint16, stream_id uint32, chunk_index uint32),
                                          in the order of the bundle's descriptor
ingestion_time_ns     int64, nullable     when it arrived (ours)
sequence              uint64, nullable    its number in the log (ours)
signal                string, nullable    logs, traces or metrics (ours)
min_event_time_ns     int64, nullable     over its slots (ours)
max_event_time_ns     int64, nullable     likewise
====================  ==================  ======================================================

Columns marked ours are absent in files of the reference implementation, which in turn does not look
at them. They are found by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn, overload

import pyarrow as pa

from quiver.bundle import FINGERPRINT_SIZE, SLOT_COUNT, Signal
from quiver.errors import FormatError, LimitExceeded
from quiver.ipc import IpcFile, Validation, encode_file
from quiver.ipc_guard import MAX_BATCHES
from quiver.segment.layout import MAX_BUNDLES, MAX_STREAMS


def _required(name: str, data_type: pa.DataType) -> pa.Field[Any]:
    return pa.field(name, data_type, nullable=False)


_REF_FIELDS: Final = (
    _required("slot_id", pa.uint16()),
    _required("stream_id", pa.uint32()),
    _required("chunk_index", pa.uint32()),
)
_DIRECTORY_SCHEMA: Final = pa.schema(
    [
        _required("stream_id", pa.uint32()),
        _required("slot_id", pa.uint16()),
        _required("schema_fingerprint", pa.binary(FINGERPRINT_SIZE)),
        _required("byte_offset", pa.uint64()),
        _required("byte_length", pa.uint64()),
        _required("row_count", pa.uint64()),
        _required("chunk_count", pa.uint32()),
        _required("crc32", pa.uint32()),
        pa.field("min_event_time_ns", pa.int64()),
        pa.field("max_event_time_ns", pa.int64()),
    ]
)
_ITEM_COUNT_FIELD: Final = pa.field("item_count", pa.uint64())
_SLOT_REFS_FIELD: Final = _required("slot_refs", pa.list_(pa.struct(_REF_FIELDS)))
_OUR_MANIFEST_FIELDS: Final = (
    pa.field("ingestion_time_ns", pa.int64()),
    pa.field("sequence", pa.uint64()),
    pa.field("signal", pa.string()),
    pa.field("min_event_time_ns", pa.int64()),
    pa.field("max_event_time_ns", pa.int64()),
)


class StreamEntry(NamedTuple):
    """A row of the directory."""

    stream_id: int
    slot_id: int
    schema_fingerprint: bytes
    byte_offset: int
    byte_length: int
    row_count: int
    chunk_count: int
    crc32: int | None = None
    min_event_time_ns: int | None = None
    max_event_time_ns: int | None = None


class SlotRef(NamedTuple):
    """Where the batch of one slot lies."""

    slot_id: int
    stream_id: int
    chunk_index: int


class BundleEntry(NamedTuple):
    """A row of the manifest."""

    bundle_index: int
    slot_refs: tuple[SlotRef, ...]
    item_count: int | None = None
    ingestion_time_ns: int | None = None
    sequence: int | None = None
    signal: Signal | None = None
    min_event_time_ns: int | None = None
    max_event_time_ns: int | None = None


def encode_directory(streams: Sequence[StreamEntry]) -> pa.Buffer:
    """The directory as an IPC file."""
    columns = [
        pa.array([stream[i] for stream in streams], field.type)
        for i, field in enumerate(_DIRECTORY_SCHEMA)
    ]
    return _encode(pa.RecordBatch.from_arrays(columns, schema=_DIRECTORY_SCHEMA))


def encode_manifest(bundles: Sequence[BundleEntry]) -> pa.Buffer:
    """The manifest as an IPC file."""
    refs = [ref for bundle in bundles for ref in bundle.slot_refs]
    offsets = [0]
    for bundle in bundles:
        offsets.append(offsets[-1] + len(bundle.slot_refs))
    structs = pa.StructArray.from_arrays(
        [pa.array([r[i] for r in refs], field.type) for i, field in enumerate(_REF_FIELDS)],
        fields=list(_REF_FIELDS),
    )
    slot_refs = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), structs, type=_SLOT_REFS_FIELD.type
    )
    fields = [_required("bundle_index", pa.uint32())]
    columns: list[pa.Array[Any]] = [pa.array([b.bundle_index for b in bundles], pa.uint32())]
    if any(bundle.item_count is not None for bundle in bundles):
        fields.append(_ITEM_COUNT_FIELD)
        columns.append(pa.array([b.item_count for b in bundles], pa.uint64()))
    fields += [_SLOT_REFS_FIELD, *_OUR_MANIFEST_FIELDS]
    columns.append(slot_refs)
    columns += [
        pa.array([getattr(bundle, field.name) for bundle in bundles], field.type)
        for field in _OUR_MANIFEST_FIELDS
    ]
    return _encode(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)))


def _encode(batch: pa.RecordBatch) -> pa.Buffer:
    return encode_file(batch.schema, [batch])


def decode_directory(data: pa.Buffer, *, source: str, offset: int) -> tuple[StreamEntry, ...]:
    """The rows of the directory. ``offset`` is where it starts in the file."""
    table = _Table(data, MAX_STREAMS, source=source, offset=offset, what="the stream directory")
    fields = list(_DIRECTORY_SCHEMA)
    columns = [table.required(field) for field in fields[:7]]
    columns += [table.optional(field) for field in fields[7:]]
    streams = tuple(StreamEntry._make(row) for row in zip(*columns, strict=True))
    for stream in streams:
        if stream.slot_id >= SLOT_COUNT or stream.chunk_count > MAX_BATCHES:
            raise LimitExceeded(
                source,
                offset,
                f"stream {stream.stream_id} is of slot {stream.slot_id} and has "
                f"{stream.chunk_count} chunks; slots are below {SLOT_COUNT}, "
                f"chunks at most {MAX_BATCHES}",
            )
    if len({stream.stream_id for stream in streams}) != len(streams):
        raise FormatError(source, offset, "two streams of the directory have the same id")
    return streams


class Manifest(Sequence[BundleEntry]):
    """The rows of the manifest. Each is made when it is asked for: there may be very many."""

    def __init__(self, data: pa.Buffer, *, source: str, offset: int) -> None:
        table = _Table(data, MAX_BUNDLES, source=source, offset=offset, what="the batch manifest")
        refs = table.slot_refs()
        self._table = table
        self._ref_ends: list[Any] = refs.offsets.to_pylist()
        columns = [table.struct_field(refs, field) for field in _REF_FIELDS]
        self._refs: list[tuple[int, int, int]] = list(zip(*columns, strict=True))
        self._items = table.optional(_ITEM_COUNT_FIELD)
        self._facts = [table.optional(field) for field in _OUR_MANIFEST_FIELDS]

    def __len__(self) -> int:
        return self._table.row_count

    @overload
    def __getitem__(self, index: int) -> BundleEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[BundleEntry]: ...
    def __getitem__(self, index: int | slice) -> BundleEntry | list[BundleEntry]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        refs = self.slot_refs(index)
        time_ns, sequence, signal, earliest, latest = (column[index] for column in self._facts)
        return BundleEntry(
            index,
            tuple(SlotRef._make(ref) for ref in refs),
            self._items[index],
            time_ns,
            sequence,
            Signal(signal) if signal in _SIGNALS else None,
            earliest,
            latest,
        )

    def slot_refs(self, index: int) -> list[tuple[int, int, int]]:
        """Slot, stream and chunk of each payload: what reading a bundle needs, and no more."""
        if not 0 <= index < len(self):
            raise IndexError(f"there is no bundle {index}, the segment has {len(self)}")
        start, end = self._ref_ends[index : index + 2]
        if end - start > SLOT_COUNT:
            self._table.fail(f"bundle {index} has {end - start} slots, {SLOT_COUNT} are possible")
        return self._refs[start:end]

    def item_count(self, index: int) -> int | None:
        """How many items the bundle has, where known."""
        count: int | None = self._items[index]
        return count

    def ingestion_time_ns(self, index: int) -> int | None:
        """When the bundle arrived, where known."""
        time_ns: int | None = self._facts[0][index]
        return time_ns


_SIGNALS: Final = frozenset(Signal)


class _Table:
    """One batch in an IPC file, whose columns are looked up by name and held to their types."""

    def __init__(
        self, data: pa.Buffer, max_rows: int, *, source: str, offset: int, what: str
    ) -> None:
        self._source = source
        self._offset = offset
        self._what = what
        file = IpcFile(data, source=source, offset=offset, compression=False)
        if file.batch_count != 1:
            self.fail(f"has {file.batch_count} batches, not one")
        self._batch = file.batch(0, Validation.FULL)
        self.row_count: int = self._batch.num_rows
        if self.row_count > max_rows:
            raise LimitExceeded(
                source, offset, f"{what} has {self.row_count} rows, at most {max_rows} are read"
            )

    def fail(self, problem: str) -> NoReturn:
        raise FormatError(self._source, self._offset, f"{self._what} {problem}")

    def required(self, field: pa.Field[Any]) -> list[Any]:
        """The values of a column that every file has."""
        index = self._batch.schema.get_field_index(field.name)
        if index < 0:
            self.fail(f"has no column {field.name}, or more than one")
        return self._values(self._batch.column(index), field)

    def optional(self, field: pa.Field[Any]) -> list[Any]:
        """The values of a column that a file may lack; None where it does, or has another type."""
        index = self._batch.schema.get_field_index(field.name)
        if index < 0 or self._batch.schema.field(index).type != field.type:
            return [None] * self.row_count
        return self._batch.column(index).to_pylist()

    def slot_refs(self) -> pa.ListArray[Any]:
        """The one column that is not flat."""
        index = self._batch.schema.get_field_index(_SLOT_REFS_FIELD.name)
        column = self._batch.column(index) if index >= 0 else None
        if not isinstance(column, pa.ListArray) or not pa.types.is_struct(column.type.value_type):
            self.fail("has no column slot_refs that is a list of structs")
        if column.null_count or column.values.null_count:
            self.fail("has nulls in slot_refs")
        return column

    def struct_field(self, refs: pa.ListArray[Any], field: pa.Field[Any]) -> list[Any]:
        """The values of one field of the structs in a column of lists."""
        structs: Any = refs.values
        index = structs.type.get_field_index(field.name)
        if index < 0:
            self.fail(f"has no {field.name} in slot_refs, or more than one")
        return self._values(structs.field(index), field)

    def _values(self, column: pa.Array[Any], field: pa.Field[Any]) -> list[Any]:
        if column.type != field.type:
            self.fail(f"has {field.name} as {column.type}, not {field.type}")
        if column.null_count:
            self.fail(f"has nulls in {field.name}")
        return column.to_pylist()
