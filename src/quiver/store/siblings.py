"""Stores that share a disk: one for each core, in directories ``core_<n>`` of one root.

The cap may be split evenly (``split_cap``); each store then keeps to its part, and a busy one
throttles while an idle one has room. Or it is shared (``RetentionConfig.shared``): every store
counts what all of them hold, and when it is too much, the one that holds the globally oldest
segment drops it. No store touches another's files and nothing is agreed on: each looks at the
directories of the others and acts only on its own. Between two looks each may finalise one segment
more, which bounds how far the cap is exceeded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from quiver.disk import Disk
from quiver.errors import FormatError
from quiver.segment.layout import segment_sequence
from quiver.segment.reader import SegmentReader

PREFIX: Final = "core_"


def split_cap(size_cap: int, stores: int) -> int:
    """The part of a cap that each of several stores gets."""
    return size_cap // max(1, stores)


@dataclass(slots=True)
class Siblings:
    """The other stores under the same root."""

    disk: Disk
    own_root: Path
    _known: dict[Path, int | None] = field(default_factory=dict)

    def used(self) -> int:
        """Bytes of their logs and segments."""
        return sum(
            self._size(directory / name)
            for root in self._roots()
            for directory in (root / "wal", root / "segments")
            for name in self._names(directory)
        )

    def oldest_ns(self) -> int | None:
        """When the oldest bundle in any of their segments was ingested."""
        oldest = [self._oldest_of(root) for root in self._roots()]
        return min((time for time in oldest if time is not None), default=None)

    def _roots(self) -> list[Path]:
        parent = self.own_root.parent
        return [
            parent / name
            for name in self._names(parent)
            if name.startswith(PREFIX) and name != self.own_root.name
        ]

    def _oldest_of(self, root: Path) -> int | None:
        numbered = {segment_sequence(name): name for name in self._names(root / "segments")}
        numbers = [number for number in numbered if number is not None]
        if not numbers:
            return None
        path = root / "segments" / numbered[min(numbers)]
        if path not in self._known:
            self._known = {p: t for p, t in self._known.items() if p.parent != path.parent}
            self._known[path] = self._first_ingestion(path)
        return self._known[path]

    def _first_ingestion(self, path: Path) -> int | None:
        try:
            manifest = SegmentReader.open(self.disk, path).manifest
        except (FormatError, FileNotFoundError):
            return None
        return manifest.ingestion_time_ns(0) if len(manifest) else None

    def _names(self, directory: Path) -> list[str]:
        try:
            return self.disk.list_directory(directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _size(self, path: Path) -> int:
        try:
            return self.disk.size(path)
        except (FileNotFoundError, IsADirectoryError):
            return 0
