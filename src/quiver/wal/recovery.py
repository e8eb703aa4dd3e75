"""Opening a log after whatever happened to it.

In this order, so that a crash in the middle of recovery only makes the next one start again:

1. the cursor is read; one that cannot be read counts as 0;
2. everything behind it is replayed, each entry handed to the caller;
3. damaged bytes are copied to ``quarantine/<log position>.bin`` and reported;
4. a torn tail is cut off the active file;
5. where the log ends before the cursor (the disk lost what was already in segments), or where the
   active file is missing, empty, or not fit to be appended to, a new one is started at the larger
   of both, so that no position is ever given out twice. An empty file is made anew because nobody
   knows how far whoever made it had come with making it durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from quiver.config import WalConfig
from quiver.disk import Disk, publish
from quiver.errors import FormatError
from quiver.wal.cursor import load_cursor
from quiver.wal.entry import BODY_HEAD_SIZE, FRAME_SIZE, LENGTH, MAX_ENTRY_SIZE
from quiver.wal.files import (
    ACTIVE_NAME,
    WalFile,
    find_files,
    next_rotation,
    retire_file,
    rotated_path,
    start_file,
)
from quiver.wal.replay import DamagedRange, Replayed, ReplayedEntry, replay
from quiver.wal.scan import Found, scan

QUARANTINE_NAME: Final = "quarantine"

OnEntry = Callable[[ReplayedEntry], None]


@dataclass(frozen=True, slots=True)
class DamageReport:
    """What was wrong with one range of bytes, and where they were put."""

    path: Path
    offset: int
    length: int
    position: int
    reason: str
    kept_as: Path | None
    """None: an append that a crash cut short, or more damage than ``max_quarantine`` lets in."""


@dataclass(slots=True)
class Recovery:
    """What opening a log found and did."""

    cursor: int = 0
    cursor_problem: str | None = None
    next_sequence: int = 0
    replayed_entries: int = 0
    replayed_bytes: int = 0
    skipped_entries: int = 0
    damaged: list[DamageReport] = field(default_factory=list)
    cut_bytes: int = 0
    header_problems: list[str] = field(default_factory=list)


class Quarantine:
    """Where damaged bytes are kept: a directory that nobody empties but an operator."""

    def __init__(self, disk: Disk, wal_directory: Path, limit: int) -> None:
        self._disk = disk
        self._directory = wal_directory / QUARANTINE_NAME
        self._limit = limit

    def keep(self, damage: DamagedRange) -> DamageReport:
        """Copy the bytes, once, while there is room; say where."""
        self._disk.make_directory(self._directory)
        target = self._directory / f"{damage.position:020}.bin"
        is_kept = self._is_kept(target, len(damage.data))
        if not is_kept and self._used() + len(damage.data) <= self._limit:
            publish(self._disk, target, [damage.data], read_only=True)
            is_kept = True
        return DamageReport(
            damage.path,
            damage.offset,
            len(damage.data),
            damage.position,
            damage.reason,
            target if is_kept else None,
        )

    def _is_kept(self, target: Path, size: int) -> bool:
        return self._disk.exists(target) and self._disk.size(target) == size

    def _used(self) -> int:
        names = self._disk.list_directory(self._directory)
        return sum(self._disk.size(self._directory / name) for name in names)


def recover(
    disk: Disk, directory: Path, config: WalConfig, on_entry: OnEntry | None = None
) -> Recovery:
    """Bring the directory into a state that a writer can append to, and tell what was there."""
    if not disk.exists(directory / ACTIVE_NAME):  # where it is, the directory was synced before
        disk.make_directory(directory)
    recovery = Recovery()
    _read_cursor(disk, directory, recovery)
    files = find_files(disk, directory)
    recovery.header_problems = [f"{f.path}: {f.problem}" for f in files if f.problem]
    quarantine = Quarantine(disk, directory, config.max_quarantine)
    items = replay(disk, files, recovery.cursor)
    tail = _take_in(items, recovery, quarantine, on_entry)
    if recovery.replayed_entries == 0:
        recovery.next_sequence += _last_sequence(disk, files) + 1
    _mend_active_file(disk, directory, files, tail, recovery.cursor)
    return recovery


def _read_cursor(disk: Disk, directory: Path, recovery: Recovery) -> None:
    try:
        recovery.cursor = load_cursor(disk, directory) or 0
    except FormatError as error:
        recovery.cursor_problem = str(error)


def _take_in(
    items: Iterable[Replayed],
    recovery: Recovery,
    quarantine: Quarantine,
    on_entry: OnEntry | None,
) -> DamagedRange | None:
    """Hand out the entries, set damage aside; the last item, when it is damage."""
    tail = None
    count = size = next_sequence = 0
    for item in items:
        if isinstance(item, ReplayedEntry):
            tail = None
            position, end_position, entry = item
            if entry.sequence >= next_sequence:
                next_sequence = entry.sequence + 1
            count += 1
            size += end_position - position
            if on_entry is not None:
                on_entry(item)
        elif isinstance(item, DamagedRange):
            tail = item
            frames = _whole_frames(item)
            if frames or not item.torn:
                recovery.damaged.append(quarantine.keep(item))
            if item.torn:
                recovery.cut_bytes = len(item.data)
                next_sequence += frames  # these may have been acknowledged: not again
        else:
            tail = None
            recovery.skipped_entries += 1
    recovery.next_sequence = next_sequence
    recovery.replayed_entries = count
    recovery.replayed_bytes = size
    return tail


def _whole_frames(damage: DamagedRange) -> int:
    """How many complete frames the bytes start with.

    A torn tail without one is an append that never finished. One with such a frame may also be an
    entry that was good once and changed on disk.
    """
    frames = offset = 0
    while offset + FRAME_SIZE <= len(damage.data):
        length = LENGTH.unpack_from(damage.data, offset)[0]
        offset += FRAME_SIZE + length
        if not BODY_HEAD_SIZE <= length <= MAX_ENTRY_SIZE or offset > len(damage.data):
            break
        frames += 1
    return frames


def _last_sequence(disk: Disk, files: list[WalFile]) -> int:
    """The newest sequence number in any file, -1 when there is none."""
    for file in reversed(files):
        last = -1
        for item in scan(disk.map(file.path), file.header.header_size, source=str(file.path)):
            if isinstance(item, Found):
                last = item.entry.sequence
        if last >= 0:
            return last
    return -1


def _mend_active_file(
    disk: Disk, directory: Path, files: list[WalFile], tail: DamagedRange | None, cursor: int
) -> None:
    """Cut a torn tail off the active file; retire a file that nothing should be appended to."""
    active = files[-1] if files and files[-1].rotation is None else None
    end = files[-1].end if files else 0
    is_unfit = active is not None and bool(active.problem)
    if active is not None and tail is not None and tail.path == active.path:
        if tail.torn:
            file = disk.open_append(active.path)
            file.truncate(tail.offset)
            file.sync()
            file.close()
            end = tail.position
        else:
            is_unfit = True  # the next scan might not find its way over that, either
    if active is not None and (is_unfit or end < cursor):
        if active.size > active.header.header_size:
            retire_file(disk, active.path, rotated_path(directory, next_rotation(files)))
        active = None
    if active is not None and active.size <= active.header.header_size:
        active = None  # whoever made it may not have come as far as making it durable
    if active is None:
        start_file(disk, directory, max(end, cursor)).close()
