"""Attributes and log bodies: OTLP's ``AnyValue`` as OTAP's columns, and back.

OTAP has a column for each type of value and one that says which of them counts. In a request the
columns are the fields of a struct of which at most one is not null, so most are taken as they are.

=====================  ========  ==========
OTLP field             column    ``type``
=====================  ========  ==========
none                             0
``string_value``       str       1
``int_value``          int       2
``double_value``       double    3
``bool_value``         bool      4
``kvlist_value``       ser       5 (CBOR)
``array_value``        ser       6 (CBOR)
``bytes_value``        bytes     7
=====================  ========  ==========

Read from outside: a column that ``type`` does not point to is not looked at, and a null in the one
that it does point to is an empty value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.bundle import Slot
from quiver.errors import InvalidRequest
from quiver.otlp.otap.cbor import (
    BadValue,
    array_to_cbor,
    cbor_to_array,
    cbor_to_kvlist,
    kvlist_to_cbor,
)
from quiver.otlp.otap.ids import Ids, Mask, like_before
from quiver.otlp.otap.read import Limits, Parents, Table, lists_of, record
from quiver.otlp.otap.schema import (
    MAX_ITEMS,
    TYPE_BOOL,
    TYPE_BYTES,
    TYPE_DOUBLE,
    TYPE_INT,
    TYPE_MAP,
    TYPE_SLICE,
    TYPE_STR,
    Array,
    Kind,
)
from quiver.otlp.otap.write import (
    Numbers,
    Tables,
    children,
    of_numbers,
    table,
    valid_mask,
)

_PLAIN: Final = (
    ("string_value", "str", TYPE_STR),
    ("int_value", "int", TYPE_INT),
    ("double_value", "double", TYPE_DOUBLE),
    ("bool_value", "bool", TYPE_BOOL),
    ("bytes_value", "bytes", TYPE_BYTES),
)
_NESTED: Final = (
    ("kvlist_value", TYPE_MAP, kvlist_to_cbor, cbor_to_kvlist),
    ("array_value", TYPE_SLICE, array_to_cbor, cbor_to_array),
)
_FIELDS: Final = (
    "string_value",
    "bool_value",
    "int_value",
    "double_value",
    "array_value",
    "kvlist_value",
    "bytes_value",
)
"""The fields of a value in the order of the request's schema."""
_COLUMNS: Final = ("str", "int", "double", "bool", "bytes", "ser")


def write_attributes(
    tables: Tables,
    slot: Slot,
    owners: Array,
    name: str = "attributes",
    *,
    id_type: type[np.unsignedinteger[Any]],
    max_depth: int,
) -> None:
    """Add the table of the attributes of these owners, who have their row number as id."""
    pairs = children(owners, name)
    if len(pairs.rows) == 0:
        return
    value = pairs.rows.field("value")
    columns = value_columns(value, slot.name, max_depth)
    parent_id = pairs.parents(id_type)
    tables[slot] = table(
        slot, {"parent_id": parent_id, "key": _keys(pairs.rows.field("key")), **columns}
    )


def _keys(keys: Array) -> Array:
    encoded = keys.dictionary_encode()
    if len(encoded.dictionary) > MAX_ITEMS:
        return keys
    indices = of_numbers(encoded.indices.to_numpy().astype(np.uint16))
    return pa.DictionaryArray.from_arrays(indices, encoded.dictionary)


def value_columns(value: Array, where: str, max_depth: int) -> dict[str, Array | None]:
    """The columns of values: those that have none are None."""
    fields = _value_fields(value)
    count = len(value)
    kinds = np.zeros(count, dtype=np.uint8)
    there = 0
    columns: dict[str, Array | None] = {"type": None}
    for name, column, code in _PLAIN:
        values = fields[name]
        found = count - values.null_count
        columns[column] = values if found else None
        if found:
            there += found
            kinds += _coded(values, code)
    nested: dict[str, Array] = {}
    for name, code, _, _ in _NESTED:
        values = fields[name]
        if found := count - values.null_count:
            there += found
            kinds += _coded(values, code)
            nested[name] = values
    if there != np.count_nonzero(kinds):
        _refuse_two_values(fields, where)
    columns["ser"] = _to_cbor(nested, where, max_depth) if nested else None
    columns["type"] = of_numbers(kinds)
    return columns


def _value_fields(value: Array) -> dict[str, Array]:
    if value.null_count:
        return dict(zip(_FIELDS, value.flatten(), strict=True))
    return {name: value.field(place) for place, name in enumerate(_FIELDS)}


def _coded(values: Array, code: int) -> Numbers:
    return valid_mask(values).view(np.uint8) * np.uint8(code)


def _refuse_two_values(fields: Mapping[str, Array], where: str) -> None:
    several = sum(valid_mask(values).astype(np.uint8) for values in fields.values())
    row = int(np.flatnonzero(np.asarray(several) > 1)[0])
    raise InvalidRequest("a value of two types at once; set one", where=f"{where}, row {row}")


def _to_cbor(nested: Mapping[str, Array], where: str, max_depth: int) -> Array:
    made = [
        _converted(nested[name], to_cbor, where, max_depth)
        for name, _, to_cbor, _ in _NESTED
        if name in nested
    ]
    return made[0] if len(made) == 1 else pc.coalesce(*made)


def _converted(
    values: Array, convert: Callable[[bytes, int], bytes], where: str, max_depth: int
) -> Array:
    """The values, converted, each distinct one once. Null stays null."""
    encoded = values.dictionary_encode()
    made: list[bytes] = []
    for value in encoded.dictionary.to_pylist():
        try:
            made.append(convert(value, max_depth))
        except BadValue as error:
            row = encoded.indices.index(len(made)).as_py()
            raise InvalidRequest(str(error), where=f"{where}, row {row}") from None
    return pa.array(made, type=pa.binary()).take(encoded.indices)


def read_attributes(source: Table, kind: Kind) -> tuple[Ids, Array]:
    """The ids of the owners, and the attributes as structs of this type."""
    key = source.required("key")
    codes = source.required("type").to_numpy()
    columns = source.columns(_COLUMNS)
    parent_ids = source.parent_ids(lambda: _like_before(key, codes, columns))
    value_kind = kind.field("value").type
    where = source.slot.name
    value = value_structs(codes, columns, value_kind, where=where, limits=source.limits)
    return parent_ids, record(kind, source.rows, {"key": key, "value": value})


def owned_attributes(
    tables: Mapping[Slot, Table], slot: Slot, owners: Parents, kind: Kind
) -> Array | None:
    """The attributes in a table as lists of this type, one for each owner; None without table."""
    source = tables.get(slot)
    if source is None:
        return None
    parent_ids, pairs = read_attributes(source, kind.value_type)
    return lists_of(pairs, owners.rows_of(parent_ids, slot.name), owners.count, kind)


def _like_before(key: Array, codes: Numbers, columns: Mapping[str, Array | None]) -> Mask:
    like = like_before([of_numbers(codes), key], nulls_equal=False)
    like_value = np.zeros(len(codes), dtype=np.bool_)
    for _, name, code in _PLAIN:
        values = columns[name]
        if values is not None:
            here = codes == code
            like_value[here] = like_before([values], nulls_equal=False)[here]
    return like & like_value


def value_structs(
    codes: Numbers,
    columns: Mapping[str, Array | None],
    kind: Kind,
    *,
    where: str,
    limits: Limits,
    valid: Mask | None = None,
) -> Array:
    """Values as OTLP has them: one field of each struct is not null, or none."""
    if (wrong := np.flatnonzero(codes > TYPE_BYTES)).size:
        row = int(wrong[0])
        raise InvalidRequest(
            f"type {codes[row]}; OTAP has 0 to {TYPE_BYTES}", where=f"{where}.type, row {row}"
        )
    fields: dict[str, Array | None] = {}
    for name, column, code in _PLAIN:
        fields[name] = _where_type(columns.get(column), codes, code)
    for name, code, _, from_cbor in _NESTED:
        nested = _where_type(columns.get("ser"), codes, code)
        if nested is not None and nested.null_count != len(nested):
            fields[name] = _converted(nested, from_cbor, f"{where}.ser", limits.max_depth)
    return record(kind, len(codes), fields, valid=valid)


def _where_type(values: Array | None, codes: Numbers, code: int) -> Array | None:
    if values is None:
        return None
    here = codes == code
    if not (valid_mask(values) & ~here).any():
        return values
    return pc.if_else(of_numbers(here), values, pa.scalar(None, values.type))
