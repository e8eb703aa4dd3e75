"""OTAP tables made with loops over upb messages, and what OTAP makes of a request.

``tables_of`` is what ``batch_to_otap`` must make: rows as dictionaries, one after the other.
``as_otap_holds`` is what must come back: the request without what OTAP has no place for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import cbor2
import pyarrow as pa
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from quiver.bundle import Signal, Slot
from quiver.otlp.messages import REQUEST_TYPES

Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = dict[Slot, list[Row]]
LEVELS = {
    Signal.TRACES: ("resource_spans", "scope_spans", "spans", Slot.SPANS),
    Signal.LOGS: ("resource_logs", "scope_logs", "log_records", Slot.LOGS),
    Signal.METRICS: ("resource_metrics", "scope_metrics", "metrics", Slot.UNIVARIATE_METRICS),
}
_POINTS = {
    "gauge": (1, "NUMBER"),
    "sum": (2, "NUMBER"),
    "histogram": (3, "HISTOGRAM"),
    "exponential_histogram": (4, "EXP_HISTOGRAM"),
    "summary": (5, "SUMMARY"),
}


def tables_of(signal: Signal, requests: Iterable[bytes]) -> Rows:
    """The rows of one OTAP batch."""
    return _Loops().run(signal, [REQUEST_TYPES[signal].FromString(data) for data in requests])


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """The rows of a table, comparable: times as numbers, CBOR decoded, floats by their bits."""
    columns = {}
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        whole: Any = values
        if pa.types.is_timestamp(whole.type) or pa.types.is_duration(whole.type):
            whole = whole.view(pa.int64())
        columns[name] = whole.to_pylist()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [_exact(_without_cbor(row)) for row in rows]


def _without_cbor(row: Row) -> Row:
    made: Row = {
        key: _without_cbor(value) if isinstance(value, dict) else value
        for key, value in row.items()
    }
    if made.get("ser") is not None:
        made["ser"] = cbor2.loads(made["ser"])
    return made


def _exact(value: Any) -> Any:  # noqa: ANN401 - anything that a row can hold
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner) for inner in value]
    return value


def differences(made: Mapping[Slot, pa.RecordBatch], expected: Rows) -> list[str]:
    """What differs. A column that is left out must hold nothing but defaults."""
    wanted = {slot: rows for slot, rows in expected.items() if rows}
    if set(made) != set(wanted):
        return [f"tables {sorted(made)}, not {sorted(wanted)}"]
    found = []
    for slot, batch in made.items():
        rows = rows_of(batch)
        if len(rows) != len(wanted[slot]):
            found.append(f"{slot.name}: {len(rows)} rows, not {len(wanted[slot])}")
        for number, (row, want) in enumerate(zip(rows, wanted[slot], strict=False)):
            found += [
                f"{slot.name}[{number}].{what}" for what in _row_differences(row, _exact(want))
            ]
    return found


def _row_differences(row: Row | None, want: Row | None) -> list[str]:
    if row is None or want is None:
        return [] if row is want else [f": {row} not {want}"]
    found = [f"{name}: not expected" for name in row if name not in want]
    for name, value in want.items():
        if name not in row:
            if not _is_default(value):
                found.append(f"{name}: left out, {value!r}")
        elif isinstance(value, dict) and name != "ser" and isinstance(row[name], dict):
            found += [f"{name}.{inner}" for inner in _row_differences(row[name], value)]
        elif row[name] != value:
            found.append(f"{name}: {row[name]!r} not {value!r}")
    return found


def _is_default(value: Any) -> bool:  # noqa: ANN401 - anything that a row can hold
    return value is None or value in (0, "", [], False, bytes(8)) or value == _exact(0.0)


class _Loops:
    def __init__(self) -> None:
        self.rows: Rows = {slot: [] for slot in Slot}
        self.points: dict[str, list[tuple[Any, int]]] = {kind: [] for kind in _POINTS}

    def run(self, signal: Signal, requests: list[Any]) -> Rows:
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

    def _origin(self, resource: Any, resource_id: int, scope: Any, scope_id: int) -> Row:  # noqa: ANN401
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

    def _item(self, signal: Signal, item: Any, row: Row) -> None:  # noqa: ANN401
        if signal is Signal.TRACES:
            self._span(item, row)
        elif signal is Signal.LOGS:
            self._log(item, row)
        else:
            self._metric(item, row)

    def _span(self, span: Any, row: Row) -> None:  # noqa: ANN401
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

    def _log(self, log: Any, row: Row) -> None:  # noqa: ANN401
        row |= _same(log, "severity_number severity_text event_name dropped_attributes_count flags")
        row |= {
            "time_unix_nano": _signed(log.time_unix_nano),
            "observed_time_unix_nano": _signed(log.observed_time_unix_nano),
            "trace_id": log.trace_id or None,
            "span_id": log.span_id or None,
            "body": _value(log.body) if log.HasField("body") else None,
        }
        self._attributes(Slot.LOG_ATTRS, row["id"], log.attributes)

    def _metric(self, metric: Any, row: Row) -> None:  # noqa: ANN401
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

    def _point(self, kind: str, point: Any, metric: int) -> None:  # noqa: ANN401
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

    def _add(self, slot: Slot, parent: int, row: Row, **more: Any) -> int:  # noqa: ANN401
        number = len(self.rows[slot])
        self.rows[slot].append({"id": number, "parent_id": parent, **row, **more})
        return number

    def _attributes(self, slot: Slot, parent: int, attributes: Iterable[KeyValue]) -> None:
        self.rows[slot] += [
            {"parent_id": parent, "key": pair.key, **_value(pair.value)} for pair in attributes
        ]


def _same(message: Any, names: str) -> Row:  # noqa: ANN401
    return {name: getattr(message, name) for name in names.split()}


def _signed(bits: int) -> int:
    return (bits + 2**63) % 2**64 - 2**63


def _number(message: Any) -> Row:  # noqa: ANN401
    return {
        "int_value": _optional(message, "as_int"),
        "double_value": _optional(message, "as_double"),
    }


def _optional(message: Any, name: str) -> Any:  # noqa: ANN401
    return getattr(message, name) if message.HasField(name) else None


def _buckets(point: Any, name: str) -> Row | None:  # noqa: ANN401
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


def _plain(value: AnyValue) -> Any:  # noqa: ANN401
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(inner) for inner in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _plain(pair.value) for pair in value.kvlist_value.values}
    return getattr(value, kind) if kind else None


def as_otap_holds(signal: Signal, requests: Iterable[bytes]) -> bytes:
    """One request with everything of these that OTAP can hold, as bytes."""
    outer, inner, leaf, _ = LEVELS[signal]
    made: Any = REQUEST_TYPES[signal]()
    for data in requests:
        made.MergeFromString(data)
    made.DiscardUnknownFields()
    resources = getattr(made, outer)
    for resource in resources:
        scopes = getattr(resource, inner)
        kept = [scope for scope in scopes if getattr(scope, leaf)]
        del scopes[:]
        scopes.extend(kept)
        resource.resource.SetInParent()
        del resource.resource.entity_refs[:]
        for scope in scopes:
            scope.scope.SetInParent()
            for span in getattr(scope, "spans", []):
                for owner in (span, *span.links):
                    owner.trace_id = owner.trace_id or bytes(16)
                    owner.span_id = owner.span_id or bytes(8)
    kept = [resource for resource in resources if getattr(resource, inner)]
    del resources[:]
    resources.extend(kept)
    _settle_values(made)
    return bytes(made.SerializeToString(deterministic=True))


def _settle_values(message: Any) -> None:  # noqa: ANN401
    """Every key has a value, and each key of a map is there once."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        inner = value if field.is_repeated else [value]
        if field.message_type.name == "KeyValueList":
            pairs = {pair.key: pair for pair in value.values}
            kept = list(pairs.values())
            del value.values[:]
            value.values.extend(kept)
        for one in inner:
            if isinstance(one, KeyValue):
                one.value.SetInParent()
            _settle_values(one)
