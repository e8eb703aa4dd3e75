"""Serialised requests become columns and come back; a bad one fails alone."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import cast

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from otlp_messages import messages, serialised
from otlp_messages import requests as drawn_requests
from otlp_wire import (
    attribute,
    breaks_a_rule,
    expected,
    fixed64,
    gauge_point,
    group,
    histogram_point,
    item,
    lists,
    maps,
    meaning,
    number,
    parsed,
    part,
    same,
    span,
    tag,
    varint,
    with_ids,
)

from quiver.bundle import Signal
from quiver.config import OtlpConfig
from quiver.errors import InvalidRequest
from quiver.otlp import wire
from quiver.otlp.decode import MAX_GROUP_TAGS, find_break
from quiver.otlp.messages import REQUEST_TYPES, Converter, request_type
from quiver.otlp.wire import SMALL, RequestBatch, read_requests, write_requests
from quiver.testing.telemetry import Shape, Telemetry

TRACES, LOGS, METRICS = Signal.TRACES, Signal.LOGS, Signal.METRICS
signals = pytest.mark.parametrize("signal", list(Signal))
DRAWN = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(params=["small", "large"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Requests of a few bytes are small; here they are also sent the way of large ones."""
    if request.param == "large":
        monkeypatch.setattr(wire, "SMALL", -1)
    return str(request.param)


def telemetry(signal: Signal, count: int, items: int = 20) -> list[bytes]:
    return Telemetry(5, Shape(items_per_request=items)).take(signal, count)


def taken(result: RequestBatch, signal: Signal, requests: list[bytes]) -> None:
    """All of them, and as upb understands them."""
    assert result.failures == []
    assert result.signal is signal
    assert result.requests.tolist() == list(range(len(requests)))
    assert result.requests.dtype == np.int32
    assert result.batch.schema.equals(request_type(signal).schema)
    assert same(signal, result.batch, expected(signal, *requests))


def only_failure(signal: Signal, request: bytes) -> InvalidRequest:
    """It fails among others, which are not touched."""
    good = telemetry(signal, 2, items=3)
    result = read_requests(signal, [good[0], request, good[1]])
    assert result.requests.tolist() == [0, 2]
    assert result.batch.equals(expected(signal, *good))
    (failure,) = result.failures
    assert failure.request == 1
    return failure


# --- there and back ----------------------------------------------------------------------------


@signals
@pytest.mark.usefixtures("route")
def test_telemetry_comes_back_byte_for_byte(signal: Signal) -> None:
    requests = telemetry(signal, 5)
    result = read_requests(signal, requests)
    taken(result, signal, requests)
    assert write_requests(signal, result.batch) == requests


@signals
@DRAWN
@given(data=st.data())
def test_any_request_comes_back_byte_for_byte(signal: Signal, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(messages(signal), max_size=4))
    requests = [serialised(with_ids(message)) for message in drawn]
    for small in (-1, SMALL):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "SMALL", small)
            result = read_requests(signal, requests)
        taken(result, signal, requests)
        assert write_requests(signal, result.batch) == requests


@signals
@DRAWN
@given(data=st.data())
def test_other_bytes_for_the_same_request(signal: Signal, data: st.DataObject) -> None:
    request = data.draw(drawn_requests(signal, canonical=False, edgy=True))
    small = read_requests(signal, [request])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SMALL", -1)
        result = read_requests(signal, [request])
    message = parsed(signal, request)
    assert message is not None
    if breaks_a_rule(message, OtlpConfig()):
        assert len(small.failures) == len(result.failures) == 1
        return
    taken(small, signal, [request])
    assert result.failures == []
    # What is inside lists and maps keeps its form, so it is the meaning that is compared.
    (written,) = write_requests(signal, result.batch)
    (by_hand,) = write_requests(signal, expected(signal, request))
    assert meaning(signal, written) == meaning(signal, by_hand)


@signals
def test_no_requests_and_empty_ones(signal: Signal) -> None:
    taken(read_requests(signal, []), signal, [])
    taken(read_requests(signal, [b"", b""]), signal, [b"", b""])
    assert write_requests(signal, read_requests(signal, []).batch) == []


# --- what encoders may do and ptars does not expect --------------------------------------------

UNUSUAL: dict[str, tuple[Signal, bytes]] = {
    "unknown fields": (TRACES, span(number(99, 5), part(98, b"x"), group(97, number(1, 4)))),
    "another wire type": (TRACES, span(number(5, 1), part(7, b"12345678"), part(3, b"state"))),
    "long varints": (TRACES, span(number(10, 5, padding=4), number(6, 2**40 + 3))),
    "name twice": (TRACES, span(part(5, b"a"), part(5, b"b"))),
    "a name that is taken back": (TRACES, span(part(5, b"a"), part(5))),
    "resource twice": (TRACES, part(1, part(1, number(2, 5)), part(1, part(1, part(1, b"k"))))),
    "status twice": (TRACES, span(part(15, part(2, b"m")), part(15, number(3, 2)))),
    "two members": (TRACES, attribute(part(1, b"text"), number(3, 7))),
    "two members in two parts": (
        TRACES,
        span(part(9, part(1, b"k"), part(2, part(1, b"text")), part(2, number(3, 7)))),
    ),
    "three members": (TRACES, attribute(part(1, b"text"), number(3, 7), part(5))),
    "a list and a map": (TRACES, attribute(lists(2), maps(2))),
    "two members in a list": (TRACES, attribute(part(5, part(1, part(1, b"a"), number(3, 7))))),
    "two members in a map": (
        TRACES,
        attribute(part(6, part(1, part(1, b"k"), part(2, number(2, 1), number(3, 7))))),
    ),
    "two members of a body": (LOGS, item(part(5, part(1, b"a")), part(5, number(3, 1)))),
    "no value": (TRACES, attribute()),
    "a key without a value": (TRACES, span(part(9, part(1, b"k")))),
    "an int and a double": (METRICS, gauge_point(fixed64(4, 1), fixed64(6, 1))),
    "the same in an exemplar": (METRICS, gauge_point(part(5, fixed64(3, 1), fixed64(6, 1)))),
    "gauge and sum": (METRICS, item(part(5, part(1)), part(7, part(1, fixed64(3, 1))))),
    "gauge in two parts": (METRICS, item(part(5, part(1, fixed64(3, 1))), part(5, part(1)))),
    "counts in parts": (
        METRICS,
        histogram_point(fixed64(6, 1), part(6, struct.pack("<2Q", 2, 3)), fixed64(6, 4)),
    ),
    "an entity": (LOGS, part(1, part(1, part(3, part(1, b"url"), part(3, b"id"))))),
}


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("name", list(UNUSUAL))
def test_what_is_unusual_means_what_upb_says(name: str) -> None:
    signal, request = UNUSUAL[name]
    ordinary = telemetry(signal, 2, items=3)
    requests = [ordinary[0], request, ordinary[1], request]
    taken(read_requests(signal, requests), signal, requests)


ONLY_SMALL: dict[str, tuple[Signal, bytes]] = {
    "the same list twice": (TRACES, attribute(lists(1, part(1)), lists(1, part(1)))),
    "a string and an index": (TRACES, attribute(part(1, b"text"), number(8, 7))),
}


@pytest.mark.parametrize("name", list(ONLY_SMALL))
def test_what_only_small_requests_may_do(name: str) -> None:
    signal, request = ONLY_SMALL[name]
    taken(read_requests(signal, [request]), signal, [request])


# --- damage ------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[Signal, bytes, str]] = {
    "text": (TRACES, span(part(5, b"ab\xff")), "byte 38"),
    "a key": (TRACES, span(part(9, part(1, b"\xc3"))), "byte 38"),
    "end of a group": (TRACES, span(tag(99, 4)), "byte 34"),
    "no end of a group": (TRACES, span(tag(99, 3)), "byte 36"),
    "wire type": (TRACES, span(tag(99, 6)), "byte 34"),
    "field 0": (TRACES, span(number(0, 1)), "byte 34"),
    "long number": (TRACES, span(tag(10, 0), b"\x80" * 10 + b"\0"), "byte 35"),
    "a length near 2**64": (TRACES, span(tag(5, 2), varint(2**64 - 1)), "byte 35"),
    "a length near 2**31": (TRACES, span(tag(5, 2), varint(2**31)), "byte 35"),
    "a length above": (TRACES, span(tag(5, 2), varint(9), b"name"), "byte 35"),
    "cut off number": (TRACES, span(tag(7, 1), b"1234"), "byte 35"),
    "cut off tag": (TRACES, span(b"\x80"), "byte 34"),
    "packed varints": (METRICS, item(part(10, part(1, part(8, part(2, b"\x01\x80"))))), "byte 15"),
    "random": (LOGS, bytes(range(256)), "byte 0"),
}


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("name", list(BROKEN))
def test_what_is_broken_fails_alone_and_says_where(name: str) -> None:
    signal, request, where = BROKEN[name]
    assert parsed(signal, request) is None
    failure = only_failure(signal, request)
    assert failure.reason.startswith("not OTLP: ")
    assert failure.where == where


ONLY_SMALL_BROKEN: dict[str, tuple[Signal, bytes, str]] = {
    "another end of a group": (TRACES, span(group(99, end=98)), "byte 36"),
    "deep groups": (TRACES, span(tag(99, 3) * 120, tag(99, 4) * 120), "byte 231"),
    "field 2**29": (TRACES, span(number(2**29, 1)), "byte 34"),
    "long tag": (TRACES, span(varint(5 << 3 | 2, padding=5) + b"\x01n"), "byte 34"),
    "packed numbers": (METRICS, histogram_point(part(6, b"123")), "byte 12"),
}


@pytest.mark.parametrize("name", list(ONLY_SMALL_BROKEN))
def test_what_is_broken_and_seen_in_small_requests(name: str) -> None:
    signal, request, where = ONLY_SMALL_BROKEN[name]
    assert parsed(signal, request) is None
    assert only_failure(signal, request).where == where


def test_groups_without_end_do_not_overflow_the_stack() -> None:
    """ptars would end the process."""
    for request in (b"\x0b" * 1_000_000, span(b"\x0b" * 1_000_000, b"\x0c" * 1_000_000)):
        assert len(request) > SMALL
        assert "inside each other" in only_failure(TRACES, request).reason


def test_text_that_looks_like_groups_is_taken() -> None:
    request = span(part(5, b"s" * (2 * MAX_GROUP_TAGS)))
    taken(read_requests(TRACES, [request]), TRACES, [request])


def test_small_requests_next_to_large_ones() -> None:
    large = part(5, b"a" * SMALL)
    two_members = part(9, part(1, b"k"), part(2, part(1, b"text"), number(3, 7)))
    requests = [span(two_members), span(large, two_members), span(), span(large)]
    taken(read_requests(TRACES, requests), TRACES, requests)
    broken = part(9, part(1, b"k"), part(2, part(5, b"\xff")))
    result = read_requests(TRACES, [span(broken), span(large, broken), *requests])
    assert result.requests.tolist() == [2, 3, 4, 5]
    where = "resource_spans[0].scope_spans[0].spans[0].attributes[0].value.array_value"
    assert [failure.where for failure in result.failures] == ["byte 43", where]


@signals
def test_many_bad_ones_among_many(signal: Signal, route: str) -> None:
    requests = telemetry(signal, 60, items=2)
    bad = [0, 1, 7, 30, 59]
    for index in bad:
        requests[index] = requests[index][:-1] + b"\xff\xff"
    result = read_requests(signal, requests)
    assert [failure.request for failure in result.failures] == bad
    good = [index for index in range(60) if index not in bad]
    assert result.requests.tolist() == good
    assert result.batch.equals(expected(signal, *[requests[index] for index in good])), route


def test_looking_for_the_place_has_an_end() -> None:
    data = part(1) * 30_000 + b"\xff"
    assert find_break(cast("Descriptor", REQUEST_TYPES[TRACES].DESCRIPTOR), data) is None
    assert only_failure(TRACES, data).where == ""


# --- sizes -------------------------------------------------------------------------------------


@signals
def test_a_request_above_the_limit_fails_alone(signal: Signal) -> None:
    requests = telemetry(signal, 3)
    largest = max(range(3), key=lambda index: len(requests[index]))
    limit = len(requests[largest])
    assert not read_requests(signal, requests, OtlpConfig(max_request_bytes=limit)).failures
    result = read_requests(signal, requests, OtlpConfig(max_request_bytes=limit - 1))
    assert [f.request for f in result.failures] == [
        i for i in range(3) if len(requests[i]) == limit
    ]
    assert f"{limit} bytes" in result.failures[0].reason


@signals
@pytest.mark.parametrize("group_bytes", [1, 9_000, 30_000])
def test_groups_do_not_show(signal: Signal, group_bytes: int) -> None:
    requests = telemetry(signal, 7)
    requests[4] = b"\xff"
    limits = OtlpConfig(max_group_bytes=group_bytes)
    result = read_requests(signal, requests, limits)
    whole = read_requests(signal, requests)
    assert result.batch.equals(whole.batch)
    assert result.requests.tolist() == whole.requests.tolist() == [0, 1, 2, 3, 5, 6]
    assert [str(f) for f in result.failures] == [str(f) for f in whole.failures]


def test_two_gibibytes_are_too_much() -> None:
    one = bytes(64 * 2**20)
    with pytest.raises(ValueError, match="2 GiB"):
        read_requests(TRACES, [one] * 32)


# --- a ptars that behaves badly ----------------------------------------------------------------


class Picky:
    """Takes what the real one takes, except what has a name that it does not like."""

    def __init__(self, real: Converter, error: BaseException) -> None:
        self.real = real
        self.error = error
        self.calls = 0

    def list_to_record_batch(self, messages: list[bytes]) -> pa.RecordBatch:
        self.calls += 1
        if any(b"dislike" in message for message in messages):
            raise self.error
        return self.real.list_to_record_batch(messages)

    def array_to_record_batch(self, messages: pa.BinaryArray) -> pa.RecordBatch:
        return self.real.array_to_record_batch(messages)

    def record_batch_to_array(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        written = self.real.record_batch_to_array(batch)
        if any(b"dislike" in (message or b"") for message in written.to_pylist()):
            raise self.error
        return written

    def schema(self) -> pa.Schema:
        return self.real.schema()


def picky(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Picky:
    kind = request_type(TRACES)
    converter = Picky(kind.converter, error)
    monkeypatch.setattr(wire, "request_type", lambda _: replace(kind, converter=converter))
    return converter


class Panic(BaseException):
    pass


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("error", [Panic("oops"), ValueError("oops")])
def test_what_only_upb_takes_becomes_a_row_by_hand(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    picky(monkeypatch, error)
    ordinary = telemetry(TRACES, 2, items=3)
    odd = attribute(part(1, b"dislike"), number(3, 7)), attribute(part(1, b"dislike"))
    requests = [odd[1], ordinary[0], odd[1], ordinary[1]]
    taken(read_requests(TRACES, requests), TRACES, requests)
    bad = span(part(1, b"short"), part(5, b"dislike"))
    result = read_requests(TRACES, [ordinary[0], bad, odd[1]])
    assert result.requests.tolist() == [0, 2]
    assert [f.where for f in result.failures] == [
        "resource_spans[0].scope_spans[0].spans[0].trace_id"
    ]


def test_one_bad_among_many_costs_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    converter = picky(monkeypatch, Panic("oops"))
    requests = [span()] * 1000
    requests[700] = span(part(5, b"dislike"))
    taken(read_requests(TRACES, requests), TRACES, requests)
    assert converter.calls < 30


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), MemoryError()])
def test_what_is_not_about_the_request_passes_through(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    picky(monkeypatch, error)
    with pytest.raises(type(error)):
        read_requests(TRACES, [span(part(5, b"dislike"))])


def test_a_row_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = read_requests(TRACES, [span(), span(), span(part(5, b"dislike"))]).batch
    picky(monkeypatch, Panic("oops"))
    with pytest.raises(InvalidRequest, match=r"request 2: .*oops"):
        write_requests(TRACES, batch)
    assert write_requests(TRACES, batch.slice(0, 2)) == [span(), span()]


def test_another_schema_is_not_written() -> None:
    with pytest.raises(ValueError, match="schema"):
        write_requests(LOGS, read_requests(TRACES, [span()]).batch)


@signals
def test_some_rows_of_a_batch_are_written(signal: Signal) -> None:
    requests = telemetry(signal, 5)
    batch = read_requests(signal, requests).batch
    assert write_requests(signal, batch.slice(1, 3)) == requests[1:4]
    assert write_requests(signal, batch.take(pa.array([3, 0]))) == [requests[3], requests[0]]
