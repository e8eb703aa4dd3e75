"""Items that a destination refuses for ever: kept, with the reason, until somebody decides.

Each is two files in ``dead_letter/<destination>/``, named by a ULID, so that they sort by time:

==================  ==========================================================================
``<ulid>.segment``  the bundle as the store had it, a segment with one bundle
``<ulid>.json``     when, why, which signal, how many items; written last, so what is listed is
                    whole
``<ulid>.again``    somebody asked for another attempt; the running pipeline makes it
==================  ==========================================================================

An item that was taken after all is removed; one that is refused again stays, with the new reason.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ulid import ULID

from quiver.bundle import RecordBundle
from quiver.disk import Disk, publish
from quiver.errors import FormatError, StorageAtCapacity
from quiver.segment.reader import SegmentReader
from quiver.segment.writer import OpenSegment, write_segment
from quiver.subscriber.progress import check_subscriber_id

FOLDER: Final = "dead_letter"
MAX_LETTER_BYTES: Final = 64 * 1024
MAX_REASON: Final = 2_000
_NOTE, _DATA, _AGAIN = ".json", ".segment", ".again"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One item that was given up, for now."""

    name: str
    destination: str
    reason: str
    refused_ms: int
    signal: str | None
    items: int | None
    size: int
    again: bool = False
    """Whether another attempt was asked for."""


class DeadLetters:
    """The folder of one store. Several processes may look; one adds."""

    def __init__(self, disk: Disk, root: Path, max_bytes: int) -> None:
        self._disk = disk
        self._root = root / FOLDER
        self._max_bytes = max_bytes
        self._size: int | None = None

    @property
    def size(self) -> int:
        """Bytes of all items."""
        if self._size is None:
            self._size = sum(letter.size for letter in self.list())
        return self._size

    def add(self, destination: str, bundle: RecordBundle, reason: str) -> DeadLetter:
        """Keep an item, durably. ``StorageAtCapacity`` when there is no room: try again later."""
        segment = OpenSegment()
        segment.append(bundle, 0)
        if self.size + segment.estimated_size > self._max_bytes:
            self._size = None  # somebody may have dropped some meanwhile: count again
        if self.size + segment.estimated_size > self._max_bytes:
            raise StorageAtCapacity(
                f"{self._root}: max_dead_letter_bytes ({self._max_bytes}) is reached; look at them "
                "with quiver dlq list, and replay or drop some"
            )
        folder = self._folder(destination)
        self._disk.make_directory(folder)
        made = ULID()
        name = str(made)
        size = write_segment(self._disk, folder / (name + _DATA), segment, sync_every=None)
        signal = bundle.signal
        letter = DeadLetter(
            name,
            destination,
            reason[:MAX_REASON],
            made.milliseconds,
            None if signal is None else str(signal),
            bundle.item_count,
            size,
        )
        self._write_note(folder, letter)
        self._size = self.size + size
        return letter

    def list(self, destination: str | None = None) -> list[DeadLetter]:
        """What is there, oldest first."""
        if not self._disk.exists(self._root):
            return []
        names = [destination] if destination else sorted(self._disk.list_directory(self._root))
        found = []
        for name in names:
            folder = self._folder(name)
            if not self._disk.exists(folder):
                continue
            there = set(self._disk.list_directory(folder))
            for note in sorted(entry for entry in there if entry.endswith(_NOTE)):
                stem = note.removesuffix(_NOTE)
                found.append(self._read_note(folder / note, again=stem + _AGAIN in there))
        return sorted(found, key=lambda letter: letter.name)

    def find(self, name: str) -> DeadLetter | None:
        """The one with this name."""
        return next((letter for letter in self.list() if letter.name == name), None)

    def bundle(self, letter: DeadLetter) -> RecordBundle:
        """The item itself."""
        path = self._folder(letter.destination) / (letter.name + _DATA)
        return SegmentReader.open(self._disk, path).bundle(0)

    def ask_again(self, letter: DeadLetter) -> None:
        """Have the pipeline try once more."""
        folder = self._folder(letter.destination)
        publish(self._disk, folder / (letter.name + _AGAIN), [b""])

    def refused_again(self, letter: DeadLetter, reason: str) -> None:
        """It was tried once more, in vain."""
        folder = self._folder(letter.destination)
        changed = DeadLetter(**{**asdict(letter), "reason": reason[:MAX_REASON], "again": False})
        self._write_note(folder, changed)
        self._remove(folder, letter.name + _AGAIN)

    def remove(self, letter: DeadLetter) -> None:
        """It was taken after all, or nobody wants it any more."""
        folder = self._folder(letter.destination)
        for suffix in (_NOTE, _AGAIN, _DATA):  # the note first: what is listed is whole
            self._remove(folder, letter.name + suffix)
        self._disk.sync_dir(folder)
        if self._size is not None:
            self._size -= letter.size

    def _remove(self, folder: Path, name: str) -> None:
        if self._disk.exists(folder / name):
            self._disk.unlink(folder / name)

    def _folder(self, destination: str) -> Path:
        return self._root / check_subscriber_id(destination)

    def _write_note(self, folder: Path, letter: DeadLetter) -> None:
        facts = {**asdict(letter)}
        del facts["again"]
        publish(self._disk, folder / (letter.name + _NOTE), [json.dumps(facts).encode() + b"\n"])

    def _read_note(self, path: Path, *, again: bool) -> DeadLetter:
        try:
            facts = json.loads(self._disk.read(path, 0, MAX_LETTER_BYTES).to_pybytes())
            return DeadLetter(**facts, again=again)
        except (ValueError, TypeError) as error:
            raise FormatError(str(path), 0, f"this is not a note of ours: {error}") from error
