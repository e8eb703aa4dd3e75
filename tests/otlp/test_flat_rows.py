"""Rows that did not come from a request: where groups start, what is sent, what is refused."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pytest

from quiver.bundle import Signal
from quiver.config import AttributeType
from quiver.errors import InvalidRequest
from quiver.otlp import columns
from quiver.otlp.flat import from_flat, lake_schema
from quiver.otlp.messages import REQUEST_TYPES, request_type
from quiver.otlp.plain import plain_rows
from quiver.otlp.schema import ATTRIBUTES, VALUE

Loose: TypeAlias = Any  # messages and their values, made at run time


def encoded(signal: Signal, batch: pa.RecordBatch) -> list[bytes]:
    array = request_type(signal).converter.record_batch_to_array(batch)
    return [one.as_py() for one in array]


def small(column: str, value: Loose, signal: Signal = Signal.TRACES) -> pa.Table:
    return pa.table({column: pa.array([value], lake_schema(signal).field(column).type)})


def rows_of(signal: Signal, **cells: list[Loose]) -> pa.Table:
    schema = lake_schema(signal)
    return pa.table({n: pa.array(v, schema.field(n).type) for n, v in cells.items()})


@pytest.mark.parametrize(
    ("changed", "resources"),
    [
        ({"source_segment": [1, 1]}, 1),
        ({"source_segment": [None, 0]}, 2),
        ({"source_segment": [1, 2]}, 2),
        ({"source_store": ["a", "b"]}, 2),
        ({"source_row": [1, 2]}, 2),
        ({"source_resource": [0, 1]}, 2),
        ({"source_resource": [None, None]}, 2),
        ({"source_scope": [None, None]}, 1),
        ({"source_item": [1, 0]}, 1),
        ({"source_store": [None, None], "source_item": [0, 1]}, 1),
        ({"source_store": [None, None], "source_item": [1, 0]}, 2),
    ],
)
def test_rows_of_one_place_share_a_resource(
    changed: dict[str, list[Loose]], resources: int
) -> None:
    place: dict[str, list[Loose]] = {
        "source_store": ["a", "a"],
        "source_resource": [0, 0],
        "source_scope": [0, 0],
        "source_item": [0, 1],
    }
    table = rows_of(Signal.TRACES, **{**place, **changed})
    (request,) = encoded(Signal.TRACES, from_flat(Signal.TRACES, table))
    message: Loose = REQUEST_TYPES[Signal.TRACES].FromString(request)
    assert len(message.resource_spans) == resources


def test_rows_of_two_types_are_two_metrics() -> None:
    place: dict[str, list[Loose]] = {
        f"source_{level}": [0, 0] for level in ("resource", "scope", "metric")
    }
    place |= {"source_store": ["a", "a"], "source_item": [0, 1]}
    table = rows_of(Signal.METRICS, type=["sum", "gauge"], int_value=[1, 2], **place)
    (request,) = encoded(Signal.METRICS, from_flat(Signal.METRICS, table))
    found = [(row["type"], row["int_value"]) for _, row in plain_rows(Signal.METRICS, [request])]
    assert found == [("sum", 1), ("gauge", 2)]


@pytest.mark.parametrize(
    ("column", "value", "present"),
    [
        ("status_code", 2, "status_message"),
        ("resource_dropped_attributes_count", 3, "resource_attributes"),
        ("resource_entity_refs", [b""], "resource_attributes"),
        ("scope_dropped_attributes_count", 3, "scope_attributes"),
        ("scope_name", "x", "scope_attributes"),
        ("scope_version", "x", "scope_attributes"),
    ],
)
def test_what_holds_something_is_sent(column: str, value: Loose, present: str) -> None:
    (request,) = encoded(Signal.TRACES, from_flat(Signal.TRACES, small(column, value)))
    ((_, row),) = plain_rows(Signal.TRACES, [request])
    assert row[column] == value
    assert row[present] is not None


def test_what_lies_under_a_null_is_not_seen() -> None:
    pairs = pa.array([[("k", {"string_value": "a"})], [("k", {"string_value": "b"})]], ATTRIBUTES)
    valid = np.array([True, False])
    hidden = columns.of_lists(ATTRIBUTES, *columns.lists(pairs), valid)
    expected = [pairs[0].as_py(), None, pairs[0].as_py()]
    assert columns.take_map(hidden, np.array([0, 1, 0])).to_pylist() == expected
    assert (
        columns.take_map(hidden, np.array([0, 1, 0])).values.to_pylist()
        == [{"key": "k", "value": expected[0][0][1]}] * 2
    )
    entries = columns.lists(pairs).values
    value = entries.field(1)
    members = [value.field(at) for at in range(value.type.num_fields)]
    nothing = columns.of_structs(VALUE, 2, members, valid)
    half = columns.of_structs(entries.type, 2, [entries.field(0), nothing])
    attributes = columns.of_lists(ATTRIBUTES, np.array([0, 1, 2]), half)
    promoted = columns.promote(attributes, pa.scalar("k"), AttributeType.STRING)
    assert promoted.to_pylist() == ["a", None]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("trace_id", "abc", "odd number of hex digits"),
        ("trace_id", "zz", "not hexadecimal"),
        ("span_id", "é", "not hexadecimal"),
        ("flags", -1, "not between 0 and"),
        ("flags", 2**32, "not between 0 and"),
        ("start_time_unix_nano", -1, "below 0"),
    ],
)
def test_what_otlp_has_no_place_for_is_refused(column: str, value: Loose, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        from_flat(Signal.TRACES, small(column, value))
    assert refused.value.where == f"column {column}"
