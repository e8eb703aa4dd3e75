"""What the tables of a lake look like: names, columns, partitions, paths.

::

    <root>/spans/_delta_log/                                 the log of Delta
    <root>/spans/year=2026/month=03/day=07/<name>.parquet    rows of that day
    <root>/logs/... , <root>/metrics/...
    <root>/dead_letter/<signal>/<store>-<segment>-<bundle>-<row>.json, .bin

A table has the columns of ``quiver.otlp.lake_schema``, and five more:

=========================  =======================  =============================================
column                     type                     what
=========================  =======================  =============================================
``ingested_time``          timestamp[us, tz=UTC]    when the store took the request
``date_from_ingestion``    bool                     it lies under the date of its ingestion
``year, month, day``       int32                    of the event, UTC; not in the files
=========================  =======================  =============================================

A row lies under the date of its event: the start of a span, the time of a record or point. When
that is missing, or too far from the ingestion to be true, it lies under the date of its ingestion
and ``date_from_ingestion`` says so. Both are in the row, so a row that is written again finds its
place again: ``days`` needs nothing else.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quiver.bundle import Signal
from quiver.config import PromotedAttribute
from quiver.errors import InvalidConfig, InvalidName
from quiver.otlp.schema import BOOL, CODE, TIME, lake_schema

TABLES: Final[Mapping[Signal, str]] = MappingProxyType(
    {Signal.TRACES: "spans", Signal.LOGS: "logs", Signal.METRICS: "metrics"}
)
EVENT_TIMES: Final[Mapping[Signal, str]] = MappingProxyType(
    {Signal.TRACES: "start_time", Signal.LOGS: "time", Signal.METRICS: "time"}
)
SORT_KEYS: Final[Mapping[Signal, tuple[str, ...]]] = MappingProxyType(
    {
        Signal.TRACES: ("trace_id", "start_time_unix_nano"),
        Signal.LOGS: ("time",),
        Signal.METRICS: ("time",),
    }
)
INGESTED: Final = "ingested_time"
FROM_INGESTION: Final = "date_from_ingestion"
PARTITIONS: Final = ("year", "month", "day")
DEAD_LETTERS: Final = "dead_letter"
APP_PREFIX: Final = "quiver/"

_OWN: Final[list[pa.Field[Any]]] = [pa.field(INGESTED, TIME), pa.field(FROM_INGESTION, BOOL)]
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = dt.date(1970, 1, 1)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PATH: Final = re.compile(r"year=(\d{4})/month=(\d{2})/day=(\d{2})/[^/]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Event times that are believed, around the time of ingestion."""

    before: dt.timedelta = dt.timedelta(days=30)
    after: dt.timedelta = dt.timedelta(days=1)

    def __post_init__(self) -> None:
        if self.before < dt.timedelta(0) or self.after < dt.timedelta(0):
            raise InvalidConfig("a window of event times reaches back and ahead: both at least 0")


class Partition(NamedTuple):
    """A day of the lake."""

    year: int
    month: int
    day: int

    @classmethod
    def of(cls, date: dt.date) -> Partition:
        """The partition of a date."""
        return cls(date.year, date.month, date.day)

    @property
    def date(self) -> dt.date:
        """The day as a date."""
        return dt.date(self.year, self.month, self.day)

    @property
    def folder(self) -> str:
        """Its folder in a table."""
        return f"year={self.year:04d}/month={self.month:02d}/day={self.day:02d}"

    @property
    def values(self) -> dict[str, str | None]:
        """As the log of Delta has them."""
        return {"year": str(self.year), "month": str(self.month), "day": str(self.day)}


def table_schema(signal: Signal, promoted: Sequence[PromotedAttribute] = ()) -> pa.Schema:
    """All columns of a table, the partitions last."""
    fields = [*file_schema(signal, promoted), *(pa.field(name, CODE) for name in PARTITIONS)]
    return pa.schema(fields)


def file_schema(signal: Signal, promoted: Sequence[PromotedAttribute] = ()) -> pa.Schema:
    """The columns of its files: all but the partitions."""
    schema = lake_schema(signal, promoted)
    taken = {INGESTED, FROM_INGESTION, *PARTITIONS}
    for attribute in promoted:
        if attribute.column.lower() in taken:
            raise InvalidConfig(
                f"otlp.promoted: the lake has a column {attribute.column!r} of its own; choose "
                f"another name for {attribute.key!r}"
            )
    return pa.schema([*schema, *_OWN])


def with_ingestion(
    signal: Signal, rows: pa.RecordBatch, ingested_us: NDArray[np.int64], window: Window
) -> pa.Table:
    """Decoded rows with the two columns that the lake adds.

    Args:
        signal: What the rows are about.
        rows: In the schema of ``lake_schema``.
        ingested_us: For each row when it was ingested, in microseconds; 0 when nobody knows, and
            then any event time is believed.
        window: Which event times are believed.
    """
    event = _micros(rows.column(EVENT_TIMES[signal]))
    before = window.before // dt.timedelta(microseconds=1)
    after = window.after // dt.timedelta(microseconds=1)
    near = (event >= ingested_us - before) & (event <= ingested_us + after)
    flagged = (event <= 0) | ((ingested_us != 0) & ~near)
    return (
        pa.table(rows)
        .append_column(_OWN[0], pa.array(ingested_us, pa.int64()).cast(TIME))
        .append_column(_OWN[1], pa.array(flagged))
    )


def days(signal: Signal, rows: pa.Table) -> NDArray[np.int64]:
    """For each row of a file the day that it lies under, counted from 1970."""
    flagged = rows.column(FROM_INGESTION).combine_chunks().fill_null(True)  # noqa: FBT003
    event = _micros(rows.column(EVENT_TIMES[signal]))
    ingested = _micros(rows.column(INGESTED))
    # numpy rounds the quotient down, also below zero
    return np.where(flagged.to_numpy(zero_copy_only=False), ingested, event) // _DAY_US


def partition_of_day(day: int) -> Partition:
    """The partition of a day counted from 1970."""
    return Partition.of(_EPOCH + dt.timedelta(days=int(day)))


def partition_of_path(path: str) -> Partition | None:
    """The partition that a path lies in; None when it is no path of ours."""
    found = _PATH.fullmatch(path)
    return None if found is None else Partition(*map(int, found.groups()))


def check_name(name: str) -> str:
    """The name itself, if it can be part of a path and of a URL without being changed."""
    if not _NAME.fullmatch(name):
        raise InvalidName(
            f"{name[:80]!r} cannot name a file of the lake: 1 to 200 letters, digits, '.', '_' "
            "and '-', the first a letter or digit"
        )
    return name


def store_app(store_id: str) -> str:
    """The app id that a store's position goes by: the next segment to land."""
    return f"{APP_PREFIX}store/{store_id}"


def queue_app(queue_id: str) -> str:
    """The app id that a queue's position goes by: the next sequence to land."""
    return f"{APP_PREFIX}queue/{queue_id}"


def _micros(column: Any) -> NDArray[np.int64]:  # noqa: ANN401 - the stubs have no common name
    """Microseconds since 1970; 0 for null."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return cast("NDArray[np.int64]", column.cast(pa.int64()).fill_null(0).to_numpy())
