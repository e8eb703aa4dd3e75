"""Producer, consumer and collector over stores as users have them: memory, a directory, S3."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from quiver.buffer.collector import Collector
from quiver.buffer.consumer import Consumer
from quiver.buffer.objects import Objects
from quiver.buffer.obstore_objects import open_objects
from quiver.buffer.producer import Producer
from quiver.config import BatchCompression, ConsumerConfig, ProducerConfig, QueueConfig
from quiver.errors import Fenced
from quiver.metrics import Metrics

if TYPE_CHECKING:
    from s3 import S3Server

pytest_plugins = ["s3"]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def consumer(objects: Objects, config: ConsumerConfig, last: int | None = None) -> Consumer:
    it = Consumer(objects, config, metrics=Metrics(), now_ms=now_ms, random=Random(1))
    await it.initialize(last)
    return it


async def roundtrip(objects: Objects) -> None:
    """Five batches, two consumers, and nothing left."""
    queue = QueueConfig(gc_grace_period=3, attempt_timeout=1.4)
    config = ConsumerConfig(queue=queue, dequeue_acks=2)
    async with Producer(
        objects, ProducerConfig(queue=queue, batch_compression=BatchCompression.ZSTD)
    ) as producer:
        for number in range(5):
            await producer.produce([b"%d" % number, b""], b"\1\1\1\0")
            await producer.flush()
    first = await consumer(objects, config)
    batch = await first.next_batch()
    assert batch is not None
    assert batch.records == (b"0", b"")
    assert batch.payload_of(1) == b"\1\1\1\0"
    await first.ack(0)

    second = await consumer(objects, config, last=0)
    with pytest.raises(Fenced):
        await first.flush()
    entries = await second.next_descriptors(9)
    batches = await asyncio.gather(*map(second.fetch, entries))
    assert [batch.records[0] for batch in batches] == [b"1", b"2", b"3", b"4"]
    await second.ack_through(4)
    assert await second.next_batch() is None

    collector = Collector(objects, config, metrics=Metrics(), now_ms=now_ms)
    deadline = time.monotonic() + 20
    deleted = 0
    while deleted < 5 and time.monotonic() < deadline:
        deleted += len((await collector.collect(second.epoch)).deleted)
        await asyncio.sleep(0.3)
    left = [child.path for child in await objects.list_children("ingest")]
    assert sorted(left) == ["ingest/.clock", "ingest/.queue", "ingest/manifest"]
    with pytest.raises(Fenced):
        await collector.collect(first.epoch)
    await second.close()


def test_in_memory() -> None:
    asyncio.run(roundtrip(open_objects("memory://consumer")))


def test_in_a_directory(tmp_path: Path) -> None:
    asyncio.run(roundtrip(open_objects(tmp_path.as_uri())))


@pytest.mark.xdist_group("s3")
def test_on_s3(s3_server: S3Server) -> None:
    asyncio.run(roundtrip(open_objects(s3_server.url("consumer"), **s3_server.keys)))
