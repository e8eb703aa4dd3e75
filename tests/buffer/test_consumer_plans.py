"""The consumer: entries by their sequences, for plans that are made again."""

from __future__ import annotations

import pytest
from consuming import consumer, count, drained, scenario, sequences, started
from memory_objects import MANIFEST, MemoryObjects, enqueue_again, produce

from quiver.buffer.consumer import Consumer
from quiver.errors import Fenced, QueueError, QueueReset


async def planned(it: Consumer, after: int, through: int) -> list[int]:
    return [entry.sequence for entry in await it.entries_between(after, through)]


@scenario
async def test_a_plan_is_the_same_each_time_and_moves_nothing(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3, 4)
    it = await started(objects)
    assert await planned(it, 0, 2) == [1, 2]
    assert await planned(it, 0, 2) == [1, 2]
    assert await planned(it, -1, 3) == [0, 1, 2, 3]
    assert await planned(it, 2, 2) == []
    entries = await it.entries_between(1, 2)
    assert (await it.fetch(entries[0])).records == (b"record 3",)
    assert await drained(it) == [0, 1, 2, 3]
    assert count(it, "repeats_dropped") == 0


@scenario
async def test_news_are_in_the_plan(objects: MemoryObjects) -> None:
    it = await started(objects)
    assert await it.latest_sequence() == -1
    produce(objects, 1, 2)
    assert await it.latest_sequence() == 1
    produce(objects, 3)
    assert await planned(it, 0, 2) == [1, 2]


@scenario
async def test_a_planned_batch_can_be_acknowledged_and_others_go_on_after_it(
    objects: MemoryObjects,
) -> None:
    produce(objects, *range(1, 7))
    it = await started(objects)
    assert await it.wait_for_batch(0)  # some are decoded ahead already
    assert await planned(it, -1, 3) == [0, 1, 2, 3]
    await it.ack_through(2)
    assert sequences(objects) == [3, 4, 5]
    with pytest.raises(QueueError, match="through 3 were handed"):
        await it.ack_through(4)
    assert await drained(it) == [3, 4, 5]


@scenario
async def test_acknowledging_more_than_was_taken_keeps_the_place(objects: MemoryObjects) -> None:
    produce(objects, *range(1, 7))
    it = await started(objects)
    assert await planned(it, -1, 3) == [0, 1, 2, 3]
    await it.ack_through(3)  # nothing was decoded yet: the place moves in the manifest itself
    assert await planned(it, 3, 5) == [4, 5]
    assert await drained(it) == [4, 5]


@scenario
async def test_a_plan_for_what_is_gone_or_never_was_is_refused(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3)
    it = await started(objects, last_acked=0)
    with pytest.raises(QueueError, match="before 1 were acknowledged"):
        await it.entries_between(-1, 2)
    with pytest.raises(QueueReset, match="through 3 are wanted"):
        await it.entries_between(0, 3)
    assert await planned(it, 0, 2) == [1, 2]


@scenario
async def test_a_restarted_consumer_makes_the_same_plan(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3)
    first = await started(objects)
    assert await planned(first, 0, 2) == [1, 2]
    await first.ack_through(0)
    second = await started(objects, last_acked=0)
    assert await planned(second, 0, 2) == [1, 2]
    with pytest.raises(Fenced):
        await first.entries_between(0, 2)
    with pytest.raises(Fenced):
        await first.latest_sequence()


@scenario
async def test_a_plan_leaves_repeats_out_before_and_after_the_first_is_gone(
    objects: MemoryObjects,
) -> None:
    produce(objects, 1, 2)
    enqueue_again(objects, 1)
    produce(objects, 3)
    it = await started(objects)
    assert await planned(it, 1, 3) == [3]  # the first is before what is planned
    assert await planned(it, -1, 1) == [0, 1]
    assert await planned(it, 1, 3) == [3]
    await it.ack_through(1)
    assert await planned(it, 1, 3) == [3]
    await it.ack_through(3)
    assert sequences(objects) == []


@scenario
async def test_a_plan_needs_an_initialized_consumer(objects: MemoryObjects) -> None:
    it = consumer(objects)
    with pytest.raises(QueueError, match="not initialized"):
        await it.entries_between(-1, 0)
    with pytest.raises(QueueError, match="not initialized"):
        await it.latest_sequence()
    assert MANIFEST not in objects.objects
