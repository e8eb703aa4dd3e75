"""Arrow data that is wrong in one way each."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.fuzz import arrow_bytes as arrow
from tests.fuzz.corpus import batches
from tests.fuzz.decoders import SOURCE, check_error, exercise
from tests.fuzz.segments import ipc_file, ipc_stream

from quiver import ipc
from quiver.bundle import MAX_SCHEMA_DEPTH
from quiver.errors import FormatError, LimitExceeded, Truncated
from quiver.ipc import IpcFile, Validation, decode_stream
from quiver.ipc_guard import MAX_DICTIONARIES

LAYOUT, FULL = Validation.LAYOUT, Validation.FULL


def decode(data: bytes, validation: Validation = FULL) -> pa.RecordBatch:
    return decode_stream(pa.py_buffer(data), source=SOURCE, offset=7, validation=validation)


def refused(data: bytes, validation: Validation = FULL) -> FormatError:
    exercise("stream", data)
    with pytest.raises(FormatError) as caught:
        decode(data, validation)
    check_error(caught.value)
    assert caught.value.offset >= 7
    return caught.value


def file_refused(data: bytes, validation: Validation = FULL) -> FormatError:
    exercise("file", data)
    with pytest.raises(FormatError) as caught:
        IpcFile(pa.py_buffer(data), source=SOURCE, offset=7).batch(0, validation)
    check_error(caught.value)
    return caught.value


def both_refused(array: pa.Array[Any]) -> None:
    """What a batch says about its insides is wrong: ``FULL`` sees it, in streams and in files."""
    batch = pa.record_batch({"c": array})
    refused(ipc_stream(batch))
    file_refused(ipc_file([batch]))


def patched_refused(array: pa.Array[Any], old: bytes, new: bytes) -> None:
    """As above, for what Arrow would not even write: the body is changed afterwards."""
    batch = pa.record_batch({"c": array})
    for data, check in ((ipc_stream(batch), refused), (ipc_file([batch]), file_refused)):
        at = data.rindex(old.ljust(8, b"\0"))
        check(data[:at] + new + data[at + len(new) :])


def one_row(columns: list[arrow.Table]) -> bytes:
    rows = arrow.batch(1, [(1, 1)] * len(columns), [])
    return arrow.stream(columns, arrow.message(arrow.RECORD_BATCH, rows))


# --- insides -----------------------------------------------------------------------------------


def from_buffers(kind: pa.DataType, length: int, *buffers: bytes | None) -> pa.Array[Any]:
    packed = [None if item is None else pa.py_buffer(item) for item in buffers]
    return pa.Array.from_buffers(kind, length, packed)


@pytest.mark.parametrize("key", [2, 100, 127, -1, -128])
def test_dictionary_keys_out_of_bounds(key: int) -> None:
    indices: Any = pa.array([0, key], pa.int8())
    both_refused(pa.DictionaryArray.from_arrays(indices, ["a", "b"], safe=False))


def test_dictionary_keys_out_of_bounds_below_other_types() -> None:
    indices: Any = pa.array([0, 9], pa.int8())
    keys = pa.DictionaryArray.from_arrays(indices, ["a", "b"], safe=False)
    both_refused(pa.StructArray.from_arrays([keys], ["k"]))
    both_refused(pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), keys))


@pytest.mark.parametrize("offsets", [(0, 9), (0, 2**31 - 1), (5, 3), (-1, 3), (-(2**31), 0)])
@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.list_(pa.int8())])
def test_offsets_out_of_bounds(kind: pa.DataType, offsets: tuple[int, int]) -> None:
    array: Any = pa.array([[7, 7, 7] if pa.types.is_list(kind) else "abc"], kind)
    patched_refused(array, struct.pack("<2i", 0, 3), struct.pack("<2i", *offsets))


@pytest.mark.parametrize("view", [(100, 0, 0), (20, 1, 0), (20, 0, 2**30), (20, -1, 0), (-1, 0, 0)])
def test_views_out_of_bounds(view: tuple[int, int, int]) -> None:
    length, buffer, offset = view
    data = b"a text of 24 bytes, long"
    packed = struct.pack("<i4sii", length, data[:4], buffer, offset)
    rows = arrow.batch(1, [(1, 0)], [(0, 0), (0, 16), (16, 24)], variadic=[1])
    message = arrow.message(arrow.RECORD_BATCH, rows, packed + data)
    refused(arrow.stream([arrow.column("v", arrow.UTF8_VIEW)], message))
    file_refused(arrow.file([arrow.column("v", arrow.UTF8_VIEW)], [message]))


@pytest.mark.parametrize("size", [0, 1, 15, 17])
def test_buffers_of_views_that_are_no_multiple_of_a_view(size: int) -> None:
    rows = arrow.batch(1, [(1, 0)], [(0, 0), (0, size)], variadic=[0])
    message = arrow.message(arrow.RECORD_BATCH, rows, bytes(24))
    exercise("stream", arrow.stream([arrow.column("v", arrow.UTF8_VIEW)], message))
    exercise("file", arrow.file([arrow.column("v", arrow.UTF8_VIEW)], [message]))


def test_texts_that_are_not_utf8() -> None:
    both_refused(from_buffers(pa.string(), 1, None, struct.pack("<2i", 0, 2), b"\xff\xfe"))


def test_unions_of_unknown_kinds() -> None:
    kinds: Any = pa.py_buffer(bytes([0, 5]))
    numbers: Any = pa.array([1, 2])
    union = pa.sparse_union([pa.field("n", pa.int64())])
    both_refused(pa.Array.from_buffers(union, 2, [None, kinds], children=[numbers]))


@pytest.mark.parametrize("ends", [(1, 1), (2, 1), (1, 2), (-1, 3), (0, 3), (3, 2)])
def test_runs_that_do_not_end_where_the_array_does(ends: tuple[int, int]) -> None:
    runs: pa.Array[Any] = pa.RunEndEncodedArray.from_arrays(
        pa.array([2, 3], pa.int16()), pa.array([7, 8])
    )
    patched_refused(runs, struct.pack("<2h", 2, 3), struct.pack("<2h", *ends))


def test_buffers_shorter_than_their_columns() -> None:
    rows = arrow.batch(1000, [(1000, 0)], [(0, 0), (0, 16)])
    message = arrow.message(arrow.RECORD_BATCH, rows, bytes(16))
    for validation in Validation:
        refused(arrow.stream([arrow.int64("a")], message), validation)
        file_refused(arrow.file([arrow.int64("a")], [message]), validation)


# --- schemas -----------------------------------------------------------------------------------


def nested(depth: int) -> arrow.Table:
    inner = arrow.int64("item")
    for _ in range(depth):
        inner = arrow.column("item", arrow.LIST, children=[inner])
    return inner


@pytest.mark.parametrize("depth", [MAX_SCHEMA_DEPTH + 1, 100, 130, 5_000])
def test_schemas_without_a_bottom(depth: int) -> None:
    refused(one_row([nested(depth)]))
    file_refused(arrow.file([nested(depth)], []))


def test_schemas_as_deep_as_allowed() -> None:
    depth = MAX_SCHEMA_DEPTH - 1  # Arrow counts the column itself
    buffers = [(0, 0), (0, 8)] * depth + [(0, 0), (0, 0)]
    nodes = [(1, 0)] + [(0, 0)] * depth
    rows = arrow.message(arrow.RECORD_BATCH, arrow.batch(1, nodes, buffers), bytes(8))
    assert decode(arrow.stream([nested(depth)], rows)).to_pylist() == [{"item": []}]


@pytest.mark.parametrize("name", [b"\xff\xfe", b"ok\xc3", b"\xed\xa0\x80"])
def test_names_that_are_not_utf8(name: bytes) -> None:
    assert "schema" in refused(one_row([arrow.column(name, arrow.NULL)])).reason
    nested_name = arrow.column("l", arrow.LIST, children=[arrow.column(name, arrow.NULL)])
    refused(one_row([nested_name]))
    file_refused(arrow.file([arrow.column(name, arrow.NULL)], []))


def test_types_that_do_not_exist() -> None:
    for type_id in (0, 27, 99, 255):
        refused(one_row([arrow.column("x", type_id)]))
    for bits in (0, 7, 65, -8, 2**31 - 1):
        refused(one_row([arrow.column("x", arrow.INT, arrow.int_type(bits))]))


def test_pickles_of_old_extension_types_are_not_loaded(tmp_path: Path) -> None:
    """They once ran code when a schema was read."""
    target = tmp_path / "ran"
    pickled = f"cbuiltins\nopen\n(S'{target}'\nS'w'\ntR."
    field: pa.Field[Any] = pa.field(
        "x",
        pa.int64(),
        metadata={
            "ARROW:extension:name": "arrow.py_extension_type",
            "ARROW:extension:metadata": pickled,
        },
    )
    batch = pa.RecordBatch.from_arrays([pa.array([1])], schema=pa.schema([field]))
    assert decode(ipc_stream(batch)).column(0).to_pylist() == [1]
    assert not target.exists()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"shape": "x"}', '{"shape": [-1]}'])
def test_extension_types_with_metadata_that_is_no_json(text: str) -> None:
    metadata = {
        "ARROW:extension:name": "arrow.fixed_shape_tensor",
        "ARROW:extension:metadata": text,
    }
    tensor: pa.Field[Any] = pa.field("x", pa.list_(pa.int32(), 4), metadata=metadata)
    values: Any = pa.array([[1, 2, 3, 4]], tensor.type)
    refused(ipc_stream(pa.RecordBatch.from_arrays([values], schema=pa.schema([tensor]))))


def test_numbers_in_the_other_byte_order() -> None:
    rows = arrow.batch(1, [(1, 0)], [(0, 0), (0, 8)])
    message = arrow.message(arrow.RECORD_BATCH, rows, struct.pack(">q", 5))
    refused(arrow.stream([arrow.int64("a")], message, big_endian=True))
    file_refused(arrow.file([arrow.int64("a")], [message], big_endian=True))


def test_schemas_that_are_remembered_take_little_memory() -> None:
    for index in range(20):
        field: pa.Field[Any] = pa.field("x", pa.null(), metadata={"large": "x" * 2**20})
        batch = pa.RecordBatch.from_arrays(
            [pa.nulls(1)], schema=pa.schema([field], metadata={"index": str(index)})
        )
        decode(ipc_stream(batch))
    kept = [len(facts.message) for _, facts in ipc._recent_facts._recent]
    assert sum(kept) + sum(map(len, ipc._known_schemas)) < 16 * 2**20


# --- messages ----------------------------------------------------------------------------------

SCHEMA = arrow.message(arrow.SCHEMA, arrow.schema([arrow.int64("a")]))
ROWS = arrow.batch(2, [(2, 0)], [(0, 0), (0, 16)])
BATCH = arrow.message(arrow.RECORD_BATCH, ROWS, struct.pack("<2q", 5, 7))


def test_only_the_first_batch_counts_and_the_end_marker_is_not_needed() -> None:
    for rest in (b"", arrow.END_OF_STREAM, BATCH, b"junk"):
        assert decode(SCHEMA + BATCH + rest).column(0).to_pylist() == [5, 7]


def test_streams_that_end_too_early() -> None:
    for size in range(len(SCHEMA + BATCH)):
        refused((SCHEMA + BATCH)[:size])


def test_streams_without_a_batch() -> None:
    refused(SCHEMA + arrow.END_OF_STREAM)
    refused(SCHEMA + SCHEMA + BATCH)
    refused(BATCH)
    refused(arrow.END_OF_STREAM)


def test_bytes_behind_an_end_marker_without_a_batch() -> None:
    refused(SCHEMA + arrow.END_OF_STREAM + bytes(16))
    refused(SCHEMA + arrow.END_OF_STREAM + BATCH)


@pytest.mark.parametrize("length", [0, 1, 8, 2**31 - 1, 2**31, 2**32 - 1])
def test_lengths_of_metadata_that_cannot_be(length: int) -> None:
    prefix = struct.pack("<II", 0xFFFFFFFF, length)
    refused(prefix + SCHEMA[8:] + BATCH)
    refused(SCHEMA + prefix + BATCH[8:])


@pytest.mark.parametrize("length", [-1, 8, 2**31, 2**62, 2**63 - 1, -(2**63)])
def test_lengths_of_bodies_that_cannot_be(length: int) -> None:
    message = arrow.message(arrow.RECORD_BATCH, ROWS, bytes(16), body_length=length)
    for validation in Validation:
        refused(SCHEMA + message, validation)


@pytest.mark.parametrize("claimed", [2**28 + 1, 2**40, 2**62, 2**63 - 1])
def test_claims_above_the_limit(claimed: int) -> None:
    rows = arrow.batch(2, [(2, 0)], arrow.INT64_CLAIM_BUFFERS, codec=arrow.ZSTD)
    message = arrow.message(arrow.RECORD_BATCH, rows, arrow.claim(claimed))
    assert isinstance(refused(SCHEMA + message), LimitExceeded)
    assert isinstance(file_refused(arrow.file([arrow.int64("a")], [message])), LimitExceeded)


def test_claims_are_added_up() -> None:
    count = 200
    columns = [arrow.int64(f"c{i}") for i in range(count)]
    rows = arrow.batch(2, [(2, 0)] * count, arrow.INT64_CLAIM_BUFFERS * count, codec=arrow.LZ4)
    message = arrow.message(arrow.RECORD_BATCH, rows, arrow.claim(2 * 2**20))
    assert isinstance(refused(arrow.stream(columns, message)), LimitExceeded)


@pytest.mark.parametrize("claimed", [0, 1, 15, 17, 64, 2**20, -2, -(2**63)])
def test_claims_that_are_not_true(claimed: int) -> None:
    content = pa.compress(bytes(16), codec="zstd", asbytes=True)
    rows = arrow.batch(2, [(2, 0)], arrow.INT64_CLAIM_BUFFERS, codec=arrow.ZSTD)
    refused(SCHEMA + arrow.message(arrow.RECORD_BATCH, rows, arrow.claim(claimed, content)))


@pytest.mark.parametrize("buffer", [(0, 7), (60, 64), (-8, 16), (2**62, 64), (0, 2**62)])
def test_compressed_buffers_outside_their_message(buffer: tuple[int, int]) -> None:
    rows = arrow.batch(2, [(2, 0)], [(0, 0), buffer], codec=arrow.ZSTD)
    refused(SCHEMA + arrow.message(arrow.RECORD_BATCH, rows, arrow.claim(16)))


def test_too_many_dictionaries() -> None:
    data = arrow.dictionary_batch(0, arrow.batch(0, [(0, 0)], [(0, 0), (0, 0)]))
    dictionary = arrow.message(arrow.DICTIONARY_BATCH, data)
    stream = arrow.stream([arrow.int64("a", dictionary_id=0)], dictionary * (MAX_DICTIONARIES + 1))
    assert isinstance(refused(stream), LimitExceeded)


# --- files -------------------------------------------------------------------------------------

GOOD_FILE = ipc_file([batches()["flat"]])


@pytest.mark.parametrize("length", [0, -1, -(2**31), 2**31 - 1, len(GOOD_FILE), 8])
def test_footer_lengths_that_cannot_be(length: int) -> None:
    file_refused(GOOD_FILE[:-10] + struct.pack("<i", length) + b"ARROW1")


def test_files_that_end_too_early() -> None:
    for size in range(0, len(GOOD_FILE), 7):
        file_refused(GOOD_FILE[:size])
    file_refused(GOOD_FILE[:-1] + b"2")


@pytest.mark.parametrize(
    "block", [(2**62, 8, 8), (-8, 8, 8), (8, -8, 8), (8, 8, -8), (8, 8, 2**62), (8, 2**31 - 8, 8)]
)
def test_blocks_outside_the_file(block: tuple[int, int, int]) -> None:
    with pa.ipc.open_file(GOOD_FILE) as reader:
        assert reader.num_record_batches == 1
    footer_at = len(GOOD_FILE) - 10 - struct.unpack_from("<i", GOOD_FILE, len(GOOD_FILE) - 10)[0]
    batch_at = GOOD_FILE.index(b"\xff\xff\xff\xff", 16)
    at = GOOD_FILE.index(struct.pack("<q", batch_at), footer_at)
    file_refused(GOOD_FILE[:at] + struct.pack("<qi4xq", *block) + GOOD_FILE[at + 24 :])


def test_a_truncated_message_is_named_by_its_offset_in_the_file() -> None:
    error = refused(SCHEMA + BATCH[:12])
    assert not isinstance(error, Truncated) or error.offset == 7 + len(SCHEMA)
