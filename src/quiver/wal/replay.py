"""Reading the log from a position to its end, over all its files.

Nothing here writes. A reader beside a running writer sees every entry that was complete when it
came by; the entry being written at that moment looks like a torn tail and is there the next time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from quiver.disk import Disk
from quiver.wal.entry import WalEntry
from quiver.wal.files import WalFile
from quiver.wal.scan import Damaged, Found, Scanned, scan


class ReplayedEntry(NamedTuple):
    """An entry, and the log positions where it starts and ends."""

    position: int
    end_position: int
    entry: WalEntry


class DamagedRange(NamedTuple):
    """Bytes of the log that are no entry.

    ``torn``: they are the end of the active file, as an interrupted append leaves it.
    """

    path: Path
    offset: int
    data: pa.Buffer
    position: int
    reason: str
    torn: bool


class SkippedEntry(NamedTuple):
    """A good entry of a type that this reader does not know."""

    position: int
    end_position: int
    entry_type: int


Replayed: TypeAlias = ReplayedEntry | DamagedRange | SkippedEntry


def replay(
    disk: Disk, files: list[WalFile], from_position: int = 0, *, copy: bool = False
) -> Iterator[Replayed]:
    """Everything that ends behind ``from_position``, in order. ``files``: see ``find_files``.

    Where positions cannot be trusted it is more than that: entries may come that were read before.

    A reader beside a running writer takes a ``copy``: a writer that starts may cut a torn tail off
    the file, and what was cut from a mapping must not be touched.
    """
    last_sequence = None
    for file in files:
        start = _first_needed(file, from_position, is_last=file is files[-1])
        if start is None:
            continue
        data = disk.read(file.path) if copy else disk.map(file.path)
        shift = file.position_of(0)
        for item in _scan_from(data, file, start, last_sequence):
            if isinstance(item, Found):
                offset, end, entry, _ = item
                last_sequence = entry.sequence
                yield tuple.__new__(ReplayedEntry, (shift + offset, shift + end, entry))
            elif isinstance(item, Damaged):
                yield DamagedRange(
                    file.path,
                    item.offset,
                    data.slice(item.offset, item.end - item.offset),
                    shift + item.offset,
                    item.reason,
                    item.torn and file.rotation is None and file.problem is None,
                )
            else:
                yield SkippedEntry(shift + item.offset, shift + item.end, item.entry_type)


def _first_needed(file: WalFile, from_position: int, *, is_last: bool) -> int | None:
    """The offset to read a file from; None when all of it lies before the position.

    Headers have no checksum. Where one is not believed, or the log seems to end before the
    position, a file may hold entries behind it that only look old: it is read as a whole.
    """
    first = file.header.header_size
    if file.size <= first:
        return None
    if file.problem or (is_last and file.end < from_position):
        return first
    if file.end <= from_position:
        return None
    return max(first, file.offset_of(from_position))


def _scan_from(
    data: pa.Buffer, file: WalFile, start: int, last_sequence: int | None
) -> Iterable[Scanned]:
    """Scan from an offset; the whole file when no entry begins there, for the same reason."""
    first = file.header.header_size
    items = scan(data, start, source=str(file.path), after_sequence=last_sequence)
    head = next(items, None)
    if head is None:
        return ()
    if start > first and isinstance(head, Damaged):
        return scan(data, first, source=str(file.path), after_sequence=last_sequence)
    return chain((head,), items)
