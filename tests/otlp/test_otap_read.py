"""OTAP tables from elsewhere: what must be read, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import cbor2
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from otap_foreign import delta, foreign
from otlp_messages import requests

from quiver.bundle import Signal, Slot
from quiver.errors import InvalidRequest
from quiver.otlp.messages import request_type
from quiver.otlp.otap.convert import batch_to_otap, otap_to_batch
from quiver.testing.telemetry import Shape, Telemetry

Tables: TypeAlias = dict[Slot, pa.RecordBatch]
PLAIN = {b"encoding": b"plain"}
SIGNALS = pytest.mark.parametrize("signal", list(Signal))
QUICK = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def message_of(signal: Signal, tables: Tables) -> Any:  # noqa: ANN401 - a message
    kind = request_type(signal)
    batch = otap_to_batch(signal, tables)
    assert batch.schema == kind.schema
    batch.validate(full=True)
    data: Any
    (data,) = kind.converter.record_batch_to_array(batch).to_pylist()
    return kind.message.FromString(data)


def written(signal: Signal, messages: list[bytes]) -> Tables:
    batch = request_type(signal).converter.list_to_record_batch(messages)
    batches = batch_to_otap(signal, batch)
    return batches[0] if batches else {}


def telemetry(signal: Signal) -> Tables:
    shape = Shape(items_per_request=100, error_share=0.2)
    return written(signal, Telemetry(seed=5, shape=shape).take(signal, 3))


def table(**columns: Any) -> pa.RecordBatch:  # noqa: ANN401 - lists or arrays
    """A table with plain ids. Lists of a name become the type that OTAP has for it."""
    kinds = {"id": pa.uint16(), "parent_id": pa.uint16(), "type": pa.uint8()}
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, type=kinds.get(name))
        for name, values in columns.items()
    ]
    fields = [
        pa.field(name, values.type, metadata=PLAIN if name in {"id", "parent_id"} else None)
        for name, values in zip(columns, arrays, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def origin(ids: list[int | None], **columns: Any) -> Any:  # noqa: ANN401
    arrays = [pa.array(ids, type=pa.uint16()), *(pa.array(values) for values in columns.values())]
    fields = [pa.field("id", pa.uint16(), metadata=PLAIN)]
    fields += [
        pa.field(name, values.type) for name, values in zip(columns, arrays[1:], strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=fields)


@SIGNALS
@pytest.mark.parametrize("dictionaries", [True, False])
@pytest.mark.parametrize("marked", [True, False])
def test_encoded_telemetry_reads_like_the_plain(
    signal: Signal, marked: bool, dictionaries: bool
) -> None:
    tables = telemetry(signal)
    encoded = foreign(tables, marked=marked, dictionaries=dictionaries)
    assert message_of(signal, encoded) == message_of(signal, tables)


@SIGNALS
@QUICK
@given(data=st.data())
def test_any_encoded_tables_read_like_the_plain(signal: Signal, data: st.DataObject) -> None:
    tables = written(signal, data.draw(st.lists(requests(signal), min_size=1, max_size=3)))
    if tables:
        encoded = foreign(tables, marked=data.draw(st.booleans()), dictionaries=True)
        plain = message_of(signal, tables).SerializeToString(deterministic=True)
        assert message_of(signal, encoded).SerializeToString(deterministic=True) == plain


def test_the_least_that_a_table_needs() -> None:
    (record,) = (
        message_of(Signal.LOGS, {Slot.LOGS: table(severity_text=["x"])})
        .resource_logs[0]
        .scope_logs[0]
        .log_records
    )
    assert record.severity_text == "x"
    assert not record.HasField("body")


def test_a_table_without_rows_is_a_request_without_items() -> None:
    empty = table(severity_text=pa.array([], type=pa.string()))
    assert message_of(Signal.LOGS, {Slot.LOGS: empty}).SerializeToString() == b""


def test_null_ids_take_no_part_in_differences() -> None:
    ids = pa.array(delta([3, None, 5], 16), type=pa.uint16())
    logs = pa.record_batch({"id": ids, "severity_text": ["a", "b", "c"]})
    attributes = table(parent_id=[5, 3], key=["five", "three"], type=[0, 0])
    made = message_of(Signal.LOGS, {Slot.LOGS: logs, Slot.LOG_ATTRS: attributes})
    records = made.resource_logs[0].scope_logs[0].log_records
    assert [[pair.key for pair in record.attributes] for record in records] == [
        ["three"],
        [],
        ["five"],
    ]


def test_children_in_any_order_keep_theirs_for_each_parent() -> None:
    logs = table(id=[7, 900], severity_text=["a", "b"])
    attributes = table(
        parent_id=[900, 7, 900, 7], key=["1", "2", "3", "4"], type=[2, 2, 2, 2], int=[1, 2, 3, 4]
    )
    made = message_of(Signal.LOGS, {Slot.LOGS: logs, Slot.LOG_ATTRS: attributes})
    records = made.resource_logs[0].scope_logs[0].log_records
    assert [[pair.value.int_value for pair in record.attributes] for record in records] == [
        [2, 4],
        [1, 3],
    ]


def test_rows_are_grouped_by_resource_and_scope_in_order_of_appearance() -> None:
    logs = table(
        resource=origin([5, 2, 5, 5, 2]),
        scope=origin([1, 1, 0, 1, 1]),
        severity_text=["a", "b", "c", "d", "e"],
    )
    attributes = table(parent_id=[2, 5], key=["two", "five"], type=[0, 0])
    made = message_of(Signal.LOGS, {Slot.LOGS: logs, Slot.RESOURCE_ATTRS: attributes})
    assert [
        (
            [pair.key for pair in resource.resource.attributes],
            [
                [record.severity_text for record in scope.log_records]
                for scope in resource.scope_logs
            ],
        )
        for resource in made.resource_logs
    ] == [(["five"], [["a", "d"], ["c"]]), (["two"], [["b", "e"]])]


def test_null_ids_do_not_make_different_scopes_the_same() -> None:
    logs = table(scope=origin([None, None, 3], name=["a", "b", "b"]), severity_text=["", "", ""])
    attributes = table(parent_id=[3], key=["k"], type=[0])
    made = message_of(Signal.LOGS, {Slot.LOGS: logs, Slot.SCOPE_ATTRS: attributes})
    scopes = [group.scope for group in made.resource_logs[0].scope_logs]
    assert [(scope.name, len(scope.attributes)) for scope in scopes] == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
    ]


def test_resources_with_the_same_id_share_their_attributes() -> None:
    logs = table(resource=origin([1, 1], schema_url=["u", "v"]), severity_text=["", ""])
    attributes = table(parent_id=[1], key=["k"], type=[0])
    tables = {Slot.LOGS: logs, Slot.RESOURCE_ATTRS: attributes}
    made = message_of(Signal.LOGS, tables).resource_logs
    assert [(one.schema_url, len(one.resource.attributes)) for one in made] == [("u", 1), ("v", 1)]
    with pytest.raises(InvalidRequest, match="share"):
        otap_to_batch(Signal.LOGS, tables, max_bytes=10)


def test_values_that_the_type_does_not_point_to_are_not_looked_at() -> None:
    logs = table(id=[0], severity_text=["a"])
    attributes = table(
        parent_id=[0] * 5,
        key=["a", "b", "c", "d", "e"],
        type=[1, 2, 0, 3, 7],
        str=["s", "s", "s", "s", "s"],
        int=[1, 2, 3, 4, 5],
        ser=[b"\xff"] * 5,
        bytes=[b"x", b"x", b"x", b"x", None],
    )
    made = message_of(Signal.LOGS, {Slot.LOGS: logs, Slot.LOG_ATTRS: attributes})
    (record,) = made.resource_logs[0].scope_logs[0].log_records
    kinds = [pair.value.WhichOneof("value") for pair in record.attributes]
    assert kinds == ["string_value", "int_value", None, None, None]


def test_a_body_may_have_its_cbor_beside_it() -> None:
    body = pa.StructArray.from_arrays([pa.array([6], type=pa.uint8())], names=["type"])
    logs = table(body=body, body_ser=[cbor2.dumps(["a"])])
    (record,) = (
        message_of(Signal.LOGS, {Slot.LOGS: logs}).resource_logs[0].scope_logs[0].log_records
    )
    assert record.body.array_value.values[0].string_value == "a"


def test_buckets_may_have_columns_instead_of_structs() -> None:
    metrics = table(id=[0], metric_type=pa.array([4], type=pa.uint8()), name=["m"])
    points = table(
        parent_id=[0],
        positive_offset=pa.array([3], type=pa.int32()),
        positive_bucket_counts=pa.array([[1, 2]], type=pa.list_(pa.uint64())),
    )
    made = message_of(
        Signal.METRICS,
        {Slot.UNIVARIATE_METRICS: metrics, Slot.EXP_HISTOGRAM_DATA_POINTS: points},
    )
    metric = made.resource_metrics[0].scope_metrics[0].metrics[0]
    (point,) = metric.exponential_histogram.data_points
    assert (point.positive.offset, list(point.positive.bucket_counts)) == (3, [1, 2])
    assert not point.HasField("negative")


# --- Refused ----------------------------------------------------------------------------------


def set_column(batch: pa.RecordBatch, name: str, values: Any) -> pa.RecordBatch:  # noqa: ANN401
    index = batch.schema.get_field_index(name)
    field = batch.schema.field(index).with_type(values.type).with_nullable(True)  # noqa: FBT003
    return batch.set_column(index, field, values)


def replaced(slot: Slot, name: str, change: Callable[[list[Any]], Any]) -> Callable[[Tables], None]:
    def do(tables: Tables) -> None:
        column: Any = tables[slot].column(name)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        values = pa.array(change(column.to_pylist()), type=kind)
        tables[slot] = set_column(tables[slot], name, values)

    return do


def retyped(slot: Slot, name: str, values: Any) -> Callable[[Tables], None]:  # noqa: ANN401
    def do(tables: Tables) -> None:
        whole = pa.array([values] * tables[slot].num_rows)
        tables[slot] = set_column(tables[slot], name, whole)

    return do


def without(slot: Slot, name: str | None = None) -> Callable[[Tables], None]:
    def do(tables: Tables) -> None:
        if name is None:
            del tables[slot]
        else:
            tables[slot] = tables[slot].drop_columns([name])

    return do


def encoded_as(slot: Slot, name: str, encoding: bytes) -> Callable[[Tables], None]:
    def do(tables: Tables) -> None:
        batch = tables[slot]
        index = batch.schema.get_field_index(name)
        field = batch.schema.field(index).with_metadata({b"encoding": encoding})
        tables[slot] = batch.set_column(index, field, batch.column(index))

    return do


def at(row: int, value: Any) -> Callable[[list[Any]], list[Any]]:  # noqa: ANN401
    return lambda values: [*values[:row], value, *values[row + 1 :]]


TRACES, LOGS, METRICS = Signal.TRACES, Signal.LOGS, Signal.METRICS


@pytest.mark.parametrize(
    ("signal", "damage", "where", "reason"),
    [
        (TRACES, without(Slot.SPANS), "SPANS", "missing"),
        (TRACES, without(Slot.SPANS, "name"), "SPANS.name", "missing"),
        (TRACES, without(Slot.SPANS, "trace_id"), "SPANS.trace_id", "missing"),
        (TRACES, without(Slot.SPANS, "id"), "SPAN_ATTRS.parent_id, row 0", "no parent"),
        (TRACES, without(Slot.SPAN_ATTRS, "key"), "SPAN_ATTRS.key", "missing"),
        (TRACES, without(Slot.SPAN_EVENTS), "SPAN_EVENT_ATTRS.parent_id, row 0", "not there"),
        (TRACES, without(Slot.SPAN_LINKS), "SPAN_LINK_ATTRS.parent_id, row 0", "not there"),
        (TRACES, without(Slot.SPANS, "resource"), "RESOURCE_ATTRS.parent_id, row 0", "no row"),
        (TRACES, replaced(Slot.SPANS, "name", at(2, None)), "SPANS.name, row 2", "null"),
        (TRACES, replaced(Slot.SPANS, "id", at(2, 0)), "SPANS.id, row 2", "twice"),
        (
            TRACES,
            replaced(Slot.SPAN_ATTRS, "parent_id", at(5, 60_000)),
            "SPAN_ATTRS.parent_id, row 5",
            "no parent has the id 60000",
        ),
        (
            TRACES,
            replaced(Slot.SPAN_ATTRS, "parent_id", at(5, None)),
            "SPAN_ATTRS.parent_id, row 5",
            "null",
        ),
        (
            TRACES,
            replaced(Slot.SCOPE_ATTRS, "parent_id", at(1, 60_000)),
            "SCOPE_ATTRS.parent_id, row 1",
            "no row has the id",
        ),
        (TRACES, replaced(Slot.SPAN_ATTRS, "type", at(1, 8)), "SPAN_ATTRS.type, row 1", "0 to 7"),
        (TRACES, replaced(Slot.SPAN_ATTRS, "key", at(1, None)), "SPAN_ATTRS.key, row 1", "null"),
        (TRACES, retyped(Slot.SPANS, "trace_id", b"t" * 16), "SPANS.trace_id", "type binary"),
        (TRACES, retyped(Slot.SPANS, "kind", 1), "SPANS.kind", "type int64"),
        (TRACES, retyped(Slot.SPANS, "status", 1), "SPANS.status", "type int64"),
        (TRACES, encoded_as(Slot.SPANS, "id", b"odd"), "SPANS.id", "unknown encoding"),
        (TRACES, encoded_as(Slot.SPANS, "id", b"quasidelta"), "SPANS.id", "quasi-delta"),
        (LOGS, retyped(Slot.LOGS, "time_unix_nano", 1), "LOGS.time_unix_nano", "type int64"),
        (METRICS, without(Slot.UNIVARIATE_METRICS, "id"), "UNIVARIATE_METRICS.id", "missing"),
        (
            METRICS,
            replaced(Slot.UNIVARIATE_METRICS, "metric_type", at(0, 6)),
            "UNIVARIATE_METRICS.metric_type, row 0",
            "0 to 5",
        ),
        (
            METRICS,
            replaced(Slot.UNIVARIATE_METRICS, "metric_type", lambda values: [5] * len(values)),
            "NUMBER_DATA_POINTS.parent_id, row 0",
            "elsewhere",
        ),
        (
            METRICS,
            without(Slot.NUMBER_DATA_POINTS),
            "NUMBER_DP_ATTRS.parent_id, row 0",
            "not there",
        ),
        (
            METRICS,
            encoded_as(Slot.NUMBER_DATA_POINTS, "parent_id", b"quasidelta"),
            "NUMBER_DATA_POINTS.parent_id",
            "quasi-delta",
        ),
        (
            METRICS,
            retyped(Slot.HISTOGRAM_DATA_POINTS, "bucket_counts", [1.5]),
            "HISTOGRAM_DATA_POINTS.bucket_counts",
            "type list",
        ),
    ],
)
def test_damaged_tables_are_refused_with_their_place(
    signal: Signal, damage: Callable[[Tables], None], where: str, reason: str
) -> None:
    tables = dict(telemetry(signal))
    damage(tables)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        otap_to_batch(signal, tables)
    assert caught.value.where == where


def test_the_table_of_another_signal_is_refused() -> None:
    tables = {**telemetry(LOGS), Slot.SPANS: telemetry(TRACES)[Slot.SPANS]}
    with pytest.raises(InvalidRequest, match="slot 40"):
        otap_to_batch(LOGS, tables)


def test_a_column_that_is_there_twice_is_refused() -> None:
    names = ["severity_text", "severity_text"]
    twice = pa.RecordBatch.from_arrays([pa.array(["a"]), pa.array(["b"])], names=names)
    with pytest.raises(InvalidRequest, match="twice"):
        otap_to_batch(LOGS, {Slot.LOGS: twice})


def test_text_that_is_not_utf8_is_refused() -> None:
    buffers = [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    text = pa.Array.from_buffers(pa.string(), 1, buffers)
    with pytest.raises(InvalidRequest, match="not a valid Arrow table"):
        otap_to_batch(LOGS, {Slot.LOGS: table(severity_text=text)})


def test_a_dictionary_that_stands_for_too_much_is_refused() -> None:
    indices = pa.array([0] * 100, type=pa.uint8())
    text = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 1000]))
    tables = {Slot.LOGS: table(severity_text=text)}
    assert otap_to_batch(LOGS, tables, max_bytes=100_000).num_rows == 1
    with pytest.raises(InvalidRequest, match="100000 bytes"):
        otap_to_batch(LOGS, tables, max_bytes=99_999)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.large_binary(), pa.string_view()])
def test_a_dictionary_of_another_type_is_refused_before_it_is_decoded(kind: Any) -> None:  # noqa: ANN401
    indices = pa.array([0] * 100, type=pa.uint8())
    text = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 1000]).cast(kind))
    with pytest.raises(InvalidRequest, match="type dictionary"):
        otap_to_batch(LOGS, {Slot.LOGS: table(severity_text=text)}, max_bytes=1)


def test_a_dictionary_of_lists_is_refused() -> None:
    metrics = table(id=[0], metric_type=pa.array([3], type=pa.uint8()), name=["m"])
    lists = pa.array([[1, 2]], type=pa.list_(pa.uint64()))
    counts: Any = pa.DictionaryArray.from_arrays(pa.array([0], type=pa.uint8()), lists)
    points = table(parent_id=[0], bucket_counts=counts)
    with pytest.raises(InvalidRequest, match="type dictionary"):
        otap_to_batch(
            METRICS, {Slot.UNIVARIATE_METRICS: metrics, Slot.HISTOGRAM_DATA_POINTS: points}
        )


@pytest.mark.parametrize(
    ("item", "reason"), [(b"\x81\xc1\x01", "tag"), (b"\xa0", "no array"), (b"\x81" * 40, "depth")]
)
def test_bad_cbor_is_refused_with_its_place(item: bytes, reason: str) -> None:
    logs = table(id=[0], severity_text=["a"])
    attributes = table(
        parent_id=[0, 0, 0], key=["a", "b", "c"], type=[0, 6, 6], ser=[b"", b"\x80", item]
    )
    with pytest.raises(InvalidRequest, match=reason) as caught:
        otap_to_batch(LOGS, {Slot.LOGS: logs, Slot.LOG_ATTRS: attributes})
    assert caught.value.where == "LOG_ATTRS.ser, row 2"


def test_a_point_with_two_values_is_refused() -> None:
    metrics = table(id=[0], metric_type=pa.array([1], type=pa.uint8()), name=["m"])
    points = table(parent_id=[0], int_value=[1], double_value=[1.0])
    tables = {Slot.UNIVARIATE_METRICS: metrics, Slot.NUMBER_DATA_POINTS: points}
    with pytest.raises(InvalidRequest, match="int and a double"):
        otap_to_batch(METRICS, tables)


def test_null_inside_a_list_of_counts_is_refused() -> None:
    metrics = table(id=[0], metric_type=pa.array([3], type=pa.uint8()), name=["m"])
    counts = pa.array([[1, None]], type=pa.list_(pa.uint64()))
    points = table(parent_id=[0], bucket_counts=counts)
    tables = {Slot.UNIVARIATE_METRICS: metrics, Slot.HISTOGRAM_DATA_POINTS: points}
    with pytest.raises(InvalidRequest, match="null inside"):
        otap_to_batch(METRICS, tables)


def test_a_body_without_type_is_refused() -> None:
    body = pa.StructArray.from_arrays([pa.array(["a"])], names=["str"])
    with pytest.raises(InvalidRequest, match="missing") as caught:
        otap_to_batch(LOGS, {Slot.LOGS: table(body=body)})
    assert caught.value.where == "LOGS.body.type"


KINDS: tuple[Any, ...] = (
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.int64(), pa.float64(), pa.bool_(), pa.string()),
    *(pa.binary(), pa.binary(16), pa.timestamp("us"), pa.duration("ns"), pa.list_(pa.uint64())),
    *(pa.struct([("id", pa.uint16())]), pa.dictionary(pa.uint8(), pa.string()), pa.null()),
)


@SIGNALS
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_damage_is_read_or_refused(signal: Signal, data: st.DataObject) -> None:
    tables = dict(DAMAGED[signal])
    for _ in range(data.draw(st.integers(1, 3))):
        slot = data.draw(st.sampled_from(sorted(tables)))
        batch = tables[slot]
        if not batch.num_columns or not batch.num_rows:
            continue
        index = data.draw(st.integers(0, batch.num_columns - 1))
        name, column = batch.schema.names[index], batch.column(index)
        rows = st.lists(st.integers(0, batch.num_rows - 1), max_size=4)
        match data.draw(st.sampled_from(["drop", "type", "null", "move", "less", "mark"])):
            case "drop":
                tables[slot] = batch.drop_columns([name])
            case "type":
                kind = data.draw(st.sampled_from(KINDS))
                tables[slot] = set_column(batch, name, pa.nulls(batch.num_rows, kind))
            case "null":
                gone = data.draw(rows)
                left = [None if row in gone else row for row in range(batch.num_rows)]
                keep = pa.array(left, type=pa.int64())
                tables[slot] = set_column(batch, name, column.take(keep))
            case "move":
                order = data.draw(st.permutations(range(batch.num_rows)))
                tables[slot] = set_column(
                    batch, name, column.take(pa.array(order, type=pa.int64()))
                )
            case "less":
                keep = pa.array(sorted(data.draw(rows)), type=pa.int64())
                tables[slot] = batch.take(keep)
            case "mark":
                encoded_as(slot, name, b"delta")(tables)
    try:
        batch = otap_to_batch(signal, tables)
    except InvalidRequest:
        return
    batch.validate(full=True)


DAMAGED = {
    signal: written(
        signal, Telemetry(seed=5, shape=Shape(items_per_request=6, error_share=0.5)).take(signal, 2)
    )
    for signal in Signal
}
