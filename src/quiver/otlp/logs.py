"""Log records: from a request batch to rows, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from quiver.bundle import Signal
from quiver.config import AttributeLevel, PromotedAttribute
from quiver.otlp.columns import (
    Array,
    Index,
    as_map,
    from_hex,
    micros,
    numbers,
    of_structs,
    signed,
    to_hex,
)
from quiver.otlp.context import Source, context_columns, levels, position_column, promoted_columns
from quiver.otlp.grouping import Groups, filled, nest, nested_types, pairs, text, uint32, uint64


def records_to_columns(
    batch: pa.RecordBatch, promoted: Sequence[PromotedAttribute], sources: Sequence[Source] | None
) -> tuple[dict[str, Array], Index]:
    """The columns by name; and for each row, which request of the batch."""
    found = levels(batch)
    records = found.items.values
    columns, request_of_row = context_columns(found, found.items.parent, promoted, sources)
    time, observed = records.field(0), records.field(9)
    time_nanos, observed_nanos = numbers(time), numbers(observed)
    known = np.where(time_nanos, time_nanos, observed_nanos)
    attributes = as_map(records.field(4))
    columns |= {
        "time_unix_nano": signed(time),
        "observed_time_unix_nano": signed(observed),
        "time": micros(known, known != 0),
        "severity_number": records.field(1),
        "severity_text": records.field(2),
        "event_name": records.field(10),
        "body": records.field(3),
        "trace_id": to_hex(records.field(7)),
        "span_id": to_hex(records.field(8)),
        "flags": signed(records.field(6)),
        "attributes": attributes,
        "dropped_attributes_count": signed(records.field(5)),
        "source_item": position_column(found.items.position),
        **promoted_columns(attributes, promoted, AttributeLevel.ITEM),
    }
    return columns, request_of_row


def records_from_rows(rows: pa.RecordBatch, starts: Groups) -> pa.RecordBatch:
    """The requests of rows that are grouped."""
    type_ = nested_types(Signal.LOGS).item
    column = rows.column
    members = [
        uint64(column("time_unix_nano"), "column time_unix_nano"),
        filled(column("severity_number")),
        text(column("severity_text")),
        column("body"),
        pairs(column("attributes"), type_.field(4).type),
        uint32(column("dropped_attributes_count"), "column dropped_attributes_count"),
        uint32(column("flags"), "column flags"),
        from_hex(column("trace_id"), "column trace_id"),
        from_hex(column("span_id"), "column span_id"),
        uint64(column("observed_time_unix_nano"), "column observed_time_unix_nano"),
        text(column("event_name")),
    ]
    return nest(Signal.LOGS, rows, starts, of_structs(type_, rows.num_rows, members))
