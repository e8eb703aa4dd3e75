"""Following the manifest: how much a poll reads, and what is refused."""

from __future__ import annotations

import struct
from functools import partial

import pytest
from consuming import count, drained, scenario, sequences, started
from memory_objects import (
    MANIFEST,
    MemoryObjects,
    doing,
    location,
    new_entry,
    produce,
)

from quiver.buffer import manifest
from quiver.buffer.consumer import Consumer
from quiver.buffer.watch import OVERLAP
from quiver.config import QueueConfig
from quiver.errors import (
    Fenced,
    FormatError,
    LimitExceeded,
    QueueReset,
)

# --- Polling ----------------------------------------------------------------------------------


@scenario
async def test_a_poll_without_news_reads_nothing(objects: MemoryObjects) -> None:
    produce(objects, *range(100))
    it = await started(objects)
    await it.next_descriptors(100)
    objects.reset_counts()
    for _ in range(10):
        assert await it.next_descriptors(1) == []
    assert objects.calls == {"get_tail": 10}
    assert objects.bytes_read == 0


@scenario
async def test_news_are_read_without_what_is_known(objects: MemoryObjects) -> None:
    produce(objects, *range(1000))
    it = await started(objects)
    await it.next_descriptors(1000)
    before = len(objects.data(MANIFEST))
    produce(objects, 1000, 1001)
    objects.reset_counts()
    assert [entry.location for entry in await it.next_descriptors(9)] == [
        location(1000),
        location(1001),
    ]
    added = len(objects.data(MANIFEST)) - before
    assert objects.calls == {"get_tail": 1, "get_range": 1}
    assert objects.bytes_read == 22 + OVERLAP + added + 22


@scenario
async def test_a_manifest_that_changes_while_it_is_read_is_read_whole(
    objects: MemoryObjects,
) -> None:
    it = await started(objects)
    produce(objects, 1)
    objects.before["get_range"] = [doing(lambda: produce(objects, 2))]
    assert [entry.sequence for entry in await it.next_descriptors(9)] == [0, 1]


@scenario
async def test_a_consumer_fenced_while_it_reads_does_not_become_the_other(
    objects: MemoryObjects,
) -> None:
    it = await started(objects)
    produce(objects, 1)
    objects.before["get_range"] = [doing(lambda: produce(objects, 2))]
    taken = partial(manifest.set_epoch, epoch=2, source="")
    objects.before["get"] = [doing(lambda: objects.store(MANIFEST, taken(objects.data(MANIFEST))))]
    with pytest.raises(Fenced):
        await it.next_descriptors(9)
    assert it.epoch == 1


@scenario
async def test_a_dequeue_needs_no_read(objects: MemoryObjects) -> None:
    produce(objects, 1, 2, 3)
    it = await started(objects)
    await it.next_descriptors(2)
    objects.reset_counts()
    await it.ack_through(1)
    assert objects.calls == {"put_if": 1}
    assert sequences(objects) == [2]


@scenario
async def test_what_producers_add_meanwhile_stays(objects: MemoryObjects) -> None:
    produce(objects, 1, 2)
    it = await started(objects)
    await it.next_descriptors(2)
    objects.before["put_if"] = [doing(partial(produce, objects, n)) for n in (3, 4)]
    await it.ack_through(1)
    assert sequences(objects) == [2, 3]
    assert count(it, "manifest_conflicts") == 2
    assert count(it, "manifest_writes") == 4
    assert await drained(it) == [2, 3]


# --- What is not right ------------------------------------------------------------------------


async def refuses(it: Consumer, objects: MemoryObjects, *error: type[Exception]) -> None:
    """Neither reading nor writing goes on, and the manifest stays as it is."""
    before = objects.data(MANIFEST) if MANIFEST in objects.objects else None
    for _ in range(2):
        with pytest.raises(error):
            await it.next_batch()
        with pytest.raises(error):
            await it.flush()
    assert (objects.data(MANIFEST) if MANIFEST in objects.objects else None) == before


async def with_one_acked(objects: MemoryObjects) -> Consumer:
    produce(objects, 1, 2, 3)
    it = await started(objects)
    await it.next_descriptors(2)
    await it.ack(0)
    return it


@scenario
async def test_a_manifest_that_is_gone_is_a_reset(objects: MemoryObjects) -> None:
    it = await with_one_acked(objects)
    del objects.objects[MANIFEST]
    await refuses(it, objects, QueueReset)


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_manifest_that_was_replaced_is_a_reset(size: int, epoch: int) -> None:
    """Also by one that has as many entries, of the same size, and the same epoch."""

    async def test(objects: MemoryObjects) -> None:
        it = await with_one_acked(objects)
        new = [new_entry(100 + number) for number in range(size)]
        data = manifest.append(manifest.EMPTY, new, source="")
        objects.store(MANIFEST, manifest.set_epoch(data, epoch, source=""))
        await refuses(it, objects, QueueReset)

    scenario(test)()


@scenario
async def test_a_manifest_that_goes_back_is_a_reset(objects: MemoryObjects) -> None:
    it = await with_one_acked(objects)
    old = objects.data(MANIFEST)
    await it.flush()
    objects.store(MANIFEST, old)
    it._handed_out += 1
    await it.ack(1)
    await refuses(it, objects, QueueReset)


@scenario
async def test_entries_that_somebody_else_removed_are_a_reset(objects: MemoryObjects) -> None:
    it = await with_one_acked(objects)
    objects.store(MANIFEST, manifest.dequeue(objects.data(MANIFEST), 1, source=""))
    await refuses(it, objects, QueueReset)


def damaged(data: bytes, how: str) -> bytes:
    count, after, epoch, version = struct.unpack("<IQQH", data[-22:])
    if how == "uncounted":
        return data[:-22] + struct.pack("<IQQH", count - 1, after, epoch, version)
    if how == "counted too much":
        return data[:-22] + struct.pack("<IQQH", count + 1, after + 1, epoch, version)
    if how == "version":
        return data[:-1] + b"\7"
    if how == "short":
        return data[:10]
    return data[:-22] + b"garbage" + data[-22:]


@pytest.mark.parametrize("how", ["uncounted", "counted too much", "version", "short", "garbage"])
def test_a_damaged_manifest_is_refused_and_left_alone(how: str) -> None:
    async def test(objects: MemoryObjects) -> None:
        it = await with_one_acked(objects)
        objects.store(MANIFEST, damaged(objects.data(MANIFEST), how))
        await refuses(it, objects, FormatError, QueueReset)
        with pytest.raises(FormatError):
            await started(objects)
        with pytest.raises(FormatError):
            await started(objects, 0)

    scenario(test)()


@scenario
async def test_a_damaged_addition_is_refused(objects: MemoryObjects) -> None:
    it = await with_one_acked(objects)
    produce(objects, 4, 5)
    good = objects.data(MANIFEST)
    at = good.index(location(5).encode()) - 10  # the sequence of the last entry
    objects.store(MANIFEST, good[:at] + struct.pack("<Q", 9) + good[at + 8 :])
    await refuses(it, objects, FormatError)
    objects.store(MANIFEST, good)
    assert await it.next_descriptors(9)


@scenario
async def test_a_manifest_over_the_limit_is_not_read(objects: MemoryObjects) -> None:
    queue = QueueConfig(max_manifest_bytes=1024)
    it = await started(objects, queue=queue)
    produce(objects, *range(20))
    objects.reset_counts()
    with pytest.raises(LimitExceeded, match="max_manifest_bytes"):
        await it.next_batch()
    assert objects.bytes_read == 22
    with pytest.raises(LimitExceeded):
        await started(objects, queue=queue)
