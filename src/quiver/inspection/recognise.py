"""Telling what a file is from its bytes.

Each kind of file has a magic: at the start, or, for segments, twelve bytes before the end. A file
whose magic is damaged or cut off is still taken for what its name says, but only when the bytes
agree with it: the magic with two wrong bytes at most, or, for a segment, the Arrow magic that its
first stream starts with.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from quiver.errors import FormatError
from quiver.inspection.records import View
from quiver.segment import layout
from quiver.segment.layout import segment_sequence
from quiver.subscriber import progress
from quiver.wal import cursor, header
from quiver.wal.files import ACTIVE_NAME
from quiver.wal.recovery import QUARANTINE_NAME

TEMPORARY_SUFFIX: Final = ".tmp"

_WAL_NAME = re.compile(re.escape(ACTIVE_NAME) + r"(\.[1-9][0-9]{0,18})?")
_SEGMENT_MAGIC_FROM_END = 12
_WRONG_BYTES_ALLOWED = 2
_ARROW_MAGIC = b"ARROW1"
_SHOWN_BYTES = 12


class Format(NamedTuple):
    """One kind of file."""

    kind: str
    title: str
    magic: bytes
    from_end: int | None = None


WAL: Final = Format("wal", "WAL file", header.MAGIC)
CURSOR: Final = Format("cursor", "WAL cursor", cursor.MAGIC)
PROGRESS: Final = Format("progress", "progress file", progress.MAGIC)
SEGMENT: Final = Format("segment", "segment", layout.MAGIC, _SEGMENT_MAGIC_FROM_END)
FORMATS: Final = (WAL, CURSOR, PROGRESS, SEGMENT)

_OTHERS: Final = (
    (b"PAR1", "a Parquet file"),
    (_ARROW_MAGIC, "an Arrow IPC file"),
    (b"\x1f\x8b", "a gzip file; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file; unpack it first"),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"SQLite format 3", "an SQLite database"),
    (b"{", "JSON"),
)


def named_like(name: str) -> Format | None:
    """The format that a file name belongs to."""
    if name == cursor.FILE_NAME:
        return CURSOR
    if _WAL_NAME.fullmatch(name):
        return WAL
    if name.startswith(progress.FILE_PREFIX) and not name.endswith(TEMPORARY_SUFFIX):
        return PROGRESS
    return SEGMENT if segment_sequence(name) is not None else None


def find_format(view: View, path: Path) -> Format | None:
    """The format of a file, by its content; None when it is none of ours."""
    view.check_regular(path)
    size = view.disk.size(path)
    for candidate in FORMATS:
        if _magic_at(view, path, size, candidate) == candidate.magic:
            return candidate
    named = named_like(path.name)
    return named if named and _almost(view, path, size, named) else None


def recognise(view: View, path: Path) -> Format:
    """The format of a file, or an error that says what was looked for."""
    found = find_format(view, path)
    if found is None:
        raise FormatError(str(path), 0, _why_unknown(view, path))
    return found


def _magic_at(view: View, path: Path, size: int, candidate: Format) -> bytes:
    offset = 0 if candidate.from_end is None else size - candidate.from_end
    if offset < 0:
        return b""
    return view.disk.read(path, offset, len(candidate.magic)).to_pybytes()


def _almost(view: View, path: Path, size: int, named: Format) -> bool:
    found = _magic_at(view, path, size, named)
    if len(found) == len(named.magic):
        wrong = sum(a != b for a, b in zip(found, named.magic, strict=True))
        if wrong <= _WRONG_BYTES_ALLOWED:
            return True
    start = view.disk.read(path, 0, len(_ARROW_MAGIC)).to_pybytes()
    return named is SEGMENT and start == _ARROW_MAGIC


def magics_looked_for() -> str:
    """All magics with their places, for errors."""
    return ", ".join(
        f"{item.magic!r} "
        + ("at the start" if item.from_end is None else f"{item.from_end} bytes before the end")
        + f" ({item.title})"
        for item in FORMATS
    )


def _why_unknown(view: View, path: Path) -> str:
    size = view.disk.size(path)
    if size == 0:
        return f"not a Quiver file: it is empty; looked for {magics_looked_for()}"
    start = view.disk.read(path, 0, _SHOWN_BYTES).to_pybytes()
    end = view.disk.read(path, max(0, size - _SHOWN_BYTES)).to_pybytes()
    reason = (
        f"not a Quiver file: it starts with {start!r} and ends with {end!r}; "
        f"looked for {magics_looked_for()}"
    )
    return reason + _hint(path, start)


def _hint(path: Path, start: bytes) -> str:
    if path.parent.name == QUARANTINE_NAME:
        return "; these are damaged bytes that recovery cut out of the log and kept"
    for magic, what in _OTHERS:
        if start.startswith(magic):
            return f"; it looks like {what}"
    named = named_like(path.name.removesuffix(TEMPORARY_SUFFIX))
    if named:
        return f"; its name is that of a {named.title}, so its bytes may be lost or overwritten"
    return ""
