"""Data points: from a request batch to rows, and back.

A metric holds its points in one of five messages, each with fields of its own. The rows have the
fields of all five: those that a type does not have are null. ``gather`` puts the points of the five
into the order of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quiver.config import AttributeLevel, PromotedAttribute
from quiver.otlp.columns import (
    Array,
    Index,
    Type,
    as_map,
    lists,
    micros,
    numbers,
    of_lists,
    of_numbers,
    of_structs,
    take_map,
    to_hex,
    valid_rows,
    without_nulls,
)
from quiver.otlp.context import (
    Level,
    Source,
    check_repeated,
    context_columns,
    level,
    levels,
    position_column,
    promoted_columns,
    take_all,
)
from quiver.otlp.schema import (
    ATTRIBUTES,
    BOOL,
    CODE,
    COUNTS,
    DOUBLE,
    EXEMPLAR,
    INT,
    POINT,
    QUANTILE,
)

KINDS: Final = ("gauge", "sum", "histogram", "exponential_histogram", "summary")


@cache
def kind_names() -> Array:
    """The names as a column; made at the first call, which takes long with pandas installed."""
    return pa.array(KINDS)


_BOUNDS: Final = pa.list_(DOUBLE)
_EXEMPLARS: Final = pa.list_(EXEMPLAR)
_QUANTILES: Final = pa.list_(QUANTILE)
_COLUMN_OF: Final = {"as_int": "int_value", "as_double": "double_value"}
# What is read as another type; the memory stays the same.
_VIEWS: Final[Mapping[str, Type]] = MappingProxyType(
    {
        "bucket_counts": COUNTS,
        "count": INT,
        "explicit_bounds": _BOUNDS,
        "quantile_values": _QUANTILES,
        "zero_count": INT,
    }
)
_NO_EXEMPLARS: Final = pa.nulls(0, EXEMPLAR)


class Points:
    """The points of all types, in the order of the request."""

    def __init__(self, metrics: Array) -> None:
        self.by_kind: list[tuple[int, Level]] = []
        for kind, name in enumerate(KINDS):
            data = metrics.field(name)
            if data.null_count < len(data):
                points = level(data.field(0))
                if len(points.values):
                    self.by_kind.append((kind, points))
        kinds = [np.full(len(points.parent), kind) for kind, points in self.by_kind]
        nothing = np.zeros(0, np.int64)
        self.kind: Index = np.concatenate([nothing, *kinds])
        self.metric: Index = np.concatenate([nothing, *(p.parent for _, p in self.by_kind)])
        self.position: Index = np.concatenate([nothing, *(p.position for _, p in self.by_kind)])
        self.rows = len(self.kind)
        self._indices: dict[tuple[int, ...], Array] = {}
        self.order: Index | None = None
        if len(self.by_kind) > 1:
            self.order = np.argsort(self.metric, kind="stable")
            self.kind = self.kind[self.order]
            self.metric = self.metric[self.order]
            self.position = self.position[self.order]

    def gather(self, *names: str) -> dict[str, Array]:
        """Fields that the same types have, in the order of the rows; null for other types.

        Nothing if there are no points of such a type.
        """
        batches = []
        kinds = []
        for kind, points in self.by_kind:
            if points.values.type.get_field_index(names[0]) >= 0:
                fields = [points.values.field(name) for name in names]
                batches.append(pa.RecordBatch.from_arrays(fields, names=list(names)))
                kinds.append(kind)
        if not batches:
            return {}
        joined = batches[0] if len(batches) == 1 else pa.concat_batches(batches)  # type: ignore[attr-defined] # not in the stubs
        if self.order is not None:
            joined = joined.take(self._index(tuple(kinds)))
        return dict(zip(names, joined.columns, strict=True))

    def gather_attributes(self) -> Array:
        """The attributes, which all types have."""
        parts = [as_map(points.values.field("attributes")) for _, points in self.by_kind]
        if not parts:
            return pa.array([], ATTRIBUTES)
        if self.order is None:
            return parts[0]
        return take_map(pa.concat_arrays(parts), self.order)

    def gather_numbers(self, name: str) -> NDArray[Any]:
        """A field of numbers, which all types have."""
        parts = [numbers(points.values.field(name)) for _, points in self.by_kind]
        if not parts:
            return np.zeros(0, np.int64)
        return parts[0] if self.order is None else np.concatenate(parts)[self.order]

    def _index(self, kinds: tuple[int, ...]) -> Array:
        """For each row, its place among the points of these types, joined; null for others."""
        if kinds not in self._indices:
            self._indices[kinds] = self._make_index(kinds)
        return self._indices[kinds]

    def _make_index(self, kinds: tuple[int, ...]) -> Array:
        order = cast("Index", self.order)
        if len(kinds) == len(self.by_kind):
            return of_numbers(order, INT)
        place = np.zeros(self.rows, np.int64)
        start = taken = 0
        for kind, points in self.by_kind:
            count = len(points.parent)
            if kind in kinds:
                place[start : start + count] = np.arange(taken, taken + count)
                taken += count
            start += count
        wanted = np.zeros(len(KINDS), np.bool_)
        wanted[list(kinds)] = True
        return of_numbers(place[order], INT, wanted[self.kind])


def points_to_columns(
    batch: pa.RecordBatch, promoted: Sequence[PromotedAttribute], sources: Sequence[Source] | None
) -> tuple[dict[str, Array], Index]:
    """The columns by name; and for each row, which request of the batch."""
    found = levels(batch)
    metrics = found.items.values
    points = Points(metrics)
    scope_of_row = found.items.parent[points.metric]
    columns, request_of_row = context_columns(found, scope_of_row, promoted, sources)
    columns["source_metric"] = position_column(found.items.position[points.metric])
    columns["source_item"] = position_column(points.position)
    columns |= _metric_columns(metrics, points, request_of_row)
    columns |= _point_columns(points)
    columns |= promoted_columns(columns["attributes"], promoted, AttributeLevel.ITEM)
    for name in POINT.keys() - columns.keys():
        columns[name] = pa.nulls(points.rows, POINT[name])
    return columns, request_of_row


def _metric_columns(metrics: Array, points: Points, request_of_row: Index) -> dict[str, Array]:
    own = {name: metrics.field(name) for name in ("name", "description", "unit")}
    own["metadata"] = as_map(metrics.field("metadata"))
    check_repeated(list(own.values()), points.metric, request_of_row, "metric")
    columns = take_all(own, points.metric)
    columns["type"] = kind_names().take(of_numbers(points.kind, INT))
    temporality = np.zeros(len(metrics), np.int32)
    for name in ("sum", "histogram", "exponential_histogram"):
        data = metrics.field(name)
        if data.null_count < len(data):
            valid = valid_rows(data)
            sent = numbers(data.field(1))
            temporality = sent if valid is None else np.where(valid, sent, temporality)
    has_temporality = (points.kind >= 1) & (points.kind <= 3)  # noqa: PLR2004 - sum to exponential
    columns["aggregation_temporality"] = of_numbers(
        temporality[points.metric], CODE, has_temporality
    )
    is_sum = points.kind == 1
    if is_sum.any():
        monotonic = metrics.field("sum").field(2)
        flags = monotonic.to_numpy(zero_copy_only=False)[points.metric]
        columns["is_monotonic"] = pa.array(flags, BOOL, mask=~is_sum)
    return columns


def _point_columns(points: Points) -> dict[str, Array]:
    start = points.gather_numbers("start_time_unix_nano")
    time = points.gather_numbers("time_unix_nano")
    columns = {
        "attributes": points.gather_attributes(),
        "start_time_unix_nano": of_numbers(start, INT),
        "time_unix_nano": of_numbers(time, INT),
        "start_time": micros(start, start != 0),
        "time": micros(time),
        "flags": of_numbers(points.gather_numbers("flags").astype(np.int64), INT),
    }
    # Together what the same types have.
    gathered = points.gather("as_int", "as_double")
    gathered |= points.gather("bucket_counts", "explicit_bounds")
    gathered |= points.gather("scale", "zero_count", "zero_threshold", "positive", "negative")
    gathered |= points.gather("quantile_values")
    gathered |= points.gather("min", "max")
    gathered |= points.gather("count", "sum")
    gathered |= points.gather("exemplars")
    for name, array in gathered.items():
        if name in {"positive", "negative"}:
            columns |= _buckets(array, name)
        elif name == "exemplars":
            columns[name] = _exemplars(array)
        else:
            columns[_COLUMN_OF.get(name, name)] = array.view(_VIEWS.get(name, array.type))
    return columns


def _buckets(array: Array, side: str) -> dict[str, Array]:
    """The two columns of one side of exponential histograms; null when it is absent."""
    valid = valid_rows(array)
    offset = array.field(0)
    offset = offset.fill_null(0) if offset.null_count else offset
    offsets, counts = without_nulls(array.field(1))
    return {
        f"{side}_offset": of_numbers(numbers(offset), CODE, valid),
        f"{side}_bucket_counts": of_lists(COUNTS, offsets, counts.view(INT), valid),
    }


def _exemplars(array: Array) -> Array:
    valid = valid_rows(array)
    offsets, exemplars = lists(array)
    if not len(exemplars):
        return of_lists(_EXEMPLARS, offsets, _NO_EXEMPLARS, valid)
    members = [
        exemplars.field("time_unix_nano").view(INT),
        exemplars.field("as_int"),
        exemplars.field("as_double"),
        to_hex(exemplars.field("trace_id")),
        to_hex(exemplars.field("span_id")),
        as_map(exemplars.field("filtered_attributes")),
    ]
    return of_lists(_EXEMPLARS, offsets, of_structs(EXEMPLAR, len(exemplars), members), valid)
