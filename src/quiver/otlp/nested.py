"""Lists and maps inside attribute values, level by level.

A list or map is declared as bytes, so decoding a request does not look into it. Here all of one
level are decoded in one call, then all of the level below, until there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.otlp.decode import Refused, decode_array, undecodable
from quiver.otlp.findings import Array, Column, Findings, Gathered, Indexes, Items, byte_lengths
from quiver.otlp.messages import value_converter

LIST: Final = "array_value"
MAP: Final = "kvlist_value"
_MESSAGES: Final = {LIST: "ArrayValue", MAP: "KeyValueList"}
_LEVEL_SIZE: Final = 4
"""Bytes that a list around another one has at least: two tags and two lengths."""
_NONE: Final = np.empty(0, np.int64)


def check_nested(
    columns: Sequence[Column], max_depth: int, findings: Findings, *, valid: bool = False
) -> None:
    """Columns of lists and maps, told apart by their last name.

    ``valid``: they are known to be in order, so only the depth is left to look at. A value of a few
    bytes cannot be deep: most need no look at all.
    """
    left = max_depth
    while columns and left:
        if valid:
            columns = [c for c in columns if _has_longer(c, _LEVEL_SIZE * left)]
        below: list[Column] = []
        for kind, message in _MESSAGES.items():
            mine = [column for column in columns if column.name.endswith(kind)]
            if mine:
                below += _level(kind, message, mine, findings)
        columns = below
        left -= 1
    for column in columns:
        rows = np.flatnonzero(np.asarray(column.values.is_valid()))
        reason = f"more than {max_depth} lists or maps inside each other: send it flatter"
        findings.blame(column.place, rows, column.name, reason)


def _has_longer(column: Column, size: int) -> bool:
    return bool(np.count_nonzero(byte_lengths(column.values) >= size))


def _level(kind: str, message: str, columns: Sequence[Column], findings: Findings) -> list[Column]:
    """Decode what is set in the columns; the columns of lists and maps inside."""
    place, batch = decode_set(message, columns, findings)
    lists = cast("pa.ListArray[Any]", batch.column(0))
    values = cast("pa.StructArray", lists.values)
    if not len(values):
        return []
    items = Items(place, "values", lists)
    prefix = ""
    if kind == MAP:
        values = cast("pa.StructArray", values.field(1))
        prefix = "value."
    twice = several_set([values.field(member) for member in range(values.type.num_fields)])
    if twice is not None:
        findings.doubt(items, twice)
    inside = [(name, values.field(name)) for name in _MESSAGES]
    return [
        Column(items, prefix + name, member)
        for name, member in inside
        if member.null_count < len(member)
    ]


def decode_set(
    message: str, columns: Sequence[Column], findings: Findings
) -> tuple[Gathered, pa.RecordBatch]:
    """Decode the values that are set, without those that cannot be."""
    parts = [column.values for column in columns]
    joint: Array = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
    whole = cast("pa.BinaryArray", joint.drop_null() if joint.null_count else joint)
    converter = value_converter(message)
    try:
        return Gathered(columns, _NONE), decode_array(converter, whole)
    except Refused:
        messages = cast("list[bytes]", whole.to_pylist())
    bad = np.array(undecodable(converter, messages), np.int64)
    findings.blame(Gathered(columns, _NONE), bad, "", f"not a valid {message}")
    good = np.delete(np.arange(len(messages)), bad)
    return Gathered(columns, bad), decode_array(converter, whole.take(good))


def several_set(members: Sequence[Array]) -> Indexes | None:
    """The rows in which more than one of the members of a ``oneof`` is set, if there are any."""
    rows = len(members[0])
    present = [member for member in members if member.null_count < rows]
    if len(present) <= 1:
        return None
    bitmaps = [_validity(member) for member in present]
    any_set = bitmaps[0].copy()
    for bitmap in bitmaps[1:]:
        np.bitwise_or(any_set, bitmap, out=any_set)
    values = sum(rows - member.null_count for member in present)
    if int(np.bitwise_count(any_set).sum()) == values:
        return None
    flags = [np.unpackbits(bitmap, count=rows, bitorder="little") for bitmap in bitmaps]
    return np.flatnonzero(np.sum(flags, axis=0) > 1)


def _validity(array: Array) -> npt.NDArray[np.uint8]:
    """One bit for each row, zeros behind the last."""
    rows = len(array)
    if array.offset or not array.null_count:
        return np.packbits(np.asarray(array.is_valid()), bitorder="little")
    # Of a struct, `buffers` would make an object for each buffer of each column inside.
    flags = array.is_valid() if isinstance(array, pa.StructArray) else None
    buffer = array.buffers()[0] if flags is None else flags.buffers()[1]
    bits = np.frombuffer(cast("memoryview", buffer), np.uint8, (rows + 7) // 8)
    if rows % 8 and bits[-1] >> rows % 8:
        bits = bits.copy()
        bits[-1] &= (1 << rows % 8) - 1
    return bits
