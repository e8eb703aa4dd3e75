"""The consumer: acknowledging, repeats and lost batches."""

from __future__ import annotations

import asyncio

import pytest
from consuming import count, drained, footer, scenario, sequences, started
from memory_objects import (
    MANIFEST,
    START_MS,
    MemoryObjects,
    doing,
    enqueue,
    enqueue_again,
    failing,
    location,
    new_entry,
    produce,
)

from quiver.buffer import manifest
from quiver.buffer.consumer import Consumer
from quiver.buffer.types import NewEntry
from quiver.config import LostBatchPolicy, QueueConfig
from quiver.errors import (
    BatchLost,
    Conflict,
    FormatError,
    ObjectNotFound,
    ObjectsUnavailable,
    QueueError,
    QueueReset,
)

DEAD_LETTERS = LostBatchPolicy.DEAD_LETTER

# --- Acknowledging ----------------------------------------------------------------------------


@scenario
async def test_acks_come_in_order_and_only_for_what_was_handed_out(
    objects: MemoryObjects,
) -> None:
    produce(objects, 1, 2, 3)
    it = await started(objects)
    with pytest.raises(QueueError, match="handed out"):
        await it.ack(0)
    await it.next_descriptors(2)
    with pytest.raises(QueueError, match="0 is next"):
        await it.ack(1)
    await it.ack(0)
    with pytest.raises(QueueError, match="1 is next"):
        await it.ack(0)
    with pytest.raises(QueueError, match="handed out"):
        await it.ack_through(2)
    await it.ack(1)
    with pytest.raises(QueueError, match="handed out"):
        await it.ack(2)
    assert it.last_acked == 1
    assert count(it, "acks") == 2


@scenario
async def test_acks_are_written_by_count(objects: MemoryObjects) -> None:
    produce(objects, *range(10))
    it = await started(objects, dequeue_acks=4)
    await it.next_descriptors(10)
    left = []
    for sequence in range(10):
        await it.ack(sequence)
        left.append(footer(objects).entry_count)
    assert left == [10, 10, 10, 6, 6, 6, 6, 2, 2, 2]


@scenario
async def test_acks_are_written_by_time(objects: MemoryObjects) -> None:
    produce(objects, *range(4))
    it = await started(objects, dequeue_interval=10)
    await it.next_descriptors(3)
    await it.ack(0)
    await asyncio.sleep(9.9)
    await it.ack(1)
    await it.next_descriptors(1)
    assert sequences(objects) == [0, 1, 2, 3]
    await asyncio.sleep(0.1)
    await it.ack(2)
    assert sequences(objects) == [3]
    await it.ack(3)
    await asyncio.sleep(10)
    assert await it.next_batch() is None
    assert sequences(objects) == []


@scenario
async def test_time_counts_from_the_first_ack_that_is_not_written(objects: MemoryObjects) -> None:
    produce(objects, *range(4))
    it = await started(objects, dequeue_interval=10)
    await it.next_descriptors(4)
    await it.ack(0)
    await asyncio.sleep(6)
    await it.flush()
    await it.ack(1)
    await asyncio.sleep(6)
    await it.ack(2)
    assert sequences(objects) == [1, 2, 3]


@scenario
async def test_flush_and_close_write_what_is_left_once(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3)
    it = await started(objects)
    await it.next_descriptors(3)
    await it.ack(0)
    objects.reset_counts()
    await it.flush()
    await it.flush()
    assert objects.calls == {"put_if": 1}
    await it.ack(1)
    assert count(it, "queue_length") == 2
    await it.close()
    assert count(it, "queue_length") == 1
    assert sequences(objects) == [2]
    assert objects.calls == {"put_if": 2}


@scenario
async def test_acknowledging_through_again_changes_nothing(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3)
    it = await started(objects)
    await it.next_descriptors(3)
    await it.ack_through(1)
    objects.reset_counts()
    await it.ack_through(1)
    await it.ack_through(0)
    assert not objects.calls
    assert (it.last_acked, count(it, "acks")) == (1, 2)
    await it.ack(2)
    await it.ack_through(2)
    assert sequences(objects) == []


@scenario
async def test_state_moves_only_after_the_write(objects: MemoryObjects) -> None:
    produce(objects, 1, 2)
    it = await started(objects, dequeue_acks=2, queue=QueueConfig(give_up_after=1))
    await it.next_descriptors(2)
    await it.ack(0)
    objects.before["put_if"] = [failing(ObjectsUnavailable("down"))] * 1000
    with pytest.raises(ObjectsUnavailable):
        await it.ack(1)
    with pytest.raises(ObjectsUnavailable):
        await it.ack_through(1)
    assert (it.last_acked, count(it, "acks")) == (0, 1)
    objects.before.clear()
    await it.ack(1)
    assert sequences(objects) == []


@pytest.mark.parametrize(
    "error", [ObjectsUnavailable("late"), Conflict("412"), ObjectNotFound("404")]
)
def test_a_dequeue_whose_answer_is_lost_is_looked_up(error: QueueError) -> None:
    async def test(objects: MemoryObjects) -> None:
        produce(objects, 1, 2, 3)
        it = await started(objects)
        await it.next_descriptors(2)
        objects.reset_counts()
        objects.after["put_if"] = [failing(error)]
        await it.ack_through(1)
        assert objects.calls["put_if"] == 1
        assert sequences(objects) == [2]
        produce(objects, 4)
        assert await drained(it) == [2, 3]

    scenario(test)()


@scenario
async def test_a_cancelled_ack_can_be_made_again(objects: MemoryObjects) -> None:
    for landed in (False, True):
        del objects.objects
        objects.objects = {}
        produce(objects, 1, 2)
        it = await started(objects)
        await it.next_descriptors(1)

        async def hang(_path: str) -> None:
            await asyncio.sleep(100)

        hooks = objects.after if landed else objects.before
        hooks["put_if"] = [hang]
        task = asyncio.create_task(it.ack_through(0))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert it.last_acked == -1
        assert await drained(it) == [1]
        await it.ack_through(0)
        assert sequences(objects) == [1]
        await it.ack(1)


# --- Repeats ----------------------------------------------------------------------------------


async def with_a_repeat(objects: MemoryObjects, max_remembered: int = 100) -> Consumer:
    """Batch 1 is listed again after it was taken out; 2 and 3 are around that."""
    produce(objects, 1, 2)
    it = await started(objects, max_remembered=max_remembered)
    await it.next_descriptors(2)
    await it.ack_through(0)
    enqueue(objects, new_entry(1))
    produce(objects, 3)
    return it


@scenario
async def test_a_repeat_is_left_out_and_acknowledged_in_order(objects: MemoryObjects) -> None:
    it = await with_a_repeat(objects)
    assert await drained(it) == [3]
    assert count(it, "repeats_dropped") == 1
    with pytest.raises(QueueError, match="1 is next"):
        await it.ack(3)
    await it.ack(1)
    assert it.last_acked == 2
    await it.ack(3)
    await it.flush()
    assert sequences(objects) == []
    assert count(it, "acks") == 3


@scenario
async def test_descriptors_leave_repeats_out(objects: MemoryObjects) -> None:
    it = await with_a_repeat(objects)
    assert [entry.sequence for entry in await it.next_descriptors(9)] == [3]
    await it.ack_through(3)
    assert sequences(objects) == []
    assert count(it, "acks") == 3


@scenario
async def test_what_another_producer_listed_twice_comes_once(objects: MemoryObjects) -> None:
    produce(objects, 1, 2)
    enqueue_again(objects, 1)
    it = await started(objects)
    assert await drained(it) == [0, 1]
    assert count(it, "repeats_dropped") == 1
    await it.ack(0)
    await it.ack(1)
    assert it.last_acked == 2
    await it.flush()
    assert sequences(objects) == []


@scenario
async def test_a_repeat_at_the_end_is_removed_with_what_is_before(objects: MemoryObjects) -> None:
    produce(objects, 1)
    it = await started(objects)
    await it.next_descriptors(1)
    await it.ack_through(0)
    enqueue(objects, new_entry(1))
    assert not await it.wait_for_batch(0)
    assert it.last_acked == 1
    await it.flush()
    assert sequences(objects) == []


@scenario
async def test_a_repeat_that_is_met_during_a_write_is_removed_in_time(
    objects: MemoryObjects,
) -> None:
    produce(objects, 1)
    it = await started(objects, dequeue_interval=10)
    await it.next_descriptors(1)
    await it.ack_through(0)
    produce(objects, 2)
    await it.next_descriptors(1)
    await it.ack(1)
    enqueue(objects, new_entry(1))
    await it._watch.refresh()

    async def meanwhile(_path: str) -> None:
        assert it._head() is None
        assert it.last_acked == 2

    objects.before["put_if"] = [meanwhile]
    await it.flush()
    assert sequences(objects) == [2]
    await asyncio.sleep(10)
    assert await it.next_batch() is None
    assert sequences(objects) == []


@scenario
async def test_the_memory_of_locations_is_bounded(objects: MemoryObjects) -> None:
    it = await with_a_repeat(objects, max_remembered=1)
    assert await drained(it) == [2, 3]
    assert len(it._remembered) == 1


@scenario
async def test_what_was_processed_before_a_restart_is_remembered_if_it_is_there(
    objects: MemoryObjects,
) -> None:
    produce(objects, 1, 2)
    it = await started(objects, 0)
    enqueue(objects, new_entry(1))
    assert await drained(it) == [1]


# --- Lost batches -----------------------------------------------------------------------------


@scenario
async def test_a_lost_batch_stops_the_consumer(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3)
    lost, _, _ = objects.objects.pop(location(2))
    it = await started(objects)
    assert await it.next_batch()
    for _ in range(3):
        with pytest.raises(BatchLost, match="no such object"):
            await it.next_batch()
    assert await it.dead_letters() == []
    objects.store(location(2), lost)
    assert await drained(it) == [1, 2]


@scenario
async def test_a_lost_batch_goes_to_the_dead_letters(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3)
    del objects.objects[location(2)]
    objects.store(location(1), b"not a batch")
    it = await started(objects, lost_batches=DEAD_LETTERS)
    assert await drained(it) == [2]
    assert count(it, "dead_letters") == 2
    letters = await it.dead_letters()
    assert [letter.entry for letter in letters] == list(
        manifest.entries(objects.data(MANIFEST), source="")[:2]
    )
    assert letters[1].reason == "there is no such object"
    assert letters[1].time_ms == START_MS
    assert f"ingest/dead-letter/{1:020d}.json" in objects.objects
    await it.ack(2)
    await it.flush()
    assert sequences(objects) == []


@scenario
async def test_nothing_is_skipped_before_its_letter_is_durable(objects: MemoryObjects) -> None:
    produce(objects, 1, 2)
    del objects.objects[location(1)]
    queue = QueueConfig(give_up_after=1)
    it = await started(objects, lost_batches=DEAD_LETTERS, queue=queue)
    objects.before["put_if"] = [failing(ObjectsUnavailable("down"))] * 1000
    with pytest.raises(ObjectsUnavailable):
        await it.next_batch()
    assert it.last_acked == -1
    objects.before.clear()
    objects.after["put_if"] = [failing(ObjectsUnavailable("late"))]
    assert await drained(it) == [1]
    assert len(await it.dead_letters()) == 1


@scenario
async def test_a_letter_from_before_a_restart_is_no_obstacle(objects: MemoryObjects) -> None:
    produce(objects, 1, 2)
    del objects.objects[location(1)]
    for _ in range(2):
        it = await started(objects, lost_batches=DEAD_LETTERS)
        assert await drained(it) == [1]
        assert len(await it.dead_letters()) == 1


@scenario
async def test_a_letter_of_another_queue_life_is_not_overwritten(objects: MemoryObjects) -> None:
    produce(objects, 1)
    del objects.objects[location(1)]
    await drained(await started(objects, lost_batches=DEAD_LETTERS))
    del objects.objects[MANIFEST]
    produce(objects, 5)
    del objects.objects[location(5)]
    it = await started(objects, lost_batches=DEAD_LETTERS)
    with pytest.raises(QueueReset, match="another batch"):
        await it.next_batch()
    assert [letter.entry.location for letter in await it.dead_letters()] == [location(1)]


@scenario
async def test_a_dead_letter_can_be_put_back(objects: MemoryObjects) -> None:
    produce(objects, 1, 2)
    lost, _, _ = objects.objects.pop(location(2))
    it = await started(objects, lost_batches=DEAD_LETTERS)
    assert await drained(it) == [0]
    with pytest.raises(QueueError, match="acknowledge it first"):
        await it.requeue(1)
    await it.ack(0)
    objects.store(location(2), lost)
    objects.after["put_if"] = [failing(Conflict("412"))] * 2  # of the flush, of the append
    await it.requeue(1)
    assert await it.dead_letters() == []
    assert sequences(objects) == [2]
    batch = await it.next_batch()
    assert batch is not None
    assert batch.records == (b"record 2",)
    with pytest.raises(ObjectNotFound):
        await it.requeue(1)


@scenario
async def test_what_was_handed_out_can_be_given_up(objects: MemoryObjects) -> None:
    produce(objects, 1)
    it = await started(objects)
    entry = manifest.entries(objects.data(MANIFEST), source="")[0]
    with pytest.raises(QueueError, match="handed out"):
        await it.dead_letter(entry, "too early")
    await it.next_descriptors(1)
    await it.dead_letter(entry, "cannot be decoded")
    await it.ack_through(0)
    await it.requeue(0)
    assert await drained(it) == [1]


@scenario
async def test_a_damaged_letter_is_reported(objects: MemoryObjects) -> None:
    it = await started(objects)
    for text in (b"{", b"[]", b"{}", b'{"metadata": [], "facts": {"crc32c": "x"}}'):
        objects.store(f"ingest/dead-letter/{7:020d}.json", text)
        with pytest.raises(FormatError, match="not a dead letter"):
            await it.dead_letters()


@scenario
async def test_a_batch_that_cannot_be_reached_is_not_lost(objects: MemoryObjects) -> None:
    produce(objects, 1)
    it = await started(objects, lost_batches=DEAD_LETTERS)
    enqueue(objects, NewEntry(location(2), ()))
    objects.before["get_tail"] = [doing(int), failing(ObjectsUnavailable("busy"))]
    assert await drained(it) == [0]
    assert [letter.entry.sequence for letter in await it.dead_letters()] == [1]
