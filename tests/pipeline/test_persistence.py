"""The persistence node: what it has taken arrives everywhere, whatever the destinations do."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from quiver import Signal, StoreReader
from quiver.disk import RealDisk
from quiver.errors import TryLater, Undeliverable
from quiver.pipeline.dead_letters import DeadLetters
from quiver.pipeline.item import Item, from_bundle
from quiver.pipeline.node import Taker
from quiver.pipeline.persistence import ExternalTaker, Persistence, store_config
from quiver.pipeline.settings.options import (
    PersistenceOptions,
    Recovery,
    RetentionOptions,
    RetryOptions,
    SegmentOptions,
)

BOUND = 60.0
QUICK = RetryOptions(initial_interval=0.01, max_interval=0.05)


@dataclass
class Destination:
    """Takes items, or does what it is told."""

    name: str
    answer: Callable[[Item], Exception | None] = lambda _: None
    got: Counter[bytes] = field(default_factory=Counter)
    order: list[bytes] = field(default_factory=list)
    attempts: int = 0
    most_at_once: int = 0
    _now: int = 0

    async def start(self) -> None: ...

    async def stop(self, deadline: float) -> None: ...

    async def take(self, item: Item) -> None:
        self.attempts += 1
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(0)
            error = self.answer(item)
            if error is not None:
                raise error
            self.got.update(item.requests)
            self.order += item.requests
        finally:
            self._now -= 1


def options(path: Path, **changes: object) -> PersistenceOptions:
    made = PersistenceOptions(
        path=path,
        retry=QUICK,
        segment=SegmentOptions(max_open_duration=0.02),
        retention=RetentionOptions(min_free_space=0),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def running(
    settings: PersistenceOptions, *destinations: Taker | ExternalTaker
) -> AsyncIterator[Persistence]:
    node = Persistence("persistence", settings, destinations, chance=random.Random(1))
    await node.start()
    try:
        yield node
    finally:
        await node.stop(asyncio.get_running_loop().time() + BOUND)


def item(number: int, **context: str) -> Item:
    return Item(
        signal=Signal.TRACES,
        requests=(b"request %d" % number,),
        count=1,
        received_ns=number,
        context=context,
    )


def requests(numbers: Sequence[int]) -> set[bytes]:
    return {b"request %d" % number for number in numbers}


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.005)


def test_every_destination_gets_everything(tmp_path: Path) -> None:
    async def run() -> None:
        first, second = Destination("first"), Destination("second")
        async with running(options(tmp_path), first, second) as node:
            await asyncio.gather(*(node.take(item(n)) for n in range(50)))
            await eventually(lambda: len(first.got) == len(second.got) == 50)
        assert first.got == second.got == Counter(requests(range(50)))

    asyncio.run(run())


def test_what_was_taken_is_durable(tmp_path: Path) -> None:
    async def run() -> None:
        dead = Destination("dead", lambda _: TryLater("not now"))
        node = Persistence("persistence", options(tmp_path), [dead])
        await node.start()
        await node.take(item(1, peer="10.0.0.1"))
        snapshot = StoreReader(node.directory).snapshot()  # as another process sees it
        found = [from_bundle(bundle) for _, bundle in snapshot.bundles()]
        assert found == [replace(item(1, peer="10.0.0.1"), count=None)]  # the log does not count
        await node.stop(0.0)

    asyncio.run(run())


def test_a_destination_that_is_down_for_a_while_gets_everything(tmp_path: Path) -> None:
    async def run() -> None:
        is_down = True
        good = Destination("good")
        bad = Destination("bad", lambda _: TryLater("down") if is_down else None)
        async with running(options(tmp_path), good, bad) as node:
            for n in range(100):
                await node.take(item(n))
            await eventually(lambda: len(good.got) == 100)  # the other one is not slowed
            assert not bad.got
            is_down = False
            await eventually(lambda: len(bad.got) == 100)
        assert bad.got == Counter(requests(range(100)))

    asyncio.run(run())


def test_an_outage_costs_few_attempts(tmp_path: Path) -> None:
    async def run() -> None:
        slow = RetryOptions(initial_interval=BOUND, max_interval=BOUND)
        bad = Destination("bad", lambda _: TryLater("down"))
        settings = options(tmp_path, retry=slow, max_in_flight=4)
        async with running(settings, bad) as node:
            for n in range(200):
                await node.take(item(n))
            await eventually(lambda: node.store.pending_count("bad") == 200)
            await eventually(lambda: bad.attempts >= 3)
            assert bad.attempts <= 3 + 4  # those that were on their way

    asyncio.run(run())


@pytest.mark.parametrize("recovery", Recovery)
def test_refusals_at_random_lose_nothing(tmp_path: Path, recovery: Recovery) -> None:
    chance = random.Random(7)

    async def run() -> None:
        moody = Destination("moody", lambda _: TryLater("no") if chance.random() < 0.3 else None)
        async with running(options(tmp_path, recovery=recovery), moody) as node:
            for n in range(60):
                await node.take(item(n))
            await eventually(lambda: len(moody.got) == 60)

    asyncio.run(run())


def test_an_error_that_should_not_happen_loses_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        answers = iter([KeyError("a mistake"), None])
        faulty = Destination("faulty", lambda _: next(answers, None))
        async with running(options(tmp_path), faulty) as node:
            await node.take(item(1))
            await eventually(lambda: len(faulty.got) == 1)

    asyncio.run(run())


def test_what_is_refused_for_ever_becomes_a_dead_letter(tmp_path: Path) -> None:
    def answer(found: Item) -> Exception | None:
        return Undeliverable("too odd") if found.requests[0].endswith(b"3") else None

    async def run() -> None:
        strict, other = Destination("strict", answer), Destination("other")
        async with running(options(tmp_path), strict, other) as node:
            for n in range(10):
                await node.take(item(n))
            await eventually(lambda: len(strict.got) == 9 and len(other.got) == 10)
            letters = DeadLetters(RealDisk(), node.directory, 10**9)
            await eventually(lambda: len(letters.list()) == 1)
            (letter,) = letters.list("strict")
            assert (letter.destination, letter.reason) == ("strict", "too odd")
            assert (letter.signal, letter.items) == ("traces", 1)

            strict.answer = lambda _: None  # somebody mended it, and asks for another attempt
            letters.ask_again(letter)
            await eventually(lambda: len(strict.got) == 10)
            await eventually(lambda: not letters.list())

    asyncio.run(run())


def test_a_dead_letter_that_is_refused_again_stays(tmp_path: Path) -> None:
    async def run() -> None:
        strict = Destination("strict", lambda _: Undeliverable("no"))
        async with running(options(tmp_path), strict) as node:
            await node.take(item(1))
            letters = DeadLetters(RealDisk(), node.directory, 10**9)
            await eventually(lambda: len(letters.list()) == 1)
            strict.answer = lambda _: Undeliverable("still no")
            letters.ask_again(letters.list()[0])
            await eventually(lambda: not letters.list()[0].again)
            assert letters.list()[0].reason == "still no"

    asyncio.run(run())


def test_without_room_for_dead_letters_the_item_stays_in_the_store(tmp_path: Path) -> None:
    async def run() -> None:
        strict = Destination("strict", lambda _: Undeliverable("no"))
        async with running(options(tmp_path, max_dead_letter_bytes=1), strict) as node:
            await node.take(item(1))
            await eventually(lambda: strict.attempts >= 2)
            assert node.store.pending_count("strict") == 1
            strict.answer = lambda _: None
            await eventually(lambda: len(strict.got) == 1)

    asyncio.run(run())


def test_no_more_than_so_many_are_on_their_way(tmp_path: Path) -> None:
    async def run() -> None:
        busy = Destination("busy")
        async with running(options(tmp_path, max_in_flight=3), busy) as node:
            await asyncio.gather(*(node.take(item(n)) for n in range(40)))
            await eventually(lambda: len(busy.got) == 40)
        assert busy.most_at_once <= 3

    asyncio.run(run())


def test_the_newest_come_first_when_asked_for(tmp_path: Path) -> None:
    async def run() -> None:
        is_down = True
        bad = Destination("bad", lambda _: TryLater("down") if is_down else None)
        settings = options(tmp_path, recovery=Recovery.NEWEST_FIRST, max_in_flight=4)
        async with running(settings, bad) as node:
            for n in range(100):
                await node.take(item(n))
            await eventually(lambda: node.store.pending_count("bad") == 100)
            is_down = False
            await eventually(lambda: len(bad.got) == 100)
        positions = {request: at for at, request in enumerate(bad.order)}
        newest = [positions[b"request %d" % n] for n in range(80, 90)]
        oldest = [positions[b"request %d" % n] for n in range(30, 40)]
        assert sum(newest) < sum(oldest)

    asyncio.run(run())


def test_a_full_store_says_when_to_come_again(tmp_path: Path) -> None:
    async def run() -> None:
        dead = Destination("dead", lambda _: TryLater("down"))
        small = RetentionOptions(size_cap=20_000, min_free_space=0)
        async with running(options(tmp_path, retention=small), dead) as node:
            with pytest.raises(TryLater) as refused:
                await asyncio.gather(*(node.take(item(n)) for n in range(1000)))
            assert refused.value.retry_after
            dead.answer = lambda _: None

    asyncio.run(run())


def test_context_arrives_with_the_item(tmp_path: Path) -> None:
    seen: list[Item] = []

    async def run() -> None:
        other = Destination("other", seen.append)
        async with running(options(tmp_path), other) as node:
            await node.take(item(5, peer="10.0.0.1", **{"x-tenant": "a"}))
            await eventually(lambda: len(seen) == 1)

    asyncio.run(run())
    assert seen[0] == item(5, peer="10.0.0.1", **{"x-tenant": "a"})


def test_an_external_destination_keeps_its_own_progress(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(options(tmp_path), ExternalTaker("lake", "lake")) as node:
            await node.take(item(1))
            await node.store.flush_async()
            assert node.store.pending_count("lake") == 1

    asyncio.run(run())


def test_what_was_not_delivered_is_delivered_after_a_restart(tmp_path: Path) -> None:
    async def run() -> None:
        dead = Destination("same", lambda _: TryLater("down"))
        node = Persistence("persistence", options(tmp_path), [dead])
        await node.start()
        for n in range(20):
            await node.take(item(n))
        await node.stop(asyncio.get_running_loop().time() + 0.05)
        back = Destination("same")
        async with running(options(tmp_path), back):
            await eventually(lambda: len(back.got) == 20)

    asyncio.run(run())


def test_the_example_of_the_documents_makes_a_store() -> None:
    retention = RetentionOptions(max_retain_after_ingestion_hours=72, size_cap=500 * 10**9)
    made = store_config(PersistenceOptions(retention=retention))
    assert made.retention.max_age == 72 * 3600
    assert made.retention.shared
