"""OTAP batches to and from the payloads of one gRPC stream, both of which remember.

The payloads of one type are the fragments of one Arrow IPC stream: the schema comes with the first,
dictionaries come when they are new, grow (delta) or are replaced. Whoever reads remembers them, so
a fragment that cannot be read leaves a stream that cannot go on: ``StreamBroken``.

Which IPC stream a fragment belongs to, by type and schema id:

* one that begins with a schema begins a new stream, and ends the others of its type;
* any other belongs to the stream of its type and schema id, or else of its schema id, since some
  senders have one stream for several types with the same schema.

The tables that come out stand for themselves: they have the values of dictionaries that they use.
Ids are left as they were sent, plain or as differences, and so is what their fields say about it:
``quiver.otlp.convert.from_otap`` understands them. What is checked here is that the bytes are safe
to work with, that the tables belong to the signal, and the types of columns. Whether ids refer to
rows that exist is seen by whoever converts them.

Fragments that are sent have their dictionaries replaced, not grown: not all readers know deltas.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import types

from quiver.bundle import Signal, Slot, schema_id, slot_name
from quiver.errors import InvalidBundle, InvalidRequest
from quiver.ipc import END_OF_STREAM
from quiver.ipc_guard import (
    MAX_DICTIONARIES,
    RECORD_BATCH,
    Refused,
    check_message,
    check_schema_message,
    metadata_end,
)
from quiver.otlp.otap.read import Limits, native
from quiver.otlp.otap.schema import ROOTS, SCHEMAS, SLOTS, Array, Kind
from quiver.pipeline.otap_wire import ArrowPayload, BatchArrowRecords

_MAX_SCHEMA_ID: Final = 64 * 1024
_MAX_REASON: Final = 500
"""Characters: names of columns come from outside."""
_SMALL_DICTIONARY: Final = 16 * 1024
"""Bytes of values that may go along although no row uses them."""
_ANY_SIZE: Final = Limits(max_bytes=2**62, max_depth=1)
_ARROW_ERRORS: Final = (pa.ArrowException, EOFError, MemoryError, OSError, StopIteration)
_READ_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)
_COMPRESSIONS: Final = {"none": None, "zstd": "zstd", "lz4": "lz4"}
_POINT_SLOTS: Final = frozenset(slot for slot in SCHEMAS if slot.name.endswith("DATA_POINTS"))


class StreamBroken(Exception):
    """The stream cannot go on after this batch.

    ``too_much``: the batch itself may be good, but the stream remembers more than it may. The same
    batch can be taken in a new one.
    """

    def __init__(self, reason: str, *, too_much: bool = False) -> None:
        self.reason = reason[:_MAX_REASON]
        self.too_much = too_much
        super().__init__(self.reason)


def count_rows(signal: Signal, tables: Mapping[Slot, pa.RecordBatch]) -> int:
    """Spans, log records or data points."""
    if signal is Signal.METRICS:
        return sum(table.num_rows for slot, table in tables.items() if slot in _POINT_SLOTS)
    return tables[ROOTS[signal]].num_rows


# --- reading --------------------------------------------------------------------------------------


class OtapDecoder:
    """Reads the batches of one gRPC stream, in their order.

    ``max_batch_bytes`` bounds the tables of one batch, uncompressed; ``max_stream_bytes`` the
    schemas and dictionaries of all payload types.
    """

    def __init__(self, signal: Signal, *, max_batch_bytes: int, max_stream_bytes: int) -> None:
        self._signal = signal
        self._max_batch_bytes = max_batch_bytes
        self._max_stream_bytes = max_stream_bytes
        self._readers: dict[tuple[int, str], _IpcReader] = {}

    @property
    def remembered(self) -> int:
        """Bytes of schemas and dictionaries."""
        return sum(reader.remembered for reader in self._readers.values())

    def decode(self, batch: BatchArrowRecords) -> dict[Slot, pa.RecordBatch]:
        """The tables of a batch.

        Raises:
            InvalidRequest: This batch is not OTAP; the next one may be.
            StreamBroken: Neither this one nor any other of this stream can be read.
        """
        tables: dict[Slot, pa.RecordBatch] = {}
        mistake: InvalidRequest | None = None
        left = self._max_batch_bytes
        before = self.remembered
        for payload in batch.payloads:
            if payload.type not in SLOTS[self._signal]:
                # Nobody will read what follows in this IPC stream either, so nothing is lost.
                mistake = InvalidRequest(
                    f"payload type {payload.type} ({slot_name(payload.type)}) is none that OTAP "
                    f"has for {self._signal}"
                )
                continue
            slot = Slot(payload.type)
            read = self._read(slot, payload, left, before)
            left -= read.size
            if slot in tables:
                mistake = InvalidRequest("the table is there twice", where=slot.name)
            mistake = mistake or read.mistake
            tables[slot] = read.table
        if mistake is not None:
            raise mistake
        self._check(tables)
        return tables

    def _read(self, slot: Slot, payload: ArrowPayload, left: int, before: int) -> _Read:
        try:
            reader, start, is_new = self._find(slot, payload)
            scan = _scan(memoryview(payload.record), start)
            self._check_sizes(scan, left, before)
            read = reader.read(slot, payload.record, scan)
        except Refused as error:
            raise StreamBroken(f"{slot.name}: at byte {error.offset}: {error.reason}") from None
        except (*_ARROW_ERRORS, InvalidBundle, ValueError) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise StreamBroken(f"{slot.name}: not valid Arrow IPC: {reason}") from error
        if is_new:
            for key in [key for key in self._readers if key[0] == slot]:
                del self._readers[key]
        if scan.is_end:
            self._readers = {k: r for k, r in self._readers.items() if r is not reader}
        elif is_new:
            self._readers[slot, payload.schema_id] = reader
        return read

    def _find(self, slot: Slot, payload: ArrowPayload) -> tuple[_IpcReader, int, bool]:
        """The IPC stream of a fragment, where its data begins, and whether it is a new stream."""
        view = memoryview(payload.record)
        first = metadata_end(view, 0)
        known = self._readers.get((slot, payload.schema_id)) or next(
            (reader for (_, name), reader in self._readers.items() if name == payload.schema_id),
            None,
        )
        if known is not None:
            try:
                check_message(view, 0)
            except Refused as not_data:
                try:
                    check_schema_message(view[:first])
                except Refused:
                    raise not_data from None
            else:
                return known, 0, False
        check_schema_message(view[:first])
        if len(payload.schema_id) > _MAX_SCHEMA_ID:
            raise Refused(0, f"a schema id of {len(payload.schema_id)} characters")
        return _IpcReader(first + len(payload.schema_id)), first, True

    def _check_sizes(self, scan: _Scan, left: int, before: int) -> None:
        """Before anything is allocated. ``before`` is what was remembered when the batch came.

        If that was nothing, the batch is alone to blame, and would be too much again.
        """
        if scan.size > left:
            raise StreamBroken(
                f"a batch of more than {self._max_batch_bytes} bytes uncompressed: send fewer rows "
                "at once, or raise max_request_bytes"
            )
        remembered = self.remembered
        if remembered + scan.dictionary_size > self._max_stream_bytes:
            raise StreamBroken(
                f"the dictionaries of this stream would take {remembered + scan.dictionary_size} "
                f"bytes, {self._max_stream_bytes} are allowed (max_stream_bytes): begin a new one",
                too_much=before > 0,
            )

    def _check(self, tables: Mapping[Slot, pa.RecordBatch]) -> None:
        root = ROOTS[self._signal]
        if root not in tables:
            raise InvalidRequest("the table is missing; OTAP requires it", where=root.name)
        size = sum(table.nbytes for table in tables.values())
        if size > self._max_batch_bytes:
            raise InvalidRequest(
                f"the tables take {size} bytes with their dictionaries, {self._max_batch_bytes} "
                "are allowed (max_request_bytes): send fewer rows at once"
            )


class _Scan(NamedTuple):
    """What a fragment holds."""

    size: int
    """Bytes of all messages, uncompressed."""
    dictionary_size: int
    is_end: bool
    """Whether the IPC stream ends after it."""


def _scan(view: memoryview, start: int) -> _Scan:
    """Look at every message of a fragment: dictionaries, then one batch."""
    size = dictionary_size = 0
    for _ in range(MAX_DICTIONARIES + 1):
        body = metadata_end(view, start)
        message = check_message(view, start)
        needed = max(message.claimed, message.end - body)
        size += needed + (body - start)
        start = message.end
        if message.kind == RECORD_BATCH:
            left = len(view) - start
            if left and view[start:].tobytes() != END_OF_STREAM:
                raise Refused(start, f"{left} bytes after the batch; send one in a payload")
            return _Scan(size, dictionary_size, is_end=left > 0)
        dictionary_size += needed
    raise Refused(start, f"more than {MAX_DICTIONARIES} dictionaries", over_limit=True)


class _Read(NamedTuple):
    table: pa.RecordBatch
    size: int
    mistake: InvalidRequest | None


class _IpcReader:
    """One IPC stream."""

    def __init__(self, schema_size: int) -> None:
        self._schema_size = schema_size
        self._dictionary_size = 0
        self._feed = _Feed()
        self._reader: Any = None
        self._mistakes: dict[Slot, InvalidRequest | None] = {}
        self._dictionaries: list[int] = []

    @property
    def remembered(self) -> int:
        return self._schema_size + self._dictionary_size

    def read(self, slot: Slot, record: bytes, scan: _Scan) -> _Read:
        """The table in a fragment that was looked at."""
        self._feed.put(record)
        if self._reader is None:
            self._reader = pa.ipc.open_stream(
                pa.PythonFile(self._feed, mode="r"), options=_READ_OPTIONS
            )
            self._learn(self._reader.schema)
        if slot not in self._mistakes:
            self._mistakes[slot] = _mistake(slot, self._reader.schema)
        batch: pa.RecordBatch = self._reader.read_next_batch()
        if batch.num_rows > scan.size:
            raise Refused(0, f"{batch.num_rows} rows in {scan.size} bytes", over_limit=True)
        batch.validate(full=True)
        size = 0
        columns: list[Array] = list(batch.columns)
        for index in self._dictionaries:
            size += _dictionary_size(columns[index])
            columns[index] = _standing_alone(columns[index])
        self._dictionary_size = size
        if self._dictionaries:
            batch = pa.RecordBatch.from_arrays(columns, schema=batch.schema)
        return _Read(batch, scan.size, self._mistakes[slot])

    def _learn(self, schema: pa.Schema) -> None:
        schema_id(schema)  # walks every name and type: bad UTF-8 and what cannot be stored end here
        for index, field in enumerate(schema):
            if _has_dictionaries(field.type, field.name):
                self._dictionaries.append(index)


class _Feed(io.RawIOBase):
    """What an IPC reader reads from: one fragment after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._data = memoryview(b"")
        self._at = 0

    def put(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        # A copy, so that buffers are aligned and a table does not keep the whole message alive.
        end = len(self._data) if size < 0 else self._at + size
        found = bytes(self._data[self._at : end])
        self._at += len(found)
        return found


_LEAVES: Final = (
    types.is_boolean,
    types.is_integer,
    types.is_floating,
    types.is_temporal,
    types.is_string,
    types.is_binary,
    types.is_large_string,
    types.is_large_binary,
    types.is_fixed_size_binary,
    types.is_decimal,
    types.is_null,
)


def _has_dictionaries(kind: Kind, column: str) -> bool:
    """Whether there are dictionaries in a column; ``Refused`` where OTAP has none.

    So are types in which few bytes can be many values, or the same bytes many: views, runs.
    """
    if types.is_struct(kind):
        return any([_has_dictionaries(inner.type, column) for inner in kind])  # noqa: C419 - all
    if types.is_dictionary(kind) and any(is_leaf(kind.value_type) for is_leaf in _LEAVES):
        return True
    items = kind.value_type if types.is_list(kind) else kind
    if (
        types.is_list(kind) and types.is_struct(items) and not _has_dictionaries(items, column)
    ) or any(is_leaf(items) for is_leaf in _LEAVES):
        return False
    raise Refused(0, f"column {column!r} has type {kind}, which no column of OTAP has")


def _mistake(slot: Slot, schema: pa.Schema) -> InvalidRequest | None:
    """What is wrong with the columns of a table."""
    names = schema.names
    if len(set(names)) != len(names):
        return InvalidRequest("a column that is there twice; name each once", where=slot.name)
    wanted = SCHEMAS[slot]
    if "parent_id" in wanted.names and "parent_id" not in names:
        return InvalidRequest(
            "the column is missing; OTAP requires it", where=f"{slot.name}.parent_id"
        )
    kinds = {field.name: field.type for field in wanted}
    try:
        for field in schema:
            kind = kinds.get(field.name)
            if kind is not None and field.type != kind:
                native(pa.nulls(0, field.type), kind, f"{slot.name}.{field.name}", _ANY_SIZE)
    except InvalidRequest as error:
        return error
    return None


def _dictionary_size(column: Array) -> int:
    """Bytes of the dictionaries in a column."""
    if types.is_dictionary(column.type):
        return int(column.dictionary.nbytes)
    if types.is_struct(column.type):
        return sum(_dictionary_size(column.field(i)) for i in range(column.type.num_fields))
    return 0


def _standing_alone(column: Array) -> Array:
    """The same column, with the values of its dictionaries that are used if there are many."""
    if types.is_dictionary(column.type):
        dictionary = column.dictionary
        if len(dictionary) <= len(column) and dictionary.nbytes <= _SMALL_DICTIONARY:
            return column
        return _with_used_values(column)
    if types.is_struct(column.type):
        before = [column.field(i) for i in range(column.type.num_fields)]
        after = [_standing_alone(inner) for inner in before]
        if any(a is not b for a, b in zip(after, before, strict=True)):
            mask = column.is_null() if column.null_count else None
            return pa.StructArray.from_arrays(after, fields=list(column.type), mask=mask)
    return column


def _with_used_values(column: Array) -> Array:
    indices = column.indices
    valid = indices.drop_null() if indices.null_count else indices
    used, places = np.unique(valid.to_numpy(), return_inverse=True)
    dtype = indices.type.to_pandas_dtype()
    if not indices.null_count:
        renumbered = pa.array(places.astype(dtype), type=indices.type)
    else:
        there = indices.is_valid().to_numpy(zero_copy_only=False)
        spread = np.zeros(len(indices), dtype=dtype)
        spread[there] = places
        renumbered = pa.array(spread, type=indices.type, mask=~there)
    values = column.dictionary.take(pa.array(used))
    return pa.DictionaryArray.from_arrays(renumbered, values, ordered=column.type.ordered)


# --- writing --------------------------------------------------------------------------------------


class OtapEncoder:
    """Makes the payloads of one gRPC stream. What it returns must be sent, or ``forget`` called."""

    def __init__(self, compression: str = "none") -> None:
        self._options = pa.ipc.IpcWriteOptions(
            compression=_COMPRESSIONS[compression], use_threads=False
        )
        self._writers: dict[Slot, _IpcWriter] = {}
        self._streams = 0

    def encode(self, tables: Mapping[Slot, pa.RecordBatch]) -> list[ArrowPayload]:
        """The payloads of a batch, its root first; ``InvalidRequest`` if Arrow cannot write it."""
        roots = frozenset(ROOTS.values())
        try:
            return [
                self._payload(slot, tables[slot])
                for slot in sorted(tables, key=lambda slot: (slot not in roots, slot))
            ]
        except BaseException as error:
            self.forget()
            if isinstance(error, pa.ArrowException):
                raise InvalidRequest(f"the tables cannot be written: {error}") from error
            raise

    def forget(self) -> None:
        """Begin new IPC streams: the other side has not seen what was written last."""
        self._writers.clear()

    def _payload(self, slot: Slot, table: pa.RecordBatch) -> ArrowPayload:
        writer = self._writers.get(slot)
        if writer is None or not writer.schema.equals(table.schema, check_metadata=True):
            self._streams += 1
            name = f"{slot.name.lower()}:{self._streams}"
            writer = self._writers[slot] = _IpcWriter(name, table.schema, self._options)
        return ArrowPayload(writer.name, slot, writer.write(table))


class _IpcWriter:
    def __init__(self, name: str, schema: pa.Schema, options: pa.ipc.IpcWriteOptions) -> None:
        self.name = name
        self.schema = schema
        self._sink = _Sink()
        self._writer = pa.ipc.new_stream(
            pa.PythonFile(self._sink, mode="w"), schema, options=options
        )

    def write(self, table: pa.RecordBatch) -> bytes:
        self._writer.write_batch(table)
        return self._sink.taken()


class _Sink(io.RawIOBase):
    """Collects what an IPC writer writes."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - any buffer
        part = bytes(data)
        self._parts.append(part)
        self._at += len(part)
        return len(part)

    def taken(self) -> bytes:
        made = b"".join(self._parts)
        self._parts.clear()
        return made
