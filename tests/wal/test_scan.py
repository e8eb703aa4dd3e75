"""Scanning one file: good entries survive whatever happened around them."""

from __future__ import annotations

import struct
import zlib

import pyarrow as pa
import pytest
from bundles import numbers, plain_bundle
from hypothesis import given
from hypothesis import strategies as st

from quiver.bundle import RecordBundle
from quiver.wal import scan as scan_module
from quiver.wal.entry import prepare_entry
from quiver.wal.scan import Damaged, Found, Scanned, Skipped, scan


def entries(count: int, first: int = 0) -> list[bytes]:
    return [b"".join(prepare_entry(plain_bundle(i)).seal(i)) for i in range(first, first + count)]


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body + struct.pack("<I", zlib.crc32(body))


def scanned(data: bytes, start: int = 0, after: int | None = None) -> list[Scanned]:
    items = list(scan(pa.py_buffer(data), start, source="f", after_sequence=after))
    edges = [start, *(item.end for item in items)]
    assert [item.offset for item in items] == edges[:-1]
    assert edges[-1] == max(start, len(data))
    assert all(item.end > item.offset for item in items)
    return items


def sequences(items: list[Scanned]) -> list[int]:
    return [item.entry.sequence for item in items if isinstance(item, Found)]


def test_good_entries() -> None:
    parts = entries(3)
    items = scanned(b"header" + b"".join(parts), start=6)
    assert sequences(items) == [0, 1, 2]
    assert [item.end - item.offset for item in items] == [len(part) for part in parts]


def test_unknown_types_are_skipped_by_their_length() -> None:
    a, b = entries(2)
    items = scanned(a + framed(b"\x07from the future") + framed(b"\x01") + b)
    assert sequences(items) == [0, 1]
    assert [item.entry_type for item in items if isinstance(item, Skipped)] == [7, 1]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 30, 100])
def test_a_torn_tail_is_all_that_is_lost(cut: int) -> None:
    a, b, c = entries(3)
    items = scanned(a + b + c[:cut])
    assert sequences(items) == [0, 1]
    assert isinstance(items[-1], Damaged)
    assert items[-1].torn


@pytest.mark.parametrize("fill", [b"\x00", b"\xff", b"\x80"])
def test_a_tail_that_was_allocated_and_not_written_is_torn(fill: bytes) -> None:
    (a,) = entries(1)
    items = scanned(a + fill * 5000)
    assert sequences(items) == [0]
    assert isinstance(items[-1], Damaged)
    assert items[-1].torn


def test_a_damaged_body_costs_that_entry_only() -> None:
    a, b, c = entries(3)
    bad = bytearray(b)
    bad[-20] ^= 1
    items = scanned(a + bytes(bad) + c)
    assert sequences(items) == [0, 2]
    damage = items[1]
    assert isinstance(damage, Damaged)
    assert not damage.torn
    assert (damage.offset, damage.end) == (len(a), len(a) + len(b))
    assert "checksum" in damage.reason


@pytest.mark.parametrize("length", [0, 1, 7, 10_000_000, 2**32 - 1])
def test_a_damaged_length_costs_that_entry_only(length: int) -> None:
    a, b, c, d = entries(4)
    items = scanned(a + struct.pack("<I", length) + b[4:] + c + d)
    assert sequences(items) == [0, 2, 3]


def test_two_damaged_neighbours_are_one_range() -> None:
    a, b, c, d = (bytearray(part) for part in entries(4))
    b[50] ^= 1
    c[50] ^= 1
    items = scanned(bytes(a + b + c + d))
    assert sequences(items) == [0, 3]
    assert [item.offset for item in items] == [0, len(a), len(a + b + c)]


def test_log_bytes_in_a_payload_are_not_taken_for_the_log() -> None:
    """A damaged entry whose payload is itself a piece of a log: lengths lead over it."""
    stowaway = b"".join(entries(2, first=40))
    carrier = RecordBundle.from_batches(
        {60: pa.record_batch({"data": pa.array([stowaway], pa.binary())})}, ingestion_time_ns=0
    )
    bad = bytearray(b"".join(prepare_entry(carrier).seal(1)))
    bad[10] ^= 1
    a, c = entries(1)[0], entries(1, first=2)[0]
    assert sequences(scanned(a + bytes(bad) + c)) == [0, 2]


def test_older_log_bytes_are_not_taken_for_the_log_even_without_a_length() -> None:
    stowaway = b"".join(entries(2, first=0))
    carrier = RecordBundle.from_batches(
        {60: pa.record_batch({"data": pa.array([stowaway], pa.binary())})}, ingestion_time_ns=0
    )
    bad = bytearray(b"".join(prepare_entry(carrier).seal(6)))
    bad[0:4] = b"\xff\xff\xff\xff"
    a, c = entries(1, first=5)[0], entries(1, first=7)[0]
    assert sequences(scanned(a + bytes(bad) + c)) == [5, 7]
    assert sequences(scanned(bytes(bad) + c, after=5)) == [7]


def test_the_search_gives_up_when_candidates_cost_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, c = entries(3)
    data = a + b"\x00" * 4 + b[4:] + c
    assert sequences(scanned(data)) == [0, 2]
    monkeypatch.setattr(scan_module, "RESYNC_BUDGET", 0)
    assert sequences(scanned(data)) == [0]


@given(st.data())
def test_any_damage_to_one_entry_leaves_the_others(data: st.DataObject) -> None:
    """Flip, overwrite or remove bytes inside one entry: all others are found, and it is not."""
    parts = entries(5)
    victim = data.draw(st.integers(0, 4))
    part = bytearray(parts[victim])
    start = data.draw(st.integers(0, len(part) - 1))
    size = data.draw(st.integers(1, len(part) - start))
    if data.draw(st.booleans()):
        noise = data.draw(st.binary(min_size=size, max_size=size))
        if part[start : start + size] == noise:
            noise = bytes(byte ^ 0xFF for byte in noise)
        part[start : start + size] = noise
    else:
        del part[start : start + size]
    damaged = b"".join([*parts[:victim], bytes(part), *parts[victim + 1 :]])
    assert sequences(scanned(damaged)) == [i for i in range(5) if i != victim]


@given(st.binary(max_size=400), st.lists(st.integers(0, 3), max_size=4))
def test_any_bytes_are_covered_without_gap(noise: bytes, order: list[int]) -> None:
    good = entries(4)
    scanned(noise + b"".join(good[i] for i in order) + noise)


def test_an_empty_batch_and_many_slots_are_found_again_after_damage() -> None:
    many = RecordBundle.from_batches({s: numbers() for s in range(64)}, ingestion_time_ns=0)
    data = b"\x13" * 11 + b"".join(prepare_entry(many).seal(3))
    assert sequences(scanned(data)) == [3]
