"""``format("quiver_buffer")``: a queue in object storage, as rows in Spark.

::

    spark.readStream.format("quiver_buffer").option("url", "s3://bucket/prefix")
        .option("signal", "traces").load()

A batch query reads everything that the manifest lists, and changes nothing: any number of them may
run. A streaming query owns the queue: it raises the epoch, as every consumer does, and plans
batches by their sequence; tasks fetch them from where they lie, in parallel. A second streaming
query on the same queue fences the first, which then fails and says so. Its offset is the next
sequence.

What is acknowledged leaves the manifest, and is collected as garbage later. The option ``ack`` says
who does that:

``never``
    Not this source. Whoever keeps the results does it, once they are safe; for the lake that is
    its land job.
``commit``
    This source, when Spark reports a micro-batch as done. That comes one micro-batch late, and not
    at all for the last one before the query ends. For sinks that forget nothing once Spark is done.

Records are OTLP requests; their metadata begins with the bytes 1, the signal (1 metrics, 2 logs,
3 traces) and 1 for protobuf. In the columns that say where a row comes from, a batch is the segment
with the number of its sequence, and its only bundle. All options: ``source_options``. Keys of an
object store are best left to the environment: options can be seen in plans.

On a cluster, the package must be installed where the driver runs, as for ``quiver``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Final, cast

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from quiver.buffer import manifest
from quiver.buffer.blocking import BlockingConsumer
from quiver.buffer.fetching import fetch_batch
from quiver.buffer.objects import Objects
from quiver.buffer.obstore_objects import open_objects
from quiver.buffer.retrying import retrying
from quiver.buffer.types import Batch, Metadata, QueueEntry
from quiver.bundle import Signal
from quiver.config import MIB, ConsumerConfig, QueueConfig
from quiver.errors import (
    BatchLost,
    Fenced,
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    ObjectNotFound,
    QueueError,
    QueueReset,
)
from quiver.lake.batches import Place, Request, Scan, new_scan
from quiver.lake.layout import check_name
from quiver.lake.scanning import SEQUENCE, Offset, pack, queue_id, read_offset
from quiver.lake.source_options import COMMON, Given, read_wanted

FORMAT: Final = "quiver_buffer"
_OBJECTS: Final = "objects."
_OPTIONS: Final = (
    *COMMON,
    *("url", "manifest", "dataPrefix", "queueId", "ack", "maxBatchesPerTrigger"),
)
_UNKNOWN_SIZE: Final = 8 * MIB
_LOOK_AHEAD: Final = 10_000
"""Entries of a manifest that are decoded to find out how many fit below a limit."""
_SIGNALS: Final[Mapping[int, Signal]] = {1: Signal.METRICS, 2: Signal.LOGS, 3: Signal.TRACES}
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Queue:
    """Where a queue is. Plain data: it travels to the workers."""

    url: str
    settings: Mapping[str, str]
    config: QueueConfig
    name: str

    def open(self) -> Objects:
        """Its object store."""
        return open_objects(self.url, **self.settings)

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.url.partition('?')[0]} ({self.config.manifest_path})"


class Batches(InputPartition):
    """Batches for one task."""

    def __init__(self, entries: list[QueueEntry]) -> None:
        super().__init__(None)
        self.entries = entries


class QuiverBufferSource(DataSource):
    """The format, with its options checked."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(cast("Any", options))
        given = Given(options, _OPTIONS, _OBJECTS)
        self._queue = _read_queue(given, options)
        self._ack = given.one_of("ack", ("never", "commit")) == "commit"
        self._wanted = read_wanted(given, "maxBatchesPerTrigger")
        if self._wanted.starting is not None and set(self._wanted.starting) != {SEQUENCE}:
            raise InvalidConfig(f'option startingOffsets must be {{"{SEQUENCE}": number}}')

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return from_arrow_schema(self._wanted.schema)

    def reader(self, schema: StructType) -> QueueBatchReader:
        scan = new_scan(self._wanted, schema, fail_on_loss=True)
        kind = FilteringQueueReader if self._wanted.pushdown else QueueBatchReader
        return kind(self._queue, scan)

    def streamReader(self, schema: StructType) -> QueueStreamReader:  # noqa: N802 - Spark's name
        scan = new_scan(self._wanted, schema, fail_on_loss=False)
        return QueueStreamReader(self._queue, scan, acknowledges=self._ack)


def _read_queue(given: Given, options: Mapping[str, str]) -> Queue:
    url = given.text("url")
    if not url:
        raise InvalidConfig("option url is missing: the object store of the queue")
    if url.startswith("memory:"):
        raise InvalidConfig(f"{url} lives in one process, and tasks run in others")
    defaults = QueueConfig()
    config = QueueConfig(
        manifest_path=given.text("manifest") or defaults.manifest_path,
        data_path_prefix=given.text("dataPrefix") or defaults.data_path_prefix,
    )
    settings = {
        name[len(_OBJECTS) :]: value
        for name, value in options.items()
        if name.lower().startswith(_OBJECTS)
    }
    name = given.text("queueId")
    own = queue_id(url, config.manifest_path) if name is None else check_name(name)
    queue = Queue(url, settings, config, own)
    queue.open()  # it asks for nothing, but it knows what a URL must look like
    return queue


# --- Tasks --------------------------------------------------------------------------------------


def read_entries(queue: Queue, scan: Scan, entries: Iterable[QueueEntry]) -> Iterator[Request]:
    """The requests of some batches, fetched one after the other."""
    objects = queue.open()
    with asyncio.Runner() as runner:
        for entry in entries:
            try:
                batch = runner.run(_fetch(queue, objects, entry))
            except BatchLost as error:
                scan.refuse(f"batch {entry.sequence} of queue {queue.place}", error)
                continue
            yield from _requests_of_batch(queue, scan, batch)


async def _fetch(queue: Queue, objects: Objects, entry: QueueEntry) -> Batch:
    config = queue.config
    return await retrying(
        lambda: fetch_batch(
            objects, entry, config.max_batch_bytes, attempt_timeout=config.attempt_timeout
        ),
        what=f"batch {entry.sequence} of queue {queue.place}, {entry.location}",
        config=config,
        random=Random(),  # noqa: S311 - for the pauses between attempts
    )


def _requests_of_batch(queue: Queue, scan: Scan, batch: Batch) -> Iterator[Request]:
    sequence = batch.entry.sequence
    name = f"batch {sequence} of queue {queue.place}, {batch.entry.location}"
    place = Place(queue.name, sequence, 0, name)
    count = len(batch.records)
    described = batch.entry.metadata
    if count and not described:
        scan.refuse(name, InvalidRequest("nothing says what its records are"))
    ends = [*(metadata.start_index for metadata in described[1:]), count]
    for metadata, end in zip(described, ends, strict=False):
        signal = _signal_of(metadata)
        if signal is None:
            scan.refuse(name, InvalidRequest(_strange(metadata), request=metadata.start_index))
            continue
        if scan.wanted.signal not in {None, signal}:
            continue
        ingested_ns = max(0, metadata.ingestion_time_ms) * 1_000_000
        for row in range(metadata.start_index, min(end, count)):
            yield Request(place, signal, row, batch.records[row], ingested_ns)


def _signal_of(metadata: Metadata) -> Signal | None:
    version, signal, encoding = (*metadata.payload[:3], 0, 0, 0)[:3]
    return _SIGNALS.get(signal) if (version, encoding) == (1, 1) else None


def _strange(metadata: Metadata) -> str:
    return (
        f"its metadata is {metadata.payload[:8].hex(' ') or 'empty'}; OTLP requests have 01, the "
        "signal (01, 02 or 03), 01"
    )


def _partitions(scan: Scan, entries: Iterable[QueueEntry]) -> list[InputPartition]:
    groups = pack(entries, scan.wanted.partition_bytes, _size)
    return [Batches(group) for group in groups]


def _size(entry: QueueEntry) -> int:
    size = entry.facts.object_size
    return _UNKNOWN_SIZE if size is None else size


# --- Readers ------------------------------------------------------------------------------------


class QueueBatchReader(DataSourceReader):
    """One look at the manifest. It takes nothing over, and nothing away."""

    def __init__(self, queue: Queue, scan: Scan) -> None:
        self._queue = queue
        self._scan = scan

    def partitions(self) -> list[InputPartition]:
        path = self._queue.config.manifest_path
        data = asyncio.run(self._manifest())
        first = manifest.locations(data, source=path)
        entries = [
            entry
            for entry in manifest.entries(data, source=path)
            if first[entry.location] == entry.sequence  # not listed twice
        ]
        return _partitions(self._scan, entries) or [Batches([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        entries = cast("Batches", partition).entries
        return self._scan.requests(read_entries(self._queue, self._scan, entries))

    async def _manifest(self) -> bytes:
        config = self._queue.config
        objects = self._queue.open()
        try:
            fetched = await retrying(
                lambda: objects.get(config.manifest_path),
                what=self._queue.place,
                config=config,
                random=Random(),  # noqa: S311 - for the pauses between attempts
            )
        except ObjectNotFound as error:
            raise InvalidConfig(f"there is no queue at {self._queue.place}") from error
        if fetched is None or fetched.size > config.max_manifest_bytes:
            raise LimitExceeded(
                self._queue.place, 0, f"a manifest above {config.max_manifest_bytes} bytes"
            )
        return fetched.data


class FilteringQueueReader(QueueBatchReader):
    """The same, with the filters of the query that is planned first."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        self._scan, left = self._scan.push(filters)
        return left


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The consumer of a queue, as long as the query runs.

    Offsets and plans are made in one process, which lives as long as the query; only that one takes
    the queue over. The copies of this object in the workers do not.
    """

    def __init__(self, queue: Queue, scan: Scan, *, acknowledges: bool) -> None:
        self._queue = queue
        self._scan = scan
        self._acknowledges = acknowledges
        self._target: int | None = None
        self._consumer: BlockingConsumer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_consumer": None}

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return dict(self._scan.wanted.starting or {SEQUENCE: 0})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        wanted = self._scan.wanted
        if wanted.max_bytes is not None:
            return ReadMaxBytes(wanted.max_bytes)
        if wanted.max_pieces is not None:
            return ReadMaxFiles(wanted.max_pieces)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        with self._owned() as consumer:
            self._target = consumer.latest_sequence() + 1

    def latestOffset(self, start: Offset, limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        begin = _sequence(start)
        with self._owned() as consumer:
            end = consumer.latest_sequence() + 1
            if end < begin:
                raise QueueReset(
                    f"{self._queue.place}: the checkpoint is at sequence {begin}, the queue at "
                    f"{end}: it was deleted or replaced by an older one"
                )
            if self._target is not None:
                end = max(begin, min(end, self._target))
            first = max(begin, consumer.last_acked + 1)
            if isinstance(limit, ReadMaxFiles):
                end = min(end, first + limit.max_files)
            if isinstance(limit, ReadMaxBytes):
                end = _below(consumer, first, end, limit.max_bytes)
        return {SEQUENCE: end}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        begin, behind = _sequence(start), _sequence(end)
        with self._owned() as consumer:
            first = max(begin, consumer.last_acked + 1)
            if first > begin > 0:
                gone = f"batches {begin} to {min(first, behind) - 1} of queue {self._queue.place}"
                self._scan.lost(gone)
            if first >= behind:
                return []
            return _partitions(self._scan, consumer.entries_between(first - 1, behind - 1))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        entries = cast("Batches", partition).entries
        return self._scan.requests(read_entries(self._queue, self._scan, entries))

    def commit(self, end: Offset) -> None:
        if not self._acknowledges:
            return
        through = _sequence(end) - 1
        with self._owned() as consumer:
            if through > consumer.last_acked:
                # After a restart they were planned by another process: this one has to see them.
                consumer.entries_between(consumer.last_acked, through)
                consumer.ack_through(through)

    def stop(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            try:
                consumer.close()
            except QueueError as error:
                _LOG.warning("%s: %s", self._queue.place, error)

    @contextmanager
    def _owned(self) -> Iterator[BlockingConsumer]:
        """The consumer, which takes the queue over when it is first needed."""
        try:
            if self._consumer is None:
                self._consumer = _take_over(self._queue)
            yield self._consumer
        except Fenced as error:
            raise Fenced(
                f"another consumer has taken over the queue {self._queue.place}: one streaming "
                "query reads a queue at a time. Stop the other one, then start this one again: it "
                "goes on from its checkpoint"
            ) from error


def _take_over(queue: Queue) -> BlockingConsumer:
    consumer = BlockingConsumer(queue.open(), ConsumerConfig(queue=queue.config))
    try:
        consumer.initialize()
    except BaseException:
        consumer.close()
        raise
    return consumer


def _sequence(offset: Offset) -> int:
    known = read_offset(offset, "the checkpoint")
    if set(known) != {SEQUENCE}:
        raise InvalidConfig(f"the checkpoint has {dict(known)}, which is no offset of a queue")
    return known[SEQUENCE]


def _below(consumer: BlockingConsumer, first: int, end: int, max_bytes: int) -> int:
    """How far the batches from ``first`` on stay below a size; one batch at least."""
    end = min(end, first + _LOOK_AHEAD)
    if first >= end:
        return end
    size = 0
    for entry in consumer.entries_between(first - 1, end - 1):
        size += _size(entry)
        if size > max_bytes and entry.sequence > first:
            return entry.sequence
    return end
