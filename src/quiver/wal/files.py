"""The files of one log: their names, their order, how one is started.

``quiver.wal`` takes the appends. When it is full it becomes ``quiver.wal.N``, N counting up from 1,
read-only, and a new one is started. Files are put in order by the position in their headers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from quiver.disk import Disk, DiskFile
from quiver.errors import FormatError, Truncated
from quiver.wal.header import HEADER_SIZE, MAX_POSITION, WalHeader, decode_header, encode_header

ACTIVE_NAME: Final = "quiver.wal"
_ROTATED_NAME = re.compile(r"quiver\.wal\.([1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class WalFile:
    """One file of the log. ``rotation`` is None for the active one."""

    path: Path
    rotation: int | None
    header: WalHeader
    size: int
    problem: str | None = None
    """Why the header is not believed; its position is then taken from the file before."""

    @property
    def start(self) -> int:
        """The log position of its first entry."""
        return self.header.wal_position_start

    @property
    def end(self) -> int:
        """The log position behind its last byte."""
        return self.position_of(max(self.size, self.header.header_size))

    def position_of(self, offset: int) -> int:
        """The log position of a byte of this file."""
        return self.start + offset - self.header.header_size

    def offset_of(self, position: int) -> int:
        """Where a log position lies in this file."""
        return position - self.start + self.header.header_size


def find_files(disk: Disk, directory: Path) -> list[WalFile]:
    """All files of the log, oldest first: in the order of the positions in their headers.

    The header has no checksum. When the positions do not fit together, the files are put in the
    order of their numbers, and one that claims to start before its predecessor ends is not
    believed, because its entries could then hide behind the cursor: better seen twice.
    """
    rotations: dict[int | None, Path] = {}
    for name in disk.list_directory(directory):
        if match := _ROTATED_NAME.fullmatch(name):
            rotations[int(match[1])] = directory / name
        elif name == ACTIVE_NAME:
            rotations[None] = directory / name
    files: list[WalFile] = []
    end = 0
    by_position = sorted(
        (_look_at(disk, path, rotation, 0) for rotation, path in rotations.items()),
        key=lambda file: (file.rotation is None, file.start, file.end),
    )
    if all(file.problem is None for file in by_position) and all(
        before.end <= after.start for before, after in pairwise(by_position)
    ):
        return _doubting_numbers(by_position)
    for rotation in sorted(rotations, key=lambda r: (r is None, r or 0)):
        file = _look_at(disk, rotations[rotation], rotation, end)
        if files and file.start < end:
            problem = f"it claims position {file.start}, but the file before ends at {end}"
            file = replace(
                file, header=replace(file.header, wal_position_start=end), problem=problem
            )
        files.append(file)
        end = file.end
    return files


def _doubting_numbers(files: list[WalFile]) -> list[WalFile]:
    """Numbers grow as positions do. A file for which they do not may have either wrong."""
    lowest_behind = max((file.rotation or 0 for file in files), default=0) + 1
    checked = []
    for file in reversed(files):
        if file.rotation is not None and file.rotation > lowest_behind:
            problem = f"its position {file.start} lies before files with lower numbers"
            checked.append(replace(file, problem=problem))
        else:
            checked.append(file)
            lowest_behind = file.rotation or lowest_behind
    return checked[::-1]


def _look_at(disk: Disk, path: Path, rotation: int | None, expected: int) -> WalFile:
    size = disk.size(path)
    try:
        header = _read_header(disk, path)
    except FormatError as error:
        return WalFile(path, rotation, WalHeader(expected), size, str(error))
    if header.wal_position_start > MAX_POSITION:
        problem = f"no log is as long as its position {header.wal_position_start} says"
        return WalFile(path, rotation, WalHeader(expected, header.header_size), size, problem)
    return WalFile(path, rotation, header, size)


def _read_header(disk: Disk, path: Path) -> WalHeader:
    """Nearly all headers are of the usual size; only for others more is read."""
    start = disk.read(path, 0, HEADER_SIZE)
    try:
        return decode_header(start, source=str(path))
    except Truncated as error:
        return decode_header(disk.read(path, 0, error.need), source=str(path))


def start_file(disk: Disk, directory: Path, position: int) -> DiskFile:
    """Create the active file, durable with its name, to take entries from ``position`` on.

    One that is there, without entries, is removed first: nobody knows what of it is durable.
    """
    path = directory / ACTIVE_NAME
    if disk.exists(path):
        disk.unlink(path)
    file = disk.create(path)
    file.append([encode_header(WalHeader(position))])
    file.sync()
    disk.sync_dir(directory)
    return file


def rotated_path(directory: Path, rotation: int) -> Path:
    """Where the file with that number is, or will be."""
    return directory / f"{ACTIVE_NAME}.{rotation}"


def retire_file(disk: Disk, source: Path, target: Path) -> None:
    """Give a file of the log, which must be synced, the name of a rotated one.

    The name is durable before a new active file may take its place, and before the mode changes:
    a read-only file that a crash left under the active name could not be appended to.
    """
    disk.rename(source, target)
    disk.sync_dir(target.parent)
    disk.make_read_only(target)


def next_rotation(files: list[WalFile]) -> int:
    """A number that no file of the log has."""
    return max((file.rotation or 0 for file in files), default=0) + 1
