"""Reading a segment in place: the file is mapped, batches are views into it.

Opening looks at the end of the file only: trailer, footer, directory. Nothing is believed before
its sum was checked, and nothing is summed twice:

* files with our extra sums: the metadata when it is opened, each stream when it is first asked for;
* files of the reference implementation: the whole file, when a batch is first asked for.

The sum and the batches come from the same mapping, so the file is brought into memory once. Batches
stay valid after the reader is gone and after the file was deleted.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import pyarrow as pa

from quiver.bundle import Payload, RecordBundle
from quiver.checksum import crc32
from quiver.disk import Disk
from quiver.errors import ChecksumMismatch, FormatError
from quiver.ipc import IpcFile, Validation
from quiver.segment.layout import Envelope, decode_envelope, verify_file_crc
from quiver.segment.tables import Manifest, StreamEntry, decode_directory


class SegmentReader:
    """One segment file, by bundle or by stream. Safe to use from several threads."""

    def __init__(
        self, data: pa.Buffer, *, source: str, validation: Validation = Validation.LAYOUT
    ) -> None:
        self._data = data
        self._source = source
        self._validation = validation
        self._verified = False
        self._files: dict[int, IpcFile] = {}
        self.envelope: Envelope = decode_envelope(data, source=source)
        if self.envelope.metadata_crc is None:
            # Without a sum of its own the metadata could lie about where things are.
            self.verify()
        directory = self.envelope.directory
        self.streams: tuple[StreamEntry, ...] = decode_directory(
            data.slice(directory.offset, directory.length), source=source, offset=directory.offset
        )
        self._by_id = {stream.stream_id: stream for stream in self.streams}
        self._check_streams()

    @classmethod
    def open(
        cls, disk: Disk, path: Path, *, validation: Validation = Validation.LAYOUT
    ) -> SegmentReader:
        """Map a segment file."""
        return cls(disk.map(path), source=str(path), validation=validation)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._data.size

    @property
    def bundle_count(self) -> int:
        """Bundles in the segment."""
        return self.envelope.bundle_count

    @cached_property
    def manifest(self) -> Manifest:
        """What each bundle is made of."""
        region = self.envelope.manifest
        manifest = Manifest(
            self._data.slice(region.offset, region.length),
            source=self._source,
            offset=region.offset,
        )
        if len(manifest) != self.bundle_count:
            raise FormatError(
                self._source,
                region.offset,
                f"the batch manifest has {len(manifest)} rows, the footer says {self.bundle_count}",
            )
        return manifest

    def bundle(self, index: int, slots: Collection[int] | None = None) -> RecordBundle:
        """A bundle, with all its slots or only those asked for; other streams are not touched.

        Its ingestion time is 0 when the file does not tell.
        """
        manifest = self.manifest
        payloads: dict[int, Payload] = {}
        for slot, stream_id, chunk in manifest.slot_refs(index):
            if slots is not None and slot not in slots:
                continue
            if slot in payloads:
                self._fail(f"has slot {slot} twice in bundle {index}")
            stream = self._by_id.get(stream_id)
            if stream is None or stream.slot_id != slot or chunk >= stream.chunk_count:
                self._fail(
                    f"refers to chunk {chunk} of stream {stream_id} for slot {slot}, "
                    "which the directory does not have"
                )
            payloads[slot] = Payload(self.batch(stream_id, chunk), stream.schema_fingerprint)
        return RecordBundle(
            payloads, max(0, manifest.ingestion_time_ns(index) or 0), manifest.item_count(index)
        )

    def batch(self, stream_id: int, chunk_index: int) -> pa.RecordBatch:
        """One chunk of a stream."""
        file = self._files.get(stream_id) or self._open_stream(stream_id)
        if not 0 <= chunk_index < file.batch_count:
            raise IndexError(
                f"{self._source}: stream {stream_id} has {file.batch_count} chunks, "
                f"there is no chunk {chunk_index}"
            )
        return file.batch(chunk_index, self._validation)

    def verify(self) -> None:
        """Sum the whole file and compare, once; later calls cost nothing."""
        if not self._verified:
            verify_file_crc(self._data, self.envelope.crc, source=self._source)
            self._verified = True

    def _fail(self, problem: str) -> NoReturn:
        raise FormatError(
            self._source, self.envelope.manifest.offset, f"the batch manifest {problem}"
        )

    def _open_stream(self, stream_id: int) -> IpcFile:
        if stream_id not in self._by_id:
            raise IndexError(f"{self._source}: there is no stream {stream_id}")
        stream = self._by_id[stream_id]
        data = self._data.slice(stream.byte_offset, stream.byte_length)
        self._verify_stream(stream, data)
        file = IpcFile(data, source=self._source, offset=stream.byte_offset)
        if file.batch_count != stream.chunk_count:
            raise FormatError(
                self._source,
                stream.byte_offset,
                f"stream {stream_id} has {file.batch_count} chunks, the directory says "
                f"{stream.chunk_count}",
            )
        self._files[stream_id] = file
        return file

    def _verify_stream(self, stream: StreamEntry, data: pa.Buffer) -> None:
        if self._verified:
            return
        if stream.crc32 is None:
            self.verify()
            return
        computed = crc32(data)
        if computed != stream.crc32:
            raise ChecksumMismatch(
                self._source,
                stream.byte_offset,
                stored=stream.crc32,
                computed=computed,
                what=f"stream {stream.stream_id}",
            )

    def _check_streams(self) -> None:
        if len(self.streams) != self.envelope.stream_count:
            raise FormatError(
                self._source,
                self.envelope.directory.offset,
                f"the directory has {len(self.streams)} streams, the footer says "
                f"{self.envelope.stream_count}",
            )
        for stream in self.streams:
            if stream.byte_offset + stream.byte_length > self.envelope.footer.offset:
                raise FormatError(
                    self._source,
                    self.envelope.directory.offset,
                    f"stream {stream.stream_id} is said to lie at {stream.byte_offset}.."
                    f"{stream.byte_offset + stream.byte_length}, outside the file's streams",
                )
