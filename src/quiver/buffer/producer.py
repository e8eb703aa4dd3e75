"""A producer: gathers entries into batches, uploads them, and adds them to the queue.

::

    produce ──> open batch ──(size, time, flush, close, no room)──> line
    line:  upload ┐
           upload ├──(in the order of the line)──> one write of the manifest for all ──> durable
           upload ┘

Uploads run side by side, each tried again until ``give_up_after``, always the same bytes to the
same location. Meanwhile the head of the line is appended: as many batches as are uploaded, with
one write. Batches become durable in the order in which they were closed.

When a batch fails for good, its watchers get the error and the ones behind it go on. So the order
of those that are durable is that of the calls, but one may be missing; a caller who needs the
entries before it waits for its handle before the next call, or hands in all again from there.

An error says that the entries are not known to be in the queue. They may be, when the store did
not answer, or the producer ended in the middle of a write: handing them in again may double them.

A manifest that does not add up, or was replaced by an older one, ends the producer: nothing is
ever appended to it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType
from typing import Self

from ulid import ULID

from quiver.buffer.appender import Appender, Clock, wall_clock_ms
from quiver.buffer.committer_client import CommitterFirst
from quiver.buffer.handles import WriteHandle
from quiver.buffer.line import Enqueueing, Line
from quiver.buffer.objects import Objects
from quiver.buffer.uploading import Uploader
from quiver.config import ProducerConfig
from quiver.errors import ProducerClosed
from quiver.metrics import Metrics


class Producer:
    """Writes to a queue. Made and used in one event loop; ``async with`` closes it.

    One that is dropped without ``close`` stops: what is not durable then never will be.

    With ``threads``, large batches are encoded in threads, so that the loop has no long pauses.
    """

    def __init__(
        self,
        objects: Objects,
        config: ProducerConfig,
        *,
        metrics: Metrics | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
        random: Random | None = None,
        ulids: Callable[[], ULID] = ULID,
        producer_id: str | None = None,
        threads: bool = False,
    ) -> None:
        random = random or Random()  # noqa: S311 - for the pauses between attempts
        metrics = metrics or Metrics()
        clock = Clock(now_ms)
        self._appender = Appender(
            objects,
            config.queue,
            clock=clock,
            random=random,
            metrics=metrics,
            role="producer",
        )
        enqueueing: Enqueueing = self._appender
        self._committer: CommitterFirst | None = None
        if config.committer is not None:
            enqueueing = self._committer = CommitterFirst(
                config.committer, self._appender, config.queue, clock, random, metrics
            )
        uploader = Uploader(
            objects, config, clock, random, metrics, ulids, producer_id, threads=threads
        )
        self._line = Line(config, uploader, enqueueing, metrics)
        self._now_ms = now_ms
        loop = asyncio.get_running_loop()
        self._dropped = weakref.finalize(self, _abandon, loop, self._line, self._committer)
        self._dropped.atexit = False

    @property
    def conflict_rate(self) -> float:
        """How many of 100 writes of the manifest met another writer's."""
        return self._appender.conflict_rate

    async def produce(self, entries: Sequence[bytes], metadata: bytes = b"") -> WriteHandle:
        """Take entries, which stay together and in order; waits while there is no room.

        Raises ``QueueError`` for what can never be written, ``ProducerClosed`` when it is closed.
        """
        return await self._line.take(entries, metadata, self._now_ms)

    async def flush(self) -> None:
        """Write everything that was taken so far; raises the first error that one of it met."""
        self._line.close_batch()
        await self._line.settled()

    async def close(self) -> None:
        """Write everything that was taken, and end. Raises as ``flush`` does."""
        self._line.refuse(ProducerClosed("the producer is closed"))
        try:
            await self.flush()
            if self._committer is not None:
                await self._committer.close()
        finally:
            self.abort()

    def abort(self) -> None:
        """End at once: what is not durable yet is not going to be."""
        self._dropped.detach()
        _end(self._line, self._committer, "the producer ended before the entries were durable")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _abandon(loop: asyncio.AbstractEventLoop, line: Line, committer: CommitterFirst | None) -> None:
    """The producer is gone. This may run in any thread, and after its loop."""
    if not loop.is_closed():
        reason = "the producer was dropped before the entries were durable"
        loop.call_soon_threadsafe(_end, line, committer, reason)


def _end(line: Line, committer: CommitterFirst | None, reason: str) -> None:
    line.stop(ProducerClosed(reason))
    if committer is not None:
        committer.hang_up()
