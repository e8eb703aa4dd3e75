"""From an ingested bundle to a finalised segment: the log, the open segment, the frozen ones.

Three steps, each of which leaves a state that a restart can go on from:

1. ``commit`` writes a group of bundles to the log, syncs once, and only then puts them into the
   open segment. In ``segment_only`` mode there is no log, and a crash loses what is in memory.
2. ``freeze`` closes the open segment for new bundles; the next one starts empty at once.
3. ``finalise`` writes the oldest frozen segment, then moves the cursor of the log behind it. When
   one of the two fails, the segment stays where it is, in memory and in the log, and is tried
   again; nothing behind it overtakes it.

``commit`` belongs to one thread and ``freeze`` and ``finalise`` to one, which may be another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quiver.bundle import RecordBundle
from quiver.config import Ack, Durability, StoreConfig
from quiver.disk import Disk
from quiver.errors import FormatError, StorageAtCapacity, WalPoisoned
from quiver.ipc import Validation
from quiver.segment.writer import OpenSegment, write_segment
from quiver.store.segments import SegmentInfo, SegmentSet
from quiver.wal.entry import PreparedEntry, prepare_entry
from quiver.wal.replay import ReplayedEntry
from quiver.wal.writer import Appended, WalWriter


class Receipt(NamedTuple):
    """Proof that a bundle was taken: its number, and where it ends in the log.

    ``position`` is None in ``segment_only`` mode.
    """

    sequence: int
    position: int | None


class Intent(NamedTuple):
    """A bundle on its way in, with the work that can be done before it is its turn."""

    bundle: RecordBundle
    entry: PreparedEntry | None
    size: int


@dataclass(slots=True)
class _Growing:
    """A segment in memory, open or frozen."""

    opened_at: float
    segment: OpenSegment = field(default_factory=OpenSegment)
    end_position: int | None = None
    info: SegmentInfo | None = None


class Intake:
    """The writing half of a store."""

    def __init__(
        self, disk: Disk, root: Path, config: StoreConfig, segments: SegmentSet, next_segment: int
    ) -> None:
        self._config = config
        self._disk = disk
        self._segments = segments
        self._lock = threading.Lock()
        self._log_lock = threading.Lock()  # held while the log is appended to, or retired
        self._open: _Growing | None = None
        self._frozen: deque[_Growing] = deque()
        self._wal_directory = root / "wal"
        self.next_segment = next_segment
        self.poisoned_entries: list[str] = []
        self.wal: WalWriter

    # --- opening ----------------------------------------------------------------------------------

    def recover(self, now: float, next_sequence: int, in_segments: int) -> None:
        """Open the log and take in what no segment has: entries numbered past ``in_segments``."""

        def take_in(replayed: ReplayedEntry) -> None:
            if replayed.entry.sequence <= in_segments:
                self._note_position(replayed.end_position, now)
                return
            try:
                bundle = replayed.entry.bundle(Validation.LAYOUT)
            except FormatError as error:
                self.poisoned_entries.append(str(error))
                return
            size = replayed.end_position - replayed.position
            self._put([(bundle, replayed.entry.sequence, replayed.end_position, size)], now)

        self.wal = WalWriter.open(
            self._disk,
            self._wal_directory,
            self._config.wal,
            next_sequence=next_sequence,
            on_entry=take_in,
        )

    def _note_position(self, position: int, now: float) -> None:
        """An entry that is in a segment already: the cursor may pass it with the next one."""
        with self._lock:
            if self._open is None:
                self._open = _Growing(now)
            self._open.end_position = position

    # --- committing -------------------------------------------------------------------------------

    def prepare(self, bundle: RecordBundle) -> Intent:
        """Serialise a bundle, in whatever thread it comes from."""
        if self._config.durability is Durability.SEGMENT_ONLY:
            return Intent(bundle, None, sum(p.batch.nbytes for p in bundle.payloads.values()))
        entry = prepare_entry(bundle)
        return Intent(bundle, entry, entry.size)

    def commit(self, group: Sequence[Intent], now: float) -> list[Receipt]:
        """Take a group of bundles, all or none; durable on return unless configured otherwise."""
        if len(self._frozen) >= self._config.segment.max_frozen:
            raise StorageAtCapacity(
                f"{len(self._frozen)} segments wait to be written and segment.max_frozen is "
                f"{self._config.segment.max_frozen}; the disk is too slow, or failing"
            )
        if self._config.durability is Durability.SEGMENT_ONLY:
            return self._commit_to_memory(group, now)
        appended = self._append([intent.entry for intent in group if intent.entry is not None])
        placed = [
            (intent.bundle, place.sequence, place.end_position, intent.size)
            for intent, place in zip(group, appended, strict=True)
        ]
        self._put(placed, now)
        return [Receipt(place.sequence, place.end_position) for place in appended]

    def _append(self, entries: list[PreparedEntry]) -> list[Appended]:
        with self._log_lock:
            try:
                appended = self.wal.append(entries)
                if self._config.ack is Ack.DURABLE:
                    self.wal.sync()
            except WalPoisoned:
                # Nothing of the group is acknowledged, and the file is not trusted again.
                self.wal.start_over()
                raise
        return appended

    def _commit_to_memory(self, group: Sequence[Intent], now: float) -> list[Receipt]:
        first = self.wal.reserve_sequences(len(group))
        placed = [(intent.bundle, first + i, None, intent.size) for i, intent in enumerate(group)]
        self._put(placed, now)
        return [Receipt(first + i, None) for i in range(len(group))]

    def _put(self, placed: Sequence[tuple[RecordBundle, int, int | None, int]], now: float) -> None:
        """Add bundles with their numbers, positions and sizes to the open segment."""
        with self._lock:
            for bundle, sequence, end_position, size in placed:
                if self._open is None:
                    self._open = _Growing(now)
                self._open.segment.append(bundle, sequence, size)
                if end_position is not None:
                    self._open.end_position = end_position
                limits, segment = self._config.segment, self._open.segment
                if (
                    segment.bundle_count >= limits.max_bundles
                    # Whoever finalises may be busy for long: what is open must not grow meanwhile.
                    or segment.estimated_size >= limits.target_size
                ):
                    self._freeze()

    def sync(self) -> None:
        """Sync what was acknowledged after the write only."""
        with self._log_lock:
            try:
                self.wal.sync()
            except WalPoisoned:
                self.wal.start_over()
                raise

    def retire_consumed(self) -> None:
        """Delete the log's files, the active one too, if all of it is safe in segments."""
        with self._log_lock:
            self.wal.retire_consumed()

    # --- finalising -------------------------------------------------------------------------------

    @property
    def open_bytes(self) -> int:
        """Bytes in the open segment."""
        growing = self._open
        return growing.segment.estimated_size if growing else 0

    @property
    def frozen_bytes(self) -> int:
        """Bytes in segments that wait to be written."""
        with self._lock:
            return sum(growing.segment.estimated_size for growing in self._frozen)

    @property
    def has_frozen(self) -> bool:
        """Whether ``finalise`` has something to do."""
        return bool(self._frozen)

    def due_in(self, now: float) -> float | None:
        """In how many seconds the open segment is due; None when there is none."""
        growing = self._open
        if growing is None:
            return None
        limits = self._config.segment
        segment = growing.segment
        if (
            segment.estimated_size >= limits.target_size
            or segment.stream_count >= limits.max_stream_count
        ):
            return 0.0
        return max(0.0, growing.opened_at + limits.max_open_duration - now)

    def freeze(self) -> None:
        """Close the open segment for new bundles."""
        with self._lock:
            self._freeze()

    def _freeze(self) -> None:
        if self._open is not None:
            self._frozen.append(self._open)
            self._open = None

    def finalise(self) -> SegmentInfo | None:
        """Write the oldest frozen segment and move the cursor; None when it held no bundle."""
        growing = self._frozen[0]
        if growing.info is None and growing.segment.bundle_count:
            path = self._segments.path_of(self.next_segment)
            logs = self._config.durability is Durability.WAL
            sync_every = self._config.segment.sync_every if logs else None
            write_segment(self._disk, path, growing.segment, sync_every=sync_every)
            growing.info = self._segments.register(self.next_segment, path)
            self.next_segment += 1
        if growing.end_position is not None and growing.end_position > self.wal.cursor:
            self.wal.advance_cursor(growing.end_position)
        self._frozen.popleft()
        return growing.info
