"""A store without threads: every call does its work before it returns.

``Store`` puts threads around this; tests drive it step by step on a simulated disk and a simulated
clock, and cut the power between any two calls.

Opening, in this order: the lock; the ledger; the ends of the segment files; the progress files; the
log, of which only what no segment has is taken in again. None of it depends on how much is stored,
only on how many files there are and how long the log is behind its cursor.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from quiver.bundle import RecordBundle
from quiver.config import StoreConfig
from quiver.disk import Disk, DiskLock
from quiver.errors import (
    FormatError,
    IngestFailed,
    SegmentNotFound,
    StorageAtCapacity,
    StoreLocked,
    WalAtCapacity,
    WalError,
)
from quiver.metrics import SIZE_BOUNDS, Metrics
from quiver.store.intake import Intake, Intent, Receipt
from quiver.store.ledger import FILE_NAME as LEDGER_NAME
from quiver.store.ledger import Ledger, StartPoint, load_ledger
from quiver.store.retention import Retention
from quiver.store.segments import SegmentSet
from quiver.subscriber.progress import check_subscriber_id
from quiver.subscriber.registry import Registry

LOCK_NAME: Final = "quiver.lock"


@dataclass(frozen=True, slots=True)
class Clock:
    """Time: ``monotonic`` seconds for waiting, ``time_ns`` since 1970 for ages."""

    monotonic: Callable[[], float]
    time_ns: Callable[[], int]


class Start(NamedTuple):
    """Where a new subscriber starts. Made by the functions below."""

    kind: str
    value: int = 0

    @classmethod
    def latest(cls) -> Start:
        """With what is finalised from now on."""
        return cls("latest")

    @classmethod
    def earliest(cls) -> Start:
        """With the oldest bundle that is still there."""
        return cls("earliest")

    @classmethod
    def at_sequence(cls, sequence: int) -> Start:
        """With the bundle of that number."""
        return cls("sequence", sequence)

    @classmethod
    def at_time(cls, time_ns: int) -> Start:
        """With what was ingested at that time or later."""
        return cls("time", time_ns)


class StoreCore:
    """One open store."""

    def __init__(
        self,
        disk: Disk,
        root: Path,
        config: StoreConfig,
        clock: Clock,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._disk = disk
        self._root = root
        self._config = config
        self._clock = clock
        self.metrics = Metrics()
        self.pressure = False
        """Set when the log was full: the next maintenance lets go of what it can."""
        self.problems: list[str] = []
        """What was found damaged, and where it was put."""
        self.rejections: deque[tuple[str, str]] = deque(maxlen=config.remembered_rejections)
        """The last bundles that subscribers could not use: who, and why."""
        disk.make_directory(root)
        self._lock = self._take_lock()
        try:
            self._open(on_change)
        except BaseException:
            self._lock.release()
            raise

    def _take_lock(self) -> DiskLock:
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            return self._disk.lock(self._root / LOCK_NAME, owner)
        except BlockingIOError as error:
            raise StoreLocked(
                f"{self._root} is open for writing in {error.strerror}; a store has one writer"
            ) from error

    def _open(self, on_change: Callable[[], None]) -> None:
        self.ledger = self._load_ledger()
        self.segments = SegmentSet(self._disk, self._root / "segments")
        self.segments.scan()
        self.registry = Registry(self._disk, self._root, on_change)
        skips = {name: self._skips(start) for name, start in self.ledger.starts.items()}
        self.registry.load(self._bundle_counts(), skips)
        next_segment = max(
            self.ledger.next_segment,
            self.segments.highest_seen + 1,
            self.registry.highest_segment_named + 1,
        )
        self.intake = Intake(self._disk, self._root, self._config, self.segments, next_segment)
        in_segments = self._highest_sequence()
        self.intake.recover(
            self._clock.monotonic(),
            next_sequence=max(self.ledger.next_sequence, in_segments + 1),
            in_segments=in_segments,
        )
        self.retention = Retention(
            self._disk,
            self._root,
            self._config.retention,
            self.intake,
            self.segments,
            self.registry,
            self.ledger,
            self.metrics,
        )
        self.ledger.store(self._disk, self._root)
        self._report_problems()

    def _load_ledger(self) -> Ledger:
        try:
            return load_ledger(self._disk, self._root) or Ledger()
        except FormatError as error:
            path = self._root / LEDGER_NAME
            kept = path.with_name(path.name + ".corrupt")
            self._disk.rename(path, kept)
            self._disk.sync_dir(self._root)
            self.problems.append(f"{error}; kept as {kept}")
            return Ledger()

    def _bundle_counts(self) -> dict[int, int]:
        infos = (self.segments.info(number) for number in self.segments.numbers)
        return {info.number: info.bundle_count for info in infos if info is not None}

    def _highest_sequence(self) -> int:
        """The largest log number that is in a segment, -1 for none."""
        for number in reversed(self.segments.numbers):
            try:
                sequences = [entry.sequence for entry in self.segments.manifest(number)]
            except (FormatError, SegmentNotFound):
                continue
            known = [sequence for sequence in sequences if sequence is not None]
            if known:
                return max(known)
        return -1

    def _report_problems(self) -> None:
        recovery = self.intake.wal.recovery
        self.problems += [f"{d.path}: {d.reason}; kept as {d.kept_as}" for d in recovery.damaged]
        self.problems += recovery.header_problems
        self.problems += [recovery.cursor_problem] if recovery.cursor_problem else []
        self.problems += [f"{c.reason}; kept as {c.kept_as}" for c in self.segments.corrupt]
        self.problems += self.registry.corrupt
        self.problems += self.intake.poisoned_entries
        self.metrics.count("quiver.corruption_total", len(self.problems))
        self.metrics.count("quiver.wal.replayed_entries_total", recovery.replayed_entries)

    # --- writing ----------------------------------------------------------------------------------

    def prepare(self, bundle: RecordBundle, waiting: int = 0) -> Intent:
        """Serialise a bundle and see whether there is room for it behind what waits already."""
        intent = self.intake.prepare(bundle)
        self.retention.gate(waiting + intent.size)
        return intent

    def commit(self, group: Sequence[Intent]) -> list[Receipt]:
        """Take a group of bundles, all or none."""
        started = self._clock.monotonic()
        try:
            receipts = self.intake.commit(group, started)
        except WalAtCapacity as error:
            self.metrics.count("quiver.ingest.throttle_total", reason="wal")
            raise StorageAtCapacity(str(error)) from error
        except (WalError, OSError) as error:
            self.metrics.count("quiver.ingest.failures_total")
            raise IngestFailed(f"{error}; the bundle was not stored, hand it in again") from error
        self.metrics.observe("quiver.commit.seconds", self._clock.monotonic() - started)
        self.metrics.observe("quiver.commit.group_size", len(group), SIZE_BOUNDS)
        self.metrics.count("quiver.ingest.bundles_total", len(group))
        self.metrics.count("quiver.ingest.bytes_total", sum(intent.size for intent in group))
        return receipts

    def finalise_due(self, *, at_once: bool = False) -> int:
        """Write the segments that are due; how many. ``at_once``: the open one is due too."""
        if at_once or self.intake.due_in(self._clock.monotonic()) == 0:
            self.intake.freeze()
        written = 0
        while self.intake.has_frozen:
            info = self.intake.finalise()
            if info is not None:
                self.registry.add_segment(info.number, info.bundle_count)
                self.metrics.count("quiver.segment.finalised_total")
                written += 1
        self.metrics.set("quiver.segment.open_bytes", self.intake.open_bytes)
        return written

    # --- reading ----------------------------------------------------------------------------------

    def register(self, subscriber_id: str, start: Start, *, external: bool = False) -> bool:
        """Make a subscriber known; one that was known goes on where it was. Whether it is new."""
        floor = self.intake.next_segment if start.kind == "latest" else 0
        point = StartPoint(*start) if start.kind in {"sequence", "time"} else None
        check_subscriber_id(subscriber_id)
        if not self.registry.knows(subscriber_id):
            self.ledger.start_at(subscriber_id, point)
            self.ledger.store(self._disk, self._root)  # before there is a subscriber without it
        skips = self._skips(point) if point else None
        return self.registry.register(subscriber_id, floor, skips, external=external)

    def _skips(self, start: StartPoint) -> Callable[[int], list[int]]:
        def skips(number: int) -> list[int]:
            try:
                manifest = self.segments.manifest(number)
            except (FormatError, SegmentNotFound):
                return []
            facts = (
                (entry.bundle_index, entry.sequence)
                if start.kind == "sequence"
                else (entry.bundle_index, entry.ingestion_time_ns)
                for entry in manifest
            )
            return [index for index, fact in facts if fact is not None and fact < start.value]

        return skips

    def unregister(self, subscriber_id: str, reason: str = "unregistered") -> int:
        """Forget a subscriber; what it had not resolved is dropped, and counted."""
        dropped = self.registry.unresolved_count(subscriber_id)
        self.ledger.lost({f"{reason}.bundles.{subscriber_id}": dropped})
        self.ledger.store(self._disk, self._root)
        self.registry.remove(subscriber_id)
        self.ledger.start_at(subscriber_id, None)
        self.metrics.count(
            "quiver.subscriber.dropped_bundles_total", dropped, subscriber=subscriber_id
        )
        return dropped

    def give_up_segment(self, number: int, reason: str) -> None:
        """A segment cannot be read: nobody waits for it any more, and its bundles count as lost."""
        self.segments.set_aside(number, reason)
        for subscriber, bundles in self.registry.drop_segment(number).items():
            self.ledger.lost({f"corrupt.bundles.{subscriber}": bundles})
            self.metrics.count(
                "quiver.subscriber.dropped_bundles_total", bundles, subscriber=subscriber
            )
        self.ledger.lost({"corrupt.segments": 1})
        self.registry.forget_segments([number])
        self.problems.append(f"segment {number} was given up: {reason}")
        self.metrics.count("quiver.corruption_total")

    def count_rejected(self, subscriber_id: str, reason: str) -> None:
        """A subscriber could not use a bundle."""
        self.rejections.append((subscriber_id, reason))
        self.ledger.lost({f"rejected.bundles.{subscriber_id}": 1})
        self.metrics.count("quiver.subscriber.rejected_bundles_total", subscriber=subscriber_id)

    # --- maintaining ------------------------------------------------------------------------------

    def maintain(self) -> int:
        """Persist progress, delete what can go, in bounded steps; how many segments went."""
        self.registry.flush()
        deleted = self.retention.run(self._clock.time_ns(), pressure=self.pressure)
        self.pressure = False
        oldest = self.segments.numbers
        self.registry.raise_floors(oldest[0] if oldest else self.intake.next_segment)
        self.registry.flush()
        self.ledger.store(self._disk, self._root)
        self._let_readers_go()
        self._measure()
        return deleted

    def _let_readers_go(self) -> None:
        """Keep as many segments mapped as there are subscribers to read them."""
        limit = self._config.segment.max_open_readers
        self.segments.max_open_readers = max(1, min(limit, self.registry.active_count))

    def _measure(self) -> None:
        for info in self.registry.infos():
            self.metrics.set(
                "quiver.subscriber.pending_bundles", info.pending, subscriber=info.subscriber_id
            )
        self.metrics.set("quiver.wal.bytes", self.intake.wal.size)
        self.metrics.set("quiver.segment.bytes", self.segments.size)
        self.metrics.set("quiver.segment.open_readers", self.segments.open_readers)
        self.metrics.set("quiver.segment.frozen_bytes", self.intake.frozen_bytes)

    def close(self) -> None:
        """Finalise what is open, persist progress, let the lock go."""
        try:
            self.finalise_due(at_once=True)
            self.registry.flush()
            self.ledger.store(self._disk, self._root)
        finally:
            try:
                self.intake.wal.close()
            finally:
                self._lock.release()
