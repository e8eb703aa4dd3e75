"""From bundles to rows: groups, order, coordinates, and what cannot be decoded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lake_tables import INGESTED, requests_for

from quiver.bundle import RecordBundle, Signal, Slot
from quiver.config import OtlpConfig, PromotedAttribute
from quiver.disk import RealDisk
from quiver.errors import InvalidRequest
from quiver.lake import decoding
from quiver.lake.decoding import (
    DeadLetter,
    StoredRequest,
    decode_rows,
    requests_of_bundle,
    requests_of_segment,
    write_letters,
)
from quiver.lake.layout import FROM_INGESTION, file_schema
from quiver.lake.places import LocalPlace
from quiver.otlp import Decoded, Source, decode, to_otap
from quiver.pipeline.item import Item, to_bundle
from quiver.segment.reader import SegmentReader
from quiver.segment.writer import OpenSegment, write_segment
from quiver.testing import Shape, Telemetry

SIGNALS = list(Signal)
BROKEN = b"\x0a\xff\xff"
COORDINATES = ["source_store", "source_segment", "source_bundle", "source_row"]


def coordinates(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in COORDINATES), strict=True))


# --- Rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("group_bytes", [1, 20_000, 10**9])
def test_rows_are_those_of_decode_in_order(signal: Signal, group_bytes: int) -> None:
    promoted = (PromotedAttribute(key="http.request.method", column="method"),)
    config = OtlpConfig(promoted=promoted)
    stored = requests_for(signal, requests=7)
    groups = list(decode_rows(signal, stored, config, group_bytes=group_bytes))
    assert len(groups) == {1: 7, 10**9: 1}.get(group_bytes, len(groups))
    assert all(group.request_bytes <= group_bytes or group.requests == 1 for group in groups)
    table = pa.concat_tables(group.table for group in groups)
    assert table.schema.equals(file_schema(signal, promoted))
    plain = decode(signal, [r.data for r in stored], config, [r.source for r in stored]).table
    assert table.select(plain.schema.names).equals(pa.table(plain))
    assert sum(group.requests for group in groups) == 7
    assert sum(group.request_bytes for group in groups) == sum(len(r.data) for r in stored)


def test_every_row_has_the_coordinates_and_the_time_of_its_request() -> None:
    stored = requests_for(Signal.TRACES, requests=4, store="s-1", segment=9)
    (rows,) = decode_rows(Signal.TRACES, stored)
    expected = [("s-1", 9, bundle, 0) for bundle in range(4) for _ in range(20)]
    assert coordinates(rows.table) == expected
    times = rows.table.column("ingested_time").cast(pa.int64()).to_pylist()
    assert times == [(INGESTED + bundle * 1_000_000) // 1000 for *_, bundle, _ in expected]
    assert rows.table.column(FROM_INGESTION).to_pylist() == [False] * 80


def test_no_more_is_taken_than_a_group_needs() -> None:
    taken = 0

    def endless() -> Iterator[StoredRequest]:
        nonlocal taken
        for number, data in enumerate(Telemetry(3).requests(Signal.LOGS)):
            taken += len(data)
            yield StoredRequest(data, Source("s", 0, number, 0), INGESTED)

    size = 200_000
    done = largest = 0
    groups = decode_rows(Signal.LOGS, endless(), group_bytes=size)
    for _ in range(10):
        rows = next(groups)
        done += rows.request_bytes
        largest = max(largest, rows.request_bytes)
        assert taken - done <= size // 2  # the one that did not fit
    assert size // 2 < largest <= size


# --- What cannot be decoded -----------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.sampled_from([1, 5_000, 10**9]))
def test_a_bad_request_is_a_letter_and_touches_no_other(good: list[bool], group: int) -> None:
    stored = [
        request if fine else request._replace(data=BROKEN)
        for request, fine in zip(
            requests_for(Signal.LOGS, requests=len(good), items=3), good, strict=True
        )
    ]
    groups = list(decode_rows(Signal.LOGS, stored, group_bytes=group))
    table = pa.concat_tables(group.table for group in groups)
    letters = [letter for group in groups for letter in group.letters]
    assert [row[2] for row in coordinates(table)] == [
        bundle for bundle, fine in enumerate(good) if fine for _ in range(3)
    ]
    assert [letter.source.bundle for letter in letters] == [
        bundle for bundle, fine in enumerate(good) if not fine
    ]
    for letter in letters:
        assert letter.data == BROKEN
        assert letter.reason
        assert letter.ingested_ns == stored[letter.source.bundle].ingested_ns


def test_a_group_that_is_refused_as_a_whole_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = requests_for(Signal.TRACES, requests=9)
    culprit = stored[5].data

    def refusing(
        signal: Signal, requests: list[bytes], config: OtlpConfig, sources: list[Source]
    ) -> Decoded:
        if culprit in requests or len(requests) > 4:
            raise InvalidRequest("too much is repeated", where="resource_spans[0]")
        return decode(signal, requests, config, sources)

    monkeypatch.setattr(decoding, "decode", refusing)
    (rows,) = decode_rows(Signal.TRACES, stored)
    assert [letter.source.bundle for letter in rows.letters] == [5]
    assert rows.letters[0].where == "resource_spans[0]"
    found = [row[2] for row in coordinates(rows.table)]
    assert found == [bundle for bundle in range(9) if bundle != 5 for _ in range(20)]


def test_only_letters_make_an_empty_table() -> None:
    (rows,) = decode_rows(Signal.LOGS, [StoredRequest(BROKEN, Source("s", 1, 2, 3), 0)])
    assert rows.table.schema.equals(file_schema(Signal.LOGS))
    assert rows.table.num_rows == 0
    assert len(rows.letters) == 1
    assert list(decode_rows(Signal.LOGS, [])) == []


def test_letters_are_kept_under_their_coordinates(tmp_path: Path) -> None:
    letter = DeadLetter(Signal.LOGS, Source("01J", 4, 5, 6), 7, "why", "byte 3", BROKEN)
    for _ in range(2):  # a second attempt writes the same
        assert write_letters(LocalPlace(tmp_path), [letter]) == 1
    folder = tmp_path / "dead_letter" / "logs"
    assert sorted(path.name for path in folder.iterdir()) == ["01J-4-5-6.bin", "01J-4-5-6.json"]
    assert (folder / "01J-4-5-6.bin").read_bytes() == BROKEN
    assert json.loads((folder / "01J-4-5-6.json").read_text()) == {
        "signal": "logs",
        "store": "01J",
        "segment": 4,
        "bundle": 5,
        "row": 6,
        "ingested_ns": 7,
        "reason": "why",
        "where": "byte 3",
        "bytes": 3,
    }


# --- What a store keeps -------------------------------------------------------------------------


def segment_of(tmp_path: Path, bundles: list[RecordBundle]) -> SegmentReader:
    opened = OpenSegment()
    for sequence, bundle in enumerate(bundles):
        opened.append(bundle, sequence)
    path = tmp_path / "0000000000000003.qseg"
    write_segment(RealDisk(), path, opened, sync_every=None)
    return SegmentReader.open(RealDisk(), path)


def bundle_of(signal: Signal, requests: list[bytes], when: int) -> RecordBundle:
    return to_bundle(Item(signal=signal, requests=tuple(requests), received_ns=when))


def test_requests_of_a_segment_are_those_of_the_signal(tmp_path: Path) -> None:
    made = {signal: Telemetry(1, Shape(items_per_request=4)).take(signal, 3) for signal in SIGNALS}
    bundles = [
        bundle_of(Signal.TRACES, made[Signal.TRACES][:2], 100),
        bundle_of(Signal.LOGS, made[Signal.LOGS][:1], 200),
        bundle_of(Signal.TRACES, made[Signal.TRACES][2:], 300),
    ]
    reader = segment_of(tmp_path, bundles)
    found = list(requests_of_segment(reader, Signal.TRACES, store="s", segment=3))
    assert found == [
        StoredRequest(made[Signal.TRACES][0], Source("s", 3, 0, 0), 100),
        StoredRequest(made[Signal.TRACES][1], Source("s", 3, 0, 1), 100),
        StoredRequest(made[Signal.TRACES][2], Source("s", 3, 2, 0), 300),
    ]
    chosen = requests_of_segment(reader, Signal.TRACES, store="s", segment=3, bundles=[2])
    assert list(chosen) == found[2:]
    assert list(requests_of_segment(reader, Signal.METRICS, store="s", segment=3)) == []


def test_a_bundle_that_cannot_be_read_is_a_letter(tmp_path: Path) -> None:
    requests = Telemetry(1, Shape(items_per_request=4)).take(Signal.LOGS, 1)
    traces = Telemetry(1, Shape(items_per_request=4)).take(Signal.TRACES, 1)
    bundles = [bundle_of(Signal.LOGS, requests, 100), bundle_of(Signal.TRACES, traces, 200)]
    reader = segment_of(tmp_path, bundles)
    stream = next(s for s in reader.streams if s.slot_id == Slot.OTLP_LOGS)
    data = bytearray((tmp_path / "0000000000000003.qseg").read_bytes())
    data[stream.byte_offset + stream.byte_length // 2] ^= 1
    damaged = SegmentReader(pa.py_buffer(bytes(data)), source="damaged")
    (letter,) = requests_of_segment(damaged, Signal.LOGS, store="s", segment=3)
    assert isinstance(letter, DeadLetter)
    assert letter.source == Source("s", 3, 0, 0)
    assert letter.ingested_ns == 100
    (fine,) = requests_of_segment(damaged, Signal.TRACES, store="s", segment=3)
    assert isinstance(fine, StoredRequest)


@pytest.mark.parametrize("signal", SIGNALS)
def test_otap_tables_are_decoded_like_the_request_they_come_from(signal: Signal) -> None:
    (request,) = Telemetry(2, Shape(items_per_request=30)).take(signal, 1)
    (tables,) = to_otap(signal, [request]).batches
    bundle = to_bundle(Item(signal=signal, tables=tables, received_ns=INGESTED))
    (stored,) = requests_of_bundle(bundle, signal, Source("s", 1, 2, 0))
    (rows,) = decode_rows(signal, [stored])
    assert rows.letters == []
    assert rows.table.num_rows == 30
    assert set(coordinates(rows.table)) == {("s", 1, 2, 0)}


def test_a_bundle_that_is_no_telemetry_is_a_letter_with_its_batches() -> None:
    wrong = pa.record_batch({"x": [1, 2]})
    bundle = RecordBundle.from_batches({Slot.SPANS: wrong}, ingestion_time_ns=5)
    (letter,) = requests_of_bundle(bundle, Signal.TRACES, Source("s", 1, 2, 0))
    assert isinstance(letter, DeadLetter)
    assert letter.reason
    assert pa.ipc.open_stream(letter.data).read_all().to_pylist() == wrong.to_pylist()
    assert list(requests_of_bundle(bundle, Signal.LOGS, Source("s", 1, 2, 0))) == []
