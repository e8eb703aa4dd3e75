"""Worlds around a queue: producers, committers, consumers, collectors and vandals, from a seed.

``explore(seed)`` runs one world in virtual time and raises ``Violation`` when something happened
that must not (``queue_checks``). The seed decides the faults of the store, the order of everything
that could happen at the same time, and the script:

- two to four producers, with clocks that are wrong; some append through a committer; some end in
  the middle, and another takes their place; one may be cut off from the manifest, or from all;
- consumers that end in the middle, fence each other, and resume with or without the last sequence;
- a collector with each consumer, with a short grace period;
- a committer that ends and comes back, and connections to it that break;
- outages of the store, batches that are damaged and mended, a manifest that is reset and restored.

In the end all is repaired, one more consumer empties the queue, and the promises are checked.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Coroutine
from random import Random
from typing import Any, Final, NamedTuple
from unittest import mock

from memory_streams import connect
from queue_checks import (
    ACTOR,
    MANIFEST,
    VANDAL,
    CheckedObjects,
    Ledger,
    Life,
    Origin,
    Violation,
)
from queue_vandals import GRACE, NESTED, QUEUE, Script, Vandal
from ulid import ULID

from quiver.buffer import manifest
from quiver.buffer.collector import Collector
from quiver.buffer.committer import Committer
from quiver.buffer.consumer import Consumer
from quiver.buffer.handles import WriteHandle
from quiver.buffer.producer import Producer
from quiver.buffer.types import Batch, QueueEntry
from quiver.config import ConsumerConfig, LostBatchPolicy, ProducerConfig
from quiver.errors import (
    BatchLost,
    Fenced,
    ObjectsUnavailable,
    ProducerClosed,
    QueueError,
    QueueReset,
    QuiverError,
)
from quiver.metrics import Metrics
from quiver.testing.objects import NO_FAULTS
from quiver.testing.virtual_time import Deadlock, now_ms, run

PATIENCE: Final = 5000.0
"""Seconds until everything that is not broken must have come to its end."""


class Outcome(NamedTuple):
    """What a world came to: how much of everything there was."""

    calls: int
    manifests: int
    durable: int
    lives: int
    repeats: int
    deleted: int


class World:
    """One queue, and all who work on it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"world {seed}")
        self.script = Script.drawn(self.random)
        self.ledger = Ledger()
        self.objects = CheckedObjects(
            self._fork(), self.ledger, slow=(2.0, 25.0), faults=self.script.weather
        )
        self.metrics = Metrics()
        self.lives = 0
        self.deleted = 0
        self._producing: dict[str, Producer] = {}
        self._places: dict[str, int] = {}  # the last durable sequence of each producer
        self._starting: dict[str, int] = {}  # what consumers know of that are about to start
        self._collectors: list[Collector] = []
        self._committer: Committer | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self.vandal = Vandal(
            self._fork(),
            self.script,
            self.objects,
            self.ledger,
            producing=lambda: sorted(self._producing),
            known=self._known_to_all,
        )

    def _fork(self) -> Random:
        return Random(self.random.getrandbits(64))

    def _start(self, actor: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        context = contextvars.copy_context()
        context.run(ACTOR.set, actor)
        task = asyncio.get_running_loop().create_task(work, name=actor, context=context)
        self._background.add(task)
        return task

    # --- The whole ----------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """From the beginning to the end."""
        ACTOR.set(VANDAL)
        self.objects.plant(NESTED, b"another queue's")
        everybody = [self._start(VANDAL, self.vandal.run())]
        if self.script.committer:
            everybody.append(self._start("committer", self._keep_committing()))
        everybody.append(self._start("consumers", self._keep_consuming()))
        producing = [
            self._start(f"producer {number}", self._keep_producing(f"producer {number}"))
            for number in range(self.script.producers)
        ]
        await self._all_of(producing)
        await asyncio.sleep(self.random.choice([0, GRACE, 4 * GRACE]))
        for task in everybody:
            task.cancel()
        await asyncio.gather(*everybody, return_exceptions=True)
        await self._finish()
        return Outcome(
            len(self.objects.calls),
            len(self.ledger.history),
            len(self.ledger.durable),
            self.lives,
            self.ledger.sink.repeats,
            self.deleted,
        )

    async def _all_of(self, tasks: list[asyncio.Task[None]]) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*tasks)
        except TimeoutError:
            raise Violation(f"not done after {PATIENCE} s; {self.ledger.violations}") from None

    async def _finish(self) -> None:
        """Repair everything, empty the queue, collect the garbage, check."""
        ACTOR.set(VANDAL)
        self.vandal.repair()
        self.objects.faults = NO_FAULTS
        self.objects.reconnect()
        await asyncio.sleep(GRACE)  # for what is on its way
        last = self._start("consumer last", self._empty_the_queue())
        try:
            await self._all_of([last])
        except QuiverError as error:
            self.ledger.violated(f"the queue cannot be emptied: {error}")
        data = self.objects.peek(MANIFEST) or manifest.EMPTY
        left = manifest.check(data, source=MANIFEST).entry_count
        self.ledger.expect(left == 0, f"{left} entries are left in the manifest")
        batches = [path for path in self.objects.paths() if path.endswith(".batch")]
        self.ledger.expect(batches == [NESTED], f"batches are left: {batches}")
        repeated = self.metrics.get("buffer.appends_repeated", role="producer")
        allowed = len(self.ledger.listed) if self.script.committer else int(repeated)
        self.ledger.check_end(allowed)

    def _known_to_all(self) -> int:
        """The last sequence that everybody knows of who could find the manifest reset."""
        last = self.ledger.sink.last
        return min(
            [
                -1 if last is None else last,
                *self._starting.values(),
                *(self._places[actor] for actor in self._producing),
                # A collector knows what it saw in its last round, or its consumer in the last look.
                *(
                    max(collector._next_sequence, collector._known()) - 1
                    for collector in self._collectors
                ),
            ]
        )

    # --- Producers ----------------------------------------------------------------------------

    async def _keep_producing(self, name: str) -> None:
        """A producer, and another one in its place when it ends in the middle."""
        number = 0
        for place in range(3):
            actor = f"{name}.{place}"
            self._places[actor] = -1
            ACTOR.set(actor)
            random = self._fork()
            number = await self._produce(actor, number, random)
            if number >= self.script.calls or self.script.resets:
                return

    async def _produce(self, actor: str, number: int, random: Random) -> int:
        skew = random.choice([0, 0, -90_000, 30_000])

        def clock() -> int:
            return now_ms() + skew

        config = ProducerConfig(
            queue=QUEUE,
            flush_interval=random.choice([0.01, 0.1, 2.0]),
            flush_size_bytes=random.choice([1, 60, 10_000]),
            max_uploads=random.choice([1, 4, 8]),
            max_append=random.choice([1, 3, 256]),
            max_buffered_inputs=random.choice([2, 1000]),
            committer="committer:1" if self.script.committer and random.random() < 0.7 else None,
        )
        producer = Producer(
            self.objects,
            config,
            metrics=self.metrics,
            now_ms=clock,
            random=random,
            ulids=lambda: ULID(clock().to_bytes(6, "big") + random.randbytes(10)),
            producer_id=actor,
        )
        self._producing[actor] = producer
        ends_at = random.randrange(2 * self.script.calls)
        try:
            while number < self.script.calls and number != ends_at:
                await self._call(producer, actor, number, random)
                number += 1
            if number == ends_at:
                await asyncio.sleep(random.choice([0, 0.05, 1]))
                producer.abort()
            else:
                await producer.close()
        except QuiverError as error:
            self._judge(error)
            number += 1
        finally:
            del self._producing[actor]
        return number

    async def _call(self, producer: Producer, actor: str, number: int, random: Random) -> None:
        records = [b"%s/%d/%d" % (actor.encode(), number, i) for i in range(random.randrange(1, 4))]
        origin = Origin(actor, number)
        self.ledger.produced.update(dict.fromkeys(records, origin))
        handle = await producer.produce(records, actor.encode())
        self._start(actor, self._watch(handle, records, actor))
        if random.random() < 0.1:
            await producer.flush()
        if random.random() < 0.6:
            await asyncio.sleep(random.expovariate(1 / self.script.pace))

    async def _watch(self, handle: WriteHandle, records: list[bytes], actor: str) -> None:
        try:
            durable = await handle.watcher.durable()
        except QuiverError as error:
            self._judge(error)
        else:
            self.ledger.reported(records, durable)
            self._places[actor] = max(self._places[actor], durable.sequence)

    def _judge(self, error: BaseException) -> None:
        """Whether this error may be in this world."""
        cause = error.__cause__ if isinstance(error, ProducerClosed) else None
        if isinstance(cause, QuiverError):
            error = cause
        allowed: tuple[type[BaseException], ...] = (ObjectsUnavailable, Fenced, ProducerClosed)
        if self.script.resets:
            allowed = (*allowed, QueueReset)
        if self.script.damages:
            allowed = (*allowed, BatchLost)
        unknown = type(error) is QueueError and "is not known" in str(error)
        if not isinstance(error, allowed) and not unknown:
            self.ledger.violated(f"{type(error).__name__}: {error}")

    # --- Committers ---------------------------------------------------------------------------

    async def _keep_committing(self) -> None:
        while True:
            committer = Committer(
                self.objects, QUEUE, metrics=self.metrics, now_ms=now_ms, random=self._fork()
            )
            working = self._start("committer", committer._group.run())
            self._committer = committer
            try:
                await asyncio.sleep(self.random.expovariate(0.01))
            finally:
                self._committer = None
                connections = [task for task in self._background if task.get_name() == "serving"]
                for task in [working, *connections]:
                    task.cancel()
            await asyncio.sleep(self.random.expovariate(0.1))

    async def connect(
        self, _host: str, _port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """In place of ``asyncio.open_connection``."""
        await asyncio.sleep(self.random.uniform(0.001, 0.02))
        committer = self._committer
        if committer is None:
            raise ConnectionRefusedError("there is no committer")

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Awaitable[None]:
            return committer._serve(reader, writer, welcome=True)

        reader, writer, served = connect(serve, self._fork(), loss=0.05)

        async def serving() -> None:
            await served

        self._start("committer", serving()).set_name("serving")
        return reader, writer

    # --- Consumers ----------------------------------------------------------------------------

    def _consumer_config(self, random: Random) -> ConsumerConfig:
        return ConsumerConfig(
            queue=QUEUE,
            dequeue_acks=random.choice([1, 3, 100]),
            dequeue_interval=random.choice([0, 1, 10]),
            lost_batches=self.script.policy,
            gc_interval=random.choice([3.0, 10.0]),
        )

    async def _keep_consuming(self) -> None:
        """One consumer after the other, and sometimes two that do not know of each other."""
        while True:
            at_once = self.random.choice([1, 1, 2])
            mean = self.random.choice([3, 60, 600])
            lives = []
            for _ in range(at_once):
                self.lives += 1
                seconds = self.random.expovariate(1 / mean)
                lives.append(self._start(f"consumer {self.lives}", self._live(seconds)))
            try:
                await asyncio.gather(*lives)
            finally:
                for life in lives:
                    life.cancel()
            await asyncio.sleep(self.random.choice([0, 0.1, 5]))

    async def _live(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._consume(self._fork())
        except TimeoutError:
            pass
        except QuiverError as error:
            self._judge(error)

    async def _begin(self, random: Random) -> tuple[Consumer, Life]:
        config = self._consumer_config(random)
        consumer = Consumer(self.objects, config, metrics=Metrics(), now_ms=now_ms, random=random)
        resume = self.script.resets or random.random() < 0.7
        last = self.ledger.sink.last if resume else None
        actor = ACTOR.get()
        self._starting[actor] = -1 if last is None else last
        try:
            await consumer.initialize(last)
        finally:
            del self._starting[actor]
        return consumer, Life()

    async def _consume(self, random: Random) -> None:
        consumer, life = await self._begin(random)
        collecting = self._start(ACTOR.get(), self._collect(consumer, random))
        try:
            sleepy = random.random() < 0.2
            while True:
                await consumer.wait_for_batch()
                if sleepy and random.random() < 0.3:
                    await asyncio.sleep(random.choice([1, GRACE, 3 * GRACE]))
                await self._take(consumer, life, random)
        finally:
            if random.random() < 0.7:  # a collector may outlive its consumer
                collecting.cancel()

    async def _collect(self, consumer: Consumer, random: Random) -> None:
        collector = Collector(
            self.objects,
            self._consumer_config(random),
            metrics=Metrics(),
            now_ms=now_ms,
            known=lambda: consumer.next_sequence,
        )
        self._collectors.append(collector)
        try:
            await collector.run(consumer.epoch)
        except QuiverError as error:
            self._judge(error)
        finally:
            self._collectors.remove(collector)

    async def _take(self, consumer: Consumer, life: Life, random: Random) -> None:
        if random.random() < 0.3:
            batches = await self._take_many(consumer, random)
        else:
            batch = await consumer.next_batch()
            batches = [batch] if batch else []
        for batch in batches:
            self.ledger.sink.write(batch, life, self.objects.buried())
        if not batches:
            return
        if random.random() < 0.5:
            await consumer.ack_through(batches[-1].entry.sequence)
            return
        for batch in batches:
            # What comes after one that is left out is acknowledged with those before it.
            if batch.entry.sequence == consumer.last_acked + 1:
                await consumer.ack(batch.entry.sequence)
            else:
                await consumer.ack_through(batch.entry.sequence)

    async def _take_many(self, consumer: Consumer, random: Random) -> list[Batch]:
        entries = await consumer.next_descriptors(random.randrange(1, 6))

        async def fetched(entry: QueueEntry) -> Batch | None:
            try:
                return await consumer.fetch(entry)
            except BatchLost as lost:
                if self.script.policy is LostBatchPolicy.STOP:
                    raise
                await consumer.dead_letter(entry, lost.reason)
                return None

        batches = await asyncio.gather(*map(fetched, entries))
        return [batch for batch in batches if batch is not None]

    async def _empty_the_queue(self) -> None:
        random = self._fork()
        consumer, life = await self._begin(random)
        buried = self.objects.buried()
        await self._drain(consumer, life, buried)
        for letter in await consumer.dead_letters():
            location = letter.entry.location
            self.ledger.expect(location in self.ledger.damaged, f"{location} was given up")
            if location in self.ledger.sink.locations:
                # Its consumer ended after it wrote the letter, and the next one found it mended.
                await consumer._letters.remove(letter.entry.sequence)
            else:
                await consumer.requeue(letter.entry.sequence)
        await self._drain(consumer, life, buried)
        await consumer.flush()
        collector = Collector(
            self.objects, self._consumer_config(random), metrics=Metrics(), now_ms=now_ms
        )
        for _ in range(5):
            self.deleted += len((await collector.collect(consumer.epoch)).deleted)
            await asyncio.sleep(GRACE)
        await consumer.close()

    async def _drain(self, consumer: Consumer, life: Life, buried: set[str]) -> None:
        while batch := await consumer.next_batch():
            self.ledger.sink.write(batch, life, buried)
            await consumer.ack_through(batch.entry.sequence)


def explore(seed: int) -> Outcome:
    """Run one world; ``Violation`` says what went wrong in it."""
    world = World(seed)
    try:
        with mock.patch.object(asyncio, "open_connection", world.connect):
            outcome = run(world.run(), seed=seed, shuffle=True)
    except Deadlock as error:
        raise Violation(f"{error}; {world.ledger.violations}") from error
    world.ledger.raise_violations()
    return outcome
