"""OTAP tables, the plain way: from upb objects, one row at a time.

It shares no code with ``quiver.otlp.otap``: tests and benchmarks hold that against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import cbor2
import pyarrow as pa
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from quiver.bundle import Signal, Slot
from quiver.otlp.messages import REQUEST_TYPES
from quiver.otlp.otap.schema import SCHEMAS

Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = dict[Slot, list[Row]]
# Messages are made by the library at run time: their fields are not known to a type checker.
Message: TypeAlias = Any

LEVELS: Final = {
    Signal.TRACES: ("resource_spans", "scope_spans", "spans", Slot.SPANS),
    Signal.LOGS: ("resource_logs", "scope_logs", "log_records", Slot.LOGS),
    Signal.METRICS: ("resource_metrics", "scope_metrics", "metrics", Slot.UNIVARIATE_METRICS),
}
_POINTS: Final = {
    "gauge": (1, "NUMBER"),
    "sum": (2, "NUMBER"),
    "histogram": (3, "HISTOGRAM"),
    "exponential_histogram": (4, "EXP_HISTOGRAM"),
    "summary": (5, "SUMMARY"),
}


def plain_otap_rows(signal: Signal, requests: Iterable[bytes]) -> Rows:
    """The rows of one OTAP batch, nested values as Python values."""
    return _Loops().run(signal, [REQUEST_TYPES[signal].FromString(data) for data in requests])


def plain_otap(signal: Signal, requests: Iterable[bytes]) -> dict[Slot, pa.RecordBatch]:
    """The tables of one OTAP batch."""
    rows = plain_otap_rows(signal, requests)
    return {
        slot: pa.RecordBatch.from_pylist(list(map(_with_cbor, found)), schema=SCHEMAS[slot])
        for slot, found in rows.items()
        if found
    }


def _with_cbor(row: Row) -> Row:
    body = row.get("body")
    if body is not None:
        return {**row, "body": _with_cbor(body)}
    ser = row.get("ser")
    return row if ser is None else {**row, "ser": cbor2.dumps(ser)}


class _Loops:
    def __init__(self) -> None:
        self.rows: Rows = {slot: [] for slot in Slot}
        self.points: dict[str, list[tuple[Any, int]]] = {kind: [] for kind in _POINTS}

    def run(self, signal: Signal, requests: list[Message]) -> Rows:
        outer, inner, leaf, root = LEVELS[signal]
        resources = scopes = 0
        for request in requests:
            for resource in getattr(request, outer):
                used = False
                for scope in getattr(resource, inner):
                    items = getattr(scope, leaf)
                    for item in items:
                        row = {
                            "id": len(self.rows[root]),
                            **self._origin(resource, resources, scope, scopes),
                        }
                        self.rows[root].append(row)
                        self._item(signal, item, row)
                    if items:
                        used = True
                        self._attributes(Slot.SCOPE_ATTRS, scopes, scope.scope.attributes)
                        scopes += 1
                if used:
                    attributes = resource.resource.attributes
                    self._attributes(Slot.RESOURCE_ATTRS, resources, attributes)
                    resources += 1
        # Gauges before sums: their points share a table.
        for kind, points in self.points.items():
            for point, metric in points:
                self._point(_POINTS[kind][1], point, metric)
        return self.rows

    def _origin(self, resource: Message, resource_id: int, scope: Message, scope_id: int) -> Row:
        return {
            "resource": {
                "id": resource_id,
                "schema_url": resource.schema_url,
                "dropped_attributes_count": resource.resource.dropped_attributes_count,
            },
            "scope": {
                "id": scope_id,
                "name": scope.scope.name,
                "version": scope.scope.version,
                "dropped_attributes_count": scope.scope.dropped_attributes_count,
            },
            "schema_url": scope.schema_url,
        }

    def _item(self, signal: Signal, item: Message, row: Row) -> None:
        if signal is Signal.TRACES:
            self._span(item, row)
        elif signal is Signal.LOGS:
            self._log(item, row)
        else:
            self._metric(item, row)

    def _span(self, span: Message, row: Row) -> None:
        row |= _same(span, "trace_state name kind dropped_attributes_count flags")
        row |= _same(span, "dropped_events_count dropped_links_count")
        row |= {
            "start_time_unix_nano": _signed(span.start_time_unix_nano),
            "duration_time_unix_nano": _signed(span.end_time_unix_nano - span.start_time_unix_nano),
            "trace_id": span.trace_id or bytes(16),
            "span_id": span.span_id or bytes(8),
            "parent_span_id": span.parent_span_id or None,
            "status": {"code": span.status.code, "status_message": span.status.message}
            if span.HasField("status")
            else None,
        }
        self._attributes(Slot.SPAN_ATTRS, row["id"], span.attributes)
        for event in span.events:
            number = self._add(
                Slot.SPAN_EVENTS,
                row["id"],
                _same(event, "name dropped_attributes_count"),
                time_unix_nano=_signed(event.time_unix_nano),
            )
            self._attributes(Slot.SPAN_EVENT_ATTRS, number, event.attributes)
        for link in span.links:
            number = self._add(
                Slot.SPAN_LINKS,
                row["id"],
                _same(link, "trace_state dropped_attributes_count flags"),
                trace_id=link.trace_id or bytes(16),
                span_id=link.span_id or bytes(8),
            )
            self._attributes(Slot.SPAN_LINK_ATTRS, number, link.attributes)

    def _log(self, log: Message, row: Row) -> None:
        row |= _same(log, "severity_number severity_text event_name dropped_attributes_count flags")
        row |= {
            "time_unix_nano": _signed(log.time_unix_nano),
            "observed_time_unix_nano": _signed(log.observed_time_unix_nano),
            "trace_id": log.trace_id or None,
            "span_id": log.span_id or None,
            "body": _value(log.body) if log.HasField("body") else None,
        }
        self._attributes(Slot.LOG_ATTRS, row["id"], log.attributes)

    def _metric(self, metric: Message, row: Row) -> None:
        kind = metric.WhichOneof("data")
        data = getattr(metric, kind) if kind else None
        row |= _same(metric, "name description unit")
        row |= {
            "metric_type": _POINTS[kind][0] if kind else 0,
            "aggregation_temporality": getattr(data, "aggregation_temporality", 0),
            "is_monotonic": getattr(data, "is_monotonic", False),
        }
        self._attributes(Slot.METRIC_ATTRS, row["id"], metric.metadata)
        if kind and data:
            self.points[kind] += [(point, row["id"]) for point in data.data_points]

    def _point(self, kind: str, point: Message, metric: int) -> None:
        number = self._add(
            Slot[f"{kind}_DATA_POINTS"],
            metric,
            _same(point, "flags"),
            start_time_unix_nano=_signed(point.start_time_unix_nano),
            time_unix_nano=_signed(point.time_unix_nano),
            **_POINT_COLUMNS[kind](point),
        )
        self._attributes(Slot[f"{kind}_DP_ATTRS"], number, point.attributes)
        for exemplar in [] if kind == "SUMMARY" else point.exemplars:
            own = self._add(
                Slot[f"{kind}_DP_EXEMPLARS"],
                number,
                _number(exemplar),
                time_unix_nano=_signed(exemplar.time_unix_nano),
                span_id=exemplar.span_id or None,
                trace_id=exemplar.trace_id or None,
            )
            filtered = exemplar.filtered_attributes
            self._attributes(Slot[f"{kind}_DP_EXEMPLAR_ATTRS"], own, filtered)

    def _add(self, slot: Slot, parent: int, row: Row, **more: object) -> int:
        number = len(self.rows[slot])
        self.rows[slot].append({"id": number, "parent_id": parent, **row, **more})
        return number

    def _attributes(self, slot: Slot, parent: int, attributes: Iterable[KeyValue]) -> None:
        self.rows[slot] += [
            {"parent_id": parent, "key": pair.key, **_value(pair.value)} for pair in attributes
        ]


def _same(message: Message, names: str) -> Row:
    return {name: getattr(message, name) for name in names.split()}


def _signed(bits: int) -> int:
    return (bits + 2**63) % 2**64 - 2**63


def _number(message: Message) -> Row:
    return {
        "int_value": _optional(message, "as_int"),
        "double_value": _optional(message, "as_double"),
    }


def _optional(message: Message, name: str) -> Message:
    return getattr(message, name) if message.HasField(name) else None


def _buckets(point: Message, name: str) -> Row | None:
    buckets = _optional(point, name)
    if buckets is None:
        return None
    return {"offset": buckets.offset, "bucket_counts": list(buckets.bucket_counts)}


_POINT_COLUMNS: Mapping[str, Any] = {
    "NUMBER": _number,
    "SUMMARY": lambda point: {
        **_same(point, "count sum"),
        "quantile": [_same(quantile, "quantile value") for quantile in point.quantile_values],
    },
    "HISTOGRAM": lambda point: {
        "count": point.count,
        **{name: _optional(point, name) for name in ("sum", "min", "max")},
        "bucket_counts": list(point.bucket_counts),
        "explicit_bounds": list(point.explicit_bounds),
    },
    "EXP_HISTOGRAM": lambda point: {
        **_same(point, "count scale zero_count zero_threshold"),
        **{name: _optional(point, name) for name in ("sum", "min", "max")},
        **{name: _buckets(point, name) for name in ("positive", "negative")},
    },
}
_COLUMNS = ("str", "int", "double", "bool", "bytes", "ser")
_TYPES = {
    "string_value": (1, "str"),
    "int_value": (2, "int"),
    "double_value": (3, "double"),
    "bool_value": (4, "bool"),
    "kvlist_value": (5, "ser"),
    "array_value": (6, "ser"),
    "bytes_value": (7, "bytes"),
}


def _value(value: AnyValue) -> Row:
    row: Row = {"type": 0, **dict.fromkeys(_COLUMNS)}
    kind = value.WhichOneof("value")
    if kind:
        row["type"], column = _TYPES[kind]
        row[column] = _plain(value)
    return row


def _plain(value: AnyValue) -> Message:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(inner) for inner in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _plain(pair.value) for pair in value.kvlist_value.values}
    return getattr(value, kind) if kind else None
