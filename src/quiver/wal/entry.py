"""One entry of the log: a bundle, framed and summed.

==========  ====================  =========================================================
size        field                 value
==========  ====================  =========================================================
4           entry_len             bytes of the body; excludes itself and the checksum
-- body --
1           entry_type            0 = bundle; others are skipped by their length
8           ingestion_ts_nanos    signed, since 1970
8           sequence              one more than that of the entry before
8           slot_bitmap           bit n: slot n is present
per slot, in the order of the bundle's descriptor:
2           slot_id
32          schema_fingerprint
4           row_count
4           payload_len
payload_len payload               Arrow IPC stream: schema, dictionaries, one batch, end marker
-- end of body --
4           crc32                 of the body
==========  ====================  =========================================================

Integers are little-endian. Nothing is padded, so the buffers of a batch read from here lie at any
address. ``item_count`` is not stored: it is unknown after a replay.

Writing is in two steps because the sequence number is given last: ``prepare_entry`` does the work
and sums the payloads, wherever the bundle comes from; ``PreparedEntry.seal`` adds the number and
combines the sums, in the one place that writes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa

from quiver.bundle import SLOT_COUNT, Payload, RecordBundle, slot_name
from quiver.checksum import crc32, crc32_combine
from quiver.disk import BytesLike
from quiver.errors import FormatError, InvalidBundle, Truncated
from quiver.ipc import Validation, decode_stream, encode_stream

MAX_ENTRY_SIZE: Final = 256 * 1024 * 1024
MAX_SEQUENCE: Final = 2**63 - 1
"""Nobody counts this far: a larger number is damage, and the next one would not fit."""
FRAME_SIZE: Final = 8
BUNDLE_TYPE: Final = 0

LENGTH: Final = struct.Struct("<I")
_HEAD = struct.Struct("<IBqQQ")
_BODY_HEAD = struct.Struct("<BqQQ")
_SLOT = struct.Struct("<H32sII")
BODY_HEAD_SIZE: Final = _BODY_HEAD.size
# What a NamedTuple's own constructor calls in the end; half the time, and it is done for every
# entry of a log.
_new = tuple.__new__


@dataclass(frozen=True, slots=True)
class PreparedEntry:
    """An entry that lacks nothing but its sequence number."""

    ingestion_time_ns: int
    slot_bitmap: int
    slots: list[BytesLike]
    slots_size: int
    slots_crc: int

    @property
    def size(self) -> int:
        """Bytes on disk, frame included."""
        return FRAME_SIZE + BODY_HEAD_SIZE + self.slots_size

    def seal(self, sequence: int) -> list[BytesLike]:
        """The entry as buffers to be written one after the other."""
        head = _HEAD.pack(
            BODY_HEAD_SIZE + self.slots_size,
            BUNDLE_TYPE,
            self.ingestion_time_ns,
            sequence,
            self.slot_bitmap,
        )
        crc = crc32_combine(crc32(memoryview(head)[4:]), self.slots_crc, self.slots_size)
        return [head, *self.slots, LENGTH.pack(crc)]


def prepare_entry(bundle: RecordBundle) -> PreparedEntry:
    """Serialise and sum a bundle."""
    buffers: list[BytesLike] = []
    bitmap = 0
    for slot, payload in bundle.payloads.items():
        try:
            payload.batch.validate()
            stream = encode_stream(payload.batch)
        except pa.ArrowException as error:
            raise InvalidBundle(f"{slot_name(slot)} cannot be serialised: {error}") from error
        size = sum(map(len, stream))
        if size > MAX_ENTRY_SIZE:
            raise InvalidBundle(_too_large(size))
        rows = payload.batch.num_rows
        buffers.append(_SLOT.pack(slot, payload.fingerprint, rows, size))
        buffers += stream
        bitmap |= 1 << slot
    crc = 0
    for buffer in buffers:
        crc = crc32(buffer, crc)
    entry = PreparedEntry(bundle.ingestion_time_ns, bitmap, buffers, sum(map(len, buffers)), crc)
    if entry.size - FRAME_SIZE > MAX_ENTRY_SIZE:
        raise InvalidBundle(_too_large(entry.size - FRAME_SIZE))
    return entry


def _too_large(size: int) -> str:
    return f"the bundle takes {size} bytes in the log, at most {MAX_ENTRY_SIZE} fit: split it"


class SlotBlock(NamedTuple):
    """One slot of an entry, its batch not decoded yet."""

    slot: int
    fingerprint: bytes
    row_count: int
    payload: pa.Buffer
    offset: int
    """Where the payload starts in the file."""


class WalEntry(NamedTuple):
    """A bundle entry whose checksum was verified."""

    ingestion_time_ns: int
    sequence: int
    slot_bitmap: int
    slots: tuple[SlotBlock, ...]
    source: str

    def bundle(self, validation: Validation = Validation.FULL) -> RecordBundle:
        """Decode the batches; they keep the bytes of the file alive."""
        payloads = {}
        for slot, fingerprint, row_count, payload, offset in self.slots:
            batch = decode_stream(payload, source=self.source, offset=offset, validation=validation)
            if batch.num_rows != row_count:
                raise FormatError(
                    self.source,
                    offset,
                    f"{slot_name(slot)} says {row_count} rows and holds {batch.num_rows}",
                )
            payloads[slot] = Payload(batch, fingerprint)
        return RecordBundle(payloads, self.ingestion_time_ns)


def decode_body(
    data: pa.Buffer, start: int, end: int, *, source: str, view: memoryview | None = None
) -> WalEntry:
    """Read the body of a bundle entry that lies at ``start:end`` in the bytes of a file.

    ``view`` is one of ``data``, for those who have it already.
    """
    view = memoryview(data) if view is None else view
    if end - start < BODY_HEAD_SIZE:
        raise Truncated(source, start, need=BODY_HEAD_SIZE, have=end - start, what="an entry")
    _type, time_ns, sequence, bitmap = _BODY_HEAD.unpack_from(view, start)
    if sequence > MAX_SEQUENCE:
        raise FormatError(source, start + 9, f"sequence number {sequence} is not possible")
    blocks = []
    seen = 0
    position = start + BODY_HEAD_SIZE
    for _ in range(bitmap.bit_count()):
        payload_at = position + _SLOT.size
        if payload_at > end:
            raise Truncated(source, position, need=_SLOT.size, have=end - position, what="a slot")
        slot, fingerprint, rows, length = _SLOT.unpack_from(view, position)
        if length > end - payload_at:
            raise Truncated(
                source, position, need=length, have=end - payload_at, what="the payload of a slot"
            )
        if slot >= SLOT_COUNT or not bitmap >> slot & 1 or seen >> slot & 1:
            raise FormatError(source, position, f"slot {slot} is not one that the bitmap announces")
        seen |= 1 << slot
        payload = data.slice(payload_at, length)
        blocks.append(_new(SlotBlock, (slot, fingerprint, rows, payload, payload_at)))
        position = payload_at + length
    if position != end:
        raise FormatError(source, position, f"{end - position} bytes behind the last slot")
    return _new(WalEntry, (max(0, time_ns), sequence, bitmap, tuple(blocks), source))
