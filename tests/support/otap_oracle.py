"""How OTAP tables are compared with those made the plain way, and what OTAP makes of a request.

``as_otap_holds`` is what must come back: the request without what OTAP has no place for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import cbor2
import pyarrow as pa
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from quiver.bundle import Signal, Slot
from quiver.otlp.messages import REQUEST_TYPES
from quiver.testing.plain_otap import LEVELS, Row, Rows


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """The rows of a table, comparable: times as numbers, CBOR decoded, floats by their bits."""
    columns = {}
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        whole: Any = values
        if pa.types.is_timestamp(whole.type) or pa.types.is_duration(whole.type):
            whole = whole.view(pa.int64())
        columns[name] = whole.to_pylist()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [_exact(_without_cbor(row)) for row in rows]


def _without_cbor(row: Row) -> Row:
    made: Row = {
        key: _without_cbor(value) if isinstance(value, dict) else value
        for key, value in row.items()
    }
    if made.get("ser") is not None:
        made["ser"] = cbor2.loads(made["ser"])
    return made


def _exact(value: Any) -> Any:  # noqa: ANN401 - anything that a row can hold
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner) for inner in value]
    return value


def differences(made: Mapping[Slot, pa.RecordBatch], expected: Rows) -> list[str]:
    """What differs. A column that is left out must hold nothing but defaults."""
    wanted = {slot: rows for slot, rows in expected.items() if rows}
    if set(made) != set(wanted):
        return [f"tables {sorted(made)}, not {sorted(wanted)}"]
    found = []
    for slot, batch in made.items():
        rows = rows_of(batch)
        if len(rows) != len(wanted[slot]):
            found.append(f"{slot.name}: {len(rows)} rows, not {len(wanted[slot])}")
        for number, (row, want) in enumerate(zip(rows, wanted[slot], strict=False)):
            found += [
                f"{slot.name}[{number}].{what}" for what in _row_differences(row, _exact(want))
            ]
    return found


def _row_differences(row: Row | None, want: Row | None) -> list[str]:
    if row is None or want is None:
        return [] if row is want else [f": {row} not {want}"]
    found = [f"{name}: not expected" for name in row if name not in want]
    for name, value in want.items():
        if name not in row:
            if not _is_default(value):
                found.append(f"{name}: left out, {value!r}")
        elif isinstance(value, dict) and name != "ser" and isinstance(row[name], dict):
            found += [f"{name}.{inner}" for inner in _row_differences(row[name], value)]
        elif row[name] != value:
            found.append(f"{name}: {row[name]!r} not {value!r}")
    return found


def _is_default(value: Any) -> bool:  # noqa: ANN401 - anything that a row can hold
    return value is None or value in (0, "", [], False, bytes(8)) or value == _exact(0.0)


def as_otap_holds(signal: Signal, requests: Iterable[bytes]) -> bytes:
    """One request with everything of these that OTAP can hold, as bytes."""
    outer, inner, leaf, _ = LEVELS[signal]
    made: Any = REQUEST_TYPES[signal]()
    for data in requests:
        made.MergeFromString(data)
    made.DiscardUnknownFields()
    resources = getattr(made, outer)
    for resource in resources:
        scopes = getattr(resource, inner)
        kept = [scope for scope in scopes if getattr(scope, leaf)]
        del scopes[:]
        scopes.extend(kept)
        resource.resource.SetInParent()
        del resource.resource.entity_refs[:]
        for scope in scopes:
            scope.scope.SetInParent()
            for span in getattr(scope, "spans", []):
                for owner in (span, *span.links):
                    owner.trace_id = owner.trace_id or bytes(16)
                    owner.span_id = owner.span_id or bytes(8)
    kept = [resource for resource in resources if getattr(resource, inner)]
    del resources[:]
    resources.extend(kept)
    _settle_values(made)
    return bytes(made.SerializeToString(deterministic=True))


def _settle_values(message: Any) -> None:  # noqa: ANN401
    """Every key has a value, and each key of a map is there once."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        inner = value if field.is_repeated else [value]
        if field.message_type.name == "KeyValueList":
            pairs = {pair.key: pair for pair in value.values}
            kept = list(pairs.values())
            del value.values[:]
            value.values.extend(kept)
        for one in inner:
            if isinstance(one, KeyValue):
                one.value.SetInParent()
            _settle_values(one)
