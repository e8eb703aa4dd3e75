"""Metrics, their data points and exemplars: between a request's nested columns and OTAP's tables.

Gauges and sums share one table of points; the type of the metric tells which a point belongs to.

=====================  ===========  =================  =========================================
field of the metric    metric_type  points in          their attributes, exemplars and those' own
=====================  ===========  =================  =========================================
gauge, sum             1, 2         NUMBER             all three
histogram              3            HISTOGRAM          all three
exponential_histogram  4            EXP_HISTOGRAM      all three
summary                5            SUMMARY            attributes
=====================  ===========  =================  =========================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from quiver.bundle import Slot
from quiver.errors import InvalidRequest
from quiver.otlp.otap.attributes import owned_attributes, write_attributes
from quiver.otlp.otap.ids import Mask
from quiver.otlp.otap.read import (
    Parents,
    Table,
    inside,
    lists_of,
    native,
    number_list,
    record,
    refuse_orphans,
)
from quiver.otlp.otap.schema import BUCKETS, QUANTILE, SPAN_ID, TRACE_ID, Array, Kind
from quiver.otlp.otap.write import (
    Columns,
    Numbers,
    Tables,
    children,
    flags,
    items_of,
    numbered,
    numbers,
    of_numbers,
    plain_list,
    present,
    some_fixed,
    some_times,
    struct,
    table,
    texts,
    times,
    valid_mask,
)


class PointSlots(NamedTuple):
    """The tables of one kind of points, and the fields and types of the metrics that have them."""

    metrics: tuple[tuple[str, int], ...]
    points: Slot
    attributes: Slot
    exemplars: Slot | None = None
    exemplar_attributes: Slot | None = None


_NUMBER: Final = PointSlots(
    (("gauge", 1), ("sum", 2)),
    Slot.NUMBER_DATA_POINTS,
    Slot.NUMBER_DP_ATTRS,
    Slot.NUMBER_DP_EXEMPLARS,
    Slot.NUMBER_DP_EXEMPLAR_ATTRS,
)
_HISTOGRAM: Final = PointSlots(
    (("histogram", 3),),
    Slot.HISTOGRAM_DATA_POINTS,
    Slot.HISTOGRAM_DP_ATTRS,
    Slot.HISTOGRAM_DP_EXEMPLARS,
    Slot.HISTOGRAM_DP_EXEMPLAR_ATTRS,
)
_EXP_HISTOGRAM: Final = PointSlots(
    (("exponential_histogram", 4),),
    Slot.EXP_HISTOGRAM_DATA_POINTS,
    Slot.EXP_HISTOGRAM_DP_ATTRS,
    Slot.EXP_HISTOGRAM_DP_EXEMPLARS,
    Slot.EXP_HISTOGRAM_DP_EXEMPLAR_ATTRS,
)
_SUMMARY: Final = PointSlots((("summary", 5),), Slot.SUMMARY_DATA_POINTS, Slot.SUMMARY_DP_ATTRS)
_ALL: Final = (_NUMBER, _HISTOGRAM, _EXP_HISTOGRAM, _SUMMARY)
_WITH_TEMPORALITY: Final = frozenset({"sum", "histogram", "exponential_histogram"})
_MAX_TYPE: Final = 5


def write_metrics(tables: Tables, metrics: Array, origin: Columns, max_depth: int) -> None:
    """Add the tables of these metrics, whose ids are their row numbers."""
    data = {name: metrics.field(name) for slots in _ALL for name, _ in slots.metrics}
    kinds, temporality, monotonic = _types(data)
    tables[Slot.UNIVARIATE_METRICS] = table(
        Slot.UNIVARIATE_METRICS,
        {
            **origin,
            "metric_type": of_numbers(kinds),
            "name": metrics.field("name"),
            "description": texts(metrics.field("description")),
            "unit": texts(metrics.field("unit")),
            "aggregation_temporality": numbers(of_numbers(temporality)),
            "is_monotonic": flags(of_numbers(monotonic)),
        },
    )
    write_attributes(
        tables, Slot.METRIC_ATTRS, metrics, "metadata", id_type=np.uint16, max_depth=max_depth
    )
    for slots in _ALL:
        _write_points(tables, slots, data, max_depth)


def _types(data: Mapping[str, Array]) -> tuple[Numbers, Numbers, Mask]:
    count = len(data["gauge"])
    kinds = np.zeros(count, dtype=np.uint8)
    temporality = np.zeros(count, dtype=np.int32)
    monotonic = np.zeros(count, dtype=np.bool_)
    for slots in _ALL:
        for name, code in slots.metrics:
            values = data[name]
            if values.null_count == count:
                continue
            there = valid_mask(values)
            if (twice := np.flatnonzero(there & (kinds != 0))).size:
                raise InvalidRequest(
                    "a metric of two types at once; set one", where=f"metrics, row {twice[0]}"
                )
            kinds[there] = code
            if name in _WITH_TEMPORALITY:
                temporality[there] = values.field("aggregation_temporality").to_numpy()[there]
            if name == "sum":
                flag = values.field("is_monotonic").to_numpy(zero_copy_only=False)
                monotonic[there] = flag[there]
    return kinds, temporality, monotonic


def _write_points(
    tables: Tables, slots: PointSlots, data: Mapping[str, Array], max_depth: int
) -> None:
    found = [children(data[name], "data_points") for name, _ in slots.metrics]
    found = [points for points in found if len(points.rows)]
    if not found:
        return
    rows = [points.rows for points in found]
    points = rows[0] if len(rows) == 1 else pa.concat_arrays(rows)
    parents = [points.parents(np.uint16) for points in found]
    tables[slots.points] = table(
        slots.points,
        {
            "id": numbered(len(points), np.uint32),
            "parent_id": parents[0] if len(parents) == 1 else pa.concat_arrays(parents),
            "start_time_unix_nano": some_times(points.field("start_time_unix_nano")),
            "time_unix_nano": times(points.field("time_unix_nano")),
            **_WRITERS[slots.points](points),
            "flags": numbers(points.field("flags")),
        },
    )
    write_attributes(tables, slots.attributes, points, id_type=np.uint32, max_depth=max_depth)
    if slots.exemplars is not None and slots.exemplar_attributes is not None:
        _write_exemplars(tables, slots.exemplars, slots.exemplar_attributes, points, max_depth)


def _number_columns(points: Array) -> Columns:
    return _two_numbers(points, "data_points")


def _two_numbers(points: Array, where: str) -> Columns:
    ints, doubles = points.field("as_int"), points.field("as_double")
    if ints.null_count + doubles.null_count < len(points):
        row = int(np.flatnonzero(valid_mask(ints) & valid_mask(doubles))[0])
        raise InvalidRequest("an int and a double at once; set one", where=f"{where}, row {row}")
    return {"int_value": present(ints), "double_value": present(doubles)}


def _summary_columns(points: Array) -> Columns:
    quantiles = points.field("quantile_values")
    values = items_of(quantiles)
    made: Array | None = None
    if len(values):
        offsets = quantiles.offsets.to_numpy()
        items = struct({name: values.field(name) for name in ("quantile", "value")})
        made = pa.ListArray.from_arrays(of_numbers(offsets - offsets[0]), items)
    return {
        "count": numbers(points.field("count")),
        "sum": numbers(points.field("sum")),
        "quantile": made,
    }


def _histogram_columns(points: Array) -> Columns:
    return {
        "count": numbers(points.field("count")),
        "sum": present(points.field("sum")),
        "bucket_counts": plain_list(points.field("bucket_counts")),
        "explicit_bounds": plain_list(points.field("explicit_bounds")),
        "min": present(points.field("min")),
        "max": present(points.field("max")),
    }


def _exp_histogram_columns(points: Array) -> Columns:
    return {
        "count": numbers(points.field("count")),
        "sum": present(points.field("sum")),
        "scale": numbers(points.field("scale")),
        "zero_count": numbers(points.field("zero_count")),
        "zero_threshold": numbers(points.field("zero_threshold")),
        "positive": _buckets(points.field("positive")),
        "negative": _buckets(points.field("negative")),
        "min": present(points.field("min")),
        "max": present(points.field("max")),
    }


def _buckets(buckets: Array) -> Array | None:
    if buckets.null_count == len(buckets):
        return None
    counts = buckets.field("bucket_counts")
    offsets = counts.offsets.to_numpy()
    lists = pa.ListArray.from_arrays(of_numbers(offsets - offsets[0]), items_of(counts))
    columns = {"offset": buckets.field("offset"), "bucket_counts": lists}
    return struct(columns, valid=valid_mask(buckets) if buckets.null_count else None)


_WRITERS: Final[Mapping[Slot, Callable[[Array], Columns]]] = {
    Slot.NUMBER_DATA_POINTS: _number_columns,
    Slot.SUMMARY_DATA_POINTS: _summary_columns,
    Slot.HISTOGRAM_DATA_POINTS: _histogram_columns,
    Slot.EXP_HISTOGRAM_DATA_POINTS: _exp_histogram_columns,
}


def _write_exemplars(
    tables: Tables, slot: Slot, attributes: Slot, points: Array, max_depth: int
) -> None:
    exemplars = children(points, "exemplars")
    rows = exemplars.rows
    if len(rows) == 0:
        return
    tables[slot] = table(
        slot,
        {
            "id": numbered(len(rows), np.uint32),
            "parent_id": exemplars.parents(np.uint32),
            "time_unix_nano": times(rows.field("time_unix_nano")),
            **_two_numbers(rows, "exemplars"),
            "span_id": some_fixed(rows.field("span_id"), SPAN_ID, "exemplars.span_id"),
            "trace_id": some_fixed(rows.field("trace_id"), TRACE_ID, "exemplars.trace_id"),
        },
    )
    write_attributes(
        tables, attributes, rows, "filtered_attributes", id_type=np.uint32, max_depth=max_depth
    )


def read_metrics(tables: Mapping[Slot, Table], kind: Kind) -> Array:
    """The metrics as structs of this type, in the order of their table."""
    metrics = tables[Slot.UNIVARIATE_METRICS]
    metrics.required("id")
    parents = Parents(metrics.ids(), metrics.rows, "UNIVARIATE_METRICS.id")
    kinds = metrics.required("metric_type").to_numpy()
    if (wrong := np.flatnonzero(kinds > _MAX_TYPE)).size:
        row = int(wrong[0])
        raise InvalidRequest(
            f"metric type {kinds[row]}; OTAP has 0 to {_MAX_TYPE}",
            where=f"UNIVARIATE_METRICS.metric_type, row {row}",
        )
    columns = metrics.columns(("description", "unit"))
    columns["name"] = metrics.required("name")
    metadata = kind.field("metadata").type
    columns["metadata"] = owned_attributes(tables, Slot.METRIC_ATTRS, parents, metadata)
    about = metrics.columns(("aggregation_temporality", "is_monotonic"))
    for slots in _ALL:
        columns.update(_read_data(tables, slots, parents, kinds, about, kind))
    return record(kind, metrics.rows, columns)


def _read_data(  # noqa: PLR0917 - the parts of one metric
    tables: Mapping[Slot, Table],
    slots: PointSlots,
    metrics: Parents,
    kinds: Numbers,
    about: Columns,
    kind: Kind,
) -> dict[str, Array | None]:
    """The data of metrics of some types, null for a metric that has another."""
    source = tables.get(slots.points)
    item = kind.field(slots.metrics[0][0]).type.field("data_points").type.value_type
    points, rows = _read_points(tables, slots, metrics, item)
    point_kinds = kinds[rows]
    codes = [code for _, code in slots.metrics]
    if source is not None and (wrong := np.flatnonzero(~np.isin(point_kinds, codes))).size:
        row = int(wrong[0])
        raise InvalidRequest(
            f"a point of a metric of type {point_kinds[row]}, which has its points elsewhere",
            where=f"{slots.points.name}.parent_id, row {row}",
        )
    made: dict[str, Array | None] = {}
    for name, code in slots.metrics:
        there = kinds == code
        if not there.any():
            continue
        mine = points
        if len(slots.metrics) > 1:
            mine = points.filter(of_numbers(point_kinds == code))
        data = kind.field(name).type
        list_kind = data.field("data_points").type
        lists = lists_of(mine, rows[point_kinds == code], metrics.count, list_kind)
        made[name] = record(data, metrics.count, {**about, "data_points": lists}, valid=there)
    return made


def _read_points(
    tables: Mapping[Slot, Table], slots: PointSlots, metrics: Parents, kind: Kind
) -> tuple[Array, Numbers]:
    source = tables.get(slots.points)
    below = [slots.attributes, slots.exemplars, slots.exemplar_attributes]
    if source is None:
        for slot in below:
            if slot is not None:
                refuse_orphans(tables, slot)
        return record(kind, 0, {}), np.zeros(0, dtype=np.int64)
    points = Parents(source.ids(), source.rows, f"{slots.points.name}.id")
    columns = source.columns(("start_time_unix_nano", "time_unix_nano", "flags"))
    columns.update(_READERS[slots.points](source, kind))
    attributes = kind.field("attributes").type
    columns["attributes"] = owned_attributes(tables, slots.attributes, points, attributes)
    if slots.exemplars is not None and slots.exemplar_attributes is not None:
        columns["exemplars"] = _read_exemplars(
            tables,
            slots.exemplars,
            slots.exemplar_attributes,
            points,
            kind.field("exemplars").type,
        )
    rows = metrics.rows_of(source.parent_ids(), slots.points.name)
    return record(kind, source.rows, columns), rows


def _read_two_numbers(source: Table, _: Kind) -> dict[str, Array | None]:
    ints, doubles = source.column("int_value"), source.column("double_value")
    if ints is not None and doubles is not None:
        both = np.flatnonzero(valid_mask(ints) & valid_mask(doubles))
        if both.size:
            raise InvalidRequest(
                "an int and a double at once; set one", where=f"{source.slot.name}, row {both[0]}"
            )
    return {"as_int": ints, "as_double": doubles}


def _read_summaries(source: Table, kind: Kind) -> dict[str, Array | None]:
    columns = source.columns(("count", "sum"))
    lists = source.column("quantile")
    if lists is not None:
        list_kind = kind.field("quantile_values").type
        items = lists.flatten()
        where = f"{source.slot.name}.quantile"
        fields = inside(items, QUANTILE, where, source.limits)
        made = record(list_kind.value_type, len(items), fields)
        lengths = np.diff(lists.offsets.to_numpy())
        lengths[~valid_mask(lists)] = 0
        columns["quantile_values"] = lists_of(
            made, np.repeat(np.arange(len(lists)), lengths), len(lists), list_kind
        )
    return columns


def _read_histograms(source: Table, kind: Kind) -> dict[str, Array | None]:
    columns = source.columns(("count", "sum", "min", "max"))
    for name in ("bucket_counts", "explicit_bounds"):
        where = f"{source.slot.name}.{name}"
        columns[name] = number_list(source.column(name), kind.field(name).type, where)
    return columns


def _read_exp_histograms(source: Table, kind: Kind) -> dict[str, Array | None]:
    columns = source.columns(
        ("count", "sum", "min", "max", "scale", "zero_count", "zero_threshold")
    )
    for name in ("positive", "negative"):
        columns[name] = _read_buckets(source, name, kind.field(name).type)
    return columns


def _read_buckets(source: Table, name: str, kind: Kind) -> Array | None:
    buckets = source.column(name)
    fields: dict[str, Array] = {}
    valid: Mask | None = None
    where = f"{source.slot.name}.{name}"
    if buckets is not None:
        fields = inside(buckets, BUCKETS, where, source.limits)
        valid = valid_mask(buckets)
    else:
        for part in ("offset", "bucket_counts"):
            index = source.batch.schema.get_field_index(f"{name}_{part}")
            if index >= 0:
                values = source.batch.column(index)
                part_kind = BUCKETS.field(part).type
                fields[part] = native(values, part_kind, f"{where}_{part}", source.limits)
        if not fields:
            return None
    counts = number_list(
        fields.get("bucket_counts"), kind.field("bucket_counts").type, f"{where}.bucket_counts"
    )
    columns = {"offset": fields.get("offset"), "bucket_counts": counts}
    return record(kind, source.rows, columns, valid=valid)


_READERS: Final[Mapping[Slot, Callable[[Table, Kind], dict[str, Array | None]]]] = {
    Slot.NUMBER_DATA_POINTS: _read_two_numbers,
    Slot.SUMMARY_DATA_POINTS: _read_summaries,
    Slot.HISTOGRAM_DATA_POINTS: _read_histograms,
    Slot.EXP_HISTOGRAM_DATA_POINTS: _read_exp_histograms,
}


def _read_exemplars(
    tables: Mapping[Slot, Table],
    slot: Slot,
    attributes: Slot,
    points: Parents,
    kind: Kind,
) -> Array | None:
    source = tables.get(slot)
    if source is None:
        refuse_orphans(tables, attributes)
        return None
    owners = Parents(source.ids(), source.rows, f"{slot.name}.id")
    item = kind.value_type
    columns = source.columns(("time_unix_nano", "span_id", "trace_id"))
    columns.update(_read_two_numbers(source, item))
    filtered = item.field("filtered_attributes").type
    columns["filtered_attributes"] = owned_attributes(tables, attributes, owners, filtered)
    rows = record(item, source.rows, columns)
    return lists_of(rows, points.rows_of(source.parent_ids(), slot.name), points.count, kind)
