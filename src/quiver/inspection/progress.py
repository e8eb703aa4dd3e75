"""What a progress file holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar, Final

from quiver.errors import FormatError, LimitExceeded
from quiver.inspection.records import FileDescription, Record, View, reason_of
from quiver.subscriber.progress import (
    FILE_PREFIX,
    MAX_FILE_SIZE,
    Progress,
    SegmentProgress,
    decode_progress,
)

MAX_SHOWN_BYTES: Final = 1024
"""Files up to this size are shown byte for byte as well."""

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEntry(Record):
    """One segment: bit i of ``words`` is set when bundle i is resolved."""

    seg: int
    bundles: int
    resolved: int
    pending: int
    words: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressDescription(FileDescription):
    """A progress file. The numbers are 0 when it cannot be read."""

    kind: ClassVar[str] = "progress"

    problem: str | None
    subscriber: str | None
    flags: int
    flag_names: tuple[str, ...]
    oldest_incomplete_segment: int
    segment_count: int
    resolved: int
    pending: int
    entries: tuple[ProgressEntry, ...]
    hex: str | None

    @property
    def healthy(self) -> bool:
        return self.problem is None


def describe_progress(view: View, path: Path) -> ProgressDescription:
    """Look into a progress file."""
    data = view.load(path)
    progress, problem = Progress(), None
    try:
        if data.size > MAX_FILE_SIZE:
            reason = f"{data.size} bytes; at most {MAX_FILE_SIZE} are read"
            raise LimitExceeded(str(path), 0, reason)
        progress = decode_progress(data, source=str(path))
    except FormatError as error:
        problem = reason_of(error)
    resolved = sum(entry.resolved.bit_count() for entry in progress.entries)
    return ProgressDescription(
        **view.file_fields(path, data),
        problem=problem,
        subscriber=subscriber_of(path.name),
        flags=progress.flags,
        flag_names=tuple(progress.flag_names()),
        oldest_incomplete_segment=progress.oldest_incomplete_segment,
        segment_count=len(progress.entries),
        resolved=resolved,
        pending=sum(entry.bundle_count for entry in progress.entries) - resolved,
        entries=tuple(_entry_facts(entry) for entry in islice(progress.entries, view.limit)),
        hex=data.to_pybytes().hex() if data.size <= MAX_SHOWN_BYTES else None,
    )


def subscriber_of(name: str) -> str | None:
    """The subscriber whose progress a file of this name holds."""
    return name.removeprefix(FILE_PREFIX) if name.startswith(FILE_PREFIX) else None


def _entry_facts(entry: SegmentProgress) -> ProgressEntry:
    resolved = entry.resolved.bit_count()
    return ProgressEntry(
        seg=entry.segment,
        bundles=entry.bundle_count,
        resolved=resolved,
        pending=entry.bundle_count - resolved,
        words=tuple(entry.resolved >> 64 * i & _WORD for i in range(entry.words)),
    )
