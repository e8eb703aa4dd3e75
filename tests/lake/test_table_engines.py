"""The same table in DuckDB, DataFusion and Polars, none of them told anything: the same answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datafusion import SessionContext
from lake_tables import START, rows_for

from quiver.bundle import Signal
from quiver.config import PromotedAttribute
from quiver.lake.files import FileOptions, write_files
from quiver.lake.layout import store_app
from quiver.lake.table import LakeTable

if TYPE_CHECKING:
    from s3 import S3Server  # which pytest imports itself, as a plugin

pytest_plugins = ["s3"]

Rows: TypeAlias = list[tuple[Any, ...]]
DAY = 86_400_000_000_000
METHOD = PromotedAttribute(key="http.request.method", column="method")
SMALL = FileOptions(max_rows=40, row_group_rows=16, page_rows=8)
A = store_app("a")
# What follows FROM, by name; all engines take the same words.
QUERIES = {
    "all": "SELECT count(*) FROM t",
    "by service": "SELECT service_name, count(*), min({n}), max({n}) FROM t GROUP BY 1",
    "by day": "SELECT year, month, day, count(*) FROM t GROUP BY 1, 2, 3",
    "one day": "SELECT count(*) FROM t WHERE year = 2025 AND month = 10 AND day = 8",
    "promoted": "SELECT method, count(*) FROM t GROUP BY 1",
    "one method": "SELECT count(*) FROM t WHERE method = 'GET'",
    "flagged": "SELECT date_from_ingestion, count(*) FROM t GROUP BY 1",
    "sources": "SELECT source_store, source_segment, count(*) FROM t GROUP BY 1, 2",
}
NANOS = {
    Signal.TRACES: "start_time_unix_nano",
    Signal.LOGS: "time_unix_nano",
    Signal.METRICS: "time_unix_nano",
}


def fill(table: LakeTable, root: str | Path, options: dict[str, str] | None) -> LakeTable:
    """Three days, a column that came later, files replaced, and an orphan."""
    signal = table.signal
    for back in range(3):
        rows = rows_for(signal, store="a", segment=back, start=START - back * DAY)
        files = write_files(table.place, signal, rows, name=f"{back}", options=SMALL)
        table.append(files, {A: back + 1})
    wider = LakeTable.open(root, signal, promoted=[METHOD], storage_options=options)
    rows = rows_for(signal, [METHOD], store="a", segment=3, seed=6)
    wider.append(write_files(wider.place, signal, rows, name="3"), {A: 4})
    old = [file for file in wider.files() if file.partition.day == 7]
    read = [pq.read_table(pa.BufferReader(wider.place.read(file.path))) for file in old]
    new = write_files(wider.place, signal, pa.concat_tables(read), name="compacted")
    wider.replace(old, new, data_change=False)
    write_files(wider.place, signal, rows, name="orphan")
    return wider


def with_duckdb(table: LakeTable, query: str) -> Rows:
    connection = duckdb.connect()
    connection.register("t", table.delta.to_pyarrow_dataset())
    return connection.execute(query).fetchall()


def with_datafusion(table: LakeTable, query: str) -> Rows:
    context = SessionContext()
    if table.place.storage_options is None:
        context.register_table("t", cast("Any", table.delta))
    else:  # there it would want to be told of the object store
        context.register_dataset("t", table.delta.to_pyarrow_dataset())
    answer = context.sql(query).to_arrow_table()
    columns = (column.to_pylist() for column in answer.columns)
    return list(zip(*columns, strict=True))


def with_polars(table: LakeTable, query: str) -> Rows:
    frame = pl.scan_delta(table.place.location, storage_options=table.place.storage_options)
    return (
        pl.SQLContext(t=frame, eager=True)
        .execute(query.replace("count(*)", "count(*) AS n"), eager=True)
        .rows()
    )


ENGINES: dict[str, Callable[[LakeTable, str], Rows]] = {
    "duckdb": with_duckdb,
    "datafusion": with_datafusion,
    "polars": with_polars,
}


def plain_rows(table: LakeTable) -> list[dict[str, Any]]:
    """What the files hold, without any engine."""
    found: list[dict[str, Any]] = []
    for file in table.files():
        read = pq.ParquetFile(pa.BufferReader(table.place.read(file.path))).read()
        rows = read.to_pylist()
        day = file.partition._asdict()
        found += [{"method": None, **row, **day} for row in rows]
    return found


def expected(rows: list[dict[str, Any]], name: str, nanos: str) -> Rows:
    if name == "all":
        return [(len(rows),)]
    if name == "by service":
        services = {row["service_name"] for row in rows}
        of = {s: [row[nanos] for row in rows if row["service_name"] == s] for s in services}
        return [(s, len(times), min(times), max(times)) for s, times in of.items()]
    if name == "one day":
        return [(sum(row["day"] == 8 for row in rows),)]
    if name == "one method":
        return [(sum(row["method"] == "GET" for row in rows),)]
    keys = {
        "by day": ("year", "month", "day"),
        "promoted": ("method",),
        "flagged": ("date_from_ingestion",),
        "sources": ("source_store", "source_segment"),
    }[name]
    counted = Counter(tuple(row[key] for key in keys) for row in rows)
    return [(*key, count) for key, count in counted.items()]


def check(table: LakeTable) -> None:
    rows = plain_rows(table)
    nanos = NANOS[table.signal]
    for name, query in QUERIES.items():
        wanted = Counter(expected(rows, name, nanos))
        for engine, run in ENGINES.items():
            found = Counter(map(tuple, run(table, query.format(n=nanos))))
            assert found == wanted, f"{engine}: {name}"
    assert len(rows) == 240


@pytest.mark.parametrize("signal", list(Signal))
def test_engines_agree(signal: Signal, tmp_path: Path) -> None:
    check(fill(LakeTable.open(tmp_path, signal), tmp_path, None))


@pytest.mark.xdist_group("s3")
def test_engines_agree_on_an_object_store(s3_server: S3Server) -> None:
    root = s3_server.url("lake-engines")
    table = LakeTable.open(root, Signal.TRACES, storage_options=s3_server.keys)
    check(fill(table, root, s3_server.keys))


def test_a_list_of_files_is_enough_for_duckdb(tmp_path: Path) -> None:
    table = fill(LakeTable.open(tmp_path, Signal.TRACES), tmp_path, None)
    query = (
        "SELECT count(*), count(method), count(*) FILTER (month = 10 AND day = 8) "
        "FROM read_parquet($files, union_by_name = true)"
    )
    found = duckdb.connect().execute(query, {"files": table.delta.file_uris()}).fetchall()
    rows = plain_rows(table)
    with_method = sum(row["method"] is not None for row in rows)
    assert found == [(240, with_method, sum(row["day"] == 8 for row in rows))]


def test_attributes_are_reached_by_key_in_all_engines(tmp_path: Path) -> None:
    table = fill(LakeTable.open(tmp_path, Signal.TRACES), tmp_path, None)
    rows = plain_rows(table)
    wanted = Counter(
        value["string_value"]
        for row in rows
        for key, value in row["attributes"]
        if key == "http.request.method"
    )
    values = {
        "duckdb": "attributes['http.request.method'].string_value",
        "datafusion": "attributes['http.request.method']['string_value']",
    }
    for engine, value in values.items():
        query = f"SELECT {value}, count(*) FROM t GROUP BY 1"  # noqa: S608 - of this test
        found = {text: count for text, count in ENGINES[engine](table, query) if text}
        assert found == dict(wanted)


def test_a_trace_is_found_by_its_id(tmp_path: Path) -> None:
    """Statistics, page indexes and bloom filters let engines skip: never what they look for."""
    table = fill(LakeTable.open(tmp_path, Signal.TRACES), tmp_path, None)
    wanted = Counter(row["trace_id"] for row in plain_rows(table))
    connection = duckdb.connect()
    files = table.delta.file_uris()
    for trace_id in [*wanted, "0" * 32, "f" * 32, "7" * 32]:
        query = f"SELECT count(*) FROM t WHERE trace_id = '{trace_id}'"  # noqa: S608 - made up
        for engine, run in ENGINES.items():
            assert run(table, query) == [(wanted[trace_id],)], engine
        direct = (
            "SELECT count(*) FROM read_parquet($files, union_by_name = true) WHERE trace_id = $id"
        )
        found = connection.execute(direct, {"files": files, "id": trace_id}).fetchall()
        assert found == [(wanted[trace_id],)]
