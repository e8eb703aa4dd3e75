"""Rows to Parquet files: split by day, sorted, with everything that lets an engine skip them.

=====================  ==========================================================================
rows                   sorted: spans by trace and start, the others by time
row groups             small, zstd; pages with an index; a bloom filter on ``trace_id``
statistics             as the log of Delta has them: rows, nulls, smallest and largest value
=====================  ==========================================================================

The statistics are those that Parquet has already computed. Strings are cut to 32 characters; the
largest one is rounded up, so that it stays a bound. Columns that nobody filters by, long texts and
floating point numbers (whose NaN no bound can hold) have none.

A file's name ends with a random part: a second attempt at the same work never writes over a file
that the table may list already.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from quiver.bundle import Signal
from quiver.errors import InvalidConfig
from quiver.lake.layout import (
    FROM_INGESTION,
    PARTITIONS,
    SORT_KEYS,
    Partition,
    check_name,
    days,
    partition_of_day,
)
from quiver.lake.places import Place

MAX_TEXT: Final = 32
_BLOOM: Final = "trace_id"
# Nearly every value is another one: a dictionary would only be built to be given up.
_WITHOUT_DICTIONARY: Final = frozenset(
    {
        *("trace_id", "span_id", "parent_span_id", "duration_ns", "start_time", "end_time", "time"),
        *("start_time_unix_nano", "end_time_unix_nano", "time_unix_nano"),
        "observed_time_unix_nano",
    }
)
_WITHOUT_STATISTICS: Final = frozenset(
    {
        *(
            "trace_state",
            "status_message",
            "description",
            "resource_schema_url",
            "scope_schema_url",
        ),
        *("severity_text", "scope_version", "flags", "aggregation_temporality", "scale"),
        *("source_row", "source_resource", "source_scope", "source_metric", "source_item"),
        *("positive_offset", "negative_offset", "zero_count", "int_value", "count"),
        *("dropped_attributes_count", "dropped_events_count", "dropped_links_count"),
        *("resource_dropped_attributes_count", "scope_dropped_attributes_count", FROM_INGESTION),
    }
)
_LAST_CHARACTER: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xE000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """How files are written.

    ====================  =========  =============================================================
    setting               default    what it bounds
    ====================  =========  =============================================================
    ``max_rows``          1,000,000  rows of a file
    ``row_group_rows``    32,768     rows of a row group: what a lookup reads at least
    ``page_rows``         8,192      rows of a page: what it decodes at least
    ``level``             1          of zstd
    ``bloom_fpp``         0.01       how often a bloom filter says yes in vain; 0: no filter
    ====================  =========  =============================================================
    """

    max_rows: int = 1_000_000
    row_group_rows: int = 32_768
    page_rows: int = 8_192
    level: int = 1
    bloom_fpp: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_rows", "row_group_rows", "page_rows", "level"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"lake.{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.bloom_fpp < 1:
            raise InvalidConfig(f"lake.bloom_fpp is {self.bloom_fpp}; it must be in 0 to 1")


DEFAULT_OPTIONS: Final = FileOptions()


class NewFile(NamedTuple):
    """A file that no commit lists yet; ``path`` is relative to its table."""

    path: str
    size: int
    rows: int
    partition: Partition
    stats: str
    signal: Signal


def write_files(
    place: Place,
    signal: Signal,
    rows: pa.Table,
    *,
    name: str,
    options: FileOptions = DEFAULT_OPTIONS,
) -> list[NewFile]:
    """Write rows to files of a table; the files are durable, and nobody reads them yet.

    Args:
        place: The folder of the table.
        signal: What the rows are about.
        rows: In the schema of the table's files; columns may be missing.
        name: Starts the names of the files: that of the batch and the task, for people.
        options: How they are written.
    """
    check_name(name)
    token = uuid.uuid4().hex[:12]
    whole = rows.combine_chunks()
    files = []
    for number, (partition, picked) in enumerate(_split(signal, whole, options.max_rows)):
        path = f"{partition.folder}/{name}-{number:04d}-{token}.parquet"
        data, stats = _encode(signal, whole, picked, options)
        size = place.put(path, [data])
        files.append(NewFile(path, size, len(picked), partition, stats, signal))
    return files


def encode_rows(
    signal: Signal, rows: pa.Table, options: FileOptions = DEFAULT_OPTIONS
) -> tuple[pa.Buffer, str]:
    """The bytes of one file with these rows, in this order, and its statistics."""
    return _encode(signal, rows.combine_chunks(), np.arange(rows.num_rows), options)


def _split(
    signal: Signal, rows: pa.Table, max_rows: int
) -> Iterator[tuple[Partition, NDArray[Any]]]:
    """Which rows go into which file, in the order that they lie there."""
    if not rows.num_rows:
        return
    day_of_row = days(signal, rows)
    keys = [(key, "ascending") for key in SORT_KEYS[signal]]
    order = pc.sort_indices(rows, sort_keys=cast("Any", keys)).to_numpy()
    for day in np.unique(day_of_row):
        of_day = order[day_of_row[order] == day]
        for start in range(0, len(of_day), max_rows):
            yield partition_of_day(day), of_day[start : start + max_rows]


def _encode(
    signal: Signal, rows: pa.Table, picked: NDArray[Any], options: FileOptions
) -> tuple[pa.Buffer, str]:
    """One row group after the other, so that only one of them is there twice."""
    present: list[str] = [name for name in PARTITIONS if name in rows.column_names]
    rows = rows.drop_columns(present) if present else rows
    sink = pa.BufferOutputStream()
    written: list[pq.FileMetaData] = []
    writer = pq.ParquetWriter(
        sink,
        rows.schema,
        compression="zstd",
        compression_level=options.level,
        use_dictionary=cast("Any", _dictionary_columns(rows.schema)),
        write_page_index=True,
        max_rows_per_page=options.page_rows,
        sorting_columns=_sorting(signal, rows.schema),
        bloom_filter_options=_bloom(rows, options),
        metadata_collector=written,
    )
    with writer:
        for start in range(0, len(picked), options.row_group_rows):
            group = pa.array(picked[start : start + options.row_group_rows])
            writer.write_table(rows.take(group), row_group_size=options.row_group_rows)
    return sink.getvalue(), statistics(written[0])


def _bloom(rows: pa.Table, options: FileOptions) -> dict[str, dict[str, float]] | None:
    if not options.bloom_fpp or _BLOOM not in rows.column_names:
        return None
    distinct = pc.count_distinct(rows.column(_BLOOM)).as_py()
    return {
        _BLOOM: {"ndv": max(1, min(distinct, options.row_group_rows)), "fpp": options.bloom_fpp}
    }


def _sorting(signal: Signal, schema: pa.Schema) -> list[pq.SortingColumn] | None:
    """The sort order, by the numbers of the leaves; none when a column is missing."""
    starts = np.cumsum([0, *(len(_leaves(field)) for field in schema)])
    numbers = [schema.get_field_index(key) for key in SORT_KEYS[signal]]
    if min(numbers) < 0:
        return None
    return [pq.SortingColumn(int(starts[number])) for number in numbers]


def _dictionary_columns(schema: pa.Schema) -> list[str]:
    return [
        path for field in schema if field.name not in _WITHOUT_DICTIONARY for path in _leaves(field)
    ]


def _leaves(field: pa.Field[Any], prefix: str = "") -> list[str]:
    """The paths of a field's columns in Parquet."""
    path = f"{prefix}{field.name}"
    kind: Any = field.type
    if pa.types.is_struct(kind):
        return [leaf for child in kind for leaf in _leaves(child, f"{path}.")]
    if pa.types.is_map(kind):
        key, item = kind.key_field.with_name("key"), kind.item_field.with_name("value")
        return [leaf for part in (key, item) for leaf in _leaves(part, f"{path}.key_value.")]
    if pa.types.is_list(kind):
        return _leaves(kind.value_field.with_name("element"), f"{path}.list.")
    return [path]


# --- Statistics -------------------------------------------------------------------------------


def statistics(metadata: pq.FileMetaData) -> str:
    """What the log of Delta says about a file, as JSON."""
    smallest: dict[str, Any] = {}
    largest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for number in range(metadata.num_columns):
        column = metadata.schema.column(number)
        if column.path in _WITHOUT_STATISTICS or column.path != column.name:
            continue  # not asked for; or inside of a map, list or struct
        if column.physical_type in {"DOUBLE", "FLOAT", "BOOLEAN", "INT96"} or _is_binary(column):
            continue
        groups: list[Any] = [
            metadata.row_group(group).column(number).statistics
            for group in range(metadata.num_row_groups)
        ]
        if any(group is None or not group.has_null_count for group in groups):
            continue
        nulls[column.name] = sum(group.null_count for group in groups if group)
        full = [group for group in groups if group and group.num_values]
        if full and all(group.has_min_max for group in full):
            lowest = _rounded_down(min(group.min for group in full))
            highest = _rounded_up(max(group.max for group in full))
            if highest is not None:
                smallest[column.name], largest[column.name] = lowest, highest
    return json.dumps(
        {
            "numRecords": metadata.num_rows,
            "minValues": smallest,
            "maxValues": largest,
            "nullCount": nulls,
        },
        separators=(",", ":"),
        ensure_ascii=False,
    )


def _is_binary(column: pq.ColumnSchema) -> bool:
    return column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "STRING"


def _rounded_down(value: Any) -> Any:  # noqa: ANN401 - a string, number or time
    if isinstance(value, dt.datetime):
        return _time_text(value)
    return value[:MAX_TEXT] if isinstance(value, str) else value


def _rounded_up(value: Any) -> Any:  # noqa: ANN401 - the same
    """At least the value; None when there is no such text."""
    if isinstance(value, dt.datetime):
        return _time_text(value)
    if not isinstance(value, str) or len(value) <= MAX_TEXT:
        return value
    for end in range(MAX_TEXT - 1, -1, -1):
        following = ord(value[end]) + 1
        if following == _SURROGATES[0]:
            following = _SURROGATES[1]
        if following <= _LAST_CHARACTER:
            return value[:end] + chr(following)
    return None


def _time_text(value: dt.datetime) -> str:
    return value.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")
