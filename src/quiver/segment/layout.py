r"""The segment container: where its parts lie, and the sums that guard them.

====================  =========  ==============================================================
part                  size       content
====================  =========  ==============================================================
streams               any        Arrow IPC files, each at an offset divisible by 64, zeros between
stream directory      any        Arrow IPC file, one batch: ``quiver.segment.tables``
batch manifest        any        Arrow IPC file, one batch: ``quiver.segment.tables``
footer                34 or 42   see below
trailer               16         see below
====================  =========  ==============================================================

Footer, version 1 (a reader ignores bytes that a longer footer adds):

======  ====  =================  ==============================================================
offset  size  field              value
======  ====  =================  ==============================================================
0       2     version            1
2       4     stream_count
6       4     bundle_count
10      8     directory_offset
18      4     directory_length
22      8     manifest_offset
30      4     manifest_length
34      4     tag                ``QMC1``: the next field is there (ours; not in reference files)
38      4     metadata_crc32     of directory, manifest and bytes 0 to 33 of the footer
======  ====  =================  ==============================================================

Trailer:

======  ====  =================  ==============================================================
0       4     footer_size
4       8     magic              ``QUIVER\0S``
12      4     crc32              of the whole file but these four bytes
======  ====  =================  ==============================================================

Integers are little-endian. The two extra sums (``metadata_crc32`` here and ``crc32`` of each stream
in the directory) let a reader believe what it looks at without reading the rest of the file.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

from quiver.checksum import crc32
from quiver.disk import BytesLike
from quiver.errors import (
    ChecksumMismatch,
    FormatError,
    LimitExceeded,
    Truncated,
    UnsupportedVersion,
)

MAGIC: Final = b"QUIVER\0S"
VERSION: Final = 1
STREAM_ALIGNMENT: Final = 64
MAX_STREAMS: Final = 100_000
MAX_BUNDLES: Final = 10_000_000
MAX_BUNDLES_WRITTEN: Final = 65_536
"""What a progress file can address: its bitmaps have at most 1,024 words of 64 bits."""

_FOOTER = struct.Struct("<HIIQIQI")
_EXTENSION = struct.Struct("<4sI")
_TRAILER = struct.Struct("<I8sI")
_EXTENSION_TAG = b"QMC1"
_CRC_SIZE = 4
_FILE_NAME = re.compile(r"([0-9]{1,20})\.qseg")


def segment_file_name(sequence: int) -> str:
    """``0000000000000007.qseg`` for 7: names sort as numbers do."""
    return f"{sequence:016}.qseg"


def segment_sequence(file_name: str) -> int | None:
    """The number in a segment's file name; None when it is not such a name."""
    match = _FILE_NAME.fullmatch(file_name)
    return int(match[1]) if match and int(match[1]) < 2**64 else None


@dataclass(frozen=True, slots=True)
class Region:
    """A range of bytes in the file."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset behind its last byte."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Envelope:
    """What footer and trailer say about a segment file."""

    stream_count: int
    bundle_count: int
    directory: Region
    manifest: Region
    footer: Region
    metadata_crc: int | None
    crc: int
    version: int = VERSION


def encode_footer(
    *, stream_count: int, bundle_count: int, directory: Region, manifest: Region, metadata_crc: int
) -> bytes:
    """The footer with its extension. ``metadata_crc`` covers directory and manifest so far."""
    footer = _FOOTER.pack(
        VERSION,
        stream_count,
        bundle_count,
        directory.offset,
        directory.length,
        manifest.offset,
        manifest.length,
    )
    return footer + _EXTENSION.pack(_EXTENSION_TAG, crc32(footer, metadata_crc))


def encode_trailer(footer_size: int, crc: int) -> bytes:
    """The last 16 bytes. ``crc`` covers everything before them."""
    head = _TRAILER.pack(footer_size, MAGIC, 0)[:-_CRC_SIZE]
    return head + crc32(head, crc).to_bytes(_CRC_SIZE, "little")


def decode_envelope(data: BytesLike, *, source: str) -> Envelope:
    """Read footer and trailer, check that the parts lie inside the file, verify what can be."""
    view = memoryview(data)
    trailer_at = len(view) - _TRAILER.size
    if trailer_at < 0:
        raise Truncated(source, 0, need=_TRAILER.size, have=len(view), what="a segment's trailer")
    footer_size, magic, crc = _TRAILER.unpack_from(view, trailer_at)
    if magic != MAGIC:
        raise FormatError(
            source,
            trailer_at + 4,
            f"a segment ends with {MAGIC!r} and a sum, this file with {magic!r}",
        )
    if not _FOOTER.size <= footer_size <= trailer_at:
        raise FormatError(
            source, trailer_at, f"a footer of {footer_size} bytes in a file of {len(view)}"
        )
    footer = Region(trailer_at - footer_size, footer_size)
    version, streams, bundles, *places = _FOOTER.unpack_from(view, footer.offset)
    if version != VERSION:
        raise UnsupportedVersion(
            source, footer.offset, f"segment version {version}; this reader knows {VERSION}"
        )
    if streams > MAX_STREAMS or bundles > MAX_BUNDLES:
        raise LimitExceeded(
            source,
            footer.offset + 2,
            f"{streams} streams and {bundles} bundles; at most {MAX_STREAMS} and {MAX_BUNDLES}",
        )
    directory, manifest = Region(*places[:2]), Region(*places[2:])
    for name, region in (("directory", directory), ("manifest", manifest)):
        if region.end > footer.offset:
            raise FormatError(
                source,
                footer.offset + 10,
                f"the {name} is said to lie at {region.offset}..{region.end}, "
                f"behind the footer's start at {footer.offset}",
            )
    metadata_crc = _metadata_crc(view, footer, directory, manifest, source)
    return Envelope(streams, bundles, directory, manifest, footer, metadata_crc, crc)


def _metadata_crc(
    view: memoryview, footer: Region, directory: Region, manifest: Region, source: str
) -> int | None:
    """The sum of directory, manifest and footer, verified; None in files that do not have it."""
    if footer.length < _FOOTER.size + _EXTENSION.size:
        return None
    tag, stored = _EXTENSION.unpack_from(view, footer.offset + _FOOTER.size)
    if tag != _EXTENSION_TAG:
        return None
    computed = crc32(view[directory.offset : directory.end])
    computed = crc32(view[manifest.offset : manifest.end], computed)
    computed = crc32(view[footer.offset : footer.offset + _FOOTER.size], computed)
    if stored != computed:
        raise ChecksumMismatch(
            source,
            footer.offset + _FOOTER.size + 4,
            stored=stored,
            computed=computed,
            what="the metadata of the segment",
        )
    return int(stored)


def verify_file_crc(data: BytesLike, crc: int, *, source: str) -> None:
    """Sum the whole file, once."""
    view = memoryview(data)
    end = len(view) - _CRC_SIZE
    computed = crc32(view[:end])
    if computed != crc:
        raise ChecksumMismatch(source, end, stored=crc, computed=computed, what="the segment")
