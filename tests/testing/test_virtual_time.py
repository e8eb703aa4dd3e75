"""Virtual time: it passes at once, in the same order each time, and a deadlock is seen."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from quiver.testing import virtual_time
from quiver.testing.virtual_time import Deadlock, VirtualTimeLoop, run


def loop_time() -> float:
    return asyncio.get_running_loop().time()


# --- Time -------------------------------------------------------------------------------------


def test_an_hour_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return loop_time()

    before = time.monotonic()
    assert run(main()) == 3600
    assert time.monotonic() - before < 10


def test_time_stands_still_while_something_can_run() -> None:
    async def main() -> set[float]:
        seen = set()
        for _ in range(100):
            seen.add(loop_time())
            await asyncio.sleep(0)
        return seen

    assert run(main()) == {0.0}


def test_timers_go_off_in_their_order_and_at_their_time() -> None:
    async def sleeper(seconds: float, log: list[tuple[float, float]]) -> None:
        await asyncio.sleep(seconds)
        log.append((seconds, loop_time()))

    async def main() -> list[tuple[float, float]]:
        log: list[tuple[float, float]] = []
        await asyncio.gather(*(sleeper(seconds, log) for seconds in (3.0, 1e6, 0.1, 90_000.5, 2)))
        return log

    woken = run(main())
    assert [seconds for seconds, _ in woken] == [0.1, 2, 3.0, 90_000.5, 1e6]
    assert all(at == pytest.approx(seconds) for seconds, at in woken)


def test_timeouts_are_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return loop_time()

    assert run(main()) == 30


def test_the_wall_clock_goes_with_it() -> None:
    async def main() -> list[int]:
        start = virtual_time.now_ms()
        await asyncio.sleep(1.5)
        return [start, virtual_time.now_ms()]

    assert run(main()) == [virtual_time.EPOCH_MS, virtual_time.EPOCH_MS + 1500]


# --- Deadlocks --------------------------------------------------------------------------------


def test_a_deadlock_is_an_error_that_names_the_tasks() -> None:
    async def stuck(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        event = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(stuck(event), name="first")
            group.create_task(stuck(event), name="second")

    with pytest.raises(Deadlock) as caught:
        run(main())
    for task in ("first", "second"):
        assert f"{task} waits in test_a_deadlock_is_an_error" in str(caught.value)


def test_after_a_deadlock_the_tasks_are_cancelled() -> None:
    cleaned = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with pytest.raises(Deadlock):
        run(main())
    assert cleaned == [True]


def test_what_is_left_at_the_end_is_cancelled() -> None:
    cleaned = []

    async def forever() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            cleaned.append(loop_time())

    async def main() -> str:
        task = asyncio.create_task(forever())
        await asyncio.sleep(10.5)
        assert not task.done()
        return "done"

    assert run(main()) == "done"
    assert cleaned == [10.5]


def test_an_error_comes_through() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise LookupError("this one")

    with pytest.raises(LookupError, match="this one"):
        run(main())


def test_a_callback_that_fails_is_not_overlooked() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, int, "nothing")
        await asyncio.sleep(2)

    with pytest.raises(ExceptionGroup) as caught:
        run(main())
    assert [type(error) for error in caught.value.exceptions] == [ValueError]


def test_a_call_from_a_thread_is_taken() -> None:
    """It cannot be waited for, but it is not lost where the loop has something to do."""
    loop = VirtualTimeLoop()
    woken: list[str] = []
    thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(woken.append, "thread"))
    thread.start()
    thread.join()
    loop.run_until_complete(asyncio.sleep(1))
    loop.close()
    assert woken == ["thread"]


# --- Order ------------------------------------------------------------------------------------


def order_of_ten(*, pause: float = 0.1, seed: int = 0, shuffle: bool = False) -> list[int]:
    async def step(number: int, log: list[int]) -> None:
        for _ in range(3):
            await asyncio.sleep(pause)
            log.append(number)

    async def main() -> list[int]:
        log: list[int] = []
        await asyncio.gather(*(step(number, log) for number in range(10)))
        return log

    return run(main(), seed=seed, shuffle=shuffle)


def test_the_order_is_that_of_asyncio_unless_shuffled() -> None:
    """First come, first served; timers of one moment in no order that means anything."""
    assert order_of_ten(pause=0) == list(range(10)) * 3
    assert order_of_ten(seed=1) == order_of_ten(seed=2)


def test_a_seed_gives_an_order_and_gives_it_again() -> None:
    orders = [order_of_ten(seed=seed, shuffle=True) for seed in range(20)]
    assert orders == [order_of_ten(seed=seed, shuffle=True) for seed in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    for order in orders:
        for start in (0, 10, 20):  # time is not shuffled
            assert sorted(order[start : start + 10]) == list(range(10))


def test_shuffling_finds_a_race() -> None:
    """A check and an act with a pause between them; in order, the first task always wins."""

    async def take(free: list[str], got: list[str], name: str) -> None:
        await asyncio.sleep(0)
        if free:
            got.append(f"{name} {free.pop()}")

    async def main() -> str:
        free, got = ["seat"], list[str]()
        await asyncio.gather(*(take(free, got, name) for name in "ab"))
        return got[0]

    assert {run(main(), seed=seed) for seed in range(10)} == {"a seat"}
    assert {run(main(), seed=seed, shuffle=True) for seed in range(20)} == {"a seat", "b seat"}


def test_queues_locks_and_timeouts_work_when_shuffled() -> None:
    async def producer(queue: asyncio.Queue[int], lock: asyncio.Lock, start: int) -> None:
        for number in range(start, start + 5):
            async with lock, asyncio.timeout(5):
                await queue.put(number)
                await asyncio.sleep(0.01)

    async def main() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(2)
        lock = asyncio.Lock()
        async with asyncio.TaskGroup() as group:
            for start in (0, 5, 10):
                group.create_task(producer(queue, lock, start))
            return sorted([await queue.get() for _ in range(15)])

    for seed in range(50):
        assert run(main(), seed=seed, shuffle=True) == list(range(15))
