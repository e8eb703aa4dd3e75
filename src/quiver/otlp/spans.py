"""Spans: from a request batch to rows, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from quiver.bundle import Signal
from quiver.config import AttributeLevel, PromotedAttribute
from quiver.otlp.columns import (
    Array,
    Index,
    Mask,
    Type,
    as_map,
    from_hex,
    lists,
    micros,
    numbers,
    of_lists,
    of_numbers,
    of_structs,
    signed,
    to_hex,
    valid_rows,
    without_nulls,
)
from quiver.otlp.context import Source, context_columns, levels, position_column, promoted_columns
from quiver.otlp.grouping import (
    Groups,
    filled,
    nest,
    nested_types,
    pairs,
    text,
    uint32,
    uint64,
)
from quiver.otlp.schema import EVENT, INT, LINK, TEXT

_EVENTS: Final = pa.list_(EVENT)
_LINKS: Final = pa.list_(LINK)
_NO_EVENTS: Final = pa.nulls(0, EVENT)
_NO_LINKS: Final = pa.nulls(0, LINK)


def spans_to_columns(
    batch: pa.RecordBatch, promoted: Sequence[PromotedAttribute], sources: Sequence[Source] | None
) -> tuple[dict[str, Array], Index]:
    """The columns by name; and for each row, which request of the batch."""
    found = levels(batch)
    spans = found.items.values
    columns, request_of_row = context_columns(found, found.items.parent, promoted, sources)
    start, end = spans.field(6), spans.field(7)
    start_nanos, end_nanos = numbers(start), numbers(end)
    attributes = as_map(spans.field(8))
    columns |= {
        "trace_id": to_hex(spans.field(0)),
        "span_id": to_hex(spans.field(1)),
        "parent_span_id": to_hex(spans.field(3)),
        "trace_state": spans.field(2),
        "flags": signed(spans.field(15)),
        "name": spans.field(4),
        "kind": spans.field(5),
        "start_time_unix_nano": signed(start),
        "end_time_unix_nano": signed(end),
        "start_time": micros(start_nanos),
        "end_time": micros(end_nanos),
        # Both are below 2^63, so that what wraps around is the negative difference.
        "duration_ns": of_numbers(end_nanos - start_nanos, INT),
        "attributes": attributes,
        "dropped_attributes_count": signed(spans.field(9)),
        "events": _events(spans.field(10)),
        "dropped_events_count": signed(spans.field(11)),
        "links": _links(spans.field(12)),
        "dropped_links_count": signed(spans.field(13)),
        "source_item": position_column(found.items.position),
        **_status(spans.field(14)),
        **promoted_columns(attributes, promoted, AttributeLevel.ITEM),
    }
    return columns, request_of_row


def _status(status: Array) -> dict[str, Array]:
    message = status.field(0)
    valid = valid_rows(status)
    if valid is not None:
        message = _with_nulls(message, valid)
    return {"status_code": status.field(1), "status_message": message}


def _with_nulls(array: Array, valid: Mask) -> Array:
    """Strings that are null where the message that holds them is absent."""
    if not valid.any():
        return pa.nulls(len(array), TEXT)
    index = of_numbers(np.arange(len(array)), INT, valid)
    return array.take(index)


def _events(array: Array) -> Array:
    offsets, values = lists(array)
    if not len(values):
        return of_lists(_EVENTS, offsets, _NO_EVENTS)
    events = values
    members = [
        signed(events.field(0)),
        events.field(1),
        as_map(events.field(2)),
        signed(events.field(3)),
    ]
    return of_lists(_EVENTS, offsets, of_structs(EVENT, len(events), members))


def _links(array: Array) -> Array:
    offsets, values = lists(array)
    if not len(values):
        return of_lists(_LINKS, offsets, _NO_LINKS)
    links = values
    members = [
        to_hex(links.field(0)),
        to_hex(links.field(1)),
        links.field(2),
        as_map(links.field(3)),
        signed(links.field(4)),
        signed(links.field(5)),
    ]
    return of_lists(_LINKS, offsets, of_structs(LINK, len(links), members))


def spans_from_rows(rows: pa.RecordBatch, starts: Groups) -> pa.RecordBatch:
    """The requests of rows that are grouped."""
    type_ = nested_types(Signal.TRACES).item
    column = rows.column
    members = [
        from_hex(column("trace_id"), "column trace_id"),
        from_hex(column("span_id"), "column span_id"),
        text(column("trace_state")),
        from_hex(column("parent_span_id"), "column parent_span_id"),
        text(column("name")),
        filled(column("kind")),
        uint64(column("start_time_unix_nano"), "column start_time_unix_nano"),
        uint64(column("end_time_unix_nano"), "column end_time_unix_nano"),
        pairs(column("attributes"), type_.field(8).type),
        uint32(column("dropped_attributes_count"), "column dropped_attributes_count"),
        _events_back(column("events"), type_.field(10).type),
        uint32(column("dropped_events_count"), "column dropped_events_count"),
        _links_back(column("links"), type_.field(12).type),
        uint32(column("dropped_links_count"), "column dropped_links_count"),
        _status_back(column("status_message"), column("status_code"), type_.field(14).type),
        uint32(column("flags"), "column flags"),
    ]
    return nest(Signal.TRACES, rows, starts, of_structs(type_, rows.num_rows, members))


def _status_back(message: Array, code: Array, type_: Type) -> Array:
    """Absent where there is neither a message nor a code."""
    code = filled(code)
    valid = valid_rows(message)
    if valid is not None:
        valid = valid | (numbers(code) != 0)
    return of_structs(type_, len(code), [text(message), code], valid)


def _events_back(array: Array, type_: Type) -> Array:
    offsets, values = without_nulls(array)
    events = values
    members = [
        uint64(events.field(0), "column events.time_unix_nano"),
        text(events.field(1)),
        pairs(events.field(2), type_.value_type.field(2).type),
        uint32(events.field(3), "column events.dropped_attributes_count"),
    ]
    return of_lists(type_, offsets, of_structs(type_.value_type, len(events), members))


def _links_back(array: Array, type_: Type) -> Array:
    offsets, values = without_nulls(array)
    links = values
    members = [
        from_hex(links.field(0), "column links.trace_id"),
        from_hex(links.field(1), "column links.span_id"),
        text(links.field(2)),
        pairs(links.field(3), type_.value_type.field(3).type),
        uint32(links.field(4), "column links.dropped_attributes_count"),
        uint32(links.field(5), "column links.flags"),
    ]
    return of_lists(type_, offsets, of_structs(type_.value_type, len(links), members))
