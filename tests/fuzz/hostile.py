"""Small inputs that ask for much: memory, time, or trust. Each runs in a process of its own.

``name: (kind, bytes)``, the kind being a key of ``decoders.DECODERS``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

import pyarrow as pa
from tests.fuzz import arrow_bytes as arrow
from tests.fuzz.corpus import frame, wal_entry, wal_file
from tests.fuzz.segments import Part, build, ipc_file

TERABYTE: Final = 2**40


def _int64_batch(*, codec: int | None = None) -> arrow.Table:
    return arrow.batch(2, [(2, 0)], [(0, 0), (0, 64)], codec=codec)


def _claiming_message() -> bytes:
    return arrow.message(arrow.RECORD_BATCH, _int64_batch(codec=arrow.ZSTD), arrow.claim(TERABYTE))


def compressed_claim() -> bytes:
    """A compressed buffer that says it becomes a terabyte."""
    return arrow.stream([arrow.int64("a")], _claiming_message())


def compressed_claim_in_a_file() -> bytes:
    return arrow.file([arrow.int64("a")], [_claiming_message()])


def compressed_claim_in_a_log() -> bytes:
    return wal_file(wal_entry(0, {3: (2, compressed_claim())}))


def compressed_claim_in_a_segment() -> bytes:
    return build([Part(compressed_claim_in_a_file(), rows=2)])


def compressed_claim_in_a_dictionary() -> bytes:
    data = arrow.dictionary_batch(0, _int64_batch(codec=arrow.ZSTD))
    return arrow.stream(
        [arrow.int64("a", dictionary_id=0)],
        arrow.message(arrow.DICTIONARY_BATCH, data, arrow.claim(TERABYTE)),
        arrow.message(arrow.RECORD_BATCH, arrow.batch(2, [(2, 0)], [(0, 0), (0, 2)]), bytes(8)),
    )


def _version_4() -> bytes:
    """Before compression had a field of its own, it stood in the metadata of the message."""
    return arrow.message(
        arrow.RECORD_BATCH,
        _int64_batch(),
        arrow.claim(TERABYTE),
        version=arrow.V4,
        metadata=[("ARROW:experimental_compression", "zstd")],
    )


def claims_in_the_manner_of_version_4() -> bytes:
    return arrow.stream([arrow.int64("a")], _version_4())


def claims_in_the_manner_of_version_4_in_a_file() -> bytes:
    return arrow.file([arrow.int64("a")], [_version_4()])


def _without_marker() -> bytes:
    """A message with the prefix of old: four bytes of length, no marker.

    A reader that skips eight bytes finds a harmless message behind them.
    """
    encoded = _claiming_message()
    metadata, body = encoded[8:-64], encoded[-64:]
    harmless = arrow.message(arrow.RECORD_BATCH, _int64_batch())[8:]
    root = struct.unpack_from("<I", metadata)[0] + len(harmless)
    disguised = struct.pack("<I", root) + harmless + metadata[4:]
    disguised += bytes(-(4 + len(disguised)) % 8)
    return struct.pack("<I", len(disguised)) + disguised + body


def claims_behind_a_prefix_of_old() -> bytes:
    return arrow.stream([arrow.int64("a")], _without_marker())


def claims_behind_a_prefix_of_old_in_a_file() -> bytes:
    return arrow.file([arrow.int64("a")], [_without_marker()])


def a_message_inside_the_metadata_of_another() -> bytes:
    """The footer says that the metadata is longer than it is: Arrow then takes what comes last."""
    harmless = arrow.message(arrow.RECORD_BATCH, _int64_batch(), bytes(64))
    both = harmless + _claiming_message()
    return arrow.file([arrow.int64("a")], [both], blocks=[(len(both) - 64, 64)])


def many_dictionaries_that_claim_little_each() -> bytes:
    """Twelve dictionaries of 60 MB, each from two kilobytes."""
    size = 60 * 2**20
    content = pa.compress(bytes(size), codec="zstd", asbytes=True)
    body = struct.pack("<q", size) + content
    body += bytes(-len(body) % 8)
    data = arrow.batch(
        size // 8, [(size // 8, 0)], [(0, 0), (0, 8 + len(content))], codec=arrow.ZSTD
    )
    ids = range(12)
    dictionaries = [
        arrow.message(arrow.DICTIONARY_BATCH, arrow.dictionary_batch(i, data), body) for i in ids
    ]
    rows = arrow.batch(2, [(2, 0)] * len(ids), [(0, 0), (0, 2)] * len(ids))
    columns = [arrow.int64(f"c{i}", dictionary_id=i) for i in ids]
    return arrow.stream(columns, *dictionaries, arrow.message(arrow.RECORD_BATCH, rows, bytes(8)))


# --- one thing, referred to many times ---------------------------------------------------------

TEXT: Final = "x" * 500_000
TIMES: Final = 2_000


def _rows_of(columns: list[arrow.Table]) -> bytes:
    return arrow.message(arrow.RECORD_BATCH, arrow.batch(0, [(0, 0)] * len(columns), []))


def one_name_for_many_columns() -> bytes:
    """Half a megabyte that becomes a gigabyte when each column has its copy."""
    columns = [arrow.column(TEXT, arrow.NULL) for _ in range(TIMES)]
    return arrow.stream(columns, _rows_of(columns))


def one_name_for_many_columns_of_a_file() -> bytes:
    columns = [arrow.column(TEXT, arrow.NULL) for _ in range(TIMES)]
    return arrow.file(columns, [_rows_of(columns)])


def one_time_zone_for_many_columns() -> bytes:
    zoned = arrow.Table({0: ("h", 3), 1: TEXT})
    columns = [arrow.column(f"c{i}", arrow.TIMESTAMP, zoned) for i in range(TIMES)]
    return arrow.stream(columns, _rows_of(columns))


def one_text_for_much_metadata_of_a_schema() -> bytes:
    shared = [("key", TEXT)] * TIMES
    head = arrow.schema([arrow.int64("a")])
    return arrow.message(arrow.SCHEMA, head, metadata=shared) + _claiming_message()


def one_text_for_much_metadata_of_a_batch() -> bytes:
    rows = arrow.message(
        arrow.RECORD_BATCH, _int64_batch(), bytes(64), metadata=[("key", TEXT)] * TIMES
    )
    return arrow.stream([arrow.int64("a")], rows)


def one_text_for_much_metadata_of_a_file() -> bytes:
    rows = arrow.message(arrow.RECORD_BATCH, _int64_batch(), bytes(64))
    return arrow.file([arrow.int64("a")], [rows], metadata=[("key", TEXT)] * TIMES)


def _views() -> tuple[bytes, bytes]:
    """131,072 views of the same two megabytes: 256 gigabytes of text to be checked."""
    text = "é".encode() * 2**20
    return struct.pack("<i4sii", len(text), text[:4], 0, 0) * VIEWS, text


VIEWS: Final = 2**17


def one_text_for_many_views() -> bytes:
    views, text = _views()
    buffers = [(0, 0), (0, len(views)), (len(views), len(text))]
    rows = arrow.batch(VIEWS, [(VIEWS, 0)], buffers, variadic=[1])
    return arrow.stream(
        [arrow.column("v", arrow.UTF8_VIEW)],
        arrow.message(arrow.RECORD_BATCH, rows, views + text),
    )


def one_text_for_many_views_in_lists_of_one() -> bytes:
    views, text = _views()
    inner = arrow.column("item", arrow.UTF8_VIEW)
    one = arrow.column("l", arrow.FIXED_SIZE_LIST, arrow.Table({0: ("i", 1)}), children=[inner])
    buffers = [(0, 0), (0, 0), (0, len(views)), (len(views), len(text))]
    rows = arrow.batch(VIEWS, [(VIEWS, 0)] * 2, buffers, variadic=[1])
    return arrow.stream([one], arrow.message(arrow.RECORD_BATCH, rows, views + text))


def one_text_for_many_views_in_a_view_of_lists() -> bytes:
    views, text = _views()
    inner = arrow.column("item", arrow.UTF8_VIEW)
    outer = arrow.column("l", arrow.LIST_VIEW, children=[inner])
    body = struct.pack("<i4xi4x", 0, VIEWS) + views + text
    buffers = [(0, 0), (0, 4), (8, 4), (0, 0), (16, len(views)), (16 + len(views), len(text))]
    rows = arrow.batch(1, [(1, 0), (VIEWS, 0)], buffers, variadic=[1])
    return arrow.stream([outer], arrow.message(arrow.RECORD_BATCH, rows, body))


# --- rows and entries --------------------------------------------------------------------------


def a_manifest_of_ten_million_rows() -> bytes:
    """All of them empty bundles, compressed to a few kilobytes."""
    rows = 10_000_000
    item = pa.struct(
        [
            pa.field("slot_id", pa.uint16(), nullable=False),
            pa.field("stream_id", pa.uint32(), nullable=False),
            pa.field("chunk_index", pa.uint32(), nullable=False),
        ]
    )
    zeros = pa.py_buffer(bytes(4 * rows + 4))
    batch = pa.RecordBatch.from_arrays(
        [
            pa.Array.from_buffers(pa.uint32(), rows, [None, zeros]),
            pa.Array.from_buffers(
                pa.list_(item), rows, [None, zeros], children=[pa.array([], item)]
            ),
        ],
        schema=pa.schema(
            [
                pa.field("bundle_index", pa.uint32(), nullable=False),
                pa.field("slot_refs", pa.list_(item), nullable=False),
            ]
        ),
    )
    part = Part(compressed_claim_in_a_file(), rows=2)
    return build([part], manifest=ipc_file([batch], "zstd"), bundle_count=rows)


def rows_of_null(count: int) -> bytes:
    rows = arrow.batch(count, [(count, count)], [])
    return arrow.file([arrow.column("n", arrow.NULL)], [arrow.message(arrow.RECORD_BATCH, rows)])


def null_rows() -> bytes:
    """Rows that take no bytes at all: as many as a bundle can have."""
    return build([Part(rows_of_null(2**31), rows=2**31)])


def more_null_rows_than_a_bundle_has() -> bytes:
    return build([Part(rows_of_null(2**62), rows=2**62)])


def views_in_more_buffers_than_there_are() -> bytes:
    rows = arrow.batch(1, [(1, 0)], [(0, 0), (0, 16)], variadic=[2**31 - 1])
    return arrow.stream(
        [arrow.column("v", arrow.UTF8_VIEW)],
        arrow.message(arrow.RECORD_BATCH, rows, bytes(16)),
    )


def entries_that_lead_from_one_to_the_next() -> bytes:
    """A damaged entry, inside it 30,000 whose sums are wrong, and a good one behind it all."""
    payload = b"\xff\xff\xff\xff\x01\0\0\0"
    wrong = b"".join(wal_entry(i, {0: (0, payload)})[:-4] + b"none" for i in range(30_000))
    outer = frame(struct.pack("<BqQQ", 0, 1, 0, 0) + wrong)[:-4] + b"none"
    return wal_file(outer, wal_entry(40_000, {0: (0, payload)}))


HOSTILE: Final[dict[str, tuple[str, Callable[[], bytes]]]] = {
    make.__name__: (kind, make)
    for kind, makers in {
        "stream": [
            compressed_claim,
            compressed_claim_in_a_dictionary,
            claims_in_the_manner_of_version_4,
            claims_behind_a_prefix_of_old,
            many_dictionaries_that_claim_little_each,
            one_name_for_many_columns,
            one_time_zone_for_many_columns,
            one_text_for_much_metadata_of_a_schema,
            one_text_for_much_metadata_of_a_batch,
            one_text_for_many_views,
            one_text_for_many_views_in_lists_of_one,
            one_text_for_many_views_in_a_view_of_lists,
            views_in_more_buffers_than_there_are,
        ],
        "file": [
            compressed_claim_in_a_file,
            claims_in_the_manner_of_version_4_in_a_file,
            claims_behind_a_prefix_of_old_in_a_file,
            a_message_inside_the_metadata_of_another,
            one_name_for_many_columns_of_a_file,
            one_text_for_much_metadata_of_a_file,
        ],
        "wal": [compressed_claim_in_a_log, entries_that_lead_from_one_to_the_next],
        "segment": [
            compressed_claim_in_a_segment,
            a_manifest_of_ten_million_rows,
            null_rows,
            more_null_rows_than_a_bundle_has,
        ],
    }.items()
    for make in makers
}
