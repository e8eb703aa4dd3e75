"""The tables of OTAP: their columns, and how they hang together.

From the OTAP specification (``docs/otap-spec.md`` of open-telemetry/otel-arrow, status draft, as of
commit 0f1da7ab), completed by the schemas of its Rust implementation (commit 10d41506) where the
text has no column for a field of OTLP. ``*`` marks those: both implementations read them or skip
them. ``!`` marks columns that are always written; any other is left out where it holds nothing.

==================  ============================================================================
table               columns
==================  ============================================================================
all roots           id! u16, resource! {id! u16, schema_url D, dropped_attributes_count u32},
                    scope! {id! u16, name D, version D, dropped_attributes_count u32},
                    schema_url D
SPANS               start_time_unix_nano! time, duration_time_unix_nano! duration,
                    trace_id! 16 bytes, span_id! 8 bytes, trace_state str,
                    parent_span_id 8 bytes, name! str, kind i32, dropped_attributes_count u32,
                    dropped_events_count u32, dropped_links_count u32,
                    status {code! i32, status_message str}, flags* u32
SPAN_EVENTS         id! u32, parent_id! u16, time_unix_nano time, name! str,
                    dropped_attributes_count u32
SPAN_LINKS          id! u32, parent_id! u16, trace_id! 16 bytes, span_id! 8 bytes,
                    trace_state str, dropped_attributes_count u32, flags* u32
LOGS                time_unix_nano! time, observed_time_unix_nano! time, trace_id 16 bytes,
                    span_id 8 bytes, severity_number i32, severity_text str, event_name str,
                    body {value}, dropped_attributes_count u32, flags u32
UNIVARIATE_METRICS  metric_type! u8, name! str, description str, unit str,
                    aggregation_temporality i32, is_monotonic bool
data points, all    id! u32, parent_id! u16, start_time_unix_nano time, time_unix_nano! time,
                    flags u32
NUMBER              int_value i64, double_value f64
SUMMARY             count u64, sum f64, quantile [{quantile f64, value f64}]
HISTOGRAM           count u64, sum f64, bucket_counts [u64], explicit_bounds [f64], min f64,
                    max f64
EXP_HISTOGRAM       count u64, sum f64, scale i32, zero_count u64, zero_threshold* f64,
                    positive {offset! i32, bucket_counts! [u64]}, negative, min f64, max f64
exemplars           id! u32, parent_id! u32, time_unix_nano! time, int_value i64,
                    double_value f64, span_id 8 bytes, trace_id 16 bytes
attributes          parent_id! u16 or u32, key! D, {value}
{value}             type! u8, str str, int i64, double f64, bool bool, bytes bytes, ser bytes
==================  ============================================================================

D is a string, written as a dictionary with u16 indices; times are nanoseconds. The text names the
buckets of exponential histograms ``positive_offset`` and so on, both implementations have a struct:
a struct is written, either is read. The same for ``body.ser`` and ``body_ser``.

``type`` of a value: 0 empty, 1 str, 2 int, 3 double, 4 bool, 5 map, 6 slice, 7 bytes (section
5.5.1; the tables of section 5.4 contradict it, the implementations do not). ``metric_type``:
0 empty, 1 gauge, 2 sum, 3 histogram, 4 exponential histogram, 5 summary.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import pyarrow as pa

from quiver.bundle import Signal, Slot

Array: TypeAlias = Any
"""A column. The stubs of pyarrow know neither its methods nor what most functions make of it."""
Kind: TypeAlias = Any
"""A data type. They do not know the fields of a struct, or the items of a list, either."""

ENCODING: Final = b"encoding"
PLAIN: Final = b"plain"
DELTA: Final = b"delta"
QUASI_DELTA: Final = b"quasidelta"

MAX_ITEMS: Final = 1 << 16
"""Ids of spans, log records, metrics, resources and scopes have 16 bits."""

TYPE_STR: Final = 1
TYPE_INT: Final = 2
TYPE_DOUBLE: Final = 3
TYPE_BOOL: Final = 4
TYPE_MAP: Final = 5
TYPE_SLICE: Final = 6
TYPE_BYTES: Final = 7

TIME: Final = pa.timestamp("ns")
DURATION: Final = pa.duration("ns")
TRACE_ID: Final = pa.binary(16)
SPAN_ID: Final = pa.binary(8)
DICTIONARY: Final = pa.dictionary(pa.uint16(), pa.string())
_ID_NAMES: Final = frozenset({"id", "parent_id"})


def column(name: str, kind: pa.DataType, *, required: bool = False) -> Kind:
    """A column; one of ids says that they are plain."""
    metadata = {ENCODING: PLAIN} if name in _ID_NAMES else None
    return pa.field(name, kind, nullable=not required, metadata=metadata)


def _columns(required: Mapping[str, pa.DataType], **others: pa.DataType) -> list[Kind]:
    return [
        *(column(name, kind, required=True) for name, kind in required.items()),
        *(column(name, kind) for name, kind in others.items()),
    ]


RESOURCE: Final = pa.struct(
    _columns({}, id=pa.uint16(), schema_url=DICTIONARY, dropped_attributes_count=pa.uint32())
)
SCOPE: Final = pa.struct(
    _columns(
        {},
        id=pa.uint16(),
        name=DICTIONARY,
        version=DICTIONARY,
        dropped_attributes_count=pa.uint32(),
    )
)
STATUS: Final = pa.struct(_columns({}, code=pa.int32(), status_message=pa.string()))
BUCKETS: Final = pa.struct(_columns({}, offset=pa.int32(), bucket_counts=pa.list_(pa.uint64())))
QUANTILE: Final = pa.struct(_columns({}, quantile=pa.float64(), value=pa.float64()))
_VALUE: Final = _columns(
    {"type": pa.uint8()},
    str=pa.string(),
    int=pa.int64(),
    double=pa.float64(),
    bool=pa.bool_(),
    bytes=pa.binary(),
    ser=pa.binary(),
)
BODY: Final = pa.struct(_VALUE)
_ORIGIN: Final = _columns({}, resource=RESOURCE, scope=SCOPE, schema_url=DICTIONARY)

_SPANS: Final = pa.schema(
    [
        column("id", pa.uint16()),
        *_ORIGIN,
        *_columns(
            {
                "start_time_unix_nano": TIME,
                "duration_time_unix_nano": DURATION,
                "trace_id": TRACE_ID,
                "span_id": SPAN_ID,
                "name": pa.string(),
            },
            trace_state=pa.string(),
            parent_span_id=SPAN_ID,
            kind=pa.int32(),
            dropped_attributes_count=pa.uint32(),
            dropped_events_count=pa.uint32(),
            dropped_links_count=pa.uint32(),
            status=STATUS,
            flags=pa.uint32(),
        ),
    ]
)
_SPAN_EVENTS: Final = pa.schema(
    _columns(
        {"parent_id": pa.uint16(), "name": pa.string()},
        id=pa.uint32(),
        time_unix_nano=TIME,
        dropped_attributes_count=pa.uint32(),
    )
)
_SPAN_LINKS: Final = pa.schema(
    _columns(
        {"parent_id": pa.uint16()},
        id=pa.uint32(),
        trace_id=TRACE_ID,
        span_id=SPAN_ID,
        trace_state=pa.string(),
        dropped_attributes_count=pa.uint32(),
        flags=pa.uint32(),
    )
)
_LOGS: Final = pa.schema(
    [
        column("id", pa.uint16()),
        *_ORIGIN,
        *_columns(
            {},
            time_unix_nano=TIME,
            observed_time_unix_nano=TIME,
            trace_id=TRACE_ID,
            span_id=SPAN_ID,
            severity_number=pa.int32(),
            severity_text=pa.string(),
            event_name=pa.string(),
            body=BODY,
            dropped_attributes_count=pa.uint32(),
            flags=pa.uint32(),
        ),
    ]
)
_METRICS: Final = pa.schema(
    [
        column("id", pa.uint16(), required=True),
        *_ORIGIN,
        *_columns(
            {"metric_type": pa.uint8(), "name": pa.string()},
            description=pa.string(),
            unit=pa.string(),
            aggregation_temporality=pa.int32(),
            is_monotonic=pa.bool_(),
        ),
    ]
)


def _points(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(
        _columns(
            {"parent_id": pa.uint16()},
            id=pa.uint32(),
            start_time_unix_nano=TIME,
            time_unix_nano=TIME,
            flags=pa.uint32(),
            **columns,
        )
    )


_NUMBERS: Final = _points(int_value=pa.int64(), double_value=pa.float64())
_SUMMARIES: Final = _points(count=pa.uint64(), sum=pa.float64(), quantile=pa.list_(QUANTILE))
_HISTOGRAMS: Final = _points(
    count=pa.uint64(),
    sum=pa.float64(),
    bucket_counts=pa.list_(pa.uint64()),
    explicit_bounds=pa.list_(pa.float64()),
    min=pa.float64(),
    max=pa.float64(),
)
_EXP_HISTOGRAMS: Final = _points(
    count=pa.uint64(),
    sum=pa.float64(),
    scale=pa.int32(),
    zero_count=pa.uint64(),
    zero_threshold=pa.float64(),
    positive=BUCKETS,
    negative=BUCKETS,
    min=pa.float64(),
    max=pa.float64(),
)
_EXEMPLARS: Final = pa.schema(
    _columns(
        {"parent_id": pa.uint32()},
        id=pa.uint32(),
        time_unix_nano=TIME,
        int_value=pa.int64(),
        double_value=pa.float64(),
        span_id=SPAN_ID,
        trace_id=TRACE_ID,
    )
)


def _attributes(parent_id: pa.DataType) -> pa.Schema:
    return pa.schema([*_columns({"parent_id": parent_id, "key": DICTIONARY}), *_VALUE])


_ATTRS_16: Final = _attributes(pa.uint16())
_ATTRS_32: Final = _attributes(pa.uint32())

SCHEMAS: Final[Mapping[Slot, pa.Schema]] = MappingProxyType(
    {
        Slot.RESOURCE_ATTRS: _ATTRS_16,
        Slot.SCOPE_ATTRS: _ATTRS_16,
        Slot.SPANS: _SPANS,
        Slot.SPAN_ATTRS: _ATTRS_16,
        Slot.SPAN_EVENTS: _SPAN_EVENTS,
        Slot.SPAN_LINKS: _SPAN_LINKS,
        Slot.SPAN_EVENT_ATTRS: _ATTRS_32,
        Slot.SPAN_LINK_ATTRS: _ATTRS_32,
        Slot.LOGS: _LOGS,
        Slot.LOG_ATTRS: _ATTRS_16,
        Slot.UNIVARIATE_METRICS: _METRICS,
        Slot.METRIC_ATTRS: _ATTRS_16,
        Slot.NUMBER_DATA_POINTS: _NUMBERS,
        Slot.SUMMARY_DATA_POINTS: _SUMMARIES,
        Slot.HISTOGRAM_DATA_POINTS: _HISTOGRAMS,
        Slot.EXP_HISTOGRAM_DATA_POINTS: _EXP_HISTOGRAMS,
        Slot.NUMBER_DP_ATTRS: _ATTRS_32,
        Slot.SUMMARY_DP_ATTRS: _ATTRS_32,
        Slot.HISTOGRAM_DP_ATTRS: _ATTRS_32,
        Slot.EXP_HISTOGRAM_DP_ATTRS: _ATTRS_32,
        Slot.NUMBER_DP_EXEMPLARS: _EXEMPLARS,
        Slot.HISTOGRAM_DP_EXEMPLARS: _EXEMPLARS,
        Slot.EXP_HISTOGRAM_DP_EXEMPLARS: _EXEMPLARS,
        Slot.NUMBER_DP_EXEMPLAR_ATTRS: _ATTRS_32,
        Slot.HISTOGRAM_DP_EXEMPLAR_ATTRS: _ATTRS_32,
        Slot.EXP_HISTOGRAM_DP_EXEMPLAR_ATTRS: _ATTRS_32,
    }
)
"""Every column of every table, in the types that are written."""

ROOTS: Final[Mapping[Signal, Slot]] = MappingProxyType(
    {
        Signal.TRACES: Slot.SPANS,
        Signal.LOGS: Slot.LOGS,
        Signal.METRICS: Slot.UNIVARIATE_METRICS,
    }
)
_SHARED: Final = frozenset({Slot.RESOURCE_ATTRS, Slot.SCOPE_ATTRS})
_TRACES: Final = frozenset(slot for slot in SCHEMAS if slot.name.startswith("SPAN"))
_LOG_SLOTS: Final = frozenset({Slot.LOGS, Slot.LOG_ATTRS})
SLOTS: Final[Mapping[Signal, frozenset[Slot]]] = MappingProxyType(
    {
        Signal.TRACES: _SHARED | _TRACES,
        Signal.LOGS: _SHARED | _LOG_SLOTS,
        Signal.METRICS: frozenset(SCHEMAS) - _TRACES - _LOG_SLOTS,
    }
)
"""The tables that a signal may have."""

EQUALITY: Final[Mapping[Slot, tuple[str, ...]]] = MappingProxyType(
    {
        Slot.SPAN_EVENTS: ("name",),
        Slot.SPAN_LINKS: ("trace_id",),
        Slot.NUMBER_DP_EXEMPLARS: ("int_value", "double_value"),
        Slot.HISTOGRAM_DP_EXEMPLARS: ("int_value", "double_value"),
        Slot.EXP_HISTOGRAM_DP_EXEMPLARS: ("int_value", "double_value"),
    }
)
"""What makes a row like the one before, where ``parent_id`` is quasi-delta. Attributes differ."""
