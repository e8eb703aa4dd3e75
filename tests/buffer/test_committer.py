"""The committer's group commits, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random

import pytest
from queues import (
    MANIFEST,
    appender_of,
    entry_of,
    pending_of,
    queued,
    queued_names,
    quick_objects,
)

from quiver.buffer import manifest
from quiver.buffer.appender import Clock
from quiver.buffer.committer_wire import Append, Done, Refused
from quiver.buffer.group_commit import GroupCommit
from quiver.config import QueueConfig
from quiver.errors import ObjectsUnavailable
from quiver.metrics import Metrics
from quiver.testing.objects import Fault, ObjectCall, SimulatedObjects
from quiver.testing.virtual_time import now_ms, run

QUICK = QueueConfig(attempt_timeout=2.0)


def asked(*names: str, age_ms: int = 0, patience_ms: int = 10_000, request_id: int = 7) -> Append:
    entries = tuple(entry_of(name) for name in names)
    return Append(request_id, age_ms, patience_ms, MANIFEST, entries)


def writes(objects: SimulatedObjects) -> int:
    return sum(call.kind == "put_if" and call.outcome == "done" for call in objects.calls)


# --- Group commit, in virtual time ------------------------------------------------------------


@contextlib.asynccontextmanager
async def committing(
    objects: SimulatedObjects, config: QueueConfig | None = None, *, max_append: int = 1024
) -> AsyncIterator[GroupCommit]:
    """What a committer does, without sockets."""
    committer = GroupCommit(
        objects,
        config or QueueConfig(),
        clock=Clock(now_ms),
        random=Random(0),
        metrics=Metrics(),
        max_append=max_append,
    )
    running = asyncio.create_task(committer.run())
    try:
        yield committer
    finally:
        running.cancel()


def test_all_that_wait_are_in_one_write() -> None:
    async def main() -> None:
        objects = quick_objects()
        async with committing(objects) as committer:
            first = asyncio.create_task(committer.commit(asked("A")))
            await asyncio.sleep(0.01)  # on its way
            others = [
                asyncio.create_task(committer.commit(asked(f"B{number}", f"C{number}")))
                for number in range(50)
            ]
            assert await first == Done(7, (0,))
            answers = await asyncio.gather(*others)
        assert answers == [Done(7, (1 + 2 * number, 2 + 2 * number)) for number in range(50)]
        assert writes(objects) == 2
        assert len(queued(objects)) == 101

    run(main())


def test_one_write_holds_at_most_so_many_but_one_request_at_least() -> None:
    async def main() -> None:
        objects = quick_objects()
        async with committing(objects, max_append=3) as committer:
            requests = [asked("A", "B"), asked("C"), asked("D"), asked(*"1234"), asked("5")]
            await asyncio.gather(*map(committer.commit, requests))
        assert queued_names(objects) == list("ABCD12345")
        assert writes(objects) == 4

    run(main())


def test_what_is_asked_for_twice_is_appended_once() -> None:
    async def main() -> None:
        objects = quick_objects()
        async with committing(objects) as committer:
            answers = await asyncio.gather(
                *(committer.commit(one) for one in (asked("A", "B"), asked("A", "B", "C")))
            )
            assert answers == [Done(7, (0, 1)), Done(7, (0, 1, 2))]
            assert await committer.commit(asked("B")) == Done(7, (1,))
        assert queued_names(objects) == ["A", "B", "C"]

    run(main())


def test_what_the_producer_appended_itself_is_found() -> None:
    async def main() -> None:
        objects = quick_objects()
        async with committing(objects) as committer:
            await committer.commit(asked("A"))
            await appender_of(objects).append([pending_of("B")])
            assert await committer.commit(asked("B", "C")) == Done(7, (1, 2))
        assert queued_names(objects) == ["A", "B", "C"]

    run(main())


def test_a_request_that_waited_too_long_is_refused_and_surely_not_done() -> None:
    async def main() -> None:
        objects = quick_objects()
        async with committing(objects) as committer:
            first = asyncio.create_task(committer.commit(asked("A")))
            await asyncio.sleep(0.01)
            late = await committer.commit(asked("B", patience_ms=20))
            assert isinstance(late, Refused)
            assert not late.unclear
            assert await first == Done(7, (0,))
        assert queued_names(objects) == ["A"]

    run(main())


def test_an_old_upload_is_refused_and_the_others_go_on() -> None:
    async def main() -> None:
        objects = quick_objects()
        async with committing(objects) as committer:
            answers = await asyncio.gather(
                *(committer.commit(one) for one in (asked("A", age_ms=300_001), asked("B")))
            )
        assert isinstance(answers[0], Refused)
        assert answers[1] == Done(7, (0,))
        assert queued_names(objects) == ["B"]

    run(main())


@pytest.mark.parametrize("unclear", [False, True])
def test_a_refusal_says_whether_it_is_sure(unclear: bool) -> None:
    async def main() -> None:
        objects = quick_objects()
        kind = "put_if" if unclear else "get"

        def fail(call: ObjectCall) -> None:
            if call.kind == kind:
                raise ObjectsUnavailable("no")

        objects.on_arrival = fail
        async with committing(objects) as committer:
            answer = await committer.commit(asked("A"))
            assert isinstance(answer, Refused)
            assert answer.unclear is unclear
            assert asyncio.get_running_loop().time() < 30  # before its producer gives up
            objects.on_arrival = None
            assert await committer.commit(asked("B")) == Done(7, (0,))

    run(main())


def test_a_damaged_manifest_is_refused_until_it_is_repaired() -> None:
    async def main() -> None:
        objects = quick_objects()
        objects.plant(MANIFEST, b"garbage" + manifest.EMPTY)
        async with committing(objects) as committer:
            answer = await committer.commit(asked("A"))
            assert isinstance(answer, Refused)
            assert "byte" in answer.reason
            objects.plant(MANIFEST, manifest.EMPTY)
            assert await committer.commit(asked("A")) == Done(7, (0,))

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_two_committers_and_a_producer_do_each_other_no_harm(seed: int) -> None:
    async def main() -> None:
        objects = SimulatedObjects(Random(seed), latency=(0.001, 0.05), slow=(0.1, 3))
        for fault in (Fault.UNANSWERED, Fault.REPEATED, Fault.LATE) * 3:
            objects.order(fault, "put_if")
        names = [f"A{number}" for number in range(30)]
        async with committing(objects) as one, committing(objects) as other:

            async def everywhere(name: str) -> None:
                await asyncio.gather(
                    one.commit(asked(name)),
                    other.commit(asked(name)),
                    appender_of(objects, seed=seed).append([pending_of(name, shared=True)]),
                )

            await asyncio.gather(*map(everywhere, names))
        assert sorted(queued_names(objects)) == sorted(names)

    run(main(), seed=seed, shuffle=True)
