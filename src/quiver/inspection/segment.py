"""What a segment file holds.

``SegmentReader`` refuses a file at the first thing that is wrong, as a reader must. Here each part
is tried by itself, so that damage in one does not hide the others. Every batch is decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from quiver.bundle import signal_of, slot_name
from quiver.checksum import crc32
from quiver.errors import ChecksumMismatch, FormatError, LimitExceeded
from quiver.inspection.records import (
    DecodeBudget,
    FileDescription,
    Listing,
    Problem,
    Problems,
    Record,
    View,
)
from quiver.ipc import IpcFile, Validation
from quiver.segment.layout import (
    Envelope,
    Region,
    decode_envelope,
    segment_sequence,
    verify_file_crc,
)
from quiver.segment.tables import BundleEntry, Manifest, SlotRef, StreamEntry, decode_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts(Record):
    """A row of the stream directory, and the schema of the stream."""

    id: int
    slot: int
    name: str
    fingerprint: str
    schema: str | None
    offset: int
    length: int
    rows: int
    chunks: int
    min_event_time_ns: int | None
    max_event_time_ns: int | None
    crc: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSlot(Record):
    """Where a bundle has the batch of one slot. ``rows`` is None when it cannot be decoded."""

    slot: int
    name: str
    stream: int
    chunk: int
    rows: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFacts(Record):
    """A row of the batch manifest."""

    index: int
    signal: str | None
    items: int | None
    ingestion_time_ns: int | None
    sequence: int | None
    min_event_time_ns: int | None
    max_event_time_ns: int | None
    slots: tuple[BundleSlot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentDescription(FileDescription):
    """A segment file. What could not be read is None; ``problems`` says why.

    ``streams`` and ``bundles`` are what the footer says, ``directory_rows`` and ``manifest_rows``
    what was found; the two tables list as many of those as wanted.
    """

    kind: ClassVar[str] = "segment"

    sequence: int | None
    version: int | None
    streams: int | None
    bundles: int | None
    directory: tuple[int, int] | None
    manifest: tuple[int, int] | None
    footer: tuple[int, int] | None
    crc: str | None
    metadata_crc: str | None
    checksum_verified: bool
    rows: int | None
    items: int | None
    directory_rows: int
    manifest_rows: int
    problem_count: int
    problems: tuple[Problem, ...]
    stream_table: tuple[StreamFacts, ...]
    bundle_table: tuple[BundleFacts, ...]

    @property
    def healthy(self) -> bool:
        return self.problem_count == 0


def describe_segment(view: View, path: Path) -> SegmentDescription:
    """Look into one segment file."""
    data = view.map(path)
    walk = SegmentWalk(data, source=str(path), limit=view.limit)
    walk.run()
    envelope = walk.envelope
    return SegmentDescription(
        **view.file_fields(path, data),
        sequence=segment_sequence(path.name),
        version=envelope.version if envelope else None,
        streams=envelope.stream_count if envelope else None,
        bundles=envelope.bundle_count if envelope else None,
        directory=_region(envelope.directory) if envelope else None,
        manifest=_region(envelope.manifest) if envelope else None,
        footer=_region(envelope.footer) if envelope else None,
        crc=f"{envelope.crc:08x}" if envelope else None,
        metadata_crc=_hex(envelope.metadata_crc) if envelope else None,
        checksum_verified=walk.verified,
        rows=walk.row_count,
        items=walk.item_count,
        directory_rows=walk.streams.count,
        manifest_rows=walk.bundles.count,
        problem_count=walk.problems.count,
        problems=walk.problems.items,
        stream_table=walk.streams.items,
        bundle_table=walk.bundles.items,
    )


class SegmentWalk:
    """One walk through a segment, noting what is wrong on the way."""

    def __init__(self, data: pa.Buffer, *, source: str, limit: int | None) -> None:
        self._data = data
        self._source = source
        self._budget = DecodeBudget(data.size)
        self._chunk_rows: dict[int, list[int]] = {}
        self._by_id: dict[int, StreamEntry] = {}
        self.problems = Problems()
        self.streams = Listing[StreamFacts](limit)
        self.bundles = Listing[BundleFacts](limit)
        self.envelope: Envelope | None = None
        self.verified = False
        self.row_count: int | None = None
        self.item_count: int | None = None

    def run(self) -> None:
        try:
            self.envelope = decode_envelope(self._data, source=self._source)
        except FormatError as error:
            self.problems.note("footer", error)
            return
        try:
            verify_file_crc(self._data, self.envelope.crc, source=self._source)
            self.verified = True
        except ChecksumMismatch as error:
            self.problems.note("file", error)
        self._read_streams(self.envelope)
        self._read_bundles(self.envelope)

    # --- streams ------------------------------------------------------------------------------

    def _read_streams(self, envelope: Envelope) -> None:
        region = envelope.directory
        try:
            streams = decode_directory(
                self._data.slice(region.offset, region.length),
                source=self._source,
                offset=region.offset,
            )
        except FormatError as error:
            self.problems.note("directory", error)
            return
        if len(streams) != envelope.stream_count:
            reason = f"it has {len(streams)} streams, the footer says {envelope.stream_count}"
            self.problems.note("directory", reason)
        self._by_id = {stream.stream_id: stream for stream in streams}
        self.row_count = sum(stream.row_count for stream in streams)
        for stream in streams:
            schema = None
            try:
                file = self._open_stream(stream, envelope)
                schema = schema_text(file.schema)
                self._chunk_rows[stream.stream_id] = []
                self._decode_stream(stream, file)
            except FormatError as error:
                self.problems.note(f"stream {stream.stream_id}", error)
            self.streams.add(_stream_facts(stream, schema))

    def _open_stream(self, stream: StreamEntry, envelope: Envelope) -> IpcFile:
        offset, length = stream.byte_offset, stream.byte_length
        if offset + length > envelope.footer.offset:
            reason = f"it is said to lie at {offset}..{offset + length}, behind the footer's start"
            raise FormatError(self._source, envelope.directory.offset, reason)
        data = self._data.slice(offset, length)
        self._budget.spend(length, source=self._source, offset=offset)
        computed = crc32(data)
        if stream.crc32 is not None and stream.crc32 != computed:
            reason = f"its checksum is {stream.crc32:08x} but its bytes sum to {computed:08x}"
            self.problems.note(f"stream {stream.stream_id}", reason)
        return IpcFile(data, source=self._source, offset=offset)

    def _decode_stream(self, stream: StreamEntry, file: IpcFile) -> None:
        """Decode all batches; their rows are kept, they are not."""
        offset = stream.byte_offset
        if file.batch_count != stream.chunk_count:
            reason = f"it has {file.batch_count} chunks, the directory says {stream.chunk_count}"
            raise FormatError(self._source, offset, reason)
        rows = self._chunk_rows[stream.stream_id]
        for index in range(file.batch_count):
            if self._budget.is_spent:
                raise LimitExceeded(self._source, offset, f"chunk {index} was not decoded")
            batch = file.batch(index, Validation.FULL)
            rows.append(batch.num_rows)
            size = batch.get_total_buffer_size()
            self._budget.spend(size, source=self._source, offset=offset)
        if sum(rows) != stream.row_count:
            reason = f"it has {sum(rows)} rows, the directory says {stream.row_count}"
            raise FormatError(self._source, offset, reason)

    # --- bundles ------------------------------------------------------------------------------

    def _read_bundles(self, envelope: Envelope) -> None:
        region = envelope.manifest
        try:
            manifest = Manifest(
                self._data.slice(region.offset, region.length),
                source=self._source,
                offset=region.offset,
            )
        except FormatError as error:
            self.problems.note("manifest", error)
            return
        if len(manifest) != envelope.bundle_count:
            reason = f"it has {len(manifest)} bundles, the footer says {envelope.bundle_count}"
            self.problems.note("manifest", reason)
        for bundle in self._rows_of(manifest):
            if bundle.item_count is not None:
                self.item_count = (self.item_count or 0) + bundle.item_count
            self._check_refs(bundle)
            self.bundles.add(self._bundle_facts(bundle))

    def _rows_of(self, manifest: Manifest) -> Iterator[BundleEntry]:
        for index in range(len(manifest)):
            try:
                yield manifest[index]
            except FormatError as error:
                self.problems.note(f"bundle {index}", error)

    def _check_refs(self, bundle: BundleEntry) -> None:
        for ref in bundle.slot_refs if self._by_id else ():
            stream = self._by_id.get(ref.stream_id)
            if (
                stream is None
                or stream.slot_id != ref.slot_id
                or ref.chunk_index >= stream.chunk_count
            ):
                self.problems.note(
                    f"bundle {bundle.bundle_index}",
                    f"it refers to chunk {ref.chunk_index} of stream {ref.stream_id} for slot "
                    f"{ref.slot_id}, which the directory does not have",
                )

    def _bundle_facts(self, bundle: BundleEntry) -> BundleFacts:
        signal = bundle.signal or signal_of(ref.slot_id for ref in bundle.slot_refs)
        return BundleFacts(
            index=bundle.bundle_index,
            signal=signal.value if signal else None,
            items=bundle.item_count,
            ingestion_time_ns=bundle.ingestion_time_ns,
            sequence=bundle.sequence,
            min_event_time_ns=bundle.min_event_time_ns,
            max_event_time_ns=bundle.max_event_time_ns,
            slots=tuple(self._slot_facts(bundle.slot_refs)),
        )

    def _slot_facts(self, refs: Iterable[SlotRef]) -> Iterator[BundleSlot]:
        for ref in refs:
            rows = self._chunk_rows.get(ref.stream_id, [])
            yield BundleSlot(
                slot=ref.slot_id,
                name=slot_name(ref.slot_id),
                stream=ref.stream_id,
                chunk=ref.chunk_index,
                rows=rows[ref.chunk_index] if ref.chunk_index < len(rows) else None,
            )


def schema_text(schema: pa.Schema) -> str:
    """The fields of a schema on one line, as Arrow writes their types."""
    return ", ".join(
        f"{field.name}: {field.type}" + ("" if field.nullable else " not null") for field in schema
    )


def _stream_facts(stream: StreamEntry, schema: str | None) -> StreamFacts:
    return StreamFacts(
        id=stream.stream_id,
        slot=stream.slot_id,
        name=slot_name(stream.slot_id),
        fingerprint=stream.schema_fingerprint.hex(),
        schema=schema,
        offset=stream.byte_offset,
        length=stream.byte_length,
        rows=stream.row_count,
        chunks=stream.chunk_count,
        min_event_time_ns=stream.min_event_time_ns,
        max_event_time_ns=stream.max_event_time_ns,
        crc=_hex(stream.crc32),
    )


def _region(region: Region) -> tuple[int, int]:
    return region.offset, region.length


def _hex(crc: int | None) -> str | None:
    return None if crc is None else f"{crc:08x}"
