"""Queues for tests: producers with everything given, and a consumer of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from random import Random

from ulid import ULID

from quiver.buffer import manifest
from quiver.buffer.appender import Appender, Clock, Instant, Pending
from quiver.buffer.batch import decode_batch
from quiver.buffer.producer import Producer
from quiver.buffer.types import Metadata, NewEntry, QueueEntry
from quiver.config import ProducerConfig, QueueConfig
from quiver.errors import Conflict, ObjectNotFound, ObjectsUnavailable
from quiver.metrics import Metrics
from quiver.testing.objects import SimulatedObjects
from quiver.testing.virtual_time import now_ms

MANIFEST = "ingest/manifest"


def quick_objects(seed: int = 0) -> SimulatedObjects:
    """A store whose calls take 20 ms each way."""
    return SimulatedObjects(Random(seed), latency=(0.02, 0.02))


def seeded_ulids(seed: int = 0, clock: Callable[[], int] = now_ms) -> Callable[[], ULID]:
    """ULIDs that are the same each time."""
    random = Random(f"ulids {seed}")
    return lambda: ULID(clock().to_bytes(6, "big") + random.randbytes(10))


def producer_of(
    objects: SimulatedObjects,
    config: ProducerConfig | None = None,
    *,
    metrics: Metrics | None = None,
    seed: int = 0,
    clock: Callable[[], int] = now_ms,
) -> Producer:
    """A producer that does the same each time."""
    return Producer(
        objects,
        config or ProducerConfig(),
        metrics=metrics,
        now_ms=clock,
        random=Random(f"producer {seed}"),
        ulids=seeded_ulids(seed, clock),
    )


def appender_of(
    objects: SimulatedObjects,
    config: QueueConfig | None = None,
    *,
    metrics: Metrics | None = None,
    seed: int = 0,
    role: str = "producer",
) -> Appender:
    """An appender that does the same each time."""
    return Appender(
        objects,
        config or QueueConfig(),
        clock=Clock(now_ms),
        random=Random(f"appender {seed}"),
        metrics=metrics or Metrics(),
        role=role,
    )


def pending_of(name: str, *, age: float = 0.0, shared: bool = False) -> Pending:
    """A batch that was uploaded, or so it says."""
    uploaded = Instant(asyncio.get_running_loop().time() - age, now_ms() - round(1000 * age))
    return Pending(entry_of(name), uploaded, shared)


def entry_of(name: str) -> NewEntry:
    """An entry, by the last letters of its ULID."""
    return NewEntry(f"ingest/{name:0>26}.batch", (Metadata(0, 1, b"m"),))


def queued(objects: SimulatedObjects, path: str = MANIFEST) -> tuple[QueueEntry, ...]:
    """What is in the queue now."""
    data = objects.peek(path)
    return manifest.entries(data, source=path) if data is not None else ()


def queued_names(objects: SimulatedObjects) -> list[str]:
    """The last letters of the ULIDs in the queue, of entries that ``entry_of`` made."""
    return [
        entry.location.removeprefix("ingest/").removesuffix(".batch").lstrip("0")
        for entry in queued(objects)
    ]


def records(objects: SimulatedObjects, location: str) -> tuple[bytes, ...]:
    """What is in a batch."""
    data = objects.peek(location)
    assert data is not None, location
    return decode_batch(data, source=location, limit=2**30)


def queued_records(objects: SimulatedObjects) -> list[tuple[bytes, ...]]:
    """The records of each batch in the queue."""
    return [records(objects, entry.location) for entry in queued(objects)]


def take_out(objects: SimulatedObjects, through: int) -> None:
    """Dequeue at once, as a consumer would."""
    data = objects.peek(MANIFEST)
    assert data is not None
    objects.plant(MANIFEST, manifest.dequeue(data, through, source=MANIFEST))


class GreedyConsumer:
    """Takes out whatever it sees, as fast as it can, and remembers locations."""

    def __init__(self, objects: SimulatedObjects) -> None:
        self._objects = objects
        self.consumed: list[str] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            with contextlib.suppress(Conflict, ObjectsUnavailable, ObjectNotFound):
                await self.drain()
            await asyncio.sleep(0.01)

    async def drain(self) -> None:
        """Once: consume what is there, then take it out."""
        fetched = await self._objects.get(MANIFEST)
        assert fetched is not None
        entries = manifest.entries(fetched.data, source=MANIFEST)
        for entry in entries:
            if entry.location not in self.consumed:
                self.consumed.append(entry.location)
        if entries:
            data = manifest.dequeue(fetched.data, entries[-1].sequence, source=MANIFEST)
            await self._objects.put_if(MANIFEST, data, fetched.version)
