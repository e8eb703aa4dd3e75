"""The batch processor: it merges, and tells everybody what became of the merged item."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pytest

from quiver import Signal
from quiver.bundle import Slot
from quiver.errors import InvalidConfig, StorageAtCapacity, TryLater, Undeliverable
from quiver.metrics import Metrics
from quiver.pipeline.item import Item
from quiver.pipeline.node import Port
from quiver.pipeline.processors.batch import BatchProcessor
from quiver.pipeline.settings.options import BatchOptions

BOUND = 60.0
LONG = 1000.0


@dataclass
class Destination:
    """Takes items, or does what it is told; waits while the gate is closed."""

    answer: Callable[[Item], Exception | None] = lambda _: None
    got: list[Item] = field(default_factory=list)
    attempts: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    name: str = "next"

    def __post_init__(self) -> None:
        self.gate.set()

    async def start(self) -> None: ...

    async def stop(self, deadline: float) -> None: ...

    async def take(self, item: Item) -> None:
        self.attempts += 1
        await self.gate.wait()
        error = self.answer(item)
        if error is not None:
            raise error
        self.got.append(item)


def batch(
    destination: Destination, metrics: Metrics | None = None, **options: float
) -> BatchProcessor:
    made = BatchOptions(timeout=LONG)
    made = replace(made, **options)  # type: ignore[arg-type]
    return BatchProcessor("batch", made, Port([destination]), metrics=metrics)


def item(number: int, signal: Signal = Signal.TRACES, **context: str) -> Item:
    return Item(
        signal=signal,
        requests=(b"request %d" % number,),
        count=10,
        received_ns=1000 + number,
        context=context,
    )


async def outcomes(node: BatchProcessor, items: list[Item]) -> list[BaseException | None]:
    async with asyncio.timeout(BOUND):
        return await asyncio.gather(*(node.take(each) for each in items), return_exceptions=True)


def soon() -> float:
    return asyncio.get_running_loop().time() + BOUND


def test_items_become_one() -> None:
    async def run() -> None:
        destination, metrics = Destination(), Metrics()
        node = batch(destination, metrics, max_items=30)
        assert await outcomes(node, [item(n) for n in range(3)]) == [None] * 3
        (merged,) = destination.got
        assert merged == Item(
            signal=Signal.TRACES,
            requests=(b"request 0", b"request 1", b"request 2"),
            count=30,
            received_ns=1000,
        )
        name = "quiver.batch.flushes_total"
        assert metrics.get(name, node="batch", reason="items") == 1
        assert metrics.get("quiver.batch.waiting_bytes", node="batch") == 0

    asyncio.run(run())


def test_bytes_fill_a_batch_too() -> None:
    async def run() -> None:
        destination, metrics = Destination(), Metrics()
        node = batch(destination, metrics, max_bytes=20)
        # 9 bytes each: the third does not fit beside two.
        taking = [asyncio.create_task(node.take(item(n))) for n in range(3)]
        async with asyncio.timeout(BOUND):
            await asyncio.gather(*taking[:2])
        assert not taking[2].done()
        large = Item(signal=Signal.TRACES, requests=(b"x" * 100,))
        await outcomes(node, [large])
        async with asyncio.timeout(BOUND):
            await taking[2]
        assert [len(got.requests) for got in destination.got] == [2, 1, 1]
        assert destination.got[2].count is None

    asyncio.run(run())


def test_signals_and_contexts_are_not_mixed() -> None:
    async def run() -> None:
        destination = Destination()
        node = batch(destination, max_items=20)
        items = [
            item(0, tenant="a", peer="x"),
            item(1, tenant="b"),
            item(2, Signal.LOGS, tenant="b"),
            item(3, peer="x", tenant="a"),
            item(4, tenant="b"),
            item(5, Signal.LOGS, tenant="b"),
        ]
        await outcomes(node, items)
        got = {(one.signal, tuple(sorted(one.context.items()))): one for one in destination.got}
        assert {key: len(one.requests) for key, one in got.items()} == {
            (Signal.TRACES, (("peer", "x"), ("tenant", "a"))): 2,
            (Signal.TRACES, (("tenant", "b"),)): 2,
            (Signal.LOGS, (("tenant", "b"),)): 2,
        }

    asyncio.run(run())


def test_tables_are_handed_on_alone() -> None:
    async def run() -> None:
        destination = Destination()
        table = pa.record_batch({"id": [1]})
        tables = Item(signal=Signal.TRACES, tables={Slot.SPANS: table})
        assert await outcomes(batch(destination), [tables, tables]) == [None, None]
        assert destination.got == [tables, tables]

    asyncio.run(run())


def test_taken_means_taken_behind_it() -> None:
    async def run() -> None:
        destination = Destination()
        destination.gate.clear()
        node = batch(destination, max_items=20)
        taking = [asyncio.create_task(node.take(item(n))) for n in range(2)]
        await _until(lambda: destination.attempts == 1)
        assert not any(task.done() for task in taking)
        destination.gate.set()
        async with asyncio.timeout(BOUND):
            await asyncio.gather(*taking)

    asyncio.run(run())


@pytest.mark.parametrize(
    "error", [TryLater("not now", 3.0), StorageAtCapacity("full"), ValueError("a mistake")]
)
def test_everybody_hears_a_refusal(error: Exception) -> None:
    async def run() -> None:
        destination = Destination(lambda _: error)
        heard = await outcomes(batch(destination, max_items=30), [item(n) for n in range(3)])
        assert [type(each) for each in heard] == [type(error)] * 3
        assert [str(each) for each in heard] == [str(error)] * 3
        if isinstance(error, TryLater):
            assert [getattr(each, "retry_after", None) for each in heard] == [3.0] * 3
            assert len({id(each) for each in heard}) == 3
        assert destination.attempts == 1

    asyncio.run(run())


def test_a_bad_one_does_not_take_good_ones_with_it() -> None:
    def answer(got: Item) -> Exception | None:
        return Undeliverable("request 1 is bad") if b"request 1" in got.requests else None

    async def run() -> None:
        destination, metrics = Destination(answer), Metrics()
        node = batch(destination, metrics, max_items=30)
        heard = await outcomes(node, [item(n) for n in range(3)])
        assert [type(each) for each in heard] == [type(None), Undeliverable, type(None)]
        assert [got.requests for got in destination.got] == [(b"request 0",), (b"request 2",)]
        assert metrics.get("quiver.batch.taken_apart_total", node="batch") == 1

    asyncio.run(run())


def test_the_timer_ends_a_batch_however_many_come() -> None:
    async def run() -> None:
        destination, metrics = Destination(), Metrics()
        node = batch(destination, metrics, timeout=0.05, max_items=10**9, max_bytes=10**12)
        first = asyncio.create_task(node.take(item(0)))
        others: list[asyncio.Task[None]] = []
        async with asyncio.timeout(BOUND):
            while not first.done():
                others.append(asyncio.create_task(node.take(item(1))))
                await asyncio.sleep(0.001)
            await asyncio.gather(*others)
        assert metrics.get("quiver.batch.flushes_total", node="batch", reason="timeout") >= 1

    asyncio.run(run())


def test_stopping_hands_on_what_is_gathered() -> None:
    async def run() -> None:
        destination = Destination()
        node = batch(destination)
        taking = [asyncio.create_task(node.take(item(n))) for n in range(3)]
        await asyncio.sleep(0)
        await node.stop(soon())
        async with asyncio.timeout(BOUND):
            await asyncio.gather(*taking)
        assert [len(got.requests) for got in destination.got] == [3]
        await node.take(item(4))  # a late one is not left behind
        assert len(destination.got) == 2

    asyncio.run(run())


@pytest.mark.parametrize("has_begun", [True, False])
def test_stopping_does_not_wait_for_ever(has_begun: bool) -> None:
    async def run() -> None:
        destination = Destination()
        destination.gate.clear()
        node = batch(destination, max_items=20 if has_begun else 1000)
        taking = [asyncio.create_task(node.take(item(n))) for n in range(2)]
        await asyncio.sleep(0)
        if has_begun:
            await _until(lambda: destination.attempts == 1)
        await node.stop(asyncio.get_running_loop().time())
        async with asyncio.timeout(BOUND):
            heard = await asyncio.gather(*taking, return_exceptions=True)
        assert [type(each) for each in heard] == [TryLater, TryLater]

    asyncio.run(run())


def test_one_who_gives_up_does_not_disturb_the_others() -> None:
    async def run() -> None:
        destination = Destination()
        node = batch(destination, max_items=20)
        impatient = asyncio.create_task(node.take(item(0)))
        await asyncio.sleep(0)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        assert await outcomes(node, [item(1)]) == [None]
        assert destination.got[0].requests == (b"request 0", b"request 1")

    asyncio.run(run())


def test_limits_are_checked() -> None:
    with pytest.raises(InvalidConfig, match="max_items"):
        batch(Destination(), max_items=0)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.002)
