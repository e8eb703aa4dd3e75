"""Looking at Arrow IPC metadata before Arrow does, for what Arrow lets through.

Arrow verifies that the metadata of a message (a flatbuffer) is well formed. It does not mind that

* a compressed buffer says in its first eight bytes how much memory to allocate for it;
* one string or table is referred to many times, and becomes gigabytes when each is copied;
* a message has the form of an older version, where these things stand elsewhere;
* numbers are in the other byte order.

What is peeked at (slots of the tables in brackets):

==================  ===========================================================================
Message             version [0], header type [1], header [2], body length [3], metadata [4]
RecordBatch         buffers [2]: vector of (offset i64, length i64); compression [3]
DictionaryBatch     data [1]: a RecordBatch
Schema              byte order [0], fields [1], metadata [2]
Field               name [0], kind and type [2, 3] for time zones, children [5], metadata [6]
Footer (of a file)  schema [1]; dictionaries [2], record batches [3]: vectors of
                    (offset i64, metadata length i32, 4 bytes unused, body length i64);
                    metadata [4]
==================  ===========================================================================

Functions raise ``Refused``; whoever knows the name of the file turns it into an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias, TypeVar

MAX_BATCHES: Final = 10_000_000
MAX_DICTIONARIES: Final = 10_000
MAX_METADATA: Final = 16 * 1024 * 1024
DICTIONARY_BATCH: Final = 2
RECORD_BATCH: Final = 3

_SCHEMA = 1
_VERSION_5 = 4  # as the flatbuffer counts
_FILE_MAGIC = b"ARROW1"
_CONTINUATION = 0xFFFFFFFF
_PREFIX = struct.Struct("<II")
_U16 = struct.Struct("<H")
_I16 = struct.Struct("<h")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_BLOCK = struct.Struct("<qi4xq")
_BUFFER = struct.Struct("<qq")
# Where the vtables of Message and RecordBatch say where these fields are.
_VERSION_ENTRY = 4
_HEADER_ENTRY = 8
_COMPRESSION_ENTRY = 10
_CUSTOM_ENTRY = 12
_TIMESTAMP = 10
_SMALLEST_TABLE = 8

_T = TypeVar("_T")


class Refused(Exception):
    """Metadata that Arrow must not see: where, and why."""

    def __init__(self, offset: int, reason: str, *, over_limit: bool = False) -> None:
        super().__init__(reason)
        self.offset = offset
        self.reason = reason
        self.over_limit = over_limit


class Block(NamedTuple):
    """Where a message lies in a file."""

    offset: int
    metadata_length: int
    body_length: int


class Footer(NamedTuple):
    """The messages of an IPC file."""

    dictionaries: list[Block]
    batches: list[Block]


class Message(NamedTuple):
    """What a message with data is, where it ends, and how much memory it asks for."""

    kind: int
    end: int
    claimed: int


def metadata_end(view: memoryview, start: int) -> int:
    """Where the metadata of the message at ``start`` ends and its body begins."""
    if not 0 <= start <= len(view) - _PREFIX.size:
        raise Refused(max(0, start), "the data ends where a message should start")
    marker, length = _PREFIX.unpack_from(view, start)
    if marker != _CONTINUATION or length == 0:
        raise Refused(start, "there is no Arrow message here")
    if length > MAX_METADATA:
        raise Refused(
            start, f"{length} bytes of metadata, {MAX_METADATA} are allowed", over_limit=True
        )
    end: int = start + _PREFIX.size + length
    if end > len(view):
        left = len(view) - start
        raise Refused(start, f"a message needs {end - start} bytes, only {left} are left")
    return end


class PlainShape:
    """Tells batches that are certainly current and not compressed from those to look at closely.

    The messages of one schema by one writer differ in their numbers, not in how their tables refer
    to each other. So the references of the first plain one are remembered, and a message that has
    the same ones at the same places is plain too: one comparison instead of a walk.

    What is remembered is replaced as one thing, so that threads never see half of it.
    """

    def __init__(self) -> None:
        self._known: tuple[struct.Struct, tuple[int, ...]] | None = None

    def fits(self, view: memoryview, start: int) -> bool:
        """Whether the message at ``start`` is plain.

        References are not checked on the way: when they lead outside the metadata, Arrow's own
        verification refuses the message.
        """
        try:
            known = self._known
            if known is not None and known[0].unpack_from(view, start) == known[1]:
                return True
            visited = _visit_plain(view, start)
        except struct.error:
            return False
        if visited is None:
            return False
        self._remember(visited, start)
        return True

    def _remember(self, visited: list[_Visited], start: int) -> None:
        layout = "<"
        end = 0
        visited = sorted(set(visited))
        for position, code, _ in visited:
            offset = position - start
            if offset < end:
                return  # values that overlap: a strange writer, whose messages are walked each time
            layout += f"{offset - end}x{code}"
            end = offset + struct.calcsize(f"<{code}")
        self._known = struct.Struct(layout), tuple(value for _, _, value in visited)


_Visited: TypeAlias = tuple[int, str, int]


def _visit_plain(view: memoryview, start: int) -> list[_Visited] | None:
    """Position, type and value of every number that shows the message to be plain; None if not."""
    visited: list[_Visited] = []

    def see(code: str, position: int) -> int:
        value = int(struct.unpack_from(f"<{code}", view, position)[0])
        visited.append((position, code, value))
        return value

    base = start + _PREFIX.size
    if see("I", start) != _CONTINUATION or see("I", start + 4) > MAX_METADATA:
        return None
    message = base + see("I", base)
    vtable = message - see("i", message)
    if see("H", vtable) > _CUSTOM_ENTRY and see("H", vtable + _CUSTOM_ENTRY):
        return None
    version = see("H", vtable + _VERSION_ENTRY)
    if not version or see("h", message + version) != _VERSION_5:
        return None
    header = message + see("H", vtable + _HEADER_ENTRY)
    header += see("I", header)
    vtable = header - see("i", header)
    if see("H", vtable) > _COMPRESSION_ENTRY and see("H", vtable + _COMPRESSION_ENTRY):
        return None
    return visited


def check_block(view: memoryview, block: Block) -> Message:
    """Look closely at a message of a file; Arrow takes its size from the footer."""
    if metadata_end(view, block.offset) != block.offset + block.metadata_length:
        raise Refused(block.offset, "a message and the footer disagree about its size")
    return check_message(view, block.offset)


def check_message(view: memoryview, start: int) -> Message:
    """Look closely at a message with data."""
    body = metadata_end(view, start)
    metadata = view[start + _PREFIX.size : body]
    return _looking(start, lambda: _message(metadata, body, view))


def _message(metadata: memoryview, body: int, view: memoryview) -> Message:
    message = _table(metadata, 0)
    _Growth(metadata).metadata_of(message, 4)
    version = _find_field(metadata, message, 0)
    if not version or _I16.unpack_from(metadata, version)[0] != _VERSION_5:
        raise ValueError("it is not of metadata version 5")
    kind = metadata[_field(metadata, message, 1)]
    header = _table(metadata, _field(metadata, message, 2))
    if kind == DICTIONARY_BATCH:
        header = _table(metadata, _field(metadata, header, 1))
    elif kind != RECORD_BATCH:
        raise ValueError(f"it is of kind {kind}, where data was expected")
    length_at = _find_field(metadata, message, 3)
    end = body + (_I64.unpack_from(metadata, length_at)[0] if length_at else 0)
    if not body <= end <= len(view):
        raise ValueError(f"its body has {end - body} bytes, {len(view) - body} are left")
    compressed = _find_field(metadata, header, 3)
    claimed = _claims(metadata, header, view[body:end]) if compressed else 0
    return Message(kind, end, claimed)


def _claims(metadata: memoryview, header: int, body: memoryview) -> int:
    """How large the compressed buffers of a message say they are."""
    first, count = _vector(metadata, _field(metadata, header, 2), _BUFFER.size)
    claimed = 0
    for offset, length in _BUFFER.iter_unpack(metadata[first : first + count * _BUFFER.size]):
        if length == 0:
            continue
        if not 0 <= offset <= len(body) - length or length < _I64.size:
            raise ValueError("a compressed buffer lies outside of it")
        claimed += max(length, _I64.unpack_from(body, offset)[0])
    return claimed


def check_schema_message(view: memoryview) -> None:
    """Look at a whole schema message."""
    end = metadata_end(view, 0)
    metadata = view[_PREFIX.size : end]

    def look() -> None:
        message = _table(metadata, 0)
        if metadata[_field(metadata, message, 1)] != _SCHEMA:
            raise ValueError("it is not a schema")
        growth = _Growth(metadata)
        growth.metadata_of(message, 4)
        growth.schema(_table(metadata, _field(metadata, message, 2)))

    _looking(0, look)


def read_footer(view: memoryview) -> Footer:
    """Look at the end of an IPC file, its schema included."""
    end = len(view) - len(_FILE_MAGIC) - _I32.size
    if end < len(_FILE_MAGIC) or view[end + _I32.size :] != _FILE_MAGIC:
        raise Refused(max(0, end), "a stream does not end like an Arrow IPC file")
    length = _I32.unpack_from(view, end)[0]
    if not 0 < length <= end:
        raise Refused(end, f"a stream claims a footer of {length} bytes")
    footer = view[end - length : end]

    def look() -> Footer:
        table = _table(footer, 0)
        growth = _Growth(footer)
        growth.metadata_of(table, 4)
        growth.schema(_table(footer, _field(footer, table, 1)))
        return Footer(
            _blocks(footer, table, 2, MAX_DICTIONARIES, len(view)),
            _blocks(footer, table, 3, MAX_BATCHES, len(view)),
        )

    return _looking(end - length, look)


def _looking(offset: int, look: Callable[[], _T]) -> _T:
    try:
        return look()
    except (struct.error, ValueError, IndexError) as error:
        raise Refused(offset, f"Arrow metadata is damaged: {error}") from error


class _Growth:
    """Adds up what metadata is when every reference to a string or table becomes a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._left = len(data)

    def schema(self, schema: int) -> None:
        """Refuse byte orders that are not ours, and schemas that grow when they are copied."""
        byte_order = _find_field(self._data, schema, 0)
        if byte_order and _I16.unpack_from(self._data, byte_order)[0] != 0:
            raise ValueError("the data is big-endian")
        self.metadata_of(schema, 2)
        self.fields_of(schema, 1, depth=0)

    def fields_of(self, table: int, slot: int, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError(f"types are nested more than {_MAX_DEPTH} deep")
        for field in self._tables(table, slot):
            self._string(field, 0)
            self._time_zone(field)
            self.metadata_of(field, 6)
            self.fields_of(field, 5, depth + 1)

    def metadata_of(self, table: int, slot: int) -> None:
        for pair in self._tables(table, slot):
            self._string(pair, 0)
            self._string(pair, 1)

    def _time_zone(self, field: int) -> None:
        kind = _find_field(self._data, field, 2)
        data_type = _find_field(self._data, field, 3)
        if kind and data_type and self._data[kind] == _TIMESTAMP:
            self._string(_table(self._data, data_type), 1)

    def _tables(self, table: int, slot: int) -> list[int]:
        position = _find_field(self._data, table, slot)
        if not position:
            return []
        first, count = _vector(self._data, position, _U32.size)
        self._take(count * _SMALLEST_TABLE)
        return [_table(self._data, first + 4 * i) for i in range(count)]

    def _string(self, table: int, slot: int) -> None:
        position = _find_field(self._data, table, slot)
        if position:
            self._take(_vector(self._data, position, 1)[1])

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError("parts of the schema are shared, and would be copied")


_MAX_DEPTH = 128


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
    """Where the items of a vector or string start, and how many there are."""
    start = _table(data, reference)
    count = int(_U32.unpack_from(data, start)[0])
    first = start + _U32.size
    if count * item_size > len(data) - first:
        raise ValueError(f"{count} items do not fit")
    return first, count


def _blocks(footer: memoryview, table: int, slot: int, limit: int, size: int) -> list[Block]:
    position = _find_field(footer, table, slot)
    if not position:
        return []
    first, count = _vector(footer, position, _BLOCK.size)
    if count > limit:
        raise ValueError(f"{count} messages, {limit} are allowed")
    items = footer[first : first + count * _BLOCK.size]
    blocks = [Block._make(item) for item in _BLOCK.iter_unpack(items)]
    for block in blocks:
        if min(block) < 0 or block.offset > size:
            raise ValueError("a message lies outside the stream")
    return blocks
