"""Garbage collection: each rule that keeps a batch alive, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from consuming import scenario
from memory_objects import (
    MANIFEST,
    NAMED_MS,
    START_MS,
    MemoryObjects,
    doing,
    enqueue,
    failing,
    location,
    new_entry,
    produce,
)

from quiver.buffer import manifest
from quiver.buffer.collector import Collector
from quiver.buffer.consumer import Consumer
from quiver.buffer.types import NewEntry
from quiver.config import ConsumerConfig, LostBatchPolicy, QueueConfig
from quiver.errors import (
    Fenced,
    FormatError,
    LimitExceeded,
    ObjectsUnavailable,
    QueueError,
    QueueReset,
)
from quiver.metrics import Metrics
from quiver.testing.objects import SimulatedObjects
from quiver.testing.virtual_time import now_ms, run

GRACE = 600.0


DEFAULTS = ConsumerConfig()


def collector(
    objects: MemoryObjects,
    now: Callable[[], int] = now_ms,
    config: ConsumerConfig = DEFAULTS,
) -> Collector:
    return Collector(objects, config, metrics=Metrics(), now_ms=now)


def owned(objects: MemoryObjects, epoch: int = 1) -> None:
    """A manifest that a consumer has taken over."""
    there = objects.data(MANIFEST) if MANIFEST in objects.objects else manifest.EMPTY
    objects.store(MANIFEST, manifest.set_epoch(there, epoch, source=""))


def batches(objects: MemoryObjects) -> list[str]:
    return [path for path in objects.objects if path.endswith(".batch")]


async def rounds(it: Collector, number: int = 3, *, pause: float = GRACE / 2) -> list[str]:
    deleted: list[str] = []
    for _ in range(number):
        deleted += (await it.collect(1)).deleted
        await asyncio.sleep(pause)
    return deleted


@scenario
async def test_a_batch_that_is_not_listed_goes_in_the_second_round(
    objects: MemoryObjects,
) -> None:
    owned(objects)
    objects.store(location(1), b"x")
    it = collector(objects)
    await asyncio.sleep(GRACE)
    assert await it.collect(1) == ((), 1)
    assert await it.collect(1) == ((), 1), "too early after the first"
    await asyncio.sleep(GRACE / 2 - 1)
    assert await it.collect(1) == ((), 1)
    await asyncio.sleep(1)
    assert await it.collect(1) == ((location(1),), 0)
    assert batches(objects) == []
    assert it._metrics.get("buffer.gc_files_deleted", role="consumer") == 1


@scenario
async def test_a_young_batch_stays(objects: MemoryObjects) -> None:
    owned(objects)
    objects.store(location(1), b"x")
    it = collector(objects)
    await asyncio.sleep(GRACE - 1)
    assert await it.collect(1) == ((), 0)


@scenario
async def test_a_listed_batch_stays_however_old(objects: MemoryObjects) -> None:
    produce(objects, 1, 2)
    owned(objects)
    await asyncio.sleep(10 * GRACE)
    assert await rounds(collector(objects)) == []


@scenario
async def test_batches_go_after_they_were_consumed(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3)
    config = ConsumerConfig()
    consumer = Consumer(objects, config, metrics=Metrics(), now_ms=now_ms, random=Random(1))
    await consumer.initialize()
    await consumer.next_descriptors(2)
    await consumer.ack_through(1)
    await asyncio.sleep(GRACE)
    assert await rounds(collector(objects)) == [location(1), location(2)]
    assert batches(objects) == [location(3)]
    assert await consumer.next_batch()


@scenario
async def test_what_is_younger_than_the_oldest_listed_batch_stays(objects: MemoryObjects) -> None:
    produce(objects, 5)
    owned(objects)
    for number in (4, 6):
        objects.store(location(number), b"x")
    same_time = location(99, time_ms=NAMED_MS + 5)
    objects.store(same_time, b"x")
    await asyncio.sleep(10 * GRACE)
    assert await rounds(collector(objects)) == [location(4)]
    assert set(batches(objects)) == {location(5), location(6), same_time}


@scenario
async def test_the_oldest_listed_batch_need_not_be_the_first(objects: MemoryObjects) -> None:
    produce(objects, 9, 3, 7)
    owned(objects)
    for number in (2, 4):
        objects.store(location(number), b"x")
    await asyncio.sleep(GRACE)
    assert await rounds(collector(objects)) == [location(2)]


@pytest.mark.parametrize(
    "path",
    [
        "ingest/other",
        "ingest/manifest.batch",
        "ingest/01ARZ3NDEKTSV4RRFFQ69G5FAU.batch",  # U is no letter of theirs
        location(1) + ".tmp",
        location(1, "ingest/otel/metrics/data"),
        location(1, "ingest/nested"),
        location(1, "ingest2"),
        location(1, "other/ingest"),
        "ingest/01ARZ3NDEKTSV4RRFFQ69G5FAV/0000000000000001",
    ],
)
def test_what_is_not_directly_below_the_prefix_with_that_name_stays(path: str) -> None:
    async def test(objects: MemoryObjects) -> None:
        owned(objects)
        objects.store(path, b"x")
        await asyncio.sleep(10 * GRACE)
        assert await rounds(collector(objects)) == []
        assert path in objects.objects

    scenario(test)()


@scenario
async def test_a_manifest_named_like_a_batch_stays(objects: MemoryObjects) -> None:
    path = location(1)
    objects.store(path, manifest.set_epoch(manifest.EMPTY, 1, source=""))
    await asyncio.sleep(10 * GRACE)
    it = collector(objects, config=ConsumerConfig(queue=QueueConfig(manifest_path=path)))
    assert await rounds(it) == []


# --- Races with producers ---------------------------------------------------------------------


@scenario
async def test_a_batch_that_is_listed_between_two_rounds_stays(objects: MemoryObjects) -> None:
    owned(objects)
    objects.store(location(1), b"x")
    it = collector(objects)
    await asyncio.sleep(GRACE)
    assert (await it.collect(1)).marked == 1
    enqueue(objects, new_entry(1))
    assert await rounds(it) == []


@scenario
async def test_a_batch_that_is_listed_during_the_round_stays(objects: MemoryObjects) -> None:
    owned(objects)
    objects.store(location(1), b"x")
    it = collector(objects)
    await asyncio.sleep(GRACE)
    await it.collect(1)
    await asyncio.sleep(GRACE)
    objects.after["list_children"] = [doing(lambda: enqueue(objects, new_entry(1)))]
    assert (await it.collect(1)).deleted == ()
    assert batches(objects) == [location(1)]


@scenario
async def test_a_batch_that_is_uploaded_again_starts_over(objects: MemoryObjects) -> None:
    owned(objects)
    objects.store(location(1), b"x")
    it = collector(objects)
    await asyncio.sleep(GRACE)
    assert (await it.collect(1)).marked == 1
    objects.store(location(1), b"x")
    await asyncio.sleep(GRACE - 1)
    assert await it.collect(1) == ((), 0)
    await asyncio.sleep(1)
    assert await it.collect(1) == ((), 1)
    await asyncio.sleep(GRACE / 2)
    assert (await it.collect(1)).deleted == (location(1),)


@scenario
async def test_marks_are_of_one_upload(objects: MemoryObjects) -> None:
    """Even if no round saw the new upload while it was young."""
    owned(objects)
    objects.store(location(1), b"x")
    it = collector(objects)
    await asyncio.sleep(GRACE)
    await it.collect(1)
    objects.store(location(1), b"x")
    await asyncio.sleep(GRACE)
    assert await it.collect(1) == ((), 1)


# --- Clocks -----------------------------------------------------------------------------------


@scenario
async def test_a_producer_whose_clock_is_slow_loses_nothing(objects: MemoryObjects) -> None:
    owned(objects)
    old_name = location(1, time_ms=START_MS - 86_400_000)
    objects.store(old_name, b"x")
    assert await rounds(collector(objects), 2) == []
    await asyncio.sleep(GRACE)
    assert await rounds(collector(objects)) == [old_name]


@scenario
async def test_a_producer_whose_clock_is_fast_delays_collection(objects: MemoryObjects) -> None:
    owned(objects)
    name = location(1, time_ms=START_MS + 3_600_000)
    objects.store(name, b"x")
    await asyncio.sleep(GRACE * 2)
    assert await rounds(collector(objects)) == []
    await asyncio.sleep(3600)
    assert await rounds(collector(objects)) == [name]


@pytest.mark.parametrize("ahead_ms", [-86_400_000, 86_400_000])
def test_a_collector_whose_clock_is_wrong_deletes_nothing_young(ahead_ms: int) -> None:
    async def test(objects: MemoryObjects) -> None:
        owned(objects)
        objects.store(location(1), b"x")
        it = collector(objects, lambda: now_ms() + ahead_ms)
        for _ in range(5):
            assert (await it.collect(1)).deleted == ()
            await asyncio.sleep(GRACE / 5)
        assert batches(objects) == [location(1)]

    scenario(test)()


@scenario
async def test_a_collector_whose_clock_is_slow_waits_for_it(objects: MemoryObjects) -> None:
    owned(objects)
    objects.store(location(1), b"x")
    await asyncio.sleep(GRACE)
    it = collector(objects, lambda: now_ms() - 3_600_000)
    assert await rounds(it, 10) == []
    await asyncio.sleep(3600)
    assert await rounds(it) == [location(1)]


@pytest.mark.parametrize("ahead_ms", [-86_400_000, 86_400_000])
def test_a_store_whose_clock_is_wrong_loses_nothing_young(ahead_ms: int) -> None:
    async def test(objects: MemoryObjects) -> None:
        objects.clock = lambda: now_ms() + ahead_ms
        owned(objects)
        it = collector(objects)
        objects.store(location(1), b"x")
        for _ in range(5):
            assert (await it.collect(1)).deleted == ()
            await asyncio.sleep(GRACE / 5)
        assert batches(objects) == [location(1)]

    scenario(test)()


@scenario
async def test_without_the_time_of_the_store_nothing_is_deleted(objects: MemoryObjects) -> None:
    owned(objects)
    objects.store(location(1), b"x")
    await asyncio.sleep(GRACE * 2)
    it = collector(objects)
    for _ in range(3):
        objects.before["list_children"] = [doing(lambda: objects.objects.pop("ingest/.clock"))]
        assert await it.collect(1) == ((), 0)
        await asyncio.sleep(GRACE)


# --- Whose it is ------------------------------------------------------------------------------


async def refuses(
    objects: MemoryObjects, it: Collector, error: type[Exception], match: str
) -> None:
    """One old batch is there that would be collected, and it stays."""
    there = batches(objects)
    with pytest.raises(error, match=match):
        await it.collect(1)
    await asyncio.sleep(GRACE)
    with pytest.raises(error, match=match):
        await it.collect(1)
    assert batches(objects) == there != []


async def with_garbage(objects: MemoryObjects) -> Collector:
    """A collector that would delete a batch in its next round."""
    owned(objects)
    enqueue(objects, new_entry(7))
    objects.store(location(1), b"x")
    it = collector(objects)
    await asyncio.sleep(GRACE)
    assert (await it.collect(1)).marked == 1
    await asyncio.sleep(GRACE)
    return it


@scenario
async def test_there_is_something_to_collect(objects: MemoryObjects) -> None:
    it = await with_garbage(objects)
    assert (await it.collect(1)).deleted == (location(1),)


@scenario
async def test_a_fenced_collector_deletes_nothing(objects: MemoryObjects) -> None:
    it = await with_garbage(objects)
    owned(objects, 2)
    await refuses(objects, it, Fenced, "epoch 2")


@scenario
async def test_a_collector_that_is_fenced_during_the_round_deletes_nothing(
    objects: MemoryObjects,
) -> None:
    it = await with_garbage(objects)
    objects.after["list_children"] = [doing(lambda: owned(objects, 2))]
    await refuses(objects, it, Fenced, "epoch 2")


@scenario
async def test_without_a_manifest_nothing_is_deleted(objects: MemoryObjects) -> None:
    it = await with_garbage(objects)
    del objects.objects[MANIFEST]
    await refuses(objects, it, QueueReset, "gone")


@scenario
async def test_with_an_older_manifest_nothing_is_deleted(objects: MemoryObjects) -> None:
    it = await with_garbage(objects)
    objects.store(MANIFEST, manifest.set_epoch(manifest.EMPTY, 1, source=""))
    await refuses(objects, it, QueueReset, "next sequence is 0")


@scenario
async def test_with_a_damaged_manifest_nothing_is_deleted(objects: MemoryObjects) -> None:
    it = await with_garbage(objects)
    good = objects.data(MANIFEST)
    objects.store(MANIFEST, b"xx" + good)
    await refuses(objects, it, FormatError, MANIFEST)


@scenario
async def test_with_a_manifest_over_the_limit_nothing_is_deleted(objects: MemoryObjects) -> None:
    await with_garbage(objects)
    enqueue(objects, NewEntry("x" * 2000, ()))
    it = collector(objects, config=ConsumerConfig(queue=QueueConfig(max_manifest_bytes=1024)))
    await refuses(objects, it, LimitExceeded, "max_manifest_bytes")


@scenario
async def test_a_prefix_that_another_queue_owns_is_refused(objects: MemoryObjects) -> None:
    it = await with_garbage(objects)
    assert objects.data("ingest/.queue") == MANIFEST.encode()
    objects.store("ingest/.queue", b"other/manifest")
    await refuses(objects, it, QueueError, "prefix of its own")


@scenario
async def test_a_second_manifest_among_the_batches_is_refused(objects: MemoryObjects) -> None:
    """That of a queue whose consumer leaves no marker."""
    it = await with_garbage(objects)
    enqueue(objects, new_entry(1), path="ingest/second")
    await refuses(objects, it, QueueError, "ingest/second is the manifest of another queue")


@scenario
async def test_other_objects_are_looked_at_once(objects: MemoryObjects) -> None:
    owned(objects)
    for name, data in {"notes": b"x" * 50, "tail": b"x" * 50 + manifest.EMPTY, "few": b"x"}.items():
        objects.store(f"ingest/{name}", data)
    it = collector(objects)
    await it.collect(1)
    assert objects.calls["get_tail"] == 2
    await it.collect(1)
    assert objects.calls["get_tail"] == 2
    objects.store("ingest/notes", manifest.EMPTY)
    with pytest.raises(QueueError, match="ingest/notes"):
        await it.collect(1)


@scenario
async def test_a_batch_that_a_dead_letter_names_stays(objects: MemoryObjects) -> None:
    produce(objects, 1, 2)
    objects.store(location(1), b"damaged")
    config = ConsumerConfig(lost_batches=LostBatchPolicy.DEAD_LETTER)
    consumer = Consumer(objects, config, metrics=Metrics(), now_ms=now_ms, random=Random(1))
    await consumer.initialize()
    assert await consumer.next_batch()
    await consumer.ack_through(1)
    await asyncio.sleep(GRACE)
    it = collector(objects)
    assert await rounds(it) == [location(2)]
    assert len(await consumer.dead_letters()) == 1
    await consumer.requeue(0)
    assert await rounds(it) == []
    assert await consumer.next_batch() is None
    (letter,) = await consumer.dead_letters()
    assert letter.entry.sequence == 2


# --- How much, how often ----------------------------------------------------------------------


@scenario
async def test_a_round_deletes_no_more_than_it_may(objects: MemoryObjects) -> None:
    owned(objects)
    for number in range(5):
        objects.store(location(number), b"x")
    it = collector(objects, config=ConsumerConfig(gc_max_deletes=2))
    await asyncio.sleep(GRACE)
    await it.collect(1)
    await asyncio.sleep(GRACE)
    left = []
    for _ in range(3):
        await it.collect(1)
        left.append(len(batches(objects)))
    assert left == [3, 1, 0]


@scenario
async def test_a_failed_deletion_is_tried_in_the_next_round(objects: MemoryObjects) -> None:
    it = await with_garbage(objects)
    objects.before["delete"] = [failing(ObjectsUnavailable("down"))]
    with pytest.raises(ObjectsUnavailable):
        await it.collect(1)
    assert it._metrics.get("buffer.gc_files_failed", role="consumer") == 1
    assert (await it.collect(1)).deleted == (location(1),)


@scenario
async def test_it_runs_until_it_is_fenced(objects: MemoryObjects) -> None:
    owned(objects)
    objects.store(location(1), b"x")
    it = collector(objects, config=ConsumerConfig(gc_interval=60))
    loop = asyncio.get_running_loop()
    objects.before["list_children"] = [failing(ObjectsUnavailable("down"))]
    loop.call_later(1200, owned, objects, 2)
    with pytest.raises(Fenced):
        await it.run(1)
    assert 1200 <= loop.time() <= 1260
    assert batches(objects) == []
    assert it._metrics.get("buffer.gc_rounds_failed", role="consumer") == 1


def test_a_manifest_older_than_its_consumer_knows_is_refused() -> None:
    async def script() -> None:
        objects = SimulatedObjects(Random(1))
        collector = Collector(
            objects, ConsumerConfig(), metrics=Metrics(), now_ms=now_ms, known=lambda: 3
        )
        objects.plant(QueueConfig().manifest_path, manifest.EMPTY)
        with pytest.raises(QueueReset, match="it was 3 before"):
            await collector.collect(0)

    run(script())
