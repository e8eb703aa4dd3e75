"""Segment files put together from parts, so that each part can be wrong on its own."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pyarrow as pa

from quiver.segment.layout import STREAM_ALIGNMENT, Region, encode_footer, encode_trailer
from quiver.segment.tables import (
    BundleEntry,
    SlotRef,
    StreamEntry,
    encode_directory,
    encode_manifest,
)

TRAILER_SIZE = 16
FOOTER_SIZE = 42


@dataclass(frozen=True)
class Part:
    """One stream: an IPC file, and what the directory says about it."""

    data: bytes
    rows: int
    slot: int = 30
    chunks: int = 1
    fingerprint: bytes = bytes(32)


Codec: TypeAlias = Literal["zstd", "lz4"]


def ipc_file(
    batches: Sequence[pa.RecordBatch], codec: Codec | None = None, *, deltas: bool = False
) -> bytes:
    options = pa.ipc.IpcWriteOptions(compression=codec, emit_dictionary_deltas=deltas)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def ipc_stream(batch: pa.RecordBatch, codec: Codec | None = None) -> bytes:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def part(*batches: pa.RecordBatch, slot: int = 30, codec: Codec | None = None) -> Part:
    rows = sum(batch.num_rows for batch in batches)
    return Part(ipc_file(batches, codec), rows, slot, len(batches))


def place(parts: Sequence[Part]) -> tuple[bytes, list[StreamEntry]]:
    """The streams one after the other, and their rows in the directory."""
    out = b""
    streams = []
    for index, item in enumerate(parts):
        out += bytes(-len(out) % STREAM_ALIGNMENT)
        streams.append(
            StreamEntry(
                index,
                item.slot,
                item.fingerprint,
                len(out),
                len(item.data),
                item.rows,
                item.chunks,
                zlib.crc32(item.data),
            )
        )
        out += item.data
    return out, streams


def one_bundle_per_chunk(parts: Sequence[Part]) -> list[BundleEntry]:
    refs = [
        SlotRef(item.slot, stream, chunk)
        for stream, item in enumerate(parts)
        for chunk in range(item.chunks)
    ]
    return [BundleEntry(index, (ref,)) for index, ref in enumerate(refs)]


def build(
    parts: Sequence[Part],
    *,
    directory: bytes | None = None,
    manifest: bytes | None = None,
    stream_count: int | None = None,
    bundle_count: int | None = None,
) -> bytes:
    """A segment with correct sums; ``directory`` and ``manifest`` replace what fits the parts."""
    out, streams = place(parts)
    bundles = one_bundle_per_chunk(parts)
    if directory is None:
        directory = bytes(encode_directory(streams))
    if manifest is None:
        manifest = bytes(encode_manifest(bundles))
    return enclose(
        out,
        directory,
        manifest,
        stream_count=len(streams) if stream_count is None else stream_count,
        bundle_count=len(bundles) if bundle_count is None else bundle_count,
    )


def enclose(
    streams: bytes, directory: bytes, manifest: bytes, *, stream_count: int, bundle_count: int
) -> bytes:
    at = len(streams)
    footer = encode_footer(
        stream_count=stream_count,
        bundle_count=bundle_count,
        directory=Region(at, len(directory)),
        manifest=Region(at + len(directory), len(manifest)),
        metadata_crc=zlib.crc32(manifest, zlib.crc32(directory)),
    )
    body = streams + directory + manifest + footer
    return body + encode_trailer(len(footer), zlib.crc32(body))


def reference_footer(
    streams: bytes, regions: tuple[int, int, int, int], *, counts: tuple[int, int] = (1, 1)
) -> bytes:
    """What the reference implementation writes: 34 bytes of footer, one sum over everything."""
    body = streams + struct.pack("<HIIQIQI", 1, *counts, *regions)
    return body + encode_trailer(34, zlib.crc32(body))
