"""The files that belong to a table, as the log lists them, with what is known of their columns."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from quiver.lake.layout import PARTITIONS, Partition
from quiver.otlp.columns import Array

_PLAIN: Final = ("path", "size_bytes", "num_records", "modification_time")
_LAST_DAY: Final = dt.date(9999, 12, 31)


class Bounds(NamedTuple):
    """What is known of a column of a file; None: nothing."""

    smallest: Any
    largest: Any
    nulls: int | None


class ActiveFile(NamedTuple):
    """A file that belongs to the table; ``path`` is relative to it."""

    path: str
    size: int
    rows: int | None
    partition: Partition
    modified_ms: int
    stats: Mapping[str, Bounds]


def active_files(
    actions: pa.Table,
    first: dt.date | None = None,
    last: dt.date | None = None,
    columns: Collection[str] = (),
) -> list[ActiveFile]:
    """The files of the days from ``first`` to ``last``, with statistics of some columns.

    ``actions`` is what ``DeltaTable.get_add_actions`` answers.
    """
    listed = actions.filter(pa.array(_of_days(actions, first, last))).sort_by("path")
    bounds: list[dict[str, Bounds]] = [{} for _ in range(listed.num_rows)]
    for column in columns:
        known = [_member(listed, part, column).to_pylist() for part in ("min", "max", "null_count")]
        for at, values in enumerate(zip(*known, strict=True)):
            bounds[at][column] = Bounds(*values)
    plain = [listed.column(name).to_pylist() for name in _PLAIN]
    days = [_member(listed, "partition", name).to_pylist() for name in PARTITIONS]
    return [
        ActiveFile(path, size, rows, Partition(*day), modified, stats)
        for path, size, rows, modified, *day, stats in zip(*plain, *days, bounds, strict=True)
    ]


def _of_days(listed: pa.Table, first: dt.date | None, last: dt.date | None) -> NDArray[np.bool_]:
    year, month, day = (
        cast("NDArray[Any]", _member(listed, "partition", name).to_numpy(zero_copy_only=False))
        for name in PARTITIONS
    )
    number: NDArray[np.int64] = year.astype(np.int64) * 10_000 + month * 100 + day
    return (number >= _number(first or dt.date.min)) & (number <= _number(last or _LAST_DAY))


def _member(listed: pa.Table, part: str, name: str) -> Array:
    """One member of a struct of all files; nulls when there is none."""
    column: Any = listed.column(part).combine_chunks()
    if column.type.get_field_index(name) < 0:
        return pa.nulls(listed.num_rows)
    return cast("Array", pc.struct_field(column, name))


def _number(date: dt.date) -> int:
    return date.year * 10_000 + date.month * 100 + date.day
