"""Adding uploaded batches to the manifest: with compare-and-swap, and never twice.

The manifest is one object that many writers replace. An append reads it, adds entries at its end,
and writes it back if it is still the one that was read. What makes that safe:

**A write whose fate is unknown.** A store that times out may have written all the same, and so may
one that says ``Conflict``: the client below may have met its own first attempt. So after every
failed write the manifest is read again, and locations that are in it are done. A location is a
ULID that is used once, so finding it means that this batch got there.

**A consumer that is faster.** It may have taken the entry out again before that read. An attempt
on a manifest with ``next_sequence`` *n* puts its entries at *n* and above, and the consumer takes
out from below. So when the manifest still starts at or below *n* and is not the version that the
attempt was for, the attempt did not and will not happen. When it starts above *n*, nobody can tell
from the manifest. Then the entry is appended again **under the same location**: the consumer drops
a location that it has seen. It is never appended under another one.

**A collector that deletes batches.** It may delete a batch that no entry names, once it is older
than the grace period. So no write of the manifest is begun for a batch that was uploaded longer
ago than ``max_upload_age``, half of that period: ``StaleUpload`` asks for a new upload first. The
other half is for the write to arrive.

**A manifest that is not right.** One that does not add up (``FormatError``), or is older than one
that was seen before (``QueueReset``), is left as it is.

The bytes of the last own write, with their version, save reading before the next one. That only
pays as long as nobody else writes: after a conflict the manifest is asked for first, until it
turns out not to have changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from quiver.buffer import manifest
from quiver.buffer.crowd import Crowd
from quiver.buffer.objects import Objects, Version
from quiver.buffer.retrying import Backoff, within
from quiver.buffer.types import NewEntry
from quiver.config import QueueConfig
from quiver.errors import (
    Conflict,
    ObjectNotFound,
    ObjectsUnavailable,
    QueueError,
    QueueFull,
    QueueReset,
)
from quiver.metrics import SIZE_BOUNDS, Metrics


class StaleUpload(QueueError):
    """Batches were uploaded too long ago for the manifest to name them: upload them again."""

    retryable = True

    def __init__(self, stale: Sequence[Pending]) -> None:
        self.stale = tuple(stale)
        super().__init__(f"{len(stale)} batches were uploaded too long ago: upload them again")


def wall_clock_ms() -> int:
    """The time of day, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Clock:
    """Two clocks: the loop's stands still while the machine sleeps, the wall's may be set."""

    now_ms: Callable[[], int]

    def read(self) -> Instant:
        """Now, on both."""
        return Instant(asyncio.get_running_loop().time(), self.now_ms())

    def since(self, instant: Instant) -> float:
        """Seconds since then: the larger of what the two clocks say."""
        now = self.read()
        return max(now.loop - instant.loop, (now.wall_ms - instant.wall_ms) / 1000)


class Instant(NamedTuple):
    """A point in time, by both clocks."""

    loop: float
    wall_ms: int


@dataclass(slots=True, eq=False)
class Pending:
    """An uploaded batch on its way into the manifest, and what is known of earlier attempts."""

    entry: NewEntry
    uploaded: Instant
    shared: bool = False
    """Somebody else may append it too: a committer, or the producer that asked this committer."""
    unsure_from: int | None = None
    """The lowest sequence that an attempt of unknown fate would have given it."""
    unsure_base: Version | None = None
    """The version that the last such attempt was for: while that is current, it may still land."""

    @property
    def unclear(self) -> bool:
        """Whether an earlier attempt may have put it into the manifest, or still may."""
        return self.shared or self.unsure_from is not None

    def may_be_gone_from(self, known: Known) -> bool:
        """Whether the consumer may have taken it out of this manifest already."""
        return self.unsure_from is not None and self.unsure_from < known.first_sequence

    def attempting(self, first: int, base: Version | None) -> None:
        """A write begins; until its answer is here, nobody knows."""
        self.unsure_from = first if self.unsure_from is None else min(self.unsure_from, first)
        self.unsure_base = base

    def not_in(self, known: Known) -> None:
        """It is not in this manifest: see whether that settles the earlier attempts."""
        if known.version != self.unsure_base and not self.may_be_gone_from(known):
            self.unsure_from = self.unsure_base = None


@dataclass(slots=True)
class Known:
    """A manifest as it was at some version; no version: there was none."""

    data: bytes
    version: Version | None
    footer: manifest.Footer
    _locations: dict[str, int] | None = field(default=None, repr=False)

    @property
    def first_sequence(self) -> int:
        """The sequence of its first entry, or of the next one when it has none."""
        return self.footer.next_sequence - self.footer.entry_count

    def locations(self, source: str) -> dict[str, int]:
        """Where each location is."""
        if self._locations is None:
            self._locations = manifest.locations(self.data, source=source)
        return self._locations


class Appender:
    """Appends to one manifest, one write at a time."""

    def __init__(
        self,
        objects: Objects,
        config: QueueConfig,
        *,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        role: str,
    ) -> None:
        self._objects = objects
        self._config = config
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._role = role
        self._known: Known | None = None
        self._alone = False
        self._next_sequence = 0
        self._writes = 0
        self._conflicts = 0
        self._turn = asyncio.Lock()
        self._crowd = Crowd(config, random)

    @property
    def conflict_rate(self) -> float:
        """How many of 100 writes of the manifest met another writer's."""
        return 100 * self._conflicts / self._writes if self._writes else 0.0

    def expect_at_least(self, next_sequence: int) -> None:
        """Somebody else was told so: a manifest that is older is not the right one."""
        self._next_sequence = max(self._next_sequence, next_sequence)

    def expect_others(self) -> None:
        """Somebody else writes too: look at the manifest before the next write."""
        self._alone = False

    def check_fresh(self, pending: Sequence[Pending]) -> None:
        """Raise ``StaleUpload`` for those that were uploaded too long ago."""
        oldest = self._config.max_upload_age
        stale = [one for one in pending if self._clock.since(one.uploaded) > oldest]
        if stale:
            raise StaleUpload(stale)

    async def append(
        self, pending: Sequence[Pending], more: Callable[[], Sequence[Pending]] = tuple
    ) -> list[int]:
        """Append those that are not in the manifest yet, in this order; all their sequences.

        ``more`` is asked before each write for those that became ready meanwhile; their sequences
        come behind the others.

        Raises ``StaleUpload``, ``QueueFull``, ``QueueReset`` and ``FormatError``, after none of
        which anything new was appended, and ``ObjectsUnavailable``, after which nobody knows.
        """
        async with self._turn:
            await self._crowd.make_way()
            backoff = Backoff(self._config, self._random)
            wanted = list(pending)
            conflicts = 0
            while True:
                chained = self._alone and self._known is not None
                begun = asyncio.get_running_loop().time()
                try:
                    known = await self._current()
                    wanted += more()
                    sequences = await self._append_to(known, wanted)
                except QueueFull:
                    if not chained:
                        raise
                    self._alone = False  # the consumer may have made room since
                except Conflict as error:
                    self._alone = False
                    conflicts += 1
                    if not chained:
                        await backoff.step_aside(error, self._config.manifest_path)
                except ObjectsUnavailable as error:
                    self._alone = False
                    await backoff.pause(error, self._config.manifest_path)
                else:
                    self._crowd.got_through(conflicts, begun)
                    return sequences

    # --- Reading ------------------------------------------------------------------------------

    async def _current(self) -> Known:
        if self._alone and self._known is not None:
            return self._known
        path, before = self._config.manifest_path, self._known
        unless = before.version if before else None
        try:
            fetched = await within(
                self._config.attempt_timeout, path, self._objects.get(path, unless=unless)
            )
        except ObjectNotFound:
            return self._remember(Known(manifest.EMPTY, None, manifest.Footer(0, 0, 0)))
        if fetched is None and before is not None:
            self._alone = True
            return before
        if fetched is None:
            raise ObjectsUnavailable(f"{path}: the store says it is unchanged, but never showed it")
        if fetched.size > self._config.max_manifest_bytes:
            raise self._full(fetched.size)
        footer = manifest.check(fetched.data, source=path)
        return self._remember(Known(fetched.data, fetched.version, footer))

    def _remember(self, known: Known) -> Known:
        """Keep a manifest that was read or written, unless it is older than one seen before."""
        if known.footer.next_sequence < self._next_sequence:
            self._known = None
            raise QueueReset(
                f"{self._config.manifest_path}: its next sequence is {known.footer.next_sequence}, "
                f"but it was {self._next_sequence} before: it was deleted or replaced by an older "
                "one. Nothing was appended; look into that, then start the producers again"
            )
        self._next_sequence = known.footer.next_sequence
        self._known = known
        return known

    # --- Writing ------------------------------------------------------------------------------

    async def _append_to(self, known: Known, pending: Sequence[Pending]) -> list[int]:
        path = self._config.manifest_path
        there: dict[str, int] = {}
        if any(one.unclear for one in pending):
            there = known.locations(path)
        missing = [one for one in pending if one.entry.location not in there]
        for one in missing:
            one.not_in(known)
        added = await self._write(known, missing) if missing else {}
        return [
            there[location] if (location := one.entry.location) in there else added[location]
            for one in pending
        ]

    async def _write(self, known: Known, missing: Sequence[Pending]) -> dict[str, int]:
        self.check_fresh(missing)
        path, first = self._config.manifest_path, known.footer.next_sequence
        data = manifest.append(known.data, [one.entry for one in missing], source=path)
        if len(data) > self._config.max_manifest_bytes:
            raise self._full(len(data))
        repeated = sum(one.may_be_gone_from(known) for one in missing)
        for one in missing:
            one.attempting(first, known.version)
        self._count("buffer.manifest_writes")
        self._count("buffer.appends_repeated", repeated)
        self._writes += 1
        try:
            version = await within(
                self._config.attempt_timeout, path, self._objects.put_if(path, data, known.version)
            )
        except Conflict:
            self._conflicts += 1
            self._count("buffer.manifest_conflicts")
            raise
        self._written(known, data, version, missing)
        return {one.entry.location: first + place for place, one in enumerate(missing)}

    def _written(
        self, known: Known, data: bytes, version: Version, added: Sequence[Pending]
    ) -> None:
        before, n = known.footer, len(added)
        footer = manifest.Footer(before.entry_count + n, before.next_sequence + n, before.epoch)
        locations = known._locations  # noqa: SLF001 - handed on to its successor, not copied
        if locations is not None:
            places = range(before.next_sequence, footer.next_sequence)
            locations.update(zip((one.entry.location for one in added), places, strict=True))
        self._remember(Known(data, version, footer, locations))
        self._alone = True
        self._metrics.observe("buffer.batches_per_append", n, SIZE_BOUNDS)

    def _full(self, size: int) -> QueueFull:
        return QueueFull(
            f"{self._config.manifest_path}: the queue is full: its manifest would have {size} "
            f"bytes, and {self._config.max_manifest_bytes} are allowed. Consume what is in it, or "
            "raise queue.max_manifest_bytes"
        )

    def _count(self, name: str, by: int = 1) -> None:
        if by:
            self._metrics.count(name, by, role=self._role)
