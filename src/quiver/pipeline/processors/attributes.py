"""Sets, drops, keeps and hashes attributes of items, resources and scopes.

Rules apply in their order, each to the items for which all conditions of ``where`` hold:

==========  ========================================================================================
``set``     the keys get the value; where a key is, it changes in its place, else it is added
``drop``    the keys are taken out
``keep``    all other keys are taken out
``hash``    the values become texts: the BLAKE3 sum of what they were, 64 hex digits. Numbers are
            hashed as decimal text, so that ``5`` and ``"5"`` stay the same; lists and maps as their
            protobuf bytes. Who can guess values can compare their sums: it hides, it does not seal
==========  ========================================================================================

A rule on a resource may only ask about the resource, one on a scope about resource and scope: they
belong to many items, of which some would match and some not.

=========================================  =========================================================
metric                                     what
=========================================  =========================================================
``quiver.attributes.changed_total``        spans, records or points that were changed
``quiver.attributes.unreadable_total``     requests that went on as they are: they cannot be read
=========================================  =========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3
from numpy.typing import NDArray

from quiver.bundle import Signal
from quiver.errors import InvalidConfig
from quiver.metrics import Metrics
from quiver.otlp.columns import Array, Index, of_lists, starts_of, without_nulls
from quiver.otlp.schema import ATTRIBUTES, VALUE
from quiver.pipeline.item import Item
from quiver.pipeline.node import Port
from quiver.pipeline.processors.conditions import ATTRIBUTE_COLUMNS, Check, Mask, all_of
from quiver.pipeline.processors.rewriting import Edited, rewritten
from quiver.pipeline.settings.options import AttributeAction, AttributeRule, AttributesOptions

_MAY_ASK: Final = {
    "item": {"item", "resource", "scope"},
    "scope": {"resource", "scope"},
    "resource": {"resource"},
}
_MEMBERS: Final = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
_MAX_INT: Final = 2**63


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule that was looked at."""

    action: AttributeAction
    keys: tuple[str, ...]
    value: dict[str, Any]
    column: str
    where: list[Check]

    @classmethod
    def of(cls, rule: AttributeRule) -> _Rule:
        if not rule.keys:
            raise InvalidConfig(f"a rule to {rule.action} attributes has no keys")
        if rule.on not in ATTRIBUTE_COLUMNS:
            raise InvalidConfig(
                f"a rule has on: {rule.on!r}; it can be {', '.join(ATTRIBUTE_COLUMNS)}"
            )
        if (rule.action is AttributeAction.SET) != (rule.value is not None):
            raise InvalidConfig("a rule to set attributes needs a value, and no other has one")
        if type(rule.value) is int and not -_MAX_INT <= rule.value < _MAX_INT:
            raise InvalidConfig(f"a rule sets {rule.value}, which has more than 64 bits")
        where = [Check.of(condition) for condition in rule.where]
        for condition in rule.where:
            if condition.on not in _MAY_ASK[rule.on]:
                raise InvalidConfig(
                    f"a rule on the {rule.on} asks about the {condition.on}: it belongs to many "
                    "items, of which some would match and some not"
                )
        value = {} if rule.value is None else {_MEMBERS[type(rule.value)]: rule.value}
        return cls(rule.action, rule.keys, value, ATTRIBUTE_COLUMNS[rule.on], where)

    def apply(self, column: Array, rows: Mask) -> tuple[Array, Mask]:
        """The column with the change in these rows, and the rows that it made another."""
        if self.action is AttributeAction.SET:
            changed = np.zeros(len(column), np.bool_)
            for key in self.keys:
                column, now = _set(column, rows, key, self.value)
                changed |= now
            return column, changed
        if self.action is AttributeAction.HASH:
            return _hash(column, rows, self.keys)
        return _remove(column, rows, self.keys, others=self.action is AttributeAction.KEEP)


class AttributesProcessor:
    """Hands on items with other attributes."""

    def __init__(
        self, name: str, options: AttributesOptions, port: Port, *, metrics: Metrics | None = None
    ) -> None:
        self.name = name
        self._port = port
        self._metrics = metrics or Metrics()
        try:
            self._rules = [_Rule.of(rule) for rule in options.rules]
        except InvalidConfig as error:
            raise InvalidConfig(f"{name}: {error}") from error

    async def start(self) -> None:
        """Nothing to begin."""

    async def take(self, item: Item) -> None:
        """Return when the changed item was taken by whoever comes next."""
        if not self._rules:
            await self._port.send(item)
            return
        done = await rewritten(item, self._edit)
        name = "quiver.attributes.unreadable_total"
        if done.unreadable:
            self._metrics.count(name, done.unreadable, node=self.name)
        if done.changed:
            self._metrics.count("quiver.attributes.changed_total", done.changed, node=self.name)
        await self._port.send(done.item or item)

    def _edit(self, signal: Signal, table: pa.RecordBatch) -> Edited:
        changed = np.zeros(table.num_rows, np.bool_)
        for rule in self._rules:
            rows = all_of(rule.where, signal, table)
            if not rows.any():
                continue
            place = table.schema.get_field_index(rule.column)
            column, now = rule.apply(table.column(place), rows)
            if now.any():
                changed |= now
                table = table.set_column(place, table.schema.field(place), column)
        return Edited(table, np.ones(table.num_rows, np.bool_), changed)

    async def stop(self, deadline: float) -> None:
        """Nothing to end."""


# --- maps, all rows at once -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of a column of maps: to which row each belongs, and which have a key."""

    offsets: NDArray[np.int32]
    entries: Array
    row: Index
    hit: Mask
    """Entries of the chosen rows that have one of the keys."""

    @classmethod
    def of(cls, column: Array, rows: Mask, keys: tuple[str, ...]) -> _Entries:
        offsets, entries = without_nulls(column)
        row = np.repeat(np.arange(len(column)), np.diff(offsets))
        found = pc.is_in(entries.field(0), value_set=pa.array(keys, pa.string()))
        return cls(offsets, entries, row, np.asarray(found, np.bool_) & rows[row])

    def rows_with(self, chosen: Mask) -> Mask:
        """The rows that have a chosen entry."""
        rows = np.zeros(len(self.offsets) - 1, np.bool_)
        rows[self.row[chosen]] = True
        return rows


def _remove(
    column: Array, rows: Mask, keys: tuple[str, ...], *, others: bool
) -> tuple[Array, Mask]:
    """Without the keys, or without all others."""
    found = _Entries.of(column, rows, keys)
    gone = rows[found.row] & ~found.hit if others else found.hit
    changed = found.rows_with(gone)
    if not changed.any():
        return column, changed
    left = found.entries.filter(pa.array(~gone))
    lengths = np.bincount(found.row[~gone], minlength=len(column))
    return of_lists(ATTRIBUTES, starts_of(lengths), left, _valid(column)), changed


def _set(column: Array, rows: Mask, key: str, value: dict[str, Any]) -> tuple[Array, Mask]:
    """The first entry with the key gets the value, others go; where there is none, it is added."""
    found = _Entries.of(column, rows, (key,))
    hits = np.flatnonzero(found.hit)
    parents = found.row[hits]
    first = np.ones(len(hits), np.bool_)
    first[1:] = parents[1:] != parents[:-1]
    has = found.rows_with(found.hit)
    adds = np.flatnonzero(rows & ~has)
    made = pa.array([{"key": key, "value": value}], found.entries.type)
    index = np.arange(len(found.entries))
    index[hits[first]] = len(found.entries)
    stays = np.ones(len(found.entries), np.bool_)
    stays[hits[~first]] = False
    row = np.concatenate([found.row[stays], adds])
    index = np.concatenate([index[stays], np.full(len(adds), len(found.entries))])
    order = np.argsort(row, kind="stable")  # what is added comes last in its row
    entries = pa.concat_arrays([found.entries, made]).take(pa.array(index[order]))
    lengths = np.bincount(row, minlength=len(column))
    valid = _valid(column)
    valid = None if valid is None else valid | rows
    return of_lists(ATTRIBUTES, starts_of(lengths), entries, valid), rows


def _hash(column: Array, rows: Mask, keys: tuple[str, ...]) -> tuple[Array, Mask]:
    """Sums in place of values. Work in Python is once for each value that differs."""
    found = _Entries.of(column, rows, keys)
    values = found.entries.field(1)
    hits = np.flatnonzero(found.hit & np.asarray(values.is_valid(), np.bool_))
    if not len(hits):
        return column, np.zeros(len(column), np.bool_)
    chosen = values.take(pa.array(hits))
    members = [pc.struct_field(chosen, [place]) for place in range(len(VALUE))]
    data = pc.coalesce(*(_as_bytes(member) for member in members))
    distinct: Any = data.dictionary_encode()
    sums = [None if each is None else blake3(each).hexdigest() for each in _pylist(distinct)]
    texts = pa.array(sums, pa.string()).take(distinct.indices)
    hashed = pa.StructArray.from_arrays(
        [texts, *(pa.nulls(len(hits), field.type) for field in list(VALUE)[1:])],
        fields=list(VALUE),
    )
    index = np.arange(len(values))
    index[hits] = len(values) + np.arange(len(hits))
    new_values = pa.concat_arrays([values, hashed]).take(pa.array(index))
    entries = pa.StructArray.from_arrays(
        [found.entries.field(0), new_values], fields=list(found.entries.type)
    )
    changed = np.zeros(len(column), np.bool_)
    changed[found.row[hits]] = True
    return of_lists(ATTRIBUTES, found.offsets, entries, _valid(column)), changed


def _pylist(distinct: Any) -> list[bytes | None]:  # noqa: ANN401 - a dictionary array
    found: list[bytes | None] = distinct.dictionary.to_pylist()
    return found


def _as_bytes(member: Any) -> Any:  # noqa: ANN401 - columns of all types
    if pa.types.is_binary(member.type):
        return member
    if not pa.types.is_string(member.type):
        member = member.cast(pa.string())
    return member.cast(pa.binary())


def _valid(column: Array) -> Mask | None:
    if not column.null_count:
        return None
    return np.asarray(column.is_valid(), np.bool_)
