"""Looking at a store from outside, while its writer runs: no lock, no question asked.

A snapshot is taken in an order that cannot miss anything: first the cursor, then the log behind it,
then the segments. A bundle that moves from the log into a segment meanwhile is seen in both, and
counted once, by its sequence number. Segments are mapped when the snapshot is taken, so it stays
whole when the writer deletes files afterwards. What is being written at that moment is not in it;
everything that was acknowledged before is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quiver.bundle import RecordBundle
from quiver.disk import Disk, RealDisk
from quiver.errors import FormatError, SegmentNotFound
from quiver.ipc import Validation
from quiver.segment.layout import segment_sequence
from quiver.segment.reader import SegmentReader
from quiver.store.ledger import load_ledger
from quiver.wal.cursor import load_cursor
from quiver.wal.entry import WalEntry
from quiver.wal.files import WalFile, find_files
from quiver.wal.replay import DamagedRange, ReplayedEntry, replay

_ATTEMPTS = 100


class Place(NamedTuple):
    """Where a bundle of a snapshot lies: in a segment, or still in the log."""

    segment: int | None
    bundle: int | None
    sequence: int | None


@dataclass(slots=True)
class Snapshot:
    """What a store held at one moment."""

    store_id: str | None
    segments: dict[int, SegmentReader] = field(default_factory=dict)
    tail: list[WalEntry] = field(default_factory=list)
    """Entries of the log that no segment has, oldest first."""
    problems: list[str] = field(default_factory=list)

    def bundles(self) -> Iterator[tuple[Place, RecordBundle]]:
        """Every bundle, oldest first."""
        for number, reader in self.segments.items():
            for entry in reader.manifest:
                place = Place(number, entry.bundle_index, entry.sequence)
                yield place, reader.bundle(entry.bundle_index)
        for logged in self.tail:
            yield Place(None, None, logged.sequence), logged.bundle(Validation.LAYOUT)

    def __len__(self) -> int:
        return len(self.tail) + sum(reader.bundle_count for reader in self.segments.values())


class StoreReader:
    """A read-only view of a store's directory."""

    def __init__(self, path: str | Path, disk: Disk | None = None) -> None:
        self._root = Path(path)
        self._disk = disk or RealDisk()

    def snapshot(self) -> Snapshot:
        """What the store holds now."""
        snapshot = Snapshot(self._store_id())
        logged = self._log(snapshot)
        self._map_segments(snapshot)
        last = max((_last_sequence(r) for r in snapshot.segments.values()), default=-1)
        snapshot.tail = [entry for entry in logged if entry.sequence > last]
        return snapshot

    def _store_id(self) -> str | None:
        try:
            ledger = load_ledger(self._disk, self._root)
        except (FormatError, FileNotFoundError):
            return None
        return None if ledger is None else ledger.store_id

    def _log(self, snapshot: Snapshot) -> list[WalEntry]:
        """The entries behind the cursor; read again when files came or went meanwhile.

        A file that is renamed between two looks at the directory could be missed, without an error.
        """
        directory = self._root / "wal"
        for _ in range(_ATTEMPTS):
            entries: list[WalEntry] = []
            problems: list[str] = []
            try:
                cursor = load_cursor(self._disk, directory) or 0
                files = find_files(self._disk, directory)
                for item in replay(self._disk, files, cursor, copy=True):
                    if isinstance(item, ReplayedEntry):
                        entries.append(item.entry)
                    elif isinstance(item, DamagedRange) and not item.torn:
                        problems.append(f"{item.path}: {item.reason}")
                if _places(files) != _places(find_files(self._disk, directory)):
                    continue
            except FileNotFoundError:
                continue
            except FormatError as error:
                problems.append(str(error))
            snapshot.problems += problems
            return entries
        raise SegmentNotFound(f"{directory}: there is no log, or it changes too fast to be read")

    def _map_segments(self, snapshot: Snapshot) -> None:
        directory = self._root / "segments"
        named = {segment_sequence(name): name for name in self._disk.list_directory(directory)}
        for number in sorted(number for number in named if number is not None):
            path = directory / named[number]
            try:
                snapshot.segments[number] = SegmentReader.open(self._disk, path)
            except FileNotFoundError:
                continue  # every subscriber was done with it
            except FormatError as error:
                snapshot.problems.append(str(error))


def _places(files: list[WalFile]) -> list[tuple[Path, int]]:
    return [(file.path, file.start) for file in files]


def _last_sequence(reader: SegmentReader) -> int:
    known = [entry.sequence for entry in reader.manifest if entry.sequence is not None]
    return max(known, default=-1)
