"""What OTLP asks of a request and protobuf does not, checked on columns.

========================================  ======================================================
what                                      rule
========================================  ======================================================
ids of spans and links                    16 bytes (trace), 8 bytes (span)
``parent_span_id``, ids of log records    the same, or empty
and exemplars
times and counts (``uint64``)             below 2**63
spans, log records or data points         at most ``max_items`` in a request
attributes                                at most ``max_attributes`` of one owner
lists and maps inside each other          at most ``max_depth``
lists, maps and entities                  valid messages; they are declared as bytes
members of a ``oneof``                    one at most; more are legal on the wire (the last one
                                          counts), so the request has to be rewritten
========================================  ======================================================

A check looks at one flattened column of all requests. Only if it fails is it asked whose row that
was. UTF-8 is not checked here: decoding does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa

from quiver.bundle import Signal
from quiver.config import OtlpConfig
from quiver.otlp.findings import (
    Array,
    Column,
    Findings,
    Items,
    Place,
    Requests,
    byte_lengths,
    starts,
)
from quiver.otlp.messages import request_type
from quiver.otlp.nested import LIST, MAP, check_nested, decode_set, several_set

_ID_SIZES: Final = {"trace_id": 16, "span_id": 8, "parent_span_id": 8}
_REQUIRED_IDS: Final = frozenset(
    (owner, name) for owner in ("spans", "links") for name in ("trace_id", "span_id")
)
_ONEOFS: Final = (
    ("as_double", "as_int"),
    ("gauge", "sum", "histogram", "exponential_histogram", "summary"),
)
_ITEMS: Final = frozenset({"spans", "log_records", "data_points"})
_TOO_LARGE: Final = "2**63 or more: times are nanoseconds since 1970, and counts stay below that"


# --- what there is to look at, from the schema --------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """The columns of a struct that are looked at: place in the struct, path from its list."""

    ids: tuple[tuple[int, str, int, bool], ...]
    """Also the size, and whether it has to be there."""
    numbers: tuple[tuple[int, str], ...]
    number_lists: tuple[tuple[int, str], ...]
    entities: tuple[tuple[int, str], ...]
    oneof: tuple[int, ...]
    nested: tuple[tuple[int, str], ...]
    structs: tuple[tuple[int, _Plan], ...]
    lists: tuple[tuple[int, str, str, _Plan], ...]
    """Also what is counted: items, attributes, or nothing."""

    @property
    def empty(self) -> bool:
        return not any(getattr(self, name) for name in self.__slots__)


@cache
def _plan_of(signal: Signal) -> _Plan:
    return _plan(pa.struct(list(request_type(signal).schema)), "", "")


def _plan(struct: pa.StructType, owner: str, prefix: str) -> _Plan:
    """``owner`` is the list that the struct is in, ``prefix`` leads from there to the struct."""
    fields = [(index, field, prefix + field.name) for index, field in enumerate(struct)]
    names = [field.name for field in struct]
    members = [names] if LIST in names else [o for o in _ONEOFS if set(o) <= set(names)]
    lists = [(i, f.type.value_type, path) for i, f, path in fields if _is_list(f.type)]
    structs = [(i, _plan(f.type, owner, path + ".")) for i, f, path in fields if _is_struct(f.type)]
    return _Plan(
        ids=tuple(
            (i, path, _ID_SIZES[f.name], (owner, f.name) in _REQUIRED_IDS)
            for i, f, path in fields
            if f.name in _ID_SIZES
        ),
        numbers=tuple((i, path) for i, f, path in fields if f.type == pa.uint64()),
        number_lists=tuple((i, path) for i, item, path in lists if item == pa.uint64()),
        entities=tuple((i, path) for i, item, path in lists if item == pa.binary()),
        oneof=tuple(names.index(member) for member in (members[0] if members else ())),
        nested=tuple((i, path) for i, f, path in fields if f.name in {LIST, MAP}),
        structs=tuple(step for step in structs if not step[1].empty),
        lists=tuple(
            (i, path, _counted(names[i], item), _plan(item, names[i], ""))
            for i, item, path in lists
            if _is_struct(item)
        ),
    )


def _is_struct(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.StructType)


def _counted(name: str, item: pa.StructType) -> str:
    if [field.name for field in item] == ["key", "value"]:
        return "attributes"
    return "items" if name in _ITEMS else ""


def _is_list(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.ListType)


# --- the checks --------------------------------------------------------------------------------


def check_requests(
    signal: Signal, batch: pa.RecordBatch, limits: OtlpConfig, *, rewritten: bool = False
) -> Findings:
    """Look at a batch as decoding made it (no slice of one).

    ``rewritten``: upb wrote all the requests, so what is inside bytes is valid, and nothing is
    there twice.
    """
    check = _Check(limits, rewritten)
    ((_, name, _, plan),) = _plan_of(signal).lists
    top = cast("pa.ListArray[Any]", batch.column(0))
    if len(top.values):
        check.struct(plan, cast("pa.StructArray", top.values), Items(Requests(), name, top))
    if sum(len(items.lists.values) for items in check.counted) > limits.max_items:
        check.item_counts(batch.num_rows)
    if check.nested:
        check_nested(check.nested, limits.max_depth, check.findings, valid=rewritten)
    return check.findings


class _Check:
    """One pass over the columns of a batch."""

    def __init__(self, limits: OtlpConfig, rewritten: bool) -> None:  # noqa: FBT001
        self.findings: Final = Findings()
        self.nested: Final[list[Column]] = []
        """Columns of lists and maps, of which some are set."""
        self.counted: Final[list[Items]] = []
        """Spans, log records, or data points of each kind."""
        self._limits: Final = limits
        self._rewritten: Final = rewritten

    def struct(self, plan: _Plan, struct: pa.StructArray, place: Place) -> None:
        """The columns of a struct, and everything below them."""
        self._values(plan, struct, place)
        if not self._rewritten:
            self._not_rewritten(plan, struct, place)
        for index, below in plan.structs:
            child = cast("pa.StructArray", struct.field(index))
            if child.null_count < len(child):
                self.struct(below, child, place)
        for index, name, counted, below in plan.lists:
            lists = cast("pa.ListArray[Any]", struct.field(index))
            values = cast("pa.StructArray", lists.values)
            if len(values):
                items = Items(place, name, lists)
                if counted == "items":
                    self.counted.append(items)
                elif counted and len(values) > self._limits.max_attributes:
                    self._attribute_counts(items)
                self.struct(below, values, items)

    def _values(self, plan: _Plan, struct: pa.StructArray, place: Place) -> None:
        column = struct.field
        for index, name, size, required in plan.ids:
            self._id(column(index), size, required, place, name)
        for index, name in plan.numbers:
            self._numbers(column(index), place, name)
        for index, name in plan.number_lists:
            lists = cast("pa.ListArray[Any]", column(index))
            if len(lists.values):
                self._numbers(lists.values, Items(place, name, lists), "")
        for index, name in plan.nested:
            values = column(index)
            if values.null_count < len(values):
                self.nested.append(Column(place, name, values))

    def _not_rewritten(self, plan: _Plan, struct: pa.StructArray, place: Place) -> None:
        if plan.oneof:
            twice = several_set([struct.field(index) for index in plan.oneof])
            if twice is not None:
                self.findings.doubt(place, twice)
        for index, name in plan.entities:
            lists = cast("pa.ListArray[Any]", struct.field(index))
            if len(lists.values):
                column = Column(Items(place, name, lists), "", lists.values)
                decode_set("EntityRef", [column], self.findings)

    def _id(self, ids: Array, size: int, required: bool, place: Place, name: str) -> None:  # noqa: FBT001
        lengths = byte_lengths(ids)
        # A size is a power of two: without its bit, a length that may be is zero.
        wrong = lengths ^ size if required else lengths & ~size
        if np.count_nonzero(wrong):  # of a few rows, twice as fast as `any`
            rows = np.flatnonzero(wrong)
            empty = "" if required else ", or none"
            reason = f"an id of {lengths[rows[0]]} bytes; it has {size}{empty}"
            self.findings.blame(place, rows, name, reason)

    def _numbers(self, numbers: Array, place: Place, name: str) -> None:
        buffer = cast("memoryview", numbers.buffers()[1])
        signed = np.frombuffer(buffer, np.int64, len(numbers), 8 * numbers.offset)
        too_large = signed < 0
        if np.count_nonzero(too_large):
            self.findings.blame(place, np.flatnonzero(too_large), name, _TOO_LARGE)

    def _attribute_counts(self, items: Items) -> None:
        counts = np.diff(starts(items.lists))
        limit = self._limits.max_attributes
        if counts.max() > limit:
            rows = np.flatnonzero(counts > limit)
            reason = f"{counts[rows[0]]} attributes; {limit} are the most of one owner"
            self.findings.blame(items.above, rows, items.name, reason)

    def item_counts(self, requests: int) -> None:
        """There are more items than one request may have: maybe one has too many."""
        counts = np.zeros(requests, np.int64)
        for items in self.counted:
            rows = np.arange(len(items.lists.values))
            counts += np.bincount(items.requests(rows), minlength=requests)
        limit = self._limits.max_items
        for request in np.flatnonzero(counts > limit):
            reason = f"{counts[request]} spans, log records or data points; "
            reason += f"{limit} are the most of one request: send several"
            self.findings.blame(Requests(), np.array([request]), "", reason)
