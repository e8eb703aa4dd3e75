"""From flat tables to nested columns: what reading each OTAP table needs.

The tables come from outside. Every column is checked for its type before it is used, dictionaries
are decoded (after a look at how much they would become), ids are made plain, and a ``parent_id``
that no parent has is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa
from pyarrow import types

from quiver.bundle import Slot
from quiver.errors import InvalidRequest
from quiver.otlp.otap.ids import Ids, Mask, from_delta, from_quasi_delta, like_before
from quiver.otlp.otap.schema import (
    DELTA,
    ENCODING,
    EQUALITY,
    PLAIN,
    QUASI_DELTA,
    SCHEMAS,
    Array,
    Kind,
)
from quiver.otlp.otap.write import Numbers, of_numbers, offsets_of, valid_mask


@dataclass(frozen=True, slots=True)
class Limits:
    """What one conversion may become: bytes of one decoded column, levels of nested values."""

    max_bytes: int
    max_depth: int


class IdColumn(NamedTuple):
    """Plain ids, and which of them are there (None: all)."""

    values: Ids
    valid: Mask | None


class Table:
    """A table from outside: its columns by name, checked when they are asked for."""

    __slots__ = ("batch", "limits", "rows", "schema", "slot")

    def __init__(self, slot: Slot, batch: pa.RecordBatch, limits: Limits) -> None:
        self.slot = slot
        self.limits = limits
        names = batch.schema.names
        if len(set(names)) != len(names):
            raise InvalidRequest("a column that is there twice; name each once", where=slot.name)
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise InvalidRequest(f"not a valid Arrow table: {error}", where=slot.name) from None
        self.batch = batch
        self.rows = batch.num_rows
        self.schema = SCHEMAS[slot]

    def column(self, name: str) -> Array | None:
        """The values of a column in its native type, or None if it is absent."""
        index = self.batch.schema.get_field_index(name)
        if index < 0:
            return None
        kind = self.schema.field(name).type
        return native(self.batch.column(index), kind, f"{self.slot.name}.{name}", self.limits)

    def required(self, name: str) -> Array:
        """The values of a column that must be there and have no nulls."""
        values = self.column(name)
        where = f"{self.slot.name}.{name}"
        if values is None:
            raise InvalidRequest("the column is missing; OTAP requires it", where=where)
        if values.null_count:
            row = int(np.flatnonzero(~valid_mask(values))[0])
            raise InvalidRequest("null; OTAP requires a value", where=f"{where}, row {row}")
        return values

    def columns(self, names: Iterable[str]) -> dict[str, Array | None]:
        """The values of several columns, by name."""
        return {name: self.column(name) for name in names}

    def ids(self) -> IdColumn | None:
        """The ids of the rows, plain."""
        values = self.column("id")
        if values is None:
            return None
        return plain_ids(values, self.batch.schema.field("id"), f"{self.slot.name}.id")

    def parent_ids(self, like: Callable[[], Mask] | None = None) -> Ids:
        """The ids of the parents, plain. ``like`` tells which rows are like the one before."""
        values: Ids = self.required("parent_id").to_numpy()
        where = f"{self.slot.name}.parent_id"
        quasi = like is not None or self.slot in EQUALITY
        default = QUASI_DELTA if quasi else DELTA
        encoding = _encoding(self.batch.schema.field("parent_id"), default, where)
        if encoding == PLAIN:
            return values
        if encoding == DELTA:
            return from_delta(values)
        if not quasi:
            raise InvalidRequest("quasi-delta ids, which this table cannot have", where=where)
        return from_quasi_delta(values, (like or self._like_before)())

    def _like_before(self) -> Mask:
        columns = self.columns(EQUALITY[self.slot]).values()
        there = [values for values in columns if values is not None]
        if there:
            return like_before(there, nulls_equal=True)
        return np.arange(self.rows) > 0


def native(values: Array, kind: Kind, where: str, limits: Limits) -> Array:
    """The values in their native type: not as a dictionary, and of no other type."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    encoded = types.is_dictionary(values.type)
    found = values.type.value_type if encoded else values.type
    if not _fits(found, kind) or (encoded and types.is_nested(kind)):
        raise InvalidRequest(f"type {values.type}; OTAP has {kind} here", where=where)
    if not encoded:
        return values
    if types.is_string(kind) or types.is_binary(kind):
        _check_decoded_size(values, where, limits)
    return values.dictionary_decode()


def _check_decoded_size(values: Array, where: str, limits: Limits) -> None:
    lengths = np.diff(offsets_of(values.dictionary)).astype(np.int64)
    indices = values.indices.drop_null().to_numpy()
    size = int(lengths[indices].sum())
    if size > limits.max_bytes:
        raise InvalidRequest(
            f"a dictionary that stands for {size} bytes, above the limit of {limits.max_bytes};"
            " send fewer rows at once",
            where=where,
        )


def _fits(found: Kind, kind: Kind) -> bool:
    if types.is_timestamp(kind):
        return types.is_timestamp(found) and found.unit == kind.unit
    if types.is_list(kind):
        return types.is_list(found) and _fits(found.value_type, kind.value_type)
    if types.is_struct(kind):
        names = [field.name for field in found] if types.is_struct(found) else None
        return names is not None and len(set(names)) == len(names)
    return bool(found == kind)


def _encoding(field: Kind, default: bytes, where: str) -> bytes:
    encoding = cast("bytes", (field.metadata or {}).get(ENCODING, default))
    if encoding not in {PLAIN, DELTA, QUASI_DELTA}:
        raise InvalidRequest(f"unknown encoding of ids {encoding!r}", where=where)
    return encoding


def plain_ids(values: Array, field: Kind, where: str) -> IdColumn:
    """Ids of rows, which are plain or delta."""
    encoding = _encoding(field, DELTA, where)
    if encoding == QUASI_DELTA:
        raise InvalidRequest("quasi-delta ids, which only parent_id can have", where=where)
    valid = valid_mask(values) if values.null_count else None
    ids = (values.fill_null(0) if values.null_count else values).to_numpy()
    if encoding == DELTA:
        # A null counts as a difference of zero, so it does not disturb those after it.
        ids = from_delta(ids)
    return IdColumn(ids, valid)


class Parents:
    """Where the row with an id is."""

    __slots__ = ("_dense", "_ids", "_rows", "count")

    def __init__(self, ids: IdColumn | None, count: int, where: str) -> None:
        self.count = count
        self._dense = False
        found = IdColumn(np.zeros(0, dtype=np.uint32), None) if ids is None else ids
        plain = found.values.astype(np.int64)
        rows = np.arange(len(plain))
        if found.valid is not None:
            plain, rows = plain[found.valid], rows[found.valid]
        elif len(plain) == count:
            self._dense = np.array_equal(plain, rows)
        if not self._dense:
            order = np.argsort(plain, kind="stable")
            plain, rows = plain[order], rows[order]
            twice = np.flatnonzero(plain[1:] == plain[:-1])
            if len(twice):
                row = int(rows[twice[0] + 1])
                raise InvalidRequest(
                    f"the id {plain[twice[0]]} is there twice; ids must differ",
                    where=f"{where}, row {row}",
                )
        self._ids, self._rows = plain, rows

    def rows_of(self, wanted: Ids, where: str) -> Numbers:
        """The row of each id that is asked for."""
        ids = wanted.astype(np.int64)
        if self._dense:
            missing = ids >= self.count
            rows = ids
        elif len(self._ids) == 0:
            missing, rows = np.ones(len(ids), dtype=np.bool_), ids
        else:
            places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
            missing = self._ids[places] != ids
            rows = self._rows[places]
        if missing.any():
            row = int(np.flatnonzero(missing)[0])
            raise InvalidRequest(
                f"no parent has the id {ids[row]}; send parents and children in one batch",
                where=f"{where}.parent_id, row {row}",
            )
        return rows


def refuse_orphans(tables: Mapping[Slot, Table], slot: Slot) -> None:
    """A table whose parents have no table must be empty."""
    source = tables.get(slot)
    if source is not None and source.rows:
        raise InvalidRequest(
            "the table of the parents is not there; send parents and children in one batch",
            where=f"{slot.name}.parent_id, row 0",
        )


def lists_of(rows: Array, parent_rows: Numbers, parents: int, kind: Kind) -> Array:
    """The rows as lists, one for each parent, each in the order of the rows."""
    if len(parent_rows) > 1 and (parent_rows[1:] < parent_rows[:-1]).any():
        rows = rows.take(of_numbers(np.argsort(parent_rows, kind="stable")))
    offsets = np.zeros(parents + 1, dtype=np.int32)
    np.cumsum(np.bincount(parent_rows, minlength=parents), out=offsets[1:])
    return pa.ListArray.from_arrays(of_numbers(offsets), rows, type=kind)


def record(
    kind: Kind,
    rows: int,
    columns: Mapping[str, Array | None],
    *,
    valid: Mask | None = None,
) -> Array:
    """A struct of this type: columns that are absent, and nulls, become the default."""
    arrays = [_filled(field, rows, columns.get(field.name)) for field in kind]
    mask = None if valid is None else of_numbers(~valid)
    return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=mask)


def _filled(field: Kind, rows: int, values: Array | None) -> Array:
    kind = field.type
    if values is None:
        return pa.nulls(rows, kind) if field.nullable else default(kind, rows)
    if types.is_timestamp(values.type):
        values = values.view(pa.uint64())
    elif types.is_fixed_size_binary(values.type):
        values = values.cast(kind)
    if values.null_count and not field.nullable:
        values = values.fill_null(_DEFAULTS[kind])
    return values


_DEFAULTS: Final[Mapping[Kind, Any]] = {
    pa.string(): "",
    pa.binary(): b"",
    pa.bool_(): False,
    pa.int32(): 0,
    pa.uint32(): 0,
    pa.uint64(): 0,
    pa.float64(): 0.0,
}


def default(kind: Kind, rows: int) -> Array:
    """The default of a field, so many times."""
    if types.is_list(kind):
        return pa.ListArray.from_arrays(
            of_numbers(np.zeros(rows + 1, dtype=np.int32)),
            pa.array([], type=kind.value_type),
            type=kind,
        )
    return pa.repeat(pa.scalar(_DEFAULTS[kind], type=kind), rows)


def number_list(values: Array | None, kind: Kind, where: str) -> Array | None:
    """A list column of numbers as the field of a request: nulls between them are refused."""
    if values is None:
        return None
    if values.null_count:
        values = _empty_for_null(values)
    items = values.flatten()
    if items.null_count:
        raise InvalidRequest("null inside a list; send numbers", where=where)
    offsets = values.offsets.to_numpy()
    return pa.ListArray.from_arrays(of_numbers(offsets - offsets[0]), items, type=kind)


def _empty_for_null(lists: Array) -> Array:
    lengths = np.diff(lists.offsets.to_numpy())
    lengths[~valid_mask(lists)] = 0
    offsets = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(of_numbers(offsets), lists.flatten())


def inside(struct: Array | None, kind: Kind, where: str, limits: Limits) -> dict[str, Array]:
    """The fields of a struct column by name, null where the struct is."""
    if struct is None:
        return {}
    fields = struct.flatten()
    return {
        field.name: native(values, kind.field(field.name).type, f"{where}.{field.name}", limits)
        for field, values in zip(struct.type, fields, strict=True)
        if kind.get_field_index(field.name) >= 0
    }
