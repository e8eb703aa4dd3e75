"""What users call: bytes to tables and back, request by request."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from otlp_messages import messages
from otlp_wire import with_ids

from quiver.bundle import Signal
from quiver.config import AttributeType, OtlpConfig, PromotedAttribute
from quiver.otlp import convert
from quiver.otlp.convert import decode, encode, from_otap, to_otap
from quiver.otlp.flat import Source, to_flat
from quiver.otlp.plain import TooOdd, plain_batch
from quiver.otlp.schema import lake_schema
from quiver.otlp.wire import read_requests
from quiver.testing import Shape, Telemetry

PROMOTED = (
    PromotedAttribute(key="http.request.method", column="method"),
    PromotedAttribute(key="http.response.status_code", column="status", type=AttributeType.INT),
)


def made(signal: Signal, count: int, items: int, seed: int = 1) -> list[bytes]:
    return Telemetry(seed, Shape(items_per_request=items)).take(signal, count)


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("items", [1, 2, 10, 12, 40])
def test_few_rows_and_many_are_made_alike(
    signal: Signal, items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = made(signal, 3, items)
    config = OtlpConfig(promoted=PROMOTED)
    sources = [Source("store", 7, number, 0) for number in range(3)]
    plain, numbers = plain_batch(signal, requests, config, sources)
    monkeypatch.setattr(convert, "TINY", dict.fromkeys(Signal, -1))
    careful = decode(signal, requests, config, sources)
    assert plain.schema == careful.table.schema == lake_schema(signal, PROMOTED)
    assert plain.equals(careful.table)
    assert numbers.equals(careful.requests)


@pytest.mark.parametrize("signal", Signal)
@settings(max_examples=60)
@given(data=st.data())
def test_what_the_plain_way_takes_it_takes_as_the_careful_one_does(
    signal: Signal, data: st.DataObject
) -> None:
    drawn = [with_ids(data.draw(messages(signal))) for _ in range(2)]
    requests = [message.SerializeToString(deterministic=True) for message in drawn]
    try:
        plain, numbers = plain_batch(signal, requests)
    except TooOdd:
        return
    read = read_requests(signal, requests)
    assert not read.failures
    table, of_rows = to_flat(signal, read.batch, read.requests)
    assert plain.to_pylist() == table.to_pylist() or plain.equals(table)
    assert numbers.to_pylist() == of_rows.to_pylist()


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("items", [3, 60])
def test_bytes_come_back_as_they_were(signal: Signal, items: int) -> None:
    requests = made(signal, 4, items)
    decoded = decode(signal, requests)
    assert not decoded.failures
    assert encode(signal, decoded.table, decoded.requests) == requests


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("items", [2, 200])
def test_a_bad_request_fails_alone(signal: Signal, items: int) -> None:
    good = made(signal, 3, items)
    requests = [good[0], b"\xff\xff\xff", good[1], good[2][:-3]]
    sources = [Source("store", 0, 0, number) for number in range(4)]
    decoded = decode(signal, requests, sources=sources)
    assert [failure.request for failure in decoded.failures] == [1, 3]
    assert all(failure.reason for failure in decoded.failures)
    assert set(decoded.requests.to_pylist()) == {0, 2}
    rows = decoded.table.column("source_row")
    assert rows.to_pylist() == decoded.requests.to_pylist()
    assert encode(signal, decoded.table, decoded.requests) == [good[0], good[1]]


def test_a_small_request_with_a_wrong_id_is_reported_with_its_place() -> None:
    (message,) = [next(Telemetry(1, Shape(items_per_request=2)).request_messages(Signal.TRACES))]
    message.resource_spans[0].scope_spans[0].spans[0].trace_id = b"short"  # type: ignore[attr-defined]
    decoded = decode(Signal.TRACES, [message.SerializeToString()])
    assert decoded.table.num_rows == 0
    (failure,) = decoded.failures
    assert failure.where == "resource_spans[0].scope_spans[0].spans[0].trace_id"


def test_limits_hold_for_small_requests_too() -> None:
    requests = made(Signal.TRACES, 1, 2)
    assert decode(Signal.TRACES, requests, OtlpConfig(max_attributes=2)).failures
    assert decode(Signal.TRACES, requests, OtlpConfig(max_request_bytes=10)).failures
    assert decode(Signal.TRACES, requests, OtlpConfig(max_items=1)).failures


@pytest.mark.parametrize("signal", Signal)
def test_otap_and_back_means_the_same(signal: Signal) -> None:
    requests = made(signal, 2, 50)
    converted = to_otap(signal, requests)
    assert not converted.failures
    (tables,) = converted.batches
    back = decode(signal, [from_otap(signal, tables)]).table
    there = decode(signal, requests).table
    assert back.num_rows == there.num_rows
    ids = ["name", "attributes"] if signal is not Signal.LOGS else ["body", "attributes"]
    key = str if signal is Signal.METRICS else repr
    for name in ids:
        assert sorted(map(key, back.column(name).to_pylist())) == sorted(
            map(key, there.column(name).to_pylist())
        )


@pytest.mark.parametrize("signal", Signal)
def test_nothing_makes_an_empty_table(signal: Signal) -> None:
    for requests in ([], [b""]):
        decoded = decode(signal, requests)
        assert (decoded.table.num_rows, decoded.failures) == (0, [])
        assert decoded.table.schema == lake_schema(signal)
        assert isinstance(decoded.requests, pa.Int32Array)


def test_a_value_that_is_too_deep_is_refused_however_small() -> None:
    message = ExportLogsServiceRequest()
    record = message.resource_logs.add().scope_logs.add().log_records.add()
    value = record.body
    for _ in range(5):
        value = value.array_value.values.add()
    value.string_value = "x" * 100
    request = [message.SerializeToString()]
    assert not decode(Signal.LOGS, request, OtlpConfig(max_depth=5)).failures
    assert decode(Signal.LOGS, request, OtlpConfig(max_depth=4)).failures
