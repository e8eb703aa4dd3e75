"""Stores as a source for Spark: every row, once, in the types that were promised."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles

from quiver import SegmentConfig, Store, StoreConfig
from quiver.bundle import Signal, Slot
from quiver.errors import InvalidConfig, LakeError, QuiverError, SegmentNotFound
from quiver.lake.layout import INGESTED
from quiver.lake.store_source import LogTail, QuiverSource
from quiver.otlp import decode, to_otap
from quiver.pipeline.item import Item, to_bundle
from quiver.testing import Shape, Telemetry

CAME_NS = 1_770_000_000_123_456_789
PLACE = ("source_store", "source_segment", "source_bundle", "source_row")
PATIENT = StoreConfig(segment=SegmentConfig(max_open_duration=3600))
START_NS = 1_760_000_000_000_000_000
DAY_NS = 86_400_000_000_000


def make(count: int, signal: Signal = Signal.TRACES, *, days: int = 0) -> list[bytes]:
    start = START_NS + days * DAY_NS
    return Telemetry(7, Shape(items_per_request=10, start_time_unix_nano=start)).take(signal, count)


@contextmanager
def filled(
    path: Path, requests: Sequence[bytes], per_segment: int, signal: Signal = Signal.TRACES
) -> Iterator[Store]:
    """A store with these requests, a bundle each; what fills no segment is in the log."""
    with Store.open(path, PATIENT) as store:
        store.register("keeper", external=True)
        for number, request in enumerate(requests, 1):
            ingest(store, request, signal)
            if number % per_segment == 0:
                store.flush()
        yield store


def ingest(store: Store, request: bytes, signal: Signal = Signal.TRACES) -> None:
    store.ingest(to_bundle(Item(signal=signal, requests=(request,), received_ns=CAME_NS)))


def expected(requests: Sequence[bytes], signal: Signal = Signal.TRACES) -> list[dict[str, Any]]:
    rows = decode(signal, requests).table.drop_columns(list(PLACE)).to_pylist()
    came = dt.datetime.fromtimestamp(CAME_NS // 10**9, dt.UTC).replace(microsecond=123456)
    return in_order([{**row, INGESTED: came} for row in rows])


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: repr(sorted(row.items())))


def without_place(table: pa.Table) -> list[dict[str, Any]]:
    return in_order(table.drop_columns(list(PLACE)).to_pylist())


def source(root: Path, **options: str) -> QuiverSource:
    return QuiverSource({"path": str(root), "signal": "traces", **options})


def read_all(root: Path, **options: str) -> pa.Table:
    """The batches that Spark would get, without Spark."""
    made = source(root, **options)
    reader = made.reader(made.schema())
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    schema = made._wanted.schema
    assert all(batch.schema.equals(schema) for batch in batches)
    return pa.Table.from_batches(batches, schema)


def load(spark: SparkSession, root: Path, **options: str) -> DataFrame:
    return spark.read.format("quiver").options(path=str(root), signal="traces", **options).load()


# --- Batch, without Spark ----------------------------------------------------------------------


@pytest.mark.parametrize("signal", list(Signal))
def test_rows_are_those_of_the_decoder(tmp_path: Path, signal: Signal) -> None:
    requests = make(9, signal)
    with filled(tmp_path / "core_0", requests, 4, signal) as store:
        table = read_all(tmp_path, signal=signal.value)
        assert without_place(table) == expected(requests, signal)
        kept = set(zip(*(table.column(name).to_pylist() for name in PLACE), strict=True))
        assert kept == {
            *((store.store_id, segment, bundle, 0) for segment in (0, 1) for bundle in range(4)),
            (None, None, None, None),
        }
        assert read_all(tmp_path, signal=signal.value, tail="false").num_rows == len(
            expected(requests[:8], signal)
        )


def test_tasks_are_segments_and_logs(tmp_path: Path) -> None:
    requests = make(15)
    with (
        filled(tmp_path / "core_0", requests[:8], 3),
        filled(tmp_path / "core_1", requests[8:], 3),
    ):
        made = source(tmp_path, partitionBytes="1")
        assert len(made.reader(made.schema()).partitions()) == 6  # four segments and two logs
        assert len(source(tmp_path).reader(made.schema()).partitions()) == 3
        assert without_place(read_all(tmp_path, partitionBytes="1")) == expected(requests)


def test_a_machine_without_the_directory_says_so(tmp_path: Path) -> None:
    with filled(tmp_path / "core_0", make(1), 1):
        pass
    made = source(tmp_path, failOnDataLoss="false")
    reader = made.reader(made.schema())
    (part,) = reader.partitions()
    (tmp_path / "core_0").rename(tmp_path / "elsewhere")
    with pytest.raises(LakeError, match="this machine has no"):
        list(reader.read(part))


def test_bundles_in_arrow_form_become_the_same_rows(tmp_path: Path) -> None:
    requests = make(3)
    with Store.open(tmp_path, PATIENT) as store:
        for tables in to_otap(Signal.TRACES, requests).batches:
            store.ingest(to_bundle(Item(signal=Signal.TRACES, tables=tables, received_ns=CAME_NS)))
        ingest(store, make(1, Signal.LOGS)[0], Signal.LOGS)
        columns = "trace_id,span_id,name,start_time_unix_nano,service_name"
        rows = read_all(tmp_path, columns=columns).to_pylist()
    wanted = decode(Signal.TRACES, requests).table.select(columns.split(",")).to_pylist()
    assert in_order(rows) == in_order(wanted)


def test_what_moved_from_the_log_to_a_segment_after_planning_comes_once(tmp_path: Path) -> None:
    requests = make(5)
    with filled(tmp_path, requests[:4], 3) as store:
        made = source(tmp_path)
        reader = made.reader(made.schema())
        planned = reader.partitions()
        assert [type(part) for part in planned].count(LogTail) == 1
        ingest(store, requests[4])  # came too late to be seen
        store.flush()
        rows = pa.Table.from_batches([one for part in planned for one in reader.read(part)])
        assert without_place(rows) == expected(requests[:4])


def test_what_was_deleted_after_planning_is_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with filled(tmp_path, make(4), 2):
        pass
    for options in ({}, {"failOnDataLoss": "false"}):
        made = source(tmp_path, **options)
        reader = made.reader(made.schema())
        (part,) = reader.partitions()
        gone = tmp_path / "segments" / f"{len(options):016}.qseg"
        gone.rename(gone.with_suffix(".gone"))
        if not options:
            with pytest.raises(SegmentNotFound, match=r"segment 0 of store .*deleted before"):
                list(reader.read(part))
            continue
        with caplog.at_level(logging.WARNING):
            assert list(reader.read(part)) == []
        assert "segment 1 of store" in caplog.text


def test_a_log_that_was_deleted_after_planning_is_missed(tmp_path: Path) -> None:
    with filled(tmp_path, make(2), 5) as store:
        made = source(tmp_path)
        reader = made.reader(made.schema())
        (part,) = reader.partitions()
        store.flush()
        (tmp_path / "segments" / f"{0:016}.qseg").unlink()
        with pytest.raises(SegmentNotFound, match="2 bundles of the log of store"):
            list(reader.read(part))


def test_damage_is_named_or_left_out(tmp_path: Path) -> None:
    requests = make(4)
    with filled(tmp_path, requests[:2], 1) as store:
        ingest(store, b"\xff nothing that is OTLP")
        ingest(store, requests[2])
        store.flush()
    bad = r"segment 2 of store \w+ .*, bundle 0, request 0 cannot be read"
    with pytest.raises(LakeError, match=bad):
        read_all(tmp_path)
    assert without_place(read_all(tmp_path, malformed="skip")) == expected(requests[:3])
    _damage(tmp_path / "segments" / f"{0:016}.qseg")
    with pytest.raises(LakeError, match=r"segment 0 of store .*malformed=skip"):
        read_all(tmp_path)
    assert without_place(read_all(tmp_path, malformed="skip")) == expected(requests[1:3])


def _damage(path: Path) -> None:
    """Change a byte of the first stream; what the segment says of itself stays true."""
    data = bytearray(path.read_bytes())
    data[len(data) // 8] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_segments_outside_the_times_are_not_even_read(tmp_path: Path) -> None:
    days = [make(1, days=day)[0] for day in range(3)]
    with Store.open(tmp_path, PATIENT) as store:
        for request in days:
            (tables,) = to_otap(Signal.TRACES, [request]).batches
            store.ingest(to_bundle(Item(signal=Signal.TRACES, tables=tables)))
            store.flush()
    for number in (0, 2):
        _damage(tmp_path / "segments" / f"{number:016}.qseg")
    since = dt.datetime.fromtimestamp((START_NS + DAY_NS) // 10**9, dt.UTC)
    times = {"since": since.isoformat(), "until": (since + dt.timedelta(hours=12)).isoformat()}
    with pytest.raises(LakeError, match="segment 0"):
        read_all(tmp_path)
    rows = read_all(tmp_path, **times, columns="span_id").to_pylist()
    wanted = in_order(decode(Signal.TRACES, days[1:2]).table.select(["span_id"]).to_pylist())
    assert in_order(rows) == wanted
    made = source(tmp_path, **times, columns="span_id")
    (part,) = made.reader(made.schema()).partitions()
    assert [piece.segment for piece in part.pieces] == [1]  # type: ignore[attr-defined]
    # A stream is planned without opening segments; its tasks skip them.
    stream = made.streamReader(made.schema())
    (part,) = stream.partitions({}, stream.latestOffset({}, ReadAllAvailable()))
    assert [piece.segment for piece in part.pieces] == [0, 1, 2]  # type: ignore[attr-defined]
    assert in_order(pa.Table.from_batches(list(stream.read(part))).to_pylist()) == wanted


def test_stored_bundles_come_as_they_are(tmp_path: Path) -> None:
    requests = make(3)
    with filled(tmp_path, requests, 2) as store:
        item = Item(signal=Signal.LOGS, requests=(b"a", b"b"), context={"peer": "x"})
        store.ingest(to_bundle(item))
        table = QuiverSource({"path": str(tmp_path), "rows": "bundles"})
        reader = table.reader(table.schema())
        rows = [
            row
            for part in reader.partitions()
            for batch in reader.read(part)
            for row in batch.to_pylist()
        ]
        assert [row["data"] for row in rows if row["slot"] == Slot.OTLP_TRACES] == [
            requests[2],
            *requests[:2],
        ]
        assert [
            (row["segment"], row["row"], row["data"]) for row in rows if row["signal"] == "logs"
        ][:2] == [(None, 0, b"a"), (None, 1, b"b")]
        only = read_all(tmp_path, rows="bundles", columns="store,slot")
        assert set(only.column("slot").to_pylist()) == {Slot.OTLP_TRACES}


def test_promoted_attributes_are_columns(tmp_path: Path) -> None:
    promoted = (
        '[{"key": "service.name", "column": "resource_service", "level": "resource"},'
        '{"key": "no.such.key", "column": "missing", "type": "int"}]'
    )
    with filled(tmp_path, make(2), 1):
        columns = "resource_service,service_name,missing"
        table = read_all(tmp_path, promoted=promoted, columns=columns)
    assert table.column(0).equals(table.column(1))
    assert table.column(2).null_count == table.num_rows > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signal": "profiles"}, "option signal is 'profiles'"),
        ({"path": "relative"}, "must be absolute"),
        ({"collumns": "name"}, "option collumns is not known"),
        ({"columns": "name,nmae"}, "there is no column nmae"),
        ({"columns": "name,name"}, "each of them once"),
        ({"rows": "raw"}, "decoded or bundles"),
        ({"maxBytesPerTrigger": "0"}, "whole number above 0"),
        ({"maxBytesPerTrigger": "9", "maxSegmentsPerTrigger": "9"}, "one limit, not both"),
        ({"promoted": "{"}, "is not JSON"),
        ({"promoted": '[{"key": "a"}]'}, "needs a key and a column"),
        ({"promoted": '[{"key": "a", "column": "year"}]'}, "column 'year' of its own"),
        ({"startingOffsets": "latest"}, "is not JSON"),
        ({"since": "yesterday"}, "must be ISO 8601"),
        ({"service": "a", "rows": "bundles"}, "only decoded rows"),
        ({"malformed": "ignore"}, "fail or skip"),
    ],
)
def test_wrong_options_say_what_is_right(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        QuiverSource({"path": "/tmp", "signal": "traces", **options})  # noqa: S108 - never used


def test_a_directory_without_a_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="is no store"):
        read_all(tmp_path)


# --- Streaming, without Spark ------------------------------------------------------------------


def test_offsets_are_steps_from_segment_to_segment(tmp_path: Path) -> None:
    with filled(tmp_path / "core_0", make(5), 1) as store:
        made = source(tmp_path)
        reader = made.streamReader(made.schema())
        assert reader.initialOffset() == {}
        assert reader.latestOffset({}, ReadAllAvailable()) == {store.store_id: 5}
        assert reader.latestOffset({}, ReadMaxFiles(2)) == {store.store_id: 2}
        assert reader.latestOffset({store.store_id: 2}, ReadMaxBytes(1)) == {store.store_id: 3}
        reader.prepareForTriggerAvailableNow()
        ingest(store, make(1)[0])
        store.flush()
        assert reader.latestOffset({}, ReadAllAvailable()) == {store.store_id: 5}
        assert reader.reportLatestOffset() == {store.store_id: 6}
        pickler = CloudPickleSerializer()  # type: ignore[no-untyped-call]
        sent = pickler.loads(pickler.dumps(reader))  # type: ignore[no-untyped-call]
        (part,) = reader.partitions({store.store_id: 3}, {store.store_id: 5})
        found = pa.Table.from_batches(list(sent.read(part)))
        assert set(found.column("source_segment").to_pylist()) == {3, 4}


def test_a_stream_passes_over_what_is_gone_unless_told_not_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with filled(tmp_path, make(3), 1) as store:
        offsets = {store.store_id: 0}, {store.store_id: 3}
    (tmp_path / "segments" / f"{1:016}.qseg").unlink()
    made = source(tmp_path)
    with caplog.at_level(logging.WARNING):
        (part,) = made.streamReader(made.schema()).partitions(*offsets)
    assert "segment 1 of store" in caplog.text
    assert [piece.segment for piece in part.pieces] == [0, 2]  # type: ignore[attr-defined]
    strict = source(tmp_path, failOnDataLoss="true")
    with pytest.raises(SegmentNotFound, match="segment 1 of store"):
        strict.streamReader(made.schema()).partitions(*offsets)


def test_schemas_that_cannot_be_are_refused(tmp_path: Path) -> None:
    made = source(tmp_path)
    for field in (pa.field("nmae", pa.string()), pa.field("name", pa.int64())):
        with pytest.raises(QuiverError, match="column n"):
            made.reader(from_arrow_schema(pa.schema([field])))


# --- With Spark --------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.timeout(300)  # the first one starts Java
def test_spark_reads_two_stores_with_log_and_segments(spark: SparkSession, tmp_path: Path) -> None:
    requests = make(15)
    with (
        filled(tmp_path / "core_0", requests[:8], 3),
        filled(tmp_path / "core_1", requests[8:], 3),
    ):
        assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
        frame = load(spark, tmp_path)
        assert without_place(frame.toArrow()) == expected(requests)
        # A filter of one query must not stay in the DataFrame.
        rows = expected(requests)
        service = rows[0]["service_name"]
        mine = [row for row in rows if row["service_name"] == service]
        assert 0 < len(mine) < len(rows)
        assert frame.where(frame.service_name == service).count() == len(mine)
        assert frame.count() == len(rows)
        assert load(spark, tmp_path, service=service).count() == len(mine)


@pytest.mark.spark
@pytest.mark.timeout(300)  # the first one starts Java
def test_spark_asks_for_columns_and_hands_filters_over(spark: SparkSession, tmp_path: Path) -> None:
    requests = make(12)
    with filled(tmp_path, requests, 5):
        rows = expected(requests)
        service = rows[0]["service_name"]
        middle = sorted(row["start_time"] for row in rows)[len(rows) // 2]

        def query(pushdown: str) -> DataFrame:
            frame = load(spark, tmp_path, pushdown=pushdown, columns="service_name,start_time,name")
            return frame.where(
                (frame.service_name == service)
                & (frame.start_time >= middle)
                & frame.name.startswith("")
                & (frame.name.contains("") | (frame.name == "x"))
            )

        wanted = in_order(
            [
                {name: row[name] for name in ("service_name", "start_time", "name")}
                for row in rows
                if row["service_name"] == service and row["start_time"] >= middle
            ]
        )
        assert wanted
        plans = {}
        for pushdown in ("true", "false"):
            frame = query(pushdown)
            plans[pushdown] = frame._jdf.queryExecution().executedPlan().toString()
            assert in_order(frame.toArrow().to_pylist()) == wanted, pushdown
        assert "(service_name#" in plans["false"]
        assert "start_time#" in plans["false"].split("BatchScan")[0]
        assert "start_time" not in plans["true"].split("BatchScan")[0].partition("Filter")[2]
        subset = "name string, start_time timestamp"
        frame = (
            spark.read.format("quiver")
            .options(path=str(tmp_path), signal="traces")
            .schema(subset)
            .load()
        )
        assert frame.columns == ["name", "start_time"]
        assert frame.toArrow().num_rows == len(rows)
        with pytest.raises(AnalysisException, match="there is no column nmae"):
            load(spark, tmp_path, columns="nmae")


@pytest.mark.spark
@pytest.mark.timeout(300)  # the first one starts Java
def test_a_stream_comes_to_every_segment_once_across_restarts(
    spark: SparkSession, tmp_path: Path
) -> None:
    requests = make(16)
    seen: list[list[tuple[str, int, int]]] = []

    def keep(batch: DataFrame, number: int) -> None:
        columns = ("source_store", "source_segment", "source_item")
        seen.append([tuple(row) for row in batch.select(*columns).collect()])

    def run() -> int:
        before = len(seen)
        query = (
            spark.readStream.format("quiver")
            .options(path=str(tmp_path / "stores"), signal="traces", maxSegmentsPerTrigger="2")
            .load()
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(100)
        finally:
            query.stop()
        return len(seen) - before

    with filled(tmp_path / "stores" / "core_0", requests[:8], 2) as one:
        assert run() == 2
        with filled(tmp_path / "stores" / "core_1", requests[8:12], 2) as two:
            for request in requests[12:]:
                ingest(one, request)
            one.flush()
            assert run() == 2
            assert run() == 0
            assert sum(map(len, seen)) == len(expected(requests))
            segments = {(store, segment) for batch in seen for store, segment, _ in batch}
            assert segments == {
                *((one.store_id, number) for number in range(5)),
                *((two.store_id, number) for number in range(2)),
            }
            places = [{(store, segment) for store, segment, _ in batch} for batch in seen]
            assert sum(map(len, places)) == len(segments), "a segment came twice"
