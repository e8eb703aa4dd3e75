"""The manifest of a queue: one object that lists the batches that nobody has consumed yet.

Entries one after the other, then a footer. Integers are little-endian, nothing is padded or summed.

==============  ====================  =====================================================
size            field                 value
==============  ====================  =====================================================
-- entry --
4               entry_len             bytes of the entry that follow
8               sequence              one more than that of the entry before
2               location_len          at least 1
location_len    location              UTF-8, from the root of the object store
4               metadata_count
per metadata:
4               start_index           0 first, then ascending
8               ingestion_time_ms     signed, since 1970
4               payload_len
payload_len     payload
-- up to entry_len --
any             extra                 of other versions: ignored, and kept; ours is below
-- footer --
4               entry_count
8               next_sequence         one more than that of the last entry, even when it is gone
8               epoch                 of the consumer that owns the queue; 0: nobody ever did
2               version               1
==============  ====================  =====================================================

What we put into ``extra``, when there is something to say:

==============  ====================  =====================================================
4               magic                 ``QvEF``
1               version               1
per fact:
1               tag                   1 object_size (u64), 2 record_count (u32), 3 crc32c (u32),
                                      4 producer_id (1 to 64 ASCII); others are ignored
2               length                of the value
length          value
==============  ====================  =====================================================

An ``extra`` that does not add up by this table is somebody else's: the entry has no facts then.
Facts help; they must not be what stops a queue.

Nothing here trusts the bytes. Whoever rewrites a manifest calls ``check`` first, so damage is never
appended to, shortened or carried on: an entry that is not counted, a length that reaches into the
next entry, a gap in the sequences, an empty location, all end in a ``FormatError`` that
names the byte.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Final, NamedTuple, NoReturn

from quiver.buffer.types import Facts, Metadata, NewEntry, QueueEntry
from quiver.errors import FormatError, LimitExceeded, Truncated, UnsupportedVersion

VERSION: Final = 1
FOOTER_SIZE: Final = 22
MAX_LOCATION: Final = 2**16 - 1
MAX_PRODUCER_ID: Final = 64
NO_EPOCH: Final = 2**64 - 1
"""What other implementations take for "no epoch yet": no consumer may have it."""

_MAX_U32 = 2**32 - 1
_MAX_U64 = 2**64 - 1
_FOOTER = struct.Struct("<IQQH")
_EPOCH_AT = 12
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<IQH")
_HEAD_SIZE = _HEAD.size
_ITEM = struct.Struct("<IqI")
_ITEM_SIZE = _ITEM.size
# The metadata count, and of the first item what is checked. Both heads are read before it is known
# that the entry is that long: what is read beyond the last entry is footer, which is longer.
_ITEMS_HEAD = struct.Struct("<II8xI")
_SMALLEST_ENTRY = _HEAD_SIZE + 1 + _LENGTH.size

_FACTS_HEAD = b"QvEF\x01"
_FACT = struct.Struct("<BH")
_FACT_VALUES = {1: struct.Struct("<Q"), 2: struct.Struct("<I"), 3: struct.Struct("<I")}
_PRODUCER_ID = 4
_NO_FACTS = Facts()

EMPTY: Final = _FOOTER.pack(0, 0, 0, VERSION)


class Footer(NamedTuple):
    """The end of a manifest."""

    entry_count: int
    next_sequence: int
    epoch: int

    def encode(self) -> bytes:
        return _FOOTER.pack(*self, VERSION)


# --- reading -----------------------------------------------------------------------------------


def decode_footer(tail: bytes, *, source: str) -> Footer:
    """The footer at the end of these bytes. Whether the entries agree is for ``check`` to say."""
    at = len(tail) - FOOTER_SIZE
    if at < 0:
        raise Truncated(source, 0, need=FOOTER_SIZE, have=len(tail), what="a manifest's footer")
    count, next_sequence, epoch, version = _FOOTER.unpack_from(tail, at)
    if version != VERSION:
        raise UnsupportedVersion(
            source, at + 20, f"the manifest has version {version}, this reader knows {VERSION}"
        )
    if count > next_sequence:
        reason = f"{count} entries are counted, only {next_sequence} sequences were ever given"
        raise FormatError(source, at, reason)
    return Footer(count, next_sequence, epoch)


def check(manifest: bytes, *, source: str) -> Footer:
    """Refuse a manifest that is not sound to its last byte."""
    return _walk(manifest, source)[0]


def locations(manifest: bytes, *, source: str) -> dict[str, int]:
    """The sequence of each location; the first one, where it was added more than once."""
    footer, found = _walk(manifest, source)
    sequences = range(footer.next_sequence - 1, _first(footer) - 1, -1)
    return dict(zip(reversed(found), sequences, strict=True))


def entries(
    manifest: bytes, *, source: str, after: int = -1, at_most: int | None = None
) -> tuple[QueueEntry, ...]:
    """The entries with a sequence above ``after``, or the first of them."""
    footer, places = _walk(manifest, source)
    skipped = min(footer.entry_count, max(0, after + 1 - _first(footer)))
    at = _skip(manifest, skipped)
    wanted = islice(places, skipped, None if at_most is None else skipped + at_most)
    found = []
    for sequence, location in enumerate(wanted, _first(footer) + skipped):
        end = at + 4 + _LENGTH.unpack_from(manifest, at)[0]
        items, extra_at = _items(manifest, at)
        extra = manifest[extra_at:end]
        facts = decode_facts(extra) if extra else _NO_FACTS
        found.append(QueueEntry(sequence, location, items, facts))
        at = end
    return tuple(found)


def _items(manifest: bytes, at: int) -> tuple[tuple[Metadata, ...], int]:
    """The metadata of an entry that was checked, and where it ends."""
    at += _HEAD_SIZE + _HEAD.unpack_from(manifest, at)[2]
    (count,) = _LENGTH.unpack_from(manifest, at)
    at += _LENGTH.size
    items = []
    for _ in range(count):
        index, time, size = _ITEM.unpack_from(manifest, at)
        start = at + _ITEM_SIZE
        at = start + size
        items.append(Metadata(index, time, manifest[start:at]))
    return tuple(items), at


def _first(footer: Footer) -> int:
    return footer.next_sequence - footer.entry_count


def _skip(manifest: bytes, count: int) -> int:
    """Where the entry after the first ``count`` starts, in a manifest that was checked."""
    at = 0
    length = _LENGTH.unpack_from
    for _ in range(count):
        at += 4 + length(manifest, at)[0]
    return at


# --- checking ----------------------------------------------------------------------------------


def _walk(manifest: bytes, source: str) -> tuple[Footer, list[str]]:
    """Check everything; the locations. The loop only finds a fault; ``_refuse`` says which it is.

    A location that comes twice is no fault: a producer of another kind that did not see the answer
    to its write adds it again, and the consumer drops repeats.
    """
    footer = decode_footer(manifest, source=source)
    end_of_entries = len(manifest) - FOOTER_SIZE
    if footer.entry_count * _SMALLEST_ENTRY > end_of_entries:
        raise LimitExceeded(
            source,
            end_of_entries,
            f"{footer.entry_count} entries are counted, {end_of_entries} bytes cannot hold them",
        )
    sequences = range(_first(footer), footer.next_sequence)
    found: list[str] = []
    head, items_head = _HEAD.unpack_from, _ITEMS_HEAD.unpack_from
    at = 0
    for expected in sequences:
        length, sequence, location_size = head(manifest, at)
        end = at + 4 + length
        location_end = at + _HEAD_SIZE + location_size
        if (
            sequence != expected
            or not location_size
            or location_end + 4 > end
            or end > end_of_entries
        ):
            _refuse(manifest, source, at, expected)
        count, index, size = items_head(manifest, location_end)
        if count and (index or location_end + 20 + size > end):
            _refuse(manifest, source, at, expected)
        if count > 1:
            _check_items(manifest, source, location_end, end, count)
        try:
            found.append(manifest[at + _HEAD_SIZE : location_end].decode())
        except UnicodeDecodeError as error:
            where = at + _HEAD_SIZE + error.start
            raise FormatError(source, where, "the location is not UTF-8") from error
        at = end
    if at != end_of_entries:
        reason = f"{end_of_entries - at} bytes belong to none of the {len(found)} counted entries"
        raise FormatError(source, at, reason)
    return footer, found


def _check_items(manifest: bytes, source: str, count_at: int, end: int, count: int) -> None:
    at = count_at + _LENGTH.size
    if count * _ITEM_SIZE > end - at:
        reason = f"{count} metadata items are counted, {end - at} bytes cannot hold them"
        raise LimitExceeded(source, count_at, reason)
    item = _ITEM.unpack_from
    last = -1
    for _ in range(count):
        if at + _ITEM_SIZE > end:
            raise Truncated(source, at, need=_ITEM_SIZE, have=end - at, what="metadata")
        index, _time, size = item(manifest, at)
        if index <= last or (last < 0 and index):
            raise FormatError(source, at, f"start_index {index} follows {max(last, 0)}")
        at += _ITEM_SIZE + size
        if at > end:
            raise Truncated(
                source, at - size, need=size, have=end - at + size, what="a metadata payload"
            )
        last = index


def _refuse(manifest: bytes, source: str, at: int, expected: int) -> NoReturn:
    """Say what is wrong with an entry."""
    left = len(manifest) - FOOTER_SIZE - at
    if left < _SMALLEST_ENTRY:
        raise Truncated(source, at, need=_SMALLEST_ENTRY, have=left, what="an entry that counts")
    length, sequence, location_size = _HEAD.unpack_from(manifest, at)
    if 4 + length > left:
        raise Truncated(source, at, need=4 + length, have=left, what="an entry")
    if sequence != expected and length >= _HEAD_SIZE - 4:
        raise FormatError(source, at + 4, f"sequence {sequence} where {expected} has to be")
    if not location_size:
        raise FormatError(source, at + 12, "the location is empty")
    need = _HEAD_SIZE + location_size + _LENGTH.size
    if need > 4 + length:
        raise Truncated(source, at, need=need, have=4 + length, what="location and metadata count")
    count_at = at + need - _LENGTH.size
    (count,) = _LENGTH.unpack_from(manifest, count_at)
    end = at + 4 + length
    if count and count_at + 20 <= end and (index := _LENGTH.unpack_from(manifest, count_at + 4)[0]):
        raise FormatError(source, count_at + 4, f"the first start_index is {index}, not 0")
    _check_items(manifest, source, count_at, end, count)
    raise FormatError(source, at, "the entry does not add up")


# --- writing -----------------------------------------------------------------------------------


def append(manifest: bytes, new: Sequence[NewEntry], *, source: str) -> bytes:
    """The manifest with new entries behind those that are there, which stay as they are."""
    footer, found = _walk(manifest, source)
    known = set(found)
    at = len(manifest) - FOOTER_SIZE
    if footer.entry_count + len(new) > _MAX_U32 or footer.next_sequence + len(new) > _MAX_U64:
        raise LimitExceeded(source, at, "the manifest cannot count any further")
    parts: list[bytes | memoryview] = [memoryview(manifest)[:at]]
    for sequence, entry in enumerate(new, footer.next_sequence):
        if entry.location in known:
            raise FormatError(source, at, f"location {entry.location!r} is in the queue already")
        known.add(entry.location)
        encoded = _encode_entry(entry, sequence, source, at)
        parts.append(encoded)
        at += len(encoded)
    after = Footer(
        footer.entry_count + len(new), footer.next_sequence + len(new), footer.epoch
    ).encode()
    return b"".join((*parts, after))


def dequeue(manifest: bytes, through: int, *, source: str) -> bytes:
    """The manifest without the entries up to this sequence. The others stay as they are."""
    footer = check(manifest, source=source)
    dropped = min(footer.entry_count, max(0, through + 1 - _first(footer)))
    if not dropped:
        return manifest
    kept = memoryview(manifest)[_skip(manifest, dropped) : -FOOTER_SIZE]
    after = footer._replace(entry_count=footer.entry_count - dropped)
    return b"".join((kept, after.encode()))


def set_epoch(manifest: bytes, epoch: int, *, source: str) -> bytes:
    """The manifest as owned by another consumer."""
    footer = check(manifest, source=source)
    at = len(manifest) - FOOTER_SIZE
    if not 0 <= epoch < NO_EPOCH:
        raise LimitExceeded(source, at + _EPOCH_AT, f"no consumer can have epoch {epoch}")
    return b"".join((memoryview(manifest)[:at], footer._replace(epoch=epoch).encode()))


def next_epoch(epoch: int) -> int:
    """The epoch that fences this one. After the last comes 0; ``NO_EPOCH`` is left out."""
    return (epoch + 1) % NO_EPOCH if epoch < NO_EPOCH else 0


def coalesce(metadata: Sequence[Metadata]) -> tuple[Metadata, ...]:
    """Merge neighbours with the same payload: an item holds until the next one anyway.

    The merged item has the ingestion time of the first, which is the oldest: a lag that is computed
    from it is never too small. The times of the others are lost.
    """
    if not metadata:
        return ()
    changes = (b for a, b in pairwise(metadata) if a.payload != b.payload)
    return (metadata[0], *changes)


def _encode_entry(entry: NewEntry, sequence: int, source: str, at: int) -> bytes:
    """An entry that ``check`` will not refuse. ``at`` is where it is going to be."""
    where = f"the new entry {entry.location!r}"
    try:
        location = entry.location.encode()
    except UnicodeEncodeError as error:
        raise FormatError(source, at, f"{where}: the location is not UTF-8") from error
    if not 0 < len(location) <= MAX_LOCATION:
        reason = f"{where[:80]}: the location takes {len(location)} bytes, not 1 to {MAX_LOCATION}"
        raise LimitExceeded(source, at, reason)
    parts = [location, _LENGTH.pack(len(entry.metadata))]
    last = -1
    for item in entry.metadata:
        if item.start_index <= last or (last < 0 and item.start_index):
            reason = f"{where}: start_index {item.start_index} follows {max(last, 0)}"
            raise FormatError(source, at, reason)
        last = item.start_index
        try:
            parts.append(_ITEM.pack(item.start_index, item.ingestion_time_ms, len(item.payload)))
        except struct.error as error:
            raise LimitExceeded(source, at, f"{where}: {item[:2]} does not fit: {error}") from error
        parts.append(item.payload)
    try:
        parts.append(encode_facts(entry.facts))
    except (struct.error, ValueError) as error:
        raise LimitExceeded(source, at, f"{where}: {entry.facts} do not fit: {error}") from error
    length = _HEAD_SIZE - 4 + sum(map(len, parts))
    if length > _MAX_U32:
        raise LimitExceeded(source, at, f"{where} takes {length} bytes, at most {_MAX_U32} fit")
    return b"".join((_HEAD.pack(length, sequence, len(location)), *parts))


# --- facts -------------------------------------------------------------------------------------


def encode_facts(facts: Facts) -> bytes:
    """The facts as ``extra`` of an entry; nothing when there are none."""
    if facts == _NO_FACTS:
        return b""
    parts = [_FACTS_HEAD]
    for (tag, form), value in zip(_FACT_VALUES.items(), facts[:3], strict=True):
        if value is not None:
            parts += (_FACT.pack(tag, form.size), form.pack(value))
    if facts.producer_id is not None:
        name = facts.producer_id.encode("ascii")
        if not 0 < len(name) <= MAX_PRODUCER_ID:
            raise ValueError(f"a producer id takes 1 to {MAX_PRODUCER_ID} bytes, not {len(name)}")
        parts += (_FACT.pack(_PRODUCER_ID, len(name)), name)
    return b"".join(parts)


def decode_facts(extra: bytes) -> Facts:
    """The facts in ``extra``. None at all if it is not ours, or not sound."""
    if not extra.startswith(_FACTS_HEAD):
        return _NO_FACTS
    numbers: dict[int, int] = {}
    producer_id = None
    at = len(_FACTS_HEAD)
    while at < len(extra):
        start = at + _FACT.size
        if start > len(extra):
            return _NO_FACTS
        tag, size = _FACT.unpack_from(extra, at)
        at = start + size
        if at > len(extra):
            return _NO_FACTS
        if form := _FACT_VALUES.get(tag):
            if size != form.size or tag in numbers:
                return _NO_FACTS
            (numbers[tag],) = form.unpack_from(extra, start)
        elif tag == _PRODUCER_ID:
            name = extra[start:at]
            if producer_id is not None or not (0 < size <= MAX_PRODUCER_ID and name.isascii()):
                return _NO_FACTS
            producer_id = name.decode()
    return Facts(numbers.get(1), numbers.get(2), numbers.get(3), producer_id)
