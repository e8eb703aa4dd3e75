"""OTAP batches through the payloads of a stream: dictionaries, limits, and what is refused."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pytest
from otap_foreign import foreign
from otap_oracle import as_otap_holds

from quiver.bundle import Signal, Slot
from quiver.errors import InvalidRequest
from quiver.ipc import Validation, decode_stream, encode_stream
from quiver.otlp.convert import from_otap, to_otap
from quiver.otlp.messages import REQUEST_TYPES
from quiver.pipeline.otap_streams import OtapDecoder, OtapEncoder, StreamBroken, count_rows
from quiver.pipeline.otap_wire import (
    ArrowPayload,
    BatchArrowRecords,
    read_records,
    write_records,
)
from quiver.testing.telemetry import Shape, Telemetry

SIGNALS = pytest.mark.parametrize("signal", list(Signal))
MIB = 2**20
Tables = dict[Slot, pa.RecordBatch]


def telemetry(signal: Signal, count: int, items: int = 40) -> list[bytes]:
    shape = Shape(items_per_request=items, llm_share=0.1, error_share=0.2)
    return Telemetry(seed=5, shape=shape).take(signal, count)


def tables_of(signal: Signal, request: bytes) -> Tables:
    (tables,) = to_otap(signal, [request]).batches
    return tables


def meaning(signal: Signal, tables: Tables) -> bytes:
    """The request that the tables stand for, as upb writes it."""
    message: Any = REQUEST_TYPES[signal].FromString(from_otap(signal, tables))
    return bytes(message.SerializeToString(deterministic=True))


def decoder(signal: Signal = Signal.TRACES, **limits: int) -> OtapDecoder:
    return OtapDecoder(
        signal, **{"max_batch_bytes": 16 * MIB, "max_stream_bytes": 64 * MIB, **limits}
    )


class _Parts(io.RawIOBase):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []
        self.at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - any buffer
        self.parts.append(bytes(data))
        self.at += len(self.parts[-1])
        return len(self.parts[-1])


class Sender:
    """One IPC stream as others write it, with dictionaries that grow."""

    def __init__(self, schema: pa.Schema, *, deltas: bool = True, compression: Any = None) -> None:  # noqa: ANN401
        self._sink = _Parts()
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas, compression=compression)
        file = pa.PythonFile(self._sink, mode="w")
        self.writer = pa.ipc.new_stream(file, schema, options=options)

    def write(self, *tables: pa.RecordBatch) -> bytes:
        for table in tables:
            self.writer.write_batch(table)
        return self.taken()

    def close(self) -> bytes:
        self.writer.close()
        return self.taken()

    def taken(self) -> bytes:
        made = b"".join(self._sink.parts)
        self._sink.parts.clear()
        return made


def batch_of(*payloads: tuple[Slot | int, str, bytes]) -> BatchArrowRecords:
    return BatchArrowRecords(
        1, [ArrowPayload(name, int(slot), record) for slot, name, record in payloads]
    )


def logs(*severities: str, dictionary: list[str] | None = None) -> pa.RecordBatch:
    """A table of log records, which needs only what one wants to look at."""
    column: Any = pa.array(severities, pa.string())
    if dictionary is not None:
        indices = pa.array([dictionary.index(each) for each in severities], pa.uint16())
        column = pa.DictionaryArray.from_arrays(indices, pa.array(dictionary))
    return pa.record_batch([column], names=["severity_text"])


def fragment(table: pa.RecordBatch) -> bytes:
    return Sender(table.schema).write(table)


# --- there and back -------------------------------------------------------------------------------


@SIGNALS
@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_batches_come_back(signal: Signal, compression: str) -> None:
    encoder, reading = OtapEncoder(compression), decoder(signal)
    for number, request in enumerate(telemetry(signal, 4)):
        sent = BatchArrowRecords(number, encoder.encode(tables_of(signal, request)))
        data = write_records(sent)
        tables = reading.decode(read_records(data))
        assert meaning(signal, tables) == as_otap_holds(signal, [request])
        assert count_rows(signal, tables) == 40


@SIGNALS
@pytest.mark.parametrize("marked", [True, False])
def test_batches_of_others_come_back(signal: Signal, marked: bool) -> None:
    reading = decoder(signal)
    senders: dict[Slot, tuple[str, Sender, pa.Schema]] = {}
    for number, request in enumerate(telemetry(signal, 4)):
        payloads = []
        for slot, table in foreign(
            tables_of(signal, request), marked=marked, dictionaries=True
        ).items():
            known = senders.get(slot)
            if known is None or not known[2].equals(table.schema, check_metadata=True):
                name = f"{slot}-{number}"
                known = senders[slot] = (name, Sender(table.schema), table.schema)
            payloads.append(ArrowPayload(known[0], slot, known[1].write(table)))
        tables = reading.decode(BatchArrowRecords(number, payloads))
        assert meaning(signal, tables) == as_otap_holds(signal, [request])


def test_a_schema_is_sent_once_and_a_new_one_has_a_new_id() -> None:
    encoder = OtapEncoder()
    tables = tables_of(Signal.TRACES, telemetry(Signal.TRACES, 1)[0])
    first, second = encoder.encode(tables), encoder.encode(tables)
    assert first[0].type == Slot.SPANS
    assert [payload.schema_id for payload in first] == [payload.schema_id for payload in second]
    assert len({payload.schema_id for payload in first}) == len(tables)
    assert all(len(b.record) < len(a.record) for a, b in zip(first, second, strict=True))
    fewer = {**tables, Slot.SPANS: tables[Slot.SPANS].drop_columns(["kind"])}
    third = encoder.encode(fewer)
    changed = [a.type for a, b in zip(second, third, strict=True) if a.schema_id != b.schema_id]
    assert changed == [Slot.SPANS]
    reading = decoder()
    for payloads in (first, second, third, encoder.encode(tables)):
        back = reading.decode(BatchArrowRecords(0, payloads))
        assert back[Slot.SPAN_ATTRS].equals(tables[Slot.SPAN_ATTRS], check_metadata=True)
    assert back[Slot.SPANS].equals(tables[Slot.SPANS], check_metadata=True)


def test_an_encoder_that_forgets_begins_anew() -> None:
    encoder = OtapEncoder()
    tables = tables_of(Signal.LOGS, telemetry(Signal.LOGS, 1)[0])
    encoder.encode(tables)
    encoder.forget()
    back = decoder(Signal.LOGS).decode(BatchArrowRecords(0, encoder.encode(tables)))
    assert back[Slot.LOGS].equals(tables[Slot.LOGS])


# --- dictionaries ---------------------------------------------------------------------------------


def test_dictionaries_grow_and_are_replaced() -> None:
    sent = [
        (["a"], ["a", "a"]),
        (["a", "b"], ["b", "a"]),
        (["a", "b", "c"], ["c", "a"]),
        (["x"], ["x", "x"]),
        (["x"], ["x"]),
        (["x", "y"], ["y"]),
    ]
    sender = Sender(logs("a", dictionary=["a"]).schema)
    reading = decoder(Signal.LOGS)
    for dictionary, rows in sent:
        record = sender.write(logs(*rows, dictionary=dictionary))
        tables = reading.decode(batch_of((Slot.LOGS, "s", record)))
        assert tables[Slot.LOGS].to_pydict() == {"severity_text": rows}
    stats = sender.writer.stats
    assert (stats.num_dictionary_deltas, stats.num_replaced_dictionaries) == (3, 1)


def test_tables_do_not_drag_the_dictionaries_of_the_stream_along() -> None:
    words = [f"word {number:06d}" for number in range(2_500)]
    whole = logs(*words, dictionary=words[:])
    column: Any = whole.column(0)
    schema = whole.schema
    resource = pa.StructArray.from_arrays([column], ["schema_url"])
    fields = [schema.field(0), pa.field("resource", resource.type)]
    table = pa.record_batch([column, resource], schema=pa.schema(fields, metadata={"a": "b"}))
    sender, reading = Sender(table.schema), decoder(Signal.LOGS)
    first = reading.decode(batch_of((Slot.LOGS, "s", sender.write(table))))
    assert first[Slot.LOGS].to_pydict() == table.to_pydict()
    remembered = reading.remembered
    assert remembered > 2 * column.dictionary.nbytes
    record = sender.write(table.slice(700, 3))
    assert len(record) < 2_000
    small = reading.decode(batch_of((Slot.LOGS, "s", record)))[Slot.LOGS]
    assert small.to_pydict() == table.slice(700, 3).to_pydict()
    assert small.nbytes < 500
    assert small.schema.equals(table.schema, check_metadata=True)
    assert reading.remembered == remembered
    small.validate(full=True)
    stored = b"".join(bytes(part) for part in encode_stream(small))
    back = decode_stream(pa.py_buffer(stored), source="", offset=0, validation=Validation.FULL)
    assert back.to_pydict() == small.to_pydict()


def test_nulls_stay_where_they_are() -> None:
    words = [f"word {number:06d}" for number in range(3_000)]
    indices = pa.array([None, 2_999, 5, None, 5], pa.uint16())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(words))
    inner = pa.StructArray.from_arrays(
        [column], ["name"], mask=pa.array([False, True, False, False, False])
    )
    table = pa.record_batch([column, inner], names=["severity_text", "scope"])
    nothing = pa.record_batch(
        [pa.DictionaryArray.from_arrays(pa.array([None], pa.uint16()), pa.array(words))],
        names=["severity_text"],
    )
    for each in (table, nothing):
        back = decoder(Signal.LOGS).decode(batch_of((Slot.LOGS, "s", fragment(each))))
        assert back[Slot.LOGS].to_pydict() == each.to_pydict()
        assert back[Slot.LOGS].nbytes < 500


# --- which stream a fragment belongs to -----------------------------------------------------------


def test_a_new_schema_ends_the_old_stream_of_its_type() -> None:
    a, b = Sender(logs("a").schema), Sender(logs("a", dictionary=["a"]).schema)
    reading = decoder(Signal.LOGS)
    reading.decode(batch_of((Slot.LOGS, "a", a.write(logs("1")))))
    one = reading.remembered
    tables = reading.decode(batch_of((Slot.LOGS, "b", b.write(logs("2", dictionary=["2"])))))
    assert tables[Slot.LOGS].to_pydict() == {"severity_text": ["2"]}
    assert reading.remembered < 2 * one
    with pytest.raises(StreamBroken, match="LOGS"):
        reading.decode(batch_of((Slot.LOGS, "a", a.write(logs("3")))))


def test_a_stream_may_begin_again_with_the_same_id() -> None:
    reading = decoder(Signal.LOGS)
    for words in (["a"], ["b", "c"]):
        record = fragment(logs(*words, dictionary=words))
        tables = reading.decode(batch_of((Slot.LOGS, "same", record)))
        assert tables[Slot.LOGS].to_pydict() == {"severity_text": words}


def test_types_with_the_same_schema_may_share_a_stream() -> None:
    schema = pa.schema(
        [("parent_id", pa.uint16()), ("key", pa.dictionary(pa.uint8(), pa.string()))]
    )

    def attributes(key: str) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([{"parent_id": 0, "key": key}], schema=schema)

    shared, reading = Sender(schema), decoder(Signal.LOGS)
    root = Sender(logs("a").schema)
    for number in range(3):
        tables = reading.decode(
            batch_of(
                (Slot.LOGS, "root", root.write(logs("a"))),
                (Slot.RESOURCE_ATTRS, "x", shared.write(attributes(f"r{number}"))),
                (Slot.LOG_ATTRS, "x", shared.write(attributes(f"l{number}"))),
            )
        )
        assert tables[Slot.RESOURCE_ATTRS].column(1).to_pylist() == [f"r{number}"]
        assert tables[Slot.LOG_ATTRS].column(1).to_pylist() == [f"l{number}"]
    own, reading = (Sender(schema), Sender(schema)), decoder(Signal.LOGS)
    for number in range(2):
        tables = reading.decode(
            batch_of(
                (Slot.LOGS, "root", fragment(logs("a"))),
                (Slot.RESOURCE_ATTRS, "x", own[0].write(attributes(f"r{number}"))),
                (Slot.LOG_ATTRS, "x", own[1].write(attributes(f"l{number}"))),
            )
        )
        assert tables[Slot.RESOURCE_ATTRS].column(1).to_pylist() == [f"r{number}"]
        assert tables[Slot.LOG_ATTRS].column(1).to_pylist() == [f"l{number}"]


def test_an_end_is_an_end() -> None:
    sender, reading = Sender(logs("a").schema), decoder(Signal.LOGS)
    record = sender.write(logs("a")) + sender.close()
    assert Slot.LOGS in reading.decode(batch_of((Slot.LOGS, "s", record)))
    assert reading.remembered == 0
    assert Slot.LOGS in reading.decode(batch_of((Slot.LOGS, "s", record)))


# --- refused: a batch -----------------------------------------------------------------------------


def attributes_without_parent() -> pa.RecordBatch:
    return pa.record_batch([pa.array(["k"])], names=["key"])


def twice() -> pa.RecordBatch:
    return pa.record_batch([pa.array(["a"]), pa.array(["b"])], names=["severity_text"] * 2)


@pytest.mark.parametrize(
    ("payloads", "reason"),
    [
        ([(Slot.SPANS, fragment(logs("a")))], "SPANS.*none that OTAP has for logs"),
        ([(60, b"request")], "60.*none that OTAP has"),
        ([(0, b"")], "SLOT_0"),
        ([(-7, b"")], "-7"),
        ([], "LOGS: the table is missing"),
        ([(Slot.LOGS, fragment(logs("a")))] * 2, "there twice"),
        ([(Slot.LOGS, fragment(twice()))], "column that is there twice"),
        ([(Slot.LOG_ATTRS, fragment(attributes_without_parent()))], "LOG_ATTRS.parent_id"),
        (
            [(Slot.LOGS, fragment(pa.record_batch([pa.array([1])], names=["severity_text"])))],
            "LOGS.severity_text: type int64; OTAP has string",
        ),
    ],
)
def test_a_batch_that_is_no_otap_does_not_end_the_stream(
    payloads: list[tuple[int, bytes]], reason: str
) -> None:
    sender, reading = Sender(logs("a").schema), decoder(Signal.LOGS)
    good = batch_of((Slot.LOGS, "good", sender.write(logs("a"))))
    reading.decode(good)
    with pytest.raises(InvalidRequest, match=reason):
        reading.decode(batch_of(*((slot, f"s{slot}", record) for slot, record in payloads)))
    record = fragment(logs("b"))
    assert reading.decode(batch_of((Slot.LOGS, "next", record)))[Slot.LOGS].num_rows == 1


def test_a_refused_batch_is_remembered_all_the_same() -> None:
    sender, reading = Sender(logs("a", dictionary=["a"]).schema), decoder(Signal.LOGS)
    record = sender.write(logs("a", dictionary=["a", "b"]))
    with pytest.raises(InvalidRequest):
        reading.decode(batch_of((99, "x", b""), (Slot.LOGS, "s", record)))
    record = sender.write(logs("b", "a", dictionary=["a", "b"]))
    tables = reading.decode(batch_of((Slot.LOGS, "s", record)))
    assert tables[Slot.LOGS].to_pydict() == {"severity_text": ["b", "a"]}


def test_a_batch_is_too_large_with_its_dictionary() -> None:
    words = [f"{number}" * 2_000 for number in range(10, 30)]
    table = logs(*words, dictionary=words)
    sender, reading = Sender(table.schema), decoder(Signal.LOGS, max_batch_bytes=70_000)
    halves = words[:10], words[:]
    for known in halves:
        record = sender.write(logs(known[-1], dictionary=known))
        reading.decode(batch_of((Slot.LOGS, "s", record)))
    with pytest.raises(InvalidRequest, match="max_request_bytes"):
        reading.decode(batch_of((Slot.LOGS, "s", sender.write(logs(*words, dictionary=words)))))


# --- refused: the stream --------------------------------------------------------------------------


def out_of_range() -> bytes:
    indices = pa.array([1, 2], pa.uint16())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["a"]), safe=False)
    return fragment(pa.record_batch([column], names=["severity_text"]))


def many_rows_of_nothing() -> bytes:
    return fragment(pa.record_batch([pa.nulls(10_000_000)], names=["nothing"]))


def listed(column: Any) -> bytes:  # noqa: ANN401 - any array
    return fragment(pa.record_batch([column], names=["severity_text"]))


def two_batches() -> bytes:
    return Sender(logs("a").schema).write(logs("a"), logs("b"))


UNREADABLE: dict[str, bytes] = {
    "nothing": b"",
    "the end": b"\xff\xff\xff\xff\x00\x00\x00\x00",
    "text": b"no arrow at all, but long enough for a header",
    "cut off": fragment(logs("a"))[:-8],
    "too long": fragment(logs("a")) + b"\x00" * 8,
    "only a schema": logs("a").schema.serialize().to_pybytes(),
    "two batches": two_batches(),
    "out of range": out_of_range(),
    "rows of nothing": many_rows_of_nothing(),
    "list of dictionaries": listed(
        pa.array([["a"]], pa.list_(pa.dictionary(pa.int8(), pa.string())))
    ),
    "views": listed(pa.array(["a"], pa.string_view())),
    "list views": listed(pa.array([["a"]], pa.list_view(pa.string()))),
    "runs": listed(pa.RunEndEncodedArray.from_arrays(pa.array([5], pa.int32()), pa.array(["a"]))),
    "maps": listed(pa.array([{"a": 1}], pa.map_(pa.string(), pa.int8()))),
}


@pytest.mark.parametrize("record", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_breaks_the_stream(record: bytes) -> None:
    with pytest.raises(StreamBroken) as caught:
        decoder(Signal.LOGS).decode(batch_of((Slot.LOGS, "s", record)))
    assert caught.value.reason.startswith("LOGS: ")
    assert not caught.value.too_much


def test_reasons_are_not_longer_than_a_trailer_of_grpc() -> None:
    table = pa.record_batch([pa.array(["a"], pa.string_view())], names=["x" * 100_000])
    with pytest.raises(StreamBroken) as caught:
        decoder(Signal.LOGS).decode(batch_of((Slot.LOGS, "s", fragment(table))))
    assert len(str(caught.value)) <= 500


def test_data_without_a_schema_breaks_the_stream() -> None:
    sender = Sender(logs("a").schema)
    sender.write(logs("a"))
    with pytest.raises(StreamBroken, match="not a schema"):
        decoder(Signal.LOGS).decode(batch_of((Slot.LOGS, "s", sender.write(logs("b")))))


def test_what_is_small_only_when_compressed_is_refused_before_it_is_read() -> None:
    table = logs("x" * 4_000_000)
    record = Sender(table.schema, compression="zstd").write(table)
    assert len(record) < 5_000
    decoder(Signal.LOGS, max_batch_bytes=5_000_000).decode(batch_of((Slot.LOGS, "s", record)))
    with pytest.raises(StreamBroken, match="3000000 bytes uncompressed"):
        decoder(Signal.LOGS, max_batch_bytes=3_000_000).decode(batch_of((Slot.LOGS, "s", record)))


def test_the_payloads_of_a_batch_count_together() -> None:
    table = logs("x" * 40_000)
    attributes = pa.record_batch(
        [pa.array([0], pa.uint16()), pa.array(["x" * 40_000])], names=["parent_id", "key"]
    )
    batch = batch_of((Slot.LOGS, "a", fragment(table)), (Slot.LOG_ATTRS, "b", fragment(attributes)))
    decoder(Signal.LOGS, max_batch_bytes=90_000).decode(batch)
    with pytest.raises(StreamBroken, match="60000 bytes uncompressed"):
        decoder(Signal.LOGS, max_batch_bytes=60_000).decode(batch)


def test_a_stream_remembers_only_so_much() -> None:
    words = [f"{number}" * 500 for number in range(10, 60)]
    sender = Sender(logs("a", dictionary=["a"]).schema)
    reading = decoder(Signal.LOGS, max_stream_bytes=20_000)
    taken = 0

    def grow() -> None:
        nonlocal taken
        for count in range(1, len(words)):
            table = logs(words[count - 1], dictionary=words[:count])
            reading.decode(batch_of((Slot.LOGS, "s", sender.write(table))))
            taken = count
            assert reading.remembered <= 20_000

    with pytest.raises(StreamBroken, match="max_stream_bytes") as caught:
        grow()
    assert 10 < taken < 20
    assert caught.value.too_much
    # The same batch in a new stream, with what it needs.
    table = logs(words[taken], dictionary=[words[taken]])
    reading = decoder(Signal.LOGS, max_stream_bytes=20_000)
    reading.decode(batch_of((Slot.LOGS, "s", fragment(table))))


def test_a_batch_that_no_stream_could_remember_is_refused_for_good() -> None:
    words = [f"{number}" * 500 for number in range(10, 60)]
    record = fragment(logs(*words, dictionary=words))
    with pytest.raises(StreamBroken, match="max_stream_bytes") as caught:
        decoder(Signal.LOGS, max_stream_bytes=20_000).decode(batch_of((Slot.LOGS, "s", record)))
    assert not caught.value.too_much
