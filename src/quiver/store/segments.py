"""The finalised segments of a store: which there are, and readers for them.

Opening looks at the last bytes of each file, nothing else. A file that cannot be read is set aside
under ``<name>.corrupt``, named and counted; the others are not affected. Readers are kept open, a
bounded number of them, least recently used out first; batches that were handed out stay valid.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quiver.bundle import RecordBundle
from quiver.disk import Disk
from quiver.errors import FormatError, SegmentNotFound
from quiver.segment.layout import segment_file_name, segment_sequence
from quiver.segment.reader import SegmentReader
from quiver.segment.tables import Manifest

CORRUPT_SUFFIX: Final = ".corrupt"


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A finalised segment."""

    number: int
    path: Path
    size: int
    bundle_count: int


@dataclass(frozen=True, slots=True)
class CorruptSegment:
    """A segment that was set aside."""

    number: int
    kept_as: Path
    size: int
    reason: str


class SegmentSet:
    """The segments in one directory. Safe to use from several threads."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self.max_open_readers = 1
        """Segments that are kept mapped; what is read of them counts as memory of this process."""
        self._directory = directory
        self._lock = threading.Lock()
        self._infos: dict[int, SegmentInfo] = {}
        self._size = 0
        self._readers: OrderedDict[int, SegmentReader] = OrderedDict()
        self.corrupt: list[CorruptSegment] = []
        self.undead: set[int] = set()
        """Deleted, but a power cut may bring them back: the sync of the directory failed."""
        self.highest_seen = -1
        """The largest number of any file, readable or not."""

    def scan(self) -> None:
        """Find what is there. Called once, before anything else."""
        self._disk.make_directory(self._directory)
        self._disk.sync_dir(self._directory)  # what is believed from here on must stay there
        for name in self._disk.list_directory(self._directory):
            number = segment_sequence(name.removesuffix(CORRUPT_SUFFIX).removesuffix(".tmp"))
            if number is None:
                continue
            self.highest_seen = max(self.highest_seen, number)
            if name.endswith(".tmp"):
                self._disk.unlink(self._directory / name)  # never published
            elif not name.endswith(CORRUPT_SUFFIX):
                self._take_in(number, self._directory / name)

    def _take_in(self, number: int, path: Path) -> None:
        try:
            self.register(number, path)
        except FormatError as error:
            self._set_aside(number, path, str(error))

    def register(self, number: int, path: Path) -> SegmentInfo:
        """Add a published segment."""
        reader = SegmentReader.open(self._disk, path)
        info = SegmentInfo(number, path, reader.size, reader.bundle_count)
        with self._lock:
            self._forget(number)
            self._infos[number] = info
            self._size += info.size
            self.highest_seen = max(self.highest_seen, number)
        return info

    def path_of(self, number: int) -> Path:
        """Where the segment with this number is, or will be."""
        return self._directory / segment_file_name(number)

    @property
    def numbers(self) -> list[int]:
        """The segments, oldest first."""
        with self._lock:
            return sorted(self._infos)

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return self._size

    @property
    def open_readers(self) -> int:
        """How many segments are mapped."""
        return len(self._readers)

    def info(self, number: int) -> SegmentInfo | None:
        """What is known of a segment; None when it is gone."""
        return self._infos.get(number)

    def bundle(self, number: int, index: int) -> RecordBundle:
        """Read a bundle; a segment that turns out to be damaged is set aside."""
        try:
            return self.reader(number).bundle(index)
        except FormatError as error:
            self.set_aside(number, str(error))
            raise

    def manifest(self, number: int) -> Manifest:
        """The manifest of a segment."""
        try:
            return self.reader(number).manifest
        except FormatError as error:
            self.set_aside(number, str(error))
            raise

    def reader(self, number: int) -> SegmentReader:
        """An open reader."""
        with self._lock:
            reader = self._readers.get(number)
            if reader is not None:
                self._readers.move_to_end(number)
                return reader
            info = self._infos.get(number)
        if info is None:
            raise SegmentNotFound(f"{self._directory}: segment {number} is not there any more")
        try:
            reader = SegmentReader.open(self._disk, info.path)
        except FileNotFoundError as error:
            raise SegmentNotFound(f"{info.path}: somebody deleted it: {error}") from error
        with self._lock:
            self._keep(number, reader)
        return reader

    def delete(self, numbers: list[int]) -> int:
        """Remove the files of segments, durably; the bytes that became free."""
        freed = 0
        deleted = []
        for number in numbers:
            info = self._infos.get(number)
            if info is None:
                continue
            with suppress(FileNotFoundError):  # somebody was faster
                self._disk.unlink(info.path)
            freed += info.size
            deleted.append(number)
            with self._lock:
                self._forget(number)
        if deleted:
            try:
                self._disk.sync_dir(self._directory)
            except OSError:
                self.undead.update(deleted)
                raise
        return freed

    def set_aside(self, number: int, reason: str) -> None:
        """Take a damaged segment out of service and keep its bytes."""
        with self._lock:
            info = self._forget(number)
        if info is not None:
            self._set_aside(number, info.path, reason)

    def _set_aside(self, number: int, path: Path, reason: str) -> None:
        target = path.with_name(path.name + CORRUPT_SUFFIX)
        if not self._disk.exists(path):
            return  # there is nothing to keep
        size = self._disk.size(path)
        self._disk.rename(path, target)
        self._disk.sync_dir(self._directory)
        self.corrupt.append(CorruptSegment(number, target, size, reason))

    def _forget(self, number: int) -> SegmentInfo | None:
        info = self._infos.pop(number, None)
        self._readers.pop(number, None)
        if info is not None:
            self._size -= info.size
        return info

    def _keep(self, number: int, reader: SegmentReader) -> None:
        self._readers[number] = reader
        while len(self._readers) > self.max_open_readers:
            self._readers.popitem(last=False)
