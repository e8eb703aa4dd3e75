"""What producers and their committer say to each other, over TCP.

Both send frames; integers are little-endian.

==========  ==============  ================================================================
size        field           value
==========  ==============  ================================================================
4           length          bytes that follow, at most 4 MiB
1           version         1
1           kind            1 append, 2 done, 3 refused
8           request_id      that of the request, in its answer too; 0: whatever was asked
-- append --
4           age_ms          since the oldest of its batches was uploaded
4           patience_ms     how long the producer waits for the answer
2           path_len
path_len    manifest_path   of the queue that it means
rest        entries         a manifest that holds them, from sequence 0
-- done --
4           count           of the entries
8 each      sequence        where they are in the manifest
-- refused --
1           unclear         1: some may be in the manifest all the same
rest        reason          UTF-8
==========  ==============  ================================================================

A producer sends the next request after the answer to the last one. There is no authentication:
whoever reaches the port may name batches. Keep it on a network that only producers are on.
"""

from __future__ import annotations

import asyncio
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from quiver.buffer import manifest
from quiver.buffer.types import NewEntry
from quiver.errors import FormatError, LimitExceeded, Truncated, UnsupportedVersion

VERSION: Final = 1
MAX_FRAME: Final = 4 * 1024 * 1024
MAX_REASON: Final = 2000

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BBQ")
_APPEND = struct.Struct("<IIH")
_COUNT = struct.Struct("<I")
_MAX_U32 = 2**32 - 1


class Kind(IntEnum):
    """What a frame is."""

    APPEND = 1
    DONE = 2
    REFUSED = 3


class Append(NamedTuple):
    """A producer asks for its batches to be named in the manifest."""

    request_id: int
    age_ms: int
    patience_ms: int
    manifest_path: str
    entries: tuple[NewEntry, ...]

    def encode(self) -> bytes:
        """As a frame."""
        path = self.manifest_path.encode()
        return _frame(
            Kind.APPEND,
            self.request_id,
            _APPEND.pack(min(self.age_ms, _MAX_U32), min(self.patience_ms, _MAX_U32), len(path)),
            path,
            manifest.append(manifest.EMPTY, self.entries, source="a request"),
        )


class Done(NamedTuple):
    """They are in it, at these places."""

    request_id: int
    sequences: tuple[int, ...]

    def encode(self) -> bytes:
        """As a frame."""
        count = len(self.sequences)
        return _frame(
            Kind.DONE,
            self.request_id,
            _COUNT.pack(count),
            struct.pack(f"<{count}Q", *self.sequences),
        )


class Refused(NamedTuple):
    """They are not known to be in it."""

    request_id: int
    unclear: bool
    reason: str

    def encode(self) -> bytes:
        """As a frame."""
        reason = self.reason[:MAX_REASON].encode(errors="replace")
        return _frame(Kind.REFUSED, self.request_id, bytes([self.unclear]), reason)


Message = Append | Done | Refused


def _frame(kind: Kind, request_id: int, *parts: bytes) -> bytes:
    length = _HEAD.size + sum(map(len, parts))
    return b"".join((_LENGTH.pack(length), _HEAD.pack(VERSION, kind, request_id), *parts))


async def read_frame(
    reader: asyncio.StreamReader, *, source: str, idle: float | None, whole: float | None
) -> bytes | None:
    """The next frame, without its length. None: the other side has ended.

    It may take ``idle`` seconds until it begins, and then ``whole`` until it is here.
    """
    try:
        async with asyncio.timeout(idle):
            head = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            have = len(error.partial)
            raise Truncated(source, 0, need=_LENGTH.size, have=have, what="a length") from error
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise LimitExceeded(source, 0, f"a frame of {length} bytes, {MAX_FRAME} are allowed")
    try:
        async with asyncio.timeout(whole):
            return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        have = len(error.partial)
        raise Truncated(source, _LENGTH.size, need=length, have=have, what="a frame") from error


def decode(frame: bytes, *, source: str) -> Message:
    """What a frame says."""
    if len(frame) < _HEAD.size:
        raise Truncated(source, 0, need=_HEAD.size, have=len(frame), what="a frame's head")
    version, kind, request_id = _HEAD.unpack_from(frame)
    if version != VERSION:
        raise UnsupportedVersion(source, 0, f"a frame of version {version}, known is {VERSION}")
    body = frame[_HEAD.size :]
    if kind == Kind.APPEND:
        return _decode_append(request_id, body, source)
    if kind == Kind.DONE:
        return Done(request_id, _decode_sequences(body, source))
    if kind == Kind.REFUSED:
        if not body:
            raise Truncated(source, _HEAD.size, need=1, have=0, what="a refusal")
        return Refused(request_id, bool(body[0]), body[1:].decode(errors="replace"))
    raise FormatError(source, 1, f"a frame of kind {kind} is not known")


def _decode_append(request_id: int, body: bytes, source: str) -> Append:
    if len(body) < _APPEND.size:
        raise Truncated(source, _HEAD.size, need=_APPEND.size, have=len(body), what="a request")
    age_ms, patience_ms, path_size = _APPEND.unpack_from(body)
    end = _APPEND.size + path_size
    try:
        path = body[_APPEND.size : end].decode()
    except UnicodeDecodeError as error:
        raise FormatError(source, _HEAD.size, "the manifest's path is not UTF-8") from error
    entries = tuple(
        NewEntry(entry.location, entry.metadata, entry.facts)
        for entry in manifest.entries(body[end:], source=source)
    )
    if not entries:
        raise FormatError(source, _HEAD.size + end, "a request without entries")
    return Append(request_id, age_ms, patience_ms, path, entries)


def _decode_sequences(body: bytes, source: str) -> tuple[int, ...]:
    if len(body) < _COUNT.size:
        raise Truncated(source, _HEAD.size, need=_COUNT.size, have=len(body), what="a count")
    (count,) = _COUNT.unpack_from(body)
    need = _COUNT.size + 8 * count
    if len(body) != need:
        raise Truncated(source, _HEAD.size, need=need, have=len(body), what="the sequences")
    return struct.unpack_from(f"<{count}Q", body, _COUNT.size)
