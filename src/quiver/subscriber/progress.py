r"""The progress file of one subscriber: which bundles it is done with.

``quiver.sub.<id>`` in the root of the store, replaced as a whole:

===========  ====  ======================  ======================================================
offset       size  field                   value
===========  ====  ======================  ======================================================
0            8     magic                   ``QUIVSUB\0``
8            2     version                 1
10           2     header_size             32; a reader skips what a larger header adds
12           2     flags                   see below
14           8     oldest_incomplete_seg   0 when nothing is incomplete
22           4     entry_count
26           6     reserved                zero
header_size  ...   entries                 ascending by segment
end - 4      4     crc32                   of all bytes before it
===========  ====  ======================  ======================================================

Each entry:

======  ====  ==============  ==================================================================
0       8     seg_seq         the segment
8       4     bundle_count    how many bundles it has
12      2     bitmap_words    ceil(bundle_count / 64)
14      8n    bitmap          bit i of word i / 64: bundle i is resolved (acked or dropped)
======  ====  ==============  ==================================================================

Integers are little-endian. Flags are data: ``KNOWN_FLAGS`` names those that have a meaning here,
and a file keeps the others when it is read and written again, as it keeps what a larger header
adds. Bytes between the last entry and the checksum are ignored.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from quiver.checksum import crc32
from quiver.disk import BytesLike, Disk, publish
from quiver.errors import (
    ChecksumMismatch,
    FormatError,
    InvalidBundle,
    InvalidName,
    LimitExceeded,
    Truncated,
    UnsupportedVersion,
)

MAGIC: Final = b"QUIVSUB\0"
VERSION: Final = 1
HEADER_SIZE: Final = 32
FILE_PREFIX: Final = "quiver.sub."
MAX_ENTRIES: Final = 1_000_000
MAX_BITMAP_WORDS: Final = 1024
MAX_BUNDLES: Final = MAX_BITMAP_WORDS * 64
MAX_FILE_SIZE: Final = 256 * 1024 * 1024

KNOWN_FLAGS: Final[Mapping[int, str]] = MappingProxyType({})
"""Bit of ``flags`` to its name. Version 1 defines none."""

_HEADER = struct.Struct("<8sHHHQI6x")
_ENTRY = struct.Struct("<QIH")
_CRC = struct.Struct("<I")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WINDOWS_NAMES: Final = frozenset(
    {"con", "prn", "aux", "nul"} | {f"{device}{n}" for device in ("com", "lpt") for n in range(10)}
)


@dataclass(frozen=True, slots=True)
class SegmentProgress:
    """One segment: a bit for each bundle, set when the bundle is resolved."""

    segment: int
    bundle_count: int
    resolved: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.segment < 2**64:
            raise InvalidBundle(f"segment number {self.segment} does not fit in 64 bits")
        if not 0 <= self.bundle_count <= MAX_BUNDLES:
            raise InvalidBundle(
                f"segment {self.segment} has {self.bundle_count} bundles; "
                f"progress can be kept for {MAX_BUNDLES}"
            )
        if self.resolved < 0 or self.resolved >> self.bundle_count:
            raise InvalidBundle(
                f"segment {self.segment} has {self.bundle_count} bundles, "
                "and one behind the last is marked as resolved"
            )

    def is_resolved(self, bundle: int) -> bool:
        """Whether the subscriber is done with a bundle."""
        return bool(self.resolved >> bundle & 1)

    @property
    def is_complete(self) -> bool:
        """Whether it is done with all of them."""
        return self.resolved.bit_count() == self.bundle_count

    @property
    def words(self) -> int:
        """64-bit words that the bitmap takes."""
        return -(-self.bundle_count // 64)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a progress file holds."""

    entries: tuple[SegmentProgress, ...] = ()
    oldest_incomplete_segment: int = 0
    flags: int = 0
    extension: bytes = b""
    """What a header larger than ours adds, kept as it is."""

    def flag_names(self) -> list[str]:
        """The set flags by name; ``bit 3`` for one without."""
        return [KNOWN_FLAGS.get(bit, f"bit {bit}") for bit in range(16) if self.flags >> bit & 1]


def encode_progress(progress: Progress) -> bytes:
    """The bytes of the file."""
    if len(progress.entries) > MAX_ENTRIES:
        raise InvalidBundle(f"progress is kept for at most {MAX_ENTRIES} segments")
    parts = [
        _HEADER.pack(
            MAGIC,
            VERSION,
            HEADER_SIZE + len(progress.extension),
            progress.flags,
            progress.oldest_incomplete_segment,
            len(progress.entries),
        ),
        progress.extension,
    ]
    previous = -1
    for entry in progress.entries:
        if entry.segment <= previous:
            raise InvalidBundle(f"segment {entry.segment} is listed after segment {previous}")
        previous = entry.segment
        parts.append(_ENTRY.pack(entry.segment, entry.bundle_count, entry.words))
        parts.append(entry.resolved.to_bytes(8 * entry.words, "little"))
    body = b"".join(parts)
    return body + _CRC.pack(crc32(body))


def decode_progress(data: BytesLike, *, source: str) -> Progress:
    """Read a progress file."""
    view = memoryview(data)
    end = len(view) - _CRC.size
    if end < HEADER_SIZE:
        need = HEADER_SIZE + _CRC.size
        raise Truncated(source, 0, need=need, have=len(view), what="a progress file")
    magic, version, header_size, flags, oldest, entry_count = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise FormatError(source, 0, f"a progress file starts with {MAGIC!r}, not {magic!r}")
    stored = _CRC.unpack_from(view, end)[0]
    computed = crc32(view[:end])
    if stored != computed:
        raise ChecksumMismatch(
            source, end, stored=stored, computed=computed, what="the progress file"
        )
    if version != VERSION:
        raise UnsupportedVersion(
            source, 8, f"progress file version {version}; this reader knows {VERSION}"
        )
    if not HEADER_SIZE <= header_size <= end:
        raise FormatError(source, 10, f"header_size {header_size} is not in {HEADER_SIZE}..{end}")
    if entry_count > MAX_ENTRIES:
        raise LimitExceeded(source, 22, f"{entry_count} segments; at most {MAX_ENTRIES} are read")
    entries = _decode_entries(view[:end], header_size, entry_count, source)
    return Progress(entries, oldest, flags, bytes(view[HEADER_SIZE:header_size]))


def _decode_entries(
    view: memoryview, offset: int, count: int, source: str
) -> tuple[SegmentProgress, ...]:
    entries: list[SegmentProgress] = []
    for _ in range(count):
        bitmap_at = offset + _ENTRY.size
        if bitmap_at > len(view):
            have = len(view) - offset
            raise Truncated(source, offset, need=_ENTRY.size, have=have, what="a segment's entry")
        segment, bundle_count, words = _ENTRY.unpack_from(view, offset)
        if bundle_count > MAX_BUNDLES or words != -(-bundle_count // 64):
            raise FormatError(
                source,
                offset + 8,
                f"{words} bitmap words for {bundle_count} bundles; at most {MAX_BUNDLES} bundles",
            )
        end = bitmap_at + 8 * words
        if end > len(view):
            have = len(view) - bitmap_at
            raise Truncated(source, bitmap_at, need=8 * words, have=have, what="a bitmap")
        if entries and segment <= entries[-1].segment:
            raise FormatError(
                source, offset, f"segment {segment} is listed after segment {entries[-1].segment}"
            )
        resolved = int.from_bytes(view[bitmap_at:end], "little") & ((1 << bundle_count) - 1)
        entries.append(SegmentProgress(segment, bundle_count, resolved))
        offset = end
    return tuple(entries)


def check_subscriber_id(subscriber_id: str) -> str:
    """The id itself, if it can safely be part of a file name on every system."""
    if not _ID.fullmatch(subscriber_id):
        raise InvalidName(
            f"subscriber id {subscriber_id[:80]!r} must be 1 to 64 letters, digits, '-' or '_'"
        )
    if subscriber_id.lower() in _WINDOWS_NAMES:
        raise InvalidName(f"subscriber id {subscriber_id!r} is a device name on Windows")
    return subscriber_id


def progress_path(root: Path, subscriber_id: str) -> Path:
    """Where a subscriber's progress is kept."""
    return root / f"{FILE_PREFIX}{check_subscriber_id(subscriber_id)}"


def load_progress(disk: Disk, path: Path) -> Progress:
    """Read a progress file from disk."""
    size = disk.size(path)
    if size > MAX_FILE_SIZE:
        raise LimitExceeded(str(path), 0, f"{size} bytes; at most {MAX_FILE_SIZE} are read")
    return decode_progress(disk.read(path), source=str(path))


def store_progress(disk: Disk, path: Path, progress: Progress) -> None:
    """Put a progress file in place, durably."""
    publish(disk, path, [encode_progress(progress)])
