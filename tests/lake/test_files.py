"""Files of the lake: which rows are in which, in what order, and what is said about them."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lake_tables import START, rows_for

from quiver.bundle import Signal
from quiver.config import AttributeType, PromotedAttribute
from quiver.errors import InvalidConfig, InvalidName
from quiver.lake.files import MAX_TEXT, FileOptions, NewFile, encode_rows, statistics, write_files
from quiver.lake.layout import SORT_KEYS, Partition, file_schema
from quiver.lake.places import LocalPlace

SIGNALS = list(Signal)
DAY_NS = 86_400_000_000_000
SMALL = FileOptions(max_rows=50, row_group_rows=16, page_rows=4)


def read(folder: Path, file: NewFile) -> pa.Table:
    return pq.ParquetFile(folder / file.path).read()


def midnight_rows(signal: Signal) -> pa.Table:
    """Rows around a midnight."""
    midnight = START // DAY_NS * DAY_NS + DAY_NS
    return rows_for(signal, requests=6, items=40, start=midnight - 3_000_000)


@pytest.mark.parametrize("signal", SIGNALS)
def test_every_row_is_in_the_folder_of_its_day_once(signal: Signal, tmp_path: Path) -> None:
    parts = [rows_for(signal, start=START + day * DAY_NS, segment=day) for day in (0, -1, 0)]
    rows = pa.concat_tables([*parts, midnight_rows(signal)])
    files = write_files(LocalPlace(tmp_path), signal, rows, name="b-1")
    assert len({file.partition for file in files}) >= 2
    keys = ["source_segment", "source_bundle", "source_scope", "source_item", "ingested_time"]
    found: Counter[Any] = Counter()
    for file in files:
        table = read(tmp_path, file)
        assert table.num_rows == file.rows
        assert (tmp_path / file.path).stat().st_size == file.size
        assert file.path.startswith(file.partition.folder + "/b-1-")
        assert table.schema.equals(file_schema(signal))
        time = SORT_KEYS[signal][-1].removesuffix("_unix_nano")
        times: Any = table.column(time).to_pylist()
        assert {when.date() for when in times} == {file.partition.date}
        found.update(zip(*(table.column(key).to_pylist() for key in keys), strict=True))
    expected = zip(*(rows.column(key).to_pylist() for key in keys), strict=True)
    assert found == Counter(expected)


@pytest.mark.parametrize("signal", SIGNALS)
def test_rows_are_sorted_and_files_and_groups_are_small(signal: Signal, tmp_path: Path) -> None:
    rows = rows_for(signal, requests=8, items=30)
    files = write_files(LocalPlace(tmp_path), signal, rows, name="x", options=SMALL)
    assert len(files) > 1
    order: list[Any] = []
    for file in files:
        assert file.rows <= SMALL.max_rows
        opened = pq.ParquetFile(tmp_path / file.path)
        meta = opened.metadata
        assert all(meta.row_group(n).num_rows <= 16 for n in range(meta.num_row_groups))
        table = opened.read(columns=list(SORT_KEYS[signal]))
        order += zip(*(table.column(key).to_pylist() for key in SORT_KEYS[signal]), strict=True)
        named = [meta.schema.column(c.column_index).path for c in meta.row_group(0).sorting_columns]
        assert named == list(SORT_KEYS[signal])
    present = [key for key in order if None not in key]
    assert present == sorted(present)


def test_pages_have_an_index_and_trace_ids_a_filter(tmp_path: Path) -> None:
    for signal in (Signal.TRACES, Signal.LOGS):
        rows = rows_for(signal)
        (file,) = write_files(LocalPlace(tmp_path), signal, rows, name="x")
        group = pq.ParquetFile(tmp_path / file.path).metadata.row_group(0)
        columns = [group.column(n) for n in range(group.num_columns)]
        assert all(column.has_offset_index for column in columns)
        assert all(column.compression == "ZSTD" for column in columns)
        by_path = {column.path_in_schema: column for column in columns}
        with_filter, _ = encode_rows(signal, rows)
        without, _ = encode_rows(signal, rows, FileOptions(bloom_fpp=0))
        assert with_filter.size > without.size
        assert "RLE_DICTIONARY" not in by_path["trace_id"].encodings
        assert "RLE_DICTIONARY" in by_path["attributes.key_value.key"].encodings


def test_a_second_attempt_writes_other_files(tmp_path: Path) -> None:
    rows = rows_for(Signal.LOGS)
    first = write_files(LocalPlace(tmp_path), Signal.LOGS, rows, name="same")
    second = write_files(LocalPlace(tmp_path), Signal.LOGS, rows, name="same")
    assert {file.path for file in first}.isdisjoint(file.path for file in second)


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    rows = rows_for(Signal.LOGS).slice(0, 0)
    assert write_files(LocalPlace(tmp_path), Signal.LOGS, rows, name="x") == []


def test_partition_columns_are_left_out(tmp_path: Path) -> None:
    rows = rows_for(Signal.LOGS)
    with_day = rows.append_column("day", pa.array([9] * rows.num_rows, pa.int32()))
    (file,) = write_files(LocalPlace(tmp_path), Signal.LOGS, with_day, name="x")
    assert read(tmp_path, file).schema.names == file_schema(Signal.LOGS).names
    assert file.partition == Partition(2025, 10, 9)


def test_names_and_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidName):
        write_files(LocalPlace(tmp_path), Signal.LOGS, rows_for(Signal.LOGS), name="../x")
    with pytest.raises(InvalidConfig):
        FileOptions(max_rows=0)
    with pytest.raises(InvalidConfig):
        FileOptions(bloom_fpp=1)


# --- Statistics ---------------------------------------------------------------------------------

PROMOTED = [
    PromotedAttribute(key="http.request.method", column="method"),
    PromotedAttribute(key="server.port", column="port", type=AttributeType.INT),
]
TELLING = {
    Signal.TRACES: {"trace_id", "start_time", "service_name", "status_code", "method", "port"},
    Signal.LOGS: {"trace_id", "time", "service_name", "severity_number"},
    Signal.METRICS: {"name", "time", "service_name"},
}


@pytest.mark.parametrize("signal", SIGNALS)
def test_statistics_are_bounds_of_the_rows(signal: Signal, tmp_path: Path) -> None:
    rows = rows_for(signal, PROMOTED, requests=6, items=40)
    for file in write_files(LocalPlace(tmp_path), signal, rows, name="x", options=SMALL):
        table, stats = read(tmp_path, file), json.loads(file.stats)
        assert stats["numRecords"] == table.num_rows
        assert stats["minValues"].keys() == stats["maxValues"].keys()
        known = TELLING[signal] | {"ingested_time", "source_store", "source_segment"}
        assert known <= stats["nullCount"].keys()
        for name, nulls in stats["nullCount"].items():
            assert table.column(name).null_count == nulls
            bounds: Any = pc.min_max(table.column(name)).as_py()
            if bounds["min"] is None:
                assert name not in stats["minValues"]
                continue
            low, high = stats["minValues"][name], stats["maxValues"][name]
            if isinstance(bounds["min"], dt.datetime):
                low, high = dt.datetime.fromisoformat(low), dt.datetime.fromisoformat(high)
                assert (low, high) == (bounds["min"], bounds["max"])
            assert low <= bounds["min"] <= bounds["max"] <= high
        assert len(file.stats) < 4000


TEXTS = st.text(st.characters(codec="utf-8"), min_size=0, max_size=MAX_TEXT + 8)
AWKWARD = st.text(st.sampled_from("a\ud7ff\ue000\U0010ffff"), min_size=30, max_size=40)


@given(st.lists(TEXTS | AWKWARD | st.none(), min_size=1, max_size=8))
def test_long_texts_are_cut_and_stay_bounds(texts: list[str | None]) -> None:
    table = pa.table({"service_name": pa.array(texts, pa.string())})
    _, stats = encode_rows(Signal.LOGS, table)
    facts = json.loads(stats)
    known = [text.encode() for text in texts if text is not None]
    assert facts["nullCount"] == {"service_name": len(texts) - len(known)}
    if not facts["minValues"]:
        # Nothing is larger than 32 of the last character.
        assert not known or max(known).decode().startswith("\U0010ffff" * MAX_TEXT)
        return
    low, high = facts["minValues"]["service_name"], facts["maxValues"]["service_name"]
    assert len(low) <= MAX_TEXT
    assert len(high) <= MAX_TEXT
    assert low.encode() <= min(known)
    assert max(known) <= high.encode()


def test_what_no_bound_can_hold_has_none() -> None:
    table = pa.table(
        {"sum": [1.0, float("nan")], "is_monotonic": [True, False], "raw": [b"a", b"b"]}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    facts = json.loads(statistics(pq.read_metadata(pa.BufferReader(sink.getvalue()))))
    assert facts == {"numRecords": 2, "minValues": {}, "maxValues": {}, "nullCount": {}}
