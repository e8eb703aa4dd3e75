"""A queue in object storage, as a destination: requests become entries, whole and unchanged.

An item is taken when the batch with its requests is durable and in the manifest. Its requests stay
together and in order. Consumers tell what an entry is by its metadata, four bytes:

====  ==========  =================================
byte  field       value
====  ==========  =================================
0     version     1
1     signal      1 metrics, 2 logs, 3 traces
2     encoding    1: an OTLP request in protobuf
3     reserved    0
====  ==========  =================================

A queue that cannot take an item now makes it come back later, whatever the reason: the store does
not answer, the manifest is full, damaged or another one, the prefix belongs to another queue. It is
not the item's fault. When the manifest was damaged, it is looked at again with the next item; when
it was replaced by an older one, somebody has to look into that and start the process again. Only an
item that no batch can hold is refused for ever.

An item that comes back may be in the queue already, when the store did not answer in time: then it
is there twice.

Beside the metrics of all exporters there are those of producers, ``buffer.*``: see the manual.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quiver.buffer.manifest import MAX_PRODUCER_ID
from quiver.buffer.obstore_objects import open_objects
from quiver.buffer.producer import Producer
from quiver.bundle import Signal
from quiver.config import ProducerConfig, QueueConfig
from quiver.errors import (
    FormatError,
    ProducerClosed,
    QueueError,
    QuiverError,
    TryLater,
    Undeliverable,
)
from quiver.metrics import Metrics
from quiver.pipeline.exporters.as_otlp import otlp_requests
from quiver.pipeline.exporters.sending import Outcomes
from quiver.pipeline.item import Item
from quiver.pipeline.settings.options import BufferExporterOptions

METADATA: Final[Mapping[Signal, bytes]] = MappingProxyType(
    {
        Signal.METRICS: b"\x01\x01\x01\x00",
        Signal.LOGS: b"\x01\x02\x01\x00",
        Signal.TRACES: b"\x01\x03\x01\x00",
    }
)


class BufferExporter:
    """Sends items to a queue."""

    def __init__(
        self, name: str, options: BufferExporterOptions, *, metrics: Metrics | None = None
    ) -> None:
        self.name = name
        self._config = ProducerConfig(
            queue=QueueConfig(
                manifest_path=options.manifest_path,
                data_path_prefix=options.data_path_prefix,
                gc_grace_period=options.gc_grace_period,
            ),
            flush_interval=options.flush_interval,
            flush_size_bytes=options.flush_size_bytes,
            batch_compression=options.compression,
            committer=options.committer,
        )
        self._objects = open_objects(options.url)
        self._metrics = metrics or Metrics()
        self._outcomes = Outcomes(name, self._metrics)
        self._producer: Producer | None = None

    async def start(self) -> None:
        """Make the producer; the first item is what asks the store."""
        self._producer = self._made()

    def _made(self) -> Producer:
        is_short = 0 < len(self.name) <= MAX_PRODUCER_ID and self.name.isascii()
        return Producer(
            self._objects,
            self._config,
            metrics=self._metrics,
            producer_id=self.name if is_short else None,
            threads=True,
        )

    async def take(self, item: Item) -> None:
        """Return when all requests of the item are durable, and in the queue."""
        requests = await otlp_requests(item)
        if not requests:
            return
        producer = self._producer
        if producer is None:
            raise TryLater(f"{self.name} is not running")
        self._outcomes.is_sent(1)
        try:
            await self._produce(producer, requests, METADATA[item.signal])
        except TryLater:
            self._outcomes.request("later")
            raise
        except Undeliverable:
            self._outcomes.request("never")
            raise
        finally:
            self._outcomes.is_sent(-1)
        self._outcomes.request("delivered")
        self._outcomes.delivered(item)

    async def _produce(
        self, producer: Producer, requests: tuple[bytes, ...], metadata: bytes
    ) -> None:
        try:
            handle = await producer.produce(requests, metadata)
        except ProducerClosed as error:
            self._start_again(producer, error)
            raise TryLater(f"{self.name}: {error}") from error
        except QueueError as error:
            raise Undeliverable(f"{self.name}: {error}") from error
        try:
            await handle.watcher.durable()
        except QuiverError as error:
            self._start_again(producer, error)
            raise TryLater(f"{self.name}: {error}") from error

    def _start_again(self, stopped: Producer, error: BaseException | None) -> None:
        """After damage to the manifest, which ends a producer: the next one checks it again."""
        while error is not None and not isinstance(error, FormatError):
            error = error.__cause__
        if error is not None and self._producer is stopped:
            stopped.abort()
            self._producer = self._made()

    async def stop(self, deadline: float) -> None:
        """Write what was taken until the deadline; whoever waits after that is told to come back.

        No item is lost: each one that is not durable was not taken.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            return
        with contextlib.suppress(TimeoutError, QuiverError):
            async with asyncio.timeout_at(deadline):
                await producer.close()
        producer.abort()
