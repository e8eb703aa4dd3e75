"""Fetching one batch that the manifest names. It holds no state, so it can run anywhere.

An entry may say more of its object than the format asks for (``Facts``); what it says is checked.
A batch that is missing, or not what its entry says, is a ``BatchLost``. A store that does not
answer is not: that batch may well be there.
"""

from __future__ import annotations

import google_crc32c

from quiver.buffer.batch import decode_batch
from quiver.buffer.bounded import BoundedObjects
from quiver.buffer.objects import Objects
from quiver.buffer.types import Batch, QueueEntry
from quiver.errors import (
    BatchLost,
    Conflict,
    FormatError,
    InvalidName,
    ObjectNotFound,
    ObjectsUnavailable,
)

FIRST_READ = 8 * 1024 * 1024
"""What is asked for of an object of unknown size: most batches come whole with one call."""


async def fetch_batch(
    objects: Objects, entry: QueueEntry, limit: int, *, attempt_timeout: float = 30.0
) -> Batch:
    """The batch of an entry, in one attempt; ``limit`` bounds it before and after decompression.

    Raises ``BatchLost`` or ``ObjectsUnavailable``.
    """
    bounded = BoundedObjects(objects, attempt_timeout)
    try:
        data = await _download(bounded, entry, limit)
    except ObjectNotFound as error:
        raise _lost(entry, "there is no such object") from error
    except InvalidName as error:
        raise _lost(entry, f"no object can have that name: {error}") from error
    _check(entry, data)
    try:
        records = decode_batch(data, source=entry.location, limit=limit)
    except FormatError as error:
        raise _lost(entry, f"at byte {error.offset}: {error.reason}") from error
    said = entry.facts.record_count
    if said is not None and said != len(records):
        raise _lost(entry, f"it holds {len(records)} records, the manifest says {said}")
    return Batch(entry, records)


async def _download(objects: Objects, entry: QueueEntry, limit: int) -> bytes:
    """All bytes of the object, but never more than ``limit`` of one whose size nobody stated."""
    path = entry.location
    stated = entry.facts.object_size
    if stated is not None:
        if stated > limit:
            raise _lost(entry, f"it has {stated} bytes, the limit is {limit}")
        whole = await objects.get(path)
        if whole is None:
            raise ObjectsUnavailable(f"{path}: the store answered without the object")
        return whole.data
    tail = await objects.get_tail(path, min(FIRST_READ, limit + 1))
    if tail is None:
        raise ObjectsUnavailable(f"{path}: the store answered without the object")
    if tail.size > limit:
        raise _lost(entry, f"it has {tail.size} bytes, the limit is {limit}")
    missing = tail.size - len(tail.data)
    if missing == 0:
        return tail.data
    try:
        head = await objects.get_range(path, 0, missing, version=tail.version)
    except Conflict as error:
        raise ObjectsUnavailable(f"{path}: it was written again while it was read") from error
    return head.data + tail.data


def _check(entry: QueueEntry, data: bytes) -> None:
    """Compare the bytes with what the entry says of them."""
    facts = entry.facts
    if facts.object_size is not None and len(data) != facts.object_size:
        reason = f"it has {len(data)} bytes, the manifest says {facts.object_size}"
        raise _lost(entry, reason)
    if facts.crc32c is not None:
        found = google_crc32c.value(data)
        if found != facts.crc32c:
            reason = f"its checksum is {found:08x}, the manifest says {facts.crc32c:08x}"
            raise _lost(entry, reason)


def _lost(entry: QueueEntry, reason: str) -> BatchLost:
    return BatchLost(entry.sequence, entry.location, reason)
