"""Producers and consumers without an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from memory_objects import MANIFEST, MemoryObjects

from quiver.buffer import manifest, uploading
from quiver.buffer.appender import wall_clock_ms
from quiver.buffer.batch import encode_batch
from quiver.buffer.blocking import BlockingConsumer, BlockingProducer
from quiver.buffer.handles import Durable
from quiver.buffer.objects import Objects
from quiver.buffer.obstore_objects import open_objects
from quiver.config import ConsumerConfig, ProducerConfig
from quiver.errors import Fenced, InvalidConfig, ObjectsUnavailable, ProducerClosed, QueueError

PATIENT = ProducerConfig(flush_interval=1e6)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [one.name for one in threading.enumerate() if one.name.startswith("quiver-")]


@pytest.fixture(params=["memory", "directory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "memory":
        return MemoryObjects(wall_clock_ms)
    return open_objects(tmp_path.as_uri())


def test_entries_go_from_one_to_the_other(objects: Objects) -> None:
    with BlockingProducer(objects, producer_id="p") as producer:
        handle = producer.produce([b"a", b"b"], b"m")
        durable = handle.watcher.durable(timeout=10)
        assert handle.watcher.result() == durable
        producer.produce([b"c"])
        producer.flush(timeout=10)
        assert producer.conflict_rate == 0
    with BlockingConsumer(objects) as consumer:
        consumer.initialize()
        assert (consumer.epoch, consumer.next_sequence, consumer.latest_sequence()) == (1, 2, 1)
        assert consumer.wait_for_batch(10)
        batch = consumer.next_batch()
        assert batch is not None
        assert (batch.records, batch.payload_of(1)) == ((b"a", b"b"), b"m")
        assert batch.entry.location == durable.location
        assert consumer.entries_between(-1, 0) == [batch.entry]
        consumer.ack(0)
        (entry,) = consumer.next_descriptors(9)
        assert consumer.fetch(entry).records == (b"c",)
        consumer.dead_letter(entry, "a test")
        consumer.ack_through(1)
        assert [letter.reason for letter in consumer.dead_letters()] == ["a test"]
        consumer.requeue(1)
        assert consumer.last_acked == 1
        again = consumer.next_batch(timeout=10)
        assert again is not None
        assert again.records == (b"c",)
        consumer.flush()
        assert not consumer.wait_for_batch(0)


def test_large_batches_are_encoded_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def noted(*arguments: Any) -> bytes:  # noqa: ANN401 - handed on
        names.append(threading.current_thread().name)
        return encode_batch(*arguments)

    monkeypatch.setattr(uploading, "encode_batch", noted)
    objects = MemoryObjects(wall_clock_ms)
    with BlockingProducer(objects) as producer:
        small = producer.produce([b"x"]).watcher.durable(10)
        large = producer.produce([b"x" * 100_000]).watcher.durable(10)
    assert [name == "quiver-producer" for name in names] == [True, False]
    assert len(objects.data(large.location)) > len(objects.data(small.location))


def test_many_threads_share_a_producer() -> None:
    objects = MemoryObjects(wall_clock_ms)
    with BlockingProducer(objects) as producer, ThreadPoolExecutor(8) as pool:
        handles = list(pool.map(lambda n: producer.produce([b"%d" % n]), range(200)))
        places = list(pool.map(lambda handle: handle.watcher.durable(10), handles))
    entries = manifest.entries(objects.data(MANIFEST), source=MANIFEST)
    assert {place.location for place in places} == {entry.location for entry in entries}
    assert sum(entry.facts.record_count or 0 for entry in entries) == 200


def test_close_writes_what_is_left_and_then_nothing_is_taken() -> None:
    producer = BlockingProducer(MemoryObjects(wall_clock_ms), PATIENT)
    handle = producer.produce([b"a"])
    assert handle.watcher.result() is None
    producer.close()
    producer.close()
    assert isinstance(handle.watcher.durable(), Durable)
    with pytest.raises(QueueError, match="closed"):
        producer.produce([b"b"])


def test_what_is_aborted_is_not_durable() -> None:
    producer = BlockingProducer(MemoryObjects(wall_clock_ms), PATIENT)
    handle = producer.produce([b"a"])
    producer.abort()
    with pytest.raises(ProducerClosed):
        handle.watcher.durable()


def test_a_call_that_takes_too_long_ends() -> None:
    producer = BlockingProducer(MemoryObjects(wall_clock_ms), PATIENT)
    handle = producer.produce([b"a"])
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        handle.watcher.durable(timeout=0.05)
    assert time.monotonic() - start < 5
    producer.flush()
    assert isinstance(handle.watcher.durable(), Durable)
    producer.close()


def test_somebody_who_waits_when_it_is_closed_is_told() -> None:
    producer = BlockingProducer(MemoryObjects(wall_clock_ms), PATIENT)
    handle = producer.produce([b"a"])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.watcher.durable)
        time.sleep(0.05)
        producer.abort()
        with pytest.raises(QueueError):
            waiting.result(10)


def test_a_store_that_hangs_does_not_hold_up_the_end() -> None:
    class Hanging(MemoryObjects):
        async def put(self, path: str, data: bytes) -> object:  # type: ignore[override]
            await super().put(path, data)
            await asyncio.sleep(3600)
            raise ObjectsUnavailable("no")

    producer = BlockingProducer(Hanging(wall_clock_ms))
    handle = producer.produce([b"a"])
    with pytest.raises(TimeoutError):
        producer.close(timeout=0.2)
    with pytest.raises(QueueError):
        handle.watcher.durable()


def test_errors_pass_through() -> None:
    objects = MemoryObjects(wall_clock_ms)
    first = BlockingConsumer(objects)
    with pytest.raises(QueueError, match="not initialized"):
        first.next_batch()
    first.initialize()
    with BlockingConsumer(objects, ConsumerConfig(dequeue_acks=1)) as second:
        second.initialize()
        with pytest.raises(Fenced):
            first.next_batch()
    with pytest.raises(Fenced):
        first.close()
    with pytest.raises(QueueError, match="is closed"):
        first.flush()


def test_a_producer_that_cannot_be_made_leaves_no_thread() -> None:
    with pytest.raises(InvalidConfig, match="host:port"):
        BlockingProducer(MemoryObjects(wall_clock_ms), ProducerConfig(committer="nowhere"))


def test_its_own_loop_cannot_wait_for_it() -> None:
    producer = BlockingProducer(MemoryObjects(wall_clock_ms))
    caught: list[BaseException] = []

    async def inside() -> None:
        try:
            producer.flush()
        except QueueError as error:
            caught.append(error)

    producer._thread.call(inside())
    producer.close()
    assert "wait for itself" in str(caught[0])
