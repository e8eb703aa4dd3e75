"""Workers, supervisors and everything are killed under load: what was acknowledged arrives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx
import pytest
from answering import Answer, Server, http_server
from running import Quiver, eventually, is_alive, quiver_in

from quiver import Signal
from quiver.testing import Shape, Telemetry

CLIENTS = 4


def bodies() -> Iterator[bytes]:
    """Requests, no two of them the same."""
    seen: set[bytes] = set()
    for request in Telemetry(seed=3, shape=Shape(items_per_request=5)).requests(Signal.TRACES):
        if request not in seen:
            seen.add(request)
            yield request


@dataclass
class Load:
    """Clients that send without end, and what was acknowledged to them."""

    quiver: Quiver
    acknowledged: list[bytes] = field(default_factory=list)
    _bodies: Iterator[bytes] = field(default_factory=bodies)

    async def send(self) -> None:
        while True:
            async with httpx.AsyncClient(timeout=10) as client:
                for _ in range(50):  # then connect anew, perhaps to another worker
                    body = next(self._bodies)
                    if await self.quiver.post(client, body):
                        self.acknowledged.append(body)
                    else:
                        await asyncio.sleep(0.02)

    async def more(self, number: int) -> None:
        """Wait until so many more are acknowledged."""
        wanted = len(self.acknowledged) + number
        await eventually(lambda: len(self.acknowledged) >= wanted, self.quiver.said()[-2000:])


@contextlib.asynccontextmanager
async def load_on(quiver: Quiver) -> AsyncIterator[Load]:
    load = Load(quiver)
    clients = [asyncio.create_task(load.send()) for _ in range(CLIENTS)]
    try:
        yield load
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def kill_a_worker(quiver: Quiver, chance: random.Random) -> None:
    os.kill(chance.choice(quiver.workers()), signal.SIGKILL)


async def kill_the_supervisor(quiver: Quiver, chance: random.Random) -> None:
    """The workers stop by themselves, in order."""
    del chance
    workers = quiver.workers()
    quiver.signal(signal.SIGKILL)
    await quiver.ended()
    await eventually(lambda: not any(map(is_alive, workers)), "workers outlive their supervisor")
    quiver.start()


async def kill_everything(quiver: Quiver, chance: random.Random) -> None:
    pids = [quiver.pid, *quiver.workers()]
    chance.shuffle(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await quiver.ended()
    quiver.start()


async def kill_and_compare(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    refusals = count()

    def moody(_: bytes) -> Answer:
        """One in five is refused for now."""
        return Answer(status=503) if next(refusals) % 5 == 0 else Answer()

    ways = [kill_a_worker, kill_the_supervisor, kill_everything]
    async with (
        http_server(Server(answer=moody)) as server,
        quiver_in(folder, target=server.port, cores=2, shutdown_timeout=5) as quiver,
    ):
        await quiver.ready()
        async with load_on(quiver) as load:
            for kill in range(kills):
                await load.more(chance.randint(5, 60))
                await ways[kill % len(ways)](quiver, chance)
            await load.more(20)
        await quiver.ready()
        missing = set(load.acknowledged)
        assert len(missing) > 20

        def arrived() -> bool:
            missing.difference_update(server.bodies)
            return not missing

        await eventually(arrived, "all that was acknowledged")
        quiver.signal()
        assert await quiver.ended() == 0


@pytest.mark.timeout(180)
def test_what_was_acknowledged_outlives_every_kind_of_kill(tmp_path: Path) -> None:
    asyncio.run(kill_and_compare(tmp_path, kills=3, seed=20261115))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_what_was_acknowledged_outlives_many_kills(tmp_path: Path, seed: int) -> None:
    asyncio.run(kill_and_compare(tmp_path, kills=30, seed=seed))
