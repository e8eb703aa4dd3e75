from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from queues import (
    MANIFEST,
    producer_of,
    queued,
    queued_records,
    quick_objects,
    records,
)

from quiver.buffer.batch import batch_crc32c
from quiver.buffer.handles import Durable
from quiver.buffer.room import Room
from quiver.config import BatchCompression, ProducerConfig, QueueConfig
from quiver.errors import (
    QueueError,
    QuiverError,
)
from quiver.metrics import Metrics
from quiver.testing.objects import Fault, ObjectCall, SimulatedObjects
from quiver.testing.virtual_time import now_ms, run

NEVER = 1e6
PATIENT = ProducerConfig(flush_interval=NEVER)


def now() -> float:
    return asyncio.get_running_loop().time()


def writes(objects: SimulatedObjects) -> int:
    """How often the manifest was written."""
    calls = [call for call in objects.calls if call.kind == "put_if" and call.path == MANIFEST]
    return sum(call.outcome == "done" for call in calls)


def failing(kind: str, error: QuiverError) -> Callable[[ObjectCall], None]:
    def fail(call: ObjectCall) -> None:
        if call.kind == kind:
            raise error

    return fail


# --- One batch --------------------------------------------------------------------------------


def test_entries_are_durable_in_one_batch_with_what_was_said_of_them() -> None:
    async def main() -> None:
        objects = quick_objects()
        async with producer_of(objects) as producer:
            first = await producer.produce([b"a", b""], b"m")
            assert first.watcher.result() is None
            await asyncio.sleep(0.01)
            await producer.produce([b"b"], b"m")
            third = await producer.produce([b"c"], b"n")
            durable = await third.watcher.durable()
        assert first.watcher.result() == third.watcher.result() == durable
        (entry,) = queued(objects)
        assert durable == Durable(entry.location, 0)
        assert records(objects, entry.location) == (b"a", b"", b"b", b"c")
        assert entry.metadata == ((0, first.ingestion_time_ms, b"m"), (3, now_ms(), b"n")) or (
            entry.metadata
            == ((0, first.ingestion_time_ms, b"m"), (3, third.ingestion_time_ms, b"n"))
        )
        data = objects.peek(entry.location)
        assert data is not None
        assert entry.facts == (len(data), 4, batch_crc32c(data), None)

    run(main())


def test_a_batch_may_be_compressed() -> None:
    async def main() -> None:
        objects = quick_objects()
        config = ProducerConfig(batch_compression=BatchCompression.ZSTD)
        async with producer_of(objects, config) as producer:
            await producer.produce([b"a" * 10_000] * 3)
        (entry,) = queued(objects)
        assert entry.facts.object_size is not None
        assert entry.facts.object_size < 1000
        assert queued_records(objects) == [(b"a" * 10_000,) * 3]

    run(main())


@pytest.mark.parametrize(
    ("entries", "metadata", "reason"),
    [
        ([], b"", "at least one entry"),
        ([b"x"], b"m" * (1024 * 1024 + 1), "metadata"),
        ([b"x" * 600, b"x" * 600], b"", "max_batch_bytes"),
    ],
)
def test_what_can_never_be_written_is_refused(
    entries: list[bytes], metadata: bytes, reason: str
) -> None:
    async def main() -> None:
        config = ProducerConfig(queue=QueueConfig(max_batch_bytes=1024))
        async with producer_of(quick_objects(), config) as producer:
            with pytest.raises(QueueError, match=reason) as caught:
                await producer.produce(entries, metadata)
            assert not caught.value.retryable

    run(main())


def test_a_batch_stays_within_what_consumers_read() -> None:
    async def main() -> None:
        objects = quick_objects()
        config = ProducerConfig(queue=QueueConfig(max_batch_bytes=1024), flush_interval=NEVER)
        async with producer_of(objects, config) as producer:
            for _ in range(5):
                await producer.produce([b"x" * 400])
        assert [len(batch) for batch in queued_records(objects)] == [2, 2, 1]

    run(main())


# --- When a batch is closed -------------------------------------------------------------------


def test_time_closes_a_batch_counted_from_its_first_entry() -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects, ProducerConfig(flush_interval=0.5))
        await asyncio.sleep(3)
        handle = await producer.produce([b"a"])
        await asyncio.sleep(0.4)
        await producer.produce([b"b"])
        await handle.watcher.durable()
        assert now() == pytest.approx(3.5 + 3 * 0.04)  # upload, read the manifest, write it
        assert queued_records(objects) == [(b"a", b"b")]
        await producer.close()

    run(main())


def test_size_closes_a_batch() -> None:
    async def main() -> None:
        objects = quick_objects()
        config = ProducerConfig(flush_interval=NEVER, flush_size_bytes=10)
        producer = producer_of(objects, config)
        handle = await producer.produce([b"abcd"], b"m")  # 5 bytes
        await asyncio.sleep(10)
        assert handle.watcher.result() is None
        await producer.produce([b"ab", b"cd"], b"n")  # 5 more
        assert (await handle.watcher.durable()).sequence == 0
        assert queued_records(objects) == [(b"abcd", b"ab", b"cd")]
        await producer.close()

    run(main())


def test_flush_closes_a_batch_and_waits_for_all_before() -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects, PATIENT)
        handles = []
        for name in (b"a", b"b", b"c"):
            handles.append(await producer.produce([name]))
            if name != b"c":
                producer._line.close_batch()
        await producer.flush()
        assert [handle.watcher.result() for handle in handles] == [
            Durable(entry.location, entry.sequence) for entry in queued(objects)
        ]
        await producer.flush()  # nothing to do
        await producer.close()

    run(main())


def test_a_batch_is_closed_when_all_that_is_held_is_in_it_and_somebody_waits() -> None:
    async def main() -> None:
        objects = quick_objects()
        config = ProducerConfig(flush_interval=NEVER, max_buffered_inputs=2)
        producer = producer_of(objects, config)
        for _ in range(7):
            await producer.produce([b"x"])
        assert now() < 1
        await producer.close()
        assert [len(batch) for batch in queued_records(objects)] == [2, 2, 2, 1]

    run(main())


def test_load_does_not_starve_the_timer() -> None:
    async def main() -> None:
        objects = quick_objects()
        config = ProducerConfig(flush_interval=0.1, max_buffered_inputs=10_000)
        producer = producer_of(objects, config)
        loop = asyncio.get_running_loop()
        for _ in range(2000):
            await producer.produce([b"x"])
            loop.jump(0.001)  # type: ignore[attr-defined] # the caller computes, and never waits
        assert len(queued(objects)) > 10
        await producer.close()
        assert max(len(batch) for batch in queued_records(objects)) <= 111  # two turns late

    run(main())


# --- Backpressure -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        ProducerConfig(flush_interval=0.5, max_buffered_inputs=3),
        ProducerConfig(flush_interval=0.5, max_buffered_bytes=30),
    ],
)
def test_a_call_waits_until_there_is_room(config: ProducerConfig) -> None:
    async def main() -> None:
        objects, metrics = quick_objects(), Metrics()
        producer = producer_of(objects, config, metrics=metrics)
        for _ in range(3):
            await producer.produce([b"x" * 9], b"m")
        assert metrics.get("buffer.buffered_bytes") == 30
        assert metrics.get("buffer.buffered_inputs") == 3
        assert now() == 0
        handle = await producer.produce([b"x" * 9], b"m")
        assert now() == pytest.approx(0.2)  # the prefix is claimed, and the others are durable
        assert handle.ingestion_time_ms == now_ms()
        await producer.close()
        assert metrics.get("buffer.buffered_bytes") == 0
        assert metrics.get("buffer.buffered_inputs") == 0

    run(main())


def test_a_call_larger_than_all_room_enters_when_there_is_nothing_else() -> None:
    async def main() -> None:
        objects = quick_objects()
        config = ProducerConfig(flush_interval=NEVER, max_buffered_bytes=10)
        producer = producer_of(objects, config)
        await producer.produce([b"a"])
        await producer.produce([b"b" * 100])
        assert 0 < now() < 1
        await producer.produce([b"c"])
        await producer.close()
        assert queued_records(objects) == [(b"a",), (b"b" * 100,), (b"c",)]

    run(main())


def test_those_who_wait_enter_in_order_and_one_who_gives_up_takes_no_room() -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects, ProducerConfig(flush_interval=0.5, max_buffered_inputs=1))
        tasks = [asyncio.create_task(producer.produce([name])) for name in (b"a", b"b", b"c", b"d")]
        await asyncio.sleep(0.05)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await producer.close()
        assert queued_records(objects) == [(b"a",), (b"c",), (b"d",)]

    run(main())


def test_a_small_call_does_not_overtake_a_large_one_that_waits() -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects, ProducerConfig(flush_interval=0.5, max_buffered_bytes=10))
        calls = [b"aaaaaa", b"bbbbbbbb", b"cc"]
        await asyncio.gather(*(producer.produce([entry]) for entry in calls))
        await producer.close()
        assert [entry for batch in queued_records(objects) for entry in batch] == calls

    run(main())


def test_one_who_gives_up_when_just_let_in_gives_the_room_back() -> None:
    async def main() -> None:
        room = Room(1, 100, lambda: None)
        await room.enter(1)
        waiting = asyncio.create_task(room.enter(1))
        await asyncio.sleep(0)
        room.leave(1, 1)  # for the one who waits, who does not know yet
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (room.calls, room.bytes) == (0, 0)

    run(main())


def test_one_who_gives_up_lets_those_behind_in() -> None:
    async def main() -> None:
        room = Room(10, 10, lambda: None)
        await room.enter(6)
        large, small = (asyncio.create_task(room.enter(size)) for size in (8, 2))
        await asyncio.sleep(0)
        large.cancel()
        await small
        assert (room.calls, room.bytes) == (2, 8)

    run(main())


# --- Pipelining -------------------------------------------------------------------------------


def test_uploads_run_side_by_side_and_many_batches_are_appended_at_once_in_order() -> None:
    async def main() -> None:
        objects, metrics = SimulatedObjects(Random(3), latency=(0.01, 0.3)), Metrics()
        config = ProducerConfig(flush_interval=NEVER, flush_size_bytes=1, max_uploads=8)
        producer = producer_of(objects, config, metrics=metrics)
        running = most = 0
        put = objects.put

        async def counted(path: str, data: bytes) -> object:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await put(path, data)
            finally:
                running -= 1

        objects.put = counted  # type: ignore[method-assign, assignment] # counts, and passes on
        handles = [await producer.produce([b"%d" % number]) for number in range(100)]
        await producer.close()
        assert most == 8
        assert queued_records(objects) == [(b"%d" % number,) for number in range(100)]
        outcomes = [handle.watcher.result() for handle in handles]
        assert [outcome.sequence for outcome in outcomes if isinstance(outcome, Durable)] == list(
            range(100)
        )
        assert writes(objects) < 20
        snapshot = metrics.snapshot()
        assert snapshot["buffer.batches_per_append_sum"] == 100
        assert snapshot["buffer.batches_per_append_count"] == writes(objects)

    run(main())


def test_one_write_appends_at_most_so_many() -> None:
    async def main() -> None:
        objects = quick_objects()
        config = ProducerConfig(flush_size_bytes=1, max_uploads=100, max_append=4)
        producer = producer_of(objects, config)
        for _ in range(10):
            await producer.produce([b"x"])
        await producer.close()
        assert writes(objects) == 3

    run(main())


def test_a_batch_is_not_durable_before_those_that_were_closed_before_it() -> None:
    async def main() -> None:
        objects = SimulatedObjects(Random(0), latency=(0.02, 0.02), slow=(5, 5))
        config = ProducerConfig(flush_size_bytes=1)
        producer = producer_of(objects, config)
        objects.order(Fault.SLOW, "put")
        first = await producer.produce([b"a"])
        second = await producer.produce([b"b"])
        await asyncio.sleep(4)
        assert second.watcher.result() is None
        await second.watcher.durable()
        assert isinstance(first.watcher.result(), Durable)
        await producer.close()
        assert queued_records(objects) == [(b"a",), (b"b",)]

    run(main())


def test_the_figures_are_those_of_the_documents() -> None:
    async def main() -> None:
        objects, metrics = quick_objects(), Metrics()
        async with producer_of(objects, metrics=metrics) as producer:
            await producer.produce([b"abc", b"de"], b"m")
        snapshot = metrics.snapshot()
        assert snapshot["buffer.batches_flushed"] == 1
        assert snapshot["buffer.entries_flushed"] == 2
        assert snapshot["buffer.bytes_flushed"] == 6
        assert snapshot["buffer.bytes_written"] == 4 + 3 + 4 + 2 + 7
        assert snapshot["buffer.flush_duration_seconds_sum"] == pytest.approx(0.2)
        assert snapshot['buffer.manifest_writes{role="producer"}'] == 1
        assert producer.conflict_rate == 0

    run(main())
