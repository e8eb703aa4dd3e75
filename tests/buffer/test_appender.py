from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import chain

import pytest
from queues import (
    MANIFEST,
    GreedyConsumer,
    appender_of,
    entry_of,
    pending_of,
    queued,
    queued_names,
    quick_objects,
    take_out,
)

from quiver.buffer import manifest
from quiver.buffer.appender import Instant, Known, Pending, StaleUpload
from quiver.buffer.objects import Version
from quiver.config import QueueConfig
from quiver.errors import FormatError, ObjectsUnavailable, QueueFull, QueueReset
from quiver.metrics import Metrics
from quiver.testing.objects import Fault, ObjectCall, SimulatedObjects
from quiver.testing.virtual_time import run


def plant(objects: SimulatedObjects, *names: str) -> None:
    """Somebody else appends, at once."""
    data = objects.peek(MANIFEST) or manifest.EMPTY
    entries = [entry_of(name) for name in names]
    objects.plant(MANIFEST, manifest.append(data, entries, source=MANIFEST))


def kinds(objects: SimulatedObjects) -> list[str]:
    return [call.kind for call in objects.calls]


def test_the_first_append_makes_the_manifest() -> None:
    async def main() -> None:
        objects = quick_objects()
        assert await appender_of(objects).append([pending_of("A"), pending_of("B")]) == [0, 1]
        assert queued_names(objects) == ["A", "B"]

    run(main())


def test_its_own_write_saves_reading() -> None:
    async def main() -> None:
        objects = quick_objects()
        appender = appender_of(objects)
        for sequence, name in enumerate("ABC"):
            assert await appender.append([pending_of(name)]) == [sequence]
        assert kinds(objects) == ["get", "put_if", "put_if", "put_if"]

    run(main())


def test_others_may_write_in_between() -> None:
    async def main() -> None:
        objects, metrics = quick_objects(), Metrics()
        appender = appender_of(objects, metrics=metrics)
        await appender.append([pending_of("A")])
        plant(objects, "X")
        assert await appender.append([pending_of("B")]) == [2]
        assert queued_names(objects) == ["A", "X", "B"]
        assert appender.conflict_rate == pytest.approx(100 / 3)
        assert metrics.get("buffer.manifest_writes", role="producer") == 3
        assert metrics.get("buffer.manifest_conflicts", role="producer") == 1

    run(main())


def test_where_others_write_it_reads_first_until_they_do_not() -> None:
    async def main() -> None:
        objects = quick_objects()
        appender = appender_of(objects)
        await appender.append([pending_of("A")])
        plant(objects, "X")
        await appender.append([pending_of("B")])  # met X, and read again
        del objects.calls[:]
        appender.expect_others()
        await appender.append([pending_of("C")])
        await appender.append([pending_of("D")])
        assert kinds(objects) == ["get", "put_if", "put_if"]

    run(main())


@pytest.mark.parametrize("fault", [Fault.UNANSWERED, Fault.REPEATED, Fault.LATE])
@pytest.mark.parametrize("before", [0, 1])
def test_a_write_that_landed_without_saying_so_is_found(fault: Fault, before: int) -> None:
    async def main() -> None:
        objects = SimulatedObjects(quick_objects()._random, latency=(0.02, 0.02), slow=(0.01, 0.01))
        appender = appender_of(objects)
        if before:
            await appender.append([pending_of("Z")])
        objects.order(fault, "put_if")
        assert await appender.append([pending_of("A"), pending_of("B")]) == [before, before + 1]
        assert queued_names(objects)[before:] == ["A", "B"]
        assert len(queued(objects)) == before + 2

    run(main())


def test_a_late_write_and_its_repetition_do_not_both_land() -> None:
    async def main() -> None:
        for seed in range(20):
            objects = SimulatedObjects(
                quick_objects(seed)._random, latency=(0.001, 0.02), slow=(0.001, 0.2)
            )
            objects.order(Fault.LATE, "put_if")
            objects.order(Fault.LATE, "put_if")
            appender = appender_of(objects, seed=seed)
            assert await appender.append([pending_of("A")]) == [0]
            await asyncio.sleep(10)
            assert queued_names(objects) == ["A"]

    run(main())


def test_a_write_that_did_not_land_is_done_again() -> None:
    async def main() -> None:
        objects = quick_objects()
        objects.order(Fault.LOST, "put_if")
        assert await appender_of(objects).append([pending_of("A")]) == [0]
        assert queued_names(objects) == ["A"]

    run(main())


def test_what_the_consumer_has_taken_out_is_appended_again_under_the_same_location() -> None:
    async def main() -> None:
        objects, metrics = quick_objects(), Metrics()
        one = pending_of("A")

        def consume(call: ObjectCall) -> None:
            if call.kind == "get" and objects.peek(MANIFEST):
                objects.on_arrival = None
                take_out(objects, 0)

        objects.on_arrival = consume
        objects.order(Fault.UNANSWERED, "put_if")
        assert await appender_of(objects, metrics=metrics).append([one]) == [1]
        assert queued_names(objects) == ["A"]
        assert metrics.get("buffer.appends_repeated", role="producer") == 1

    run(main())


def test_an_attempt_is_settled_when_the_manifest_proves_that_it_did_not_happen() -> None:
    async def main() -> None:
        objects, metrics = quick_objects(), Metrics()
        appender = appender_of(objects, metrics=metrics)
        await appender.append([pending_of("A")])
        one = pending_of("B")
        unclear: list[bool] = []

        def look(call: ObjectCall) -> None:
            if call.kind == "put_if" and not unclear:
                plant(objects, "X")  # so this one conflicts, and the next one follows X
                unclear.append(one.unclear)
            elif call.kind == "put_if":
                unclear.append(metrics.get("buffer.appends_repeated", role="producer") > 0)

        objects.on_arrival = look
        assert await appender.append([one]) == [2]
        assert unclear == [True, False]

    run(main())


@pytest.mark.parametrize(
    ("version", "count", "open_still"),
    [
        ("v2", 3, False),  # sequences 7 to 9: an entry at 8 would be there
        ("v2", 2, False),  # 8 and 9: the same
        ("v2", 1, True),  # only 9: the consumer may have taken it out
        ("v1", 3, True),  # what the attempt was for, so it may still arrive
    ],
)
def test_what_a_manifest_without_the_entry_says_of_an_attempt_at_8(
    version: str, count: int, open_still: bool
) -> None:
    one = Pending(entry_of("A"), Instant(0, 0))
    one.attempting(9, Version("v0"))
    one.attempting(8, Version("v1"))
    one.not_in(Known(b"", Version(version), manifest.Footer(count, 10, 0)))
    assert one.unclear is open_still


def test_what_somebody_else_may_have_appended_is_looked_for() -> None:
    async def main() -> None:
        objects = quick_objects()
        appender = appender_of(objects)
        await appender.append([pending_of("A")])
        plant(objects, "B")
        appender.expect_others()
        assert await appender.append([pending_of("B", shared=True), pending_of("C")]) == [1, 2]
        assert queued_names(objects) == ["A", "B", "C"]
        del objects.calls[:]
        assert await appender.append([pending_of("B", shared=True)]) == [1]
        assert kinds(objects) == []

    run(main())


def test_a_batch_that_was_uploaded_too_long_ago_is_not_named() -> None:
    async def main() -> None:
        objects = quick_objects()
        appender = appender_of(objects)
        old, new = pending_of("A", age=301), pending_of("B", age=299)
        with pytest.raises(StaleUpload) as caught:
            await appender.append([old, new])
        assert caught.value.stale == (old,)
        assert objects.peek(MANIFEST) is None

    run(main())


def test_a_batch_that_grows_old_between_two_attempts_is_not_named() -> None:
    async def main() -> None:
        objects = quick_objects()
        for _ in range(12):
            objects.order(Fault.LOST, "put_if")
        appender = appender_of(objects, QueueConfig(gc_grace_period=2, attempt_timeout=0.5))
        with pytest.raises(StaleUpload):
            await appender.append([pending_of("A")])

    run(main())


@pytest.mark.parametrize("clock", ["loop", "wall_ms"])
def test_each_of_the_two_clocks_makes_an_upload_old(clock: str) -> None:
    async def main() -> None:
        one = pending_of("A")
        fields = one.uploaded._asdict()
        fields[clock] -= 301 if clock == "loop" else 301_000
        one = Pending(one.entry, one.uploaded._replace(**fields))
        with pytest.raises(StaleUpload):
            await appender_of(quick_objects()).append([one])

    run(main())


def test_a_manifest_that_does_not_add_up_is_left_as_it_is() -> None:
    async def main() -> None:
        objects = quick_objects()
        damaged = b"garbage" + manifest.EMPTY
        objects.plant(MANIFEST, damaged)
        with pytest.raises(FormatError, match=MANIFEST):
            await appender_of(objects).append([pending_of("A")])
        assert objects.peek(MANIFEST) == damaged
        assert "put_if" not in kinds(objects)

    run(main())


@pytest.mark.parametrize("older", [None, manifest.EMPTY])
def test_a_manifest_that_was_replaced_by_an_older_one_is_left_as_it_is(older: bytes | None) -> None:
    async def main() -> None:
        objects = quick_objects()
        appender = appender_of(objects)
        await appender.append([pending_of("A")])
        if older is None:
            objects.remove(MANIFEST)
        else:
            objects.plant(MANIFEST, older)
        for _ in range(2):
            with pytest.raises(QueueReset):
                await appender.append([pending_of("B")])
        assert objects.peek(MANIFEST) == older

    run(main())


def test_a_full_queue_says_so_and_takes_more_when_it_is_not() -> None:
    async def main() -> None:
        objects = quick_objects()
        appender = appender_of(objects, QueueConfig(max_manifest_bytes=1024))
        for number in range(13):
            await appender.append([pending_of(f"A{number}")])
        with pytest.raises(QueueFull, match="max_manifest_bytes") as caught:
            await appender.append([pending_of("B")])
        assert caught.value.retryable
        assert len(queued(objects)) == 13
        take_out(objects, 3)
        assert await appender.append([pending_of("B")]) == [13]

    run(main())


def test_a_store_that_does_not_come_back_is_given_up() -> None:
    async def main() -> None:
        objects = quick_objects()
        config = QueueConfig(give_up_after=20, attempt_timeout=3)

        def gone(call: ObjectCall) -> None:
            raise ObjectsUnavailable("gone")

        objects.on_arrival = gone
        loop = asyncio.get_running_loop()
        with pytest.raises(ObjectsUnavailable, match="given up after"):
            await appender_of(objects, config).append([pending_of("A")])
        assert 20 <= loop.time() < 24

    run(main())


def test_a_call_that_is_not_answered_is_ended_and_done_again() -> None:
    async def main() -> None:
        objects = SimulatedObjects(quick_objects()._random, slow=(50, 50))
        objects.order(Fault.SLOW, "get")
        objects.order(Fault.SLOW, "put_if")
        appender = appender_of(objects, QueueConfig(attempt_timeout=2))
        assert await appender.append([pending_of("A")]) == [0]
        assert asyncio.get_running_loop().time() < 6
        await asyncio.sleep(100)
        assert queued_names(objects) == ["A"]

    run(main())


def test_many_writers_at_once_lose_and_double_nothing() -> None:
    async def main() -> None:
        objects = quick_objects()

        async def write(number: int) -> list[int]:
            appender = appender_of(objects, seed=number)
            sequences: list[int] = []
            for place in range(5):
                sequences += await appender.append([pending_of(f"{number}A{place}")])
            return sequences

        written = await asyncio.gather(*(write(number) for number in range(10)))
        assert all(sequences == sorted(sequences) for sequences in written)
        assert sorted(chain.from_iterable(written)) == list(range(50))
        assert len(set(queued_names(objects))) == 50

    run(main())


def test_a_greedy_consumer_sees_each_location_once_in_order_whatever_goes_wrong() -> None:
    async def main(seed: int) -> None:
        faulty = SimulatedObjects(quick_objects(seed)._random, latency=(0.001, 0.05), slow=(0.1, 5))
        for fault in (Fault.UNANSWERED, Fault.REPEATED, Fault.LATE, Fault.LOST) * 5:
            faulty.order(fault, "put_if")
        consumer = GreedyConsumer(faulty)
        consuming = asyncio.create_task(consumer.run())
        appender = appender_of(faulty, replace(QueueConfig(), attempt_timeout=1), seed=seed)
        names = [f"A{number}" for number in range(10)]
        for name in names:
            await appender.append([pending_of(name)])
        await asyncio.sleep(10)
        consuming.cancel()
        assert consumer.consumed == [entry_of(name).location for name in names]

    for seed in range(20):
        run(main(seed), seed=seed)


# --- Many writers -----------------------------------------------------------------------------


def test_what_becomes_ready_meanwhile_is_in_the_next_attempt() -> None:
    async def main() -> None:
        objects = quick_objects()
        plant(objects, "X")
        waiting = [pending_of("B"), pending_of("C")]
        asked = 0

        def more() -> list[Pending]:
            nonlocal asked
            asked += 1
            if asked == 1:
                plant(objects, "Y")  # after it was read: a conflict
                return [waiting.pop(0)]
            return [waiting.pop(0)] if waiting else []

        sequences = await appender_of(objects).append([pending_of("A")], more)
        assert sequences == [2, 3, 4]
        assert queued_names(objects) == ["X", "Y", "A", "B", "C"]

    run(main())


def test_who_meets_many_others_makes_way_after_a_write_and_not_before() -> None:
    async def main() -> None:
        objects = quick_objects()
        loop = asyncio.get_running_loop()
        meetings = iter(range(8))

        def meet(call: ObjectCall) -> None:
            if call.kind == "put_if" and (number := next(meetings, None)) is not None:
                plant(objects, f"X{number}")

        objects.on_arrival = meet
        appender = appender_of(objects)
        await appender.append([pending_of("A")])
        # Eight conflicts, with a read and a write each, and pauses that do not grow.
        assert 8 * 0.08 < loop.time() < 8 * (0.08 + 0.05) + 0.1
        done = loop.time()
        await appender.append([pending_of("B")])
        assert 0.5 < loop.time() - done < 5.1
        for name in "CDEFGHIJ":
            done = loop.time()
            await appender.append([pending_of(name)])
        assert loop.time() - done == pytest.approx(0.04)  # nobody was met since

    run(main())
