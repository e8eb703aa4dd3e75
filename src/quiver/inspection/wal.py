"""What a WAL file and a cursor hold.

Every entry is decoded, because one with a good checksum can still hold what is no Arrow batch. An
entry whose header is not believed is looked for where version 1 would have put it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from quiver.bundle import slot_name
from quiver.errors import FormatError, QuiverError
from quiver.inspection.records import (
    MAX_LISTED_PROBLEMS,
    DecodeBudget,
    FileDescription,
    Listing,
    Record,
    View,
    reason_of,
)
from quiver.ipc import Validation
from quiver.wal.cursor import decode_cursor
from quiver.wal.entry import FRAME_SIZE, WalEntry
from quiver.wal.header import HEADER_SIZE, decode_header
from quiver.wal.scan import Damaged, Found, Scanned, Skipped, scan

_LARGEST_CURSOR = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFacts(Record):
    """One slot of an entry."""

    slot: int
    name: str
    fingerprint: str
    rows: int
    payload_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFacts(Record):
    """One bundle in the log."""

    offset: int
    entry_len: int
    ts: int
    seq: int
    bitmap: int
    crc: str
    slots: tuple[SlotFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedFacts(Record):
    """A good entry of a type that this version does not know."""

    offset: int
    entry_type: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedFacts(Record):
    """Bytes that are no entry, or an entry that cannot be decoded."""

    offset: int
    length: int
    reason: str
    torn: bool
    """Nothing good follows in this file: an append that did not finish looks like this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WalDescription(FileDescription):
    """A WAL file. Positions are None when the header is not believed."""

    kind: ClassVar[str] = "wal"

    problem: str | None
    header_size: int
    wal_position_start: int | None
    wal_position_end: int | None
    entry_count: int
    row_count: int
    payload_bytes: int
    first_seq: int | None
    last_seq: int | None
    first_ts: int | None
    last_ts: int | None
    damaged_count: int
    damaged_bytes: int
    skipped_count: int
    entries: tuple[EntryFacts, ...]
    damaged: tuple[DamagedFacts, ...]
    skipped: tuple[SkippedFacts, ...]

    @property
    def healthy(self) -> bool:
        return self.problem is None and self.damaged_count == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorDescription(FileDescription):
    """A cursor. ``wal_position`` is None when it cannot be read."""

    kind: ClassVar[str] = "cursor"

    problem: str | None
    wal_position: int | None

    @property
    def healthy(self) -> bool:
        return self.problem is None


def describe_wal(view: View, path: Path) -> WalDescription:
    """Look into one WAL file."""
    data = view.load(path)
    problem = start = end = None
    header_size = HEADER_SIZE
    try:
        header = decode_header(data, source=str(path))
    except FormatError as error:
        problem = reason_of(error)
    else:
        header_size, start = header.header_size, header.wal_position_start
        end = start + data.size - header_size
    walk = WalWalk(data, source=str(path), limit=view.limit)
    walk.run(header_size)
    return WalDescription(
        **view.file_fields(path, data),
        problem=problem,
        header_size=header_size,
        wal_position_start=start,
        wal_position_end=end,
        entry_count=walk.entries.count,
        row_count=walk.row_count,
        payload_bytes=walk.payload_bytes,
        first_seq=walk.first.sequence if walk.first else None,
        last_seq=walk.last.sequence if walk.last else None,
        first_ts=walk.first.ingestion_time_ns if walk.first else None,
        last_ts=walk.last.ingestion_time_ns if walk.last else None,
        damaged_count=walk.damaged.count,
        damaged_bytes=walk.damaged_bytes,
        skipped_count=walk.skipped.count,
        entries=walk.entries.items,
        damaged=walk.damaged.items,
        skipped=walk.skipped.items,
    )


class WalWalk:
    """One walk over the bytes of a WAL file, adding up what comes by."""

    def __init__(self, data: pa.Buffer, *, source: str, limit: int | None) -> None:
        self._data = data
        self._source = source
        self._budget = DecodeBudget(data.size)
        self.entries = Listing[EntryFacts](limit)
        self.damaged = Listing[DamagedFacts](MAX_LISTED_PROBLEMS)
        self.skipped = Listing[SkippedFacts](limit)
        self.row_count = 0
        self.payload_bytes = 0
        self.damaged_bytes = 0
        self.entries_past = 0
        self.first: WalEntry | None = None
        self.last: WalEntry | None = None

    def run(self, start: int, *, past: int = 0, after_sequence: int | None = None) -> None:
        """Walk from ``start`` to the end; count the entries that end behind offset ``past``."""
        for item in scan(self._data, start, source=self._source, after_sequence=after_sequence):
            self._take(item)
            if isinstance(item, Found) and item.end > past:
                self.entries_past += 1

    def _take(self, item: Scanned) -> None:
        length = item.end - item.offset
        if isinstance(item, Found):
            self._take_entry(item)
        elif isinstance(item, Skipped):
            self.skipped.add(
                SkippedFacts(offset=item.offset, entry_type=item.entry_type, length=length)
            )
        else:
            self._take_damage(item)

    def _take_entry(self, found: Found) -> None:
        entry = found.entry
        self.first = self.first or entry
        self.last = entry
        self.row_count += sum(slot.row_count for slot in entry.slots)
        self.payload_bytes += sum(slot.payload.size for slot in entry.slots)
        self.entries.add(_entry_facts(found))
        if self._budget.is_spent:
            return
        try:
            bundle = entry.bundle(Validation.FULL)
            batches = [payload.batch for payload in bundle.payloads.values()]
            size = sum(batch.get_total_buffer_size() for batch in batches)
            self._budget.spend(size, source=self._source, offset=found.offset)
        except QuiverError as error:
            self._take_damage(Damaged(found.offset, found.end, reason_of(error), torn=False))

    def _take_damage(self, item: Damaged) -> None:
        length = item.end - item.offset
        self.damaged_bytes += length
        self.damaged.add(
            DamagedFacts(offset=item.offset, length=length, reason=item.reason, torn=item.torn)
        )


def _entry_facts(found: Found) -> EntryFacts:
    entry = found.entry
    return EntryFacts(
        offset=found.offset,
        entry_len=found.end - found.offset - FRAME_SIZE,
        ts=entry.ingestion_time_ns,
        seq=entry.sequence,
        bitmap=entry.slot_bitmap,
        crc=f"{found.crc:08x}",
        slots=tuple(
            SlotFacts(
                slot=block.slot,
                name=slot_name(block.slot),
                fingerprint=block.fingerprint.hex(),
                rows=block.row_count,
                payload_len=block.payload.size,
            )
            for block in entry.slots
        ),
    )


def describe_cursor(view: View, path: Path) -> CursorDescription:
    """Look into a cursor file."""
    data = view.load(path)
    position = problem = None
    try:
        position = decode_cursor(memoryview(data)[:_LARGEST_CURSOR], source=str(path))
    except FormatError as error:
        problem = reason_of(error)
    return CursorDescription(**view.file_fields(path, data), problem=problem, wal_position=position)
