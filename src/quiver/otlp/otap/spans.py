"""Spans, their events and their links: between a request's nested columns and OTAP's tables.

A span in OTAP has a duration where OTLP has an end. Both are 64 bits and wrap, so an end before
the start, or none at all, comes back as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from quiver.bundle import Slot
from quiver.otlp.otap.attributes import owned_attributes, write_attributes
from quiver.otlp.otap.read import (
    Parents,
    Table,
    inside,
    lists_of,
    record,
    refuse_orphans,
)
from quiver.otlp.otap.schema import DURATION, SPAN_ID, STATUS, TRACE_ID, Array, Kind
from quiver.otlp.otap.write import (
    Columns,
    Tables,
    always_fixed,
    children,
    numbered,
    numbers,
    of_numbers,
    some_fixed,
    some_times,
    struct,
    table,
    texts,
    times,
    valid_mask,
)

_READ_AS_THEY_ARE: Final = (
    "name",
    "trace_state",
    "parent_span_id",
    "kind",
    "dropped_attributes_count",
    "dropped_events_count",
    "dropped_links_count",
    "flags",
)


def write_spans(tables: Tables, spans: Array, origin: Columns, max_depth: int) -> None:
    """Add the tables of these spans, whose ids are their row numbers."""
    start = spans.field("start_time_unix_nano")
    duration = spans.field("end_time_unix_nano").to_numpy() - start.to_numpy()
    tables[Slot.SPANS] = table(
        Slot.SPANS,
        {
            **origin,
            "start_time_unix_nano": times(start),
            "duration_time_unix_nano": of_numbers(duration).view(DURATION),
            "trace_id": always_fixed(spans.field("trace_id"), TRACE_ID, "spans.trace_id"),
            "span_id": always_fixed(spans.field("span_id"), SPAN_ID, "spans.span_id"),
            "trace_state": texts(spans.field("trace_state")),
            "parent_span_id": some_fixed(
                spans.field("parent_span_id"), SPAN_ID, "spans.parent_span_id"
            ),
            "name": spans.field("name"),
            "kind": numbers(spans.field("kind")),
            "dropped_attributes_count": numbers(spans.field("dropped_attributes_count")),
            "dropped_events_count": numbers(spans.field("dropped_events_count")),
            "dropped_links_count": numbers(spans.field("dropped_links_count")),
            "status": _status(spans.field("status")),
            "flags": numbers(spans.field("flags")),
        },
    )
    write_attributes(tables, Slot.SPAN_ATTRS, spans, id_type=np.uint16, max_depth=max_depth)
    _write_events(tables, spans, max_depth)
    _write_links(tables, spans, max_depth)


def _status(status: Array) -> Array | None:
    if status.null_count == len(status):
        return None
    columns = {"code": status.field("code"), "status_message": texts(status.field("message"))}
    return struct(columns, valid=valid_mask(status) if status.null_count else None)


def _write_events(tables: Tables, spans: Array, max_depth: int) -> None:
    events = children(spans, "events")
    if len(events.rows) == 0:
        return
    rows = events.rows
    tables[Slot.SPAN_EVENTS] = table(
        Slot.SPAN_EVENTS,
        {
            "id": numbered(len(rows), np.uint32),
            "parent_id": events.parents(np.uint16),
            "time_unix_nano": some_times(rows.field("time_unix_nano")),
            "name": rows.field("name"),
            "dropped_attributes_count": numbers(rows.field("dropped_attributes_count")),
        },
    )
    write_attributes(tables, Slot.SPAN_EVENT_ATTRS, rows, id_type=np.uint32, max_depth=max_depth)


def _write_links(tables: Tables, spans: Array, max_depth: int) -> None:
    links = children(spans, "links")
    if len(links.rows) == 0:
        return
    rows = links.rows
    tables[Slot.SPAN_LINKS] = table(
        Slot.SPAN_LINKS,
        {
            "id": numbered(len(rows), np.uint32),
            "parent_id": links.parents(np.uint16),
            "trace_id": always_fixed(rows.field("trace_id"), TRACE_ID, "spans.links.trace_id"),
            "span_id": always_fixed(rows.field("span_id"), SPAN_ID, "spans.links.span_id"),
            "trace_state": texts(rows.field("trace_state")),
            "dropped_attributes_count": numbers(rows.field("dropped_attributes_count")),
            "flags": numbers(rows.field("flags")),
        },
    )
    write_attributes(tables, Slot.SPAN_LINK_ATTRS, rows, id_type=np.uint32, max_depth=max_depth)


def read_spans(tables: Mapping[Slot, Table], kind: Kind) -> Array:
    """The spans as structs of this type, in the order of their table."""
    spans = tables[Slot.SPANS]
    parents = Parents(spans.ids(), spans.rows, "SPANS.id")
    start = spans.required("start_time_unix_nano").view(pa.uint64())
    duration = spans.required("duration_time_unix_nano").view(pa.uint64())
    columns = spans.columns(_READ_AS_THEY_ARE)
    columns["trace_id"] = spans.required("trace_id")
    columns["span_id"] = spans.required("span_id")
    columns["name"] = spans.required("name")
    columns["start_time_unix_nano"] = start
    columns["end_time_unix_nano"] = of_numbers(start.to_numpy() + duration.to_numpy())
    columns["status"] = _read_status(spans, kind.field("status").type)
    attributes = kind.field("attributes").type
    columns["attributes"] = owned_attributes(tables, Slot.SPAN_ATTRS, parents, attributes)
    columns["events"] = _read_events(tables, parents, kind.field("events").type)
    columns["links"] = _read_links(tables, parents, kind.field("links").type)
    return record(kind, spans.rows, columns)


def _read_status(spans: Table, kind: Kind) -> Array | None:
    status = spans.column("status")
    if status is None:
        return None
    fields = inside(status, STATUS, "SPANS.status", spans.limits)
    columns = {"code": fields.get("code"), "message": fields.get("status_message")}
    return record(kind, spans.rows, columns, valid=valid_mask(status))


def _read_events(tables: Mapping[Slot, Table], spans: Parents, kind: Kind) -> Array | None:
    events = tables.get(Slot.SPAN_EVENTS)
    if events is None:
        refuse_orphans(tables, Slot.SPAN_EVENT_ATTRS)
        return None
    owners = Parents(events.ids(), events.rows, "SPAN_EVENTS.id")
    columns = events.columns(("time_unix_nano", "dropped_attributes_count"))
    columns["name"] = events.required("name")
    item = kind.value_type
    attributes = item.field("attributes").type
    columns["attributes"] = owned_attributes(tables, Slot.SPAN_EVENT_ATTRS, owners, attributes)
    rows = record(item, events.rows, columns)
    return lists_of(rows, spans.rows_of(events.parent_ids(), "SPAN_EVENTS"), spans.count, kind)


def _read_links(tables: Mapping[Slot, Table], spans: Parents, kind: Kind) -> Array | None:
    links = tables.get(Slot.SPAN_LINKS)
    if links is None:
        refuse_orphans(tables, Slot.SPAN_LINK_ATTRS)
        return None
    owners = Parents(links.ids(), links.rows, "SPAN_LINKS.id")
    columns = links.columns(
        ("trace_id", "span_id", "trace_state", "dropped_attributes_count", "flags")
    )
    item = kind.value_type
    attributes = item.field("attributes").type
    columns["attributes"] = owned_attributes(tables, Slot.SPAN_LINK_ATTRS, owners, attributes)
    rows = record(item, links.rows, columns)
    return lists_of(rows, spans.rows_of(links.parent_ids(), "SPAN_LINKS"), spans.count, kind)
