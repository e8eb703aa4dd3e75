"""The consumer: taking over and delivering."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from consuming import batches, consumer, count, drained, footer, scenario, sequences, started
from memory_objects import (
    MANIFEST,
    MemoryObjects,
    doing,
    failing,
    produce,
)

from quiver.buffer import manifest
from quiver.config import QueueConfig
from quiver.errors import (
    Conflict,
    Fenced,
    ObjectsUnavailable,
    QueueError,
    QueueReset,
)

# --- Taking over ------------------------------------------------------------------------------


@scenario
async def test_the_first_consumer_makes_the_manifest(objects: MemoryObjects) -> None:
    it = await started(objects)
    assert footer(objects) == (0, 0, 1)
    assert it.epoch == 1
    assert await it.next_batch() is None


@scenario
async def test_a_second_consumer_fences_the_first(objects: MemoryObjects) -> None:
    produce(objects, 1, 2)
    old = await started(objects)
    batch = await old.next_batch()
    assert batch is not None
    new = await started(objects)
    assert new.epoch == 2
    with pytest.raises(Fenced):
        await old.next_batch()
    with pytest.raises(Fenced):
        await old.ack(0)
    assert await drained(new) == [0, 1]


@scenario
async def test_a_fenced_consumer_removes_nothing(objects: MemoryObjects) -> None:
    produce(objects, 1, 2)
    old = await started(objects)
    assert await drained(old) == [0, 1]
    await old.ack(0)
    await started(objects)
    with pytest.raises(Fenced):
        await old.flush()
    with pytest.raises(Fenced):
        await old.ack_through(1)
    assert old.last_acked == 0
    assert sequences(objects) == [0, 1]


@scenario
async def test_fencing_is_atomic_with_the_write(objects: MemoryObjects) -> None:
    produce(objects, 1)
    old = await started(objects)
    await old.next_batch()
    take_over = manifest.set_epoch(objects.data(MANIFEST), 9, source=MANIFEST)
    objects.before["put_if"] = [doing(lambda: objects.store(MANIFEST, take_over))]
    with pytest.raises(Fenced):
        await old.ack_through(0)
    assert sequences(objects) == [0]
    assert old.last_acked == -1


@scenario
async def test_a_consumer_resumes_after_what_it_processed(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3, 4)
    objects.reset_counts()
    it = await started(objects, 1)
    assert sequences(objects) == [2, 3]
    assert objects.calls["put_if"] == 2, "the epoch and the removal are one write; the marker one"
    assert await drained(it) == [2, 3]
    await it.ack(2)
    with pytest.raises(QueueError, match="3 is next"):
        await it.ack(4)


@scenario
async def test_a_position_before_what_is_left_is_counted(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3, 4)
    other = await started(objects)
    await drained(other)
    await other.ack_through(2)
    it = await started(objects, 0)
    assert count(it, "batches_missed") == 2
    assert await drained(it) == [3]
    await it.ack(3)


@pytest.mark.parametrize("last_acked", [3, 99])
@pytest.mark.parametrize("entries", [0, 3])
def test_a_manifest_that_never_came_that_far_is_refused(last_acked: int, entries: int) -> None:
    async def test(objects: MemoryObjects) -> None:
        if entries:
            produce(objects, *range(entries))
        before = dict(objects.objects)
        with pytest.raises(QueueReset, match="was processed before"):
            await started(objects, last_acked)
        assert objects.objects == before

    scenario(test)()


@pytest.mark.parametrize("error", [ObjectsUnavailable("late"), Conflict("412")])
def test_a_take_over_of_unknown_fate_is_done_again(error: QueueError) -> None:
    async def test(objects: MemoryObjects) -> None:
        produce(objects, 1)
        objects.after["put_if"] = [failing(error)]
        it = await started(objects)
        assert it.epoch == footer(objects).epoch == 2
        assert await drained(it) == [0]

    scenario(test)()


@scenario
async def test_two_with_the_same_idea_do_not_share_an_epoch(objects: MemoryObjects) -> None:
    produce(objects, 1)
    rival = consumer(objects)
    it = consumer(objects)

    async def lose_to_the_rival(_path: str) -> None:
        await rival.initialize()

    objects.before["put_if"] = [lose_to_the_rival]
    await it.initialize()
    assert (rival.epoch, it.epoch) == (1, 2)
    with pytest.raises(Fenced):
        await rival.next_batch()


@scenario
async def test_a_store_that_stays_away_ends_the_attempts(objects: MemoryObjects) -> None:
    objects.before["get"] = [failing(ObjectsUnavailable("down"))] * 10_000
    loop = asyncio.get_running_loop()
    with pytest.raises(ObjectsUnavailable, match="given up"):
        await started(objects, queue=QueueConfig(give_up_after=60))
    assert 60 <= loop.time() <= 70


@scenario
async def test_a_prefix_of_another_queue_is_refused(objects: MemoryObjects) -> None:
    await started(objects)
    before = dict(objects.objects)
    with pytest.raises(QueueError, match="prefix of its own"):
        await started(objects, queue=QueueConfig(manifest_path="other/manifest"))
    assert objects.objects == before


@scenario
async def test_nothing_works_before_or_after(objects: MemoryObjects) -> None:
    it = consumer(objects)
    with pytest.raises(QueueError, match="not initialized"):
        await it.next_batch()
    await it.initialize()
    with pytest.raises(QueueError, match="already"):
        await it.initialize()
    await it.close()
    await it.close()
    with pytest.raises(QueueError, match="closed"):
        await it.flush()


# --- Delivery ---------------------------------------------------------------------------------


@scenario
async def test_batches_come_in_order_with_their_records(objects: MemoryObjects) -> None:
    it = await started(objects)
    produce(objects, 5, 3)
    produce(objects, 4)
    records = [batch.records async for batch in batches(it)]
    assert records == [(b"record 5",), (b"record 3",), (b"record 4",)]
    assert count(it, "batches_collected") == count(it, "entries_collected") == 3
    assert count(it, "bytes_collected") == 24
    assert count(it, "queue_length") == 3


@scenario
async def test_many_entries_come_through_windows(objects: MemoryObjects) -> None:
    it = await started(objects, dequeue_acks=7)
    produce(objects, *range(600))
    for expected in range(600):
        batch = await it.next_batch()
        assert batch is not None
        assert batch.entry.sequence == expected
        assert batch.records == (f"record {expected}".encode(),)
        if expected % 3 == 0 and expected < 300:
            produce(objects, 1000 + expected)
        await it.ack(expected)
    assert await drained(it) == list(range(600, 700))


@scenario
async def test_descriptors_are_handed_out_once_with_one_read(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3)
    it = await started(objects)
    objects.reset_counts()
    assert [entry.sequence for entry in await it.next_descriptors(2)] == [0, 1]
    assert objects.calls == {"get_tail": 1}
    assert [entry.sequence for entry in await it.next_descriptors(5)] == [2]
    assert await it.next_descriptors(5) == []
    assert count(it, "descriptors_handed_out") == 3
    objects.reset_counts()
    assert await it.next_descriptors(0) == []
    assert not objects.calls


@scenario
async def test_descriptors_are_fetched_in_parallel(objects: MemoryObjects) -> None:
    produce(objects, *range(10))
    it = await started(objects)

    async def slow(_path: str) -> None:
        await asyncio.sleep(1)

    entries = await it.next_descriptors(10)
    objects.before["get_tail"] = [slow] * 10
    loop = asyncio.get_running_loop()
    start = loop.time()
    batches = await asyncio.gather(*map(it.fetch, entries))
    assert loop.time() - start == 1
    assert [batch.entry for batch in batches] == entries


@scenario
async def test_two_takers_never_get_the_same_batch(objects: MemoryObjects) -> None:
    produce(objects, *range(20))
    it = await started(objects)
    random = Random(3)

    async def slow(_path: str) -> None:
        await asyncio.sleep(random.random())

    objects.before["get_tail"] = [slow] * 100
    both = await asyncio.gather(drained(it), drained(it))
    assert sorted(both[0] + both[1]) == list(range(20))


@scenario
async def test_a_cancelled_call_takes_nothing(objects: MemoryObjects) -> None:
    """At each point where the call waits, cancelling it must leave the batch for the next one."""
    produce(objects, 1, 2)
    it = await started(objects, dequeue_interval=0)
    cancelled = 0
    for expected in (0, 1):
        for steps in range(1, 60):
            task = asyncio.create_task(it.next_batch())
            for _ in range(steps):
                await asyncio.sleep(0)
            if task.done():
                batch = task.result()
                break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            cancelled += 1
        assert batch is not None
        assert batch.entry.sequence == expected
        await it.ack(expected)
        produce(objects, 10 + expected)
    assert cancelled > 5
    assert await drained(it) == [2, 3]


@scenario
async def test_lag_is_that_of_the_last_record(objects: MemoryObjects) -> None:
    it = await started(objects)
    produce(objects, 1)
    await asyncio.sleep(2.5)
    await it.next_batch()
    assert count(it, "consumer_lag_seconds") == 2.5


@scenario
async def test_waiting_polls_ever_less_often(objects: MemoryObjects) -> None:
    it = await started(objects)
    loop = asyncio.get_running_loop()
    objects.reset_counts()
    start = loop.time()
    assert not await it.wait_for_batch(60)
    assert loop.time() - start == pytest.approx(60)
    assert 12 <= objects.calls["get_tail"] <= 40
    loop.call_later(3, produce, objects, 1)
    assert await it.wait_for_batch(60)
    assert loop.time() - start < 60 + 3 + 5.1
    assert await it.wait_for_batch(0)
    assert await drained(it) == [0]
