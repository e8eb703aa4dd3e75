"""Each rule of a request: kept at its edge, broken one step further, and said where."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from otlp_wire import (
    attribute,
    breaks_a_rule,
    expected,
    item,
    lists,
    maps,
    number,
    parsed,
    part,
    span,
    varint,
)

from quiver.bundle import Signal
from quiver.config import OtlpConfig
from quiver.otlp import wire
from quiver.otlp.checks import check_requests
from quiver.otlp.messages import REQUEST_TYPES, request_type
from quiver.otlp.nested import several_set
from quiver.otlp.wire import read_requests
from quiver.testing.telemetry import Shape, Telemetry

TRACES, LOGS, METRICS = Signal.TRACES, Signal.LOGS, Signal.METRICS
LIMITS = OtlpConfig()
KINDS = ("gauge", "sum", "histogram", "exponential_histogram", "summary")


@pytest.fixture(params=["small", "large"], autouse=True)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "large":
        monkeypatch.setattr(wire, "SMALL", -1)
    return str(request.param)


def telemetry(signal: Signal) -> Any:  # noqa: ANN401
    """A message with two of everything."""
    message: Any = REQUEST_TYPES[signal]()
    for _ in range(2):
        above = getattr(message, f"resource_{_scope(signal)}").add()
        for _ in range(2):
            scope = getattr(above, f"scope_{_scope(signal)}").add()
            for _ in range(2):
                _fill(signal, scope)
    return message


def _scope(signal: Signal) -> str:
    return "spans" if signal is TRACES else str(signal.value)


def _fill(signal: Signal, scope: Any) -> None:  # noqa: ANN401
    if signal is TRACES:
        one = scope.spans.add(trace_id=b"t" * 16, span_id=b"s" * 8)
        for _ in range(2):
            one.links.add(trace_id=b"t" * 16, span_id=b"s" * 8)
            one.events.add()
            one.attributes.add(key="k", value=AnyValue(int_value=1))
    elif signal is LOGS:
        scope.log_records.add()
    else:
        for kind in KINDS:
            points = getattr(scope.metrics.add(name=kind), kind).data_points
            for _ in range(2):
                point = points.add()
                if kind != "summary":
                    point.exemplars.add()
                    point.exemplars.add()


def read(signal: Signal, request: bytes, limits: OtlpConfig = LIMITS) -> str | None:
    """Where the request breaks a rule; those before and after it are taken."""
    good = telemetry(signal).SerializeToString()
    result = read_requests(signal, [good, good, request, good], limits)
    others = [index for index in result.requests.tolist() if index != 2]
    assert others == [0, 1, 3]
    message = parsed(signal, request)
    assert message is not None
    assert bool(result.failures) == breaks_a_rule(message, limits)
    if not result.failures:
        return None
    assert result.batch.equals(expected(signal, good, good, good))
    (failure,) = result.failures
    assert failure.request == 2
    assert str(failure).startswith("request 2: ")
    return failure.where


def at(message: Any, path: str) -> Any:  # noqa: ANN401
    """The object at a path without its last name."""
    for step in path.split(".")[:-1]:
        name, _, index = step.partition("[")
        message = getattr(message, name)
        if index:
            message = message[int(index[:-1])]
    return message


SPAN = "resource_spans[1].scope_spans[0].spans[1]"
RECORD = "resource_logs[1].scope_logs[1].log_records[0]"
METRIC = "resource_metrics[0].scope_metrics[1].metrics"
EXEMPLARS = [
    f"{METRIC}[{i}].{kind}.data_points[1].exemplars[1]" for i, kind in enumerate(KINDS[:4])
]


@pytest.mark.parametrize(
    ("signal", "path", "allowed", "wrong"),
    [
        *(
            (TRACES, f"{at_}.trace_id", (16,), (0, 1, 8, 15, 17, 32))
            for at_ in (SPAN, f"{SPAN}.links[1]")
        ),
        *((TRACES, f"{at_}.span_id", (8,), (0, 1, 7, 9, 16)) for at_ in (SPAN, f"{SPAN}.links[1]")),
        (TRACES, f"{SPAN}.parent_span_id", (0, 8), (1, 7, 9, 16)),
        *((LOGS, f"{at_}.trace_id", (0, 16), (1, 8, 15, 17, 32)) for at_ in (RECORD,)),
        *((LOGS, f"{at_}.span_id", (0, 8), (1, 7, 9, 16)) for at_ in (RECORD,)),
        *((METRICS, f"{at_}.trace_id", (0, 16), (1, 8, 15, 17, 32)) for at_ in EXEMPLARS),
        *((METRICS, f"{at_}.span_id", (0, 8), (1, 7, 9, 16)) for at_ in EXEMPLARS),
    ],
)
def test_ids(signal: Signal, path: str, allowed: tuple[int, ...], wrong: tuple[int, ...]) -> None:
    for sizes, where in ((allowed, None), (wrong, path)):
        for size in sizes:
            message = telemetry(signal)
            setattr(at(message, path), path.rpartition(".")[2], bytes(size))
            assert read(signal, message.SerializeToString()) == where, size


TIMES = ("start_time_unix_nano", "time_unix_nano")
POINTS = [f"{METRIC}[{i}].{kind}.data_points[1]" for i, kind in enumerate(KINDS)]


@pytest.mark.parametrize(
    ("signal", "path"),
    [
        (TRACES, f"{SPAN}.start_time_unix_nano"),
        (TRACES, f"{SPAN}.end_time_unix_nano"),
        (TRACES, f"{SPAN}.events[1].time_unix_nano"),
        (LOGS, f"{RECORD}.time_unix_nano"),
        (LOGS, f"{RECORD}.observed_time_unix_nano"),
        *((METRICS, f"{point}.{name}") for point in POINTS for name in TIMES),
        *((METRICS, f"{point}.count") for point in POINTS[2:]),
        *((METRICS, f"{exemplar}.time_unix_nano") for exemplar in EXEMPLARS),
        (METRICS, f"{POINTS[3]}.zero_count"),
    ],
)
def test_times_and_counts(signal: Signal, path: str) -> None:
    for value, where in ((2**63 - 1, None), (2**63, path), (2**64 - 1, path)):
        message = telemetry(signal)
        setattr(at(message, path), path.rpartition(".")[2], value)
        assert read(signal, message.SerializeToString()) == where


@pytest.mark.parametrize(
    "path",
    [
        f"{POINTS[2]}.bucket_counts",
        f"{POINTS[3]}.positive.bucket_counts",
        f"{POINTS[3]}.negative.bucket_counts",
    ],
)
def test_bucket_counts(path: str) -> None:
    for value, where in ((2**63 - 1, None), (2**63, f"{path}[2]")):
        message = telemetry(METRICS)
        at(message, path).bucket_counts.extend([1, 2, value, 4])
        assert read(METRICS, message.SerializeToString()) == where


# --- counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signal", "items"), [(TRACES, 8), (LOGS, 8), (METRICS, 80)])
def test_items(signal: Signal, items: int) -> None:
    request = telemetry(signal).SerializeToString()
    limits = OtlpConfig(max_items=items)
    assert not read_requests(signal, [request] * 3, limits).failures
    more = telemetry(signal)
    _fill(signal, getattr(at(more, f"resource_{_scope(signal)}[0]."), f"scope_{_scope(signal)}")[1])
    assert read(signal, more.SerializeToString(), limits) == ""
    result = read_requests(signal, [request], OtlpConfig(max_items=items - 1))
    assert f"{items} spans, log records or data points" in result.failures[0].reason


ATTRIBUTES = [
    (TRACES, "resource_spans[1].resource.attributes"),
    (TRACES, "resource_spans[0].scope_spans[1].scope.attributes"),
    (TRACES, f"{SPAN}.attributes"),
    (TRACES, f"{SPAN}.events[1].attributes"),
    (TRACES, f"{SPAN}.links[1].attributes"),
    (LOGS, f"{RECORD}.attributes"),
    *((METRICS, f"{point}.attributes") for point in POINTS),
    *((METRICS, f"{exemplar}.filtered_attributes") for exemplar in EXEMPLARS),
    (METRICS, f"{METRIC}[3].metadata"),
]


@pytest.mark.parametrize(("signal", "path"), ATTRIBUTES)
def test_attributes(signal: Signal, path: str) -> None:
    limits = OtlpConfig(max_attributes=5)
    for count, where in ((5, None), (6, path)):
        message = telemetry(signal)
        owned = getattr(at(message, path), path.rpartition(".")[2])
        del owned[:]
        owned.extend([KeyValue(key="k")] * count)
        assert read(signal, message.SerializeToString(), limits) == where


def test_keys_of_a_map_are_not_attributes() -> None:
    inside = part(1, part(1, b"k"), part(2, number(3, 1))) * 20
    assert read(TRACES, attribute(part(6, inside)), OtlpConfig(max_attributes=5)) is None


# --- lists and maps ----------------------------------------------------------------------------


def deep(kind: str, depth: int) -> AnyValue:
    return AnyValue.FromString(lists(depth) if kind == "list" else maps(depth))


def deep_path(kind: str, depth: int) -> str:
    step = ".array_value.values[0]" if kind == "list" else ".kvlist_value.values[0].value"
    return step * (depth - 1) + (".array_value" if kind == "list" else ".kvlist_value")


@pytest.mark.parametrize("kind", ["list", "map"])
@pytest.mark.parametrize(("signal", "path"), ATTRIBUTES)
def test_depth_of_attributes(signal: Signal, path: str, kind: str) -> None:
    limits = OtlpConfig(max_depth=3)
    for depth in (1, 3, 4, 5, 20):
        message = telemetry(signal)
        owned = getattr(at(message, path), path.rpartition(".")[2])
        del owned[:]
        owned.add(key="flat", value=AnyValue(int_value=1))
        owned.add(key="deep", value=deep(kind, depth))
        where = f"{path}[1].value{deep_path(kind, 4)}" if depth > 3 else None
        assert read(signal, message.SerializeToString(), limits) == where, depth


@pytest.mark.parametrize("kind", ["list", "map"])
@pytest.mark.parametrize("max_depth", [0, 1, 2, 29])
def test_depth_of_a_body(kind: str, max_depth: int) -> None:
    limits = OtlpConfig(max_depth=max_depth)
    message = telemetry(LOGS)
    body = at(message, f"{RECORD}.body").body
    if max_depth:
        body.CopyFrom(deep(kind, max_depth))
        assert read(LOGS, message.SerializeToString(), limits) is None
    body.CopyFrom(deep(kind, max_depth + 1))
    where = f"{RECORD}.body{deep_path(kind, max_depth + 1)}"
    assert read(LOGS, message.SerializeToString(), limits) == where


def test_lists_of_maps_of_lists() -> None:
    value = lists(1)
    for level in range(6):
        inside = part(1, value) if level % 2 else part(1, part(1, b"k"), part(2, value))
        value = part(5 if level % 2 else 6, part(1), inside)
    assert read(TRACES, attribute(value), OtlpConfig(max_depth=7)) is None
    where = read(TRACES, attribute(value), OtlpConfig(max_depth=3))
    assert where is not None
    assert where.endswith(
        ".attributes[0].value.array_value.values[1].kvlist_value.values[1].value"
        ".array_value.values[1].kvlist_value"
    )


@pytest.mark.parametrize(
    ("value", "inside"),
    [
        (part(5, b"\xff"), "array_value"),
        (part(6, b"\xff"), "kvlist_value"),
        (part(5, part(1), part(1, part(1, b"\xff"))), "array_value"),
        (
            part(5, part(1), part(1, part(6, part(1, part(1, b"\xff"))))),
            "array_value.values[1].kvlist_value",
        ),
        (part(5, b"\x0a" + varint(2**64 - 1)), "array_value"),
    ],
)
def test_values_that_are_no_messages(value: bytes, inside: str, route: str) -> None:
    good = attribute(lists(2), number(3, 1)), attribute(lists(3)), attribute(maps(3))
    bad = span(part(9, part(1, b"k")), part(9, part(1, b"k"), part(2, value)))
    result = read_requests(TRACES, [*good, bad, *good, bad])
    assert result.requests.tolist() == [0, 1, 2, 4, 5, 6]
    assert result.batch.equals(expected(TRACES, *good, *good))
    assert [failure.request for failure in result.failures] == [3, 7]
    path = f"resource_spans[0].scope_spans[0].spans[0].attributes[1].value.{inside}"
    for failure in result.failures:
        assert failure.where == path if route == "large" else failure.where.startswith("byte ")


def test_values_next_to_some_that_are_no_messages() -> None:
    """Those that cannot be decoded are left out; the others keep their place."""
    bad, too_deep = attribute(part(5, b"\xff")), attribute(lists(3))
    requests = [attribute(lists(2)), bad, too_deep, bad, attribute(lists(1)), too_deep]
    result = read_requests(TRACES, requests, OtlpConfig(max_depth=2))
    assert result.requests.tolist() == [0, 4]
    assert [failure.request for failure in result.failures] == [1, 2, 3, 5]
    reasons = ["inside each other" in failure.reason for failure in result.failures]
    assert reasons == [False, True, False, True]


def test_entities_that_are_no_messages(route: str) -> None:
    good = part(1, part(1, part(3, part(1, b"url"))))
    bad = part(1, part(1, part(3, part(1, b"url")), part(3, part(1, b"\xff"))))
    result = read_requests(LOGS, [good, bad, good])
    assert result.requests.tolist() == [0, 2]
    (failure,) = result.failures
    where = "resource_logs[0].resource.entity_refs[1]" if route == "large" else "byte 15"
    assert failure.where == where


# --- several at once ---------------------------------------------------------------------------


def test_each_request_has_its_own_failure() -> None:
    requests = [
        item(part(9, b"short")),
        item(),
        item(part(9, b"trace"), part(10, b"span")),
        item(part(5, lists(3))),
        item(part(5, part(1, b"text"))),
        item() + item(part(10, b"id")),
    ]
    result = read_requests(LOGS, requests, OtlpConfig(max_depth=2))
    assert result.requests.tolist() == [1, 4]
    assert result.batch.equals(expected(LOGS, requests[1], requests[4]))
    record = "scope_logs[0].log_records[0]"
    assert [(failure.request, failure.where) for failure in result.failures] == [
        (0, f"resource_logs[0].{record}.trace_id"),
        (2, f"resource_logs[0].{record}.trace_id"),
        (3, f"resource_logs[0].{record}.body{deep_path('list', 3)}"),
        (5, f"resource_logs[1].{record}.span_id"),
    ]


def test_a_member_that_does_not_count_is_not_too_deep() -> None:
    """The last one counts; that the one before it was too deep does not matter."""
    request = attribute(lists(5), number(3, 1))
    assert read(TRACES, request, OtlpConfig(max_depth=2)) is None
    request = attribute(number(3, 1), lists(5))
    assert read(TRACES, request, OtlpConfig(max_depth=2)) is not None


def test_a_list_with_two_members_below_another() -> None:
    value = part(5, part(1), part(1, part(5, part(1, part(1, b"a"), number(3, 1)))))
    request = attribute(value)
    result = read_requests(TRACES, [request])
    assert result.batch.equals(expected(TRACES, request))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64, 65])
def test_several_set(rows: int) -> None:
    for twice in range(rows):
        one = [1 if row % 3 == 0 or row == twice else None for row in range(rows)]
        two = [2 if row % 3 == 1 or row == twice else None for row in range(rows)]
        arrays: list[Any] = [pa.array(values, pa.int64()) for values in (one, two)]
        none = pa.nulls(rows, pa.int64())
        found = several_set([none, *arrays])
        assert found is not None
        assert found.tolist() == [twice]
        sliced = several_set([array.slice(twice) for array in arrays])
        assert sliced is not None
        assert sliced.tolist() == [0]
        assert several_set([none, arrays[0], none]) is None
        three = pa.array([None if value else 1 for value in one], pa.int64())
        assert several_set([arrays[0], three]) is None


def test_bits_behind_the_last_row_do_not_count() -> None:
    buffers: list[pa.Buffer | None] = [
        pa.py_buffer(bytes([0b11111101])),
        pa.py_buffer(bytes(8 * 3)),
    ]
    one = pa.Array.from_buffers(pa.int64(), 3, buffers, null_count=1)
    assert several_set([one, pa.array([None, 1, None], pa.int64())]) is None


@pytest.mark.parametrize("signal", list(Signal))
def test_telemetry_keeps_the_rules(signal: Signal) -> None:
    requests = Telemetry(3, Shape(items_per_request=300)).take(signal, 2)
    batch = request_type(signal).converter.list_to_record_batch(requests)
    findings = check_requests(signal, batch, LIMITS)
    assert findings.failures == {}
    assert findings.ambiguous == set()
