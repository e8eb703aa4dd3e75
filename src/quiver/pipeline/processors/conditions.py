"""Which items a condition is about: a mask over the rows of a flat table.

A condition looks at one value of each item: an ``attribute`` of the item, its resource or its
scope, or a ``field``. All that it says must hold: ``equals`` one of several texts, ``matches`` a
regular expression (RE2) somewhere, ``exists``. With none of them, it asks whether the value exists.

=================  ===============================================================================
value              how it is compared
=================  ===============================================================================
text               as it is
number             as decimal text; a double also by its value, so that ``1`` is ``1.0``
bool               ``true``, ``false``
bytes, list, map   exist, and equal nothing
key that is there  the first one counts
several times
=================  ===============================================================================

====================  ===========================  ===============================================
field                 of                           beside its number
====================  ===========================  ===============================================
``name``              spans, metrics; of records
                      their event name
``kind``              spans                        ``server``, ``SPAN_KIND_SERVER`` ...
``status_code``       spans                        ``error``, ``STATUS_CODE_ERROR`` ...
``severity_number``   records                      ``warn``, ``SEVERITY_NUMBER_WARN2`` ...
====================  ===========================  ===============================================

A field that a signal does not have does not exist there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from opentelemetry.proto.logs.v1.logs_pb2 import SeverityNumber
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from quiver.bundle import Signal
from quiver.errors import InvalidConfig
from quiver.otlp.columns import lists
from quiver.pipeline.settings.options import Condition

Mask: TypeAlias = NDArray[np.bool_]

ATTRIBUTE_COLUMNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "item": "attributes",
        "resource": "resource_attributes",
        "scope": "scope_attributes",
    }
)
_FIELDS: Final = ("name", "kind", "status_code", "severity_number")
_FIELD_COLUMNS: Final[Mapping[tuple[Signal, str], str]] = MappingProxyType(
    {
        (Signal.TRACES, "name"): "name",
        (Signal.TRACES, "kind"): "kind",
        (Signal.TRACES, "status_code"): "status_code",
        (Signal.METRICS, "name"): "name",
        (Signal.LOGS, "name"): "event_name",
        (Signal.LOGS, "severity_number"): "severity_number",
    }
)
_STRING, _BOOL, _INT, _DOUBLE = range(4)


def _numbers(enum: Any, prefix: str) -> dict[str, str]:  # noqa: ANN401 - enums of protobuf
    return {
        name: str(number)
        for full, number in enum.items()
        for name in (full.lower(), full.removeprefix(prefix).lower())
    }


_NAMES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "kind": _numbers(Span.SpanKind, "SPAN_KIND_"),
        "status_code": _numbers(Status.StatusCode, "STATUS_CODE_"),
        "severity_number": _numbers(SeverityNumber, "SEVERITY_NUMBER_"),
    }
)


@dataclass(frozen=True, slots=True)
class Check:
    """A condition that was looked at: it can be asked."""

    condition: Condition
    _texts: pa.Array[Any]
    _doubles: pa.Array[Any]

    @classmethod
    def of(cls, condition: Condition) -> Check:
        """``InvalidConfig`` when the condition says what cannot be asked."""
        if bool(condition.attribute) == bool(condition.field):
            raise InvalidConfig("a condition needs attribute or field, one of them")
        if condition.on not in ATTRIBUTE_COLUMNS:
            raise InvalidConfig(
                f"a condition has on: {condition.on!r}; it can be {', '.join(ATTRIBUTE_COLUMNS)}"
            )
        if condition.field and condition.field not in _FIELDS:
            raise InvalidConfig(
                f"a condition has field: {condition.field!r}; it can be {', '.join(_FIELDS)}"
            )
        if condition.field and condition.on != "item":
            raise InvalidConfig("a condition has field and on: fields are those of items")
        if condition.exists is False and (condition.equals or condition.matches is not None):
            raise InvalidConfig("a condition has exists: false, and asks for a value all the same")
        if condition.matches is not None:
            try:
                pc.match_substring_regex(pa.array([""]), condition.matches)
            except pa.ArrowInvalid as error:
                raise InvalidConfig(
                    f"a condition has matches: {condition.matches!r}, which is no regular "
                    f"expression: {error}"
                ) from error
        names = _NAMES.get(condition.field or "", {})
        texts = [names.get(text.lower(), text) for text in condition.equals]
        doubles = [number for text in condition.equals for number in _as_double(text)]
        return cls(condition, pa.array(texts, pa.string()), pa.array(doubles, pa.float64()))

    def mask(self, signal: Signal, table: pa.RecordBatch) -> Mask:
        """For each row, whether it holds."""
        condition = self.condition
        if condition.attribute:
            column = table.column(ATTRIBUTE_COLUMNS[condition.on])
            present, holds = self._of_attribute(column, condition.attribute)
        else:
            present, holds = self._of_field(signal, table)
        if condition.exists is False:
            return ~present
        return present & holds

    @property
    def _asks_for_value(self) -> bool:
        return bool(self.condition.equals) or self.condition.matches is not None

    def _of_field(self, signal: Signal, table: pa.RecordBatch) -> tuple[Mask, Mask]:
        name = _FIELD_COLUMNS.get((signal, self.condition.field or ""))
        if name is None:
            return np.zeros(table.num_rows, np.bool_), np.zeros(table.num_rows, np.bool_)
        column: Any = table.column(name)
        if not pa.types.is_string(column.type):
            column = column.fill_null(0).cast(pa.string())
        return np.ones(table.num_rows, np.bool_), self._holds(column, column)

    def _of_attribute(self, column: Any, key: str) -> tuple[Mask, Mask]:  # noqa: ANN401 - a map
        """Where the key is, and where its first value is what was asked for."""
        rows = len(column)
        offsets, entries = lists(column)
        hits = np.flatnonzero(_bools(pc.equal(entries.field(0), pa.scalar(key))))
        parents = np.searchsorted(offsets, hits, side="right") - 1
        first = np.ones(len(hits), np.bool_)
        first[1:] = parents[1:] != parents[:-1]
        hits, parents = hits[first], parents[first]
        present = np.zeros(rows, np.bool_)
        present[parents] = True
        if not self._asks_for_value:
            return present, np.ones(rows, np.bool_)
        holds = np.zeros(rows, np.bool_)
        if len(hits):
            holds[parents] = self._of_values(entries.field(1).take(pa.array(hits)))
        return present, holds

    def _of_values(self, values: Any) -> Mask:  # noqa: ANN401 - structs
        """Of the members of a value one is set: whichever it is decides."""
        holds = np.zeros(len(values), np.bool_)
        for position in (_STRING, _BOOL, _INT, _DOUBLE):
            member = pc.struct_field(values, [position])
            if member.null_count == len(member):
                continue
            text = member if position == _STRING else member.cast(pa.string())
            holds |= self._holds(text, member)
        return holds

    def _holds(self, text: Any, member: Any) -> Mask:  # noqa: ANN401 - columns
        holds = _bools(text.is_valid())
        if self.condition.equals:
            equal = _bools(pc.is_in(text, value_set=self._texts, skip_nulls=True))
            if pa.types.is_floating(member.type):
                equal |= _bools(pc.is_in(member, value_set=self._doubles, skip_nulls=True))
            holds &= equal
        if self.condition.matches is not None:
            holds &= _bools(pc.match_substring_regex(text, self.condition.matches))
        return holds


def any_of(checks: Sequence[Check], signal: Signal, table: pa.RecordBatch) -> Mask:
    """Rows for which one of the conditions holds."""
    mask = np.zeros(table.num_rows, np.bool_)
    for check in checks:
        mask |= check.mask(signal, table)
    return mask


def all_of(checks: Sequence[Check], signal: Signal, table: pa.RecordBatch) -> Mask:
    """Rows for which all of them hold."""
    mask = np.ones(table.num_rows, np.bool_)
    for check in checks:
        mask &= check.mask(signal, table)
    return mask


def _bools(array: Any) -> Mask:  # noqa: ANN401 - a column, or a chunked one
    """Null is false."""
    if array.null_count:
        array = array.fill_null(False)  # noqa: FBT003 - what it is filled with
    mask: Mask = array.to_numpy(zero_copy_only=False)
    return mask.astype(np.bool_, copy=False)


def _as_double(text: str) -> list[float]:
    try:
        return [float(text)]
    except ValueError:
        return []
