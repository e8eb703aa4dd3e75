"""A batch: the records that a producer uploads as one object.

==========  ====================  =========================================================
size        field                 value
==========  ====================  =========================================================
-- block, compressed as a whole or not at all --
4           length                of the record; 0 is a record too
length      record
-- footer, never compressed --
1           compression           0 none, 1 zstd
4           record_count
2           version               1
==========  ====================  =========================================================

Integers are little-endian. There is no checksum: the manifest may hold one (``batch_crc32c``).
Bytes after the last record are ignored, as by other readers: they are room for extensions.

A compressed block is one zstd frame or several, with or without their sizes. It is decompressed in
pieces so small that a bomb is noticed soon after it is over the limit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import google_crc32c
import zstandard

from quiver.config import BatchCompression
from quiver.errors import FormatError, LimitExceeded, Truncated, UnsupportedVersion

VERSION: Final = 1
FOOTER_SIZE: Final = 7
MAX_RECORDS: Final = 2**32 - 1
MAX_RECORD: Final = 2**32 - 1
ZSTD_LEVEL: Final = 3

_FOOTER = struct.Struct("<BIH")
_LENGTH = struct.Struct("<I")
_CODES = {BatchCompression.NONE: 0, BatchCompression.ZSTD: 1}
_NONE = _CODES[BatchCompression.NONE]
_ZSTD = _CODES[BatchCompression.ZSTD]
_PIECE = 1024
"""Bytes that are decompressed at a time: at most to 32 MiB, because four bytes are 128 KiB at best.
The frames are not asked for their sizes, which may be absent or wrong."""


def encode_batch(records: Sequence[bytes], compression: BatchCompression) -> bytes:
    """The records as an object to upload."""
    sizes = list(map(len, records))
    if len(sizes) > MAX_RECORDS or max(sizes, default=0) > MAX_RECORD:
        reason = f"a batch holds at most {MAX_RECORDS} records of at most {MAX_RECORD} bytes"
        raise LimitExceeded("a new batch", 0, reason)
    parts: list[bytes] = [b""] * (2 * len(sizes) + 1)
    parts[0:-1:2] = map(_LENGTH.pack, sizes)
    parts[1::2] = records
    footer = _FOOTER.pack(_CODES[compression], len(sizes), VERSION)
    if compression is BatchCompression.NONE:
        parts[-1] = footer
        return b"".join(parts)
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(b"".join(parts)) + footer


def decode_batch(data: bytes, *, source: str, limit: int) -> tuple[bytes, ...]:
    """The records of an object, which has at most ``limit`` bytes, compressed and not."""
    if len(data) > limit:
        raise LimitExceeded(source, limit, f"the batch takes {len(data)} bytes, allowed: {limit}")
    end = len(data) - FOOTER_SIZE
    if end < 0:
        raise Truncated(source, 0, need=FOOTER_SIZE, have=len(data), what="a batch's footer")
    compression, count, version = _FOOTER.unpack_from(data, end)
    if version != VERSION:
        raise UnsupportedVersion(
            source, end + 5, f"the batch has version {version}, this reader knows {VERSION}"
        )
    if compression == _NONE:
        return _records(data, end, count, source, "batch")
    if compression != _ZSTD:
        raise UnsupportedVersion(source, end, f"compression {compression} is not known")
    block = _decompress(memoryview(data)[:end], source, limit)
    return _records(block, len(block), count, source, "decompressed batch")


def batch_crc32c(data: bytes) -> int:
    """The sum of an object as it is uploaded, for the manifest."""
    return int(google_crc32c.value(data))


def _records(block: bytes, end: int, count: int, source: str, what: str) -> tuple[bytes, ...]:
    if count * _LENGTH.size > end:
        reason = f"{count} records are counted, {end} bytes of the {what} cannot hold them"
        raise LimitExceeded(source, end, reason)
    length = _LENGTH.unpack_from
    records = []
    at = 0
    for _ in range(count):
        start = at + _LENGTH.size
        if start > end:
            what = f"a record's length in the {what}"
            raise Truncated(source, at, need=_LENGTH.size, have=end - at, what=what)
        at = start + length(block, at)[0]
        if at > end:
            what = f"a record in the {what}"
            raise Truncated(source, start, need=at - start, have=end - start, what=what)
        records.append(block[start:at])
    return tuple(records)


# --- zstd --------------------------------------------------------------------------------------


def _decompress(block: memoryview, source: str, limit: int) -> bytes:
    """All frames, one after the other. A reader over all of them would not say that one is cut."""
    at = 0
    try:
        claimed = zstandard.get_frame_parameters(block).content_size if block else 0
        if claimed > limit and claimed != zstandard.CONTENTSIZE_UNKNOWN:
            reason = f"the batch claims {claimed} bytes when decompressed, allowed: {limit}"
            raise LimitExceeded(source, 0, reason)
        decompressor = zstandard.ZstdDecompressor()
        found: list[bytes] = []
        size = 0
        while at < len(block):
            frame = decompressor.decompressobj()
            while not frame.eof:
                piece = block[at : at + _PIECE]
                if not piece:
                    raise FormatError(source, at, "the last zstd frame has no end")
                found.append(frame.decompress(piece))
                at += len(piece)
                size += len(found[-1])
                if size > limit:
                    reason = f"the batch takes more than {limit} bytes when decompressed"
                    raise LimitExceeded(source, at, reason)
            at -= len(frame.unused_data)
    except zstandard.ZstdError as error:
        raise FormatError(source, at, f"the block is not zstd: {error}") from error
    return b"".join(found)
