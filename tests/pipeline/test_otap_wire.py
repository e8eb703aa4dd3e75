"""The messages of OTAP over gRPC, against bytes that are put together by hand."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.bundle import Signal, Slot
from quiver.errors import InvalidRequest
from quiver.pipeline.otap_wire import (
    MAX_PAYLOADS,
    METHODS,
    SERVICES,
    ArrowPayload,
    BatchArrowRecords,
    BatchCode,
    BatchStatus,
    describe,
    read_records,
    read_status,
    write_records,
    write_status,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(max_size=20)


def varint(value: int) -> bytes:
    value %= 2**64
    made = b""
    while value > 127:
        made += bytes([value % 128 + 128])
        value //= 128
    return made + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(8 * field) + varint(value)


def content(field: int, value: bytes) -> bytes:
    return varint(8 * field + 2) + varint(len(value)) + value


def payload(schema_id: str, kind: int, record: bytes) -> bytes:
    return content(1, schema_id.encode()) + number(2, kind) + content(3, record)


def test_records_are_read() -> None:
    data = (
        number(1, 300)
        + content(2, payload("spans:1", 40, b"\xff\xff\xff\xff"))
        + content(3, b"hpack")
        + content(2, payload("", 41, b""))
        + content(99, b"something newer")
        + content(2, payload("later", 77, b"x") + number(12, 5))
    )
    assert read_records(data) == BatchArrowRecords(
        300,
        [
            ArrowPayload("spans:1", Slot.SPANS, b"\xff\xff\xff\xff"),
            ArrowPayload("", Slot.SPAN_ATTRS, b""),
            ArrowPayload("later", 77, b"x"),
        ],
    )
    assert read_records(b"") == BatchArrowRecords(0, [])
    assert read_records(number(1, -5)).batch_id == -5


def test_records_are_written() -> None:
    made = write_records(
        BatchArrowRecords(7, [ArrowPayload("a", Slot.LOGS, b"xyz"), ArrowPayload("b", 2, b"")])
    )
    second = content(1, b"b") + number(2, 2)
    assert made == number(1, 7) + content(2, payload("a", 30, b"xyz")) + content(2, second)


def test_statuses() -> None:
    data = number(1, 9) + number(2, 14) + content(3, b"try again later")
    status = BatchStatus(9, BatchCode.UNAVAILABLE, "try again later")
    assert read_status(data) == status
    assert write_status(status) == data
    assert read_status(b"") == BatchStatus(0, BatchCode.OK, "")
    assert write_status(BatchStatus(0)) == b""
    assert read_status(number(2, 99)).code == 99


@settings(max_examples=100)
@given(batch_id=INT64, payloads=st.lists(st.tuples(TEXT, INT32, st.binary(max_size=50))))
def test_records_come_back(batch_id: int, payloads: list[tuple[str, int, bytes]]) -> None:
    batch = BatchArrowRecords(batch_id, [ArrowPayload(*each) for each in payloads])
    assert read_records(write_records(batch)) == batch


@settings(max_examples=100)
@given(batch_id=INT64, code=INT32, message=TEXT)
def test_statuses_come_back(batch_id: int, code: int, message: str) -> None:
    status = BatchStatus(batch_id, code, message)
    assert read_status(write_status(status)) == status


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        content(2, b"\x0a\x05ab"),
        content(2, content(1, b"\xff\xfe")),
        number(1, 1) + b"\x12\x80",
        b"\x07",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="BatchArrowRecords"):
        read_records(data)


def test_what_is_no_status_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="BatchStatus"):
        read_status(b"\x1a\x05ab")


def test_there_are_only_so_many_payloads() -> None:
    one = content(2, payload("a", 40, b""))
    assert len(read_records(one * MAX_PAYLOADS).payloads) == MAX_PAYLOADS
    with pytest.raises(InvalidRequest, match="65 payloads"):
        read_records(one * (MAX_PAYLOADS + 1))


def test_names_and_numbers_are_those_of_the_protocol() -> None:
    package = "opentelemetry.proto.experimental.arrow.v1"
    assert dict(METHODS) == {
        Signal.TRACES: f"/{package}.ArrowTracesService/ArrowTraces",
        Signal.LOGS: f"/{package}.ArrowLogsService/ArrowLogs",
        Signal.METRICS: f"/{package}.ArrowMetricsService/ArrowMetrics",
    }
    assert SERVICES[f"{package}.ArrowLogsService"] is Signal.LOGS
    described: FileDescriptorProto = describe()
    types, codes = ({v.name: v.number for v in e.value} for e in described.enum_type)
    assert len(types) == 28
    assert (types["UNKNOWN"], types["RESOURCE_ATTRS"], types["UNIVARIATE_METRICS"]) == (0, 1, 10)
    assert (types["EXP_HISTOGRAM_DP_EXEMPLAR_ATTRS"], types["METRIC_ATTRS"]) == (24, 26)
    assert (types["LOGS"], types["LOG_ATTRS"], types["SPANS"]) == (30, 31, 40)
    assert types["SPAN_LINK_ATTRS"] == 45
    assert codes == {
        "OK": 0,
        "CANCELED": 1,
        "INVALID_ARGUMENT": 3,
        "DEADLINE_EXCEEDED": 4,
        "PERMISSION_DENIED": 7,
        "RESOURCE_EXHAUSTED": 8,
        "ABORTED": 10,
        "INTERNAL": 13,
        "UNAVAILABLE": 14,
        "UNAUTHENTICATED": 16,
    }
    streams = [method for service in described.service for method in service.method]
    assert all(method.client_streaming and method.server_streaming for method in streams)
