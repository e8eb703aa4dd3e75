"""The consumer of a queue: it takes batches in order, and acknowledges them in order.

There is one at a time. Whoever starts raises the epoch in the manifest, and the one before finds
itself ``Fenced`` when it next reads or writes the manifest.

====================  ============================================================================
``next_batch``        the next batch, fetched; None when there is none
``next_descriptors``  the next entries, to be fetched anywhere, in parallel
``entries_between``   entries by their sequences, as often as asked for; nothing moves
``ack``               the batch is processed: exactly the one after that acknowledged last
``ack_through``       this one and all before; durable when it returns
``flush``             what is acknowledged is out of the manifest when it returns
====================  ============================================================================

Delivery is at least once. A consumer that keeps the last sequence together with its results, and
gives it to ``initialize``, processes each entry once. A batch that is listed a second time, because
its producer could not know that the first time had worked, is recognised by its location and left
out; that memory is bounded, and empty after a start.

State moves only after what it stands for has happened: a call that failed or was cancelled can be
made again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, TypeVar

from quiver.buffer import manifest
from quiver.buffer.bounded import BoundedObjects
from quiver.buffer.dead_letters import DeadLetter, DeadLetters
from quiver.buffer.fetching import fetch_batch
from quiver.buffer.objects import Objects
from quiver.buffer.ownership import check_prefix, claim_prefix
from quiver.buffer.retrying import FIRST_PAUSE
from quiver.buffer.types import Batch, NewEntry, QueueEntry
from quiver.buffer.watch import Known, ManifestWatch, patiently
from quiver.config import ConsumerConfig, LostBatchPolicy
from quiver.errors import BatchLost, QueueError
from quiver.metrics import Metrics

_WINDOW: Final = 256
"""Entries that are decoded ahead of their delivery."""

Result = TypeVar("Result")


class Consumer:
    """The consumer of one queue. ``initialize`` comes first, and only once."""

    def __init__(
        self,
        objects: Objects,
        config: ConsumerConfig,
        *,
        metrics: Metrics,
        now_ms: Callable[[], int],
        random: Random,
    ) -> None:
        queue = config.queue
        self._store = objects
        self._objects = BoundedObjects(objects, queue.attempt_timeout)
        self._config = config
        self._metrics = metrics
        self._now_ms = now_ms
        self._random = random
        self._watch = ManifestWatch(self._objects, queue, metrics=metrics, random=random)
        self._letters = DeadLetters(self._objects, queue.data_path_prefix)
        self._reading = asyncio.Lock()
        self._acking = asyncio.Lock()
        self._open = False
        self._waiting: deque[QueueEntry] = deque()
        self._remembered: dict[str, int] = {}  # locations and sequences, the oldest first
        self._silent: set[int] = set()  # left out, and not acknowledged yet
        self._handed_out = self._acked = self._dequeued = self._shown = -1
        self._acked_since: float | None = None  # when the first ack was that is not written yet

    @property
    def epoch(self) -> int:
        """What this consumer owns the queue by."""
        return self._watch.known.footer.epoch

    @property
    def last_acked(self) -> int:
        """The last sequence that was acknowledged; below the first one: none."""
        return self._acked

    @property
    def next_sequence(self) -> int:
        """What the next entry of a producer gets, as far as the last poll tells."""
        return self._watch.known.footer.next_sequence

    async def initialize(self, last_acked: int | None = None) -> None:
        """Take the queue over, and go on after ``last_acked``.

        Without it, what is in the manifest comes from its beginning. With it, everything through
        it is removed from the manifest. ``QueueReset`` when the manifest never came that far.
        """
        if self._open:
            raise QueueError("the consumer is initialized already; make a new one")
        queue = self._config.queue
        await self._patiently(lambda: check_prefix(self._objects, queue))
        for entry in await self._watch.take_over(last_acked):
            self._remember(entry)
        await self._patiently(lambda: claim_prefix(self._objects, queue))
        first = self._watch.known.first
        if last_acked is not None and first > last_acked + 1:
            # Somebody took them out who got further than the caller knows of.
            missed = first - last_acked - 1
            self._metrics.count("buffer.batches_missed", missed, role="consumer")
        self._handed_out = self._acked = self._dequeued = self._shown = first - 1
        self._open = True

    # --- Taking batches -------------------------------------------------------------------------

    async def next_batch(self) -> Batch | None:
        """The next batch, or None when there is none yet. It moves on only when it returns one.

        A batch that is lost stops it here (``BatchLost``, each time), or goes to the dead letters.
        """
        async with self._reading:
            await self._poll()
            while entry := self._head():
                try:
                    batch = await self.fetch(entry)
                except BatchLost as lost:
                    if self._config.lost_batches is LostBatchPolicy.STOP:
                        raise
                    await self._bury(entry, lost.reason)
                    self._leave_out(self._waiting.popleft())
                    continue
                self._hand_out(self._waiting.popleft())
                self._report_lag(entry)
                return batch
            return None

    async def next_descriptors(self, at_most: int) -> list[QueueEntry]:
        """The next entries. They are handed out once, fetched or not, until a restart."""
        if at_most <= 0:
            return []
        async with self._reading:
            await self._poll()
            found: list[QueueEntry] = []
            while len(found) < at_most and (entry := self._head()):
                self._hand_out(self._waiting.popleft())
                found.append(entry)
            self._metrics.count("buffer.descriptors_handed_out", len(found), role="consumer")
            return found

    async def entries_between(self, after: int, through: int) -> list[QueueEntry]:
        """The entries above ``after``, through ``through``, for a plan that may be made again.

        The same question has the same answer until they are acknowledged, except that a repeat is
        recognised only as long as this consumer remembers. ``QueueError`` when some of them are
        gone, ``QueueReset`` when some of them never were there.
        """
        async with self._reading:
            await self._poll()
            entries = self._watch.between(after, through)
            data, source = self._watch.known.data, self._config.queue.manifest_path
            first = manifest.locations(data, source=source) if entries else {}
            found = []
            for entry in entries:
                if self._is_repeat(entry) or first[entry.location] < entry.sequence:
                    self._count("buffer.repeats_dropped")
                else:
                    self._remember(entry)
                    found.append(entry)
            self._shown = max(self._shown, through)
            return found

    async def latest_sequence(self) -> int:
        """The sequence of the entry that was added last, gone or not; -1: there was none yet."""
        async with self._reading:
            await self._poll()
            return self.next_sequence - 1

    async def fetch(self, entry: QueueEntry) -> Batch:
        """The batch of an entry. Any number of these may run at the same time."""
        queue = self._config.queue
        start = asyncio.get_running_loop().time()
        batch = await self._patiently(
            lambda: fetch_batch(
                self._store, entry, queue.max_batch_bytes, attempt_timeout=queue.attempt_timeout
            )
        )
        elapsed = asyncio.get_running_loop().time() - start
        self._metrics.observe("buffer.fetch_duration_seconds", elapsed)
        self._count("buffer.batches_collected")
        self._count("buffer.entries_collected", len(batch.records))
        self._count("buffer.bytes_collected", sum(map(len, batch.records)))
        return batch

    async def wait_for_batch(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109
        """Poll, ever less often, until there is a batch to take; False when there was no time."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        pause = FIRST_PAUSE
        while True:
            async with self._reading:
                await self._poll()
                if self._head():
                    return True
            bounded = self._random.uniform(pause / 2, pause)
            if deadline is not None:
                left = deadline - loop.time()
                if left <= 0:
                    return False
                bounded = min(bounded, left)
            await asyncio.sleep(bounded)
            pause = min(2 * pause, max(FIRST_PAUSE, self._config.queue.max_backoff))

    async def _poll(self) -> None:
        """Write what is overdue, then see what the manifest has."""
        self._ready()
        if self._overdue():
            await self.flush()
        await self._watch.refresh()
        self._report_length()

    def _head(self) -> QueueEntry | None:
        """The next entry that is not a repeat, which stays where it is."""
        while True:
            if not self._waiting:
                self._waiting.extend(self._watch.take(_WINDOW))
            if not self._waiting:
                return None
            entry = self._waiting[0]
            if entry.sequence <= self._acked:  # acknowledged by whoever was shown it
                self._waiting.popleft()
                continue
            if not self._is_repeat(entry):
                return entry
            self._count("buffer.repeats_dropped")
            self._leave_out(self._waiting.popleft())

    def _hand_out(self, entry: QueueEntry) -> None:
        self._handed_out = entry.sequence
        self._remember(entry)

    def _leave_out(self, entry: QueueEntry) -> None:
        """Nobody gets this entry: it counts as acknowledged as soon as those before it are."""
        self._handed_out = entry.sequence
        self._silent.add(entry.sequence)
        self._settle(self._acked)

    def _is_repeat(self, entry: QueueEntry) -> bool:
        return self._remembered.get(entry.location, entry.sequence) != entry.sequence

    def _remember(self, entry: QueueEntry) -> None:
        self._remembered.setdefault(entry.location, entry.sequence)
        if len(self._remembered) > self._config.max_remembered:
            del self._remembered[next(iter(self._remembered))]

    def _report_length(self) -> None:
        length = self._watch.known.footer.entry_count
        self._metrics.set("buffer.queue_length", length, role="consumer")

    def _report_lag(self, entry: QueueEntry) -> None:
        if entry.metadata:
            lag = (self._now_ms() - entry.metadata[-1].ingestion_time_ms) / 1000
            self._metrics.set("buffer.consumer_lag_seconds", lag, role="consumer")

    # --- Acknowledging --------------------------------------------------------------------------

    async def ack(self, sequence: int) -> None:
        """This batch is processed. It leaves the manifest soon: by count, by time or by flush."""
        async with self._acking:
            self._ready()
            if sequence != self._acked + 1:
                raise QueueError(
                    f"batch {sequence} cannot be acknowledged: {self._acked + 1} is next"
                )
            self._check_handed_out(sequence)
            through = self._with_silent(sequence)
            if self._overdue() or through - self._dequeued >= self._config.dequeue_acks:
                await self._dequeue(through)
            self._acknowledged(through, 1)

    async def ack_through(self, sequence: int) -> None:
        """This batch and all before it are processed, and out of the manifest on return."""
        async with self._acking:
            self._ready()
            self._check_handed_out(sequence)
            before = self._acked
            if sequence <= before:
                await self._flush()
                return
            silent = sum(before < skipped <= sequence for skipped in self._silent)
            through = self._with_silent(sequence)
            await self._dequeue(through)
            self._acknowledged(through, sequence - before - silent)

    async def flush(self) -> None:
        """Take what is acknowledged out of the manifest. Writes nothing if that is done."""
        async with self._acking:
            self._ready()
            await self._flush()

    async def close(self) -> None:
        """Flush, and end. A consumer that failed here is still open."""
        if self._open:
            await self.flush()
            self._open = False

    async def _flush(self) -> None:
        if self._acked > self._dequeued:
            await self._dequeue(self._acked)

    async def _dequeue(self, through: int) -> None:
        await self._watch.dequeue(through)
        self._dequeued = through
        self._acked_since = None
        self._settle(self._acked)  # something may have been left out meanwhile
        self._report_length()

    def _acknowledged(self, through: int, batches: int) -> None:
        self._settle(through)
        self._count("buffer.acks", batches)

    def _settle(self, through: int) -> None:
        """Everything through here is done with, and what was left out right behind it."""
        self._acked = self._with_silent(through)
        self._silent = {sequence for sequence in self._silent if sequence > self._acked}
        if self._acked > self._dequeued and self._acked_since is None:
            self._acked_since = asyncio.get_running_loop().time()

    def _with_silent(self, sequence: int) -> int:
        while sequence + 1 in self._silent:
            sequence += 1
        return sequence

    def _check_handed_out(self, sequence: int) -> None:
        last = max(self._handed_out, self._shown)
        if sequence > last:
            raise QueueError(
                f"batch {sequence} cannot be acknowledged: only those through {last} were handed "
                "out"
            )

    def _overdue(self) -> bool:
        since = self._acked_since
        now = asyncio.get_running_loop().time()
        return since is not None and now - since >= self._config.dequeue_interval

    # --- Dead letters ---------------------------------------------------------------------------

    async def dead_letter(self, entry: QueueEntry, reason: str) -> None:
        """Put an entry that was handed out on the list of dead letters; then acknowledge it."""
        self._ready()
        self._check_handed_out(entry.sequence)
        await self._bury(entry, reason)

    async def dead_letters(self) -> list[DeadLetter]:
        """Batches that were given up and not put back."""

        async def read() -> list[DeadLetter]:
            return [await self._letters.at(path) for path in await self._letters.paths()]

        return await self._patiently(read)

    async def requeue(self, sequence: int) -> None:
        """Put the batch of a dead letter at the end of the queue, and take it off the list.

        A crash between the two leaves it on the list: then look whether it came before doing this
        again.
        """
        self._ready()
        letter = await self._patiently(lambda: self._letters.get(sequence))
        await self.flush()
        entry, source = letter.entry, self._config.queue.manifest_path

        def appended(known: Known) -> bytes | None:
            there = manifest.locations(known.data, source=source).get(entry.location)
            if there is None:
                new = NewEntry(entry.location, entry.metadata, entry.facts)
                return manifest.append(known.data, [new], source=source)
            if there == sequence:
                raise QueueError(f"batch {sequence} is in the queue still: acknowledge it first")
            return None

        self._remembered.pop(entry.location, None)
        await self._watch.write(appended)
        await self._patiently(lambda: self._letters.remove(sequence))
        self._count("buffer.dead_letters_requeued")

    async def _bury(self, entry: QueueEntry, reason: str) -> None:
        letter = DeadLetter(entry, reason, self._now_ms())
        await self._patiently(lambda: self._letters.add(letter))
        self._count("buffer.dead_letters")

    # --- Helpers --------------------------------------------------------------------------------

    def _ready(self) -> None:
        if not self._open:
            raise QueueError("the consumer is not initialized, or closed")
        self._watch.check_fence()

    async def _patiently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        queue = self._config.queue
        return await patiently(call, what=queue.data_path_prefix, config=queue, random=self._random)

    def _count(self, name: str, by: int = 1) -> None:
        self._metrics.count(name, by, role="consumer")
