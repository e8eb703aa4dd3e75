r"""The first bytes of every WAL file.

======  ====  ==================  ===========================================================
offset  size  field               value
======  ====  ==================  ===========================================================
0       10    magic               ``QUIVER\0WAL``
10      2     version             1
12      2     header_size         38; a reader skips what a larger header adds
14      16    segment_cfg_hash    ``QUIVER_SEGCFG`` and three zero bytes; another value means
                                  that the slots mean something else, and is refused
30      8     wal_position_start  the log position of the first byte after the header
======  ====  ==================  ===========================================================

Integers are little-endian. The header carries no checksum.

A log position counts entry bytes since the log began, over all files and without their headers:
``wal_position_start + (offset in file - header_size)``. It names the same byte for ever, whatever
was rotated or deleted before it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from quiver.disk import BytesLike
from quiver.errors import FormatError, Truncated, UnsupportedVersion

MAGIC: Final = b"QUIVER\0WAL"
VERSION: Final = 1
HEADER_SIZE: Final = 38
SEGMENT_CFG_HASH: Final = b"QUIVER_SEGCFG\0\0\0"
MAX_POSITION: Final = 2**62
"""No log is as long as this: a larger position is damage."""

_LAYOUT = struct.Struct("<10sHH16sQ")


@dataclass(frozen=True, slots=True)
class WalHeader:
    """Where the entries of a file start, in the file and in the log."""

    wal_position_start: int
    header_size: int = HEADER_SIZE


def encode_header(header: WalHeader) -> bytes:
    """The 38 bytes of version 1."""
    return _LAYOUT.pack(MAGIC, VERSION, HEADER_SIZE, SEGMENT_CFG_HASH, header.wal_position_start)


def decode_header(data: BytesLike, *, source: str) -> WalHeader:
    """Read a header from the first bytes of a file."""
    view = memoryview(data)
    if len(view) < HEADER_SIZE:
        raise Truncated(source, 0, need=HEADER_SIZE, have=len(view), what="the WAL header")
    magic, version, header_size, cfg_hash, start = _LAYOUT.unpack_from(view)
    if magic != MAGIC:
        raise FormatError(source, 0, f"a WAL file starts with {MAGIC!r}, this one with {magic!r}")
    if version != VERSION:
        raise UnsupportedVersion(source, 10, f"WAL version {version}; this reader knows {VERSION}")
    if header_size < HEADER_SIZE:
        raise FormatError(source, 12, f"header_size {header_size} is below {HEADER_SIZE}")
    if header_size > len(view):
        raise Truncated(source, 12, need=header_size, have=len(view), what="the WAL header")
    if cfg_hash != SEGMENT_CFG_HASH:
        raise FormatError(
            source,
            14,
            f"segment_cfg_hash {cfg_hash.hex()} belongs to another slot layout; "
            "drain this log with the program that wrote it",
        )
    return WalHeader(start, header_size)
