"""The rows of the lake, the plain way: from upb objects, one at a time.

A handful of items is faster this way, because a call to the columnar one costs a millisecond
however little it is given. It is also what the columnar way is held against, in tests and in
benchmarks: the two share no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final, TypeAlias
from zoneinfo import ZoneInfo

import pyarrow as pa
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import ArrayValue, KeyValue, KeyValueList

from quiver.bundle import Signal
from quiver.config import AttributeLevel, AttributeType, OtlpConfig, PromotedAttribute
from quiver.otlp.context import Source
from quiver.otlp.messages import REQUEST_TYPES
from quiver.otlp.schema import lake_schema

Row: TypeAlias = dict[str, Any]
# Messages are made by the library at run time: their fields are not known to a type checker.
Message: TypeAlias = Any

_DEFAULTS: Final = OtlpConfig()
_HEX_SIZES: Final = (("trace_id", 32), ("span_id", 16))
_LEVEL_SIZE: Final = 4  # bytes that a list around another one has at least
_NESTED: Final[dict[str, Any]] = {"array_value": ArrayValue, "kvlist_value": KeyValueList}
_SHARED_MAPS: Final = ("resource_attributes", "scope_attributes", "metadata")
_SOURCE: Final = ("source_store", "source_segment", "source_bundle", "source_row")
EPOCH: Final = datetime(1970, 1, 1, tzinfo=ZoneInfo("UTC"))
MEMBERS: Final = (
    *("string_value", "bool_value", "int_value", "double_value"),
    *("array_value", "kvlist_value", "bytes_value"),
)
PROMOTED_MEMBER: Final = {
    AttributeType.STRING: "string_value",
    AttributeType.BOOL: "bool_value",
    AttributeType.INT: "int_value",
    AttributeType.DOUBLE: "double_value",
    AttributeType.BYTES: "bytes_value",
}


class TooOdd(Exception):
    """Not for the plain way: the careful one knows what to say about it."""


def plain_batch(
    signal: Signal,
    requests: Sequence[bytes],
    config: OtlpConfig = _DEFAULTS,
    sources: Sequence[Source] | None = None,
) -> tuple[pa.RecordBatch, pa.Int32Array]:
    """The rows of the requests as a table, and for each the number of its request.

    ``TooOdd`` when anything is not as it is almost always, without saying what.
    """
    numbers, rows = [], []
    try:
        for number, row in plain_rows(signal, requests, config.promoted):
            if sources is not None:
                row.update(zip(_SOURCE, sources[number], strict=True))
            numbers.append(number)
            rows.append(row)
        if len(rows) > config.max_items:
            raise TooOdd
        _check_rows(signal, rows, config)
        table = _table(rows, signal, config.promoted)
    except (DecodeError, OverflowError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TooOdd from error
    return table, pa.array(numbers, pa.int32())


@cache
def _columns(
    signal: Signal, promoted: tuple[PromotedAttribute, ...]
) -> tuple[tuple[str, Any], ...]:
    """Names and types; asking the schema for them takes longer than to fill a column."""
    return tuple((field.name, field.type) for field in lake_schema(signal, promoted))


def _table(
    rows: list[Row], signal: Signal, promoted: tuple[PromotedAttribute, ...]
) -> pa.RecordBatch:
    columns = [
        pa.array([row[name] for row in rows], kind) for name, kind in _columns(signal, promoted)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=lake_schema(signal, promoted))


def _check_rows(signal: Signal, rows: list[Row], config: OtlpConfig) -> None:
    """``TooOdd`` unless it is certain that no rule of ``checks`` is broken."""
    owners = list(rows)
    for inner in ("events", "links", "exemplars"):
        for row in rows:
            owners += row.get(inner) or ()
    maps = {id(row[name]): row[name] for name in _SHARED_MAPS for row in rows if name in row}
    for owner in owners:
        if "trace_id" in owner:
            _check_ids(owner, optional=signal is not Signal.TRACES)
        pairs = owner.get("attributes") or owner.get("filtered_attributes")
        maps[id(pairs)] = pairs
    values = [row.get("body") for row in rows]
    for pairs in filter(None, maps.values()):
        if len(pairs) > config.max_attributes:
            raise TooOdd
        values += [value for _, value in pairs]
    shallow = _LEVEL_SIZE * config.max_depth
    for value in filter(None, values):
        for name, message in _NESTED.items():
            nested = value[name]
            if nested and len(nested) >= shallow:
                _check_depth(message.FromString(nested), config.max_depth)


def _check_depth(nested: Message, left: int) -> None:
    """Of a list or map that is long enough to be too deep."""
    if not left:
        raise TooOdd
    for member in nested.values:
        value = member.value if isinstance(member, KeyValue) else member
        kind = value.WhichOneof("value")
        if kind in _NESTED:
            _check_depth(getattr(value, kind), left - 1)


def _check_ids(owner: Row, *, optional: bool) -> None:
    for name, size in _HEX_SIZES:
        identity = owner[name]
        if not optional if identity is None else len(identity) != size:
            raise TooOdd
    parent = owner.get("parent_span_id")
    if parent is not None and len(parent) != _HEX_SIZES[1][1]:
        raise TooOdd


def plain_rows(
    signal: Signal, requests: Sequence[bytes], promoted: Sequence[PromotedAttribute] = ()
) -> Iterator[tuple[int, Row]]:
    """The number of the request, and the row; without where the request is kept."""
    of_item = {Signal.TRACES: _span_rows, Signal.LOGS: _record_rows, Signal.METRICS: _point_rows}
    for number, request in enumerate(requests):
        message = REQUEST_TYPES[signal].FromString(request)
        for row in _request_rows(message, of_item[signal], promoted):
            yield number, row


def _request_rows(
    message: Message,
    of_items: Callable[[Message], Iterator[tuple[Row, Message]]],
    promoted: Sequence[PromotedAttribute],
) -> Iterator[Row]:
    (_, resources), *_ = message.ListFields() or [(None, ())]
    for at_resource, resource_group in enumerate(resources):
        scopes = next(
            (v for d, v in resource_group.ListFields() if d.name.startswith("scope_")), ()
        )
        for at_scope, scope_group in enumerate(scopes):
            shared = _context(resource_group, scope_group)
            shared |= {"source_resource": at_resource, "source_scope": at_scope}
            for row, item in of_items(scope_group):
                owners = {
                    AttributeLevel.ITEM: item,
                    AttributeLevel.RESOURCE: resource_group.resource,
                    AttributeLevel.SCOPE: scope_group.scope,
                }
                for wanted in promoted:
                    row[wanted.column] = _promoted(owners[wanted.level], wanted)
                yield {**shared, **row}


def _context(resource_group: Message, scope_group: Message) -> Row:
    resource, scope = resource_group.resource, scope_group.scope
    names = (a.value for a in resource.attributes if a.key == "service.name")
    name = next(names, None)
    return {
        "service_name": name.string_value if name and name.HasField("string_value") else None,
        "resource_attributes": _attributes(resource.attributes)
        if resource_group.HasField("resource")
        else None,
        "resource_dropped_attributes_count": resource.dropped_attributes_count,
        "resource_entity_refs": [one.SerializeToString() for one in resource.entity_refs],
        "resource_schema_url": resource_group.schema_url,
        "scope_name": scope.name,
        "scope_version": scope.version,
        "scope_attributes": _attributes(scope.attributes)
        if scope_group.HasField("scope")
        else None,
        "scope_dropped_attributes_count": scope.dropped_attributes_count,
        "scope_schema_url": scope_group.schema_url,
        **dict.fromkeys(("source_store", "source_segment", "source_bundle", "source_row")),
    }


def _promoted(owner: Message, wanted: PromotedAttribute) -> object:
    found = next((a for a in owner.attributes if a.key == wanted.key), None)
    member = PROMOTED_MEMBER[wanted.type]
    if found is None or not found.value.HasField(member):
        return None
    return getattr(found.value, member)


def _value(any_value: Message) -> Row:
    members: Row = dict.fromkeys(MEMBERS)
    kind = any_value.WhichOneof("value")
    if kind in {"array_value", "kvlist_value"}:
        members[kind] = getattr(any_value, kind).SerializeToString(deterministic=True)
    elif kind is not None:
        members[kind] = getattr(any_value, kind)
    return members


def _attributes(pairs: Message) -> list[tuple[str, Row | None]]:
    return [(pair.key, _value(pair.value) if pair.HasField("value") else None) for pair in pairs]


def _time(nanos: int) -> datetime:
    return EPOCH + timedelta(microseconds=nanos // 1000)


def _hexed(identity: bytes) -> str | None:
    return identity.hex() or None


def _optional(message: Message, name: str) -> Message:
    return getattr(message, name) if message.HasField(name) else None


def _span_rows(scope_group: Message) -> Iterator[tuple[Row, Message]]:
    for at_item, span in enumerate(scope_group.spans):
        row = {
            "trace_id": _hexed(span.trace_id),
            "span_id": _hexed(span.span_id),
            "parent_span_id": _hexed(span.parent_span_id),
            "trace_state": span.trace_state,
            "flags": span.flags,
            "name": span.name,
            "kind": span.kind,
            "start_time_unix_nano": span.start_time_unix_nano,
            "end_time_unix_nano": span.end_time_unix_nano,
            "start_time": _time(span.start_time_unix_nano),
            "end_time": _time(span.end_time_unix_nano),
            "duration_ns": span.end_time_unix_nano - span.start_time_unix_nano,
            "status_code": span.status.code,
            "status_message": span.status.message if span.HasField("status") else None,
            "attributes": _attributes(span.attributes),
            "dropped_attributes_count": span.dropped_attributes_count,
            "events": [
                {
                    "time_unix_nano": event.time_unix_nano,
                    "name": event.name,
                    "attributes": _attributes(event.attributes),
                    "dropped_attributes_count": event.dropped_attributes_count,
                }
                for event in span.events
            ],
            "dropped_events_count": span.dropped_events_count,
            "links": [
                {
                    "trace_id": _hexed(link.trace_id),
                    "span_id": _hexed(link.span_id),
                    "trace_state": link.trace_state,
                    "attributes": _attributes(link.attributes),
                    "dropped_attributes_count": link.dropped_attributes_count,
                    "flags": link.flags,
                }
                for link in span.links
            ],
            "dropped_links_count": span.dropped_links_count,
            "source_item": at_item,
        }
        yield row, span


def _record_rows(scope_group: Message) -> Iterator[tuple[Row, Message]]:
    for at_item, record in enumerate(scope_group.log_records):
        known = record.time_unix_nano or record.observed_time_unix_nano
        row = {
            "time_unix_nano": record.time_unix_nano,
            "observed_time_unix_nano": record.observed_time_unix_nano,
            "time": _time(known) if known else None,
            "severity_number": record.severity_number,
            "severity_text": record.severity_text,
            "event_name": record.event_name,
            "body": _value(record.body) if record.HasField("body") else None,
            "trace_id": _hexed(record.trace_id),
            "span_id": _hexed(record.span_id),
            "flags": record.flags,
            "attributes": _attributes(record.attributes),
            "dropped_attributes_count": record.dropped_attributes_count,
            "source_item": at_item,
        }
        yield row, record


def _point_rows(scope_group: Message) -> Iterator[tuple[Row, Message]]:
    for at_metric, metric in enumerate(scope_group.metrics):
        kind = metric.WhichOneof("data")
        if kind is None:
            continue
        data = getattr(metric, kind)
        shared = {
            "name": metric.name,
            "description": metric.description,
            "unit": metric.unit,
            "type": kind,
            "aggregation_temporality": getattr(data, "aggregation_temporality", None),
            "is_monotonic": getattr(data, "is_monotonic", None),
            "metadata": _attributes(metric.metadata),
            "source_metric": at_metric,
        }
        for at_item, point in enumerate(data.data_points):
            yield {**shared, **_point(kind, point), "source_item": at_item}, point


def _point(kind: str, point: Message) -> Row:
    number, histogram = kind in {"gauge", "sum"}, kind == "histogram"
    exponential, summary = kind == "exponential_histogram", kind == "summary"
    bounded = histogram or exponential
    row = {
        "attributes": _attributes(point.attributes),
        "start_time_unix_nano": point.start_time_unix_nano,
        "time_unix_nano": point.time_unix_nano,
        "start_time": _time(point.start_time_unix_nano) if point.start_time_unix_nano else None,
        "time": _time(point.time_unix_nano),
        "flags": point.flags,
        "int_value": _optional(point, "as_int") if number else None,
        "double_value": _optional(point, "as_double") if number else None,
        "count": None if number else point.count,
        "sum": _optional(point, "sum") if bounded else point.sum if summary else None,
        "min": _optional(point, "min") if bounded else None,
        "max": _optional(point, "max") if bounded else None,
        "bucket_counts": list(point.bucket_counts) if histogram else None,
        "explicit_bounds": list(point.explicit_bounds) if histogram else None,
        "scale": point.scale if exponential else None,
        "zero_count": point.zero_count if exponential else None,
        "zero_threshold": point.zero_threshold if exponential else None,
        "quantile_values": [
            {"quantile": q.quantile, "value": q.value} for q in point.quantile_values
        ]
        if summary
        else None,
        "exemplars": None if summary else [_exemplar(one) for one in point.exemplars],
    }
    for side in ("positive", "negative"):
        buckets = _optional(point, side) if exponential else None
        row[f"{side}_offset"] = None if buckets is None else buckets.offset
        row[f"{side}_bucket_counts"] = None if buckets is None else list(buckets.bucket_counts)
    return row


def _exemplar(exemplar: Message) -> Row:
    return {
        "time_unix_nano": exemplar.time_unix_nano,
        "int_value": _optional(exemplar, "as_int"),
        "double_value": _optional(exemplar, "as_double"),
        "trace_id": _hexed(exemplar.trace_id),
        "span_id": _hexed(exemplar.span_id),
        "filtered_attributes": _attributes(exemplar.filtered_attributes),
    }
