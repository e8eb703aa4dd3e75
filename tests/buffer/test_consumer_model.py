"""Producers, consumers and collectors together, among failures, cancellations and restarts.

A seeded run of everything at once, in virtual time. What must hold in the end: a sink that keeps
the last sequence with its results got every batch, in order, and each once, except those that a
producer had to list again without knowing; and no batch was deleted before.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest
from memory_objects import MANIFEST
from ulid import ULID

from quiver.buffer import manifest
from quiver.buffer.collector import Collector
from quiver.buffer.consumer import Consumer
from quiver.buffer.producer import Producer
from quiver.buffer.types import Batch
from quiver.config import ConsumerConfig, ProducerConfig, QueueConfig
from quiver.errors import Fenced
from quiver.metrics import Metrics
from quiver.testing.objects import NO_FAULTS, Faults, SimulatedObjects
from quiver.testing.virtual_time import now_ms, run

BATCHES = 120
PRODUCERS = 3
GRACE = 120.0
QUEUE = QueueConfig(attempt_timeout=5, gc_grace_period=GRACE)
FAULTS = Faults(lost=0.02, unanswered=0.02, repeated=0.02, late=0.01, slow=0.01)


class Sink:
    """What a consumer writes to: results and the last sequence, together."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    @property
    def last(self) -> int | None:
        return self.batches[-1].entry.sequence if self.batches else None

    def write(self, batch: Batch) -> None:
        """Take a batch; one that was there is from a consumer that does not know it is fenced."""
        if self.last is None or batch.entry.sequence > self.last:
            self.batches.append(batch)


class World:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.objects = SimulatedObjects(Random(self.random.random()), faults=FAULTS)
        self.sink = Sink()
        self.produced = Metrics()

    async def produce(self, share: range) -> None:
        random = Random(self.random.random())

        def ulid() -> ULID:
            return ULID(now_ms().to_bytes(6, "big") + random.randbytes(10))

        producer = Producer(
            self.objects,
            ProducerConfig(queue=QUEUE),
            metrics=self.produced,
            now_ms=now_ms,
            random=random,
            ulids=ulid,
        )
        for number in share:
            await producer.produce([b"%d" % number])
            await asyncio.sleep(random.expovariate(0.05))
        await producer.close()

    async def consume(self, config: ConsumerConfig) -> None:
        """One life of a consumer, with its collector."""
        random = Random(self.random.random())
        it = Consumer(self.objects, config, metrics=Metrics(), now_ms=now_ms, random=random)
        await it.initialize(self.sink.last)
        garbage = Collector(self.objects, config, metrics=Metrics(), now_ms=now_ms)
        collecting = asyncio.create_task(garbage.run(it.epoch))
        try:
            while True:
                await it.wait_for_batch()
                await self._take(it, random)
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)

    async def _take(self, it: Consumer, random: Random) -> None:
        if random.random() < 0.3:
            entries = await it.next_descriptors(random.randrange(1, 6))
            batches = await asyncio.gather(*map(it.fetch, entries))
        else:
            batches = [batch] if (batch := await it.next_batch()) else []
        for batch in batches:
            self.sink.write(batch)
        if batches and random.random() < 0.5:
            await it.ack_through(batches[-1].entry.sequence)
        else:
            for batch in batches:
                await it.ack(batch.entry.sequence)

    async def live(self, seconds: float) -> None:
        """A consumer that is gone after some time, in the middle of whatever it does."""
        config = ConsumerConfig(
            queue=QUEUE,
            dequeue_acks=self.random.choice([1, 5, 100]),
            dequeue_interval=self.random.choice([0, 1, 10]),
            gc_interval=10,
        )
        try:
            async with asyncio.timeout(seconds):
                await self.consume(config)
        except (TimeoutError, Fenced):
            pass

    async def run(self) -> None:
        shares = [range(first, BATCHES, PRODUCERS) for first in range(PRODUCERS)]
        producers = [asyncio.create_task(self.produce(share)) for share in shares]
        while not all(task.done() for task in producers):
            lives = self.random.choice([1, 1, 2])
            await asyncio.gather(*(self.live(self.random.expovariate(0.005)) for _ in range(lives)))
        await asyncio.gather(*producers)
        self.objects.faults = NO_FAULTS
        await self.live(2000)
        self.check()

    def check(self) -> None:
        got = Counter(record for batch in self.sink.batches for record in batch.records)
        assert sorted(map(int, got)) == list(range(BATCHES))
        locations = {batch.entry.location for batch in self.sink.batches}
        repeats = len(self.sink.batches) - len(locations)
        assert repeats == got.total() - BATCHES, "a record came under two names"
        assert repeats <= self.produced.get("buffer.appends_repeated", role="producer")
        data = self.objects.peek(MANIFEST)
        assert data is not None
        assert manifest.check(data, source=MANIFEST).entry_count == 0
        assert not [path for path in self.objects.paths() if path.endswith(".batch")]


@pytest.mark.parametrize("seed", range(12))
def test_every_batch_comes_whatever_fails(seed: int) -> None:
    world = World(seed)
    run(world.run(), seed=seed, shuffle=True)


def test_a_consumer_gets_through_among_many_producers() -> None:
    async def main() -> None:
        objects = SimulatedObjects(Random(1), latency=(0.03, 0.06))
        producing = asyncio.create_task(many_producers(objects, 20, seconds=15))
        config = ConsumerConfig(queue=QUEUE)
        it = Consumer(objects, config, metrics=Metrics(), now_ms=now_ms, random=Random(2))
        await it.initialize()
        loop = asyncio.get_running_loop()
        took = []
        while not producing.done():
            await it.wait_for_batch(1)
            if entries := await it.next_descriptors(1000):
                begun = loop.time()
                await it.ack_through(entries[-1].sequence)
                took.append(loop.time() - begun)
        await producing
        assert len(took) > 5
        assert max(took) < 5

    run(main())


async def many_producers(objects: SimulatedObjects, count: int, seconds: int) -> None:
    """Ten batches a second each, and all of them durable in the end."""

    async def one(number: int) -> None:
        producer = Producer(
            objects, ProducerConfig(queue=QUEUE), now_ms=now_ms, random=Random(f"many {number}")
        )
        for _ in range(10 * seconds):
            await producer.produce([b"x"])
            await asyncio.sleep(0.1)
        await producer.close()

    await asyncio.gather(*map(one, range(count)))
