"""Request batches as rows of the lake, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from otlp_messages import messages, requests, serialised

from quiver.bundle import Signal
from quiver.config import AttributeLevel, AttributeType, PromotedAttribute
from quiver.errors import InvalidConfig, InvalidRequest
from quiver.otlp import context
from quiver.otlp.flat import Source, from_flat, lake_schema, to_flat
from quiver.otlp.messages import REQUEST_TYPES, request_type
from quiver.otlp.plain import plain_rows
from quiver.otlp.schema import ATTRIBUTES, VALUE
from quiver.testing.telemetry import Shape, Telemetry

SIGNALS = list(Signal)
Column: TypeAlias = Any  # of Arrow: the stubs take every value for null
Loose: TypeAlias = Any  # messages and their values, made at run time
QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
PROMOTED = (
    PromotedAttribute(key="name", column="item_name"),
    PromotedAttribute(key="a", column="item_a", type=AttributeType.INT),
    PromotedAttribute(key="", column="item_nothing", type=AttributeType.BOOL),
    PromotedAttribute(
        key="a", column="resource_a", type=AttributeType.DOUBLE, level=AttributeLevel.RESOURCE
    ),
    PromotedAttribute(
        key="GET", column="scope_get", type=AttributeType.BYTES, level=AttributeLevel.SCOPE
    ),
)


def decoded(signal: Signal, request_bytes: list[bytes]) -> pa.RecordBatch:
    return request_type(signal).converter.list_to_record_batch(request_bytes)


def encoded(signal: Signal, batch: pa.RecordBatch) -> list[bytes]:
    array = request_type(signal).converter.record_batch_to_array(batch)
    return [one.as_py() for one in array]


def numbered(batch: pa.RecordBatch) -> NDArray[np.int32]:
    return np.arange(batch.num_rows, dtype=np.int32)


def flat(
    signal: Signal,
    request_bytes: list[bytes],
    promoted: Sequence[PromotedAttribute] = (),
    sources: list[Source] | None = None,
) -> tuple[pa.RecordBatch, Column]:
    batch = decoded(signal, request_bytes)
    table, request_of_row = to_flat(signal, batch, numbered(batch), promoted, sources)
    table.validate(full=True)
    return table, request_of_row


def within_63_bits(message: Message) -> Message:
    """What is above was refused before."""
    for declared, value in message.ListFields():
        if declared.message_type is not None:
            for one in value if declared.is_repeated else [value]:
                within_63_bits(one)
        elif declared.cpp_type == declared.CPPTYPE_UINT64:
            if declared.is_repeated:
                value[:] = [one % 2**63 for one in value]
            else:
                setattr(message, declared.name, value % 2**63)
    return message


def pruned(signal: Signal, request: bytes) -> bytes:
    """Without resources, scopes and metrics that hold nothing."""
    message: Any = REQUEST_TYPES[signal].FromString(request)
    levels = {
        Signal.TRACES: ("resource_spans", "scope_spans", "spans"),
        Signal.LOGS: ("resource_logs", "scope_logs", "log_records"),
        Signal.METRICS: ("resource_metrics", "scope_metrics", "metrics"),
    }
    _prune(message, levels[signal])
    return serialised(message)


def _prune(message: Loose, names: tuple[str, ...]) -> bool:
    """Whether anything is left."""
    if not names:
        if message.DESCRIPTOR.name != "Metric":
            return True
        kind = message.WhichOneof("data")
        return kind is not None and bool(getattr(message, kind).data_points)
    held = getattr(message, names[0])
    kept = [one for one in held if _prune(one, names[1:])]
    copies = [type(one).FromString(one.SerializeToString()) for one in kept]
    del held[:]
    held.extend(copies)
    return bool(copies)


def sample(signal: Signal, count: int = 3, items: int = 40, seed: int = 5) -> list[bytes]:
    return Telemetry(seed, Shape(items_per_request=items)).take(signal, count)


def assert_rows(signal: Signal, drawn: list[bytes]) -> None:
    table, request_of_row = flat(signal, drawn, promoted=PROMOTED)
    expected = list(plain_rows(signal, drawn, PROMOTED))
    assert request_of_row.to_pylist() == [number for number, _ in expected]
    names = lake_schema(signal, PROMOTED).names
    assert table.schema.names == names
    rows = [{name: row[name] for name in names} for _, row in expected]
    # As text, so that NaN equals NaN.
    for got, wanted in zip(table.to_pylist(), rows, strict=True):
        assert repr(got) == repr(wanted)


@pytest.mark.parametrize("signal", SIGNALS)
@QUICK
@given(st.data())
def test_rows_are_those_of_the_plain_way(signal: Signal, data: st.DataObject) -> None:
    drawn = messages(signal, edgy=True).map(within_63_bits).map(serialised)
    assert_rows(signal, data.draw(st.lists(drawn, max_size=3)))


@pytest.mark.parametrize("signal", SIGNALS)
def test_rows_of_traffic_are_those_of_the_plain_way(signal: Signal) -> None:
    assert_rows(signal, sample(signal))


@pytest.mark.parametrize("signal", SIGNALS)
@QUICK
@given(st.data())
def test_what_was_flat_comes_back_byte_for_byte(signal: Signal, data: st.DataObject) -> None:
    some = requests(signal, edgy=False).map(lambda request: pruned(signal, request))
    drawn = data.draw(st.lists(some, max_size=3))
    table, request_of_row = flat(signal, drawn)
    back = from_flat(signal, table, request_of_row)
    back.validate(full=True)
    assert back.schema.equals(request_type(signal).schema)
    assert encoded(signal, back) == [request for request in drawn if request]


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("sources", [None, [Source("a", 1, 2, row) for row in range(3)]])
def test_traffic_comes_back_byte_for_byte(signal: Signal, sources: list[Source] | None) -> None:
    drawn = sample(signal)
    table, request_of_row = flat(signal, drawn, sources=sources)
    assert encoded(signal, from_flat(signal, table, request_of_row)) == drawn


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize(("start", "count"), [(0, 2), (1, 1), (1, 2), (2, 0)])
def test_a_slice_of_a_batch_is_its_rows_only(signal: Signal, start: int, count: int) -> None:
    drawn = sample(signal)
    batch = decoded(signal, drawn)
    part = batch.slice(start, count)
    table, of_row = to_flat(signal, part, numbered(batch)[start : start + count], PROMOTED)
    table.validate(full=True)
    alone, _ = flat(signal, drawn[start : start + count], promoted=PROMOTED)
    assert table.equals(alone)
    assert set(of_row.to_pylist()) == set(range(start, start + count))
    assert encoded(signal, from_flat(signal, table, of_row)) == drawn[start : start + count]


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_slice_of_a_table_is_its_rows_only(signal: Signal) -> None:
    drawn = sample(signal)
    table, of_row = flat(signal, drawn)
    first = of_row.index(1).as_py()
    rows = of_row.to_pylist().count(1)
    part = from_flat(signal, table.slice(first, rows), of_row.slice(first, rows))
    assert encoded(signal, part) == [drawn[1]]


@pytest.mark.parametrize("signal", SIGNALS)
def test_nothing_is_no_rows_and_no_request(signal: Signal) -> None:
    for drawn in ([], [b""]):
        table, of_row = flat(signal, drawn, promoted=PROMOTED)
        assert (table.num_rows, len(of_row)) == (0, 0)
        assert from_flat(signal, table, of_row).num_rows == 0
        assert from_flat(signal, table).num_rows == 0


@pytest.mark.parametrize("signal", SIGNALS)
def test_rows_tell_where_their_request_is_kept(signal: Signal) -> None:
    drawn = sample(signal)
    sources = [Source("edge", 7, 3, 1), Source("edge", 8, 0, 0), Source("core", 2**40, 5, 2)]
    table, of_row = flat(signal, drawn, sources=sources)
    names = ["source_store", "source_segment", "source_bundle", "source_row"]
    kept = [tuple(row.values()) for row in table.select(names).to_pylist()]
    assert kept == [tuple(sources[number]) for number in of_row.to_pylist()]


@pytest.mark.parametrize("signal", SIGNALS)
def test_requests_come_back_by_ascending_number(signal: Signal) -> None:
    drawn = sample(signal)
    batch = decoded(signal, drawn)
    table, of_row = to_flat(signal, batch, np.array([9, 4, 6], np.int32))
    assert set(of_row.to_pylist()) == {4, 6, 9}
    assert encoded(signal, from_flat(signal, table, of_row)) == [drawn[1], drawn[2], drawn[0]]


def contents(signal: Signal, request_bytes: list[bytes]) -> list[str]:
    """What the items are, wherever they stand."""
    return sorted(
        repr({name: cell for name, cell in row.items() if not name.startswith("source_")})
        for _, row in plain_rows(signal, request_bytes)
    )


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("keep", ["source_item", "source_scope", "source_resource"])
def test_rows_of_a_query_keep_their_resource_and_scope(signal: Signal, keep: str) -> None:
    """Filtered, in another order, with positions or without, of requests not told apart."""
    drawn = sample(signal, count=4, items=12)
    table, _ = flat(signal, drawn)
    positions = [name for name in table.schema.names if name.startswith("source_")]
    dropped = positions[positions.index(keep) + 1 :]
    query = pa.table(table).drop_columns(dropped)
    every_third = query.take(list(range(query.num_rows - 1, -1, -3)))
    expected, _ = flat(signal, drawn)
    wanted = pa.table(expected).take(list(range(query.num_rows - 1, -1, -3)))
    (request,) = encoded(signal, from_flat(signal, every_third))
    wanted_rows = sorted(
        repr({name: cell for name, cell in row.items() if not name.startswith("source_")})
        for row in wanted.select(
            [name for name in wanted.schema.names if not name.startswith("source_")]
        ).to_pylist()
    )
    back, _ = flat(signal, [request])
    got = pa.table(back).select([n for n in back.schema.names if not n.startswith("source_")])
    assert sorted(map(repr, got.to_pylist())) == wanted_rows


def test_rows_without_a_source_do_not_join_the_resource_of_another_request() -> None:
    drawn = sample(Signal.TRACES, count=6, items=3)
    table, _ = flat(Signal.TRACES, drawn)
    (request,) = encoded(Signal.TRACES, from_flat(Signal.TRACES, table))
    assert contents(Signal.TRACES, [request]) == contents(Signal.TRACES, drawn)


@pytest.mark.parametrize("signal", SIGNALS)
def test_columns_in_other_types_and_order_come_back_too(signal: Signal) -> None:
    drawn = sample(signal)
    table, of_row = flat(signal, drawn)
    columns: dict[str, Column] = {"unknown": pa.nulls(table.num_rows)}
    for field in reversed(list(table.schema)):
        column = table.column(field.name)
        if pa.types.is_int32(field.type):
            column = column.cast(pa.int64())
        elif pa.types.is_string(field.type):
            column = column.cast(pa.string_view())
        columns[field.name] = column
    half = table.num_rows // 2
    changed = pa.table(columns)
    chunked = pa.concat_tables([changed.slice(0, half), changed.slice(half)])
    assert encoded(signal, from_flat(signal, chunked, of_row)) == drawn


def small(column: str, value: Loose, signal: Signal = Signal.TRACES) -> pa.Table:
    return pa.table({column: pa.array([value], lake_schema(signal).field(column).type)})


@pytest.mark.parametrize("signal", SIGNALS)
def test_missing_columns_are_what_is_not_sent(signal: Signal) -> None:
    column = ("type", "gauge") if signal is Signal.METRICS else ("attributes", None)
    table = small(column[0], column[1], signal)
    (request,) = encoded(signal, from_flat(signal, table))
    ((_, row),) = plain_rows(signal, [request])
    assert row["attributes"] == []
    assert row["resource_attributes"] is None
    assert row["scope_attributes"] is None
    assert row.get("status_message") is None


def test_a_column_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="column attributes: it does not fit"):
        from_flat(Signal.TRACES, pa.table({"attributes": [1]}))
    twice = pa.table([["x"], ["y"]], names=["name", "name"])
    with pytest.raises(InvalidRequest, match="column name: it is there twice"):
        from_flat(Signal.TRACES, twice)
    with pytest.raises(InvalidRequest, match="column type: a row has none of the types"):
        from_flat(Signal.METRICS, small("name", "x", Signal.METRICS))


def test_numbers_of_requests_that_do_not_fit_are_refused() -> None:
    table = small("name", "x")
    for wrong in (pa.array([1, 2], pa.int32()), pa.array([None], pa.int32())):
        with pytest.raises(InvalidRequest, match="each row needs one"):
            from_flat(Signal.TRACES, table, wrong)
    batch = decoded(Signal.TRACES, [b""])
    with pytest.raises(InvalidRequest, match="each request needs its own"):
        to_flat(Signal.TRACES, batch, np.zeros(2, np.int32))
    with pytest.raises(InvalidRequest, match="each request needs its own"):
        to_flat(Signal.TRACES, batch, np.zeros(1, np.int32), sources=[Source("a", 1, 1, 1)] * 2)
    with pytest.raises(InvalidRequest, match="each request needs its own"):
        to_flat(Signal.TRACES, batch, np.zeros(1, np.int32), sources=[])


def test_hex_digits_are_read_in_any_case() -> None:
    text = "".join(f"{n:02x}" for n in range(256))
    for spelling in (text, text.upper(), text.title()):
        batch = from_flat(Signal.TRACES, small("trace_id", spelling))
        table, _ = to_flat(Signal.TRACES, batch, np.zeros(1, np.int32))
        assert table.column("trace_id").to_pylist() == [text]


@pytest.mark.parametrize("column", ["name", "Scope_Name", "source_item", "service_name", ""])
def test_a_promoted_column_needs_a_name_of_its_own(column: str) -> None:
    with pytest.raises(InvalidConfig, match="cannot have a column"):
        lake_schema(Signal.TRACES, [PromotedAttribute(key="k", column=column)])


def test_promoted_columns_differ_in_more_than_case() -> None:
    twice = [PromotedAttribute(key="k", column=name) for name in ("mine", "Mine")]
    with pytest.raises(InvalidConfig, match="'Mine'"):
        lake_schema(Signal.TRACES, twice)


def test_the_first_of_two_equal_keys_is_promoted_and_both_are_kept() -> None:
    message: Any = REQUEST_TYPES[Signal.TRACES]()
    span = message.resource_spans.add().scope_spans.add().spans.add()
    for text in ("first", "second"):
        span.attributes.add(key="k").value.string_value = text
    promoted = [PromotedAttribute(key="k", column="mine")]
    table, _ = flat(Signal.TRACES, [serialised(message)], promoted=promoted)
    assert table.column("mine").to_pylist() == ["first"]
    pairs: Loose = table.column("attributes")[0].as_py()
    assert [value["string_value"] for _, value in pairs] == ["first", "second"]


def amplifying(part: str, items: int, size: int) -> bytes:
    """A request that says something long once, about many points."""
    message: Loose = REQUEST_TYPES[Signal.METRICS]()
    resource = message.resource_metrics.add()
    scope = resource.scope_metrics.add()
    metric = scope.metrics.add()
    text = "x" * size
    if part == "attributes of a resource":
        resource.resource.attributes.add(key="k").value.string_value = text
    elif part == "entities of a resource":
        resource.resource.entity_refs.add(type=text)
    elif part == "name of a scope":
        scope.scope.name = text
    elif part == "keys of a scope":
        scope.scope.attributes.add(key=text)
    elif part == "description of a metric":
        metric.description = text
    else:
        metric.metadata.add(key="k").value.bytes_value = text.encode()
    for _ in range(items):
        metric.gauge.data_points.add()
    return serialised(message)


PARTS = (
    "attributes of a resource",
    "entities of a resource",
    "name of a scope",
    "keys of a scope",
    "description of a metric",
    "metadata of a metric",
)


@pytest.mark.parametrize("part", PARTS)
def test_what_is_repeated_too_often_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_REPEATED_BYTES", 100_000)
    batch = decoded(Signal.METRICS, [amplifying(part, 1, 9), amplifying(part, 99, 2000)])
    reason = f"what belongs to a {part.rpartition(' ')[2]} takes .* at most 100000 fit: send fewer"
    with pytest.raises(InvalidRequest, match=reason) as refused:
        to_flat(Signal.METRICS, batch, np.array([3, 8], np.int32))
    assert refused.value.request == 8


@pytest.mark.parametrize("part", PARTS)
def test_what_is_long_but_seldom_is_taken(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_REPEATED_BYTES", 100_000)
    table, _ = flat(Signal.METRICS, [amplifying(part, 1, 50_000), amplifying(part, 99, 9)])
    assert table.num_rows == 100


@pytest.mark.parametrize("signal", SIGNALS)
def test_the_types_are_those_that_every_engine_has(signal: Signal) -> None:
    def leaves(type_: Column) -> list[Column]:
        if isinstance(type_, (pa.StructType, pa.ListType, pa.MapType)):
            inner = [type_.field(at).type for at in range(type_.num_fields)]
            return [leaf for one in inner for leaf in leaves(one)]
        return [type_]

    allowed = {"int64", "int32", "string", "binary", "double", "bool", "timestamp[us, tz=UTC]"}
    found = {str(leaf) for field in lake_schema(signal) for leaf in leaves(field.type)}
    assert found <= allowed


def test_attributes_are_the_memory_that_was_decoded() -> None:
    batch = decoded(Signal.TRACES, sample(Signal.TRACES, count=1))
    resources: Column = batch.column(0)
    spans = resources.values.field(1).values.field(1).values
    table, _ = to_flat(Signal.TRACES, batch, np.zeros(1, np.int32))
    attributes: Column = table.column("attributes")
    before = spans.field("attributes").values.field("key").buffers()[2]
    after = attributes.values.field("key").buffers()[2]
    assert after.address == before.address


PAGE = Path(__file__).parents[2] / "docs" / "lake-schema.md"


def listed(section: str) -> list[tuple[str, str]]:
    """Name and type of the columns in one section of the page."""
    (text,) = re.findall(rf"(?ms)^## {section}\n(.*?)(?:^## |\Z)", PAGE.read_text())
    return re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE)


def spelled(type_: Column) -> str:
    """A type as the page writes it: members of structs by name only."""
    if type_ == ATTRIBUTES:
        return "attributes"
    if type_ == VALUE:
        return "value"
    if pa.types.is_struct(type_):
        return f"struct<{', '.join(field.name for field in type_)}>"
    if pa.types.is_list(type_):
        return f"list<{spelled(type_.value_type)}>"
    return str(type_)


@pytest.mark.parametrize(
    ("signal", "section"),
    [(Signal.TRACES, "Spans"), (Signal.LOGS, "Log records"), (Signal.METRICS, "Data points")],
)
def test_the_page_lists_all_columns(signal: Signal, section: str) -> None:
    columns = [*listed(section), *listed("Resource and scope"), *listed("Source")]
    if signal is not Signal.METRICS:
        columns.remove(("source_metric", "int32"))
    assert columns == [(field.name, spelled(field.type)) for field in lake_schema(signal)]
