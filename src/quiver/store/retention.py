"""What is deleted, when, and what gives way when there is no room.

Where rules meet, the first of these that applies decides:

1. **Resolved by everybody**: the segment is deleted, whatever its age; up to ``headroom`` bytes of
   such segments are kept. In any order: one slow bundle does not hold what is behind it.
2. **Too old** (``max_age``): the segment is deleted although somebody still needs it; what they had
   not resolved is counted as expired. Age is that of its newest bundle, since ingestion; segments
   of the reference implementation do not tell it and are not too old.
3. **No room** (``size_cap``, ``min_free_space``) with ``drop_oldest``: the oldest segment that
   nobody is working on is dropped, one after the other until there is room; counted as dropped.
4. **No room** with ``backpressure``: new bundles are refused until 1 or 2 made room.

Before a file goes, what was resolved for it is durable in the progress files, and its number is in
the ledger. Whatever is dropped is counted before it is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quiver.config import RetentionConfig, SizeCapPolicy
from quiver.disk import Disk
from quiver.errors import FormatError, SegmentNotFound, StorageAtCapacity
from quiver.metrics import Metrics
from quiver.store.intake import Intake
from quiver.store.ledger import Ledger
from quiver.store.segments import SegmentSet
from quiver.store.siblings import Siblings
from quiver.subscriber.registry import Registry

NANOSECONDS = 1_000_000_000


@dataclass(slots=True)
class Retention:
    """The deleting half of a store. Belongs to the thread that maintains; ``gate`` to any."""

    disk: Disk
    root: Path
    config: RetentionConfig
    intake: Intake
    segments: SegmentSet
    registry: Registry
    ledger: Ledger
    metrics: Metrics
    _disk_is_full: bool = False
    _siblings: Siblings | None = None
    _used_by_others: int = 0
    _rounds_waited: int = 0
    _refused_size: int = 0

    def __post_init__(self) -> None:
        if self.config.shared:
            self._siblings = Siblings(self.disk, self.root)

    def used(self) -> int:
        """Bytes of log and segments, and of what will be a segment soon."""
        intake = self.intake
        return intake.wal.size + self.segments.size + intake.open_bytes + intake.frozen_bytes

    def gate(self, size: int) -> None:
        """Refuse a bundle that there is no room for. Nothing is looked up on the disk here.

        ``size`` includes what waits before it.
        """
        cap = self.config.size_cap
        stored = self.used() + self._used_by_others if cap is not None else 0
        if cap is not None and stored + size > cap:
            self._refused_size = max(self._refused_size, size)
            self.metrics.count("quiver.ingest.throttle_total", reason="size_cap")
            raise StorageAtCapacity(
                f"{self.root}: {stored} bytes are stored and retention.size_cap is {cap}"
            )
        if self._disk_is_full:
            self.metrics.count("quiver.ingest.throttle_total", reason="disk")
            raise StorageAtCapacity(
                f"{self.root}: less than retention.min_free_space "
                f"({self.config.min_free_space} bytes) is free on the file system"
            )

    def run(self, time_ns: int, *, pressure: bool = False) -> int:
        """One bounded step of all rules; how many segments were deleted.

        ``pressure``: the log is full, so a file of it that is done with goes, too.
        """
        self.registry.reload_external()
        if self._siblings is not None:
            self._used_by_others = self._siblings.used()
        deleted = self._delete_resolved()
        deleted += self._delete_expired(time_ns)
        free = self.disk.free_space(self.root)
        self._disk_is_full = free < self.config.min_free_space
        self.metrics.set("quiver.disk.free_bytes", free)
        if pressure or self._is_over_cap():
            self._retire_log()
        if self.config.size_cap_policy is SizeCapPolicy.DROP_OLDEST:
            deleted += self._drop_oldest()
        self._refused_size = 0
        self.metrics.set("quiver.core.bytes", self.used(), core_id=self.root.name)
        return deleted

    def _delete_resolved(self) -> int:
        numbers = self.registry.complete_segments()
        kept = 0
        while numbers and kept < self.config.headroom:
            info = self.segments.info(numbers[-1])
            kept += info.size if info else 0
            if kept <= self.config.headroom:
                numbers.pop()
        return self._delete(numbers, "resolved")

    def _delete_expired(self, time_ns: int) -> int:
        if self.config.max_age is None:
            return 0
        horizon = time_ns - int(self.config.max_age * NANOSECONDS)
        expired = []
        for number in self.segments.numbers[: self.config.max_deletes_per_step]:
            newest = self._newest_ns(number)
            if newest is None:
                continue  # nobody knows how old it is, so it is not too old
            if newest >= horizon:
                break
            expired.append(number)
        return self._drop(expired, "expired")

    def _newest_ns(self, number: int) -> int | None:
        try:
            manifest = self.segments.manifest(number)
        except (FormatError, SegmentNotFound):
            return None
        times = (manifest.ingestion_time_ns(i) for i in range(len(manifest)))
        return max((time for time in times if time is not None), default=None)

    def _drop_oldest(self) -> int:
        dropped = 0
        for number in self.segments.numbers[: self.config.max_deletes_per_step]:
            if not self._is_over_cap():
                self._rounds_waited = 0
                break
            if self._another_should_go_first(number):
                break
            if not self.registry.has_claims(number):
                dropped += self._drop([number], "dropped")
        return dropped

    def _another_should_go_first(self, number: int) -> bool:
        """Whether a sibling holds something older, and may still be expected to drop it."""
        if self._siblings is None or self._rounds_waited >= self.config.patience:
            return False
        theirs, mine = self._siblings.oldest_ns(), self._newest_ns(number)
        if theirs is None or mine is None or mine <= theirs:
            return False
        self._rounds_waited += 1
        return True

    def _is_over_cap(self) -> bool:
        if self._disk_is_full:
            self._disk_is_full = self.disk.free_space(self.root) < self.config.min_free_space
        cap = self.config.size_cap
        # What was refused has to fit, or it would be refused for ever.
        return self._disk_is_full or (
            cap is not None
            and self.used() + self._used_by_others + max(1, self._refused_size) > cap
        )

    def _retire_log(self) -> None:
        """Let go of a log file that is needed for nothing but its numbers, which the ledger has."""
        self._write_ledger()
        self.intake.retire_consumed()

    def _write_ledger(self) -> None:
        self.ledger.raise_numbers(self.intake.next_segment, self.intake.wal.next_sequence)
        self.ledger.store(self.disk, self.root)

    def _drop(self, numbers: list[int], reason: str) -> int:
        """Give up segments that somebody still needs: resolve, count, write down, delete."""
        for number in numbers:
            for subscriber, bundles in self.registry.drop_segment(number).items():
                self.metrics.count(
                    "quiver.subscriber.dropped_bundles_total", bundles, subscriber=subscriber
                )
                self.ledger.lost({f"{reason}.bundles.{subscriber}": bundles})
            info = self.segments.info(number)
            self.ledger.lost(
                {
                    f"{reason}.segments": 1,
                    f"{reason}.bundles": info.bundle_count if info else 0,
                    f"{reason}.items": self._items(number),
                    f"{reason}.bytes": info.size if info else 0,
                }
            )
            self.metrics.count("quiver.segment.dropped_total", reason=reason)
        return self._delete(numbers, reason)

    def _items(self, number: int) -> int:
        try:
            manifest = self.segments.manifest(number)
        except (FormatError, SegmentNotFound):
            return 0
        return sum(manifest.item_count(i) or 0 for i in range(len(manifest)))

    def _delete(self, numbers: Iterable[int], reason: str) -> int:
        # What is said of a segment in progress files stays as long as the segment may come back.
        chosen = [number for number in numbers if number not in self.segments.undead]
        chosen = chosen[: self.config.max_deletes_per_step]
        if not chosen:
            return 0
        self._write_ledger()  # what is lost is counted before anything says that it is gone
        self.registry.flush()
        freed = self.segments.delete(chosen)
        self.registry.forget_segments(chosen)
        self.metrics.count("quiver.gc.evictions_total", len(chosen), reason=reason)
        self.metrics.count("quiver.gc.evicted_bytes_total", freed, reason=reason)
        return len(chosen)
