from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from otlp_json import (
    LOGS_TEXT,
    METRICS_TEXT,
    TRACE_ID,
    TRACES_TEXT,
    nested_lists,
    nested_maps,
    span_tree,
    value_tree,
)

from quiver.bundle import Signal
from quiver.config import OtlpConfig
from quiver.errors import InvalidRequest
from quiver.otlp.json_text import from_json, to_json
from quiver.otlp.messages import REQUEST_TYPES

SPAN = "resourceSpans[0].scopeSpans[0].spans[0]"
BODY = "resourceLogs[0].scopeLogs[0].logRecords[0].body"


def refusal(signal: Signal, text: bytes, limits: OtlpConfig | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        from_json(signal, text, limits or OtlpConfig())
    assert len(str(caught.value)) < 400
    return caught.value


@pytest.mark.parametrize(
    ("members", "where"),
    [
        ({"traceId": TRACE_ID[:-2]}, "traceId"),
        ({"traceId": TRACE_ID + "00"}, "traceId"),
        ({"traceId": TRACE_ID[:-1] + "g"}, "traceId"),
        ({"traceId": TRACE_ID[:-2] + " 0"}, "traceId"),
        ({"traceId": "  " + TRACE_ID[2:]}, "traceId"),
        ({"traceId": TRACE_ID[:2] + " " + TRACE_ID[2:]}, "traceId"),
        ({"traceId": TRACE_ID[:-1] + "\u0661"}, "traceId"),
        ({"traceId": 5}, "traceId"),
        ({"trace_id": "W47/95gDgQPSabYzgT/GDA=="}, "trace_id"),
        ({"links": [{}, {"spanId": TRACE_ID}]}, "links[1].spanId"),
        ({"kind": "SPAN_KIND_OTHER"}, "kind"),
        ({"kind": True}, "kind"),
        ({"kind": 2**31}, "kind"),
        ({"kind": 1.5}, "kind"),
        ({"kind": []}, "kind"),
        ({"flags": -1}, "flags"),
        ({"flags": 2**32}, "flags"),
        ({"startTimeUnixNano": -1}, "startTimeUnixNano"),
        ({"startTimeUnixNano": str(2**64)}, "startTimeUnixNano"),
        ({"startTimeUnixNano": "1_0"}, "startTimeUnixNano"),
        ({"startTimeUnixNano": " 1"}, "startTimeUnixNano"),
        ({"startTimeUnixNano": "\u0661"}, "startTimeUnixNano"),
        ({"startTimeUnixNano": ""}, "startTimeUnixNano"),
        ({"startTimeUnixNano": "1\n"}, "startTimeUnixNano"),
        ({"startTimeUnixNano": False}, "startTimeUnixNano"),
        ({"startTimeUnixNano": "Infinity"}, "startTimeUnixNano"),
        ({"startTimeUnixNano": 1e300}, "startTimeUnixNano"),
        ({"startTimeUnixNano": {}}, "startTimeUnixNano"),
        ({"name": 5}, "name"),
        ({"name": ["a"]}, "name"),
        ({"name": "a\ud800"}, "name"),
        ({"name": "\udc00\ud800"}, "name"),
        ({"status": "STATUS_CODE_OK"}, "status"),
        ({"status": []}, "status"),
        ({"attributes": {"key": "value"}}, "attributes"),
        ({"attributes": "key"}, "attributes"),
        ({"attributes": [{"key": "a"}, None]}, "attributes[1]"),
        ({"attributes": ["key"]}, "attributes[0]"),
        ({"attributes": [{"key": "a", "value": "b"}]}, "attributes[0].value"),
        ({"events": [{"timeUnixNano": "x"}]}, "events[0].timeUnixNano"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(
    members: dict[str, object], where: str
) -> None:
    error = refusal(Signal.TRACES, json.dumps(span_tree(**members)).encode())
    assert error.where == f"{SPAN}.{where}"


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"boolValue": "true"}, ".boolValue"),
        ({"boolValue": 1}, ".boolValue"),
        ({"intValue": 2**63}, ".intValue"),
        ({"intValue": int("9" * 4000)}, ".intValue"),
        ({"doubleValue": int("9" * 4000)}, ".doubleValue"),
        ({"doubleValue": "1e999"}, ".doubleValue"),
        ({"doubleValue": "nan"}, ".doubleValue"),
        ({"doubleValue": "inf"}, ".doubleValue"),
        ({"doubleValue": "1_0.5"}, ".doubleValue"),
        ({"doubleValue": "0x1p3"}, ".doubleValue"),
        ({"doubleValue": ""}, ".doubleValue"),
        ({"doubleValue": True}, ".doubleValue"),
        ({"doubleValue": [1.5]}, ".doubleValue"),
        ({"bytesValue": "A"}, ".bytesValue"),
        ({"bytesValue": "AA="}, ".bytesValue"),
        ({"bytesValue": "AA==="}, ".bytesValue"),
        ({"bytesValue": "=AAA"}, ".bytesValue"),
        ({"bytesValue": "AA==AA=="}, ".bytesValue"),
        ({"bytesValue": "A A="}, ".bytesValue"),
        ({"bytesValue": "é=="}, ".bytesValue"),
        ({"bytesValue": 5}, ".bytesValue"),
        ({"intValue": 1, "stringValue": ""}, ".stringValue"),
        ({"arrayValue": {}, "kvlist_value": {}}, ".kvlist_value"),
        ({"arrayValue": []}, ".arrayValue"),
        ({"arrayValue": {"values": [{}, {"intValue": "x"}]}}, ".arrayValue.values[1].intValue"),
        ("text", ""),
        (5, ""),
    ],
)
def test_an_attribute_value_that_does_not_fit_is_refused(value: object, where: str) -> None:
    error = refusal(Signal.LOGS, json.dumps(value_tree(value)).encode())
    assert error.where == BODY + where


def test_two_kinds_of_data_in_one_metric_are_refused() -> None:
    text = b'{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"gauge":{},"sum":{}}]}]}]}'
    error = refusal(Signal.METRICS, text)
    assert error.where == "resourceMetrics[0].scopeMetrics[0].metrics[0].sum"
    assert "gauge" in error.reason


def test_a_number_in_a_list_has_its_place() -> None:
    point = b'{"histogram":{"dataPoints":[{"bucketCounts":[1,"2",-3]}]}}'
    text = b'{"resourceMetrics":[{"scopeMetrics":[{"metrics":[' + point + b"]}]}]}"
    assert refusal(Signal.METRICS, text).where.endswith("histogram.dataPoints[0].bucketCounts[2]")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"", "byte 0"),
        (b"{", "byte 1"),
        (b"[]", ""),
        (b"null", ""),
        (b'"resourceSpans"', ""),
        (b"{} {}", "byte 3"),
        (b'{"\xc3\xa9":}', "byte 6"),
        (b'{"a":"\xff"}', "byte 6"),
        (b'{"a":"\xed\xa0\x80"}', "byte 6"),
        (b'{"a":"\n"}', "byte 6"),
        (b"\xef\xbb\xbf{}", "byte 0"),
        ("{}".encode("utf-16"), "byte 0"),
        (b'{"a":NaN}', ""),
        (b'{"a":-Infinity}', ""),
        (b'{"a":01}', "byte 6"),
        (b'{"a":' + b"9" * 5000 + b"}", ""),
    ],
)
def test_text_that_is_not_a_json_object_is_refused(text: bytes, where: str) -> None:
    assert refusal(Signal.TRACES, text).where == where


def test_a_double_too_large_for_its_bits_is_refused() -> None:
    text = json.dumps(value_tree({"doubleValue": 0})).replace(
        '"doubleValue": 0', '"doubleValue":1e999'
    )
    assert refusal(Signal.LOGS, text.encode()).where == f"{BODY}.doubleValue"


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"resourceSpans":['])
def test_text_deeper_than_the_stack_is_refused(opening: bytes) -> None:
    assert "deep" in refusal(Signal.TRACES, opening * 200_000).reason


@pytest.mark.parametrize("nested", [nested_lists, nested_maps])
def test_values_may_be_as_deep_as_the_limit(nested: Any) -> None:  # noqa: ANN401
    limits = OtlpConfig(max_depth=4)
    deepest = json.dumps(value_tree(nested(4))).encode()
    assert from_json(Signal.LOGS, to_json(Signal.LOGS, from_json(Signal.LOGS, deepest, limits)))
    error = refusal(Signal.LOGS, json.dumps(value_tree(nested(5))).encode(), limits)
    assert "max_depth" in error.reason
    assert error.where.startswith(BODY)


def test_without_depth_there_are_only_scalars() -> None:
    limits = OtlpConfig(max_depth=0)
    assert from_json(Signal.LOGS, json.dumps(value_tree({"intValue": 1})).encode(), limits)
    refusal(Signal.LOGS, json.dumps(value_tree({"arrayValue": {}})).encode(), limits)


@pytest.mark.parametrize("nested", [nested_lists, nested_maps])
@pytest.mark.parametrize("in_attribute", [False, True])
def test_what_upb_could_not_read_again_is_refused(nested: Any, in_attribute: bool) -> None:  # noqa: ANN401
    limits = OtlpConfig(max_depth=1000)
    accepted = 0
    for depth in range(25, 60):
        record = (
            {"attributes": [{"value": nested(depth)}]} if in_attribute else {"body": nested(depth)}
        )
        tree = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}
        try:
            request = from_json(Signal.LOGS, json.dumps(tree).encode(), limits)
        except InvalidRequest as error:
            assert "100 deep" in error.reason  # noqa: PT017 - one or the other
        else:
            assert to_json(Signal.LOGS, request)
            accepted = depth
    # One more and upb refuses: the limit here is not lower than it has to be.
    deeper: Any = REQUEST_TYPES[Signal.LOGS]()
    made = deeper.resource_logs.add().scope_logs.add().log_records.add()
    value = made.attributes.add().value if in_attribute else made.body
    for _ in range(accepted + 1):
        lists = nested is nested_lists
        value = value.array_value.values.add() if lists else value.kvlist_value.values.add().value
    value.int_value = 1
    with pytest.raises(InvalidRequest):
        to_json(Signal.LOGS, deeper.SerializeToString())


def test_the_place_of_a_deep_value_loses_its_middle() -> None:
    value = nested_lists(20)
    text = json.dumps(value_tree(value)).replace('"intValue": 1', '"intValue": "x"').encode()
    where = refusal(Signal.LOGS, text).where
    assert len(where) < 210
    assert where.startswith(BODY)
    assert where.endswith("arrayValue.values[0].intValue")


def test_more_text_than_the_limit_is_refused() -> None:
    text = json.dumps(span_tree(name="a")).encode()
    assert from_json(Signal.TRACES, text, OtlpConfig(max_request_bytes=len(text)))
    error = refusal(Signal.TRACES, text, OtlpConfig(max_request_bytes=len(text) - 1))
    assert "split" in error.reason


def test_a_request_larger_than_its_text_is_refused_too() -> None:
    # A zero takes two bytes as text and eight in a list of counts.
    point = {"histogram": {"dataPoints": [{"bucketCounts": [0] * 1000}]}}
    tree = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [point]}]}]}
    text = json.dumps(tree, separators=(",", ":")).encode()
    assert len(from_json(Signal.METRICS, text)) > 8000
    refusal(Signal.METRICS, text, OtlpConfig(max_request_bytes=len(text)))


@pytest.mark.parametrize(
    "members",
    [
        {"traceId": "z" * 100_000},
        {"kind": "\u00e9" * 100_000},
        {"startTimeUnixNano": "1" * 100_000},
        {"startTimeUnixNano": int("1" * 4000)},
        {"name": {"secret" * 1000: "secret" * 1000}},
        {"status": ["secret"] * 1000},
        {"attributes": "\ud800" * 1000},
    ],
)
def test_an_error_repeats_only_a_little_of_the_input(members: dict[str, object]) -> None:
    error = refusal(Signal.TRACES, json.dumps(span_tree(**members)).encode())
    assert len(error.reason) < 150
    assert error.reason.isascii()
    assert "secret" not in error.reason


@pytest.mark.parametrize("request_bytes", [b"\xff", b"\n\x05ab", b"\n\x03\x1a\x01\xff"])
def test_bytes_that_are_no_request_are_refused(request_bytes: bytes) -> None:
    with pytest.raises(InvalidRequest):
        to_json(Signal.TRACES, request_bytes)


# --- Damage -----------------------------------------------------------------------------------

TEXTS = [
    (Signal.TRACES, TRACES_TEXT),
    (Signal.LOGS, LOGS_TEXT),
    (Signal.METRICS, METRICS_TEXT),
]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**64, 10**30, 1e308, math.nan, -math.inf, "", "a", "NaN"),
    *("\ud800", "0" * 32, "AA==", "SPAN_KIND_SERVER", [], {}, [None], [[]], [{}], {"a": 1}),
    *({"values": []}, {"stringValue": "a"}, {"intValue": 1, "boolValue": True}),
    nested_lists(40),
    nested_maps(40),
]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    """Every container with every key or index in it."""
    members = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, member in members:
        yield tree, key
        if isinstance(member, dict | list):
            yield from places(member)


def with_odd_values(text: str, rng: random.Random) -> bytes:
    tree = json.loads(text)
    for container, key in rng.sample(list(places(tree)), rng.randint(1, 2)):
        container[key] = rng.choice(ODD)
    return json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")


def with_odd_bytes(text: str, rng: random.Random) -> bytes:
    damaged = bytearray(text.encode())
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(damaged))
        match rng.randrange(4):
            case 0:
                damaged[at] = rng.randrange(256)
            case 1:
                damaged[at : at + rng.randint(1, 20)] = b""
            case 2:
                damaged[at:at] = rng.choice((b'"', b"{", b"]", b",", b"\\u", b"1e", b"-", b"null"))
            case _:
                damaged[at : at + 1] = rng.choice(b'"{}[]:,0').to_bytes()
    return bytes(damaged)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_damaged_text_is_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        signal, text = rng.choice(TEXTS)
        damaged = rng.choice((with_odd_values, with_odd_bytes))(text, rng)
        try:
            request = from_json(signal, damaged)
        except InvalidRequest as error:
            assert len(str(error)) < 400  # noqa: PT017 - or it is read
        else:
            assert from_json(signal, to_json(signal, request)) == request
