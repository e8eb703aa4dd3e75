"""Log records: between a request's nested columns and OTAP's tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from quiver.bundle import Slot
from quiver.errors import InvalidRequest
from quiver.otlp.otap.attributes import (
    owned_attributes,
    value_columns,
    value_structs,
    write_attributes,
)
from quiver.otlp.otap.read import Parents, Table, inside, native, record
from quiver.otlp.otap.schema import BODY, SPAN_ID, TRACE_ID, Array, Kind
from quiver.otlp.otap.write import (
    Columns,
    Tables,
    numbers,
    some_fixed,
    struct,
    table,
    texts,
    times,
    valid_mask,
)

_READ_AS_THEY_ARE: Final = (
    "time_unix_nano",
    "observed_time_unix_nano",
    "severity_number",
    "severity_text",
    "dropped_attributes_count",
    "flags",
    "trace_id",
    "span_id",
    "event_name",
)


def write_logs(tables: Tables, logs: Array, origin: Columns, max_depth: int) -> None:
    """Add the tables of these log records, whose ids are their row numbers."""
    tables[Slot.LOGS] = table(
        Slot.LOGS,
        {
            **origin,
            "time_unix_nano": times(logs.field("time_unix_nano")),
            "observed_time_unix_nano": times(logs.field("observed_time_unix_nano")),
            "trace_id": some_fixed(logs.field("trace_id"), TRACE_ID, "log_records.trace_id"),
            "span_id": some_fixed(logs.field("span_id"), SPAN_ID, "log_records.span_id"),
            "severity_number": numbers(logs.field("severity_number")),
            "severity_text": texts(logs.field("severity_text")),
            "event_name": texts(logs.field("event_name")),
            "body": _body(logs.field("body"), max_depth),
            "dropped_attributes_count": numbers(logs.field("dropped_attributes_count")),
            "flags": numbers(logs.field("flags")),
        },
    )
    write_attributes(tables, Slot.LOG_ATTRS, logs, id_type=np.uint16, max_depth=max_depth)


def _body(body: Array, max_depth: int) -> Array | None:
    if body.null_count == len(body):
        return None
    valid = valid_mask(body) if body.null_count else None
    return struct(value_columns(body, "log_records.body", max_depth), valid=valid)


def read_logs(tables: Mapping[Slot, Table], kind: Kind) -> Array:
    """The log records as structs of this type, in the order of their table."""
    logs = tables[Slot.LOGS]
    parents = Parents(logs.ids(), logs.rows, "LOGS.id")
    columns = logs.columns(_READ_AS_THEY_ARE)
    columns["body"] = _read_body(logs, kind.field("body").type)
    attributes = kind.field("attributes").type
    columns["attributes"] = owned_attributes(tables, Slot.LOG_ATTRS, parents, attributes)
    return record(kind, logs.rows, columns)


def _read_body(logs: Table, kind: Kind) -> Array | None:
    body = logs.column("body")
    if body is None:
        return None
    columns: dict[str, Array | None] = {**inside(body, BODY, "LOGS.body", logs.limits)}
    codes = columns.get("type")
    if codes is None:
        raise InvalidRequest("the column is missing; OTAP requires it", where="LOGS.body.type")
    if codes.null_count > body.null_count:
        row = int(np.flatnonzero(valid_mask(body) & ~valid_mask(codes))[0])
        raise InvalidRequest("null; OTAP requires a type", where=f"LOGS.body.type, row {row}")
    if "ser" not in columns and "body_ser" in logs.batch.schema.names:
        apart = logs.batch.column("body_ser")
        columns["ser"] = native(apart, pa.binary(), "LOGS.body_ser", logs.limits)
    codes = codes.fill_null(0) if codes.null_count else codes
    return value_structs(
        codes.to_numpy(),
        columns,
        kind,
        where="LOGS.body",
        limits=logs.limits,
        valid=valid_mask(body) if body.null_count else None,
    )
