"""Filters that a scan takes over: exactly what Spark would have kept, or not at all."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

from quiver.lake.pushdown import Condition, apply, event_times, understand
from quiver.lake.scanning import EventTimes

NOON = dt.datetime(2026, 3, 7, 12, tzinfo=dt.UTC)
NOON_US = 1_772_884_800_000_000
ROWS = pa.record_batch(
    {
        "name": pa.array(["a", "ab", None, "b", "é"]),
        "kind": pa.array([1, 2, 3, None, 5], pa.int32()),
        "ok": pa.array([True, False, None, True, False]),
        "start_time": pa.array(
            [NOON_US - 1, NOON_US, NOON_US + 1, None, 0], pa.timestamp("us", tz="UTC")
        ),
        "share": pa.array([0.5, None, 1.0, float("nan"), 2.0]),
        "list": pa.array([[1], None, [], [2], [3]]),
    }
)


def kept(asked: Filter) -> list[int | None]:
    condition = understand(asked, ROWS.schema)
    assert condition is not None, asked
    numbered = ROWS.append_column("row", pa.array(range(5)))
    return list(apply(numbered, [condition]).column("row").to_pylist())


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        (EqualTo(("name",), "a"), [0]),
        (GreaterThan(("name",), "ab"), [3, 4]),
        (In(("name",), ("a", None, "b")), [0, 3]),
        (In(("name",), ()), []),
        (StringStartsWith(("name",), "a"), [0, 1]),
        (StringStartsWith(("name",), "."), []),
        (IsNull(("name",)), [2]),
        (IsNotNull(("list",)), [0, 2, 3, 4]),
        (EqualTo(("kind",), 2), [1]),
        (EqualTo(("kind",), 2**40), []),
        (LessThanOrEqual(("kind",), 2), [0, 1]),
        (In(("kind",), (3, 5)), [2, 4]),
        (EqualTo(("ok",), value=False), [1, 4]),
        (GreaterThanOrEqual(("start_time",), NOON), [1, 2]),
        (LessThan(("start_time",), NOON), [0, 4]),
        (EqualTo(("start_time",), NOON.astimezone(dt.timezone(dt.timedelta(hours=5)))), [1]),
        (In(("start_time",), (NOON,)), [1]),
    ],
)
def test_rows_are_those_that_spark_would_keep(asked: Filter, rows: list[int]) -> None:
    assert kept(asked) == rows


@pytest.mark.parametrize(
    "asked",
    [
        EqualNullSafe(("name",), None),
        EqualTo(("name",), 1),
        EqualTo(("kind",), value=True),
        EqualTo(("kind",), 1.5),
        EqualTo(("kind",), 2**63),
        EqualTo(("ok",), 1),
        EqualTo(("share",), 0.5),
        EqualTo(("start_time",), NOON.replace(tzinfo=None)),
        EqualTo(("start_time",), NOON.date()),
        EqualTo(("nothing",), "a"),
        EqualTo(("list", "element"), 1),
        In(("name",), ("a", 1)),
        Not(EqualTo(("name",), "a")),
        StringContains(("name",), "a"),
        StringStartsWith(("kind",), "a"),
    ],
)
def test_everything_else_is_left_to_spark(asked: Filter) -> None:
    assert understand(asked, ROWS.schema) is None


def test_all_conditions_must_hold() -> None:
    conditions = [Condition("name", ">=", "ab"), Condition("kind", "is not null")]
    assert apply(ROWS, conditions).column("name").to_pylist() == ["ab", "é"]
    assert apply(ROWS, []) is ROWS


@pytest.mark.parametrize(
    ("conditions", "times"),
    [
        ([], None),
        ([("name", "=", "x"), ("time", "is not null", None)], None),
        ([("time", ">=", 5)], (5, 2**63 - 1)),
        ([("time", "<", 5), ("time", ">", 2), ("time", ">=", 1)], (2, 5)),
        ([("time", "=", 5)], (5, 5)),
        ([("time", "in", (7, 5, 6))], (5, 7)),
        ([("time", "in", ())], (2**63 - 1, -(2**63) + 1)),
    ],
)
def test_the_event_times_that_are_left(
    conditions: list[tuple[str, str, Any]], times: tuple[int, int] | None
) -> None:
    found = event_times([Condition(*one) for one in conditions], "time")
    assert found == (None if times is None else EventTimes(*times))
