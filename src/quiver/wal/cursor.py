r"""The cursor: the log position before which everything is safe in segments.

``quiver.wal.cursor``, 24 bytes, replaced as a whole:

======  ====  ============  ================================================================
offset  size  field         value
======  ====  ============  ================================================================
0       8     magic         ``QUIVER\0T``
8       2     version       1
10      2     size          24; a later version may be longer, the fields below stay put
12      8     wal_position  the first position that recovery still needs
size-4  4     crc32         of all bytes before it
======  ====  ============  ================================================================

A cursor that cannot be read costs time and repeats, never data: recovery starts at the beginning.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from quiver.checksum import crc32
from quiver.disk import BytesLike, Disk, publish
from quiver.errors import ChecksumMismatch, FormatError, Truncated, UnsupportedVersion
from quiver.wal.header import MAX_POSITION

MAGIC: Final = b"QUIVER\0T"
VERSION: Final = 1
CURSOR_SIZE: Final = 24
FILE_NAME: Final = "quiver.wal.cursor"

_LAYOUT = struct.Struct("<8sHHQ")
_CRC = struct.Struct("<I")


def encode_cursor(wal_position: int) -> bytes:
    """The 24 bytes of version 1."""
    body = _LAYOUT.pack(MAGIC, VERSION, CURSOR_SIZE, wal_position)
    return body + _CRC.pack(crc32(body))


def decode_cursor(data: BytesLike, *, source: str) -> int:
    """The position in a cursor file, of this version or a later one."""
    view = memoryview(data)
    if len(view) < CURSOR_SIZE:
        raise Truncated(source, 0, need=CURSOR_SIZE, have=len(view), what="the cursor")
    magic, version, size, position = _LAYOUT.unpack_from(view)
    if magic != MAGIC:
        raise FormatError(source, 0, f"a cursor starts with {MAGIC!r}, this file with {magic!r}")
    if version == 0:
        raise UnsupportedVersion(source, 8, "cursor version 0 does not exist")
    if size < CURSOR_SIZE or (version == VERSION and size != CURSOR_SIZE):
        raise FormatError(source, 10, f"a cursor of version {version} cannot have size {size}")
    if size > len(view):
        raise Truncated(source, 10, need=size, have=len(view), what="the cursor")
    stored = _CRC.unpack_from(view, size - _CRC.size)[0]
    computed = crc32(view[: size - _CRC.size])
    if stored != computed:
        raise ChecksumMismatch(
            source, size - _CRC.size, stored=stored, computed=computed, what="the cursor"
        )
    if position > MAX_POSITION:
        raise FormatError(source, 12, f"no log is as long as position {position} says")
    return int(position)


def load_cursor(disk: Disk, directory: Path) -> int | None:
    """The stored position; None when none was stored yet."""
    path = directory / FILE_NAME
    if not disk.exists(path):
        return None
    return decode_cursor(disk.read(path, 0, 2**16), source=str(path))


def store_cursor(disk: Disk, directory: Path, wal_position: int) -> None:
    """Put a position in place, durably."""
    publish(disk, directory / FILE_NAME, [encode_cursor(wal_position)])
