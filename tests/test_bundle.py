"""Slots, signals, fingerprints."""

from __future__ import annotations

import pyarrow as pa
import pytest
from bundles import numbers
from hypothesis import given
from hypothesis import strategies as st

from quiver.bundle import (
    Payload,
    RecentSchemas,
    RecordBundle,
    Signal,
    Slot,
    fingerprint,
    schema_id,
    signal_of,
    slot_name,
)
from quiver.errors import InvalidBundle

KEY = pa.dictionary(pa.uint8(), pa.string())


@pytest.mark.parametrize(
    ("fields", "text", "digest"),
    [
        (
            [("value", pa.int64())],
            "value:I64",
            "3e24628445108968fbd72b38b33f6a3c6458f00b8fbfd79da2c893702f5ef889",
        ),
        (
            [("timestamp", pa.int64()), ("value", pa.int64()), ("message", pa.string())],
            "timestamp:I64,value:I64,message:Str",
            "4cbca6fc6c5524aa5fc15984daad5e152a101acc3909c2b713bf7fd6d975bcb5",
        ),
        (
            [("id", pa.uint16()), ("parent_id", pa.uint16()), ("key", KEY)],
            "id:U16,parent_id:U16,key:Dic<U8,Str>",
            "2b4ad421a4dc63dbb9039d8e671496376700ee96af2c4cb3c0f49cb7e38d5a73",
        ),
    ],
)
def test_fingerprints_of_the_reference(
    fields: list[tuple[str, pa.DataType]], text: str, digest: str
) -> None:
    schema = pa.schema(fields)
    assert schema_id(schema) == text
    assert fingerprint(schema).hex() == digest


@pytest.mark.parametrize(
    ("data_type", "text"),
    [
        (pa.bool_(), "Bol"),
        (pa.uint8(), "U8"),
        (pa.uint16(), "U16"),
        (pa.uint32(), "U32"),
        (pa.uint64(), "U64"),
        (pa.int8(), "I8"),
        (pa.int16(), "I16"),
        (pa.int32(), "I32"),
        (pa.float32(), "F32"),
        (pa.float64(), "F64"),
        (pa.binary(), "Bin"),
        (pa.binary(4), "FSB<4>"),
        (pa.timestamp("s"), "Tns"),
        (pa.timestamp("us", "UTC"), "Tns"),
        (pa.duration("ms"), "Dur"),
        (pa.list_(pa.uint8()), "[U8]"),
        (pa.map_(pa.string(), pa.list_(pa.uint16())), "Map<Str,[U16]>"),
        (pa.struct([("b", pa.uint16()), ("a", pa.uint8())]), "{b:U16,a:U8}"),
        (pa.dense_union([pa.field("b", pa.int8()), pa.field("a", pa.int8())]), "DU{b:I8,a:I8}"),
        (pa.sparse_union([pa.field("b", pa.int8())]), "SU{b:I8}"),
    ],
)
def test_types_that_the_reference_knows(data_type: pa.DataType, text: str) -> None:
    assert schema_id(pa.schema([("f", data_type)])) == f"f:{text}"


@pytest.mark.parametrize(
    ("data_type", "text"),
    [
        (pa.null(), "Nul"),
        (pa.float16(), "F16"),
        (pa.large_string(), "LStr"),
        (pa.large_binary(), "LBin"),
        (pa.large_list(pa.string()), "L[Str]"),
        (pa.string_view(), "VStr"),
        (pa.binary_view(), "VBin"),
        (pa.list_view(pa.int8()), "V[I8]"),
        (pa.large_list_view(pa.int8()), "LV[I8]"),
        (pa.list_(pa.int8(), 3), "FSL<3>[I8]"),
        (pa.date32(), "D32"),
        (pa.date64(), "D64"),
        (pa.time32("s"), "T32"),
        (pa.time64("us"), "T64"),
        (pa.decimal32(5, 2), "Dec32<5,2>"),
        (pa.decimal128(10, 2), "Dec128<10,2>"),
        (pa.decimal256(40, 0), "Dec256<40,0>"),
        (pa.month_day_nano_interval(), "Ivl"),
        (pa.run_end_encoded(pa.int32(), pa.string()), "REE<I32,Str>"),
        (pa.uuid(), "FSB<16>"),
        (pa.json_(), "Str"),
    ],
)
def test_types_that_stop_the_reference_have_a_text_of_ours(
    data_type: pa.DataType, text: str
) -> None:
    assert schema_id(pa.schema([("f", data_type)])) == f"f:{text}"


def test_nullability_metadata_and_units_do_not_change_the_fingerprint() -> None:
    plain = pa.schema([pa.field("t", pa.timestamp("ns"))])
    other = pa.schema(
        [pa.field("t", pa.timestamp("s", "UTC"), nullable=False, metadata={"k": "v"})],
        metadata={"k": "v"},
    )
    assert fingerprint(plain) == fingerprint(other)


def test_nesting_without_end_is_refused() -> None:
    data_type: pa.DataType = pa.int8()
    for _ in range(70):
        data_type = pa.list_(data_type)
    with pytest.raises(InvalidBundle, match="64 deep"):
        schema_id(pa.schema([("f", data_type)]))


@given(st.lists(st.integers(0, 200), max_size=300))
def test_recent_schemas_gives_what_the_function_gives(widths: list[int]) -> None:
    recent = RecentSchemas(schema_id, size=8)
    for width in widths:
        schema = pa.schema([("f", pa.binary(width))], metadata={"w": str(width)})
        assert recent(schema) == schema_id(schema)


def test_recent_schemas_tells_metadata_apart() -> None:
    recent = RecentSchemas(lambda schema: schema.metadata)
    plain = pa.schema([("f", pa.int8())])
    assert recent(plain) is None
    assert recent(plain.with_metadata({"k": "v"})) == {b"k": b"v"}


def test_slots_have_the_names_and_numbers_of_otap() -> None:
    assert slot_name(30) == "LOGS"
    assert slot_name(45) == "SPAN_LINK_ATTRS"
    assert slot_name(7) == "SLOT_7"
    assert len(Slot) == 31
    assert max(Slot) == 63


@pytest.mark.parametrize(
    ("slots", "signal"),
    [
        ([1, 2, 30, 31], Signal.LOGS),
        ([1, 40], Signal.TRACES),
        ([10, 11], Signal.METRICS),
        ([26], Signal.METRICS),
        ([60], Signal.LOGS),
        ([61], Signal.TRACES),
        ([62], Signal.METRICS),
        ([1, 2], None),
        ([], None),
        ([7, 30], None),
    ],
)
def test_signal_of_a_bundle(slots: list[int], signal: Signal | None) -> None:
    assert signal_of(slots) is signal


def test_every_named_slot_but_the_shared_ones_has_a_signal() -> None:
    without = [slot for slot in Slot if signal_of([slot]) is None]
    assert without == [Slot.RESOURCE_ATTRS, Slot.SCOPE_ATTRS, Slot.REQUEST_CONTEXT]


def test_absent_slots_are_left_out_and_order_is_kept() -> None:
    bundle = RecordBundle.from_batches(
        {31: numbers(1), 2: None, 30: numbers(2, 3)}, ingestion_time_ns=5
    )
    assert list(bundle.payloads) == [31, 30]
    assert bundle.batch(2) is None
    assert bundle.batch(30) == numbers(2, 3)
    assert bundle.row_count == 3
    assert bundle.item_count is None
    assert bundle.signal is Signal.LOGS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"payloads": {64: Payload(numbers(1), bytes(32))}}, "slot 64"),
        ({"payloads": {-1: Payload(numbers(1), bytes(32))}}, "slot -1"),
        ({"payloads": {1: Payload(numbers(1), bytes(31))}}, "31 bytes"),
        ({"ingestion_time_ns": -1}, "ingestion time -1"),
        ({"ingestion_time_ns": 2**63}, "ingestion time"),
        ({"item_count": -1}, "item count"),
        ({"item_count": 2**64}, "item count"),
    ],
)
def test_bundles_that_cannot_be_stored(changes: dict[str, object], reason: str) -> None:
    facts: dict[str, object] = {"payloads": {}, "ingestion_time_ns": 0} | changes
    with pytest.raises(InvalidBundle, match=reason):
        RecordBundle(**facts)  # type: ignore[arg-type]
