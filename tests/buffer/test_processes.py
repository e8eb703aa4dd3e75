"""Producers in processes of their own, consumers that are killed and fenced, and a bad network.

Each producer tells what became durable, after it did. Consumers write to a sink that keeps the last
sequence with the batches, are killed at random, and are followed by others. In the end every entry
that was told durable is in the sink, once, in the order of its producer, and nothing else is that
nobody produced.

With S3 there is a proxy between them and the server that delays, drops and repeats requests and
their answers, and answers with errors before or after the write. A directory has none; memory has
tasks instead of processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from flaky_proxy import Fate, FlakyProxy
from queue_bugs import BUGS
from queue_workers import ROLES, SCRIPT, Ended, Sink, Work

from quiver.errors import QueueError

if TYPE_CHECKING:
    from s3 import S3Server

pytest_plugins = ["s3"]

EMPTYING_SECONDS = 90


class Worker(Protocol):
    """A process or a task."""

    @property
    def done(self) -> bool: ...

    def kill(self) -> None: ...

    async def ended(self) -> int | None:
        """Its code; None: it was killed."""


Start = Callable[[str, Work, Callable[[dict[str, Any]], None]], Awaitable[Worker]]


@dataclass
class Told:
    """What workers have said."""

    ready: set[str] = field(default_factory=set)
    produced: set[str] = field(default_factory=set)
    durable: dict[str, tuple[str, int]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def hear(self, line: dict[str, Any]) -> None:
        """One line."""
        self.produced.update(line.get("produced", ()))
        for record in line.get("durable", ()):
            self.durable[record] = (line["location"], line["sequence"])
        self.ready.update(line.get("ready", ()))
        if "failed" in line:
            self.failed.append(line["error"])


class Process:
    """A worker in a process; what it prints is heard as it comes."""

    def __init__(
        self, process: asyncio.subprocess.Process, hear: Callable[[dict[str, Any]], None]
    ) -> None:
        self._process = process
        self._hear = hear
        self._errors = b""
        self._reading = [
            asyncio.create_task(self._listen()),
            asyncio.create_task(self._read_errors()),
        ]

    @classmethod
    async def start(cls, role: str, work: Work, hear: Callable[[dict[str, Any]], None]) -> Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SCRIPT), role, work.encode(), stdout=pipe, stderr=pipe
        )
        return cls(process, hear)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # one that was killed may leave half a line
                self._hear(json.loads(line))

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors = await self._process.stderr.read()

    @property
    def done(self) -> bool:
        return self._process.returncode is not None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> int | None:
        await asyncio.wait(self._reading)
        code = await self._process.wait()
        assert code != Ended.WRONG, self._errors.decode()
        return None if code < 0 else code


class Task:
    """A worker in a task: to kill it is to cancel it."""

    def __init__(self, task: asyncio.Task[int]) -> None:
        self._task = task

    @classmethod
    async def start(cls, role: str, work: Work, hear: Callable[[dict[str, Any]], None]) -> Task:
        await asyncio.sleep(0)
        return cls(asyncio.create_task(ROLES[role](work, hear)))

    @property
    def done(self) -> bool:
        return self._task.done()

    def kill(self) -> None:
        self._task.cancel()

    async def ended(self) -> int | None:
        (result,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(result, asyncio.CancelledError):
            return None
        if isinstance(result, BaseException):
            raise result
        return result


class Trial:
    """One queue, its producers and its consumers."""

    def __init__(self, work: Work, start: Start, *, life_seconds: float = 0.8) -> None:
        self._work = work
        self._start = start
        self._random = Random(work.seed)
        self._life_seconds = life_seconds
        self._workers: list[Worker] = []
        self._consumers: list[Worker] = []
        self.sink = Sink(work.sink)
        self.told = Told()
        self.ends: Counter[int | None] = Counter()

    def _share(self, name: str, **changes: Any) -> Work:  # noqa: ANN401 - fields of Work
        fields = json.loads(self._work.encode())
        return Work(**{**fields, "name": name, "seed": self._random.getrandbits(32), **changes})

    async def run(self, producers: int, calm: Callable[[], None] = lambda: None) -> None:
        """Everything, and the checks."""
        self.sink.prepare()
        consuming = asyncio.create_task(self._keep_consuming())
        producing = [
            asyncio.create_task(self._produce(f"p{number}")) for number in range(producers)
        ]
        try:
            await asyncio.gather(*producing)
        finally:
            consuming.cancel()
            for task in producing:
                task.cancel()
            for worker in self._workers:
                worker.kill()
            await asyncio.gather(consuming, *producing, return_exceptions=True)
            ending = [worker.ended() for worker in self._workers]
            await asyncio.gather(*ending, return_exceptions=True)
        for consumer in self._consumers:
            self.ends[await consumer.ended()] += 1
        calm()
        await self._empty()
        self.check()

    async def _produce(self, name: str) -> None:
        """A producer for all of the time; or one that is killed, and another in its place."""
        seconds = self._work.seconds
        parts = [seconds]
        if self._random.random() < 0.5:
            killed_after = self._random.uniform(0.2, 0.8) * seconds
            parts = [killed_after, seconds - killed_after]
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            work = self._share(f"{name}-{number}", seconds=part if last else 2 * seconds)
            producer = await self._begin("produce", work)
            if not last:
                await asyncio.sleep(part)
                producer.kill()
            assert await producer.ended() in ({0} if last else {0, None})

    async def _begin(self, role: str, work: Work) -> Worker:
        worker = await self._start(role, work, self.told.hear)
        self._workers.append(worker)
        return worker

    async def _keep_consuming(self) -> None:
        """One after the other; sometimes the next one starts while the last one still runs."""
        for number in range(10**6):
            name = f"c{number}"
            consumer = await self._begin("consume", self._share(name))
            self._consumers.append(consumer)
            while name not in self.told.ready and not consumer.done:  # noqa: ASYNC110 - or ended
                await asyncio.sleep(0.02)
            await asyncio.sleep(self._random.uniform(0.3, 1.7) * self._life_seconds)
            if self._random.random() < 0.6:
                consumer.kill()

    async def _empty(self) -> None:
        give_up = time.monotonic() + EMPTYING_SECONDS
        while time.monotonic() < give_up:
            last = await self._begin("consume", self._share("last", until_empty=True))
            if await last.ended() == Ended.EMPTY:
                return
        pytest.fail(f"the queue is not empty after {EMPTYING_SECONDS} s")

    def check(self) -> None:
        """What was promised."""
        rows = self.sink.read()
        places: dict[str, list[int]] = {}
        consumed: Counter[str] = Counter()
        order: dict[str, list[int]] = {}
        for sequence, location, records in rows:
            places.setdefault(location, []).append(sequence)
            if len(places[location]) > 1:
                continue  # listed again, because its producer could not know
            consumed.update(records)
            for record in records:
                producer, number, _ = record.split("/")
                if record in self.told.durable:
                    order.setdefault(producer, []).append(int(number))
        durable = self.told.durable
        assert not consumed.keys() - self.told.produced
        assert not durable.keys() - consumed.keys()
        assert not [record for record, times in consumed.items() if times > 1]
        assert all(numbers == sorted(numbers) for numbers in order.values())
        assert all(location in places for location, _ in durable.values())
        taken = {sequence: location for sequence, location, _ in rows}
        for location, sequence in durable.values():
            assert taken.get(sequence, location) == location


def drawn_seed() -> int:
    return Random(os.environ.get("QUIVER_SEED")).getrandbits(32)


async def try_s3(
    server: S3Server, directory: Path, producers: int, seconds: float, bug: str = ""
) -> None:
    seed = drawn_seed()
    async with FlakyProxy(server.endpoint, Random(seed)) as proxy:
        work = Work(
            url=server._replace(endpoint=proxy.endpoint).url(f"{producers}-{seed}-{len(bug)}"),
            keys=server.keys,
            name="",
            seed=seed,
            seconds=seconds,
            rate=120 / producers,
            sink=str(directory / "sink"),
            bug=bug,
        )
        trial = Trial(work, Process.start)
        await trial.run(producers, calm=lambda: setattr(proxy, "calm", True))
        assert all(proxy.fates[fate] for fate in Fate)
        report("s3", trial, proxy)


async def try_others(url: str, directory: Path, producers: int, seconds: float) -> None:
    seed = drawn_seed()
    sink = str(directory / "sink")
    work = Work(url=url, name="", seed=seed, seconds=seconds, rate=120 / producers, sink=sink)
    memory = url.startswith("memory:")
    trial = Trial(
        work, Task.start if memory else Process.start, life_seconds=0.4 if memory else 0.8
    )
    await trial.run(producers)
    report(url.partition(":")[0], trial, None)


def report(store: str, trial: Trial, proxy: FlakyProxy | None) -> None:
    """What there was, for those who look (``-s``); and that there was something."""
    ends = {("killed" if end is None else Ended(end).name): n for end, n in trial.ends.items()}
    print(  # noqa: T201 - shown on demand
        f"{store}: {len(trial.told.durable)} durable, {len(trial.told.failed)} calls failed, "
        f"{len(trial.sink.read())} batches, consumers {ends}, {dict(proxy.fates) if proxy else ''} "
        f"{Counter(error[:60] for error in trial.told.failed)}"
    )
    assert len(trial.told.durable) > 20
    assert trial.ends


@pytest.mark.xdist_group("s3")
def test_on_s3_through_a_bad_network(s3_server: S3Server, tmp_path: Path) -> None:
    asyncio.run(try_s3(s3_server, tmp_path, producers=3, seconds=4))


def test_in_a_directory(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    asyncio.run(try_others(store.as_uri(), tmp_path, producers=3, seconds=3))


def test_in_memory(tmp_path: Path) -> None:
    asyncio.run(try_others("memory://processes", tmp_path, producers=3, seconds=2))


@pytest.mark.parametrize(
    "bug",
    [
        "a manifest that gets empty starts at sequence 0 again",
        "a watcher says durable before the manifest is written",
    ],
)
def test_a_bug_is_found(tmp_path: Path, bug: str) -> None:
    with pytest.raises((AssertionError, QueueError)), BUGS[bug]():
        asyncio.run(try_others(f"memory://bug-{len(bug)}", tmp_path, producers=2, seconds=1))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("s3")
@pytest.mark.parametrize("bug", ["an append does not look whether it is there already"])
def test_a_bug_is_found_on_s3(s3_server: S3Server, tmp_path: Path, bug: str) -> None:
    with pytest.raises(AssertionError):
        asyncio.run(try_s3(s3_server, tmp_path, producers=3, seconds=4, bug=bug))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("s3")
def test_many_on_s3_through_a_bad_network(s3_server: S3Server, tmp_path: Path) -> None:
    asyncio.run(try_s3(s3_server, tmp_path, producers=8, seconds=40))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_in_a_directory(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    asyncio.run(try_others(store.as_uri(), tmp_path, producers=8, seconds=30))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_in_memory(tmp_path: Path) -> None:
    asyncio.run(try_others("memory://many-processes", tmp_path, producers=8, seconds=20))
