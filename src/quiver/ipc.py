"""Arrow IPC in and out, for bytes that may be damaged or hostile.

Arrow checks the structure of what it reads, with gaps that ``ipc_guard`` closes before Arrow sees
the bytes. One is left: a batch can be well framed and still hold offsets or dictionary keys that
point outside its buffers. ``Validation.FULL`` looks at every one of them, ``Validation.LAYOUT`` at
the sizes only, for bytes whose sum was verified.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa

from quiver.bundle import MAX_ROWS, RecentSchemas, schema_id
from quiver.disk import BytesLike
from quiver.errors import FormatError, InvalidBundle, LimitExceeded
from quiver.ipc_guard import (
    MAX_DICTIONARIES,
    MAX_METADATA,
    RECORD_BATCH,
    Block,
    PlainShape,
    Refused,
    check_block,
    check_message,
    check_schema_message,
    metadata_end,
    read_footer,
)

MAX_DECOMPRESSED_BYTES: Final = 256 * 1024 * 1024
END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_KNOWN_SCHEMA_LIMIT = 256
_KNOWN_SCHEMA_SIZE = 64 * 1024
_VIEW_SIZE = 16  # of which the first four bytes are the length of what it shows


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
    if len(facts.dictionaries) > MAX_DICTIONARIES:
        raise InvalidBundle(
            f"the batch has {len(facts.dictionaries)} dictionaries, {MAX_DICTIONARIES} are possible"
        )
    if len(facts.message) > MAX_METADATA:
        raise InvalidBundle(
            f"the schema takes {len(facts.message)} bytes, {MAX_METADATA} are possible"
        )
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

_ARROW_ERRORS: Final = (
    pa.ArrowException,
    EOFError,
    MemoryError,
    OSError,
    StopIteration,
    ValueError,
)


@contextmanager
def _naming(source: str, offset: int, what: str) -> Iterator[None]:
    """Turn what the guard and Arrow raise into errors that name the place."""
    try:
        yield
    except FormatError:
        raise
    except Refused as refused:
        error = LimitExceeded if refused.over_limit else FormatError
        raise error(source, offset + refused.offset, f"{what}: {refused.reason}") from None
    except (*_ARROW_ERRORS, InvalidBundle) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise FormatError(source, offset, f"{what} is not valid Arrow IPC: {reason}") from error


class _KnownSchema(NamedTuple):
    schema: pa.Schema
    has_dictionaries: bool
    shape: PlainShape


_known_schemas: dict[bytes, _KnownSchema] = {}


def decode_stream(
    payload: pa.Buffer, *, source: str, offset: int, validation: Validation
) -> pa.RecordBatch:
    """The first batch of an IPC stream. ``offset`` is where the payload starts in ``source``."""
    try:
        return _decode_stream(payload, validation)
    except (*_ARROW_ERRORS, InvalidBundle, Refused):
        # A context manager costs more than it is worth around every good batch.
        with _naming(source, offset, "a batch"):
            raise


def _decode_stream(payload: pa.Buffer, validation: Validation) -> pa.RecordBatch:
    view = memoryview(payload)
    schema_end = metadata_end(view, 0)
    known = _known_schemas.get(view[:schema_end].tobytes()) or _learn_schema(payload, schema_end)
    if known.has_dictionaries:
        _check_messages(view.cast("B"), schema_end)
        batch = pa.ipc.open_stream(payload).read_next_batch()
    else:
        if not known.shape.fits(view, schema_end):
            _check_claims(check_message(view.cast("B"), schema_end).claimed, schema_end)
        batch = pa.ipc.read_record_batch(payload.slice(schema_end), known.schema)
    _validate(batch, validation)
    return batch


def _learn_schema(payload: pa.Buffer, size: int) -> _KnownSchema:
    message = payload.slice(0, size)
    check_schema_message(memoryview(message).cast("B"))
    try:
        schema = pa.ipc.read_schema(message)
        schema_id(schema)  # walks every name and type: bad UTF-8 and bottomless nesting end here
    except (*_ARROW_ERRORS, InvalidBundle) as error:
        raise Refused(0, f"the schema is not valid: {error}") from error
    known = _KnownSchema(schema, any(True for _ in _dictionary_types(schema)), PlainShape())
    if size <= _KNOWN_SCHEMA_SIZE:
        if len(_known_schemas) >= _KNOWN_SCHEMA_LIMIT:
            _known_schemas.clear()
        _known_schemas[message.to_pybytes()] = known
    return known


def _check_messages(view: memoryview, start: int) -> None:
    """Check every message up to and including the first batch, and what they ask for together."""
    claimed = 0
    for _ in range(MAX_DICTIONARIES + 1):
        message = check_message(view, start)
        claimed += message.claimed
        _check_claims(claimed, start)
        if message.kind == RECORD_BATCH:
            return
        start = message.end
    raise Refused(start, f"more than {MAX_DICTIONARIES} dictionaries", over_limit=True)


def _check_claims(claimed: int, start: int) -> None:
    if claimed > MAX_DECOMPRESSED_BYTES:
        raise Refused(
            start,
            f"it claims {claimed} bytes uncompressed, {MAX_DECOMPRESSED_BYTES} are allowed",
            over_limit=True,
        )


def _validate(batch: pa.RecordBatch, validation: Validation) -> None:
    if batch.num_rows > MAX_ROWS:
        raise Refused(0, f"{batch.num_rows} rows, {MAX_ROWS} are possible", over_limit=True)
    batch.validate()
    if validation is Validation.FULL:
        for column in batch.columns:
            _check_views(column)
        batch.validate(full=True)


_WITH_VALUES: Final = (
    pa.ListArray,
    pa.LargeListArray,
    pa.ListViewArray,
    pa.LargeListViewArray,
    pa.FixedSizeListArray,
    pa.RunEndEncodedArray,
)


def _check_views(array: pa.Array[Any]) -> None:
    """Many views may show the same bytes, and validation would look at them each time."""
    if isinstance(array, pa.StringViewArray | pa.BinaryViewArray):
        views = array.buffers()[1]
        used = slice(_VIEW_SIZE * array.offset, _VIEW_SIZE * (array.offset + len(array)))
        lengths = memoryview(views).cast("B")[used].cast("i")[::4] if views else ()
        if sum(lengths) > MAX_DECOMPRESSED_BYTES:
            raise Refused(
                0, f"its views show more than {MAX_DECOMPRESSED_BYTES} bytes", over_limit=True
            )
    elif isinstance(array, pa.DictionaryArray):
        _check_views(array.dictionary)
    elif isinstance(array, _WITH_VALUES):
        _check_views(array.values)
    elif isinstance(array, pa.StructArray | pa.UnionArray):
        for index in range(array.type.num_fields):
            _check_views(array.field(index))
    elif isinstance(array, pa.ExtensionArray):
        _check_views(array.storage)


class IpcFile:
    """An IPC file inside a larger one: batches by index, no copy, nothing read before it is asked.

    ``offset`` is where ``data`` starts in ``source``, for errors. With ``compression`` off,
    compressed batches are refused: what is small should be small in memory as well.
    """

    def __init__(
        self, data: pa.Buffer, *, source: str, offset: int, compression: bool = True
    ) -> None:
        self._source = source
        self._offset = offset
        self._compression = compression
        self._plain = -1, PlainShape()
        self._view = memoryview(data).cast("B")
        with _naming(source, offset, "a stream"):
            footer = read_footer(self._view)
            self._claimed = 0
            for block in footer.dictionaries:
                self._claimed += check_block(self._view, block).claimed
                _check_claims(self._claimed, block.offset)
            self._blocks = footer.batches
            self._reader = pa.ipc.open_file(data)
            self.schema: pa.Schema = self._reader.schema
            schema_id(self.schema)  # as in _learn_schema

    @property
    def batch_count(self) -> int:
        """How many batches the file holds."""
        return len(self._blocks)

    def batch(self, index: int, validation: Validation) -> pa.RecordBatch:
        """One batch; its buffers lie inside ``data`` unless they were compressed."""
        block = self._blocks[index]
        try:
            metadata_length, shape = self._plain
            if block.metadata_length != metadata_length or not shape.fits(self._view, block.offset):
                self._check(block)
            batch: pa.RecordBatch = self._reader.get_batch(index)
            _validate(batch, validation)
        except (*_ARROW_ERRORS, InvalidBundle, Refused):
            with _naming(self._source, self._offset, f"batch {index}"):
                raise
        return batch

    def _check(self, block: Block) -> None:
        claimed = check_block(self._view, block).claimed
        if claimed and not self._compression:
            raise Refused(block.offset, "it is compressed, which is not expected here")
        _check_claims(self._claimed + claimed, block.offset)
        if not claimed:
            # The shape includes the size that stands in the message, so it need not be compared
            # again for those that have the same one in the footer.
            shape = PlainShape()
            shape.fits(self._view, block.offset)
            self._plain = block.metadata_length, shape
