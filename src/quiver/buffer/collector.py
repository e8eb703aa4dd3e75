"""Garbage collection: deleting the batches that nobody will read any more.

A batch is uploaded first and listed in the manifest afterwards, so one that is not listed may be
garbage, or may be about to be listed. A collector deletes an object only when all of these hold:

1. it lies directly below the prefix and is named ``{ULID}.batch``;
2. the manifest does not list it, and still does not after the objects were listed;
3. no dead letter names it;
4. its ULID is older than that of every batch that the manifest lists;
5. both its ULID and the store's own date of it are older than the grace period;
6. all of that held in an earlier round, at least half a grace period ago, and the object was not
   written again since.

Producers do their part: they list no batch whose upload is older than half a grace period.

Clocks. The date of an object is the store's, so it is compared with the store's time: each round
writes ``{prefix}/.clock`` and finds its date in the listing. Of that time and the collector's own
the earlier one counts. A ULID has the time of its producer; a producer whose clock is slow makes
rules 4 and 5 weaker, but not the half of rule 5 that is the store's. Rule 6 uses the clock of the
event loop, which nobody can set.

A collector belongs to a consumer: when the manifest has another epoch it is ``Fenced``. It refuses
to work below a prefix that another queue uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from quiver.buffer import manifest
from quiver.buffer.bounded import BoundedObjects
from quiver.buffer.dead_letters import DeadLetters
from quiver.buffer.names import ulid_time_ms
from quiver.buffer.objects import ObjectInfo, Objects
from quiver.buffer.ownership import check_prefix, claim_prefix, marker_path
from quiver.config import ConsumerConfig
from quiver.errors import (
    Conflict,
    Fenced,
    FormatError,
    LimitExceeded,
    ObjectNotFound,
    ObjectsUnavailable,
    QueueError,
    QueueReset,
)
from quiver.metrics import Metrics

CLOCK: Final = ".clock"


class Collected(NamedTuple):
    """What a round did."""

    deleted: tuple[str, ...]
    marked: int
    """Objects that a later round may delete."""


class _Mark(NamedTuple):
    """When an object was found to be garbage, by the loop's clock, and its date then."""

    since: float
    modified_ms: int


class _Listed(NamedTuple):
    """What the manifest protects."""

    locations: dict[str, int]
    oldest_ms: int | None


class Collector:
    """The garbage collection of one queue."""

    def __init__(
        self,
        objects: Objects,
        config: ConsumerConfig,
        *,
        metrics: Metrics,
        now_ms: Callable[[], int],
        known: Callable[[], int] = lambda: 0,
    ) -> None:
        """``known`` is the next sequence as its consumer knows it: an older manifest is refused."""
        self._known = known
        self._objects = BoundedObjects(objects, config.queue.attempt_timeout)
        self._config = config
        self._queue = config.queue
        self._prefix = config.queue.data_path_prefix
        self._metrics = metrics
        self._now_ms = now_ms
        self._letters = DeadLetters(self._objects, self._prefix)
        self._buried: dict[str, str] = {}  # the locations that dead letters name
        self._harmless: set[ObjectInfo] = set()  # other objects, found not to be manifests
        self._marks: dict[str, _Mark] = {}
        self._next_sequence = 0

    async def run(self, epoch: int) -> None:
        """Collect every ``gc_interval``, until fenced, or until something is wrong.

        A store that does not answer is no reason to stop: the next round tries again.
        """
        while True:
            await asyncio.sleep(self._config.gc_interval)
            try:
                await self.collect(epoch)
            except (ObjectsUnavailable, Conflict):
                self._metrics.count("buffer.gc_rounds_failed", role="consumer")

    async def collect(self, epoch: int) -> Collected:
        """One round, for the consumer that owns the queue by this epoch."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        await claim_prefix(self._objects, self._queue)
        listed = await self._read_manifest(epoch)
        await self._objects.put(f"{self._prefix}/{CLOCK}", b"")
        children = await self._objects.list_children(self._prefix)
        now_ms = self._earlier_clock(children)
        due = self._mark(await self._garbage(children, listed, now_ms), start)
        if due:
            listed = await self._read_manifest(epoch)
            due = [child for child in due if self._is_garbage(child, listed, now_ms or 0)]
            await self._delete([child.path for child in due])
        self._metrics.observe("buffer.gc_duration_seconds", loop.time() - start)
        return Collected(tuple(child.path for child in due), len(self._marks))

    async def candidates(self, epoch: int) -> tuple[str, ...]:
        """What a round would mark to be deleted later, by this clock alone. Nothing is written."""
        await check_prefix(self._objects, self._queue)
        listed = await self._read_manifest(epoch)
        children = await self._objects.list_children(self._prefix)
        garbage = await self._garbage(children, listed, self._now_ms())
        return tuple(child.path for child in garbage)

    async def _garbage(
        self, children: Sequence[ObjectInfo], listed: _Listed, now_ms: int | None
    ) -> list[ObjectInfo]:
        await self._refuse_other_queues(children)
        buried = await self._read_dead_letters()
        if now_ms is None:
            return []
        return [
            child
            for child in children
            if self._is_garbage(child, listed, now_ms) and child.path not in buried
        ]

    # --- What must stay -------------------------------------------------------------------------

    async def _read_manifest(self, epoch: int) -> _Listed:
        path = self._queue.manifest_path
        try:
            found = await self._objects.get(path)
        except ObjectNotFound as error:
            raise QueueReset(f"{path}: the manifest is gone: nothing is collected") from error
        if found is None:
            raise ObjectsUnavailable(f"{path}: the store answered without the object")
        limit = self._queue.max_manifest_bytes
        if len(found.data) > limit:
            reason = f"the manifest has {found.size} bytes; queue.max_manifest_bytes is {limit}"
            raise LimitExceeded(path, limit, reason)
        locations = manifest.locations(found.data, source=path)
        footer = manifest.decode_footer(found.data, source=path)
        known = max(self._next_sequence, self._known())
        if footer.next_sequence < known:
            raise QueueReset(
                f"{path}: its next sequence is {footer.next_sequence}, it was {known} before: "
                "nothing is collected"
            )
        if footer.epoch != epoch:
            raise Fenced(f"{path}: another consumer took over, with epoch {footer.epoch}")
        self._next_sequence = footer.next_sequence
        times = (ulid_time_ms(location, self._prefix) for location in locations)
        return _Listed(locations, min((time for time in times if time is not None), default=None))

    async def _read_dead_letters(self) -> set[str]:
        """The locations that dead letters name. Each letter is read once: it does not change."""
        paths = await self._letters.paths()
        buried = {}
        for path in paths:
            location = self._buried.get(path)
            if location is None:
                try:
                    location = (await self._letters.at(path)).entry.location
                except ObjectNotFound:
                    continue  # put back since: the manifest lists it, and is read once more
            buried[path] = location
        self._buried = buried
        return set(buried.values())

    async def _refuse_other_queues(self, children: Sequence[ObjectInfo]) -> None:
        """Stop when another manifest lies among the batches: it may list some of them."""
        own = {self._queue.manifest_path, marker_path(self._queue), f"{self._prefix}/{CLOCK}"}
        others = {
            child
            for child in children
            if child.path not in own and ulid_time_ms(child.path, self._prefix) is None
        }
        self._harmless &= others
        for child in others - self._harmless:
            if await self._is_manifest(child):
                raise QueueError(
                    f"{child.path} is the manifest of another queue, which may list batches below "
                    f"{self._prefix!r}: nothing is collected. Give each queue a prefix of its own"
                )
            self._harmless.add(child)

    async def _is_manifest(self, child: ObjectInfo) -> bool:
        if not manifest.FOOTER_SIZE <= child.size <= self._queue.max_manifest_bytes:
            return False
        try:
            tail = await self._objects.get_tail(child.path, manifest.FOOTER_SIZE)
            if tail is None or not _has_footer(tail.data, child.path):
                return False
            whole = await self._objects.get(child.path)
            if whole is not None:
                manifest.check(whole.data, source=child.path)
        except (ObjectNotFound, FormatError):
            return False
        return True

    # --- What may go ----------------------------------------------------------------------------

    def _earlier_clock(self, children: Sequence[ObjectInfo]) -> int | None:
        """The time now by the clock that is behind; None when the store's is not known."""
        path = f"{self._prefix}/{CLOCK}"
        dates = [child.modified_ms for child in children if child.path == path]
        return min(self._now_ms(), *dates) if dates else None

    def _is_garbage(self, child: ObjectInfo, listed: _Listed, now_ms: int) -> bool:
        named_ms = ulid_time_ms(child.path, self._prefix)
        if named_ms is None or child.path in listed.locations:
            return False
        if child.path == self._queue.manifest_path:
            return False
        if listed.oldest_ms is not None and named_ms >= listed.oldest_ms:
            return False
        return now_ms - max(named_ms, child.modified_ms) >= self._queue.gc_grace_period * 1000

    def _mark(self, garbage: Sequence[ObjectInfo], now: float) -> list[ObjectInfo]:
        """Remember what is garbage now; what was so for long enough is due, the oldest first."""
        marks = {}
        for child in garbage:
            mark = self._marks.get(child.path)
            if mark is None or mark.modified_ms != child.modified_ms:
                mark = _Mark(now, child.modified_ms)
            marks[child.path] = mark
        self._marks = marks
        wait = self._queue.gc_grace_period / 2
        due = [child for child in garbage if now - marks[child.path].since >= max(wait, 1e-9)]
        due.sort(key=lambda child: (child.modified_ms, child.path))
        return due[: self._config.gc_max_deletes]

    async def _delete(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        try:
            await self._objects.delete(paths)
        except QueueError:
            self._metrics.count("buffer.gc_files_failed", len(paths), role="consumer")
            raise
        for path in paths:
            self._marks.pop(path, None)
        self._metrics.count("buffer.gc_files_deleted", len(paths), role="consumer")


def _has_footer(tail: bytes, source: str) -> bool:
    try:
        manifest.decode_footer(tail, source=source)
    except FormatError:
        return False
    return True
