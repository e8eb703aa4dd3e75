"""Arrow IPC in and out: round trips, and the two gaps that Arrow leaves."""

from __future__ import annotations

import struct
from typing import Literal

import pyarrow as pa
import pytest
from bundles import batches_of_one_schema, dictionary, numbers, same_values
from hypothesis import given

from quiver import ipc
from quiver.errors import FormatError, LimitExceeded
from quiver.ipc import IpcFile, Validation, decode_stream, encode_file, encode_stream


def stream(batch: pa.RecordBatch, compression: Literal["zstd", "lz4"] | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def decoded(data: bytes, validation: Validation = Validation.FULL) -> pa.RecordBatch:
    return decode_stream(pa.py_buffer(data), source="f", offset=10, validation=validation)


TEXT = pa.record_batch({"s": ["one", "two"] * 100, "n": list(range(200))})
WORDS = pa.record_batch({"d": dictionary(["one", "two"])})


@given(batches_of_one_schema(max_size=1))
def test_stream_round_trip(batches: list[pa.RecordBatch]) -> None:
    (batch,) = batches
    data = b"".join(encode_stream(batch))
    assert same_values(decoded(data), batch)
    with pa.ipc.open_stream(data) as reader:
        assert same_values(reader.read_next_batch(), batch)


def test_a_plain_stream_is_what_arrow_writes() -> None:
    assert b"".join(encode_stream(TEXT)) == stream(TEXT)


@given(batches_of_one_schema(max_size=1))
def test_file_round_trip(batches: list[pa.RecordBatch]) -> None:
    (batch,) = batches
    file = IpcFile(encode_file(batch.schema, [batch, batch]), source="f", offset=0)
    assert file.batch_count == 2
    for index in range(2):
        assert same_values(file.batch(index, Validation.FULL), batch)


def test_metadata_of_schema_and_fields_is_kept() -> None:
    schema = pa.schema([pa.field("v", pa.int64(), metadata={"a": "b"})], metadata={"c": "d"})
    plain = pa.schema([pa.field("v", pa.int64())])
    for wanted in (schema, plain, schema):
        batch = pa.record_batch([[1]], schema=wanted)
        back = decoded(b"".join(encode_stream(batch)))
        assert back.schema.equals(wanted, check_metadata=True)


def test_a_sliced_batch_is_stored_without_what_was_cut_off() -> None:
    data = b"".join(encode_stream(TEXT.slice(50, 2)))
    assert len(data) < 800
    assert decoded(data) == TEXT.slice(50, 2)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("batch", [TEXT, WORDS], ids=["plain", "dictionary"])
def test_compressed_bodies_are_read(codec: Literal["zstd", "lz4"], batch: pa.RecordBatch) -> None:
    assert decoded(stream(batch, compression=codec)) == batch


def _claiming(data: bytes, size: int) -> bytes:
    """Overwrite the uncompressed length in front of the first zstd frame."""
    frame = data.index(b"\x28\xb5\x2f\xfd")
    return data[: frame - 8] + struct.pack("<q", size) + data[frame:]


@pytest.mark.parametrize("batch", [TEXT, WORDS], ids=["plain", "dictionary"])
@pytest.mark.parametrize("size", [2**28, 2**40, 2**62])
def test_a_claim_of_too_much_memory_is_refused_before_it_is_allocated(
    batch: pa.RecordBatch, size: int
) -> None:
    data = _claiming(stream(batch, compression="zstd"), size)
    pool = pa.default_memory_pool()
    before = pool.max_memory() or 0
    with pytest.raises(LimitExceeded, match=r"^f: at byte .* are allowed"):
        decoded(data)
    assert (pool.max_memory() or 0) - before < 2**20


def test_the_claim_is_checked_in_files_too() -> None:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, TEXT.schema, options=options) as writer:
        writer.write_batch(TEXT)
    good = sink.getvalue().to_pybytes()
    assert IpcFile(pa.py_buffer(good), source="f", offset=0).batch(0, Validation.FULL) == TEXT
    bad = IpcFile(pa.py_buffer(_claiming(good, 2**40)), source="f", offset=0)
    with pytest.raises(LimitExceeded):
        bad.batch(0, Validation.FULL)


def test_a_small_lie_about_the_size_is_an_error_of_ours() -> None:
    with pytest.raises(FormatError, match="not valid Arrow IPC"):
        decoded(_claiming(stream(TEXT, compression="zstd"), 5))


def _with_offsets_broken(data: bytes) -> bytes:
    first_offsets = struct.pack("<4i", 0, 3, 6, 9)
    at = data.index(first_offsets)
    return data[: at + 4] + struct.pack("<i", 2**30) + data[at + 8 :]


def test_full_validation_finds_offsets_that_lead_outside() -> None:
    data = _with_offsets_broken(stream(TEXT))
    with pytest.raises(FormatError, match="not valid Arrow IPC"):
        decoded(data)


@pytest.mark.parametrize("cut", [0, 3, 7, 8, 100, 250, 400])
def test_short_streams(cut: int) -> None:
    with pytest.raises(FormatError) as caught:
        decoded(stream(TEXT)[:cut])
    assert caught.value.offset >= 10


def test_a_stream_that_ends_after_its_schema() -> None:
    data = TEXT.schema.serialize().to_pybytes()
    for end in (b"", ipc.END_OF_STREAM):
        with pytest.raises(FormatError):
            decoded(data + end)
    with pytest.raises(FormatError):
        decoded(WORDS.schema.serialize().to_pybytes() + ipc.END_OF_STREAM)


def test_a_dictionary_where_a_batch_should_be() -> None:
    words, other = stream(WORDS), numbers(1).schema.serialize().to_pybytes()
    start = len(WORDS.schema.serialize())
    with pytest.raises(FormatError):
        decoded(other + words[start:])


def test_not_a_stream_at_all() -> None:
    with pytest.raises(FormatError, match="there is no Arrow message here"):
        decoded(bytes(100))
    with pytest.raises(FormatError, match="only 8 are left"):
        decoded(b"\xff\xff\xff\xff\x00\x00\x10\x00")


def test_a_name_that_is_not_utf8_is_refused() -> None:
    batch = pa.record_batch({"name\x7f": [1]})
    data = stream(batch).replace(b"name\x7f", b"name\xff")
    with pytest.raises(FormatError):
        decoded(data)


def test_more_schemas_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_KNOWN_SCHEMA_LIMIT", 4)
    ipc._known_schemas.clear()
    for index in range(20):
        batch = pa.record_batch({f"column {index}": [index]})
        assert decoded(stream(batch)) == batch
        assert len(ipc._known_schemas) <= 4


@pytest.mark.parametrize("cut", [0, 5, 9, 17, 100])
def test_short_files(cut: int) -> None:
    data = encode_file(TEXT.schema, [TEXT]).to_pybytes()
    for piece in (data[:cut], data[:-1], data[cut + 1 :] if cut else b""):
        with pytest.raises(FormatError):
            IpcFile(pa.py_buffer(piece), source="f", offset=0).batch(0, Validation.FULL)


@pytest.mark.parametrize("length", [-1, 0, 2**31 - 1])
def test_a_file_footer_with_an_impossible_length(length: int) -> None:
    data = encode_file(TEXT.schema, [TEXT]).to_pybytes()
    changed = data[:-10] + struct.pack("<i", length) + data[-6:]
    with pytest.raises(FormatError, match="claims a footer"):
        IpcFile(pa.py_buffer(changed), source="f", offset=0)
