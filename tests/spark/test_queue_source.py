"""A queue in object storage as a source for Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles

from quiver.buffer import manifest
from quiver.buffer.blocking import BlockingConsumer, BlockingProducer
from quiver.buffer.obstore_objects import open_objects
from quiver.bundle import Signal, Slot
from quiver.errors import Fenced, InvalidConfig, LakeError, QueueReset, QuiverError, SegmentNotFound
from quiver.lake.queue_source import QueueStreamReader, QuiverBufferSource
from quiver.otlp import decode
from quiver.testing import Shape, Telemetry

TRACES = bytes([1, 3, 1, 0])
LOGS = bytes([1, 2, 1, 0])
MANIFEST = "ingest/manifest"


def make(count: int, signal: Signal = Signal.TRACES) -> list[bytes]:
    return Telemetry(7, Shape(items_per_request=10)).take(signal, count)


def produce(root: Path, *batches: Sequence[bytes], metadata: bytes = TRACES) -> None:
    """A batch in the queue for each of these."""
    with BlockingProducer(open_objects(root.as_uri())) as producer:
        for batch in batches:
            producer.produce(batch, metadata).watcher.durable(30)


def source(root: Path, **options: str) -> QuiverBufferSource:
    return QuiverBufferSource({"url": root.as_uri(), "signal": "traces", **options})


def read_all(root: Path, **options: str) -> pa.Table:
    """The batches that Spark would get, without Spark."""
    made = source(root, **options)
    reader = made.reader(made.schema())
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert all(batch.schema.equals(made._wanted.schema) for batch in batches)
    return pa.Table.from_batches(batches, made._wanted.schema)


def stream(root: Path, **options: str) -> QueueStreamReader:
    made = source(root, **options)
    return made.streamReader(made.schema())


def spans(rows: pa.Table | pa.RecordBatch) -> list[Any]:
    return sorted(rows.column("span_id").to_pylist())


def wanted(requests: Sequence[bytes]) -> list[Any]:
    return spans(decode(Signal.TRACES, requests).table)


def queued(root: Path) -> list[int]:
    data = (root / MANIFEST).read_bytes()
    return [entry.sequence for entry in manifest.entries(data, source=MANIFEST)]


def sequences(parts: Sequence[Any]) -> list[int]:
    return [entry.sequence for part in parts for entry in part.entries]


# --- Batch, without Spark ----------------------------------------------------------------------


def test_a_batch_query_reads_what_the_manifest_has_and_takes_nothing(tmp_path: Path) -> None:
    requests = make(5)
    produce(tmp_path, requests[:2], requests[2:])
    produce(tmp_path, make(2, Signal.LOGS), metadata=LOGS)
    before = (tmp_path / MANIFEST).read_bytes()
    table = read_all(tmp_path, queueId="q", partitionBytes="1")
    assert spans(table) == wanted(requests)
    place = ("source_store", "source_segment", "source_bundle", "source_row")
    assert set(zip(*(table.column(name).to_pylist() for name in place), strict=True)) == {
        *(("q", 0, 0, row) for row in range(2)),
        *(("q", 1, 0, row) for row in range(3)),
    }
    assert table.column("ingested_time").null_count == 0
    logs = read_all(tmp_path, signal="logs", columns="source_segment")
    assert set(logs.column(0).to_pylist()) == {2}
    assert (tmp_path / MANIFEST).read_bytes() == before


def test_stored_requests_come_as_they_are(tmp_path: Path) -> None:
    produce(tmp_path, [b"a", b"b"])
    produce(tmp_path, [b"c"], metadata=LOGS)
    made = QuiverBufferSource({"url": tmp_path.as_uri(), "rows": "bundles"})
    reader = made.reader(made.schema())
    rows = [
        (row["segment"], row["row"], row["slot"], row["signal"], row["data"])
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]
    assert rows == [
        (0, 0, Slot.OTLP_TRACES, "traces", b"a"),
        (0, 1, Slot.OTLP_TRACES, "traces", b"b"),
        (1, 0, Slot.OTLP_LOGS, "logs", b"c"),
    ]


@pytest.mark.parametrize("metadata", [b"", bytes([2, 3, 1, 0]), bytes([1, 9, 1]), bytes([1, 3, 2])])
def test_records_that_are_no_requests_are_named_or_left_out(
    tmp_path: Path, metadata: bytes
) -> None:
    requests = make(2)
    produce(tmp_path, requests)
    produce(tmp_path, [b"?"], metadata=metadata)
    with pytest.raises(LakeError, match=r"batch 1 of queue .*its metadata is"):
        read_all(tmp_path)
    assert spans(read_all(tmp_path, malformed="skip")) == wanted(requests)


def test_a_lost_batch_is_named_or_left_out(tmp_path: Path) -> None:
    requests = make(3)
    produce(tmp_path, *([request] for request in requests))
    data = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / manifest.entries(data, source=MANIFEST)[1].location).unlink()
    with pytest.raises(LakeError, match=r"batch 1 .*there is no such object"):
        read_all(tmp_path)
    assert spans(read_all(tmp_path, malformed="skip")) == wanted([requests[0], requests[2]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "memory://x"}, "lives in one process"),
        ({"url": "ftp://x"}, "is no object store"),
        ({"url": "file:///x?y=z"}, "in its query"),
        ({"manifest": "../x"}, "queue.manifest_path"),
        ({"ack": "always"}, "never or commit"),
        ({"startingOffsets": '{"a": 1}'}, "startingOffsets must be"),
        ({"queueId": "a/b"}, "cannot name"),
        ({"path": "/x"}, "option path is not known"),
    ],
)
def test_wrong_options_say_what_is_right(options: dict[str, str], message: str) -> None:
    with pytest.raises(QuiverError, match=message):
        QuiverBufferSource({"url": "file:///x", "signal": "traces", **options})


def test_a_queue_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="there is no queue at"):
        read_all(tmp_path)


# --- Streaming, without Spark ------------------------------------------------------------------


def test_offsets_are_sequences_and_nothing_leaves_the_queue(tmp_path: Path) -> None:
    produce(tmp_path, *([request] for request in make(5)))
    reader = stream(tmp_path)
    try:
        start = reader.initialOffset()
        assert reader.latestOffset(start, ReadAllAvailable()) == {"sequence": 5}
        assert reader.latestOffset({"sequence": 1}, ReadMaxFiles(2)) == {"sequence": 3}
        assert reader.latestOffset({"sequence": 1}, ReadMaxBytes(1)) == {"sequence": 2}
        assert reader.latestOffset({"sequence": 1}, ReadMaxBytes(10**9)) == {"sequence": 5}
        reader.prepareForTriggerAvailableNow()
        produce(tmp_path, make(1))
        assert reader.latestOffset(start, ReadAllAvailable()) == {"sequence": 5}
        assert reader.latestOffset({"sequence": 5}, ReadMaxBytes(1)) == {"sequence": 5}
        parts = reader.partitions({"sequence": 1}, {"sequence": 4})
        assert sequences(parts) == [1, 2, 3]
        pickler = CloudPickleSerializer()  # type: ignore[no-untyped-call]
        sent = pickler.loads(pickler.dumps(reader))  # type: ignore[no-untyped-call]
        assert sum(batch.num_rows for part in parts for batch in sent.read(part)) == 30
        reader.commit({"sequence": 4})
        with pytest.raises(QueueReset, match="deleted or replaced"):
            reader.latestOffset({"sequence": 99}, ReadAllAvailable())
    finally:
        reader.stop()
    assert queued(tmp_path) == list(range(6))


def test_commits_take_batches_out_when_that_is_asked_for(tmp_path: Path) -> None:
    produce(tmp_path, *([request] for request in make(4)))
    reader = stream(tmp_path, ack="commit")
    reader.commit({"sequence": 2})  # as after a restart: planned by another process
    assert queued(tmp_path) == [2, 3]
    reader.commit({"sequence": 2})
    # What is gone is not asked for again, and said aloud when that is asked for.
    assert sequences(reader.partitions({"sequence": 0}, {"sequence": 4})) == [2, 3]
    assert sequences(reader.partitions({"sequence": 1}, {"sequence": 4})) == [2, 3]
    assert reader.partitions({"sequence": 0}, {"sequence": 2}) == []
    reader.stop()
    strict = stream(tmp_path, failOnDataLoss="true")
    with pytest.raises(SegmentNotFound, match="batches 1 to 1 of queue"):
        strict.partitions({"sequence": 1}, {"sequence": 4})
    strict.stop()


def test_another_consumer_fences_the_stream(tmp_path: Path) -> None:
    produce(tmp_path, make(1))
    reader = stream(tmp_path)
    reader.latestOffset({"sequence": 0}, ReadAllAvailable())
    with BlockingConsumer(open_objects(tmp_path.as_uri())) as other:
        other.initialize()
        with pytest.raises(Fenced, match="one streaming query reads a queue at a time"):
            reader.latestOffset({"sequence": 0}, ReadAllAvailable())
    reader.stop()


# --- With Spark --------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.timeout(300)  # the first one starts Java
def test_spark_reads_a_queue_and_goes_on_after_a_restart(
    spark: SparkSession, tmp_path: Path
) -> None:
    requests = make(7)
    queue = tmp_path / "queue"
    produce(queue, *([request] for request in requests[:5]))
    options = {"url": queue.as_uri(), "signal": "traces", "columns": "span_id"}
    whole = spark.read.format("quiver_buffer").options(**options).load()
    assert spans(whole.toArrow()) == wanted(requests[:5])
    seen: list[list[str]] = []

    def keep(batch: DataFrame, number: int) -> None:
        seen.append([row.span_id for row in batch.collect()])

    def run() -> int:
        before = len(seen)
        query = (
            spark.readStream.format("quiver_buffer")
            .options(**options, maxBatchesPerTrigger="2")
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

    assert run() == 3
    produce(queue, *([request] for request in requests[5:]))
    assert run() == 1
    assert sorted(span for batch in seen for span in batch) == wanted(requests)
    assert queued(queue) == list(range(7))


@pytest.mark.spark
@pytest.mark.timeout(300)  # the first one starts Java
def test_a_second_consumer_ends_a_running_query(spark: SparkSession, tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    produce(queue, make(1))
    query = (
        spark.readStream.format("quiver_buffer")
        .options(url=queue.as_uri(), signal="traces", columns="span_id")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        query.processAllAvailable()
        with BlockingConsumer(open_objects(queue.as_uri())) as other:
            other.initialize()
            with pytest.raises(StreamingQueryException, match="one streaming query reads a queue"):
                query.awaitTermination(60)
    finally:
        query.stop()
