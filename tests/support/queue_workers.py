"""What the processes of a queue test run: a producer, or a consumer with a sink that survives it.

::

    python queue_workers.py produce|consume '{"url": ..., ...}'

A producer prints a line before each call (``produced``) and one after its entries are durable
(``durable``), in JSON. A consumer prints one when it has started (``ready``), writes to a ``Sink``,
and ends with a code of ``Ended``. Both are coroutines, so a test of a store within one process runs
them as tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from random import Random
from typing import Any, Final

from queue_bugs import BUGS

from quiver.buffer.collector import Collector
from quiver.buffer.consumer import Consumer
from quiver.buffer.handles import WriteHandle
from quiver.buffer.objects import Objects
from quiver.buffer.obstore_objects import open_objects
from quiver.buffer.producer import Producer
from quiver.buffer.types import Batch
from quiver.config import BatchCompression, ConsumerConfig, ProducerConfig, QueueConfig
from quiver.errors import Conflict, Fenced, ObjectsUnavailable, QueueError
from quiver.metrics import Metrics

Say = Callable[[dict[str, Any]], None]
QUEUE: Final = QueueConfig(
    attempt_timeout=4.0, give_up_after=60.0, max_backoff=0.5, gc_grace_period=9.0
)


class Ended(IntEnum):
    """How a consumer ended, as the exit code of its process."""

    EMPTY = 0
    WRONG = 1  # what Python says after an exception that nobody expected
    FENCED = 3
    UNAVAILABLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker is to do."""

    url: str
    name: str
    seed: int
    seconds: float = 0.0
    rate: float = 40.0  # calls in a second
    sink: str = ""
    until_empty: bool = False
    bug: str = ""  # of those that can be planted
    keys: dict[str, str] = field(default_factory=dict)

    def open(self) -> Objects:
        """The store."""
        return open_objects(self.url, **self.keys)

    def encode(self) -> str:
        """As an argument."""
        return json.dumps(asdict(self))


class Sink:
    """A database that takes a batch together with its sequence, or not at all."""

    def __init__(self, path: str) -> None:
        self._path = path

    def prepare(self) -> None:
        """Make it."""
        with self._transaction() as database:
            database.execute("CREATE TABLE batch (sequence INTEGER PRIMARY KEY, location, records)")

    def last(self) -> int | None:
        """The last sequence that it has."""
        with self._transaction() as database:
            found: int | None = database.execute("SELECT max(sequence) FROM batch").fetchone()[0]
        return found

    def write(self, batch: Batch) -> None:
        """Take a batch, unless another consumer was faster."""
        records = json.dumps([record.decode() for record in batch.records])
        row = (batch.entry.sequence, batch.entry.location, records)
        with self._transaction() as database:
            last = database.execute("SELECT max(sequence) FROM batch").fetchone()[0]
            if last is None or batch.entry.sequence > last:
                database.execute("INSERT INTO batch VALUES (?, ?, ?)", row)

    def read(self) -> list[tuple[int, str, list[str]]]:
        """Everything, in order."""
        with self._transaction() as database:
            rows = database.execute("SELECT * FROM batch ORDER BY sequence").fetchall()
        return [(sequence, location, json.loads(records)) for sequence, location, records in rows]

    @contextlib.contextmanager
    def _transaction(self) -> Any:  # noqa: ANN401 - a generator, which the decorator turns around
        database = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        try:
            database.execute("PRAGMA synchronous = OFF")  # processes are killed, machines are not
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")
        finally:
            database.close()


def now_ms() -> int:
    """The time of day."""
    return time.time_ns() // 1_000_000


async def produce(work: Work, say: Say) -> int:
    """Calls for some seconds, then close."""
    random = Random(work.seed)
    config = ProducerConfig(
        queue=QUEUE,
        flush_interval=random.choice([0.01, 0.05]),
        flush_size_bytes=random.choice([1, 100]),
        batch_compression=random.choice(list(BatchCompression)),
    )
    producer = Producer(work.open(), config, random=random, producer_id=work.name)
    watching: set[asyncio.Task[None]] = set()
    end = time.monotonic() + work.seconds
    number = 0
    while time.monotonic() < end:
        records = [f"{work.name}/{number}/{i}" for i in range(random.randrange(1, 4))]
        say({"produced": records})
        handle = await producer.produce([record.encode() for record in records])
        watching.add(asyncio.create_task(_watch(handle, number, records, say)))
        number += 1
        await asyncio.sleep(random.expovariate(work.rate))
    with contextlib.suppress(QueueError):  # which the watchers tell
        await producer.close()
    await asyncio.gather(*watching)
    return 0


async def _watch(handle: WriteHandle, number: int, records: list[str], say: Say) -> None:
    try:
        durable = await handle.watcher.durable()
    except QueueError as error:
        say({"failed": number, "error": str(error)})
    else:
        say({"durable": records, "location": durable.location, "sequence": durable.sequence})


async def consume(work: Work, say: Say) -> int:
    """Until it is fenced or killed, or until the queue is empty, if that is wanted."""
    random, sink, objects = Random(work.seed), Sink(work.sink), work.open()
    config = ConsumerConfig(
        queue=QUEUE,
        dequeue_acks=random.choice([1, 5, 50]),
        dequeue_interval=random.choice([0.1, 2.0]),
        gc_interval=0.5,
    )
    consumer = Consumer(objects, config, metrics=Metrics(), now_ms=now_ms, random=random)
    collector = Collector(objects, config, metrics=Metrics(), now_ms=now_ms)
    try:
        await consumer.initialize(
            sink.last() if work.until_empty or random.random() < 0.8 else None
        )
        say({"ready": [work.name]})
        collecting = asyncio.create_task(collector.run(consumer.epoch))
        try:
            while await consumer.wait_for_batch(0.5 if work.until_empty else None):
                await _take(consumer, sink, random)
            await consumer.close()
        finally:
            collecting.cancel()
    except Fenced:
        return Ended.FENCED
    except (ObjectsUnavailable, Conflict):
        return Ended.UNAVAILABLE
    return Ended.EMPTY


async def _take(consumer: Consumer, sink: Sink, random: Random) -> None:
    if random.random() < 0.5:
        entries = await consumer.next_descriptors(8)
        batches = list(await asyncio.gather(*map(consumer.fetch, entries)))
    else:
        batch = await consumer.next_batch()
        batches = [batch] if batch else []
    for one in batches:
        sink.write(one)
    if batches and random.random() < 0.5:
        await consumer.ack_through(batches[-1].entry.sequence)
        return
    for one in batches:
        if one.entry.sequence == consumer.last_acked + 1:
            await consumer.ack(one.entry.sequence)
        else:  # a repeat was left out before it
            await consumer.ack_through(one.entry.sequence)


ROLES: Final = {"produce": produce, "consume": consume}


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """As a process."""
    role, argument = sys.argv[1:]
    work = Work(**json.loads(argument))
    with BUGS[work.bug]() if work.bug else contextlib.nullcontext():
        sys.exit(asyncio.run(ROLES[role](work, _print)))


SCRIPT: Final = Path(__file__)

if __name__ == "__main__":
    main()
