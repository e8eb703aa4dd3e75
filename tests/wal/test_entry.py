"""Entries: what goes in comes out, and what is not one is refused."""

from __future__ import annotations

import struct
import zlib

import pyarrow as pa
import pytest
from bundles import bundles, numbers, plain_bundle, same_values
from hypothesis import given

from quiver.bundle import Payload, RecordBundle
from quiver.errors import FormatError, InvalidBundle
from quiver.ipc import Validation
from quiver.wal import entry as entry_module
from quiver.wal.entry import WalEntry, decode_body, prepare_entry


def sealed(bundle: RecordBundle, sequence: int = 0) -> bytes:
    return b"".join(prepare_entry(bundle).seal(sequence))


def decoded(data: bytes) -> WalEntry:
    return decode_body(pa.py_buffer(data), 4, len(data) - 4, source="f")


def reframed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body + struct.pack("<I", zlib.crc32(body))


@given(bundles())
def test_round_trip(made: list[RecordBundle]) -> None:
    for sequence, bundle in enumerate(made):
        prepared = prepare_entry(bundle)
        data = b"".join(prepared.seal(sequence))
        assert len(data) == prepared.size
        entry = decoded(data)
        assert entry.sequence == sequence
        back = entry.bundle()
        assert back.ingestion_time_ns == bundle.ingestion_time_ns
        assert back.item_count is None
        assert list(back.payloads) == list(bundle.payloads)
        for slot, payload in bundle.payloads.items():
            assert back.payloads[slot].fingerprint == payload.fingerprint
            assert same_values(back.payloads[slot].batch, payload.batch)


def test_frame_is_length_body_and_the_sum_of_the_body() -> None:
    data = sealed(plain_bundle(3), sequence=9)
    length = struct.unpack_from("<I", data)[0]
    assert length == len(data) - 8
    assert struct.unpack_from("<I", data, len(data) - 4)[0] == zlib.crc32(data[4:-4])
    assert struct.unpack_from("<BqQQ", data, 4)[2:] == (9, 1 << 30)


def test_an_entry_can_be_sealed_again_under_another_number() -> None:
    prepared = prepare_entry(plain_bundle(1))
    for sequence in (0, 1, 2**63 - 1):
        data = b"".join(prepared.seal(sequence))
        assert reframed(data[4:-4]) == data
        assert decoded(data).sequence == sequence


def test_a_bundle_without_slots_is_an_entry_of_25_bytes() -> None:
    data = sealed(RecordBundle({}, 5))
    assert len(data) == 33
    assert decoded(data).bundle() == RecordBundle({}, 5)


def test_all_64_slots_fit() -> None:
    bundle = RecordBundle.from_batches(
        {slot: numbers(slot) for slot in range(64)}, ingestion_time_ns=0
    )
    entry = decoded(sealed(bundle))
    assert entry.slot_bitmap == 2**64 - 1
    assert [block.slot for block in entry.slots] == list(range(64))


def test_time_before_1970_is_read_as_1970() -> None:
    data = bytearray(sealed(plain_bundle(0)))
    data[5:13] = (-1).to_bytes(8, "little", signed=True)
    assert decoded(bytes(data)).ingestion_time_ns == 0


def _body_with(offset: int, value: bytes) -> bytes:
    body = bytearray(sealed(plain_bundle(0))[4:-4])
    body[offset : offset + len(value)] = value
    return reframed(bytes(body))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (reframed(bytes(24)), "needs 25 bytes"),
        (reframed(sealed(plain_bundle(0))[4:-4] + b"x"), "1 bytes behind the last slot"),
        (reframed(sealed(plain_bundle(0))[4:60]), "a slot needs 42 bytes"),
        (_body_with(17, bytes(8)), "bytes behind the last slot"),
        (_body_with(17, (1 << 31).to_bytes(8, "little")), "slot 30 is not one"),
        (_body_with(25, b"\x40\x00"), "slot 64 is not one"),
        (_body_with(63, b"\xff\xff\xff\xff"), "the payload of a slot needs"),
    ],
)
def test_bodies_that_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        decoded(data)


def test_a_slot_may_not_come_twice() -> None:
    bundle = RecordBundle.from_batches({30: numbers(1), 31: numbers(1)}, ingestion_time_ns=0)
    data = bytearray(sealed(bundle))
    second = data.rindex(b"\x1f\x00" + bundle.payloads[31].fingerprint)
    data[second] = 30
    with pytest.raises(FormatError, match="slot 30 is not one"):
        decoded(bytes(data))


def test_a_row_count_that_lies_is_refused() -> None:
    entry = decoded(_body_with(59, b"\x02\x00\x00\x00"))
    with pytest.raises(FormatError, match="LOGS says 2 rows and holds 3"):
        entry.bundle()


def test_dictionary_keys_outside_the_dictionary_are_refused() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.uint8()), pa.array(["a", "b"]))
    bundle = RecordBundle.from_batches({1: pa.record_batch({"k": array})}, ingestion_time_ns=0)
    data = sealed(bundle)
    keys = data.rindex(b"\x00\x01" + bytes(6))
    entry = decoded(data[:keys] + b"\x00\x63" + data[keys + 2 :])
    with pytest.raises(FormatError, match="not valid Arrow IPC"):
        entry.bundle(Validation.FULL)


def test_an_entry_that_is_too_large_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = prepare_entry(plain_bundle(0)).size - 8
    monkeypatch.setattr(entry_module, "MAX_ENTRY_SIZE", size)
    prepare_entry(plain_bundle(0))
    monkeypatch.setattr(entry_module, "MAX_ENTRY_SIZE", size - 1)
    with pytest.raises(InvalidBundle, match="split it"):
        prepare_entry(plain_bundle(0))


def test_two_slots_that_fit_alone_may_be_too_large_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = RecordBundle.from_batches({30: numbers(1), 31: numbers(2)}, ingestion_time_ns=0)
    monkeypatch.setattr(entry_module, "MAX_ENTRY_SIZE", prepare_entry(bundle).size - 9)
    with pytest.raises(InvalidBundle, match="split it"):
        prepare_entry(bundle)


def test_a_truncated_payload_names_file_and_place() -> None:
    bundle = RecordBundle({1: Payload(numbers(1), bytes(32))}, 0)
    entry = decoded(sealed(bundle))
    block = entry.slots[0]._replace(payload=entry.slots[0].payload.slice(0, 100))
    with pytest.raises(FormatError, match=r"^f: at byte 71: .* only 100 are left"):
        entry._replace(slots=(block,)).bundle()
