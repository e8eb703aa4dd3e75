"""What descriptions are made of, and the one place that asks the disk.

A description is a tree of frozen records. The name of a field is the key in the JSON document, so
both are read in one place: the record.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

import pyarrow as pa

from quiver.disk import Disk
from quiver.errors import FormatError, LimitExceeded

MAX_LISTED_PROBLEMS: Final = 1000
"""Damage is listed whatever ``limit`` says, and counted beyond this."""

# A store that starts while a file is looked at may cut its torn tail off, and a mapping of bytes
# that are gone kills the process. So files that can be cut are copied, within this.
_LARGEST_COPY = 256 * 1024 * 1024
_DECODED_AT_LEAST = 1024 * 1024 * 1024
_DECODED_PER_BYTE = 64
_LEAST_COST = 1024

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A part of a description."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, in order."""
        return {field.name: _json_value(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Record):
    """Something that is not as it should be."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Description(Record):
    """What was found at a path. ``kind`` names the class of it."""

    kind: ClassVar[str]

    path: str
    mode: str | None

    @property
    def healthy(self) -> bool:
        """Whether nothing is damaged."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **Record.to_json(self), "healthy": self.healthy}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDescription(Description):
    """What every file has."""

    size: int
    sha256: str


def _json_value(value: object) -> Any:  # noqa: ANN401 - JSON has no type of its own
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    return value


class Listing(Generic[_T]):
    """Keeps the first items, counts all of them."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._items: list[_T] = []
        self.count = 0

    def add(self, item: _T) -> None:
        """Count an item, and keep it while there is room."""
        self.count += 1
        if self._limit is None or len(self._items) < self._limit:
            self._items.append(item)

    @property
    def items(self) -> tuple[_T, ...]:
        """Those that were kept."""
        return tuple(self._items)


class Problems(Listing[Problem]):
    """What is wrong, as it is found."""

    def __init__(self) -> None:
        super().__init__(MAX_LISTED_PROBLEMS)

    def note(self, where: str, error: Exception | str) -> None:
        """Note a problem and go on."""
        reason = reason_of(error) if isinstance(error, Exception) else error
        self.add(Problem(where=where, reason=reason))

    def count_more(self, count: int) -> None:
        """Count problems that somebody else did not list either."""
        self.count += count


class DecodeBudget:
    """How much memory the batches of one file may take, one after the other.

    Honest files take about their size. Hostile ones can let every batch be the same compressed
    bytes, and keep a reader busy for days.
    """

    def __init__(self, file_size: int) -> None:
        self._left = max(_DECODED_AT_LEAST, _DECODED_PER_BYTE * file_size)

    @property
    def is_spent(self) -> bool:
        """Whether decoding has to stop."""
        return self._left < 0

    def spend(self, size: int, *, source: str, offset: int) -> None:
        """Pay for bytes that were summed or decoded."""
        self._left -= size + _LEAST_COST
        if self.is_spent:
            reason = "its batches take far more memory than the file; the rest was not decoded"
            raise LimitExceeded(source, offset, reason)


def stat_mode(path: Path) -> int | None:
    """Type and permissions of a file on this machine. A ``Disk`` does not tell them."""
    return path.stat().st_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Where to look, and how much to list. Nothing here writes."""

    disk: Disk
    limit: int | None = None
    mode_of: Callable[[Path], int | None] = stat_mode

    def mode(self, path: Path) -> str | None:
        """The permissions, as ``0o640``."""
        mode = self.mode_of(path)
        return None if mode is None else f"{stat.S_IMODE(mode):#o}"

    def names(self, path: Path) -> list[str] | None:
        """The names in a directory; None when it is a file or not there."""
        try:
            return self.disk.list_directory(path)
        except (NotADirectoryError, FileNotFoundError):
            return None

    def check_regular(self, path: Path) -> None:
        """Refuse what would block a reader or never end: pipes, sockets, devices."""
        mode = self.mode_of(path)
        if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise FormatError(
                str(path), 0, "a pipe, a socket or a device; copy its bytes to a file first"
            )

    def load(self, path: Path) -> pa.Buffer:
        """The bytes of a file that may be cut while it is looked at."""
        self.check_regular(path)
        if self.disk.size(path) > _LARGEST_COPY:
            return self.disk.map(path)
        return self.disk.read(path)

    def map(self, path: Path) -> pa.Buffer:
        """The bytes of a file that is never changed."""
        self.check_regular(path)
        return self.disk.map(path)

    def file_fields(self, path: Path, data: pa.Buffer) -> dict[str, Any]:
        """The fields of ``FileDescription``."""
        return {
            "path": str(path),
            "mode": self.mode(path),
            "size": data.size,
            "sha256": hashlib.sha256(memoryview(data)).hexdigest(),
        }


def reason_of(error: Exception) -> str:
    """What is wrong, without the file that the reader knows already."""
    if isinstance(error, FormatError):
        return f"at byte {error.offset}: {error.reason}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
