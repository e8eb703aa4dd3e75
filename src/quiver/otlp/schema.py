"""The tables of the lake: one row for each span, log record and data point.

The types are those that every engine has: no unsigned integers, no dictionaries, no nanosecond
timestamps. What OTLP counts in ``uint32`` or ``uint64`` is ``int64`` here.

======================  ======================================================================
what                    how
======================  ======================================================================
ids                     lower-case hex, null when empty
``*_unix_nano``         ``int64``, exact; beside it a timestamp in microseconds, rounded down
an attribute's value    a struct with one member for each OTLP type; the one that is set is the
                        type, none is the empty value, a null struct a key without a value;
                        lists and maps are the protobuf bytes of ArrayValue and KeyValueList
attributes              a map from key to value; keys that come twice are in it twice
enums                   ``int32``, the numbers of OTLP
======================  ======================================================================

Every table has its own columns first, then those of its resource and scope, then the promoted
attributes, then where the row comes from:

======================  ======================================================================
column                  what
======================  ======================================================================
``source_store``        the store that keeps the request; null when it is not known, as the
                        next three
``source_segment``      the segment in that store
``source_bundle``       the bundle in that segment
``source_row``          the request in that bundle
``source_resource``     which resource of the request
``source_scope``        which scope of the resource
``source_metric``       which metric of the scope (metrics only)
``source_item``         which span or record of the scope, which point of the metric
======================  ======================================================================

A resource, scope or metric without items has no row: a flat table does not keep it. All columns
are listed in ``docs/lake-schema.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import pyarrow as pa

from quiver.bundle import Signal
from quiver.config import AttributeType, PromotedAttribute
from quiver.errors import InvalidConfig

_Types: TypeAlias = Mapping[str, Any]
"""The types of columns: mixed ones, for which the stubs of pyarrow have no common name."""

INT: Final = pa.int64()
CODE: Final = pa.int32()
TEXT: Final = pa.string()
BYTES: Final = pa.binary()
DOUBLE: Final = pa.float64()
BOOL: Final = pa.bool_()
TIME: Final = pa.timestamp("us", tz="UTC")


def _struct(members: _Types) -> pa.StructType:
    return pa.struct(list(members.items()))


VALUE: Final = _struct(
    {
        "string_value": TEXT,
        "bool_value": BOOL,
        "int_value": INT,
        "double_value": DOUBLE,
        "array_value": BYTES,
        "kvlist_value": BYTES,
        "bytes_value": BYTES,
    }
)
ATTRIBUTES: Final = pa.map_(TEXT, VALUE)
EVENT: Final = _struct(
    {
        "time_unix_nano": INT,
        "name": TEXT,
        "attributes": ATTRIBUTES,
        "dropped_attributes_count": INT,
    }
)
LINK: Final = _struct(
    {
        "trace_id": TEXT,
        "span_id": TEXT,
        "trace_state": TEXT,
        "attributes": ATTRIBUTES,
        "dropped_attributes_count": INT,
        "flags": INT,
    }
)
QUANTILE: Final = _struct({"quantile": DOUBLE, "value": DOUBLE})
EXEMPLAR: Final = _struct(
    {
        "time_unix_nano": INT,
        "int_value": INT,
        "double_value": DOUBLE,
        "trace_id": TEXT,
        "span_id": TEXT,
        "filtered_attributes": ATTRIBUTES,
    }
)
COUNTS: Final = pa.list_(INT)

_SPAN: Final[_Types] = {
    "trace_id": TEXT,
    "span_id": TEXT,
    "parent_span_id": TEXT,
    "trace_state": TEXT,
    "flags": INT,
    "name": TEXT,
    "kind": CODE,
    "start_time_unix_nano": INT,
    "end_time_unix_nano": INT,
    "start_time": TIME,
    "end_time": TIME,
    "duration_ns": INT,
    "status_code": CODE,
    "status_message": TEXT,
    "service_name": TEXT,
    "attributes": ATTRIBUTES,
    "dropped_attributes_count": INT,
    "events": pa.list_(EVENT),
    "dropped_events_count": INT,
    "links": pa.list_(LINK),
    "dropped_links_count": INT,
}
_RECORD: Final[_Types] = {
    "time_unix_nano": INT,
    "observed_time_unix_nano": INT,
    "time": TIME,
    "severity_number": CODE,
    "severity_text": TEXT,
    "event_name": TEXT,
    "body": VALUE,
    "trace_id": TEXT,
    "span_id": TEXT,
    "flags": INT,
    "service_name": TEXT,
    "attributes": ATTRIBUTES,
    "dropped_attributes_count": INT,
}
POINT: Final[_Types] = {
    "name": TEXT,
    "description": TEXT,
    "unit": TEXT,
    "type": TEXT,
    "aggregation_temporality": CODE,
    "is_monotonic": BOOL,
    "metadata": ATTRIBUTES,
    "service_name": TEXT,
    "attributes": ATTRIBUTES,
    "start_time_unix_nano": INT,
    "time_unix_nano": INT,
    "start_time": TIME,
    "time": TIME,
    "flags": INT,
    "int_value": INT,
    "double_value": DOUBLE,
    "count": INT,
    "sum": DOUBLE,
    "min": DOUBLE,
    "max": DOUBLE,
    "bucket_counts": COUNTS,
    "explicit_bounds": pa.list_(DOUBLE),
    "scale": CODE,
    "zero_count": INT,
    "zero_threshold": DOUBLE,
    "positive_offset": CODE,
    "positive_bucket_counts": COUNTS,
    "negative_offset": CODE,
    "negative_bucket_counts": COUNTS,
    "quantile_values": pa.list_(QUANTILE),
    "exemplars": pa.list_(EXEMPLAR),
}
_CONTEXT: Final[_Types] = {
    "resource_attributes": ATTRIBUTES,
    "resource_dropped_attributes_count": INT,
    "resource_entity_refs": pa.list_(BYTES),
    "resource_schema_url": TEXT,
    "scope_name": TEXT,
    "scope_version": TEXT,
    "scope_attributes": ATTRIBUTES,
    "scope_dropped_attributes_count": INT,
    "scope_schema_url": TEXT,
}
REQUEST_SOURCE: Final[_Types] = {
    "source_store": TEXT,
    "source_segment": INT,
    "source_bundle": CODE,
    "source_row": CODE,
}
_OWN: Final[Mapping[Signal, _Types]] = MappingProxyType(
    {Signal.TRACES: _SPAN, Signal.LOGS: _RECORD, Signal.METRICS: POINT}
)
_POSITIONS: Final[Mapping[Signal, tuple[str, ...]]] = MappingProxyType(
    {
        Signal.TRACES: ("source_resource", "source_scope", "source_item"),
        Signal.LOGS: ("source_resource", "source_scope", "source_item"),
        Signal.METRICS: ("source_resource", "source_scope", "source_metric", "source_item"),
    }
)
PROMOTED_TYPES: Final[Mapping[AttributeType, pa.DataType]] = MappingProxyType(
    {
        AttributeType.STRING: TEXT,
        AttributeType.INT: INT,
        AttributeType.DOUBLE: DOUBLE,
        AttributeType.BOOL: BOOL,
        AttributeType.BYTES: BYTES,
    }
)


def lake_schema(signal: Signal, promoted: Sequence[PromotedAttribute] = ()) -> pa.Schema:
    """The columns of a signal's table, with one more for each promoted attribute.

    Raises:
        InvalidConfig: A promoted column has the name of another one. Upper and lower case are the
            same name: most engines do not tell them apart.
    """
    return _lake_schema(signal, tuple(promoted))


@cache
def _lake_schema(signal: Signal, promoted: tuple[PromotedAttribute, ...]) -> pa.Schema:
    front: dict[str, Any] = {**_OWN[signal], **_CONTEXT}
    back: dict[str, Any] = {**REQUEST_SOURCE, **dict.fromkeys(_POSITIONS[signal], CODE)}
    taken = {*front, *back}
    extra: dict[str, Any] = {}
    for attribute in promoted:
        name = attribute.column.lower()
        if not name or name in taken:
            raise InvalidConfig(
                f"otlp.promoted: the table of {signal.value} cannot have a column "
                f"{attribute.column!r} for {attribute.key!r}: choose a name that it has not yet"
            )
        taken.add(name)
        extra[attribute.column] = PROMOTED_TYPES[attribute.type]
    return pa.schema({**front, **extra, **back})
