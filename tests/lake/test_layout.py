"""Names, columns and days of the lake's tables."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lake_tables import rows_for

from quiver.bundle import Signal
from quiver.config import PromotedAttribute
from quiver.errors import InvalidConfig, InvalidName
from quiver.lake.layout import (
    EVENT_TIMES,
    FROM_INGESTION,
    INGESTED,
    Partition,
    Window,
    check_name,
    days,
    file_schema,
    partition_of_day,
    partition_of_path,
    queue_app,
    store_app,
    table_schema,
    with_ingestion,
)
from quiver.otlp import lake_schema

UTC = dt.UTC
DAY = 86_400_000_000
TODAY = 20_000 * DAY + 12 * 3_600_000_000  # noon of a day in 2024
SIGNALS = list(Signal)


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_table_has_the_columns_of_the_lake_and_five_more(signal: Signal) -> None:
    schema = table_schema(signal, [PromotedAttribute(key="a.b", column="a_b")])
    lake = lake_schema(signal, [PromotedAttribute(key="a.b", column="a_b")])
    assert schema.names[: len(lake)] == lake.names
    assert schema.names[len(lake) :] == [INGESTED, FROM_INGESTION, "year", "month", "day"]
    assert (
        schema.names[:-3] == file_schema(signal, [PromotedAttribute(key="a.b", column="a_b")]).names
    )


@pytest.mark.parametrize("column", ["year", "Month", "ingested_time", "DATE_FROM_INGESTION"])
def test_a_promoted_column_cannot_take_a_name_of_the_lake(column: str) -> None:
    with pytest.raises(InvalidConfig, match="choose another name for 'key'"):
        table_schema(Signal.LOGS, [PromotedAttribute(key="key", column=column)])


def test_a_partition_is_a_folder_and_a_date() -> None:
    partition = Partition(2026, 3, 7)
    assert partition.folder == "year=2026/month=03/day=07"
    assert partition.values == {"year": "2026", "month": "3", "day": "7"}
    assert partition.date == dt.date(2026, 3, 7)
    assert Partition.of(dt.date(2026, 3, 7)) == partition
    assert partition_of_path(f"{partition.folder}/x.parquet") == partition
    assert partition_of_path("_delta_log/00000000000000000000.json") is None


@given(st.dates(dt.date(1970, 1, 1), dt.date(2262, 1, 1)))
def test_a_day_is_its_partition(date: dt.date) -> None:
    assert partition_of_day((date - dt.date(1970, 1, 1)).days) == Partition.of(date)


def test_apps() -> None:
    assert store_app("01J") == "quiver/store/01J"
    assert queue_app("q") == "quiver/queue/q"


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "a%20", "x" * 201, "é", "-"])
def test_names_that_would_change_in_a_url_are_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        check_name(name)


def test_a_window_cannot_be_negative() -> None:
    with pytest.raises(InvalidConfig):
        Window(before=dt.timedelta(days=-1))


# --- Which day ----------------------------------------------------------------------------------

EVENTS = {
    "now": (TODAY, False),
    "the day before": (TODAY - DAY, False),
    "30 days ago, to the microsecond": (TODAY - 30 * DAY, False),
    "longer ago": (TODAY - 30 * DAY - 1, True),
    "a day ahead, to the microsecond": (TODAY + DAY, False),
    "further ahead": (TODAY + DAY + 1, True),
    "zero": (0, True),
    "before 1970": (-5, True),
    "missing": (None, True),
}


@pytest.mark.parametrize("signal", SIGNALS)
def test_events_lie_under_their_date_unless_it_cannot_be_true(signal: Signal) -> None:
    events = [event for event, _ in EVENTS.values()]
    rows = _placed(signal, events, [TODAY] * len(events), Window())
    assert rows.column(FROM_INGESTION).to_pylist() == [flag for _, flag in EVENTS.values()]
    expected = [TODAY if flag or event is None else event for event, flag in EVENTS.values()]
    assert days(signal, rows).tolist() == [time // DAY for time in expected]


def test_any_time_is_believed_when_nobody_knows_the_ingestion() -> None:
    rows = _placed(Signal.LOGS, [DAY, TODAY, None], [0, 0, 0], Window())
    assert rows.column(FROM_INGESTION).to_pylist() == [False, False, True]
    assert days(Signal.LOGS, rows).tolist() == [1, 20_000, 0]


@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(-(10**15), 4 * 10**15), st.just(0) | st.integers(1, 4 * 10**15)
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 400),
    st.integers(0, 400),
)
def test_days_are_those_of_plain_loops(
    times: list[tuple[int | None, int]], before: int, after: int
) -> None:
    window = Window(before=dt.timedelta(days=before), after=dt.timedelta(days=after))
    rows = _placed(Signal.METRICS, [e for e, _ in times], [i for _, i in times], window)
    for day, (event, ingested) in zip(days(Signal.METRICS, rows).tolist(), times, strict=True):
        believed = event is not None and event > 0
        if believed and ingested:
            assert event is not None
            believed = ingested - before * DAY <= event <= ingested + after * DAY
        time = event if believed and event is not None else ingested
        assert partition_of_day(day).date == dt.datetime.fromtimestamp(time // 10**6, UTC).date()


def test_a_row_that_is_written_again_finds_its_place_again() -> None:
    rows = rows_for(Signal.TRACES)
    again = rows.take(pa.array(range(rows.num_rows - 1, -1, -1)))
    assert days(Signal.TRACES, again).tolist() == days(Signal.TRACES, rows).tolist()[::-1]


def _placed(
    signal: Signal, events: list[int | None], ingested: list[int], window: Window
) -> pa.Table:
    schema = lake_schema(signal)
    columns = [
        pa.array(events, field.type)
        if field.name == EVENT_TIMES[signal]
        else pa.nulls(len(events), field.type)
        for field in schema
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    placed = with_ingestion(signal, batch, np.array(ingested, np.int64), window)
    assert placed.schema.equals(file_schema(signal))
    return placed
