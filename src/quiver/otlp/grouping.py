"""From rows back to requests: what all signals share.

Rows that follow each other and come from the same place form one group. The place is the request,
``source_store`` to ``source_row`` and the positions; no source equals no source. A position that is
not known equals nothing: the row gets a resource of its own. Rows without a source have only their
positions, so they must also be in order: where an item does not come after the one before, a new
resource starts.

The rows may be the answer to any query: columns may be missing, in another order, wider than they
were, or of another engine's types for text. What is missing or null is what OTLP has for it when it
is not sent.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from quiver.bundle import Signal
from quiver.errors import InvalidRequest
from quiver.otlp.columns import (
    MAX_UINT32,
    Array,
    Index,
    Mask,
    Type,
    byte_lengths,
    numbers,
    of_lists,
    of_numbers,
    of_structs,
    take_map,
    valid_rows,
    without_nulls,
)
from quiver.otlp.messages import request_type
from quiver.otlp.schema import INT, REQUEST_SOURCE, TEXT, lake_schema

_UINT32 = pa.uint32()
_UINT64 = pa.uint64()


def lake_rows(signal: Signal, table: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
    """The columns of the lake in their types; those that are missing are null."""
    schema = lake_schema(signal)
    if isinstance(table, pa.RecordBatch) and table.schema == schema:
        return table
    return pa.RecordBatch.from_arrays([_column(table, field) for field in schema], schema=schema)


def _column(table: pa.Table | pa.RecordBatch, field: pa.Field[Any]) -> Array:
    position = table.schema.get_field_index(field.name)
    if position < 0:
        if field.name in table.schema.names:
            raise InvalidRequest("it is there twice: name them apart", where=f"column {field.name}")
        return pa.nulls(table.num_rows, field.type)
    try:
        column: Array = table.column(position)
        if column.type != field.type:
            column = column.cast(field.type)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
    except pa.ArrowException as error:
        raise InvalidRequest(
            f"it does not fit {field.type}: {error}", where=f"column {field.name}"
        ) from error
    return column


def text(array: Array) -> Array:
    """Strings; null as nothing."""
    return array.fill_null("") if array.null_count else array


def filled(array: Array) -> Array:
    """Numbers; null as 0."""
    return array.fill_null(array.type.to_pandas_dtype()(0)) if array.null_count else array


def uint64(array: Array, where: str) -> Array:
    """What ``signed`` was given."""
    array = filled(array)
    values = numbers(array)
    if len(values) and values.min() < 0:
        raise InvalidRequest("it is below 0: OTLP has no negative numbers here", where=where)
    return array.view(_UINT64)


def uint32(array: Array, where: str) -> Array:
    """What ``signed`` was given."""
    values = numbers(filled(array))
    if len(values) and (values.min() < 0 or values.max() > MAX_UINT32):
        raise InvalidRequest(f"it is not between 0 and {MAX_UINT32}", where=where)
    return of_numbers(values.astype(np.uint32), _UINT32)


def pairs(array: Array, type_: Type) -> Array:
    """Attributes as the list of key-value pairs that a request has."""
    if not array.null_count:
        return array.view(type_)
    offsets, entries = without_nulls(array)
    return of_lists(type_, offsets, entries)


def uint64_lists(array: Array, type_: Type, where: str) -> Array:
    """Lists of counts."""
    offsets, values = without_nulls(array)
    return of_lists(type_, offsets, uint64(values, where))


def double_lists(array: Array, type_: Type) -> Array:
    """Lists of bounds."""
    offsets, values = without_nulls(array)
    return of_lists(type_, offsets, filled(values))


class NestedTypes(NamedTuple):
    """The types of a request: lists and what is in them, from the outside in."""

    resources: Type
    resource: Type
    scopes: Type
    scope: Type
    items: Type
    item: Type


@cache
def nested_types(signal: Signal) -> NestedTypes:
    """Looked up once: each step of the way makes an object."""
    resources: Type = request_type(signal).schema.field(0).type
    resource = resources.value_type
    scopes = resource.field(1).type
    scope = scopes.value_type
    items = scope.field(1).type
    return NestedTypes(resources, resource, scopes, scope, items, items.value_type)


def nest(signal: Signal, rows: pa.RecordBatch, starts: Groups, items: Array) -> pa.RecordBatch:
    """Requests from items: ``items`` has one for each row, or of metrics for each group of rows."""
    types = nested_types(signal)
    of_items = starts.metrics if signal is Signal.METRICS else np.arange(rows.num_rows)
    at_scope, at_resource = starts.scopes, starts.resources
    schema_urls = rows.column("scope_schema_url"), rows.column("resource_schema_url")
    scopes = of_structs(
        types.scope,
        len(at_scope),
        [
            _scopes(types.scope.field(0).type, rows, at_scope),
            of_lists(types.items, _offsets(of_items, at_scope), items),
            text(schema_urls[0].take(of_numbers(at_scope, INT))),
        ],
    )
    resources = of_structs(
        types.resource,
        len(at_resource),
        [
            _resources(types.resource.field(0).type, rows, at_resource),
            of_lists(types.scopes, _offsets(at_scope, at_resource), scopes),
            text(schema_urls[1].take(of_numbers(at_resource, INT))),
        ],
    )
    requests = of_lists(types.resources, _offsets(at_resource, starts.requests), resources)
    return pa.RecordBatch.from_arrays([requests], schema=request_type(signal).schema)


def _offsets(inner: Index, outer: Index) -> Index:
    """How many inner groups start before each outer one, and in all."""
    return np.append(np.searchsorted(inner, outer), len(inner))


def _scopes(type_: Type, rows: pa.RecordBatch, at: Index) -> Array:
    pick = of_numbers(at, INT)
    attributes = take_map(rows.column("scope_attributes"), at)
    name = rows.column("scope_name").take(pick)
    version = rows.column("scope_version").take(pick)
    dropped = filled(rows.column("scope_dropped_attributes_count").take(pick))
    valid = valid_rows(attributes)
    if valid is not None:
        valid = (
            valid
            | (numbers(dropped) != 0)
            | (byte_lengths(name) != 0)
            | (byte_lengths(version) != 0)
        )
    members = [
        text(name),
        text(version),
        pairs(attributes, type_.field(2).type),
        uint32(dropped, "column scope_dropped_attributes_count"),
    ]
    return of_structs(type_, len(at), members, valid)


def _resources(type_: Type, rows: pa.RecordBatch, at: Index) -> Array:
    pick = of_numbers(at, INT)
    attributes = take_map(rows.column("resource_attributes"), at)
    dropped = filled(rows.column("resource_dropped_attributes_count").take(pick))
    references = without_nulls(rows.column("resource_entity_refs").take(pick))
    valid = valid_rows(attributes)
    if valid is not None:
        valid = valid | (numbers(dropped) != 0) | (references.lengths != 0)
    members = [
        pairs(attributes, type_.field(0).type),
        uint32(dropped, "column resource_dropped_attributes_count"),
        of_lists(type_.field(2).type, *references),
    ]
    return of_structs(type_, len(at), members, valid)


class Groups(NamedTuple):
    """The rows at which a request, a resource, a scope and (of metrics) a metric starts."""

    requests: Index
    resources: Index
    scopes: Index
    metrics: Index


def group_rows(signal: Signal, rows: pa.RecordBatch, request_of_row: NDArray[np.int32]) -> Groups:
    """Where groups start; see the head of this file."""
    request = _changes(request_of_row)
    resource = request.copy()
    for name in REQUEST_SOURCE:
        resource |= _column_changes(rows.column(name))
    resource |= _position_changes(rows.column("source_resource"))
    scope = resource | _position_changes(rows.column("source_scope"))
    metric = scope.copy()
    if signal is Signal.METRICS:
        metric |= _position_changes(rows.column("source_metric"))
        metric |= _column_changes(rows.column("type"))
    unordered = _without_order(signal, rows, resource)
    return Groups(
        np.flatnonzero(request),
        np.flatnonzero(resource | unordered),
        np.flatnonzero(scope | unordered),
        np.flatnonzero(metric | unordered),
    )


def _changes(values: NDArray[np.int64] | NDArray[np.int32]) -> Mask:
    changed = np.ones(len(values), np.bool_)
    changed[1:] = values[1:] != values[:-1]
    return changed


def _column_changes(array: Array) -> Mask:
    """Rows that differ from the one before; null equals null."""
    rows = len(array)
    changed = np.zeros(rows, np.bool_)
    if array.null_count == rows or not rows:
        return changed
    if array.type == TEXT:
        array = pc.dictionary_encode(array).indices
    valid = valid_rows(array)
    if valid is not None:
        array = array.fill_null(0)
        changed[1:] = valid[1:] != valid[:-1]
    changed[1:] |= _changes(numbers(array))[1:]
    return changed


def _position_changes(array: Array) -> Mask:
    """As ``_column_changes``, but a place that is not known is not the one before."""
    changed = _column_changes(array)
    valid = valid_rows(array)
    return changed if valid is None else changed | ~valid


def _without_order(signal: Signal, rows: pa.RecordBatch, starts: Mask) -> Mask:
    """Rows without a source whose item does not come after that of the row before."""
    store = rows.column("source_store")
    unordered = np.zeros(len(store), np.bool_)
    known = valid_rows(store)
    if known is None:
        return unordered
    names = ["source_resource", "source_scope", "source_item"]
    if signal is Signal.METRICS:
        names.insert(2, "source_metric")
    later = np.zeros(max(len(store) - 1, 0), np.bool_)
    equal = np.ones_like(later)
    for name in names:
        place = numbers(rows.column(name).fill_null(0)).astype(np.int64)
        later |= equal & (place[1:] > place[:-1])
        equal &= place[1:] == place[:-1]
    unordered[1:] = ~later & ~known[1:] & ~starts[1:]
    return unordered
