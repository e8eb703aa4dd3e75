"""Requests from the rows of the lake, the plain way: upb objects, one field at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from opentelemetry.proto.common.v1.common_pb2 import ArrayValue, KeyValueList

from quiver.bundle import Signal
from quiver.otlp.messages import REQUEST_TYPES

Row: TypeAlias = Mapping[str, Any]
# Messages are made by the library at run time: their fields are not known to a type checker.
Message: TypeAlias = Any

_SPAN_FIELDS: Final = (
    *("trace_state", "flags", "name", "kind", "start_time_unix_nano", "end_time_unix_nano"),
    *("dropped_attributes_count", "dropped_events_count", "dropped_links_count"),
)
_RECORD_FIELDS: Final = (
    *("time_unix_nano", "observed_time_unix_nano", "severity_number", "severity_text"),
    *("event_name", "flags", "dropped_attributes_count"),
)
_POINT_FIELDS: Final = ("start_time_unix_nano", "time_unix_nano", "flags")
_SHAPE_FIELDS: Final = {
    "histogram": ("count", "sum", "min", "max"),
    "exponential_histogram": (
        *("count", "sum", "min", "max", "scale", "zero_count", "zero_threshold"),
    ),
    "summary": ("count", "sum"),
}


def plain_request(signal: Signal, rows: Iterable[Row]) -> bytes:
    """One request with these rows, which are those of one request and in its order."""
    request: Message = REQUEST_TYPES[signal]()
    add: Callable[[Message, Row], None] = {
        Signal.TRACES: _add_span,
        Signal.LOGS: _add_record,
        Signal.METRICS: _add_point,
    }[signal]
    suffix = {Signal.TRACES: "spans", Signal.LOGS: "logs", Signal.METRICS: "metrics"}[signal]
    resource_at, scope_at = -1, -1
    resource_group = scope_group = None
    for row in rows:
        if row["source_resource"] != resource_at:
            resource_at, scope_at = row["source_resource"], -1
            resource_group = getattr(request, f"resource_{suffix}").add()
            _fill_resource(resource_group, row)
        if row["source_scope"] != scope_at:
            scope_at = row["source_scope"]
            scope_group = getattr(resource_group, f"scope_{suffix}").add()
            _fill_scope(scope_group, row)
        add(scope_group, row)
    return bytes(request.SerializeToString())


def _fill_resource(group: Message, row: Row) -> None:
    group.schema_url = row["resource_schema_url"]
    if row["resource_attributes"] is not None:
        group.resource.SetInParent()
        _fill_attributes(group.resource.attributes, row["resource_attributes"])
        group.resource.dropped_attributes_count = row["resource_dropped_attributes_count"]
        for reference in row["resource_entity_refs"]:
            group.resource.entity_refs.add().MergeFromString(reference)


def _fill_scope(group: Message, row: Row) -> None:
    group.schema_url = row["scope_schema_url"]
    if row["scope_attributes"] is not None:
        group.scope.SetInParent()
        group.scope.name = row["scope_name"]
        group.scope.version = row["scope_version"]
        group.scope.dropped_attributes_count = row["scope_dropped_attributes_count"]
        _fill_attributes(group.scope.attributes, row["scope_attributes"])


def _fill_attributes(pairs: Message, attributes: Iterable[tuple[str, Row | None]]) -> None:
    for key, value in attributes:
        pair = pairs.add(key=key)
        if value is not None:
            _fill_value(pair.value, value)


def _fill_value(any_value: Message, members: Row) -> None:
    any_value.SetInParent()
    for name, member in members.items():
        if member is None:
            continue
        if name == "array_value":
            any_value.array_value.CopyFrom(ArrayValue.FromString(member))
        elif name == "kvlist_value":
            any_value.kvlist_value.CopyFrom(KeyValueList.FromString(member))
        else:
            setattr(any_value, name, member)


def _set(message: Message, row: Row, names: Iterable[str]) -> None:
    for name in names:
        if row[name] is not None:
            setattr(message, name, row[name])


def _set_id(message: Message, row: Row, name: str) -> None:
    if row[name] is not None:
        setattr(message, name, bytes.fromhex(row[name]))


def _add_span(group: Message, row: Row) -> None:
    span = group.spans.add()
    _set(span, row, _SPAN_FIELDS)
    for name in ("trace_id", "span_id", "parent_span_id"):
        _set_id(span, row, name)
    _fill_attributes(span.attributes, row["attributes"])
    for event in row["events"]:
        made = span.events.add(name=event["name"])
        _set(made, event, ("time_unix_nano", "dropped_attributes_count"))
        _fill_attributes(made.attributes, event["attributes"])
    for link in row["links"]:
        made = span.links.add()
        _set(made, link, ("trace_state", "dropped_attributes_count", "flags"))
        _set_id(made, link, "trace_id")
        _set_id(made, link, "span_id")
        _fill_attributes(made.attributes, link["attributes"])
    if row["status_message"] is not None:
        span.status.SetInParent()
        span.status.code = row["status_code"]
        span.status.message = row["status_message"]


def _add_record(group: Message, row: Row) -> None:
    record = group.log_records.add()
    _set(record, row, _RECORD_FIELDS)
    _set_id(record, row, "trace_id")
    _set_id(record, row, "span_id")
    if row["body"] is not None:
        _fill_value(record.body, row["body"])
    _fill_attributes(record.attributes, row["attributes"])


def _add_point(group: Message, row: Row) -> None:
    if row["source_metric"] != len(group.metrics) - 1:
        metric = group.metrics.add(
            name=row["name"], description=row["description"], unit=row["unit"]
        )
        _fill_attributes(metric.metadata, row["metadata"])
    data = getattr(group.metrics[-1], row["type"])
    _set(data, row, [n for n in ("aggregation_temporality", "is_monotonic") if hasattr(data, n)])
    point = data.data_points.add()
    _set(point, row, _POINT_FIELDS)
    _fill_attributes(point.attributes, row["attributes"])
    if row["int_value"] is not None:
        point.as_int = row["int_value"]
    if row["double_value"] is not None:
        point.as_double = row["double_value"]
    _set(point, row, _SHAPE_FIELDS.get(row["type"], ()))
    for name in ("bucket_counts", "explicit_bounds"):
        if row[name] is not None:
            getattr(point, name).extend(row[name])
    for side in ("positive", "negative"):
        if row[f"{side}_offset"] is not None:
            buckets = getattr(point, side)
            buckets.SetInParent()
            buckets.offset = row[f"{side}_offset"]
            buckets.bucket_counts.extend(row[f"{side}_bucket_counts"])
    for quantile in row["quantile_values"] or ():
        point.quantile_values.add(quantile=quantile["quantile"], value=quantile["value"])
    for exemplar in row["exemplars"] or ():
        _add_exemplar(point, exemplar)


def _add_exemplar(point: Message, row: Row) -> None:
    made = point.exemplars.add(time_unix_nano=row["time_unix_nano"])
    if row["int_value"] is not None:
        made.as_int = row["int_value"]
    if row["double_value"] is not None:
        made.as_double = row["double_value"]
    _set_id(made, row, "trace_id")
    _set_id(made, row, "span_id")
    _fill_attributes(made.filtered_attributes, row["filtered_attributes"])
