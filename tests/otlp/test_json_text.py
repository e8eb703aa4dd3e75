from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from otlp_json import (
    LOGS_TEXT,
    METRICS_TEXT,
    SPAN_ID,
    TRACE_ID,
    TRACES_TEXT,
    parsed,
    request_of,
    span_tree,
    value_tree,
)
from otlp_messages import messages, requests, serialised

from quiver.bundle import Signal
from quiver.otlp import json_text
from quiver.otlp.json_text import from_json, to_json
from quiver.otlp.messages import REQUEST_TYPES

SIGNALS = st.sampled_from(list(Signal))


def read(signal: Signal, tree: object) -> Any:  # noqa: ANN401
    return parsed(signal, from_json(signal, json.dumps(tree).encode()))


def read_span(**members: object) -> Any:  # noqa: ANN401
    return read(Signal.TRACES, span_tree(**members)).resource_spans[0].scope_spans[0].spans[0]


def read_value(value: object) -> Any:  # noqa: ANN401
    return read(Signal.LOGS, value_tree(value)).resource_logs[0].scope_logs[0].log_records[0].body


def read_summary(**members: object) -> Any:  # noqa: ANN401
    metric = {"summary": {"dataPoints": [members]}}
    request = read(Signal.METRICS, {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]})
    return request.resource_metrics[0].scope_metrics[0].metrics[0].summary.data_points[0]


# --- Documents --------------------------------------------------------------------------------


def test_a_traces_document() -> None:
    trace_id, span_id = bytes.fromhex(TRACE_ID), bytes.fromhex(SPAN_ID)
    span = {
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_span_id": bytes.fromhex("eee19b7ec3c1b173"),
        "name": "I'm a server span",
        "kind": 2,
        "start_time_unix_nano": 1544712660000000000,
        "end_time_unix_nano": 1544712661000000000,
        "attributes": [{"key": "my.span.attr", "value": {"int_value": -7}}],
        "links": [{"trace_id": trace_id, "span_id": span_id}],
        "status": {"code": 2, "message": "no"},
    }
    service = {"attributes": [{"key": "service.name", "value": {"string_value": "my.service"}}]}
    scope = {
        "name": "my.library",
        "version": "1.0.0",
        "attributes": [{"key": "my.scope.attribute", "value": {"string_value": "some"}}],
    }
    expected = request_of(
        Signal.TRACES,
        resource_spans=[{"resource": service, "scope_spans": [{"scope": scope, "spans": [span]}]}],
    )
    assert from_json(Signal.TRACES, TRACES_TEXT.encode()) == expected


def test_a_logs_document() -> None:
    values = [
        {"key": "traceId", "value": {"string_value": "not an id"}},
        {"key": "list", "value": {"array_value": {"values": [{"bool_value": True}, {}]}}},
        {"key": "raw", "value": {"bytes_value": b"\xde\xad"}},
    ]
    record = {
        "time_unix_nano": 1544712660300000000,
        "observed_time_unix_nano": 1544712660300000000,
        "severity_number": 10,
        "severity_text": "Information",
        "trace_id": bytes.fromhex(TRACE_ID),
        "span_id": bytes.fromhex(SPAN_ID),
        "body": {"kvlist_value": {"values": values}},
    }
    service = {"attributes": [{"key": "service.name", "value": {"string_value": "my.service"}}]}
    expected = request_of(
        Signal.LOGS,
        resource_logs=[{"resource": service, "scope_logs": [{"log_records": [record]}]}],
    )
    assert from_json(Signal.LOGS, LOGS_TEXT.encode()) == expected


def test_a_metrics_document() -> None:
    exemplar = {
        "as_int": 3,
        "span_id": bytes.fromhex(SPAN_ID),
        "trace_id": bytes.fromhex(TRACE_ID),
    }
    point = {"as_double": 5.0, "time_unix_nano": 1544712660300000000, "exemplars": [exemplar]}
    exponential = {
        "count": 3,
        "sum": 10.5,
        "scale": -1,
        "zero_count": 1,
        "positive": {"offset": 1, "bucket_counts": [0, 2]},
        "min": 0.0,
        "max": math.inf,
    }
    summary = {"quantile_values": [{"quantile": 0.5, "value": math.nan}]}
    metrics = [
        {
            "name": "my.counter",
            "unit": "1",
            "sum": {"aggregation_temporality": 1, "is_monotonic": True, "data_points": [point]},
        },
        {
            "name": "my.exponential",
            "exponential_histogram": {"aggregation_temporality": 2, "data_points": [exponential]},
        },
        {"name": "my.summary", "summary": {"data_points": [summary]}},
    ]
    expected = request_of(
        Signal.METRICS, resource_metrics=[{"scope_metrics": [{"metrics": metrics}]}]
    )
    assert from_json(Signal.METRICS, METRICS_TEXT.encode()) == expected


def test_what_is_written_is_compact_and_as_the_specification_says() -> None:
    value = {"kvlist_value": {"values": [{"key": "é", "value": {"bytes_value": b"\xfb\xff"}}]}}
    span = {
        "trace_id": bytes.fromhex(TRACE_ID),
        "links": [{"span_id": bytes.fromhex(SPAN_ID)}],
        "kind": 2,
        "flags": 1,
        "end_time_unix_nano": 5,
        "attributes": [{"key": "spanId", "value": value}],
    }
    request = request_of(Signal.TRACES, resource_spans=[{"scope_spans": [{"spans": [span]}]}])
    attribute = (
        '{"key":"spanId","value":{"kvlistValue":{"values":'
        '[{"key":"é","value":{"bytesValue":"+/8="}}]}}}'
    )
    assert to_json(Signal.TRACES, request).decode() == (
        f'{{"resourceSpans":[{{"scopeSpans":[{{"spans":[{{"traceId":"{TRACE_ID}","kind":2,'
        f'"endTimeUnixNano":"5","attributes":[{attribute}],'
        f'"links":[{{"spanId":"{SPAN_ID}"}}],"flags":1}}]}}]}}]}}'
    )


def test_doubles_that_are_no_json_numbers_are_written_as_strings() -> None:
    values = [math.nan, math.inf, -math.inf, -0.0, 0.1]
    body = {"array_value": {"values": [{"double_value": value} for value in values]}}
    request = request_of(
        Signal.LOGS, resource_logs=[{"scope_logs": [{"log_records": [{"body": body}]}]}]
    )
    text = to_json(Signal.LOGS, request)
    written = [
        value["doubleValue"]
        for value in json.loads(text)["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]["body"][
            "arrayValue"
        ]["values"]
    ]
    assert repr(written) == repr(["NaN", "Infinity", "-Infinity", -0.0, 0.1])
    assert from_json(Signal.LOGS, text) == request


# --- What is accepted -------------------------------------------------------------------------


def bytes_fields(described: Descriptor, seen: set[str]) -> Iterator[str]:
    if described.full_name in seen:
        return
    seen.add(described.full_name)
    for declared in described.fields:
        if declared.type == declared.TYPE_BYTES:
            yield declared.full_name.removeprefix("opentelemetry.proto.")
        elif declared.message_type is not None:
            yield from bytes_fields(declared.message_type, seen)


def test_every_bytes_field_of_otlp_is_known_as_an_id_or_not() -> None:
    # A new one in a later version of OTLP has to be looked up in its specification.
    seen: set[str] = set()
    found = [
        name
        for message in REQUEST_TYPES.values()
        for name in bytes_fields(message.DESCRIPTOR, seen)  # type: ignore[arg-type] # upb's own
    ]
    assert sorted(found) == [
        "common.v1.AnyValue.bytes_value",
        "logs.v1.LogRecord.span_id",
        "logs.v1.LogRecord.trace_id",
        "metrics.v1.Exemplar.span_id",
        "metrics.v1.Exemplar.trace_id",
        "trace.v1.Span.Link.span_id",
        "trace.v1.Span.Link.trace_id",
        "trace.v1.Span.parent_span_id",
        "trace.v1.Span.span_id",
        "trace.v1.Span.trace_id",
    ]


def test_an_attribute_named_like_an_id_is_left_alone() -> None:
    attribute = {"key": "traceId", "value": {"stringValue": "zz", "traceId": "unknown here"}}
    span = read_span(attributes=[attribute])
    assert span.attributes[0].key == "traceId"
    assert span.attributes[0].value.string_value == "zz"


def test_an_empty_id_is_no_id() -> None:
    assert read_span(parentSpanId="", name="root").parent_span_id == b""


@pytest.mark.parametrize("text", ["+/8=", "-_8=", "+/8", "-_8", "-/8"])
def test_bytes_are_base64_of_either_kind(text: str) -> None:
    assert read_value({"bytesValue": text}).bytes_value == b"\xfb\xff"


def test_no_bytes_are_still_a_value() -> None:
    assert read_value({"bytesValue": ""}).WhichOneof("value") == "bytes_value"


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (2, 2),
        ("SPAN_KIND_SERVER", 2),
        ("2", 2),
        (2.0, 2),
        (99, 99),
        (-1, -1),
        ("SPAN_KIND_UNSPECIFIED", 0),
    ],
)
def test_enums_are_numbers_or_names(kind: object, number: int) -> None:
    assert read_span(kind=kind).kind == number


@pytest.mark.parametrize(
    ("given_value", "number"),
    [
        (5, 5),
        ("5", 5),
        ("-5", -5),
        (5.0, 5),
        ("5.0", 5),
        ("1e3", 1000),
        (-(2**63), -(2**63)),
        (str(2**63 - 1), 2**63 - 1),
        ("007", 7),
    ],
)
def test_integers_are_numbers_or_strings(given_value: object, number: int) -> None:
    assert read_value({"intValue": given_value}).int_value == number


def test_an_unsigned_integer_uses_all_its_bits() -> None:
    assert read_span(startTimeUnixNano=str(2**64 - 1)).start_time_unix_nano == 2**64 - 1


@pytest.mark.parametrize(
    ("given_value", "number"),
    [
        (1.5, 1.5),
        ("1.5", 1.5),
        (3, 3.0),
        ("-2e-3", -0.002),
        ("NaN", math.nan),
        ("Infinity", math.inf),
        ("-Infinity", -math.inf),
        (-0.0, -0.0),
    ],
)
def test_doubles(given_value: object, number: float) -> None:
    assert repr(read_value({"doubleValue": given_value}).double_value) == repr(number)
    # Where zero and absent are the same, the sign of zero is still kept.
    assert repr(read_summary(sum=given_value).sum) == repr(number)


def test_names_of_fields_may_be_those_of_the_proto_files() -> None:
    tree = {"resource_spans": [{"scope_spans": [{"spans": [{"trace_id": TRACE_ID}]}]}]}
    assert read(Signal.TRACES, tree) == read(Signal.TRACES, span_tree(traceId=TRACE_ID))


def test_unknown_fields_are_skipped_whatever_they_hold() -> None:
    odd = {"traceId": [1, {"b": None}], "\ud800": "\ud800", "": [[]]}
    span = read_span(**{"name": "a", "later": odd, "[ext]": odd, "TraceId": 7, "": None})
    assert span == read_span(name="a")


def test_null_is_absent() -> None:
    assert read_span(traceId=None, attributes=None, status=None, kind=None) == read_span()
    assert read_value({"stringValue": None, "intValue": 0}).WhichOneof("value") == "int_value"


def test_of_two_members_with_one_name_the_last_counts() -> None:
    text = b'{"resourceLogs":[{"schemaUrl":"a","schemaUrl":"b","schema_url":"c"}]}'
    assert parsed(Signal.LOGS, from_json(Signal.LOGS, text)).resource_logs[0].schema_url == "c"


def test_empty_messages_are_kept() -> None:
    assert read_value({"kvlistValue": {}}).WhichOneof("value") == "kvlist_value"
    assert read_value({"arrayValue": {"values": [{}]}}).array_value.values[0] is not None
    assert read_span(status={}).HasField("status")
    assert from_json(Signal.TRACES, b" {} ") == b""


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert read_value({"stringValue": "\U0001f600"}).string_value == "\U0001f600"
    assert b"\\ud83d\\ude00" in json.dumps("\U0001f600").encode()


# --- Round trips ------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data(), SIGNALS, st.booleans())
def test_a_request_comes_back_from_its_text(
    data: st.DataObject, signal: Signal, edgy: bool
) -> None:
    request = data.draw(requests(signal, edgy=edgy))
    text = to_json(signal, request)
    assert from_json(signal, text) == request
    assert to_json(signal, from_json(signal, text)) == text


@settings(max_examples=60)
@given(st.data(), SIGNALS)
def test_a_request_in_other_bytes_has_the_same_text(data: st.DataObject, signal: Signal) -> None:
    request = data.draw(requests(signal, canonical=False, edgy=True))
    message: Message = parsed(signal, request)
    message.DiscardUnknownFields()
    assert from_json(signal, to_json(signal, request)) == serialised(message)


@settings(max_examples=60)
@given(st.data(), SIGNALS)
def test_names_from_the_proto_files_mean_the_same(data: st.DataObject, signal: Signal) -> None:
    request = serialised(data.draw(messages(signal)))
    tree = json.loads(to_json(signal, request))
    snake = json.dumps(_in_snake_case(json_text._SHAPES[signal], tree)).encode()
    assert from_json(signal, snake) == request


def _in_snake_case(shape: json_text._Shape, tree: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, member in tree.items():
        known = shape.fields[name]
        nested = known.shape
        if nested is None:
            made[known.name] = member
        elif known.repeated:
            made[known.name] = [_in_snake_case(nested, item) for item in member]
        else:
            made[known.name] = _in_snake_case(nested, member)
    return made
