"""Arrow IPC in and out, for bytes that may be damaged or hostile.

Arrow checks the structure of what it reads, with two gaps that matter here, both closed below.
A compressed buffer says in its first eight bytes how much memory to allocate for it; those claims
are added up and held against a limit before Arrow sees the message. And a batch can be well framed
and still hold offsets or dictionary keys that point outside its buffers: ``Validation.FULL`` looks
at every one of them, ``Validation.LAYOUT`` at the sizes only, for bytes whose sum was verified.

What is peeked at in the metadata of a message (a flatbuffer; slots of its tables in brackets):

==================  ===========================================================================
Message             header type [1], header [2], body length [3]
RecordBatch         buffers [2]: vector of (offset i64, length i64); compression [3]
DictionaryBatch     data [1]: a RecordBatch
Footer (of a file)  dictionaries [2], record batches [3]: vectors of
                    (offset i64, metadata length i32, 4 bytes unused, body length i64)
==================  ===========================================================================
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa

from quiver.bundle import RecentSchemas, schema_id
from quiver.disk import BytesLike
from quiver.errors import FormatError, InvalidBundle, LimitExceeded, Truncated

MAX_DECOMPRESSED_BYTES: Final = 256 * 1024 * 1024
MAX_BATCHES: Final = 10_000_000
MAX_DICTIONARIES: Final = 10_000
END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_FILE_MAGIC = b"ARROW1"
_CONTINUATION = 0xFFFFFFFF
_PREFIX = struct.Struct("<II")
_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_BLOCK = struct.Struct("<qi4xq")
_BUFFER = struct.Struct("<qq")
_DICTIONARY_BATCH = 2
_RECORD_BATCH = 3
_KNOWN_SCHEMA_LIMIT = 256
# Where the vtables of Message and RecordBatch say where these fields are.
_HEADER_ENTRY = 8
_COMPRESSION_ENTRY = 10


class Validation(enum.Enum):
    """How closely a decoded batch is looked at before it is handed out."""

    LAYOUT = "layout"
    FULL = "full"


# --- writing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SchemaFacts:
    message: bytes
    dictionaries: tuple[pa.DictionaryType[Any, Any, Any], ...]


def _schema_facts(schema: pa.Schema) -> _SchemaFacts:
    return _SchemaFacts(schema.serialize().to_pybytes(), tuple(_dictionary_types(schema)))


_recent_facts = RecentSchemas(_schema_facts)


def _dictionary_types(
    fields: Iterable[pa.Field[Any]],
) -> Iterator[pa.DictionaryType[Any, Any, Any]]:
    """Every dictionary type below these fields, at any depth."""
    for field in fields:
        data_type = field.type
        if isinstance(data_type, pa.BaseExtensionType):
            data_type = data_type.storage_type
        if isinstance(data_type, pa.DictionaryType):
            yield data_type
            yield from _dictionary_types([pa.field("", data_type.value_type)])
        elif isinstance(data_type, pa.RunEndEncodedType):
            yield from _dictionary_types([pa.field("", data_type.value_type)])
        else:
            yield from _dictionary_types(data_type.field(i) for i in range(data_type.num_fields))


def has_dictionaries(schema: pa.Schema) -> bool:
    """Whether any field, at any depth, is dictionary-encoded."""
    return bool(_recent_facts(schema).dictionaries)


def has_ordered_dictionaries(schema: pa.Schema) -> bool:
    """Whether the order of values means something in any of the dictionaries."""
    return any(data_type.ordered for data_type in _recent_facts(schema).dictionaries)


def encode_stream(batch: pa.RecordBatch) -> list[BytesLike]:
    """One IPC stream with one batch, as buffers to be written one after the other."""
    facts = _recent_facts(batch.schema)
    if facts.dictionaries:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return [sink.getvalue()]
    # The schema message is the same each time; serialising only the batch saves most of the work.
    return [facts.message, batch.serialize(), END_OF_STREAM]


def can_share_file(batches: Sequence[pa.RecordBatch]) -> bool:
    """Whether the dictionaries of the batches are equal, as one IPC file needs them."""
    try:
        _write_file(pa.MockOutputStream(), batches[0].schema, batches)
    except pa.ArrowInvalid:
        return False
    return True


def encode_file(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
    """One IPC file. Dictionaries of the batches must be equal: see ``segment.dictionaries``."""
    counter = pa.MockOutputStream()
    _write_file(counter, schema, batches)
    target = pa.allocate_buffer(counter.size())
    _write_file(pa.FixedSizeBufferWriter(target), schema, batches)
    return target


def _write_file(sink: pa.NativeFile, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> None:
    with pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


# --- reading -----------------------------------------------------------------------------------

_ARROW_ERRORS: Final = (pa.ArrowException, OSError, ValueError, StopIteration, MemoryError)


@contextmanager
def _naming(source: str, offset: int, what: str) -> Iterator[None]:
    """Turn what Arrow raises into an error that names the place."""
    try:
        yield
    except (FormatError, InvalidBundle):
        raise
    except _ARROW_ERRORS as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise FormatError(source, offset, f"{what} is not valid Arrow IPC: {reason}") from error


class _KnownSchema(NamedTuple):
    schema: pa.Schema
    has_dictionaries: bool


_known_schemas: dict[bytes, _KnownSchema] = {}


def decode_stream(
    payload: pa.Buffer, *, source: str, offset: int, validation: Validation
) -> pa.RecordBatch:
    """The first batch of an IPC stream. ``offset`` is where the payload starts in ``source``."""
    view = memoryview(payload)
    schema_end = _metadata_end(view, 0, source, offset, "the schema message")
    known = _known_schemas.get(bytes(view[:schema_end])) or _learn_schema(
        payload.slice(0, schema_end), source, offset
    )
    try:
        if known.has_dictionaries:
            _check_messages(view, schema_end, source, offset)
            batch = pa.ipc.open_stream(payload).read_next_batch()
        else:
            if _may_be_compressed(view, schema_end):
                _check_message(view, schema_end, source, offset)
            batch = pa.ipc.read_record_batch(payload.slice(schema_end), known.schema)
        batch.validate(full=validation is Validation.FULL)
    except FormatError:
        raise
    except _ARROW_ERRORS:
        with _naming(source, offset, "a batch"):
            raise
    return batch


def _learn_schema(message: pa.Buffer, source: str, offset: int) -> _KnownSchema:
    with _naming(source, offset, "the schema message"):
        schema = pa.ipc.read_schema(message)
        try:
            schema_id(
                schema
            )  # walks every name and type: bad UTF-8 and bottomless nesting end here
        except InvalidBundle as error:
            raise FormatError(source, offset, str(error)) from error
    if len(_known_schemas) >= _KNOWN_SCHEMA_LIMIT:
        _known_schemas.clear()
    known = _KnownSchema(schema, has_dictionaries(schema))
    _known_schemas[message.to_pybytes()] = known
    return known


class IpcFile:
    """An IPC file inside a larger one: batches by index, no copy, nothing read before it is asked.

    ``offset`` is where ``data`` starts in ``source``, for errors.
    """

    def __init__(self, data: pa.Buffer, *, source: str, offset: int) -> None:
        self._source = source
        self._offset = offset
        self._view = memoryview(data)
        dictionaries, self._blocks = self._read_footer()
        with _naming(source, offset, "a stream"):
            self._reader = pa.ipc.open_file(data)
            self.schema: pa.Schema = self._reader.schema
            try:
                schema_id(self.schema)
            except InvalidBundle as error:
                raise FormatError(source, offset, str(error)) from error
        for position, _, _ in dictionaries:
            _check_message(self._view, position, source, offset)

    @property
    def batch_count(self) -> int:
        """How many batches the file holds."""
        return len(self._blocks)

    def batch(self, index: int, validation: Validation) -> pa.RecordBatch:
        """One batch; its buffers lie inside ``data`` unless they were compressed."""
        position = self._blocks[index][0]
        if _may_be_compressed(self._view, position):
            _check_message(self._view, position, self._source, self._offset)
        with _naming(self._source, self._offset + position, f"batch {index}"):
            batch: pa.RecordBatch = self._reader.get_batch(index)
            batch.validate(full=validation is Validation.FULL)
        return batch

    def _read_footer(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """The blocks of the dictionaries and of the batches."""
        tail = len(_FILE_MAGIC) + _I32.size
        end = len(self._view) - tail
        if end < len(_FILE_MAGIC) or self._view[end + _I32.size :] != _FILE_MAGIC:
            raise FormatError(
                self._source, self._offset, "a stream does not end like an Arrow IPC file"
            )
        length = _I32.unpack_from(self._view, end)[0]
        if not 0 < length <= end:
            raise FormatError(
                self._source, self._offset + end, f"a stream claims a footer of {length} bytes"
            )
        footer = self._view[end - length : end]
        try:
            table = _table(footer, 0)
            return (
                _blocks(footer, table, 2, MAX_DICTIONARIES, len(self._view)),
                _blocks(footer, table, 3, MAX_BATCHES, len(self._view)),
            )
        except (struct.error, ValueError) as error:
            raise FormatError(
                self._source, self._offset + end - length, f"a stream's footer is damaged: {error}"
            ) from error


# --- peeking into flatbuffers -------------------------------------------------------------------


def _metadata_end(view: memoryview, start: int, source: str, base: int, what: str) -> int:
    """Where the metadata of the message at ``start`` ends, and its body begins."""
    if start < 0 or start + _PREFIX.size > len(view):
        have = max(0, len(view) - start)
        raise Truncated(source, base + start, need=_PREFIX.size, have=have, what=what)
    marker, length = _PREFIX.unpack_from(view, start)
    end: int = start + _PREFIX.size + length
    if marker != _CONTINUATION or length == 0:
        raise FormatError(source, base + start, f"{what} does not start as Arrow messages do")
    if end > len(view):
        raise Truncated(source, base + start, need=end - start, have=len(view) - start, what=what)
    return end


def _check_messages(view: memoryview, start: int, source: str, base: int) -> None:
    """Check every message up to and including the first batch."""
    for _ in range(MAX_DICTIONARIES):
        kind, start = _check_message(view, start, source, base)
        if kind == _RECORD_BATCH:
            return
    raise LimitExceeded(
        source, base, f"a payload starts with more than {MAX_DICTIONARIES} dictionaries"
    )


def _check_message(view: memoryview, start: int, source: str, base: int) -> tuple[int, int]:
    """Refuse a message that would make Arrow allocate too much; its kind, and where it ends."""
    body = _metadata_end(view, start, source, base, "a message")
    metadata = view[start + _PREFIX.size : body]
    try:
        message = _table(metadata, 0)
        kind = metadata[_field(metadata, message, 1)]
        header = _table(metadata, _field(metadata, message, 2))
        if kind == _DICTIONARY_BATCH:
            header = _table(metadata, _field(metadata, header, 1))
        elif kind != _RECORD_BATCH:
            raise ValueError(f"a message of kind {kind} where data was expected")
        length_at = _find_field(metadata, message, 3)
        end = body + (_I64.unpack_from(metadata, length_at)[0] if length_at else 0)
        if not body <= end <= len(view):
            raise ValueError(f"a message body of {end - body} bytes, {len(view) - body} are left")
        if _find_field(metadata, header, 3):
            _check_claims(metadata, header, view[body:end])
    except LimitExceeded as error:
        raise LimitExceeded(source, base + start, error.reason) from None
    except (struct.error, ValueError, IndexError) as error:
        raise FormatError(source, base + start, f"a message is damaged: {error}") from error
    return kind, end


def _may_be_compressed(view: memoryview, start: int) -> bool:
    """Whether a record batch has the compression field, or cannot be told not to have it.

    This runs for every batch read, so it follows references without checking them: when they
    lead outside the metadata, Arrow's own verification refuses the message.
    """
    base = start + _PREFIX.size
    try:
        message = base + _U32.unpack_from(view, base)[0]
        vtable = message - _I32.unpack_from(view, message)[0]
        header = message + _U16.unpack_from(view, vtable + _HEADER_ENTRY)[0]
        header += _U32.unpack_from(view, header)[0]
        vtable = header - _I32.unpack_from(view, header)[0]
        if _U16.unpack_from(view, vtable)[0] <= _COMPRESSION_ENTRY:
            return False
        return bool(_U16.unpack_from(view, vtable + _COMPRESSION_ENTRY)[0])
    except struct.error:
        return True


def _check_claims(metadata: memoryview, header: int, body: memoryview) -> None:
    """Add up how large the compressed buffers of a message say they are."""
    buffers = _field(metadata, header, 2)
    first, count = _vector(metadata, buffers, _BUFFER.size)
    claimed = 0
    for offset, length in _BUFFER.iter_unpack(metadata[first : first + count * _BUFFER.size]):
        if length == 0:
            continue
        if not 0 <= offset <= len(body) - length or length < _I64.size:
            raise ValueError("a compressed buffer lies outside its message")
        claimed += max(length, _I64.unpack_from(body, offset)[0])
    if claimed > MAX_DECOMPRESSED_BYTES:
        raise LimitExceeded(
            "",
            0,
            f"a batch claims {claimed} bytes uncompressed, {MAX_DECOMPRESSED_BYTES} are allowed",
        )


def _table(data: memoryview, reference: int) -> int:
    """Follow the reference to a table."""
    return reference + int(_U32.unpack_from(data, reference)[0])


def _find_field(data: memoryview, table: int, slot: int) -> int:
    """Where a field of a table lies; 0 when it is left out."""
    vtable = table - _I32.unpack_from(data, table)[0]
    if vtable < 0:
        raise ValueError("a table points before the start of its message")
    entry = 4 + 2 * slot
    if entry + 2 > _U16.unpack_from(data, vtable)[0]:
        return 0
    offset = int(_U16.unpack_from(data, vtable + entry)[0])
    return table + offset if offset else 0


def _field(data: memoryview, table: int, slot: int) -> int:
    position = _find_field(data, table, slot)
    if not position:
        raise ValueError(f"field {slot} of a table is missing")
    return position


def _vector(data: memoryview, reference: int, item_size: int) -> tuple[int, int]:
    """Where the items of a vector start, and how many fit."""
    start = _table(data, reference)
    count = int(_U32.unpack_from(data, start)[0])
    first = start + _U32.size
    if count * item_size > len(data) - first:
        raise ValueError(f"a vector of {count} items does not fit")
    return first, count


def _blocks(
    footer: memoryview, table: int, slot: int, limit: int, size: int
) -> list[tuple[int, int, int]]:
    position = _find_field(footer, table, slot)
    if not position:
        return []
    first, count = _vector(footer, position, _BLOCK.size)
    if count > limit:
        raise ValueError(f"{count} messages, {limit} are allowed")
    blocks = list(_BLOCK.iter_unpack(footer[first : first + count * _BLOCK.size]))
    for offset, metadata_length, body_length in blocks:
        if min(offset, metadata_length, body_length) < 0 or offset > size:
            raise ValueError("a message lies outside the stream")
    return blocks
