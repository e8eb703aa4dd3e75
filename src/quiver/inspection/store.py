"""What a store directory holds, seen from outside and without touching it.

A store that runs meanwhile may delete files between two looks: what is gone is left out. The entry
that it is appending at that moment looks like a torn tail.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import ClassVar

from quiver.errors import InvalidName
from quiver.inspection.directory import SEGMENT_DIRECTORY, WAL_DIRECTORY
from quiver.inspection.log import LogWalk, WalFileFacts
from quiver.inspection.parts import Parts, UnknownFile
from quiver.inspection.records import Description, Problem, Record, View
from quiver.inspection.segment import SegmentWalk
from quiver.segment.layout import segment_sequence
from quiver.store.core import LOCK_NAME
from quiver.store.ledger import FILE_NAME as LEDGER_NAME
from quiver.store.ledger import Ledger, load_ledger
from quiver.subscriber.progress import FILE_PREFIX, Progress, check_subscriber_id, load_progress

_ATTEMPTS = 3
_READ_ELSEWHERE = frozenset({WAL_DIRECTORY, SEGMENT_DIRECTORY, LEDGER_NAME, LOCK_NAME})


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFacts(Record):
    """One segment. What could not be read is None."""

    sequence: int
    name: str
    size: int
    mode: str | None
    streams: int | None
    bundles: int | None
    rows: int | None
    items: int | None
    checksum_verified: bool
    problem_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberFacts(Record):
    """How far a subscriber is, over the segments that are there."""

    id: str
    resolved: int
    pending: int
    oldest_incomplete_segment: int
    flags: int
    flag_names: tuple[str, ...]
    segments_gone: int
    """Segments that its file still lists and that are deleted already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDescription(Description):
    """A store directory. Lists may be cut short; the counts beside them are exact."""

    kind: ClassVar[str] = "store"

    store_id: str | None
    """None when there is no ledger, as in stores of the reference implementation."""
    losses: dict[str, int]
    """What was dropped, by reason and subscriber."""
    wal_count: int
    wal_bytes: int
    wal_entries: int
    cursor: int | None
    """None when there is no cursor, or none that can be read: recovery then starts at 0."""
    entries_past_cursor: int
    segment_count: int
    segment_bytes: int
    bundles: int
    rows: int
    items: int | None
    subscriber_count: int
    quarantined_files: int
    quarantined_bytes: int
    leftover_count: int
    unknown_count: int
    problem_count: int
    problems: tuple[Problem, ...]
    wal: tuple[WalFileFacts, ...]
    segments: tuple[SegmentFacts, ...]
    subscribers: tuple[SubscriberFacts, ...]
    leftovers: tuple[str, ...]
    unknown: tuple[UnknownFile, ...]

    @property
    def healthy(self) -> bool:
        return self.problem_count == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RootDescription(Description):
    """A directory with one store per core."""

    kind: ClassVar[str] = "root"

    stores: tuple[StoreDescription, ...]

    @property
    def healthy(self) -> bool:
        return all(store.healthy for store in self.stores)


def describe_store(view: View, path: Path, *, ignore: Iterable[str] = ()) -> StoreDescription:
    """Look into a store directory. Names in ``ignore`` are stores of their own."""
    parts, log = _read_log(view, path)
    segments = _read_segments(parts, path / SEGMENT_DIRECTORY)
    subscribers = _read_root(parts, segments, frozenset(ignore))
    ledger = _read_ledger(parts)
    items = [segment.items for segment in segments if segment.items is not None]
    return StoreDescription(
        path=str(path),
        mode=view.mode(path),
        store_id=ledger.store_id if ledger else None,
        losses=dict(sorted(ledger.losses.items())) if ledger else {},
        wal_count=len(log.files),
        wal_bytes=sum(file.size for file in log.files),
        wal_entries=sum(file.entries for file in log.files),
        cursor=log.cursor,
        entries_past_cursor=sum(file.entries_past_cursor for file in log.files),
        segment_count=len(segments),
        segment_bytes=sum(segment.size for segment in segments),
        bundles=sum(segment.bundles or 0 for segment in segments),
        rows=sum(segment.rows or 0 for segment in segments),
        items=sum(items) if items else None,
        subscriber_count=len(subscribers),
        quarantined_files=log.quarantined_files,
        quarantined_bytes=log.quarantined_bytes,
        leftover_count=parts.leftovers.count,
        unknown_count=parts.unknown.count,
        problem_count=parts.problems.count,
        problems=parts.problems.items,
        wal=tuple(islice(log.files, view.limit)),
        segments=tuple(islice(segments, view.limit)),
        subscribers=tuple(islice(subscribers, view.limit)),
        leftovers=parts.leftovers.items,
        unknown=parts.unknown.items,
    )


def _read_log(view: View, path: Path) -> tuple[Parts, LogWalk]:
    """Read the log; once more when it was rotated or purged meanwhile, and positions do not fit."""
    for _ in range(_ATTEMPTS):
        parts = Parts(view, path)
        log = LogWalk(parts, path / WAL_DIRECTORY)
        log.run()
        if not log.moved:
            break
    return parts, log


def _read_segments(parts: Parts, directory: Path) -> list[SegmentFacts]:
    segments: list[SegmentFacts] = []
    for name in parts.names(directory):
        path = directory / name
        sequence = segment_sequence(name)
        if sequence is None:
            parts.set_aside(path)
            continue
        with parts.noting(path):
            segments.append(_read_segment(parts, path, sequence))
    segments.sort(key=lambda segment: segment.sequence)
    for before, after in pairwise(segments):
        if before.sequence == after.sequence:
            reason = f"two files for segment {after.sequence}: {before.name} and {after.name}"
            parts.problems.note(parts.name_of(directory), reason)
    return segments


def _read_segment(parts: Parts, path: Path, sequence: int) -> SegmentFacts:
    data = parts.view.map(path)
    walk = SegmentWalk(data, source=str(path), limit=0)
    walk.run()
    for problem in walk.problems.items:
        parts.problems.note(parts.name_of(path), f"{problem.where}: {problem.reason}")
    parts.problems.count_more(walk.problems.count - len(walk.problems.items))
    envelope = walk.envelope
    return SegmentFacts(
        sequence=sequence,
        name=path.name,
        size=data.size,
        mode=parts.view.mode(path),
        streams=envelope.stream_count if envelope else None,
        bundles=envelope.bundle_count if envelope else None,
        rows=walk.row_count,
        items=walk.item_count,
        checksum_verified=walk.verified,
        problem_count=walk.problems.count,
    )


def _read_root(
    parts: Parts, segments: list[SegmentFacts], ignore: frozenset[str]
) -> list[SubscriberFacts]:
    subscribers = []
    for name in parts.names(parts.root):
        path = parts.root / name
        if name in _READ_ELSEWHERE or name in ignore:
            continue
        subscriber = _subscriber_of(name)
        if subscriber is None:
            parts.set_aside(path)
            continue
        with parts.noting(path):
            parts.view.check_regular(path)
            progress = load_progress(parts.view.disk, path)
            subscribers.append(_subscriber_facts(parts, subscriber, progress, segments))
    return subscribers


def _read_ledger(parts: Parts) -> Ledger | None:
    found: list[Ledger | None] = [None]
    with parts.noting(parts.root / LEDGER_NAME):
        found.append(load_ledger(parts.view.disk, parts.root))
    return found[-1]


def _subscriber_of(name: str) -> str | None:
    if not name.startswith(FILE_PREFIX):
        return None
    try:
        return check_subscriber_id(name.removeprefix(FILE_PREFIX))
    except InvalidName:
        return None


def _subscriber_facts(
    parts: Parts, subscriber: str, progress: Progress, segments: list[SegmentFacts]
) -> SubscriberFacts:
    """A segment that the file does not list is pending as a whole."""
    listed = {entry.segment: entry for entry in progress.entries}
    resolved = bundles = 0
    for segment in segments:
        entry = listed.pop(segment.sequence, None)
        if entry is None:
            bundles += segment.bundles or 0
            continue
        resolved += entry.resolved.bit_count()
        bundles += entry.bundle_count
        if segment.bundles not in {None, entry.bundle_count}:
            reason = (
                f"it says that segment {segment.sequence} has {entry.bundle_count} bundles, "
                f"the segment says {segment.bundles}"
            )
            parts.problems.note(f"{FILE_PREFIX}{subscriber}", reason)
    return SubscriberFacts(
        id=subscriber,
        resolved=resolved,
        pending=bundles - resolved,
        oldest_incomplete_segment=progress.oldest_incomplete_segment,
        flags=progress.flags,
        flag_names=tuple(progress.flag_names()),
        segments_gone=len(listed),
    )
