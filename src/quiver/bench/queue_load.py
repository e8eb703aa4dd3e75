"""Producers of a queue under load, in virtual time: ours, through a committer, and one at a time.

The store takes as long as a store far away does (``LATENCIES``; each call draws from a lognormal
distribution around its figure), and a consumer takes everything out once a second, at once, so that
the manifest stays small. Every producer gets a call of ``ENTRY`` bytes each ``CALL_INTERVAL``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from ulid import ULID

from quiver.buffer import manifest
from quiver.buffer.appender import Clock, Pending
from quiver.buffer.batch import encode_batch
from quiver.buffer.committer_wire import Append, Refused
from quiver.buffer.group_commit import GroupCommit
from quiver.buffer.line import Line
from quiver.buffer.names import batch_location
from quiver.buffer.objects import Fetched, ObjectInfo, Objects, Version
from quiver.buffer.ownership import marker_path
from quiver.buffer.producer import Producer
from quiver.buffer.types import Metadata, NewEntry
from quiver.buffer.uploading import Uploader
from quiver.config import BatchCompression, ProducerConfig, QueueConfig
from quiver.errors import Conflict, ObjectNotFound, QueueError
from quiver.metrics import Metrics
from quiver.testing.objects import SimulatedObjects
from quiver.testing.virtual_time import now_ms, run

LATENCIES: Final[Mapping[str, float]] = MappingProxyType(
    {"get": 0.063, "manifest_put": 0.100, "data_put": 0.120}
)
"""Seconds, the median of each kind of call."""
SPREAD: Final = 0.2
"""Of the logarithm: one call in a hundred takes 1.6 times the median."""
CALL_INTERVAL: Final = 0.05
COMMITTER_ROUND_TRIP: Final = 0.002
WARM_UP: Final = 5.0
"""Calls before that are not counted."""

ENTRY: Final = b"\0" * 64
_METADATA: Final = b"\1\3\1\0"
_DEQUEUE_INTERVAL: Final = 1.0
_T = TypeVar("_T")


class Load(NamedTuple):
    """What became of the calls after the warm-up."""

    batches_s: float
    calls_s: float
    conflicts_percent: float
    batches_per_write: float
    p50_s: float
    p99_s: float

    def figures(self) -> dict[str, float]:
        """By name, rounded."""
        return {name: round(value, 3) for name, value in self._asdict().items()}


class DistantObjects(Objects):
    """A store that takes its time, half of it on the way there."""

    def __init__(self, random: Random) -> None:
        self.inner = SimulatedObjects(random, latency=(0.0, 0.0))
        self._random = random

    async def get(self, path: str, *, unless: Version | None = None) -> Fetched | None:
        return await self._far("get", lambda: self.inner.get(path, unless=unless))

    async def get_tail(
        self, path: str, length: int, *, unless: Version | None = None
    ) -> Fetched | None:
        return await self._far("get", lambda: self.inner.get_tail(path, length, unless=unless))

    async def get_range(self, path: str, start: int, end: int, *, version: Version) -> Fetched:
        return await self._far(
            "get", lambda: self.inner.get_range(path, start, end, version=version)
        )

    async def put(self, path: str, data: bytes) -> Version:
        return await self._far("data_put", lambda: self.inner.put(path, data))

    async def put_if(self, path: str, data: bytes, expected: Version | None) -> Version:
        return await self._far("manifest_put", lambda: self.inner.put_if(path, data, expected))

    async def list_children(self, prefix: str) -> Sequence[ObjectInfo]:
        return await self._far("get", lambda: self.inner.list_children(prefix))

    async def delete(self, paths: Sequence[str]) -> None:
        await self._far("data_put", lambda: self.inner.delete(paths))

    async def _far(self, kind: str, call: Callable[[], Awaitable[_T]]) -> _T:
        there, back = (
            LATENCIES[kind] / 2 * math.exp(self._random.gauss(0.0, SPREAD)) for _ in range(2)
        )
        await asyncio.sleep(there)
        try:
            return await call()
        finally:
            await asyncio.sleep(back)


@dataclass(slots=True)
class _Run:
    """One run: its store, its figures."""

    objects: DistantObjects
    config: ProducerConfig
    seconds: float
    metrics: Metrics = field(default_factory=Metrics)
    latencies: list[float] = field(default_factory=list)
    batches: int = 0
    writes: int = 0
    conflicts: int = 0

    @property
    def counting(self) -> bool:
        """Whether the warm-up is over."""
        return WARM_UP <= asyncio.get_running_loop().time() < WARM_UP + self.seconds


Produce = Callable[[bytes, bytes], Awaitable[Awaitable[object]]]
"""Take an entry; what comes back ends when it is durable."""
Open = Callable[[_Run, int], Produce]
"""Make the producer with this number."""


def measure(producers: int, open_producer: Open, *, seconds: float, seed: int = 0) -> Load:
    """Run so many of them for so long, in virtual time."""
    return run(_measure(producers, open_producer, seconds, seed), seed=seed)


async def _measure(producers: int, open_producer: Open, seconds: float, seed: int) -> Load:
    config = ProducerConfig(max_buffered_inputs=100_000)
    state = _Run(DistantObjects(Random(f"latencies {seed}")), config, seconds)
    state.objects.inner.plant(marker_path(config.queue), config.queue.manifest_path.encode())
    state.objects.inner.plant(config.queue.manifest_path, manifest.EMPTY)
    tasks = [asyncio.create_task(_take_out(state))]
    random = Random(f"starts {seed}")
    for number in range(producers):
        produce = open_producer(state, number)
        start = random.uniform(0.0, 2 * CALL_INTERVAL)
        tasks.append(asyncio.create_task(_call(state, produce, start)))
    await asyncio.sleep(WARM_UP)
    before = _counts(state)
    await asyncio.sleep(seconds)
    batches, writes, conflicts = (
        now - then for now, then in zip(_counts(state), before, strict=True)
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    latencies = sorted(state.latencies)
    return Load(
        batches_s=batches / seconds,
        calls_s=len(latencies) / seconds,
        conflicts_percent=100 * conflicts / max(1.0, writes),
        batches_per_write=batches / max(1.0, writes - conflicts),
        p50_s=latencies[len(latencies) // 2],
        p99_s=latencies[len(latencies) * 99 // 100],
    )


def _counts(state: _Run) -> tuple[float, float, float]:
    """Batches, writes of the manifest, and conflicts, so far."""
    get = state.metrics.get
    roles = ("producer", "committer")
    return (
        state.batches + get("buffer.batches_flushed"),
        state.writes + sum(get("buffer.manifest_writes", role=role) for role in roles),
        state.conflicts + sum(get("buffer.manifest_conflicts", role=role) for role in roles),
    )


async def _call(state: _Run, produce: Produce, start: float) -> None:
    """Hand in an entry at each tick, whatever became of those before."""
    await asyncio.sleep(start)
    loop = asyncio.get_running_loop()
    waiting: set[asyncio.Task[None]] = set()
    while True:
        begun = loop.time()
        durable = await produce(ENTRY, _METADATA)
        task = loop.create_task(_wait(state, begun, durable))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        await asyncio.sleep(CALL_INTERVAL)


async def _wait(state: _Run, begun: float, durable: Awaitable[object]) -> None:
    await durable
    if state.counting:
        state.latencies.append(asyncio.get_running_loop().time() - begun)


async def _take_out(state: _Run) -> None:
    """The consumer: everything, at once."""
    path = state.config.queue.manifest_path
    inner = state.objects.inner
    while True:
        await asyncio.sleep(_DEQUEUE_INTERVAL)
        data = inner.peek(path)
        footer = manifest.decode_footer(data or b"", source=path)
        if data is not None and footer.entry_count:
            inner.plant(path, manifest.dequeue(data, footer.next_sequence - 1, source=path))
        for gone in inner.paths():
            if gone.endswith(".batch"):
                inner.remove(gone)
        inner.calls.clear()


def _ulids(number: int) -> Callable[[], ULID]:
    random = Random(f"ulids {number}")
    return lambda: ULID(now_ms().to_bytes(6, "big") + random.randbytes(10))


# --- Ours -----------------------------------------------------------------------------------------


def pipelined(state: _Run, number: int) -> Produce:
    """Producers as they are."""
    producer = Producer(
        state.objects,
        state.config,
        metrics=state.metrics,
        now_ms=now_ms,
        random=Random(f"producer {number}"),
        ulids=_ulids(number),
    )

    async def produce(entry: bytes, metadata: bytes) -> Awaitable[object]:
        return (await producer.produce([entry], metadata)).watcher.durable()

    return produce


class Committed:
    """Producers that ask one committer. The way to it takes a moment, instead of sockets."""

    def __init__(self) -> None:
        self._group: GroupCommit | None = None
        self._running: asyncio.Task[None] | None = None

    def __call__(self, state: _Run, number: int) -> Produce:
        """Make one of them."""
        clock = Clock(now_ms)
        random = Random(f"producer {number}")
        if self._group is None:
            self._group = GroupCommit(
                state.objects,
                state.config.queue,
                clock=clock,
                random=Random("committer"),
                metrics=state.metrics,
            )
            self._running = asyncio.get_running_loop().create_task(self._group.run())
        asking = _Asking(self._group, state.config.queue, clock)
        uploader = Uploader(
            state.objects, state.config, clock, random, state.metrics, _ulids(number), None
        )
        line = Line(state.config, uploader, asking, state.metrics)

        async def produce(entry: bytes, metadata: bytes) -> Awaitable[object]:
            return (await line.take([entry], metadata, now_ms)).watcher.durable()

        return produce


class _Asking:
    """A producer's side of a committer in the same process."""

    def __init__(self, group: GroupCommit, queue: QueueConfig, clock: Clock) -> None:
        self._group = group
        self._queue = queue
        self._clock = clock

    async def append(
        self,
        pending: Sequence[Pending],
        more: Callable[[], Sequence[Pending]] = tuple,  # noqa: ARG002 - the next request has them
    ) -> list[int]:
        await asyncio.sleep(COMMITTER_ROUND_TRIP)
        age = max(self._clock.since(one.uploaded) for one in pending)
        asked = Append(
            1,
            int(1000 * age),
            int(1000 * self._queue.attempt_timeout),
            self._queue.manifest_path,
            tuple(one.entry for one in pending),
        )
        answer = await self._group.commit(asked)
        if isinstance(answer, Refused):
            raise QueueError(answer.reason)
        return list(answer.sequences)


# --- One flush at a time --------------------------------------------------------------------------


class _OneAtATime:
    """The design of the reference: one flush in flight, conflicts tried again at once, for ever.

    Nothing is gathered while a flush is on its way; calls wait in a channel, and the interval of
    the next batch begins when it takes the first of them.
    """

    def __init__(self, state: _Run, number: int) -> None:
        self._state = state
        self._ulids = _ulids(number)
        self._channel: asyncio.Queue[tuple[bytes, Metadata, asyncio.Future[None]]] = asyncio.Queue(
            state.config.max_buffered_inputs
        )
        self._task = asyncio.get_running_loop().create_task(self._flush_forever())

    async def produce(self, entry: bytes, metadata: bytes) -> Awaitable[object]:
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._channel.put((entry, Metadata(0, now_ms(), metadata), durable))
        return durable

    async def _flush_forever(self) -> None:
        while True:
            calls = [await self._channel.get()]
            try:
                async with asyncio.timeout(self._state.config.flush_interval):
                    while True:
                        calls.append(await self._channel.get())
            except TimeoutError:
                pass
            await self._flush([call[0] for call in calls], [call[1] for call in calls])
            self._state.batches += 1
            for _, _, durable in calls:
                durable.set_result(None)

    async def _flush(self, records: list[bytes], metadata: list[Metadata]) -> None:
        state, queue = self._state, self._state.config.queue
        location = batch_location(queue.data_path_prefix, self._ulids())
        await state.objects.put(location, encode_batch(records, BatchCompression.NONE))
        numbered = tuple(item._replace(start_index=at) for at, item in enumerate(metadata))
        while True:
            data, version = manifest.EMPTY, None
            try:
                found = await state.objects.get(queue.manifest_path)
            except ObjectNotFound:
                found = None
            if found is not None:
                data, version = found.data, found.version
            new = NewEntry(location, numbered)
            state.writes += 1
            try:
                await state.objects.put_if(
                    queue.manifest_path,
                    manifest.append(data, [new], source=queue.manifest_path),
                    version,
                )
            except Conflict:
                state.conflicts += 1
            else:
                return


def one_at_a_time(state: _Run, number: int) -> Produce:
    """Producers as the reference has them."""
    return _OneAtATime(state, number).produce
