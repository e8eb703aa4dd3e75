"""The lake's tables in the engines that people query them with, none of them told anything."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datafusion import SessionContext
from otlp_messages import serialised

from quiver.bundle import Signal
from quiver.config import PromotedAttribute
from quiver.otlp.flat import from_flat, to_flat
from quiver.otlp.messages import request_type
from quiver.otlp.plain import plain_rows
from quiver.testing.telemetry import Shape, Telemetry

Rows: TypeAlias = list[tuple[Any, ...]]
Cell: TypeAlias = Any  # a string, a number or null
Spark: TypeAlias = Any  # only those who have it can name its type
Run: TypeAlias = Callable[[str, Path], Rows]

SIGNALS = list(Signal)
KEYS = {
    Signal.TRACES: "http.request.method",
    Signal.LOGS: "exception.type",
    Signal.METRICS: "http.request.method",
}
TIMES = {Signal.TRACES: "start_time", Signal.LOGS: "time", Signal.METRICS: "time"}


@dataclass(frozen=True)
class Dialect:
    """How an engine spells what SQL has no common words for; as in docs/lake-schema.md."""

    value: str
    first: str
    micros: str
    day: str = "{column} >= TIMESTAMP '2025-10-09 00:00:00Z'"


DUCKDB = Dialect(
    value="{map}['{key}'].{member}",
    first="{list}[1].{field}",
    micros="epoch_us({column})",
)
DATAFUSION = Dialect(
    value="{map}['{key}']['{member}']",
    first="{list}[1]['{field}']",
    micros="CAST({column} AS BIGINT)",
)
SPARK = Dialect(
    value="{map}['{key}'].{member}",
    first="get({list}, 0).{field}",
    micros="unix_micros({column})",
)


@dataclass(frozen=True)
class Lake:
    """The tables of some requests, the requests, and their rows."""

    requests: dict[Signal, list[bytes]]
    files: dict[Signal, Path]
    rows: dict[Signal, list[dict[str, Any]]]
    request_of_row: dict[Signal, pa.Int32Array]


def with_a_key_twice(signal: Signal) -> bytes:
    """A request whose item has two attributes of the same name."""
    message: Any = next(Telemetry(4, Shape(items_per_request=1)).request_messages(signal))
    item: Any = {
        Signal.TRACES: lambda: message.resource_spans[0].scope_spans[0].spans[0],
        Signal.LOGS: lambda: message.resource_logs[0].scope_logs[0].log_records[0],
        Signal.METRICS: lambda: (
            message.resource_metrics[0]
            .scope_metrics[0]
            .metrics[0]
            .sum.data_points.add(time_unix_nano=1_760_000_000_000_000_000)
        ),
    }[signal]()
    for text in ("first", "second"):
        item.attributes.add(key="twice").value.string_value = text
    return serialised(message)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    folder = tmp_path_factory.mktemp("lake")
    lake = Lake({}, {}, {}, {})
    for signal in SIGNALS:
        telemetry = Telemetry(11, Shape(items_per_request=120, error_share=0.2))
        requests = [*telemetry.take(signal, 3), with_a_key_twice(signal)]
        promoted = [PromotedAttribute(key=KEYS[signal], column="promoted")]
        batch = request_type(signal).converter.list_to_record_batch(requests)
        numbers = np.arange(len(requests), dtype=np.int32)
        table, lake.request_of_row[signal] = to_flat(signal, batch, numbers, promoted)
        lake.requests[signal] = requests
        lake.files[signal] = folder / f"{signal.value}.parquet"
        pq.write_table(pa.table(table), lake.files[signal])
        lake.rows[signal] = [row for _, row in plain_rows(signal, requests, promoted)]
    return lake


def counted(rows: list[Any]) -> list[tuple[Any, int]]:
    return sorted(Counter(row for row in rows if row is not None).items())


def attribute(row: dict[str, Any], column: str, key: str, member: str) -> Cell:
    found = next((value for name, value in row[column] or [] if name == key), None)
    return found and found[member]


def check(signal: Signal, lake: Lake, dialect: Dialect, run: Run) -> None:
    """Ask what people ask, and compare with the rows made the plain way."""
    rows, file = lake.rows[signal], lake.files[signal]

    def groups(expression: str) -> list[tuple[Any, int]]:
        query = f"SELECT {expression}, count(*) FROM lake GROUP BY {expression}"  # noqa: S608
        return sorted((g, n) for g, n in run(query, file) if g is not None)

    assert run("SELECT count(*) FROM lake", file) == [(len(rows),)]
    key = KEYS[signal]
    by_key = counted([attribute(row, "attributes", key, "string_value") for row in rows])
    assert len(by_key) > 1
    value = dialect.value.format(map="attributes", key=key, member="string_value")
    assert groups(value) == by_key
    assert groups("promoted") == by_key
    (most, often), *_ = by_key
    assert run(f"SELECT count(*) FROM lake WHERE {value} = '{most}'", file) == [(often,)]  # noqa: S608 - its own words

    hosts = [attribute(row, "resource_attributes", "host.name", "string_value") for row in rows]
    host = dialect.value.format(map="resource_attributes", key="host.name", member="string_value")
    assert groups(host) == counted(hosts) != []
    pids = [attribute(row, "resource_attributes", "process.pid", "int_value") for row in rows]
    pid = dialect.value.format(map="resource_attributes", key="process.pid", member="int_value")
    assert groups(pid) == counted(pids) != []
    assert groups("service_name") == counted([row["service_name"] for row in rows])

    time = TIMES[signal]
    micros = dialect.micros.format(column=time)
    times = [row[f"{time}_unix_nano"] // 1000 for row in rows]
    expected = [(min(times), max(times), len(rows))]
    day = f"SELECT min({micros}), max({micros}), count(*) FROM lake WHERE {dialect.day}"  # noqa: S608
    assert run(day.format(column=time), file) == expected

    twice = dialect.value.format(map="attributes", key="twice", member="string_value")
    ((found, _),) = groups(twice)
    assert found in {"first", "second"}
    check_own(signal, rows, dialect, groups)


def check_own(
    signal: Signal,
    rows: list[dict[str, Any]],
    dialect: Dialect,
    groups: Callable[[str], list[tuple[Any, int]]],
) -> None:
    """What only one signal has."""
    if signal is Signal.TRACES:
        names = [row["events"][0]["name"] for row in rows if row["events"]]
        assert groups(dialect.first.format(list="events", field="name")) == counted(names) != []
        kinds = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
        spelled = " ".join(f"WHEN {number} THEN '{name}'" for number, name in kinds.items())
        expected = counted([kinds[row["kind"]] for row in rows])
        assert groups(f"CASE kind {spelled} ELSE 'unspecified' END") == expected
        codes = ["error" if row["status_code"] == 2 else "not" for row in rows]
        assert groups("CASE status_code WHEN 2 THEN 'error' ELSE 'not' END") == counted(codes)
    elif signal is Signal.LOGS:
        bodies = [row["body"] and row["body"]["string_value"] for row in rows]
        member = "body['string_value']" if dialect is DATAFUSION else "body.string_value"
        assert groups(member) == counted(bodies) != []
    else:
        assert groups("type") == counted([row["type"] for row in rows])
        first = [row["bucket_counts"][0] for row in rows if row["bucket_counts"]]
        position = "get(bucket_counts, 0)" if dialect is SPARK else "bucket_counts[1]"
        assert groups(position) == counted(first) != []


def duckdb_table(query: str, file: Path) -> pa.Table:
    with duckdb.connect() as connection:
        found = connection.sql(query.replace("FROM lake", f"FROM '{file}'"))
        table: pa.Table = found.to_arrow_table()
        return table


def datafusion_table(query: str, file: Path) -> pa.Table:
    context = SessionContext()
    context.register_parquet("lake", str(file))
    table: pa.Table = context.sql(query).to_arrow_table()
    return table


def tuples(table: pa.Table) -> Rows:
    return [tuple(row.values()) for row in table.to_pylist()]


@pytest.mark.parametrize("signal", SIGNALS)
def test_duckdb_reads_the_tables(lake: Lake, signal: Signal) -> None:
    check(signal, lake, DUCKDB, lambda query, file: tuples(duckdb_table(query, file)))


@pytest.mark.parametrize("signal", SIGNALS)
def test_datafusion_reads_the_tables(lake: Lake, signal: Signal) -> None:
    check(signal, lake, DATAFUSION, lambda query, file: tuples(datafusion_table(query, file)))


@pytest.fixture
def spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spark]:
    from pyspark.sql import SparkSession

    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)  # or the workers are another Python
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # or it looks up the name of the machine
    session = (
        SparkSession.builder.master("local[2]")
        .appName("quiver-tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(tmp_path / "local"))
        .config("spark.sql.warehouse.dir", str(tmp_path / "warehouse"))
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.mark.spark
def test_spark_reads_the_tables(lake: Lake, spark: Spark) -> None:
    def run(query: str, file: Path) -> Rows:
        spark.read.parquet(str(file)).createOrReplaceTempView("lake")
        return [tuple(row) for row in spark.sql(query).collect()]

    for signal in SIGNALS:
        check(signal, lake, SPARK, run)


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("read", [duckdb_table, datafusion_table])
def test_rows_that_an_engine_answers_become_the_requests_that_were_sent(
    lake: Lake, signal: Signal, read: Callable[[str, Path], pa.Table]
) -> None:
    rows = read("SELECT * FROM lake", lake.files[signal])
    batch = from_flat(signal, rows, lake.request_of_row[signal])
    back = request_type(signal).converter.record_batch_to_array(batch)
    assert back.to_pylist() == lake.requests[signal]
