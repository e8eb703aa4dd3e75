"""Request batches and flat tables: to the lake, and back.

``to_flat`` makes one row for each span, log record or data point, in the order of the requests.
``from_flat`` makes requests again, from the same rows or those of a query. What was flat and comes
back is byte for byte what was sent, but for one thing: resources, scopes and metrics without items
have no row, so they do not come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quiver.bundle import Signal
from quiver.config import PromotedAttribute
from quiver.errors import InvalidRequest
from quiver.otlp.columns import Array, Index, of_numbers
from quiver.otlp.context import Source
from quiver.otlp.grouping import Groups, group_rows, lake_rows
from quiver.otlp.logs import records_from_rows, records_to_columns
from quiver.otlp.metrics import points_to_columns
from quiver.otlp.metrics_back import points_from_rows
from quiver.otlp.schema import CODE, INT, lake_schema
from quiver.otlp.spans import spans_from_rows, spans_to_columns

__all__ = ["Source", "from_flat", "lake_schema", "to_flat"]

_ToColumns: TypeAlias = Callable[
    [pa.RecordBatch, Sequence[PromotedAttribute], Sequence[Source] | None],
    tuple[dict[str, Array], Index],
]
_FromRows: TypeAlias = Callable[[pa.RecordBatch, Groups], pa.RecordBatch]
_TO_COLUMNS: Final[Mapping[Signal, _ToColumns]] = MappingProxyType(
    {
        Signal.TRACES: spans_to_columns,
        Signal.LOGS: records_to_columns,
        Signal.METRICS: points_to_columns,
    }
)
_FROM_ROWS: Final[Mapping[Signal, _FromRows]] = MappingProxyType(
    {
        Signal.TRACES: spans_from_rows,
        Signal.LOGS: records_from_rows,
        Signal.METRICS: points_from_rows,
    }
)


def to_flat(
    signal: Signal,
    batch: pa.RecordBatch,
    requests: NDArray[np.int32],
    promoted: Sequence[PromotedAttribute] = (),
    sources: Sequence[Source] | None = None,
) -> tuple[pa.RecordBatch, pa.Int32Array]:
    """The rows of a request batch; and for each row, the request that it belongs to.

    Args:
        signal: What the requests are about.
        batch: One row for each request.
        requests: For each row of the batch, the number of its request.
        promoted: Attributes with a column of their own.
        sources: For each row of the batch, where its request is kept.

    Raises:
        InvalidRequest: What resources and scopes repeat on each row would take too much memory.
        InvalidConfig: A promoted column has the name of another one.
    """
    schema = lake_schema(signal, promoted)
    rows = batch.num_rows
    if len(requests) != rows or (sources is not None and len(sources) != rows):
        raise InvalidRequest(
            f"the batch has {rows} requests, but {len(requests)} numbers and "
            f"{len(sources or ())} sources: each request needs its own"
        )
    try:
        columns, row_of_batch = _TO_COLUMNS[signal](batch, promoted, sources)
    except InvalidRequest as error:
        number = int(requests[error.request]) if len(requests) else 0
        raise InvalidRequest(error.reason, where=error.where, request=number) from error
    table = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
    return table, _int32(requests[row_of_batch])


def from_flat(
    signal: Signal,
    table: pa.Table | pa.RecordBatch,
    request_of_row: pa.Int32Array | None = None,
) -> pa.RecordBatch:
    """A request batch from rows: one row for each request, by ascending number.

    Args:
        signal: What the rows are about.
        table: Rows of the lake, or of a query. Columns that are not the lake's are ignored; those
            that are missing are as if not sent.
        request_of_row: For each row, the number of its request. None: all in one request.

    Raises:
        InvalidRequest: A column holds what OTLP has no place for.
    """
    rows = lake_rows(signal, table)
    requests = np.zeros(rows.num_rows, np.int32)
    if request_of_row is not None:
        if len(request_of_row) != rows.num_rows or request_of_row.null_count:
            raise InvalidRequest(
                f"{rows.num_rows} rows, but {len(request_of_row)} numbers of requests, "
                f"{request_of_row.null_count} of them null: each row needs one"
            )
        requests = cast("NDArray[np.int32]", request_of_row.to_numpy())
        if (requests[1:] < requests[:-1]).any():
            order = np.argsort(requests, kind="stable")
            rows = rows.take(of_numbers(order, INT))
            requests = requests[order]
    return _FROM_ROWS[signal](rows, group_rows(signal, rows, requests))


def _int32(values: NDArray[Any]) -> pa.Int32Array:
    return cast("pa.Int32Array", of_numbers(values.astype(np.int32, copy=False), CODE))
