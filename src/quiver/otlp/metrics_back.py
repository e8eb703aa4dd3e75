"""Data points: from rows back to a request batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.bundle import Signal
from quiver.errors import InvalidRequest
from quiver.otlp.columns import (
    Array,
    Index,
    Type,
    from_hex,
    numbers,
    of_lists,
    of_numbers,
    of_structs,
    starts_of,
    take_map,
    without_nulls,
)
from quiver.otlp.grouping import (
    Groups,
    double_lists,
    filled,
    nest,
    nested_types,
    pairs,
    text,
    uint32,
    uint64,
    uint64_lists,
)
from quiver.otlp.metrics import KINDS, kind_names
from quiver.otlp.schema import INT

# Fields whose column has another name.
_COLUMN_OF: Final = {"as_int": "int_value", "as_double": "double_value"}


class _Metrics(NamedTuple):
    """Where metrics start, how many points they have, and the type of each row."""

    at: Index
    counts: Index
    kind_of_row: Index


def points_from_rows(rows: pa.RecordBatch, starts: Groups) -> pa.RecordBatch:
    """The requests of rows that are grouped."""
    type_ = nested_types(Signal.METRICS).item
    at = starts.metrics
    counts = np.diff(np.append(at, rows.num_rows))
    metrics = _Metrics(at, counts, _kinds(rows.column("type")))
    pick = of_numbers(at, INT)
    members: dict[str, Array] = {
        name: text(rows.column(name).take(pick)) for name in ("name", "description", "unit")
    }
    metadata = take_map(rows.column("metadata"), at)
    members["metadata"] = pairs(metadata, type_.field("metadata").type)
    for kind, name in enumerate(KINDS):
        members[name] = _data(rows, kind, metrics, type_.field(name).type)
    ordered = [members[field.name] for field in type_]
    return nest(Signal.METRICS, rows, starts, of_structs(type_, len(at), ordered))


def _kinds(column: Array) -> Index:
    """The type of each row as a number."""
    kinds: Array = pc.index_in(column, kind_names())
    if kinds.null_count:
        raise InvalidRequest(
            f"a row has none of the types {', '.join(KINDS)}: select this column, and only rows "
            f"that have it",
            where="column type",
        )
    return numbers(kinds).astype(np.int64)


def _data(rows: pa.RecordBatch, kind: int, metrics: _Metrics, type_: Type) -> Array:
    """The points of one type, in their metrics; null for metrics of another type."""
    of_kind = np.flatnonzero(metrics.kind_of_row == kind)
    if not len(of_kind):
        return pa.nulls(len(metrics.at), type_)
    points = rows.select(_point_columns(kind))
    if len(of_kind) < rows.num_rows:
        points = points.take(of_numbers(of_kind, INT))
    mine = metrics.kind_of_row[metrics.at] == kind
    pick = of_numbers(metrics.at, INT)
    members = []
    for field in type_:
        if field.name == "data_points":
            values = _points(points, field.type.value_type)
            offsets = starts_of(np.where(mine, metrics.counts, 0))
            members.append(of_lists(field.type, offsets, values))
        else:  # the temporality, and whether a sum is monotonic
            members.append(filled(rows.column(field.name).take(pick)))
    return of_structs(type_, len(mine), members, mine)


@cache
def _point_columns(kind: int) -> list[str]:
    """The columns of the points of one type."""
    data = nested_types(Signal.METRICS).item.field(KINDS[kind]).type
    names: list[str] = []
    for field in data.field("data_points").type.value_type:
        if field.name in {"positive", "negative"}:
            names += [f"{field.name}_offset", f"{field.name}_bucket_counts"]
        else:
            names.append(_COLUMN_OF.get(field.name, field.name))
    return names


def _points(points: pa.RecordBatch, type_: Type) -> Array:
    members = []
    for field in type_:
        name = field.name
        if name in {"positive", "negative"}:
            members.append(_buckets(points, name, field.type))
            continue
        column = points.column(_COLUMN_OF.get(name, name))
        convert = _CONVERT.get(name)
        if convert is not None:
            column = convert(column, field.type, f"column {name}")
        elif not field.nullable:
            column = filled(column)
        members.append(column)
    return of_structs(type_, points.num_rows, members)


def _buckets(points: pa.RecordBatch, side: str, type_: Type) -> Array:
    """One side of exponential histograms; absent where neither column has anything."""
    offset, counts = points.column(f"{side}_offset"), points.column(f"{side}_bucket_counts")
    absent = pc.and_(offset.is_null(), counts.is_null()).to_numpy(zero_copy_only=False)
    where = f"column {side}_bucket_counts"
    members = [filled(offset), uint64_lists(counts, type_.field(1).type, where)]
    return of_structs(type_, points.num_rows, members, ~absent)


def _quantiles(array: Array, type_: Type, _where: str) -> Array:
    offsets, values = without_nulls(array)
    quantiles = values
    members = [filled(quantiles.field(0)), filled(quantiles.field(1))]
    return of_lists(type_, offsets, of_structs(type_.value_type, len(values), members))


def _exemplars(array: Array, type_: Type, _where: str) -> Array:
    offsets, values = without_nulls(array)
    found = values
    members = {
        "time_unix_nano": uint64(found.field("time_unix_nano"), "column exemplars.time_unix_nano"),
        "as_double": found.field("double_value"),
        "as_int": found.field("int_value"),
        "trace_id": from_hex(found.field("trace_id"), "column exemplars.trace_id"),
        "span_id": from_hex(found.field("span_id"), "column exemplars.span_id"),
    }
    item = type_.value_type
    filtered = item.field("filtered_attributes").type
    members["filtered_attributes"] = pairs(found.field("filtered_attributes"), filtered)
    ordered = [members[field.name] for field in item]
    return of_lists(type_, offsets, of_structs(item, len(values), ordered))


def _unsigned(array: Array, _type: pa.DataType, where: str) -> Array:
    return uint64(array, where)


# What a field needs more than its nulls filled.
_CONVERT: Final[Mapping[str, Callable[[Array, pa.DataType, str], Array]]] = MappingProxyType(
    {
        "attributes": lambda array, type_, _: pairs(array, type_),
        "start_time_unix_nano": _unsigned,
        "time_unix_nano": _unsigned,
        "count": _unsigned,
        "zero_count": _unsigned,
        "flags": lambda array, _, where: uint32(array, where),
        "bucket_counts": uint64_lists,
        "explicit_bounds": lambda array, type_, _: double_lists(array, type_),
        "quantile_values": _quantiles,
        "exemplars": _exemplars,
    }
)
