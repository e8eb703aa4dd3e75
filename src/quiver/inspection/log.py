"""The log of a store: its files, the cursor, and what lies between the two."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pyarrow as pa

from quiver.disk import Disk
from quiver.errors import FormatError
from quiver.inspection.parts import Parts
from quiver.inspection.recognise import CURSOR, WAL, named_like
from quiver.inspection.records import Record
from quiver.inspection.wal import DamagedFacts, WalWalk
from quiver.wal.cursor import CURSOR_SIZE, load_cursor
from quiver.wal.cursor import FILE_NAME as CURSOR_NAME
from quiver.wal.files import WalFile, find_files
from quiver.wal.recovery import QUARANTINE_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class WalFileFacts(Record):
    """One file of the log."""

    name: str
    size: int
    mode: str | None
    wal_position_start: int
    wal_position_end: int
    entries: int
    entries_past_cursor: int
    rows: int
    skipped: int
    damaged_count: int
    damaged: tuple[DamagedFacts, ...]


class LogWalk:
    """One walk through the log, oldest file first."""

    def __init__(self, parts: Parts, directory: Path) -> None:
        self._parts = parts
        self._view = parts.view
        self._directory = directory
        self._last_sequence: int | None = None
        self.files: list[WalFileFacts] = []
        self.cursor: int | None = None
        self.moved = False
        """Whether the log was rotated or purged, or the cursor moved, while it was read."""
        self.quarantined_files = 0
        self.quarantined_bytes = 0

    def run(self) -> None:
        before = self._state()
        self._walk(self._parts.names(self._directory))
        self.moved = self._state() != before

    def _state(self) -> object:
        """What changes when a running store rotates, purges or moves the cursor."""
        names = cursor = None
        path = self._directory / CURSOR_NAME
        with suppress(OSError, FormatError):
            names = self._view.names(self._directory)
            self._view.check_regular(path)
            cursor = self._view.disk.read(path, 0, CURSOR_SIZE).to_pybytes()
        return names, cursor

    def _walk(self, names: list[str]) -> None:
        for name in names:
            path = self._directory / name
            if name == QUARANTINE_NAME:
                self._count_quarantine(path)
            elif named_like(name) not in {WAL, CURSOR}:
                self._parts.set_aside(path)
        problems_before = self._parts.problems.count
        self._read_cursor(names)
        files = self._find(name for name in names if named_like(name) is WAL)
        if self._parts.problems.count == problems_before:
            self._check_positions(files)
        for file in files:
            with self._parts.noting(file.path):
                self._read(file)

    def _count_quarantine(self, path: Path) -> None:
        for name in self._parts.names(path):
            with self._parts.noting(path / name):
                self.quarantined_bytes += self._view.disk.size(path / name)
                self.quarantined_files += 1

    def _read_cursor(self, names: list[str]) -> None:
        path = self._directory / CURSOR_NAME
        if CURSOR_NAME in names:
            with self._parts.noting(path):
                self._view.check_regular(path)
                self.cursor = load_cursor(self._view.disk, self._directory)

    def _find(self, names: Iterable[str]) -> list[WalFile]:
        """The files in order, without those that cannot be read."""
        readable = set()
        for name in names:
            path = self._directory / name
            with self._parts.noting(path):
                self._view.check_regular(path)
                self._view.disk.read(path, 0, 1)
                readable.add(name)
        files: list[WalFile] = []
        with self._parts.noting(self._directory):
            disk = cast("Disk", _OnlyThese(self._view.disk, readable))
            files = find_files(disk, self._directory)
        for file in files:
            if file.problem:
                reason = file.problem.removeprefix(f"{file.path}: ")
                self._parts.problems.note(self._parts.name_of(file.path), reason)
        return files

    def _read(self, file: WalFile) -> None:
        data = self._view.load(file.path)
        walk = WalWalk(data, source=str(file.path), limit=0)
        walk.run(
            file.header.header_size,
            past=file.offset_of(self.cursor or 0),
            after_sequence=self._last_sequence,
        )
        if walk.last:
            self._last_sequence = walk.last.sequence
        # Only the active file can end in an append that did not finish.
        is_active = file.rotation is None
        damaged = tuple(replace(d, torn=d.torn and is_active) for d in walk.damaged.items)
        for damage in damaged:
            self._parts.problems.note(
                self._parts.name_of(file.path),
                f"{damage.length} bytes at {damage.offset}: {damage.reason}"
                + (" (torn: nothing good follows)" if damage.torn else ""),
            )
        self._parts.problems.count_more(walk.damaged.count - len(damaged))
        self.files.append(
            WalFileFacts(
                name=file.path.name,
                size=data.size,
                mode=self._view.mode(file.path),
                wal_position_start=file.start,
                wal_position_end=file.position_of(max(data.size, file.header.header_size)),
                entries=walk.entries.count,
                entries_past_cursor=walk.entries_past,
                rows=walk.row_count,
                skipped=walk.skipped.count,
                damaged_count=walk.damaged.count,
                damaged=damaged,
            )
        )

    def _check_positions(self, files: list[WalFile]) -> None:
        """Say which positions behind the cursor no file has."""
        where = self._parts.name_of(self._directory)
        expected = self.cursor or 0
        for file in files:
            if file.start > expected:
                reason = f"log positions {expected} to {file.start} are in no file"
                self._parts.problems.note(where, reason)
            expected = max(expected, file.end)
        if self.cursor is not None and files and files[-1].end < self.cursor:
            reason = f"the cursor is at {self.cursor}, but the log ends at {files[-1].end}"
            self._parts.problems.note(where, reason)


class _OnlyThese:
    """What ``find_files`` asks of a disk, with the names that cannot be read left out."""

    def __init__(self, disk: Disk, names: Iterable[str]) -> None:
        self._disk = disk
        self._names = sorted(names)

    def list_directory(self, _path: Path) -> list[str]:
        return self._names

    def size(self, path: Path) -> int:
        return self._disk.size(path)

    def read(self, path: Path, offset: int, length: int) -> pa.Buffer:
        return self._disk.read(path, offset, length)
