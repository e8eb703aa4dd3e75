"""Batches of a producer, and how they become objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

from ulid import ULID

from quiver.buffer.appender import Clock, Instant, Pending
from quiver.buffer.batch import batch_crc32c, encode_batch
from quiver.buffer.bounded import BoundedObjects
from quiver.buffer.handles import Settling
from quiver.buffer.manifest import coalesce
from quiver.buffer.names import batch_location
from quiver.buffer.objects import Objects
from quiver.buffer.ownership import claim_prefix
from quiver.buffer.retrying import retrying
from quiver.buffer.types import Facts, Metadata, NewEntry
from quiver.buffer.watch import patiently
from quiver.config import BatchCompression, ProducerConfig
from quiver.errors import QueueError, QuiverError
from quiver.metrics import Metrics

_AT_ONCE: Final = 64 * 1024
"""Bytes that are encoded without a thread: less than a millisecond."""


@dataclass(slots=True, eq=False)
class OutgoingBatch:
    """Entries that go into one object: first gathered, then in line."""

    settling: Settling = field(default_factory=Settling)
    records: list[bytes] = field(default_factory=list)
    metadata: list[Metadata] = field(default_factory=list)
    calls: int = 0
    size: int = 0
    metadata_bytes: int = 0
    # In line:
    closed: float = 0.0
    record_count: int = 0
    encoded: bytes = b""
    upload: asyncio.Task[Pending | QuiverError] | None = None

    def add(self, entries: Sequence[bytes], metadata: Metadata, size: int) -> None:
        """Take the entries of a call."""
        self.records.extend(entries)
        if not self.metadata or self.metadata[-1].payload != metadata.payload:
            self.metadata_bytes += len(metadata.payload)
        self.metadata.append(metadata)
        self.calls += 1
        self.size += size


class Uploader:
    """Turns batches into objects."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        objects: Objects,
        config: ProducerConfig,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        ulids: Callable[[], ULID],
        producer_id: str | None,
        *,
        threads: bool = False,
    ) -> None:
        self._threads = threads
        self._objects = objects
        self._config = config
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._ulids = ulids
        self._producer_id = producer_id
        # Until then no collector deletes it: a write that is begun now arrives before.
        self._safe_age = config.queue.gc_grace_period - config.queue.attempt_timeout
        self._slots = asyncio.Semaphore(config.max_uploads)
        self._claiming: asyncio.Task[QuiverError | None] | None = None

    async def upload(self, batch: OutgoingBatch) -> Pending | QuiverError:
        """Encode and upload; an error is the answer, not raised."""
        try:
            async with self._slots:
                await self._claimed()
                encoded, crc32c = await self._encode(batch)
                batch.records = []
                if len(encoded) > self._config.queue.max_batch_bytes:
                    raise QueueError(
                        f"a batch of {len(encoded)} bytes is above queue.max_batch_bytes "
                        f"({self._config.queue.max_batch_bytes})"
                    )
                batch.encoded = encoded
                facts = Facts(
                    object_size=len(encoded),
                    record_count=batch.record_count,
                    crc32c=crc32c,
                    producer_id=self._producer_id,
                )
                entry = NewEntry(self._new_location(), coalesce(batch.metadata), facts)
                return Pending(entry, await self._put(entry.location, encoded))
        except QuiverError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a batch must not be left without a fate
            return unexpected(error)

    async def _encode(self, batch: OutgoingBatch) -> tuple[bytes, int]:
        """The object, and its sum."""
        compression = self._config.batch_compression
        if self._threads and batch.size > _AT_ONCE:
            return await asyncio.to_thread(_encoded, batch.records, compression)
        return _encoded(batch.records, compression)

    async def upload_again(self, batch: OutgoingBatch, pending: Pending) -> QuiverError | None:
        """Make an object that was uploaded long ago safe to name; an error is the answer.

        If the manifest surely does not name it, it gets a new name, which no collector can have
        seen. Otherwise it keeps its name, so it is written again while it is still too young to
        be deleted: that makes it young in the eyes of the store.
        """
        try:
            async with self._slots:
                location, check = self._new_location(), None
                if pending.unclear:
                    location, check = pending.entry.location, partial(self._check_safe, pending)
                pending.uploaded = await self._put(location, batch.encoded, check)
                pending.entry = pending.entry._replace(location=location)
                return None
        except QuiverError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a batch must not be left without a fate
            return unexpected(error)

    def prepare(self) -> None:
        """Begin with what the first upload has to wait for."""
        if self._claiming is None:
            self._claiming = asyncio.get_running_loop().create_task(self._claim())

    def stop(self) -> None:
        """End what ``prepare`` has begun."""
        if self._claiming is not None:
            self._claiming.cancel()

    async def _claimed(self) -> None:
        """Wait until the prefix is this queue's, and nobody else's."""
        self.prepare()
        claiming = self._claiming
        if claiming is None or (claiming.done() and claiming.result() is None):
            return
        await asyncio.wait([claiming])
        if (error := claiming.result()) is not None:
            if self._claiming is claiming:
                self._claiming = None  # the next batch tries again
            raise error

    async def _claim(self) -> QuiverError | None:
        queue = self._config.queue
        bounded = BoundedObjects(self._objects, queue.attempt_timeout)
        try:
            await patiently(
                lambda: claim_prefix(bounded, queue),
                what=queue.data_path_prefix,
                config=queue,
                random=self._random,
            )
        except QuiverError as error:
            return error
        return None

    def _new_location(self) -> str:
        return batch_location(self._config.queue.data_path_prefix, self._ulids())

    def _check_safe(self, pending: Pending) -> None:
        age = self._clock.since(pending.uploaded)
        if age > self._safe_age:
            raise QueueError(
                f"{pending.entry.location} was uploaded {age:.0f} s ago, and whether it is in the "
                "queue is not known: it may be deleted already, so it is not appended"
            )

    async def _put(
        self, location: str, data: bytes, check: Callable[[], None] | None = None
    ) -> Instant:
        """Upload, unless ``check`` objects; when the attempt that succeeded began."""

        async def attempt() -> Instant:
            if check is not None:
                check()
            begun = self._clock.read()
            await self._objects.put(location, data)
            return begun

        return await retrying(
            attempt,
            what=location,
            config=self._config.queue,
            random=self._random,
            failed=lambda: self._metrics.count("buffer.upload_retries"),
        )


def _encoded(records: Sequence[bytes], compression: BatchCompression) -> tuple[bytes, int]:
    encoded = encode_batch(records, compression)
    return encoded, batch_crc32c(encoded)


def unexpected(error: Exception) -> QueueError:
    """An error that is nobody's fault but ours, as one that a watcher may get."""
    wrapped = QueueError(f"the producer met what it does not expect: {error!r}")
    wrapped.__cause__ = error
    return wrapped
