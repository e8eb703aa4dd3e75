"""Stores and damage for tests that look into files, and a disk that must not be changed."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Final, NoReturn

from bundles import plain_bundle

from quiver.config import WalConfig
from quiver.disk import DiskFile, RealDisk
from quiver.inspection import (
    Description,
    SegmentDescription,
    StoreDescription,
    WalDescription,
    inspect_path,
)
from quiver.segment.layout import segment_file_name
from quiver.segment.writer import OpenSegment, write_segment
from quiver.subscriber.progress import Progress, SegmentProgress, progress_path, store_progress
from quiver.wal.entry import prepare_entry
from quiver.wal.writer import WalWriter

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "quiver"
G2: Final = "g2_segment_progress"
SEGMENT: Final = f"{G2}/segments/0000000000000000.qseg"
ENTRY_SIZE: Final = prepare_entry(plain_bundle(0)).size


class ReadOnlyDisk(RealDisk):
    """The real disk, on which every change is a defect."""

    @staticmethod
    def _refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("inspecting must not change the disk")

    def create(self, path: Path) -> DiskFile:
        self._refuse()

    def open_append(self, path: Path) -> DiskFile:
        self._refuse()

    rename = unlink = make_directory = sync_dir = make_read_only = _refuse


def look(path: Path, *, limit: int | None = None) -> Description:
    return inspect_path(ReadOnlyDisk(), path, limit=limit)


def look_at_store(path: Path, *, limit: int | None = None) -> StoreDescription:
    description = look(path, limit=limit)
    assert isinstance(description, StoreDescription)
    return description


def look_at_wal(path: Path, *, limit: int | None = None) -> WalDescription:
    description = look(path, limit=limit)
    assert isinstance(description, WalDescription)
    return description


def look_at_segment(path: Path, *, limit: int | None = None) -> SegmentDescription:
    description = look(path, limit=limit)
    assert isinstance(description, SegmentDescription)
    return description


def reasons(store: StoreDescription) -> list[str]:
    return [f"{problem.where}: {problem.reason}" for problem in store.problems]


def make_store(root: Path, *, bundles: int = 6, in_segment: int = 4) -> Path:
    """A store with a log of several files, one segment, and a subscriber half way through it."""
    disk = RealDisk()
    config = WalConfig(rotation_target=1500, max_size=1024 * 1024)
    writer = WalWriter.open(disk, root / "wal", config)
    segment = OpenSegment()
    position = 0
    for index in range(bundles):
        appended = writer.append([prepare_entry(plain_bundle(index))])[0]
        if index < in_segment:
            segment.append(plain_bundle(index), appended.sequence)
            position = appended.end_position
    writer.sync()
    if in_segment:
        disk.make_directory(root / "segments")
        write_segment(disk, root / "segments" / segment_file_name(0), segment)
        writer.advance_cursor(position)
    writer.close()
    half = (1 << in_segment // 2) - 1
    progress = Progress((SegmentProgress(0, in_segment, half),) if in_segment else ())
    store_progress(disk, progress_path(root, "lake"), progress)
    return root


def change(path: Path, offset: int, data: bytes) -> None:
    """Overwrite some bytes; from the end when the offset is negative."""
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    offset %= len(content)
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def flip(path: Path, offset: int) -> None:
    change(path, offset, bytes([path.read_bytes()[offset] ^ 1]))


def seal(path: Path) -> None:
    """Make the checksum at the end fit what was changed."""
    change(path, -4, struct.pack("<I", zlib.crc32(path.read_bytes()[:-4])))


def seal_entry(path: Path, offset: int) -> None:
    """Make the checksum of a WAL entry fit what was changed."""
    data = path.read_bytes()
    body = offset + 4
    end = body + struct.unpack_from("<I", data, offset)[0]
    change(path, end, struct.pack("<I", zlib.crc32(data[body:end])))
