"""Arrow columns through numpy: what pyarrow has no function for, or only a slow one.

Requests are small, so the number of calls matters as much as the number of rows. Everything here
works on the buffers: a list is its offsets and its values, an id is its bytes.

A list array may be a slice: its ``values`` start before it and end after it. ``Lists`` is such an
array cut to size.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from quiver.config import AttributeType
from quiver.errors import InvalidRequest
from quiver.otlp.schema import ATTRIBUTES, BYTES, INT, TEXT, TIME, VALUE

Array: TypeAlias = Any
Type: TypeAlias = Any
"""A column and a type of pyarrow. Its stubs know neither nested types nor what is a view."""
Index: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

MAX_OFFSET: Final = 2**31 - 1
MAX_UINT32: Final = 2**32 - 1

_MEMBERS: Final = {
    AttributeType.STRING: 0,
    AttributeType.BOOL: 1,
    AttributeType.INT: 2,
    AttributeType.DOUBLE: 3,
    AttributeType.BYTES: 6,
}
_ENTRY: Final = pa.struct([pa.field("key", TEXT, nullable=False), pa.field("value", VALUE)])


# Not ``pa.array([])``: with pandas installed, the first one takes a quarter of a second.
_NO_ENTRIES: Final = pa.nulls(0, _ENTRY)

_DIGITS: Final = np.frombuffer(b"0123456789abcdef", np.uint8)
_TO_HEX: Final = np.stack([np.repeat(_DIGITS, 16), np.tile(_DIGITS, 16)], axis=1).view("<u2")[:, 0]
_NOT_HEX: Final = 256
_ENTRY_BYTES: Final = 40
"""Of an attribute, besides its text: offsets, and the numbers that are null."""


def _from_hex_table() -> NDArray[np.uint16]:
    """The byte of two hex digits, read as one little-endian number."""
    table = np.full(65536, _NOT_HEX, np.uint16)
    for value in range(256):
        high, low = f"{value >> 4:x}", f"{value & 15:x}"
        for text in (high + low, high + low.upper(), high.upper() + low, f"{value:02X}"):
            table[int.from_bytes(text.encode(), "little")] = value
    return table


_FROM_HEX: Final = _from_hex_table()


class Lists(NamedTuple):
    """The lists of a column: where each starts, and the values from the first on."""

    offsets: NDArray[np.int32]
    values: Array

    @property
    def lengths(self) -> NDArray[np.int32]:
        """How many values each list has."""
        return self.offsets[1:] - self.offsets[:-1]


def lists(array: Array) -> Lists:
    """Offsets that start at 0, and only the values that belong to the lists."""
    values = array.values
    if not len(array):
        return Lists(np.zeros(1, np.int32), values.slice(0, 0))
    offsets = cast("NDArray[np.int32]", array.offsets.to_numpy())
    first, last = int(offsets[0]), int(offsets[-1])
    if first:
        offsets = offsets - np.int32(first)
    if first or last != len(values):
        values = values.slice(first, last - first)
    return Lists(offsets, values)


def numbers(array: Array) -> NDArray[Any]:
    """The values of a column of numbers that has no nulls; not a copy."""
    values: NDArray[Any] = array.to_numpy()
    return values


def _buffer(values: NDArray[Any]) -> pa.Buffer:
    return pa.py_buffer(values)  # type: ignore[arg-type] # the stubs do not know numpy


def bitmap(valid: Mask | None) -> pa.Buffer | None:
    """The validity buffer, or nothing when all are valid."""
    if valid is None or valid.all():
        return None
    return _buffer(np.packbits(valid, bitorder="little"))


def of_numbers(values: NDArray[Any], type_: Type, valid: Mask | None = None) -> Array:
    """A column over the memory of a numpy array, which must be in one piece."""
    return pa.Array.from_buffers(type_, len(values), [bitmap(valid), _buffer(values)])


def of_lists(type_: Type, offsets: NDArray[Any], values: Array, valid: Mask | None = None) -> Array:
    """A column of lists or maps."""
    if offsets[-1] > MAX_OFFSET:
        raise InvalidRequest("there are more than 2^31 values in one column: use smaller groups")
    buffers = [bitmap(valid), _buffer(np.ascontiguousarray(offsets, np.int32))]
    return pa.Array.from_buffers(type_, len(offsets) - 1, buffers, children=[values])


def of_structs(type_: Type, rows: int, members: list[Array], valid: Mask | None = None) -> Array:
    """A column of structs."""
    return pa.Array.from_buffers(type_, rows, [bitmap(valid)], children=members)


def valid_rows(array: Array) -> Mask | None:
    """Which rows are not null; nothing when all are."""
    if not array.null_count:
        return None
    return cast("Mask", array.is_valid().to_numpy(zero_copy_only=False))


def signed(array: Array) -> Array:
    """The int64 column of an unsigned one. Values above 2^63 - 1 were refused before."""
    if array.type.bit_width == 64:  # noqa: PLR2004 - the width that can be read as it is
        return array.view(INT)
    return of_numbers(numbers(array).astype(np.int64), INT)


def micros(nanos: NDArray[Any], valid: Mask | None = None) -> Array:
    """Timestamps, rounded down."""
    return of_numbers(nanos // 1000, TIME, valid)


def to_hex(array: Array) -> Array:
    """Bytes as lower-case hex; nothing as null."""
    rows = len(array)
    if not rows:
        return pa.array([], TEXT)
    _, offset_buffer, data = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32, rows + 1, array.offset * 4)
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first > MAX_OFFSET // 2:
        raise InvalidRequest("the ids of one column are larger than 1 GiB: use smaller groups")
    if first == last:
        return pa.nulls(rows, TEXT)
    digits = _TO_HEX[np.frombuffer(data, np.uint8, last - first, first)]
    offsets = (offsets - np.int32(first)) * np.int32(2)
    buffers = [bitmap(offsets[1:] > offsets[:-1]), _buffer(offsets), _buffer(digits)]
    return pa.Array.from_buffers(TEXT, rows, buffers)


def from_hex(array: Array, where: str) -> Array:
    """What ``to_hex`` was given. Upper case is taken too."""
    if array.null_count:
        array = array.fill_null("")
    rows = len(array)
    _, offset_buffer, data = array.buffers()
    if not rows or data is None:
        return pa.array([b""] * rows, BYTES)
    offsets = np.frombuffer(offset_buffer, np.int32, rows + 1, array.offset * 4)
    first = int(offsets[0])
    offsets = offsets - offsets[0]
    if (offsets & 1).any():
        raise InvalidRequest(
            "an id has an odd number of hex digits: write it as OTLP has it", where=where
        )
    pairs = _FROM_HEX[np.frombuffer(data, "<u2", int(offsets[-1]) // 2, first)]
    if (pairs == _NOT_HEX).any():
        raise InvalidRequest("an id is not hexadecimal: write it with 0-9 and a-f", where=where)
    buffers = [None, _buffer(offsets >> 1), _buffer(pairs.astype(np.uint8))]
    return pa.Array.from_buffers(BYTES, rows, buffers)


def as_map(array: Array, valid: Mask | None = None) -> Array:
    """A list of key-value pairs as a map: the same memory. ``valid`` adds nulls."""
    if valid is None:
        return array.view(ATTRIBUTES)
    pairs = lists(array)
    return of_lists(ATTRIBUTES, pairs.offsets, pairs.values, valid)


def without_nulls(array: Array) -> Lists:
    """The lists of a column, nulls as empty ones."""
    if not array.null_count:
        return lists(array)
    if pa.types.is_map(array.type):
        array = array.view(pa.list_(_ENTRY))
    lengths = numbers(array.value_lengths().fill_null(0))
    return Lists(starts_of(lengths).astype(np.int32), array.flatten())


def starts_of(lengths: NDArray[Any]) -> Index:
    """Offsets of lists of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def take_map(array: Array, index: Index) -> Array:
    """``array.take(index)`` for maps of attributes, faster where there are many.

    Of the seven members of a value most are null everywhere; those are not looked at.
    """
    valid = valid_rows(array)
    offsets, entries = lists(array)
    taken_valid = None if valid is None else valid[index]
    if not len(entries):
        return of_lists(ATTRIBUTES, np.zeros(len(index) + 1, np.int32), _NO_ENTRIES, taken_valid)
    lengths = offsets[1:] - offsets[:-1]
    if valid is not None:
        lengths = np.where(valid, lengths, 0)
    taken = starts_of(lengths[index])
    total = int(taken[-1])
    if total > MAX_OFFSET:
        raise InvalidRequest(
            "there are more than 2^31 attributes in one column: use smaller groups"
        )
    shift = offsets[:-1][index] - taken[:-1]
    rows = np.repeat(shift, lengths[index]) + np.arange(total)
    pick = of_numbers(rows, INT)
    value = entries.field(1)
    members = [
        pa.nulls(total, member.type) if member.null_count == len(member) else member.take(pick)
        for member in (value.field(position) for position in range(len(VALUE)))
    ]
    value_valid = valid_rows(value)
    values = of_structs(VALUE, total, members, None if value_valid is None else value_valid[rows])
    pairs = of_structs(_ENTRY, total, [entries.field(0).take(pick), values])
    return of_lists(ATTRIBUTES, taken, pairs, taken_valid)


def content_bytes(array: Array) -> Index:
    """About how much memory each row takes: of strings, lists of bytes, or attributes."""
    if not pa.types.is_nested(array.type):
        return byte_lengths(array)
    offsets, values = lists(array)
    if pa.types.is_struct(values.type):
        value = values.field(1)
        sizes = np.full(len(values), _ENTRY_BYTES, np.int64)
        for column in (values.field(0), *(value.field(position) for position in (0, 4, 5, 6))):
            sizes += byte_lengths(column)
    else:
        sizes = byte_lengths(values)
    ends = starts_of(sizes)
    return cast("Index", ends[offsets[1:]] - ends[offsets[:-1]])


def byte_lengths(array: Array) -> Index:
    """The length of each string or binary; 0 for null."""
    lengths: Array = pc.binary_length(array)
    return numbers(lengths.fill_null(0)).astype(np.int64)


def promote(attributes: Array, key: pa.StringScalar, type_: AttributeType) -> Array:
    """The value of one key in each map: the first if there are several, null if of another type."""
    offsets, entries = lists(attributes)
    rows = len(attributes)
    value = entries.field(1)
    member = value.field(_MEMBERS[type_])
    if rows == 1 and not value.null_count:
        place = pc.index(entries.field(0), key).as_py()
        return pa.nulls(1, member.type) if place < 0 else member.slice(place, 1)
    found = pc.equal(entries.field(0), key).to_numpy(zero_copy_only=False)
    hits = np.flatnonzero(found)
    if not len(hits):
        return pa.nulls(rows, member.type)
    if value.null_count:
        member = pc.struct_field(value, [_MEMBERS[type_]])
    if len(hits) == rows and (hits >= offsets[:-1]).all() and (hits < offsets[1:]).all():
        return member.take(of_numbers(hits, INT))  # each has it once
    parents = np.searchsorted(offsets, hits, side="right") - 1
    first = np.ones(len(hits), np.bool_)
    first[1:] = parents[1:] != parents[:-1]
    index = np.zeros(rows, np.int64)
    index[parents[first]] = hits[first]
    present = np.zeros(rows, np.bool_)
    present[parents] = True
    return member.take(of_numbers(index, INT, present))
