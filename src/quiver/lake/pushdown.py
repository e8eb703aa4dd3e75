"""Filters of Spark that a scan applies itself, and what they say about event times.

A filter is taken over only when Arrow answers it as Spark would, row by row: comparisons of texts,
whole numbers, booleans and timestamps, ``IN``, the beginning of a text, null or not. Spark does not
look at those again. All others are left to it.
"""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from quiver.lake.scanning import EventTimes

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MAX_US: Final = 2**63 - 1
_COMPARISONS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "=": pc.equal,
        ">": pc.greater,
        ">=": pc.greater_equal,
        "<": pc.less,
        "<=": pc.less_equal,
    }
)
_OPERATORS: Final[Mapping[type[Filter], str]] = MappingProxyType(
    {
        EqualTo: "=",
        GreaterThan: ">",
        GreaterThanOrEqual: ">=",
        LessThan: "<",
        LessThanOrEqual: "<=",
        In: "in",
        StringStartsWith: "starts with",
        IsNull: "is null",
        IsNotNull: "is not null",
    }
)


class Condition(NamedTuple):
    """A filter that the scan applies. Timestamps are microseconds since 1970."""

    column: str
    operator: str
    value: Any = None


def understand(asked: Filter, schema: pa.Schema) -> Condition | None:
    """The condition that a filter is; None when it is left to Spark."""
    operator = _OPERATORS.get(type(asked))
    path: tuple[str, ...] = getattr(asked, "attribute", ())
    if operator is None or len(path) != 1 or schema.get_field_index(path[0]) < 0:
        return None
    column = path[0]
    data_type = schema.field(column).type
    if operator in {"is null", "is not null"}:
        return Condition(column, operator)
    value = getattr(asked, "value", None)
    if operator == "in":
        if not isinstance(value, list | tuple):
            return None
        values = [_plain(one, data_type) for one in value if one is not None]
        return None if None in values else Condition(column, operator, tuple(values))
    plain = _plain(value, data_type)
    if plain is None or (operator == "starts with" and not pa.types.is_string(data_type)):
        return None
    return Condition(column, operator, plain)


def apply(rows: pa.RecordBatch, conditions: Sequence[Condition]) -> pa.RecordBatch:
    """The rows that all conditions are true for."""
    if not conditions:
        return rows
    masks = [_mask(rows.column(condition.column), condition) for condition in conditions]
    return rows.filter(functools.reduce(pc.and_, masks))


def event_times(conditions: Iterable[Condition], column: str) -> EventTimes | None:
    """The range that the conditions leave of an event time; None when they ask for none."""
    earliest, latest = -_MAX_US, _MAX_US
    for name, operator, value in conditions:
        if name != column:
            continue
        if operator in {"=", ">=", ">"}:
            earliest = max(earliest, value)
        if operator in {"=", "<=", "<"}:
            latest = min(latest, value)
        if operator == "in":
            earliest = max(earliest, min(value, default=_MAX_US))
            latest = min(latest, max(value, default=-_MAX_US))
    unbounded = (earliest, latest) == (-_MAX_US, _MAX_US)
    return None if unbounded else EventTimes(earliest, latest)


def micros_of(time: dt.datetime) -> int:
    """Microseconds since 1970 of a time that has a zone."""
    return (time - _EPOCH) // dt.timedelta(microseconds=1)


def _plain(value: Any, data_type: pa.DataType) -> str | int | bool | None:  # noqa: ANN401
    """The value as the column has it; None when it is something else."""
    if pa.types.is_string(data_type):
        return value if isinstance(value, str) else None
    if pa.types.is_boolean(data_type):
        return value if isinstance(value, bool) else None
    if pa.types.is_integer(data_type):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value if whole and abs(value) < 2**63 else None
    if pa.types.is_timestamp(data_type):
        if not isinstance(value, dt.datetime) or value.tzinfo is None:
            return None
        return micros_of(value)
    return None


def _mask(column: Any, condition: Condition) -> Any:  # noqa: ANN401 - the stubs have no common name
    _, operator, value = condition
    if operator == "is null":
        return column.is_null()
    if operator == "is not null":
        return column.is_valid()
    if pa.types.is_timestamp(column.type) or pa.types.is_integer(column.type):
        column = column.cast(pa.int64())
    if operator == "in":
        return pc.is_in(column, value_set=pa.array(list(value), column.type))
    if operator == "starts with":
        return pc.starts_with(column, value)
    return _COMPARISONS[operator](column, pa.scalar(value, column.type))
