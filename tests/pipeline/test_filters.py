"""The filter, compared with loops over the SDK's messages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest
from google.protobuf.message import Message
from hypothesis import assume, given, settings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from otlp_loops import SIGNALS, Destination, Row, keep_only, parse, sample, walk, with_ids
from otlp_messages import messages, serialised

from quiver import Signal
from quiver.errors import InvalidConfig, TryLater
from quiver.metrics import Metrics
from quiver.otlp.convert import decode, from_otap, to_otap
from quiver.pipeline.item import Item
from quiver.pipeline.node import Port
from quiver.pipeline.processors.filter import FilterProcessor
from quiver.pipeline.settings.options import Condition, FilterOptions

NONSENSE = b"\xff not protobuf"


def filtered(
    item: Item,
    *,
    drop: tuple[Condition, ...] = (),
    keep: tuple[Condition, ...] = (),
    metrics: Metrics | None = None,
) -> Item | None:
    destination = Destination()
    options = FilterOptions(drop=drop, keep=keep)
    node = FilterProcessor("f", options, Port([destination]), metrics=metrics)
    asyncio.run(node.take(item))
    return destination.got[0] if destination.got else None


def agree(item: Item, got: Item | None, keep: Callable[[Row], bool]) -> int:
    """What came out is what loops make of it; the number of requests that are as they were."""
    left: list[tuple[bytes, Message | None]] = []
    for request in item.requests:
        if all(map(keep, walk(item.signal, parse(item.signal, request)))):
            left.append((request, None))
        elif (message := keep_only(item.signal, request, keep)) is not None:
            left.append((request, message))
    requests = got.requests if got else ()
    assert len(requests) == len(left)
    same = 0
    for made, (request, message) in zip(requests, left, strict=True):
        if message is None:
            assert made == request
            same += 1
        else:
            assert parse(item.signal, made) == message
    if got is not None and item.count is not None:
        rows = sum(1 for made in requests for _ in walk(item.signal, parse(item.signal, made)))
        assert got.count == rows
        assert got.context == item.context
    return same


# --- the filter -----------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("verb", ["drop", "keep"])
def test_by_an_attribute(signal: Signal, verb: str) -> None:
    item = sample(signal)
    keys = [
        pair.key
        for request in item.requests
        for row in walk(signal, parse(signal, request))
        for pair in row.item.attributes
    ]
    for key in sorted(set(keys))[:8]:
        conditions = (Condition(attribute=key),)
        got = filtered(
            item,
            drop=conditions if verb == "drop" else (),
            keep=conditions if verb == "keep" else (),
        )

        def keep(row: Row, key: str = key) -> bool:
            return (row.attribute("item", key) is not None) == (verb == "keep")

        agree(item, got, keep)


@pytest.mark.parametrize("signal", SIGNALS)
def test_by_the_resource(signal: Signal) -> None:
    item = sample(signal)
    row = next(walk(signal, parse(signal, item.requests[0])))
    name = row.attribute("resource", "service.name")
    assert name is not None
    wanted = name.string_value
    condition = Condition(attribute="service.name", on="resource", equals=(wanted, "other"))
    got = filtered(item, drop=(condition,))
    agree(item, got, lambda row: row.attribute("resource", "service.name") != name)
    assert got is not None
    assert wanted.encode() in b"".join(item.requests)
    assert wanted.encode() not in b"".join(
        row.attribute("resource", "service.name").SerializeToString()  # type: ignore[union-attr]
        for request in got.requests
        for row in walk(signal, parse(signal, request))
    )


@pytest.mark.parametrize(
    ("text", "number"), [("server", 2), ("SPAN_KIND_SERVER", 2), ("2", 2), ("Client", 3)]
)
def test_by_the_kind_of_a_span(text: str, number: int) -> None:
    item = sample(Signal.TRACES)
    got = filtered(item, keep=(Condition(field="kind", equals=(text,)),))
    agree(item, got, lambda row: row.item.kind == number)
    assert got is not None


def test_by_status_name_and_severity() -> None:
    spans, records, points = map(sample, SIGNALS)
    failed = Condition(field="status_code", equals=("error",))
    agree(spans, filtered(spans, keep=(failed,)), lambda row: row.item.status.code == 2)
    named = Condition(field="name", matches="[aeiou]{2}|^GET")
    for item in (spans, points):
        agree(
            item,
            filtered(item, drop=(named,)),
            lambda row: not re.search("[aeiou]{2}|^GET", row.metric.name),
        )
    loud = Condition(field="severity_number", equals=("warn", "error", "18"))
    got = filtered(records, keep=(loud,))
    agree(records, got, lambda row: row.item.severity_number in {13, 17, 18})
    # A field that a signal does not have does not exist there.
    assert filtered(records, drop=(failed,)) == records
    assert filtered(records, keep=(failed,)) is None


def test_keep_and_drop_together() -> None:
    item = sample(Signal.TRACES)
    kinds = (Condition(field="kind", equals=("server",)), Condition(field="kind", equals=("3",)))
    failed = Condition(field="status_code", equals=("error",))
    got = filtered(item, keep=kinds, drop=(failed,))
    agree(item, got, lambda row: row.item.kind in {2, 3} and row.item.status.code != 2)


VALUES = {
    "text": AnyValue(string_value="five"),
    "int": AnyValue(int_value=5),
    "double": AnyValue(double_value=5.0),
    "bool": AnyValue(bool_value=True),
    "bytes": AnyValue(bytes_value=b"5"),
    "list": AnyValue(array_value={"values": [AnyValue(int_value=5)]}),  # type: ignore[arg-type]
    "empty": AnyValue(),
}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (Condition(attribute="k", equals=("five",)), {"text"}),
        (Condition(attribute="k", equals=("5",)), {"int", "double"}),
        (Condition(attribute="k", equals=("5.0",)), {"double"}),
        (Condition(attribute="k", equals=("true", "nothing")), {"bool"}),
        (Condition(attribute="k", matches="^f|5"), {"text", "int", "double"}),
        (Condition(attribute="k", equals=("five",), matches="^x"), set()),
        (Condition(attribute="k"), set(VALUES)),
        (Condition(attribute="k", exists=True), set(VALUES)),
        (Condition(attribute="k", exists=False), {"none"}),
        (Condition(attribute="k", on="scope"), set()),
    ],
)
def test_values_of_all_types(condition: Condition, expected: set[str]) -> None:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for name, value in VALUES.items():
        pairs = [KeyValue(key="other"), KeyValue(key="k", value=value), KeyValue(key="k")]
        spans.add(name=name, attributes=pairs, trace_id=b"t" * 16, span_id=b"s" * 8)
    spans.add(name="none", attributes=[KeyValue(key="other")], trace_id=b"t" * 16, span_id=b"s" * 8)
    item = Item(signal=Signal.TRACES, requests=(request.SerializeToString(),))
    got = filtered(item, keep=(condition,))
    names = {
        row.item.name
        for each in (got.requests if got else ())
        for row in walk(Signal.TRACES, parse(Signal.TRACES, each))
    }
    assert names == expected


def test_what_nothing_is_left_of_is_acknowledged_and_counted() -> None:
    metrics = Metrics()
    item = sample(Signal.LOGS)
    everything = Condition(attribute="no such key", exists=False)
    assert filtered(item, metrics=metrics, drop=(everything,)) is None
    assert metrics.get("quiver.filter.emptied_total", node="f") == 1
    assert metrics.get("quiver.filter.dropped_total", node="f") == item.count


def test_what_cannot_be_read_goes_on() -> None:
    metrics = Metrics()
    good = sample(Signal.TRACES, 2).requests
    item = Item(signal=Signal.TRACES, requests=(good[0], NONSENSE, good[1], b""))
    got = filtered(item, metrics=metrics, drop=(Condition(field="kind", equals=("server",)),))
    assert got is not None
    assert (len(got.requests), got.requests[1], got.requests[3]) == (4, NONSENSE, b"")
    assert metrics.get("quiver.filter.unreadable_total", node="f") == 1


@pytest.mark.parametrize("signal", SIGNALS)
def test_tables_are_filtered_too(signal: Signal) -> None:
    (tables,) = to_otap(signal, sample(signal, 1).requests).batches
    item = Item(signal=signal, tables=tables)
    none = Condition(attribute="no such key")
    assert filtered(item, drop=(none,)) is item
    some = Condition(field="name", matches="a|e")
    if signal is Signal.LOGS:
        some = Condition(field="severity_number", equals=("info",))
    as_requests = Item(signal=signal, requests=(from_otap(signal, tables),))
    assert filtered(item, drop=(some,)) == filtered(as_requests, drop=(some,))


def test_a_refusal_travels_back() -> None:
    destination = Destination(error=TryLater("not now"))
    port = Port([destination])
    drop = (Condition(attribute="x"),)
    for node in (
        FilterProcessor("f", FilterOptions(drop=drop), port),
        FilterProcessor("f", FilterOptions(), port),
    ):
        with pytest.raises(TryLater):
            asyncio.run(node.take(sample(Signal.TRACES, 1)))


@pytest.mark.parametrize("signal", SIGNALS)
def test_any_message(signal: Signal) -> None:
    """Whatever a request has besides, it keeps."""
    condition = Condition(attribute="a", exists=True)

    @settings(max_examples=40)
    @given(message=messages(signal))
    def holds(message: Message) -> None:
        item = Item(signal=signal, requests=(serialised(with_ids(signal, message)),))
        assume(not decode(signal, item.requests).failures)
        got = filtered(item, drop=(condition,))
        agree(item, got, lambda row: row.attribute("item", "a") is None)

    holds()


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (Condition(), "attribute or field"),
        (Condition(attribute="a", field="name"), "attribute or field"),
        (Condition(attribute="a", on="link"), "link"),
        (Condition(field="colour"), "colour"),
        (Condition(field="name", on="resource"), "fields are those of items"),
        (Condition(attribute="a", matches="("), "regular expression"),
        (Condition(attribute="a", exists=False, equals=("x",)), "exists: false"),
    ],
)
def test_conditions_that_cannot_be(condition: Condition, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(reason)) as caught:
        FilterProcessor("f", FilterOptions(drop=(condition,)), Port([]))
    assert str(caught.value).startswith("f: ")
