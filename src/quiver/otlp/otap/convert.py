"""A request batch as the payload tables of OTAP, and back.

A request batch has one row for each OTLP request, everything else nested in it. OTAP has a table of
spans (log records, metrics), in which each row also carries its scope and resource, and tables for
what belongs to them; ids connect them. Columns and types are in ``schema``.

Written: plain ids from 0, marked as plain, in every table; dictionaries with u16 indices for the
keys of attributes and for what comes from the scope and resource, plain values elsewhere; columns
that hold nothing but defaults are left out unless OTAP requires them. Ids have 16 bits, so more
than 65,536 spans make several OTAP batches, each of which counts from 0. A batch never has more
scopes or resources than spans, as it has only those of its spans.

Read: what the specification allows others to write. Any column may be absent or a dictionary, ids
may be plain, delta or quasi-delta. Rows with the same resource become one ``ResourceSpans``, those
of the same scope in it one ``ScopeSpans``, in the order in which they first appear. "The same"
means all columns, not the id alone: a null id says that there are no attributes, nothing more.

What OTAP cannot hold, and how it comes back:

=============================================  ==============================================
in OTLP                                        from OTAP
=============================================  ==============================================
several requests                               one
a resource or scope without items              not at all
resource or scope absent                       there, and empty
``Resource.entity_refs``                       none
an attribute without value                     with an empty value
a key twice in a map inside a value            once, with the last value
a span's or link's empty trace or span id      zeros
gauge points and sum points                    as before; only the order of their table differs
=============================================  ==============================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from quiver.bundle import Signal, Slot
from quiver.config import OtlpConfig
from quiver.errors import InvalidRequest
from quiver.otlp.messages import request_type
from quiver.otlp.otap.attributes import read_attributes, write_attributes
from quiver.otlp.otap.logs import read_logs, write_logs
from quiver.otlp.otap.metrics import read_metrics, write_metrics
from quiver.otlp.otap.read import IdColumn, Limits, Table, inside, lists_of, plain_ids, record
from quiver.otlp.otap.schema import (
    MAX_ITEMS,
    RESOURCE,
    ROOTS,
    SCOPE,
    SLOTS,
    Array,
    Kind,
)
from quiver.otlp.otap.spans import read_spans, write_spans
from quiver.otlp.otap.write import (
    Columns,
    Numbers,
    Tables,
    children,
    items_of,
    numbered,
    numbers,
    of_numbers,
    spread,
    struct,
    without_nulls,
)

_DEFAULTS: Final = OtlpConfig()
_Write: TypeAlias = Callable[[Tables, Array, Columns, int], None]
_Read: TypeAlias = Callable[[Mapping[Slot, Table], Kind], Array]


class _Names(NamedTuple):
    """What the levels of a request are called, and what converts the innermost."""

    resources: str
    scopes: str
    items: str
    write: _Write
    read: _Read


_SIGNALS: Final[Mapping[Signal, _Names]] = {
    Signal.TRACES: _Names("resource_spans", "scope_spans", "spans", write_spans, read_spans),
    Signal.LOGS: _Names("resource_logs", "scope_logs", "log_records", write_logs, read_logs),
    Signal.METRICS: _Names(
        "resource_metrics", "scope_metrics", "metrics", write_metrics, read_metrics
    ),
}


def batch_to_otap(
    signal: Signal,
    batch: pa.RecordBatch,
    *,
    max_items: int = MAX_ITEMS,
    max_depth: int = _DEFAULTS.max_depth,
) -> list[dict[Slot, pa.RecordBatch]]:
    """The requests as OTAP batches of at most ``max_items`` items; none if there are no items."""
    names = _SIGNALS[signal]
    if not 0 < max_items <= MAX_ITEMS:
        raise ValueError(f"max_items is {max_items}; ids have 16 bits: 1 to {MAX_ITEMS}")
    lists: Array = batch.column(0)
    resources = items_of(lists)
    scopes = children(resources, names.scopes)
    items = children(scopes.rows, names.items)
    resource_of = np.repeat(np.arange(len(resources)), scopes.lengths)
    scope_of = np.repeat(np.arange(len(scopes.rows)), items.lengths)
    made = []
    for start in range(0, len(items.rows), max_items):
        tables: Tables = {}
        origin = _write_origin(
            tables,
            resources,
            scopes.rows,
            resource_of,
            scope_of[start : start + max_items],
            max_depth,
        )
        names.write(tables, items.rows.slice(start, max_items), origin, max_depth)
        made.append(tables)
    return made


def _write_origin(  # noqa: PLR0917 - two levels, and where each row belongs
    tables: Tables,
    resources: Array,
    scopes: Array,
    resource_of: Numbers,
    scope_of: Numbers,
    max_depth: int,
) -> dict[str, Array | None]:
    """The columns that say where a row comes from. Adds the attributes of those places."""
    used_scopes, scope_ids = _numbered_anew(scope_of)
    used_resources, resource_ids_of_scopes = _numbered_anew(resource_of[used_scopes])
    resource_ids = resource_ids_of_scopes[scope_ids]
    resource = _taken(resources.field("resource"), used_resources)
    scope = _taken(scopes.field("scope"), used_scopes)
    write_attributes(tables, Slot.RESOURCE_ATTRS, resource, id_type=np.uint16, max_depth=max_depth)
    write_attributes(tables, Slot.SCOPE_ATTRS, scope, id_type=np.uint16, max_depth=max_depth)
    (dropped_by_resource,) = _fields(resource, ("dropped_attributes_count",))
    name, version, dropped_by_scope = _fields(
        scope, ("name", "version", "dropped_attributes_count")
    )
    resource_url = _taken(resources.field("schema_url"), used_resources)
    scope_url = _taken(scopes.field("schema_url"), used_scopes)
    return {
        "id": numbered(len(scope_of), np.uint16),
        "resource": struct(
            {
                "id": of_numbers(resource_ids),
                "schema_url": spread(resource_url, resource_ids),
                "dropped_attributes_count": _spread_numbers(dropped_by_resource, resource_ids),
            }
        ),
        "scope": struct(
            {
                "id": of_numbers(scope_ids),
                "name": spread(name, scope_ids),
                "version": spread(version, scope_ids),
                "dropped_attributes_count": _spread_numbers(dropped_by_scope, scope_ids),
            }
        ),
        "schema_url": spread(scope_url, scope_ids),
    }


def _numbered_anew(rows: Numbers) -> tuple[Numbers, Numbers]:
    """Those that appear in rising numbers, and for each number its place among them."""
    first = np.empty(len(rows), dtype=np.bool_)
    first[:1] = True
    np.not_equal(rows[1:], rows[:-1], out=first[1:])
    return rows[first], (np.cumsum(first) - 1).astype(np.uint16)


def _taken(values: Array, rows: Numbers) -> Array:
    """The values in these rows, which rise."""
    if len(rows) != len(values):
        values = values.take(of_numbers(rows))
    return values


def _fields(values: Array, names: tuple[str, ...]) -> list[Array]:
    if not values.null_count:
        return [values.field(name) for name in names]
    fields = dict(zip((field.name for field in values.type), values.flatten(), strict=True))
    defaults = [0 if name == "dropped_attributes_count" else "" for name in names]
    return without_nulls([fields[name] for name in names], defaults)


def _spread_numbers(values: Array, index: Numbers) -> Array | None:
    return None if numbers(values) is None else of_numbers(values.to_numpy()[index])


def otap_to_batch(
    signal: Signal,
    tables: Mapping[Slot, pa.RecordBatch],
    *,
    max_bytes: int = _DEFAULTS.max_request_bytes,
    max_depth: int = _DEFAULTS.max_depth,
) -> pa.RecordBatch:
    """The tables as a request batch with one request. ``max_bytes`` bounds a decoded column."""
    names = _SIGNALS[signal]
    if unknown := sorted(set(tables) - SLOTS[signal]):
        raise InvalidRequest(f"slot {unknown[0]:d} is none that OTAP has for {signal}")
    root_slot = ROOTS[signal]
    if root_slot not in tables:
        raise InvalidRequest("the table is missing; OTAP requires it", where=root_slot.name)
    limits = Limits(max_bytes, max_depth)
    checked = {Slot(slot): Table(Slot(slot), batch, limits) for slot, batch in tables.items()}
    schema = request_type(signal).schema
    resource_kind = schema.field(names.resources).type
    scope_kind = resource_kind.value_type.field(names.scopes).type
    item_kind = scope_kind.value_type.field(names.items).type
    items = names.read(checked, item_kind.value_type)
    places = _Places(checked[root_slot])
    scopes = _read_scopes(checked, places, items, scope_kind.value_type, names.items)
    resources = _read_resources(checked, places, scopes, resource_kind.value_type, names.scopes)
    everything = np.zeros(len(resources), dtype=np.int64)
    column = lists_of(resources, everything, 1, resource_kind)
    return pa.RecordBatch.from_arrays([column], schema=schema)


class _Places:
    """Which rows of the root have the same resource, and the same scope in it."""

    __slots__ = (
        "resource",
        "resource_ids",
        "resource_of_scope",
        "resource_rows",
        "schema_url",
        "scope",
        "scope_ids",
        "scope_of_row",
        "scope_rows",
    )

    def __init__(self, root: Table) -> None:
        self.resource, self.resource_ids = _origin(root, "resource", RESOURCE)
        self.scope, self.scope_ids = _origin(root, "scope", SCOPE)
        self.schema_url = root.column("schema_url")
        resource = _same([*self.resource.values(), _id_array(self.resource_ids)], root.rows)
        self.resource_rows, resource_of_row = _by_appearance(resource)
        scope = _same(
            [
                of_numbers(resource_of_row),
                *self.scope.values(),
                _id_array(self.scope_ids),
                self.schema_url,
            ],
            root.rows,
        )
        self.scope_rows, self.scope_of_row = _by_appearance(scope)
        self.resource_of_scope = resource_of_row[self.scope_rows]


def _origin(root: Table, name: str, kind: Kind) -> tuple[dict[str, Array], IdColumn | None]:
    """The fields of a resource or scope column, and its ids, which are not among them."""
    column = root.column(name)
    where = f"{root.slot.name}.{name}"
    fields = inside(column, kind, where, root.limits)
    ids = fields.pop("id", None)
    if column is None or ids is None:
        return fields, None
    return fields, plain_ids(ids, column.type.field("id"), f"{where}.id")


def _id_array(ids: IdColumn | None) -> Array | None:
    if ids is None:
        return None
    return of_numbers(ids.values, mask=None if ids.valid is None else ~ids.valid)


def _same(columns: list[Array | None], rows: int) -> Numbers:
    """A number for each row: the same for rows that are equal in all columns."""
    same = np.zeros(rows, dtype=np.int64)
    for column in columns:
        if column is not None:
            encoded = column.dictionary_encode("encode")
            codes = encoded.indices.to_numpy().astype(np.int64)
            combined = same * (len(encoded.dictionary) + 1) + codes
            _, same = np.unique(combined, return_inverse=True)
    return same


def _by_appearance(same: Numbers) -> tuple[Numbers, Numbers]:
    """The first row of each group, in rising order, and for each row the place of its group."""
    _, first, group = np.unique(same, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return first[order], rank[group]


def _read_scopes(
    tables: Mapping[Slot, Table],
    places: _Places,
    items: Array,
    kind: Kind,
    items_name: str,
) -> Array:
    count = len(places.scope_rows)
    scope_kind = kind.field("scope").type
    columns = _at(places.scope, places.scope_rows)
    columns["attributes"] = _shared_attributes(
        tables,
        Slot.SCOPE_ATTRS,
        places.scope_ids,
        places.scope_rows,
        scope_kind.field("attributes").type,
    )
    urls = _at({"schema_url": places.schema_url}, places.scope_rows)
    lists = lists_of(items, places.scope_of_row, count, kind.field(items_name).type)
    scope = record(scope_kind, count, columns)
    return record(kind, count, {"scope": scope, items_name: lists, **urls})


def _read_resources(
    tables: Mapping[Slot, Table],
    places: _Places,
    scopes: Array,
    kind: Kind,
    scopes_name: str,
) -> Array:
    count = len(places.resource_rows)
    resource_kind = kind.field("resource").type
    columns = _at(places.resource, places.resource_rows)
    url = columns.pop("schema_url", None)
    columns["attributes"] = _shared_attributes(
        tables,
        Slot.RESOURCE_ATTRS,
        places.resource_ids,
        places.resource_rows,
        resource_kind.field("attributes").type,
    )
    lists = lists_of(scopes, places.resource_of_scope, count, kind.field(scopes_name).type)
    resource = record(resource_kind, count, columns)
    return record(kind, count, {"resource": resource, scopes_name: lists, "schema_url": url})


def _at(columns: Mapping[str, Array | None], rows: Numbers) -> dict[str, Array | None]:
    places = of_numbers(rows)
    return {
        name: None if values is None else values.take(places) for name, values in columns.items()
    }


def _shared_attributes(
    tables: Mapping[Slot, Table],
    slot: Slot,
    ids: IdColumn | None,
    rows: Numbers,
    kind: Kind,
) -> Array | None:
    """The attributes of resources or scopes, by the ids that these rows have for theirs.

    Several may have the same id, if they differ in something else: they share the attributes.
    """
    source = tables.get(slot)
    if source is None or source.rows == 0:
        return None
    owner_ids, pairs = read_attributes(source, kind.value_type)
    here = np.zeros(len(rows), dtype=np.bool_)
    mine = np.zeros(len(rows), dtype=owner_ids.dtype)
    if ids is not None:
        mine = ids.values[rows]
        here = np.ones(len(rows), dtype=np.bool_) if ids.valid is None else ids.valid[rows]
    known, uses = np.unique(mine[here], return_counts=True)
    place = np.searchsorted(known, owner_ids)
    missing = ~np.isin(owner_ids, known)
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise InvalidRequest(
            f"no row has the id {owner_ids[row]}; send parents and children in one batch",
            where=f"{slot.name}.parent_id, row {row}",
        )
    most = int(uses.max())
    if most > 1 and most * source.batch.nbytes > source.limits.max_bytes:
        raise InvalidRequest(
            f"{most} of the same id share their attributes; give each its own", where=slot.name
        )
    # One more list, which is empty, for those without an id.
    lists = lists_of(pairs, place, len(known) + 1, kind)
    return lists.take(of_numbers(np.where(here, np.searchsorted(known, mine), len(known))))
