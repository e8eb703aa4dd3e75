"""From nested columns to flat ones: what writing each OTAP table needs.

A nested column is a list of structs. Its rows become rows of a table with ``parent_id``; its fields
become columns, without a copy where the types agree. Columns that hold nothing but the default
become None here and are left out of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.bundle import Slot
from quiver.errors import InvalidRequest
from quiver.otlp.otap.schema import SCHEMAS, TIME, Array, Kind, column

Tables: TypeAlias = dict[Slot, pa.RecordBatch]
Columns: TypeAlias = Mapping[str, Array | None]
Numbers: TypeAlias = npt.NDArray[Any]
Mask: TypeAlias = npt.NDArray[np.bool_]

_KINDS: Final = {
    np.dtype(name).char: pa.from_numpy_dtype(np.dtype(name))
    for name in ("u1", "u2", "u4", "u8", "i4", "i8")
}
_SCHEMA_CACHE: Final = 4096
_STRUCT: Final = pa.struct([]).id


def of_numbers(values: Numbers, *, mask: Mask | None = None) -> Array:
    """A column of these numbers, null where the mask is true."""
    kind = _KINDS.get(values.dtype.char)
    if kind is None or mask is not None or len(values) == 0:
        return pa.array(values, mask=mask)
    # A fifth of the time that it takes pa.array to find out what this is.
    return pa.Array.from_buffers(kind, len(values), [None, buffer_of(np.ascontiguousarray(values))])


def buffer_of(values: Numbers) -> pa.Buffer:
    """The memory of these numbers."""
    return pa.py_buffer(values)  # type: ignore[arg-type]  # the stubs miss numpy's arrays


class Children(NamedTuple):
    """The rows of a list column, one after the other, and how many each parent has."""

    lengths: Numbers
    rows: Array

    def parents(self, kind: type[np.unsignedinteger[Any]]) -> Array:
        """The number of the parent of each row."""
        return of_numbers(np.repeat(np.arange(len(self.lengths), dtype=kind), self.lengths))


def children(parent: Array, name: str) -> Children:
    """The rows of a list field, none for a parent that is null."""
    lists = parent.field(name)
    lengths = lengths_of(lists)
    if parent.null_count:
        absent = ~valid_mask(parent)
        if lengths[absent].any():
            lists = parent.flatten()[parent.type.get_field_index(name)]
    if lists.null_count:
        lengths[~valid_mask(lists)] = 0
    return Children(lengths, items_of(lists))


def lengths_of(lists: Array) -> Numbers:
    """How many items each list has, whether or not it is null."""
    offsets: Numbers = lists.offsets.to_numpy()
    return offsets[1:] - offsets[:-1]


def items_of(lists: Array) -> Array:
    """The items of all lists that are not null."""
    if lists.null_count:
        return lists.flatten()
    # What flatten does, without a search for its kernel.
    offsets = lists.offsets
    start, stop = offsets[0].as_py(), offsets[-1].as_py()
    return lists.values.slice(start, stop - start)


def valid_mask(array: Array) -> Mask:
    """Which values are not null."""
    validity = array.buffers()[0]
    if validity is None:
        return np.ones(len(array), dtype=np.bool_)
    bits = np.frombuffer(validity, dtype=np.uint8)
    start, stop = array.offset, array.offset + len(array)
    unpacked = np.unpackbits(bits[start // 8 : (stop + 7) // 8], bitorder="little")
    return unpacked[start % 8 : start % 8 + len(array)].view(np.bool_)


def validity_of(mask: Mask) -> pa.Buffer:
    """The bitmap of an array from which values are not null."""
    return buffer_of(np.packbits(mask, bitorder="little"))


def offsets_of(array: Array) -> Numbers:
    """The offsets of strings or bytes."""
    first = array.offset
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.zeros(len(array) + 1, dtype=np.int32)
    return np.frombuffer(buffer, dtype=np.int32)[first : first + len(array) + 1]


def texts(strings: Array) -> Array | None:
    """The strings, or None if all are empty."""
    offsets = offsets_of(strings)
    return strings if offsets[-1] != offsets[0] else None


def numbers(values: Array) -> Array | None:
    """The numbers, or None if all are zero. A negative zero is not."""
    plain = values.to_numpy()
    if plain.dtype == np.float64:
        plain = plain.view(np.uint64)
    return values if plain.any() else None


def flags(values: Array) -> Array | None:
    """The booleans, or None if all are false."""
    return values if values.true_count else None


def present(values: Array) -> Array | None:
    """The values, or None if all are null."""
    return values if values.null_count != len(values) else None


def times(nanoseconds: Array) -> Array:
    """The same 64 bits as a time. After the year 2262 they count as negative."""
    return nanoseconds.view(TIME)


def some_times(nanoseconds: Array) -> Array | None:
    """Times, or None if all are zero."""
    return times(nanoseconds) if nanoseconds.to_numpy().any() else None


def fixed(values: Array, kind: pa.FixedSizeBinaryType, where: str) -> Array:
    """Ids of fixed length: null where there are no bytes."""
    size = kind.byte_width
    offsets = offsets_of(values)
    data = values.buffers()[2]
    lengths = offsets[1:] - offsets[:-1]
    there = lengths == size
    if there.all():
        start = int(offsets[0])
        used = pa.py_buffer(b"") if data is None else data.slice(start, size * len(values))
        return pa.FixedSizeBinaryArray.from_buffers(kind, len(values), [None, used])
    if wrong := np.flatnonzero(~there & (lengths != 0)).tolist():
        raise InvalidRequest(
            f"an id of {lengths[wrong[0]]} bytes; it must have {size}, or none at all",
            where=f"{where}, row {wrong[0]}",
        )
    spread = np.zeros((len(values), size), dtype=np.uint8)
    if data is not None:
        used_bytes = np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]]
        spread[there] = used_bytes.reshape(-1, size)
    buffers: list[pa.Buffer | None] = [validity_of(there), buffer_of(spread)]
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(values), buffers)


def always_fixed(values: Array, kind: pa.FixedSizeBinaryType, where: str) -> Array:
    """Ids in a column that must not have nulls: zeros where there are no bytes."""
    ids = fixed(values, kind, where)
    if not ids.null_count:
        return ids
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(ids), [None, ids.buffers()[1]])


def some_fixed(values: Array, kind: pa.FixedSizeBinaryType, where: str) -> Array | None:
    """Ids, or None if there are none."""
    return None if texts(values) is None else fixed(values, kind, where)


def plain_list(lists: Array) -> Array | None:
    """The list with values that may be null, as others write it; None if all are empty."""
    values = items_of(lists)
    if len(values) == 0:
        return None
    offsets = lists.offsets.to_numpy()
    return pa.ListArray.from_arrays(of_numbers(offsets - offsets[0]), values)


def spread(values: Array, index: Numbers) -> Array | None:
    """A value for each row, by its place in ``values``; None if all are empty."""
    if texts(values) is None:
        return None
    return pa.DictionaryArray.from_arrays(of_numbers(index), values)


def struct(columns: Columns, *, valid: Mask | None = None) -> Array:
    """The columns that are there, as one. Each is as long as the others."""
    kept = {name: values for name, values in columns.items() if values is not None}
    fields = [_struct_field(name, values.type) for name, values in kept.items()]
    mask = None if valid is None else of_numbers(~valid)
    arrays = list(kept.values())
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=mask)


@lru_cache(maxsize=_SCHEMA_CACHE)
def _struct_field(name: str, kind: Kind) -> Kind:
    return column(name, kind)


def table(slot: Slot, columns: Columns) -> pa.RecordBatch:
    """The columns that are there, as the table of this slot."""
    kept = {name: values for name, values in columns.items() if values is not None}
    key = tuple(
        (name, tuple(field.name for field in values.type))
        if values.type.id == _STRUCT
        else (name, values.type.id)
        for name, values in kept.items()
    )
    arrays = list(kept.values())
    schema = _schemas.get((slot, key))
    if schema is None:
        if len(_schemas) >= _SCHEMA_CACHE:
            _schemas.clear()
        schema = _schemas[slot, key] = _schema(slot, kept)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_schemas: Final[dict[tuple[Slot, tuple[Any, ...]], pa.Schema]] = {}
"""By table and the columns that are there: making one costs more than using it."""


def _schema(slot: Slot, columns: Mapping[str, Array]) -> pa.Schema:
    full = SCHEMAS[slot]
    return pa.schema([full.field(name).with_type(values.type) for name, values in columns.items()])


def numbered(count: int, kind: type[np.unsignedinteger[Any]]) -> Array:
    """Ids from 0."""
    return of_numbers(np.arange(count, dtype=kind))


def without_nulls(arrays: Sequence[Array], defaults: Sequence[object]) -> list[Array]:
    """The arrays with defaults in place of nulls."""
    return [
        values.fill_null(default) if values.null_count else values
        for values, default in zip(arrays, defaults, strict=True)
    ]
