"""Bodies of requests as they were before compression, never more than a given number of bytes.

A body of a few kilobytes can stand for gigabytes. Nothing here makes more than one byte above the
limit, except zstd without a size in its header, which makes less than a megabyte more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import zstandard
from isal import igzip_lib

from quiver.pipeline.receivers.answers import Reason, Refusal

_MAX_MEMBERS: Final = 16
"""Compressed bodies in a row. Each costs a copy of the rest."""
_MIN_WINDOW: Final = 8 * 1024 * 1024
"""What every zstd decoder is asked to support."""
_PIECE: Final = 16
"""Bytes of zstd that become at most a few blocks of 128 KiB: three bytes can be a block."""
_PIECE_GROWTH: Final = 128 * 1024 // 3
_LARGEST_PIECE: Final = 16 * 1024


def _gunzip(body: bytes, limit: int) -> bytes:
    made = b""
    for _ in range(_MAX_MEMBERS):
        part, body = _inflate(body, igzip_lib.DECOMP_GZIP, limit - len(made))
        made = made + part if made else part
        if not body:
            return made
    raise Refusal(Reason.MALFORMED, f"gzip: more than {_MAX_MEMBERS} members: send one")


def _undeflate(body: bytes, limit: int) -> bytes:
    """Deflate in a zlib wrapper, as the standard says, or bare, as some clients send it."""
    try:
        made, rest = _inflate(body, igzip_lib.DECOMP_ZLIB, limit)
    except Refusal as refusal:
        if refusal.reason is Reason.TOO_LARGE:
            raise
        made, rest = _inflate(body, igzip_lib.DECOMP_DEFLATE, limit)
    if rest:
        raise Refusal(Reason.MALFORMED, f"deflate: {len(rest)} bytes follow the end")
    return made


def _inflate(body: bytes, wrapper: int, limit: int) -> tuple[bytes, bytes]:
    """What was made, and what follows.

    Not with ``isal_zlib``: it forgets some bytes that follow.
    """
    stream = igzip_lib.IgzipDecompressor(flag=wrapper)
    try:
        made = stream.decompress(body, limit + 1)
    except igzip_lib.IsalError as error:  # type: ignore[misc] # it is one
        raise Refusal(Reason.MALFORMED, f"it cannot be decompressed: {error}") from None
    if len(made) > limit:
        raise too_large(limit)
    if not stream.eof:
        raise Refusal(Reason.MALFORMED, "the compressed body ends too early")
    return made, stream.unused_data


def _unzstd(body: bytes, limit: int) -> bytes:
    try:
        size = zstandard.frame_content_size(body)
        if size > limit:
            raise too_large(limit)
        if size > 0:
            try:
                return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
            except zstandard.ZstdError:
                pass  # several frames, or damage: found out below
        return _unzstd_by_pieces(body, limit)
    except zstandard.ZstdError as error:
        raise Refusal(Reason.MALFORMED, f"zstd: it cannot be decompressed: {error}") from None


def _unzstd_by_pieces(body: bytes, limit: int) -> bytes:
    """The library does not bound what a piece becomes, so the pieces are small."""
    window = max(_MIN_WINDOW, 1 << (limit - 1).bit_length())
    decompressor = zstandard.ZstdDecompressor(max_window_size=window)
    made: list[bytes] = []
    left = limit
    pos = 0
    frames = 0
    while pos < len(body):
        frames += 1
        if frames > _MAX_MEMBERS:
            raise Refusal(Reason.MALFORMED, f"zstd: more than {_MAX_MEMBERS} frames: send one")
        frame = decompressor.decompressobj()
        while not frame.eof:
            if pos >= len(body):
                raise Refusal(Reason.MALFORMED, "the compressed body ends too early")
            size = min(_LARGEST_PIECE, max(_PIECE, left // _PIECE_GROWTH))
            piece = body[pos : pos + size]
            part = frame.decompress(piece)
            pos += len(piece) - len(frame.unused_data)
            left -= len(part)
            if left < 0:
                raise too_large(limit)
            made.append(part)
    return b"".join(made)


def too_large(limit: int) -> Refusal:
    """A body that is larger than allowed."""
    return Refusal(
        Reason.TOO_LARGE, f"the request has more than {limit} bytes: send smaller batches"
    )


_DECODERS: Final[Mapping[str, Callable[[bytes, int], bytes]]] = MappingProxyType(
    {"gzip": _gunzip, "x-gzip": _gunzip, "deflate": _undeflate, "zstd": _unzstd}
)
ENCODINGS: Final = frozenset(_DECODERS)


def decompress(encoding: str, body: bytes, limit: int) -> bytes:
    """The body as it was; ``Refusal`` when it is damaged, or larger than ``limit``."""
    return _DECODERS[encoding](body, limit)
