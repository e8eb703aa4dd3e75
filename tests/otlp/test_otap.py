"""Requests to OTAP tables and back, against loops over messages."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otap_oracle import as_otap_holds, differences
from otlp_messages import requests

from quiver.bundle import Signal, Slot
from quiver.errors import InvalidRequest
from quiver.otlp.messages import request_type
from quiver.otlp.otap.convert import batch_to_otap, otap_to_batch
from quiver.otlp.otap.schema import SCHEMAS
from quiver.testing.plain_otap import LEVELS, plain_otap_rows
from quiver.testing.telemetry import Shape, Telemetry

SIGNALS = pytest.mark.parametrize("signal", list(Signal))
QUICK = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def batch_of(signal: Signal, messages: list[bytes]) -> pa.RecordBatch:
    return request_type(signal).converter.list_to_record_batch(messages)


def message_of(signal: Signal, batch: pa.RecordBatch) -> bytes:
    """The one request of a batch, as upb writes it."""
    kind = request_type(signal)
    assert batch.schema == kind.schema
    batch.validate(full=True)
    data: Any
    (data,) = kind.converter.record_batch_to_array(batch).to_pylist()
    return kind.message.FromString(data).SerializeToString(deterministic=True)


def only(batches: list[dict[Slot, pa.RecordBatch]]) -> dict[Slot, pa.RecordBatch]:
    for tables in batches:
        for batch in tables.values():
            batch.validate(full=True)
    assert len(batches) <= 1
    return batches[0] if batches else {}


def telemetry(signal: Signal, count: int = 3) -> list[bytes]:
    shape = Shape(items_per_request=60, llm_share=0.1, error_share=0.2)
    return Telemetry(seed=11, shape=shape).take(signal, count)


@SIGNALS
@QUICK
@given(data=st.data())
def test_any_requests_become_the_tables_that_loops_make(
    signal: Signal, data: st.DataObject
) -> None:
    some = requests(signal, edgy=True, canonical=data.draw(st.booleans()))
    messages = data.draw(st.lists(some, max_size=3))
    made = only(batch_to_otap(signal, batch_of(signal, messages)))
    assert not differences(made, plain_otap_rows(signal, messages))


@SIGNALS
@QUICK
@given(data=st.data())
def test_any_requests_come_back_from_the_tables(signal: Signal, data: st.DataObject) -> None:
    some = requests(signal, edgy=True, canonical=data.draw(st.booleans()))
    messages = data.draw(st.lists(some, max_size=3))
    made = only(batch_to_otap(signal, batch_of(signal, messages)))
    expected = as_otap_holds(signal, messages)
    if made:
        assert message_of(signal, otap_to_batch(signal, made)) == expected
    else:
        assert expected == b""


@SIGNALS
def test_real_telemetry_becomes_the_tables_that_loops_make(signal: Signal) -> None:
    messages = telemetry(signal)
    made = only(batch_to_otap(signal, batch_of(signal, messages)))
    assert not differences(made, plain_otap_rows(signal, messages))


@SIGNALS
def test_real_telemetry_comes_back(signal: Signal) -> None:
    messages = telemetry(signal)
    made = only(batch_to_otap(signal, batch_of(signal, messages)))
    assert message_of(signal, otap_to_batch(signal, made)) == as_otap_holds(signal, messages)


@SIGNALS
def test_a_slice_of_a_batch_has_only_its_own_requests(signal: Signal) -> None:
    messages = telemetry(signal, 4)
    made = only(batch_to_otap(signal, batch_of(signal, messages).slice(1, 2)))
    assert not differences(made, plain_otap_rows(signal, messages[1:3]))


@SIGNALS
def test_columns_have_the_types_and_marks_of_the_schema(signal: Signal) -> None:
    made = only(batch_to_otap(signal, batch_of(signal, telemetry(signal))))
    for slot, batch in made.items():
        for field in batch.schema:
            declared: Any = SCHEMAS[slot].field(field.name)
            kind: Any = field.type
            assert field.nullable == declared.nullable
            if pa.types.is_struct(kind):
                for inner in kind:
                    wanted = declared.type.field(inner.name)
                    assert (inner.type, inner.metadata) == (wanted.type, wanted.metadata)
            else:
                assert kind == declared.type
            if field.name in {"id", "parent_id"}:
                assert field.metadata == {b"encoding": b"plain"}


@SIGNALS
@pytest.mark.parametrize("limit", [7, 50])
def test_more_items_than_ids_are_split(signal: Signal, limit: int) -> None:
    messages = telemetry(signal)
    batches = batch_to_otap(signal, batch_of(signal, messages), max_items=limit)
    _, _, _, root = LEVELS[signal]
    total = len(plain_otap_rows(signal, messages)[root])
    assert [tables[root].num_rows for tables in batches] == [
        min(limit, total - start) for start in range(0, total, limit)
    ]
    parts = []
    for tables in batches:
        assert tables[root].column("id").to_pylist() == list(range(tables[root].num_rows))
        parts.append(message_of(signal, otap_to_batch(signal, tables)))
    assert _merged(signal, parts) == _merged(signal, [as_otap_holds(signal, messages)])


def _merged(signal: Signal, parts: list[bytes]) -> list[bytes]:
    """Each item with its resource and scope: the same however they are grouped."""
    outer, inner, leaf, _ = LEVELS[signal]
    made = []
    for part in parts:
        request: Any = request_type(signal).message.FromString(part)
        for resource in getattr(request, outer):
            for scope in getattr(resource, inner):
                for item in getattr(scope, leaf):
                    where = (resource.resource, resource.schema_url, scope.scope, scope.schema_url)
                    made.append(repr((*where, item)).encode())
    return made


def test_the_limit_of_16_bits_is_kept_without_being_asked() -> None:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    spans.add(trace_id=b"t" * 16, span_id=b"s" * 8, name="a")
    spans.extend(spans[:1] * 65_536)
    batches = batch_to_otap(Signal.TRACES, batch_of(Signal.TRACES, [request.SerializeToString()]))
    assert [tables[Slot.SPANS].num_rows for tables in batches] == [65_536, 1]


@pytest.mark.parametrize("limit", [0, 65_537])
def test_a_limit_that_ids_cannot_keep_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="max_items"):
        batch_to_otap(Signal.LOGS, batch_of(Signal.LOGS, []), max_items=limit)


def test_requests_without_items_make_no_batch() -> None:
    request = ExportLogsServiceRequest()
    request.resource_logs.add().scope_logs.add().scope.name = "nothing here"
    batch = batch_of(Signal.LOGS, [b"", request.SerializeToString()])
    assert batch_to_otap(Signal.LOGS, batch) == []


def test_an_id_of_a_wrong_length_is_refused_with_its_place() -> None:
    request = ExportLogsServiceRequest()
    records = request.resource_logs.add().scope_logs.add().log_records
    records.add(trace_id=b"t" * 16)
    records.add(trace_id=b"t" * 15)
    with pytest.raises(InvalidRequest, match="15 bytes") as caught:
        batch_to_otap(Signal.LOGS, batch_of(Signal.LOGS, [request.SerializeToString()]))
    assert caught.value.where == "log_records.trace_id, row 1"


def wrapped(*tags: bytes, inside: bytes) -> bytes:
    for tag in reversed(tags):
        inside = tag + bytes([len(inside)]) + inside
    return inside


# Two members of a oneof on the wire, which upb would never write.
TWO_VALUES = b"\x0a\x01a" + b"\x18\x05"
TWO_KINDS = b"\x2a\x00" + b"\x3a\x00"
TWO_NUMBERS = b"\x21" + bytes(8) + b"\x31" + bytes(8)


@pytest.mark.parametrize(
    ("signal", "request_bytes", "where"),
    [
        (
            Signal.LOGS,
            wrapped(
                *(b"\x0a", b"\x12", b"\x12", b"\x32"),
                inside=b"\x0a\x01k" + wrapped(b"\x12", inside=TWO_VALUES),
            ),
            "LOG_ATTRS, row 0",
        ),
        (
            Signal.LOGS,
            wrapped(b"\x0a", b"\x12", b"\x12", b"\x2a", inside=TWO_VALUES),
            "log_records.body, row 0",
        ),
        (
            Signal.METRICS,
            wrapped(b"\x0a", b"\x12", b"\x12", inside=TWO_KINDS),
            "metrics, row 0",
        ),
        (
            Signal.METRICS,
            wrapped(b"\x0a", b"\x12", b"\x12", b"\x2a", b"\x0a", inside=TWO_NUMBERS),
            "data_points, row 0",
        ),
    ],
)
def test_two_of_which_only_one_can_be_are_refused_with_their_place(
    signal: Signal, request_bytes: bytes, where: str
) -> None:
    with pytest.raises(InvalidRequest, match="at once") as caught:
        batch_to_otap(signal, batch_of(signal, [request_bytes]))
    assert caught.value.where == where


def test_values_deeper_than_the_limit_are_refused() -> None:
    request = ExportLogsServiceRequest()
    value = request.resource_logs.add().scope_logs.add().log_records.add().body
    for _ in range(3):
        value = value.array_value.values.add()
    batch = batch_of(Signal.LOGS, [request.SerializeToString()])
    assert batch_to_otap(Signal.LOGS, batch, max_depth=3)
    with pytest.raises(InvalidRequest, match="deeper") as caught:
        batch_to_otap(Signal.LOGS, batch, max_depth=2)
    assert caught.value.where == "log_records.body, row 0"


def test_more_keys_than_a_dictionary_holds_are_written_plainly() -> None:
    request = ExportLogsServiceRequest()
    record = request.resource_logs.add().scope_logs.add().log_records.add()
    for number in range(65_537):
        record.attributes.add(key=f"k{number}").value.int_value = number
    data = request.SerializeToString()
    (tables,) = batch_to_otap(Signal.LOGS, batch_of(Signal.LOGS, [data]))
    assert tables[Slot.LOG_ATTRS].schema.field("key").type == pa.string()
    assert message_of(Signal.LOGS, otap_to_batch(Signal.LOGS, tables)) == as_otap_holds(
        Signal.LOGS, [data]
    )


def test_lists_under_a_null_parent_do_not_count() -> None:
    batch = batch_of(Signal.LOGS, telemetry(Signal.LOGS, 1))
    lists: Any = batch.column(0)
    resources = lists.values
    resource, *others = (resources.field(place) for place in range(resources.type.num_fields))
    assert len(resource) == 2
    gone = pa.StructArray.from_arrays(
        [resource.field(place) for place in range(resource.type.num_fields)],
        fields=list(resource.type),
        mask=pa.array([True, False]),
    )
    made = pa.StructArray.from_arrays([gone, *others], fields=list(resources.type))
    column: Any = pa.ListArray.from_arrays(lists.offsets, made, type=lists.type)
    damaged = pa.RecordBatch.from_arrays([column], schema=batch.schema)
    before = only(batch_to_otap(Signal.LOGS, batch))[Slot.RESOURCE_ATTRS].to_pylist()
    after = only(batch_to_otap(Signal.LOGS, damaged))[Slot.RESOURCE_ATTRS].to_pylist()
    assert after == [row for row in before if row["parent_id"] == 1] != []
