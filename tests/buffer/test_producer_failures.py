from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from itertools import chain
from random import Random

import pytest
from queues import (
    MANIFEST,
    GreedyConsumer,
    producer_of,
    queued,
    queued_records,
    quick_objects,
    records,
    take_out,
)

from quiver.buffer import manifest
from quiver.buffer.handles import Durable
from quiver.config import ProducerConfig, QueueConfig
from quiver.errors import (
    FormatError,
    ObjectsUnavailable,
    ProducerClosed,
    QueueError,
    QueueReset,
    QuiverError,
)
from quiver.metrics import Metrics
from quiver.testing.objects import Fault, Faults, ObjectCall, SimulatedObjects
from quiver.testing.virtual_time import now_ms, run

NEVER = 1e6
PATIENT = ProducerConfig(flush_interval=NEVER)


def now() -> float:
    return asyncio.get_running_loop().time()


def writes(objects: SimulatedObjects) -> int:
    return sum(call.kind == "put_if" and call.outcome == "done" for call in objects.calls)


CLAIM = "ingest/.queue"


def failing(kind: str, error: QuiverError) -> Callable[[ObjectCall], None]:
    def fail(call: ObjectCall) -> None:
        if call.kind == kind and call.path != CLAIM:
            raise error

    return fail


# --- The prefix -------------------------------------------------------------------------------


def test_the_prefix_is_claimed_before_the_first_upload() -> None:
    async def main() -> None:
        objects = quick_objects()
        async with producer_of(objects) as producer, producer_of(objects, seed=1) as other:
            await asyncio.gather(producer.produce([b"a"]), other.produce([b"b"]))
        assert objects.peek(CLAIM) == MANIFEST.encode()
        paths = [call.path for call in objects.calls if call.kind in {"put", "put_if"}]
        assert [path for path in paths if path == CLAIM] == paths[:2]
        assert len(queued(objects)) == 2

    run(main())


def test_nothing_is_uploaded_below_the_prefix_of_another_queue() -> None:
    async def main() -> None:
        objects = quick_objects()
        objects.plant(CLAIM, b"other/manifest")
        producer = producer_of(objects)
        handle = await producer.produce([b"a"])
        with pytest.raises(QueueError, match="other/manifest"):
            await handle.watcher.durable()
        assert objects.paths() == [CLAIM]
        objects.remove(CLAIM)
        await (await producer.produce([b"b"])).watcher.durable()  # it looks again
        assert queued_records(objects) == [(b"b",)]
        await producer.close()

    run(main())


def test_a_producer_that_ends_while_it_claims_leaves_no_task() -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects)
        handle = await producer.produce([b"a"])
        await asyncio.sleep(0.01)
        producer.abort()
        await asyncio.sleep(1)
        assert isinstance(handle.watcher.result(), ProducerClosed)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert [path for path in objects.paths() if path != CLAIM] == []

    run(main())


# --- What goes wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", list(Fault))
def test_an_upload_is_tried_again_under_the_same_location(fault: Fault) -> None:
    async def main() -> None:
        objects, metrics = quick_objects(), Metrics()
        objects.order(fault, "put")
        async with producer_of(objects, metrics=metrics) as producer:
            await producer.produce([b"a"])
        assert queued_records(objects) == [(b"a",)]
        await asyncio.sleep(200)
        assert objects.paths() == sorted([queued(objects)[0].location, MANIFEST, CLAIM])

    run(main())


def test_a_batch_that_cannot_be_uploaded_fails_alone() -> None:
    async def main() -> None:
        objects, metrics = quick_objects(), Metrics()
        config = ProducerConfig(flush_size_bytes=1, queue=QueueConfig(give_up_after=10))
        producer = producer_of(objects, config, metrics=metrics)
        broken = ""

        def fail(call: ObjectCall) -> None:
            nonlocal broken
            broken = broken or (call.path if call.kind == "put" else "")
            if call.path == broken:
                raise ObjectsUnavailable("no")

        objects.on_arrival = fail
        first = await producer.produce([b"a"])
        second = await producer.produce([b"b"])
        with pytest.raises(ObjectsUnavailable, match="given up"):
            await producer.close()
        assert isinstance(first.watcher.result(), ObjectsUnavailable)
        assert isinstance(second.watcher.result(), Durable)
        assert queued_records(objects) == [(b"b",)]
        assert metrics.get("buffer.batches_failed") == 1
        assert metrics.get("buffer.buffered_bytes") == 0

    run(main())


@pytest.mark.parametrize("fault", list(Fault))
def test_a_write_of_unknown_fate_enqueues_once(fault: Fault) -> None:
    async def main() -> None:
        objects = quick_objects()
        config = ProducerConfig(flush_size_bytes=1, queue=QueueConfig(attempt_timeout=2))
        producer = producer_of(objects, config)
        objects.order(fault, "put_if")
        handles = [await producer.produce([b"%d" % number]) for number in range(3)]
        await producer.flush()
        await asyncio.sleep(200)
        assert queued_records(objects) == [(b"0",), (b"1",), (b"2",)]
        assert all(isinstance(handle.watcher.result(), Durable) for handle in handles)
        await producer.close()

    run(main())


def test_a_damaged_manifest_ends_the_producer() -> None:
    async def main() -> None:
        objects = quick_objects()
        damaged = b"garbage" + manifest.EMPTY
        objects.plant(MANIFEST, damaged)
        producer = producer_of(objects, ProducerConfig(flush_size_bytes=1))
        handles = [await producer.produce([b"a"]) for _ in range(3)]
        for handle in handles:
            with pytest.raises(FormatError):
                await handle.watcher.durable()
        with pytest.raises(ProducerClosed, match="at byte"):
            await producer.produce([b"b"])
        assert objects.peek(MANIFEST) == damaged
        await producer.close()

    run(main())


def test_a_queue_that_was_deleted_ends_the_producer() -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects)
        await (await producer.produce([b"a"])).watcher.durable()
        objects.remove(MANIFEST)
        handle = await producer.produce([b"b"])
        with pytest.raises(QueueReset):
            await handle.watcher.durable()
        assert objects.peek(MANIFEST) is None
        await producer.close()

    run(main())


def test_a_full_queue_fails_the_batch_and_the_producer_goes_on() -> None:
    async def main() -> None:
        objects = quick_objects()
        config = ProducerConfig(queue=QueueConfig(max_manifest_bytes=1024))
        producer = producer_of(objects, config)
        handle = await producer.produce([b"x"])
        while not isinstance(handle.watcher.result(), QuiverError):
            handle = await producer.produce([b"x"])
            await asyncio.sleep(1)
        error = handle.watcher.result()
        assert isinstance(error, QuiverError)
        assert error.retryable
        take_out(objects, 5)
        handle = await producer.produce([b"x"])
        await handle.watcher.durable()
        await producer.close()

    run(main())


@pytest.mark.parametrize("call", ["put", "put_if"])
def test_what_nobody_expects_reaches_the_watchers(call: str) -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects)

        async def broken(*_arguments: object) -> object:
            raise ZeroDivisionError

        setattr(objects, call, broken)
        handle = await producer.produce([b"a"])
        with pytest.raises(QueueError, match="ZeroDivisionError"):
            await handle.watcher.durable()
        await producer.close()

    run(main())


# --- Old uploads ------------------------------------------------------------------------------


def test_a_batch_that_waited_too_long_is_uploaded_under_a_new_name() -> None:
    async def main() -> None:
        objects = SimulatedObjects(Random(0), latency=(0.02, 0.02), slow=(20, 20))
        queue = QueueConfig(gc_grace_period=20, attempt_timeout=5)
        producer = producer_of(objects, ProducerConfig(flush_size_bytes=1, queue=queue))
        for _ in range(3):
            objects.order(Fault.SLOW, "get", MANIFEST)
        handle = await producer.produce([b"a"])
        durable = await handle.watcher.durable()
        uploads = [call.path for call in objects.calls if call.kind == "put"]
        assert len(set(uploads)) == 2
        assert durable.location == uploads[1] == queued(objects)[0].location
        await producer.close()

    run(main())


def test_a_batch_of_unknown_fate_is_uploaded_under_its_old_name() -> None:
    async def main() -> None:
        objects = quick_objects()
        config = ProducerConfig(
            flush_size_bytes=1,
            queue=QueueConfig(attempt_timeout=1, max_backoff=1, gc_grace_period=6),
        )
        producer = producer_of(objects, config)
        objects.on_arrival = failing("put_if", ObjectsUnavailable("no"))
        handle = await producer.produce([b"a"])
        await asyncio.sleep(12)
        objects.on_arrival = None
        await handle.watcher.durable()
        uploads = [call.path for call in objects.calls if call.kind == "put"]
        assert len(uploads) > 2
        assert len(set(uploads)) == 1
        await producer.close()

    run(main())


def test_a_batch_of_unknown_fate_that_may_be_deleted_is_not_named_again() -> None:
    async def main() -> None:
        objects = quick_objects()
        late = 0

        def clock() -> int:
            return now_ms() + late

        config = ProducerConfig(flush_size_bytes=1, queue=QueueConfig(attempt_timeout=1))
        producer = producer_of(objects, config, clock=clock)
        objects.on_arrival = failing("put_if", ObjectsUnavailable("no"))
        handle = await producer.produce([b"a"])
        await asyncio.sleep(5)
        objects.on_arrival = None
        late = 1_000_000  # the machine slept
        with pytest.raises(QueueError, match="not known"):
            await handle.watcher.durable()
        assert queued(objects) == ()
        await producer.close()

    run(main())


# --- Ending -----------------------------------------------------------------------------------


def test_close_writes_everything_and_then_nothing_is_taken() -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects, PATIENT)
        handle = await producer.produce([b"a"])
        await asyncio.gather(producer.close(), producer.close())
        assert isinstance(handle.watcher.result(), Durable)
        with pytest.raises(ProducerClosed):
            await producer.produce([b"b"])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_close_sends_those_away_who_wait_for_room() -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects, ProducerConfig(max_buffered_inputs=1))
        await producer.produce([b"a"])
        waiting = asyncio.create_task(producer.produce([b"b"]))
        await asyncio.sleep(0)
        await producer.close()
        with pytest.raises(ProducerClosed):
            await waiting
        assert queued_records(objects) == [(b"a",)]

    run(main())


@pytest.mark.parametrize("after", [0.0, 0.03, 0.05, 0.09, 0.11])
def test_after_abort_nothing_looks_durable_that_is_not(after: float) -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects, ProducerConfig(flush_size_bytes=2))
        handles = [await producer.produce([b"a"]), await producer.produce([b"b"])]
        handles.append(await producer.produce([b"c"]))
        await asyncio.sleep(after)
        producer.abort()
        for handle in handles:
            with pytest.raises(ProducerClosed):
                await handle.watcher.durable()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_a_close_that_is_cancelled_ends_the_producer() -> None:
    async def main() -> None:
        producer = producer_of(quick_objects())
        handle = await producer.produce([b"a"])
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0.03)
        closing.cancel()
        with pytest.raises(ProducerClosed):
            await handle.watcher.durable()

    run(main())


def test_a_producer_that_is_dropped_stops() -> None:
    async def main() -> None:
        objects = quick_objects()
        producer = producer_of(objects)
        handles = [await producer.produce([b"a"])]
        await asyncio.sleep(0.11)
        handles.append(await producer.produce([b"b"]))
        del producer
        gc.collect()
        for handle in handles:
            with pytest.raises(ProducerClosed, match="dropped"):
                await handle.watcher.durable()
        await asyncio.sleep(10)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert queued(objects) == ()

    run(main())


# --- All at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_whatever_goes_wrong_each_durable_batch_is_consumed_once_and_in_order(seed: int) -> None:
    async def produce(producer_number: int, objects: SimulatedObjects) -> list[str]:
        config = ProducerConfig(
            flush_size_bytes=8, max_uploads=3, queue=QueueConfig(attempt_timeout=1)
        )
        producer = producer_of(objects, config, seed=100 * seed + producer_number)
        random = Random(seed)
        handles = []
        for number in range(40):
            handles.append(await producer.produce([b"%d %d" % (producer_number, number)]))
            await asyncio.sleep(random.uniform(0, 0.05))
        locations = [(await handle.watcher.durable()).location for handle in handles]
        await producer.close()
        return list(dict.fromkeys(locations))

    async def main() -> None:
        faults = Faults(lost=0.05, unanswered=0.1, repeated=0.1, late=0.05, slow=0.02)
        objects = SimulatedObjects(
            Random(seed), latency=(0.001, 0.05), slow=(0.1, 5), faults=faults
        )
        consumer = GreedyConsumer(objects)
        consuming = asyncio.create_task(consumer.run())
        produced = await asyncio.gather(*(produce(number, objects) for number in range(3)))
        await asyncio.sleep(20)
        consuming.cancel()
        for locations in produced:
            assert [one for one in consumer.consumed if one in set(locations)] == locations
        assert sorted(consumer.consumed) == sorted(chain.from_iterable(produced))
        taken = [
            int(record.split()[1])
            for location in produced[0]
            for record in records(objects, location)
        ]
        assert taken == list(range(40))

    run(main(), seed=seed, shuffle=True)
