"""OTAP tables as others write them: ids as differences, dictionaries, times with a zone.

Slow and plain: a second opinion on the encodings, written from the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from otap_oracle import rows_of

from quiver.bundle import Slot

_VALUE_COLUMNS = {1: "str", 2: "int", 3: "double", 4: "bool", 7: "bytes"}
_EQUALITY = {
    Slot.SPAN_EVENTS: ("name",),
    Slot.SPAN_LINKS: ("trace_id",),
    Slot.NUMBER_DP_EXEMPLARS: ("int_value", "double_value"),
    Slot.HISTOGRAM_DP_EXEMPLARS: ("int_value", "double_value"),
    Slot.EXP_HISTOGRAM_DP_EXEMPLARS: ("int_value", "double_value"),
}


def delta(ids: Sequence[int | None], bits: int) -> list[int | None]:
    """Differences to the last id that is not null, modulo the width."""
    made: list[int | None] = []
    last = 0
    for number in ids:
        made.append(None if number is None else (number - last) % 2**bits)
        last = last if number is None else number
    return made


def quasi_delta(ids: Sequence[int], keys: Sequence[Hashable | None], bits: int) -> list[int]:
    """Differences where the key is that of the row before, and not None."""
    made = []
    for row, number in enumerate(ids):
        like = row > 0 and keys[row] is not None and keys[row] == keys[row - 1]
        made.append((number - ids[row - 1]) % 2**bits if like else number)
    return made


def foreign(
    tables: Mapping[Slot, pa.RecordBatch], *, marked: bool, dictionaries: bool
) -> dict[Slot, pa.RecordBatch]:
    """The same tables, encoded. ``marked``: each column of ids says how."""
    return {
        slot: _table(slot, batch, marked=marked, dictionaries=dictionaries)
        for slot, batch in tables.items()
    }


def _table(
    slot: Slot, batch: pa.RecordBatch, *, marked: bool, dictionaries: bool
) -> pa.RecordBatch:
    names, arrays, metadata = [], [], []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values: Any = column
        encoding = None
        if name == "id":
            values, encoding = _delta(values), b"delta"
        elif name == "parent_id":
            values, encoding = _parents(slot, batch, values)
        elif name in {"resource", "scope"}:
            values = _origin(values, marked=marked)
        elif dictionaries and not pa.types.is_nested(values.type):
            values = _dictionary(values)
        names.append(name)
        arrays.append(values)
        metadata.append({b"encoding": encoding} if encoding and marked else None)
    fields = [
        pa.field(name, values.type, metadata=about)
        for name, values, about in zip(names, arrays, metadata, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _delta(values: Any) -> Any:  # noqa: ANN401 - pyarrow's stubs
    return pa.array(delta(values.to_pylist(), values.type.bit_width), type=values.type)


def _parents(slot: Slot, batch: pa.RecordBatch, values: Any) -> tuple[Any, bytes]:  # noqa: ANN401
    if slot.name.endswith("DATA_POINTS"):
        return _delta(values), b"delta"
    key: Callable[[dict[str, Any]], Hashable | None]
    if slot in _EQUALITY:
        names = _EQUALITY[slot]
        key = lambda row: tuple(row.get(name) for name in names)  # noqa: E731
    else:
        key = _attribute_key
    keys = [key(row) for row in rows_of(batch)]
    ids = quasi_delta(values.to_pylist(), keys, values.type.bit_width)
    return pa.array(ids, type=values.type), b"quasidelta"


def _attribute_key(row: dict[str, Any]) -> Hashable | None:
    column = _VALUE_COLUMNS.get(row["type"])
    value = row.get(column) if column else None
    return None if value is None else (row["type"], row["key"], value)


def _origin(values: Any, *, marked: bool) -> Any:  # noqa: ANN401
    arrays, fields = [], []
    for place, field in enumerate(values.type):
        inner = values.field(place)
        about = None
        if field.name == "id":
            inner = _delta(inner)
            about = {b"encoding": b"delta"} if marked else None
        arrays.append(inner)
        fields.append(pa.field(field.name, inner.type, metadata=about))
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _dictionary(values: Any) -> Any:  # noqa: ANN401
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_boolean(values.type) or pa.types.is_floating(values.type):
        return values
    if pa.types.is_timestamp(values.type):
        return values.cast(pa.timestamp("ns", tz="UTC"))
    if pa.types.is_uint8(values.type):
        return values
    encoded = values.dictionary_encode()
    small = pa.uint8() if len(encoded.dictionary) <= 256 else pa.uint16()
    return pa.DictionaryArray.from_arrays(encoded.indices.cast(small), encoded.dictionary)
