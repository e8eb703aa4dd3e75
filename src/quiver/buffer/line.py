"""The line of a producer: the open batch, and those before it that are on their way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final, Protocol

from quiver.buffer.appender import Pending, StaleUpload
from quiver.buffer.batch import FOOTER_SIZE
from quiver.buffer.handles import DurabilityWatcher, Durable, WriteHandle
from quiver.buffer.room import Room
from quiver.buffer.types import Metadata
from quiver.buffer.uploading import OutgoingBatch, Uploader, unexpected
from quiver.config import ProducerConfig
from quiver.errors import FormatError, ProducerClosed, QueueError, QueueReset, QuiverError
from quiver.metrics import Metrics

MAX_METADATA_BYTES: Final = 1024 * 1024
"""What one call may say of its entries: it goes into the manifest, which everybody reads."""

_RECORD_HEAD: Final = 4
_TURN: Final = 0.005


class Enqueueing(Protocol):
    """Whoever puts uploaded batches into the manifest, here or elsewhere."""

    async def append(
        self, pending: Sequence[Pending], more: Callable[[], Sequence[Pending]] = ...
    ) -> list[int]: ...


class Line:
    """The open batch, and those behind it that are on their way."""

    def __init__(
        self,
        config: ProducerConfig,
        uploader: Uploader,
        enqueueing: Enqueueing,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._uploader = uploader
        self._enqueueing = enqueueing
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._room = Room(config.max_buffered_inputs, config.max_buffered_bytes, self._make_room)
        self._max_metadata = min(MAX_METADATA_BYTES, config.queue.max_manifest_bytes // 4)
        self._refusal: QueueError | None = None
        self._open: OutgoingBatch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turn_ends = self._loop.time() + _TURN
        self._waiting: deque[OutgoingBatch] = deque()
        self._unsettled: dict[OutgoingBatch, None] = {}
        self._appending: asyncio.Task[None] | None = None

    # --- Taking -------------------------------------------------------------------------------

    async def take(
        self, entries: Sequence[bytes], metadata: bytes, now_ms: Callable[[], int]
    ) -> WriteHandle:
        """Put the entries of a call into the open batch."""
        self._check_open()
        size = self._check_call(entries, metadata)
        if self._loop.time() >= self._turn_ends:
            # Callers that never wait would keep the loop from its timers, and from the uploads.
            self._turn_ends = self._loop.time() + _TURN
            await asyncio.sleep(0)
        await self._enter(size)
        batch = self._batch_for(size + _RECORD_HEAD * len(entries), len(metadata))
        ingestion_time_ms = now_ms()
        batch.add(entries, Metadata(len(batch.records), ingestion_time_ms, metadata), size)
        self._gauge()
        if batch.size >= self._config.flush_size_bytes:
            self.close_batch()
        self._make_room()
        return WriteHandle(ingestion_time_ms, DurabilityWatcher(batch.settling))

    async def _enter(self, size: int) -> None:
        await self._room.enter(size)
        try:
            self._check_open()
        except QueueError:
            self._room.leave(1, size)
            raise

    def _make_room(self) -> None:
        """When everything that is held is in the open batch, waiting for more is pointless."""
        if self._room.is_wanted and not self._unsettled:
            self.close_batch()

    def _check_call(self, entries: Sequence[bytes], metadata: bytes) -> int:
        if not entries:
            raise QueueError("a call needs at least one entry; entries may be empty themselves")
        if len(metadata) > self._max_metadata:
            raise QueueError(
                f"the metadata has {len(metadata)} bytes, at most {self._max_metadata} are allowed"
            )
        size = sum(map(len, entries))
        framed = size + _RECORD_HEAD * len(entries) + FOOTER_SIZE
        if framed > self._config.queue.max_batch_bytes:
            raise QueueError(
                f"the entries need a batch of {framed} bytes, and queue.max_batch_bytes is "
                f"{self._config.queue.max_batch_bytes}: hand in fewer at once"
            )
        return size + len(metadata)

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise ProducerClosed(str(self._refusal)) from self._refusal

    # --- The open batch -----------------------------------------------------------------------

    def _batch_for(self, framed: int, metadata: int) -> OutgoingBatch:
        """The open batch if these fit into it, or a new one."""
        batch = self._open
        if batch is not None:
            held = batch.size + _RECORD_HEAD * len(batch.records) + FOOTER_SIZE
            too_large = held + framed > self._config.queue.max_batch_bytes
            if too_large or batch.metadata_bytes + metadata > self._max_metadata:
                self.close_batch()
                batch = None
        if batch is None:
            batch = self._open = OutgoingBatch()
            self._uploader.prepare()
            self._timer = self._loop.call_later(self._config.flush_interval, self.close_batch)
        return batch

    def close_batch(self) -> None:
        """End the open batch: it gets its place in line, and its upload begins."""
        batch = self._open
        if batch is None:
            return
        self._open = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch.closed = self._loop.time()
        batch.record_count = len(batch.records)
        batch.upload = self._loop.create_task(self._uploader.upload(batch))
        self._unsettled[batch] = None
        self._waiting.append(batch)
        if self._appending is None:
            self._appending = self._loop.create_task(self._append_in_order())

    # --- In line ------------------------------------------------------------------------------

    async def _append_in_order(self) -> None:
        try:
            while self._waiting:
                if (upload := self._waiting[0].upload) is not None:
                    await asyncio.wait([upload])
                await self._append(self._take_uploaded(self._config.max_append))
        except (FormatError, QueueReset) as error:
            self.stop(error)
        except asyncio.CancelledError:
            self.stop(ProducerClosed("the producer was cancelled before the entries were durable"))
            raise
        except Exception as error:  # noqa: BLE001 - nobody else would hear of it
            self.stop(unexpected(error))
        finally:
            self._appending = None

    def _join(self, ready: list[tuple[OutgoingBatch, Pending]]) -> list[Pending]:
        """Add those that are uploaded by now, before the manifest is written."""
        new = self._take_uploaded(self._config.max_append - len(ready))
        ready += new
        return [pending for _, pending in new]

    def _take_uploaded(self, at_most: int) -> list[tuple[OutgoingBatch, Pending]]:
        """The head of the line, as far as it is uploaded; those that failed leave it."""
        ready: list[tuple[OutgoingBatch, Pending]] = []
        for batch in list(islice(self._waiting, max(0, at_most))):
            if batch.upload is None or not batch.upload.done():
                break
            self._waiting.popleft()
            uploaded = batch.upload.result()
            if isinstance(uploaded, Pending):
                ready.append((batch, uploaded))
            else:
                self._settle(batch, uploaded)
        return ready

    async def _append(self, ready: list[tuple[OutgoingBatch, Pending]]) -> None:
        while ready:
            try:
                sequences = await self._enqueueing.append(
                    [pending for _, pending in ready], partial(self._join, ready)
                )
            except StaleUpload as error:
                ready = await self._upload_again(ready, error.stale)
                continue
            except (FormatError, QueueReset):
                raise
            except QuiverError as error:
                for batch, _ in ready:
                    self._settle(batch, error)
                return
            for (batch, pending), sequence in zip(ready, sequences, strict=True):
                self._settle(batch, Durable(pending.entry.location, sequence))
            return

    async def _upload_again(
        self, ready: list[tuple[OutgoingBatch, Pending]], stale: Sequence[Pending]
    ) -> list[tuple[OutgoingBatch, Pending]]:
        again = [one for one in ready if one[1] in stale]
        errors = await asyncio.gather(*(self._uploader.upload_again(*one) for one in again))
        for (batch, _), error in zip(again, errors, strict=True):
            if error is not None:
                self._settle(batch, error)
        return [one for one in ready if one[0] in self._unsettled]

    def _settle(self, batch: OutgoingBatch, outcome: Durable | QuiverError) -> None:
        if batch not in self._unsettled:
            return  # it has its fate
        del self._unsettled[batch]
        if isinstance(outcome, Durable):
            self._metrics.count("buffer.batches_flushed")
            self._metrics.count("buffer.entries_flushed", batch.record_count)
            self._metrics.count("buffer.bytes_flushed", batch.size)
            self._metrics.count("buffer.bytes_written", len(batch.encoded))
            took = self._loop.time() - batch.closed
            self._metrics.observe("buffer.flush_duration_seconds", took)
        else:
            self._metrics.count("buffer.batches_failed")
        batch.encoded = b""
        batch.settling.settle(outcome)
        self._room.leave(batch.calls, batch.size)
        self._gauge()
        self._make_room()

    # --- Ending -------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait for all that is in line now; raise the first error."""
        outcomes = [await batch.settling.wait() for batch in list(self._unsettled)]
        for outcome in outcomes:
            if isinstance(outcome, QuiverError):
                raise outcome

    def refuse(self, error: QueueError) -> None:
        """Take nothing more."""
        self._refusal = self._refusal or error
        self._room.refuse(error)

    def stop(self, error: QuiverError) -> None:
        """End now: everything that has no fate yet gets this error."""
        if isinstance(error, ProducerClosed):
            self.refuse(error)
        else:
            refusal = ProducerClosed(f"the producer stopped: {error}")
            refusal.__cause__ = error
            self.refuse(refusal)
        self.close_batch()
        self._uploader.stop()
        self._waiting.clear()
        for batch in list(self._unsettled):
            if batch.upload is not None:
                batch.upload.cancel()
            self._settle(batch, error)
        if self._appending is not None and self._appending is not asyncio.current_task(self._loop):
            self._appending.cancel()

    def _gauge(self) -> None:
        self._metrics.set("buffer.buffered_bytes", self._room.bytes)
        self._metrics.set("buffer.buffered_inputs", self._room.calls)
