"""Counting items from bytes agrees with protobuf, and what is cut off or damaged is refused."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from receiving import request_of

from quiver.bundle import Signal
from quiver.errors import InvalidRequest
from quiver.otlp.messages import REQUEST_TYPES
from quiver.pipeline.wire_count import count_items
from quiver.testing.telemetry import Telemetry

KINDS = ("gauge", "sum", "histogram", "exponential_histogram", "summary")


def by_protobuf(signal: Signal, request: bytes) -> int:
    message: Any = REQUEST_TYPES[signal].FromString(request)
    if signal is Signal.TRACES:
        return sum(len(s.spans) for r in message.resource_spans for s in r.scope_spans)
    if signal is Signal.LOGS:
        return sum(len(s.log_records) for r in message.resource_logs for s in r.scope_logs)
    return sum(
        len(getattr(m, kind).data_points)
        for r in message.resource_metrics
        for s in r.scope_metrics
        for m in s.metrics
        for kind in KINDS
        if m.HasField(kind)
    )


@pytest.mark.parametrize("signal", list(Signal))
def test_counts_what_protobuf_counts(signal: Signal) -> None:
    for request in Telemetry(7).take(signal, 5):
        assert count_items(signal, request) == by_protobuf(signal, request) > 0


@pytest.mark.parametrize("signal", list(Signal))
def test_an_empty_request_has_no_items(signal: Signal) -> None:
    assert count_items(signal, b"") == 0
    assert count_items(signal, request_of(signal, 0)) == 0


def test_items_of_every_length_are_counted() -> None:
    message: Any = REQUEST_TYPES[Signal.TRACES]()
    scope = message.resource_spans.add().scope_spans.add()
    for length in (0, 1, 120, 127, 128, 129, 16_380, 16_384, 16_390, 2_100_000):
        scope.spans.add(name="n" * length)
    scope.spans.add()
    assert count_items(Signal.TRACES, message.SerializeToString()) == 11


def test_every_kind_of_metric_is_counted() -> None:
    message: Any = REQUEST_TYPES[Signal.METRICS]()
    scope = message.resource_metrics.add().scope_metrics.add()
    for count, kind in enumerate(KINDS, 1):
        metric = scope.metrics.add(name=kind, description="d" * 200)
        for _ in range(count):
            getattr(metric, kind).data_points.add(time_unix_nano=1)
    assert count_items(Signal.METRICS, message.SerializeToString()) == 15


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes((number << 3 | 2, len(content))) + content


def test_of_two_kinds_the_last_counts_and_the_same_kind_is_merged() -> None:
    point = field(1, b"\x19" + bytes(8))
    gauge, summed = field(5, point), field(7, point)
    for metric in (gauge + gauge, gauge + summed, summed + gauge + gauge):
        request = field(1, field(2, field(2, metric)))
        assert count_items(Signal.METRICS, request) == by_protobuf(Signal.METRICS, request)


@pytest.mark.parametrize(
    "unknown",
    [
        b"\x78\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a varint of ten bytes
        b"\x79" + bytes(8),
        b"\x7d" + bytes(4),
        b"\x7b\x08\x01\x83\x01\x84\x01\x7c",  # a group that holds a field and a group
        b"\x08\x01",  # a number that is on the way, as a varint
        b"\x92\x00\x00",  # a tag in more bytes than it needs: that of an item
    ],
)
def test_what_protobuf_skips_is_skipped(unknown: bytes) -> None:
    span = field(2, b"\x2a\x01n")
    for request in (
        unknown + field(1, field(2, span)),
        field(1, unknown + field(2, span)),
        field(1, field(2, unknown + span + unknown + span)),
    ):
        assert count_items(Signal.TRACES, request) == by_protobuf(Signal.TRACES, request)


@pytest.mark.parametrize(
    ("request_bytes", "where"),
    [
        (b"\x0a", "byte 1"),
        (b"\x0a\x05abc", "byte 0"),
        (b"\x0a\x80", "byte 2"),
        (b"\x0a\x04\x12\x05ab", "byte 2"),
        (b"\x0a\x06\x12\x04\x12\x03ab", "byte 4"),
        (b"\x0a\x06\x12\x04\x12\x01a\x12", "byte 8"),
        (b"\x02\x00", "byte 0"),  # number 0
        (b"\x00\x00", "byte 0"),
        (b"\x0f\x00", "byte 0"),  # no such wire type
        (b"\x7c", "byte 0"),  # the end of no group
        (b"\x7b\x08\x01", "byte 3"),  # no end of a group
        (b"\x7b\x84\x01", "byte 1"),  # the end of another
        (b"\x79" + bytes(7), "byte 0"),
        (b"\xff" * 11, "byte 0"),
        (b"\xfa\xff\xff\xff\x7f\x00", "byte 0"),  # a tag with more than 32 bits
        (b"\x7b" * 200 + b"\x7c" * 200, "byte 100"),
        (b"hello, is this a web server?", "byte 2"),
    ],
)
def test_broken_structure_is_refused_with_its_place(request_bytes: bytes, where: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        count_items(Signal.TRACES, request_bytes)
    assert refused.value.where == where
    with pytest.raises(DecodeError):
        REQUEST_TYPES[Signal.TRACES].FromString(request_bytes)


@pytest.mark.parametrize("signal", list(Signal))
def test_every_cut_is_refused_or_leaves_whole_items(signal: Signal) -> None:
    request = request_of(signal, 4)
    for end in range(1, len(request)):
        with pytest.raises(InvalidRequest):
            count_items(signal, request[:end])


@settings(max_examples=300)
@given(
    signal=st.sampled_from(list(Signal)),
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
)
def test_whatever_the_bytes_it_counts_or_refuses(
    signal: Signal, edits: list[tuple[int, int]]
) -> None:
    data = bytearray(request_of(signal, 5, "some text"))
    for place, value in edits:
        data[place % len(data)] = value
    request = bytes(data)
    try:
        expected = by_protobuf(signal, request)
    except DecodeError:
        expected = None
    try:
        counted = count_items(signal, request)
    except InvalidRequest:
        assert expected is None  # stricter than protobuf would lose data
    else:
        assert expected is None or counted == expected


@given(st.sampled_from(list(Signal)), st.binary(max_size=60))
def test_garbage_never_raises_anything_else(signal: Signal, data: bytes) -> None:
    try:
        expected = by_protobuf(signal, data)
    except DecodeError:
        expected = None
    try:
        counted = count_items(signal, data)
    except InvalidRequest:
        assert expected is None
    else:
        assert expected is None or counted == expected
