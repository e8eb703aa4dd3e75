"""Requests to the request batch by way of upb's objects, value by value.

Slow, and used in two places: for a request that upb takes and ptars does not, and in tests, to
compare. It follows the columns, not the messages, so it knows nothing about telemetry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from google.protobuf.message import Message

from quiver.bundle import Signal
from quiver.otlp.messages import request_type


def request_batch(signal: Signal, requests: Iterable[Message]) -> pa.RecordBatch:
    """One row for each request, with the schema that ptars gives it."""
    schema = request_type(signal).schema
    fields = list(schema)
    return pa.RecordBatch.from_pylist([_row(m, fields) for m in requests], schema=schema)


def _row(message: Message, fields: list[pa.Field[Any]]) -> dict[str, Any]:
    return {field.name: _value(message, field) for field in fields}


def _value(message: Message, field: pa.Field[Any]) -> Any:  # noqa: ANN401 - a column holds anything
    if field.nullable and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if isinstance(field.type, pa.ListType):
        return [_content(item, field.type.value_type) for item in value]
    return _content(value, field.type)


def _content(value: Any, kind: pa.DataType) -> Any:  # noqa: ANN401 - the same
    if isinstance(kind, pa.StructType):
        return _row(value, list(kind))
    if isinstance(value, Message):  # declared as bytes for the columns
        return value.SerializeToString(deterministic=True)
    return value
