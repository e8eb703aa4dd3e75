"""What the tables of all signals share: the levels above an item, and where it comes from.

A request has three levels: resources, their scopes, their items (spans, log records, metrics). Flat
tables repeat what belongs to a resource or scope on each of its rows. That can be far more than was
sent, so it has a limit: ``MAX_REPEATED_BYTES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quiver.config import AttributeLevel, AttributeType, PromotedAttribute
from quiver.errors import InvalidRequest
from quiver.otlp.columns import (
    Array,
    Index,
    Lists,
    as_map,
    content_bytes,
    lists,
    of_numbers,
    promote,
    signed,
    take_map,
    valid_rows,
)
from quiver.otlp.schema import ATTRIBUTES, BYTES, CODE, INT, REQUEST_SOURCE, TEXT

MAX_REPEATED_BYTES: Final = 1024 * 1024 * 1024
# So few rows take a small multiple of the request: not worth the look.
_FEW_ROWS: Final = 16
# From here on it pays to take attributes the other way.
_MANY_ROWS: Final = 128
_SERVICE_NAME: Final = "service.name"
_BYTE_LISTS: Final = pa.list_(BYTES)


class Source(NamedTuple):
    """Where a request is kept."""

    store: str
    segment: int
    bundle: int
    row: int


class Level(NamedTuple):
    """The resources, scopes, items or metrics of a batch: whose each is, and which of them."""

    values: Array
    parent: Index
    position: Index


class Levels(NamedTuple):
    """The three levels of a batch of requests."""

    resources: Level
    scopes: Level
    items: Level


def level(array: Array) -> Level:
    """The values of a column of lists, each with its list and its place in it."""
    found = lists(array)
    return Level(found.values, *parents(found))


def parents(found: Lists) -> tuple[Index, Index]:
    """For each value: its list, and its place in it."""
    starts = found.offsets[:-1]
    parent = np.repeat(np.arange(len(starts)), found.lengths)
    return parent, np.arange(len(parent)) - starts[parent]


def levels(batch: pa.RecordBatch) -> Levels:
    """Resources, scopes and items of all requests of a batch."""
    resources = level(batch.column(0))
    scopes = level(resources.values.field(1))
    return Levels(resources, scopes, level(scopes.values.field(1)))


def context_columns(
    found: Levels,
    scope_of_row: Index,
    promoted: Sequence[PromotedAttribute],
    sources: Sequence[Source] | None,
) -> tuple[dict[str, Array], Index]:
    """The columns of resource, scope and source; and for each row, which request of the batch."""
    resource_of_row = found.scopes.parent[scope_of_row]
    request_of_row = found.resources.parent[resource_of_row]
    resources, scopes = found.resources.values, found.scopes.values
    resource, scope = resources.field(0), scopes.field(0)
    check_repeated(
        [resource.field(0), resource.field(2), resources.field(2)],
        *(resource_of_row, request_of_row, "resource"),
    )
    check_repeated(
        [scope.field(0), scope.field(1), scope.field(2), scopes.field(2)],
        *(scope_of_row, request_of_row, "scope"),
    )
    of_resources = _resource_columns(resources, promoted)
    of_scopes = _scope_columns(scopes, promoted)
    if len(found.scopes.parent) == len(found.resources.parent) == 1:
        columns = take_all(of_resources | of_scopes, scope_of_row)
    else:
        columns = take_all(of_resources, resource_of_row) | take_all(of_scopes, scope_of_row)
    columns |= _source_columns(sources, request_of_row)
    columns["source_resource"] = position_column(found.resources.position[resource_of_row])
    columns["source_scope"] = position_column(found.scopes.position[scope_of_row])
    return columns, request_of_row


def position_column(position: NDArray[np.int64]) -> Array:
    """A place in a list, as a column."""
    return of_numbers(position.astype(np.int32), CODE)


def promoted_columns(
    attributes: Array, promoted: Sequence[PromotedAttribute], level_: AttributeLevel
) -> dict[str, Array]:
    """The columns of the attributes that are promoted from one level."""
    return {
        wanted.column: promote(attributes, pa.scalar(wanted.key), wanted.type)
        for wanted in promoted
        if wanted.level is level_
    }


def _resource_columns(resources: Array, promoted: Sequence[PromotedAttribute]) -> dict[str, Array]:
    """One value for each resource."""
    resource = resources.field(0)
    attributes = as_map(resource.field(0), valid_rows(resource))
    return {
        "resource_attributes": attributes,
        "resource_dropped_attributes_count": signed(resource.field(1)),
        "resource_entity_refs": resource.field(2).view(_BYTE_LISTS),
        "resource_schema_url": resources.field(2),
        "service_name": promote(attributes, pa.scalar(_SERVICE_NAME), AttributeType.STRING),
        **promoted_columns(attributes, promoted, AttributeLevel.RESOURCE),
    }


def _scope_columns(scopes: Array, promoted: Sequence[PromotedAttribute]) -> dict[str, Array]:
    """One value for each scope."""
    scope = scopes.field(0)
    attributes = as_map(scope.field(2), valid_rows(scope))
    return {
        "scope_name": scope.field(0),
        "scope_version": scope.field(1),
        "scope_attributes": attributes,
        "scope_dropped_attributes_count": signed(scope.field(3)),
        "scope_schema_url": scopes.field(2),
        **promoted_columns(attributes, promoted, AttributeLevel.SCOPE),
    }


def _source_columns(sources: Sequence[Source] | None, rows: Index) -> dict[str, Array]:
    if sources is None:
        return {name: pa.nulls(len(rows), type_) for name, type_ in REQUEST_SOURCE.items()}
    stores = pa.array([source.store for source in sources], TEXT)
    kept = np.array([source[1:] for source in sources], np.int64).reshape(-1, 3).T[:, rows]
    segment, bundle, row = kept
    return {
        "source_store": stores.take(of_numbers(rows, INT)),
        "source_segment": of_numbers(np.ascontiguousarray(segment), INT),
        "source_bundle": position_column(bundle),
        "source_row": position_column(row),
    }


def take_all(columns: dict[str, Array], rows: Index) -> dict[str, Array]:
    """Repeat columns, in one call: what a call costs is more than what it does for a few rows."""
    maps: dict[str, Array] = {}
    if len(rows) > _MANY_ROWS:
        maps = {name: column for name, column in columns.items() if column.type == ATTRIBUTES}
    names = [name for name in columns if name not in maps]
    batch = pa.RecordBatch.from_arrays([columns[name] for name in names], names=names)
    taken = dict(zip(names, batch.take(of_numbers(rows, INT)).columns, strict=True))
    return taken | {name: take_map(column, rows) for name, column in maps.items()}


def check_repeated(columns: Sequence[Array], rows: Index, request_of_row: Index, what: str) -> None:
    """Refuse columns that, repeated for the rows, would take far more memory than was sent.

    The columns are strings, lists of bytes, or attributes.

    Raises:
        InvalidRequest: Its ``request`` is the row of the batch that needs most.
    """
    if len(rows) <= _FEW_ROWS:
        return
    if sum(column.nbytes for column in columns) * len(rows) <= MAX_REPEATED_BYTES:
        return
    sizes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        sizes += content_bytes(column)
    repeated = sizes[rows]
    total = int(repeated.sum())
    if total > MAX_REPEATED_BYTES:
        raise InvalidRequest(
            f"what belongs to a {what} takes {total} bytes when it is repeated for each item, at "
            f"most {MAX_REPEATED_BYTES} fit: send fewer items at a time, or less with the {what}",
            request=int(np.bincount(request_of_row, weights=repeated).argmax()),
        )
