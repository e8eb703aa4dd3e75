"""Producers and consumers for programs without an event loop.

Each one has a thread of its own with an event loop, on which the asynchronous one lives; a call
hands its work over and waits. Any number of threads may call. ``timeout`` of a call is in seconds:
after it there is a ``TimeoutError``, and the work is cancelled, which moves nothing that was not
done. Errors are those of the asynchronous ones.

What the loop needs is made on it: the producer and the consumer, and so the first error of a
setting that cannot be.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

from quiver.buffer.appender import wall_clock_ms
from quiver.buffer.consumer import Consumer
from quiver.buffer.dead_letters import DeadLetter
from quiver.buffer.handles import DurabilityWatcher, Durable
from quiver.buffer.objects import Objects
from quiver.buffer.producer import Producer
from quiver.buffer.types import Batch, QueueEntry
from quiver.config import ConsumerConfig, ProducerConfig
from quiver.errors import QueueError, QuiverError
from quiver.metrics import Metrics

_END: Final = 5.0
"""Seconds that the thread has to end once nothing is left for it to do."""

Result = TypeVar("Result")


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._turn = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it was ended."""
        return self._is_over

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, Result], timeout: float | None = None) -> Result:
        """Do it on the loop, and wait for it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise QueueError("this would wait for itself: use the asynchronous one on its loop")
        with self._turn:
            if self._is_over:
                work.close()
                raise QueueError("it is closed")
            doing = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return doing.result(timeout)
        except concurrent.futures.CancelledError as error:
            raise QueueError("it was closed meanwhile") from error
        except BaseException:
            doing.cancel()  # no time is left, or somebody pressed Ctrl-C
            raise

    def end(self) -> None:
        """End the thread. What is running on it is cancelled."""
        with self._turn:
            if not self._is_over:
                self._is_over = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END)


class BlockingWatcher:
    """Tells when the entries of a call are durable. May be asked by any thread."""

    def __init__(self, watcher: DurabilityWatcher, thread: LoopThread) -> None:
        self._watcher = watcher
        self._thread = thread

    def result(self) -> Durable | QuiverError | None:
        """What is known now: nothing yet, where they are, or why they are not."""
        return self._watcher.result()

    def durable(self, timeout: float | None = None) -> Durable:
        """Wait until they are; raises the error when they never will be."""
        outcome = self._watcher.result()  # asked first: it is known after ``close``, too
        if outcome is None:
            return self._thread.call(self._watcher.durable(), timeout)
        if isinstance(outcome, QuiverError):
            raise outcome
        return outcome


class BlockingHandle(NamedTuple):
    """Entries that a producer has taken, and is going to write."""

    ingestion_time_ms: int
    watcher: BlockingWatcher


class BlockingProducer:
    """As ``Producer``; ``with`` closes it."""

    def __init__(
        self,
        objects: Objects,
        config: ProducerConfig | None = None,
        *,
        metrics: Metrics | None = None,
        producer_id: str | None = None,
    ) -> None:
        async def make() -> Producer:
            return Producer(
                objects,
                config or ProducerConfig(),
                metrics=metrics,
                producer_id=producer_id,
                threads=True,
            )

        self._thread = LoopThread("quiver-producer")
        self._producer = _made(self._thread, make)

    @property
    def conflict_rate(self) -> float:
        """How many of 100 writes of the manifest met another writer's."""
        return self._producer.conflict_rate

    def produce(
        self, entries: Sequence[bytes], metadata: bytes = b"", timeout: float | None = None
    ) -> BlockingHandle:
        """Take entries, which stay together and in order; waits while there is no room."""
        handle = self._thread.call(self._producer.produce(entries, metadata), timeout)
        watcher = BlockingWatcher(handle.watcher, self._thread)
        return BlockingHandle(handle.ingestion_time_ms, watcher)

    def flush(self, timeout: float | None = None) -> None:
        """Write everything that was taken so far; raises the first error that one of it met."""
        self._thread.call(self._producer.flush(), timeout)

    def close(self, timeout: float | None = None) -> None:
        """Write everything that was taken, and end; after ``timeout`` the rest is given up."""
        _close(self._thread, self._producer.close, timeout)

    def abort(self) -> None:
        """End at once: what is not durable yet is not going to be."""

        async def abort() -> None:
            self._producer.abort()

        _close(self._thread, abort, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class BlockingConsumer:
    """As ``Consumer``; ``with`` closes it. ``initialize`` comes first, and only once."""

    def __init__(
        self,
        objects: Objects,
        config: ConsumerConfig | None = None,
        *,
        metrics: Metrics | None = None,
    ) -> None:
        async def make() -> Consumer:
            return Consumer(
                objects,
                config or ConsumerConfig(),
                metrics=metrics or Metrics(),
                now_ms=wall_clock_ms,
                random=Random(),  # noqa: S311 - for the pauses between attempts
            )

        self._thread = LoopThread("quiver-consumer")
        self._consumer = _made(self._thread, make)

    @property
    def epoch(self) -> int:
        """What this consumer owns the queue by."""
        return self._consumer.epoch

    @property
    def last_acked(self) -> int:
        """The last sequence that was acknowledged; below the first one: none."""
        return self._consumer.last_acked

    @property
    def next_sequence(self) -> int:
        """What the next entry of a producer gets, as far as the last poll tells."""
        return self._consumer.next_sequence

    def initialize(self, last_acked: int | None = None, timeout: float | None = None) -> None:
        """Take the queue over, and go on after ``last_acked``."""
        self._thread.call(self._consumer.initialize(last_acked), timeout)

    def next_batch(self, timeout: float | None = None) -> Batch | None:
        """The next batch, or None when there is none yet."""
        return self._thread.call(self._consumer.next_batch(), timeout)

    def next_descriptors(self, at_most: int, timeout: float | None = None) -> list[QueueEntry]:
        """The next entries. They are handed out once, fetched or not, until a restart."""
        return self._thread.call(self._consumer.next_descriptors(at_most), timeout)

    def entries_between(
        self, after: int, through: int, timeout: float | None = None
    ) -> list[QueueEntry]:
        """The entries above ``after``, through ``through``; nothing moves."""
        return self._thread.call(self._consumer.entries_between(after, through), timeout)

    def latest_sequence(self, timeout: float | None = None) -> int:
        """The sequence of the entry that was added last, gone or not; -1: there was none yet."""
        return self._thread.call(self._consumer.latest_sequence(), timeout)

    def fetch(self, entry: QueueEntry, timeout: float | None = None) -> Batch:
        """The batch of an entry. Any number of threads may do this at the same time."""
        return self._thread.call(self._consumer.fetch(entry), timeout)

    def wait_for_batch(self, timeout: float | None = None) -> bool:
        """Poll until there is a batch to take; False when there was no time."""
        return self._thread.call(self._consumer.wait_for_batch(timeout))

    def ack(self, sequence: int, timeout: float | None = None) -> None:
        """This batch is processed."""
        self._thread.call(self._consumer.ack(sequence), timeout)

    def ack_through(self, sequence: int, timeout: float | None = None) -> None:
        """This batch and all before it are processed, and out of the manifest on return."""
        self._thread.call(self._consumer.ack_through(sequence), timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Take what is acknowledged out of the manifest."""
        self._thread.call(self._consumer.flush(), timeout)

    def dead_letter(self, entry: QueueEntry, reason: str, timeout: float | None = None) -> None:
        """Put an entry that was handed out on the list of dead letters; then acknowledge it."""
        self._thread.call(self._consumer.dead_letter(entry, reason), timeout)

    def dead_letters(self, timeout: float | None = None) -> list[DeadLetter]:
        """Batches that were given up and not put back."""
        return self._thread.call(self._consumer.dead_letters(), timeout)

    def requeue(self, sequence: int, timeout: float | None = None) -> None:
        """Put the batch of a dead letter at the end of the queue, and take it off the list."""
        self._thread.call(self._consumer.requeue(sequence), timeout)

    def close(self, timeout: float | None = None) -> None:
        """Flush, and end, whether that worked or not."""
        _close(self._thread, self._consumer.close, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _made(thread: LoopThread, make: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    try:
        return thread.call(make())
    except BaseException:
        thread.end()
        raise


def _close(
    thread: LoopThread, close: Callable[[], Coroutine[Any, Any, None]], timeout: float | None
) -> None:
    if thread.is_over:
        return
    try:
        thread.call(close(), timeout)
    finally:
        thread.end()
