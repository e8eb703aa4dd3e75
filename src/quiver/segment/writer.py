"""From bundles in memory to one immutable segment file.

``OpenSegment`` gathers bundles; nothing is encoded while it is open, the batches are only held.
``write_segment`` makes the file: each (slot, fingerprint, schema) becomes a stream, or several
where dictionaries ask for it, and the tables say how to put the bundles together again. One stream
at a time is encoded, so the extra memory is that of the largest stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from quiver.bundle import RecordBundle, Slot
from quiver.checksum import crc32
from quiver.disk import BytesLike, Disk, publish
from quiver.errors import InvalidBundle
from quiver.ipc import encode_file
from quiver.segment.dictionaries import split_and_unify
from quiver.segment.layout import (
    MAX_BUNDLES_WRITTEN,
    STREAM_ALIGNMENT,
    Region,
    encode_footer,
    encode_trailer,
)
from quiver.segment.tables import (
    BundleEntry,
    SlotRef,
    StreamEntry,
    encode_directory,
    encode_manifest,
)

SYNC_EVERY: Final = 1024 * 1024
"""With one sync at the end, the longest append to a log beside it took half as long again."""

_EVENT_TIME_COLUMN: Final = {
    Slot.LOGS: "time_unix_nano",
    Slot.SPANS: "start_time_unix_nano",
    Slot.NUMBER_DATA_POINTS: "time_unix_nano",
    Slot.SUMMARY_DATA_POINTS: "time_unix_nano",
    Slot.HISTOGRAM_DATA_POINTS: "time_unix_nano",
    Slot.EXP_HISTOGRAM_DATA_POINTS: "time_unix_nano",
}


class _Span(NamedTuple):
    """The earliest and latest event time, where known."""

    earliest: int | None = None
    latest: int | None = None

    def __or__(self, other: object) -> _Span:
        if not isinstance(other, _Span):
            return NotImplemented
        times = [t for t in (*self, *other) if t is not None]
        return _Span(min(times), max(times)) if times else self


@dataclass(slots=True)
class _Accumulator:
    """The batches of one slot that have the same fingerprint and exactly the same schema."""

    slot: int
    fingerprint: bytes
    schema: pa.Schema
    batches: list[pa.RecordBatch] = field(default_factory=list)


class _Chunk(NamedTuple):
    """A batch before it has a place in the file."""

    slot: int
    accumulator: int
    place: int


@dataclass(frozen=True, slots=True)
class _Held:
    """What is remembered of a bundle beside its batches."""

    chunks: tuple[_Chunk, ...]
    bundle: RecordBundle
    sequence: int | None


class OpenSegment:
    """Bundles that will become one segment, in order of arrival."""

    def __init__(self) -> None:
        self._accumulators: list[_Accumulator] = []
        self._by_key: dict[tuple[int, bytes], list[int]] = {}
        self._bundles: list[_Held] = []
        self.estimated_size = 0
        """Bytes that the batches refer to; the file will be a little larger, or smaller."""

    @property
    def bundle_count(self) -> int:
        """Bundles taken so far."""
        return len(self._bundles)

    @property
    def stream_count(self) -> int:
        """Streams as they are now; unifying dictionaries may add some."""
        return len(self._accumulators)

    def append(
        self, bundle: RecordBundle, sequence: int | None = None, size: int | None = None
    ) -> int:
        """Take a bundle and its number in the log; its index in the segment.

        ``size`` is about how many bytes it has, for those who know; it is counted otherwise.
        """
        if len(self._bundles) >= MAX_BUNDLES_WRITTEN:
            raise InvalidBundle(
                f"a segment takes {MAX_BUNDLES_WRITTEN} bundles and is full: finalise it"
            )
        chunks = []
        for slot, payload in bundle.payloads.items():
            accumulator = self._accumulator(slot, payload.fingerprint, payload.batch.schema)
            batches = self._accumulators[accumulator].batches
            chunks.append(_Chunk(slot, accumulator, len(batches)))
            batches.append(payload.batch)
        if size is None:
            size = sum(payload.batch.nbytes for payload in bundle.payloads.values())
        self.estimated_size += size
        self._bundles.append(_Held(tuple(chunks), bundle, sequence))
        return len(self._bundles) - 1

    def _accumulator(self, slot: int, fingerprint: bytes, schema: pa.Schema) -> int:
        """The place for a batch.

        Schemas that differ only in nullability or metadata have the same fingerprint, and still
        need streams of their own.
        """
        places = self._by_key.setdefault((slot, fingerprint), [])
        for place in places:
            if self._accumulators[place].schema.equals(schema, check_metadata=True):
                return place
        self._accumulators.append(_Accumulator(slot, fingerprint, schema))
        places.append(len(self._accumulators) - 1)
        return places[-1]

    def encode(self) -> Iterator[BytesLike]:
        """The bytes of the segment file, piece by piece, in order."""
        return _Encoder(self._accumulators, self._bundles).pieces()


def write_segment(
    disk: Disk, path: Path, segment: OpenSegment, *, sync_every: int | None = SYNC_EVERY
) -> int:
    """Publish the segment under its name, read-only and durable; its size in bytes.

    ``sync_every`` is for those who append to a log beside it; alone, one sync at the end is faster.
    """
    if segment.bundle_count == 0:
        raise InvalidBundle(f"{path}: a segment without bundles is not written")
    return publish(disk, path, segment.encode(), read_only=True, sync_every=sync_every)


class _Encoder:
    """Writes once, from left to right, and sums on the way."""

    def __init__(self, accumulators: list[_Accumulator], bundles: list[_Held]) -> None:
        self._accumulators = accumulators
        self._bundles = bundles
        self._offset = 0
        self._crc = 0
        self._streams: list[StreamEntry] = []
        self._places: list[list[SlotRef]] = []
        self._event_times: list[list[_Span]] = []

    def pieces(self) -> Iterator[BytesLike]:
        for accumulator in self._accumulators:
            yield from self._accumulated(accumulator)
        directory_data = encode_directory(self._streams)
        directory = Region(self._offset, directory_data.size)
        yield self._count(directory_data)
        manifest_data = encode_manifest([self._manifest_row(i) for i in range(len(self._bundles))])
        manifest = Region(self._offset, manifest_data.size)
        yield self._count(manifest_data)
        footer = encode_footer(
            stream_count=len(self._streams),
            bundle_count=len(self._bundles),
            directory=directory,
            manifest=manifest,
            metadata_crc=crc32(manifest_data, crc32(directory_data)),
        )
        yield self._count(footer)
        yield encode_trailer(len(footer), self._crc)

    def _accumulated(self, accumulator: _Accumulator) -> Iterator[BytesLike]:
        """The stream or streams of one accumulator; notes where each of its batches went."""
        times = [_event_times(accumulator.slot, batch) for batch in accumulator.batches]
        places: list[SlotRef] = []
        for run in split_and_unify(accumulator.batches):
            padding = -self._offset % STREAM_ALIGNMENT
            if padding:
                yield self._count(bytes(padding))
            data = encode_file(accumulator.schema, run)
            stream_id = len(self._streams)
            span = _Span()
            for time in times[len(places) : len(places) + len(run)]:
                span |= time
            places += [SlotRef(accumulator.slot, stream_id, i) for i in range(len(run))]
            self._streams.append(
                StreamEntry(
                    stream_id,
                    accumulator.slot,
                    accumulator.fingerprint,
                    self._offset,
                    data.size,
                    sum(batch.num_rows for batch in run),
                    len(run),
                    crc32(data),
                    *span,
                )
            )
            yield self._count(data)
        self._places.append(places)
        self._event_times.append(times)

    def _manifest_row(self, index: int) -> BundleEntry:
        held = self._bundles[index]
        span = _Span()
        for chunk in held.chunks:
            span |= self._event_times[chunk.accumulator][chunk.place]
        return BundleEntry(
            index,
            tuple(self._places[chunk.accumulator][chunk.place] for chunk in held.chunks),
            held.bundle.item_count,
            held.bundle.ingestion_time_ns,
            held.sequence,
            held.bundle.signal,
            *span,
        )

    def _count(self, piece: BytesLike) -> BytesLike:
        self._crc = crc32(piece, self._crc)
        self._offset += len(piece)
        return piece


def _event_times(slot: int, batch: pa.RecordBatch) -> _Span:
    """Earliest and latest event time in the column that carries it, if the slot has one."""
    name = _EVENT_TIME_COLUMN.get(slot)  # type: ignore[call-overload]
    index = batch.schema.get_field_index(name) if name else -1
    if index < 0:
        return _Span()
    column: pa.Array[Any] = batch.column(index)
    try:
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ns")).view(pa.int64())
    except pa.ArrowInvalid:  # in a coarser unit, a time that nanoseconds cannot express
        return _Span()
    if not pa.types.is_int64(column.type):
        return _Span()
    bounds = pc.min_max(column)
    return _Span(bounds["min"].as_py(), bounds["max"].as_py())
