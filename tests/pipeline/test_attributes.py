"""The attributes processor, compared with loops over the SDK's messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest
from blake3 import blake3
from google.protobuf.message import Message
from hypothesis import assume, given, settings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from otlp_loops import SIGNALS, Destination, Row, parse, sample, walk, with_ids
from otlp_messages import messages, serialised

from quiver import Signal
from quiver.errors import InvalidConfig, TryLater
from quiver.metrics import Metrics
from quiver.otlp.convert import decode, from_otap, to_otap
from quiver.pipeline.item import Item
from quiver.pipeline.node import Port
from quiver.pipeline.processors.attributes import AttributesProcessor
from quiver.pipeline.settings.options import (
    AttributeAction,
    AttributeRule,
    AttributesOptions,
    Condition,
)

NONSENSE = b"\xff not protobuf"
ON = ["item", "resource", "scope"]


def changed(item: Item, *rules: AttributeRule, metrics: Metrics | None = None) -> Item:
    destination = Destination()
    options = AttributesOptions(rules=rules)
    node = AttributesProcessor("a", options, Port([destination]), metrics=metrics)
    asyncio.run(node.take(item))
    (got,) = destination.got
    return got


def rule(action: str, *keys: str, **rest: Any) -> AttributeRule:  # noqa: ANN401 - any option
    return AttributeRule(action=AttributeAction(action), keys=keys, **rest)


# --- the same with loops --------------------------------------------------------------------------


def text_of(value: AnyValue) -> bytes | None:
    """What is hashed."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    inner = getattr(value, kind)
    if kind == "bool_value":
        return b"true" if inner else b"false"
    if kind in {"array_value", "kvlist_value"}:
        return bytes(inner.SerializeToString(deterministic=True))
    if kind == "double_value":
        return bytes(pa.scalar(inner).cast(pa.string()).as_py(), "ascii")
    return inner if kind == "bytes_value" else str(inner).encode()


def apply(pairs: list[KeyValue], rule: AttributeRule) -> list[KeyValue]:
    if rule.action is AttributeAction.DROP:
        return [pair for pair in pairs if pair.key not in rule.keys]
    if rule.action is AttributeAction.KEEP:
        return [pair for pair in pairs if pair.key in rule.keys]
    if rule.action is AttributeAction.HASH:
        return [hashed(pair) if pair.key in rule.keys else pair for pair in pairs]
    for key in rule.keys:
        member = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
        new = AnyValue(**{member[type(rule.value)]: rule.value})  # type: ignore[arg-type]
        places = [place for place, pair in enumerate(pairs) if pair.key == key]
        made = KeyValue(key=key, value=new)
        if places:
            pairs = [
                made if place == places[0] else pair
                for place, pair in enumerate(pairs)
                if place not in places[1:]
            ]
        else:
            pairs = [*pairs, made]
    return pairs


def hashed(pair: KeyValue) -> KeyValue:
    data = text_of(pair.value) if pair.HasField("value") else None
    if data is None:
        return pair
    return KeyValue(key=pair.key, value=AnyValue(string_value=blake3(data).hexdigest()))


def with_loops(
    signal: Signal, request: bytes, rule: AttributeRule, where: Callable[[Row], bool]
) -> Message:
    message: Message = parse(signal, request)
    owners: dict[int, Any] = {}
    for row in walk(signal, message):
        if where(row):
            owner = getattr(row, rule.on)
            owners[id(owner)] = owner
    for owner in owners.values():
        pairs = [KeyValue.FromString(pair.SerializeToString()) for pair in owner.attributes]
        made = apply(pairs, rule)
        if made != pairs:  # what is not there is not made by looking at it
            del owner.attributes[:]
            owner.attributes.extend(made)
    return message


def agree(
    item: Item, got: Item, rule: AttributeRule, where: Callable[[Row], bool] = lambda _: True
) -> None:
    assert len(got.requests) == len(item.requests)
    for made, request in zip(got.requests, item.requests, strict=True):
        assert parse(item.signal, made) == with_loops(item.signal, request, rule, where)
    assert (got.count, got.context) == (item.count, item.context)


def keys_of(item: Item, on: str) -> list[str]:
    return sorted(
        {
            pair.key
            for request in item.requests
            for row in walk(item.signal, parse(item.signal, request))
            for pair in getattr(row, on).attributes
        }
    )


def rules(keys: Iterable[str], on: str) -> list[AttributeRule]:
    some = (*list(keys)[::2], "no such key")
    return [
        rule("drop", *some, on=on),
        rule("keep", *some, on=on),
        rule("hash", *some, on=on),
        *(rule("set", *some, on=on, value=value) for value in ("x", 5, 2.5, True)),
    ]


# --- the processor --------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("on", ON)
def test_every_action(signal: Signal, on: str) -> None:
    item = sample(signal)
    for each in rules(keys_of(item, on), on):
        agree(item, changed(item, each), each)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("on", ON)
def test_any_message(signal: Signal, on: str) -> None:
    """Whatever a request has besides, it keeps; keys that come twice, values that are missing."""

    @settings(max_examples=12)
    @given(message=messages(signal))
    def holds(message: Message) -> None:
        item = Item(signal=signal, requests=(serialised(with_ids(signal, message)),))
        assume(not decode(signal, item.requests).failures)
        whole = parse(signal, item.requests[0])
        # What has no items has no row, and a request that is written again loses it.
        assume(serialised(whole) == serialised(pruned(signal, whole)))
        for each in rules(["a", "x", *keys_of(item, on)], on):
            agree(item, changed(item, each), each)

    holds()


def pruned(signal: Signal, message: Message) -> Message:
    tables = decode(signal, [serialised(message)])
    assert not tables.failures
    item = Item(signal=signal, requests=(serialised(message),))
    again = changed(item, rule("set", "k", value=1), rule("drop", "k"))
    if again.requests == item.requests:
        return message
    made: Message = parse(signal, again.requests[0])
    return made


VALUES = [
    AnyValue(string_value="five"),
    AnyValue(string_value=""),
    AnyValue(int_value=-5),
    AnyValue(double_value=0.1),
    AnyValue(bool_value=False),
    AnyValue(bytes_value=b"\xff\x00"),
    AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=5)])),
    AnyValue(),
]


def spans(*attributes: list[KeyValue]) -> Item:
    request = ExportTraceServiceRequest()
    home = request.resource_spans.add().scope_spans.add().spans
    for number, pairs in enumerate(attributes):
        home.add(
            name=str(number), attributes=pairs, trace_id=b"t" * 16, span_id=b"%08d" % number, kind=2
        )
    return Item(
        signal=Signal.TRACES, requests=(request.SerializeToString(),), count=len(attributes)
    )


def test_values_of_all_types_are_hashed() -> None:
    item = spans(*([KeyValue(key="o"), KeyValue(key="k", value=value)] for value in VALUES))
    each = rule("hash", "k")
    got = changed(item, each)
    agree(item, got, each)
    rows = list(walk(Signal.TRACES, parse(Signal.TRACES, got.requests[0])))
    sums = [row.item.attributes[1].value.string_value for row in rows]
    assert sums[0] == blake3(b"five").hexdigest()
    assert sums[2] == blake3(b"-5").hexdigest()
    assert [len(each) for each in sums] == [64] * 7 + [0]


@pytest.mark.parametrize("action", ["drop", "keep", "hash", "set"])
def test_only_where_conditions_hold(action: str) -> None:
    item = sample(Signal.TRACES)
    keys = keys_of(item, "item")[:3]
    server = Condition(field="kind", equals=("server",))
    fine = Condition(field="status_code", equals=("unset",))
    value = "x" if action == "set" else None
    each = rule(action, *keys, where=(server, fine), value=value)

    def where(row: Row) -> bool:
        return bool(row.item.kind == 2 and row.item.status.code == 0)

    metrics = Metrics()
    got = changed(item, each, metrics=metrics)
    agree(item, got, each, where)
    assert 0 < metrics.get("quiver.attributes.changed_total", node="a") < (item.count or 0)


def test_rules_apply_in_order() -> None:
    item = spans([KeyValue(key="user", value=AnyValue(string_value="ann"))], [])
    got = changed(
        item,
        rule("set", "kind of user", value="known", where=(Condition(attribute="user"),)),
        rule("hash", "user"),
        rule("keep", "user", "kind of user"),
        rule("set", "seen", value=True, where=(Condition(attribute="kind of user"),)),
    )
    first, second = walk(Signal.TRACES, parse(Signal.TRACES, got.requests[0]))
    assert [pair.key for pair in first.item.attributes] == ["user", "kind of user", "seen"]
    assert first.item.attributes[0].value.string_value == blake3(b"ann").hexdigest()
    assert not second.item.attributes


def test_what_is_not_changed_goes_on_as_it_came() -> None:
    item = sample(Signal.TRACES)
    assert changed(item, rule("drop", "no such key"), rule("hash", "neither")) is item
    assert changed(item) is item
    first = parse(Signal.TRACES, item.requests[0])
    name = next(walk(Signal.TRACES, first)).item.name
    one = Condition(field="name", equals=(name,))
    odd = Item(signal=Signal.TRACES, requests=(NONSENSE, *item.requests))
    metrics = Metrics()
    got = changed(odd, rule("set", "k", value=1, where=(one,)), metrics=metrics)
    for made, request in zip(got.requests, odd.requests, strict=True):
        has = request != NONSENSE and any(
            row.item.name == name for row in walk(Signal.TRACES, parse(Signal.TRACES, request))
        )
        assert (made == request) != has
    assert metrics.get("quiver.attributes.unreadable_total", node="a") == 1


@pytest.mark.parametrize("signal", SIGNALS)
def test_tables_are_changed_too(signal: Signal) -> None:
    (tables,) = to_otap(signal, sample(signal, 1).requests).batches
    item = Item(signal=signal, tables=tables)
    assert changed(item, rule("drop", "no such key")) is item
    as_requests = Item(signal=signal, requests=(from_otap(signal, tables),))
    each = rule("set", "k", value="v", on="resource")
    assert changed(item, each) == changed(as_requests, each)


def test_a_refusal_travels_back() -> None:
    port = Port([Destination(error=TryLater("not now"))])
    for each in ((rule("drop", "x"),), ()):
        node = AttributesProcessor("a", AttributesOptions(rules=each), port)
        with pytest.raises(TryLater):
            asyncio.run(node.take(sample(Signal.TRACES, 1)))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (rule("drop"), "no keys"),
        (rule("set", "k"), "needs a value"),
        (rule("drop", "k", value=1), "needs a value"),
        (rule("set", "k", value=2**63), "64 bits"),
        (rule("drop", "k", on="link"), "link"),
        (rule("drop", "k", where=(Condition(),)), "attribute or field"),
        (rule("drop", "k", on="resource", where=(Condition(field="kind"),)), "many items"),
        (
            rule("drop", "k", on="resource", where=(Condition(attribute="k", on="scope"),)),
            "many items",
        ),
    ],
)
def test_rules_that_cannot_be(bad: AttributeRule, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        AttributesProcessor("a", AttributesOptions(rules=(bad,)), Port([]))
