"""Protobuf written by hand, to say on the wire what no encoder would say; and what upb makes of it.

``spans(...)`` and its like wrap the bytes of one span into a request.
"""

from __future__ import annotations

import struct
from typing import cast

import pyarrow as pa
from google.protobuf.message import DecodeError, Message

from quiver.bundle import Signal
from quiver.config import OtlpConfig
from quiver.otlp.by_hand import request_batch
from quiver.otlp.messages import REQUEST_TYPES
from quiver.otlp.wire import write_requests


def varint(number: int, padding: int = 0) -> bytes:
    """With as many bytes more than it needs."""
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    if not padding:
        return bytes([*parts, number])
    return bytes([*parts, number | 0x80, *[0x80] * (padding - 1), 0])


def tag(field: int, wire: int) -> bytes:
    return varint(field << 3 | wire)


def number(field: int, value: int, padding: int = 0) -> bytes:
    return tag(field, 0) + varint(value, padding)


def fixed64(field: int, value: int) -> bytes:
    return tag(field, 1) + struct.pack("<Q", value)


def part(field: int, *content: bytes) -> bytes:
    """Text, bytes or a message."""
    whole = b"".join(content)
    return tag(field, 2) + varint(len(whole)) + whole


def group(field: int, content: bytes = b"", end: int = 0) -> bytes:
    return tag(field, 3) + content + tag(end or field, 4)


def item(*content: bytes) -> bytes:
    """A request with one span, log record or metric: they have the same numbers."""
    return part(1, part(2, part(2, *content)))


TRACE_ID, SPAN_ID = part(1, b"t" * 16), part(2, b"s" * 8)


def span(*content: bytes) -> bytes:
    return item(TRACE_ID, SPAN_ID, *content)


def attribute(*value: bytes) -> bytes:
    """A span with an attribute whose value is this ``AnyValue``."""
    return span(part(9, part(1, b"key"), part(2, *value)))


def histogram_point(*content: bytes) -> bytes:
    return item(part(9, part(1, *content)))


def gauge_point(*content: bytes) -> bytes:
    return item(part(5, part(1, *content)))


def lists(depth: int, innermost: bytes = b"") -> bytes:
    """The ``AnyValue`` of lists inside each other."""
    value = part(5, innermost)
    for _ in range(depth - 1):
        value = part(5, part(1, value))
    return value


def maps(depth: int) -> bytes:
    value = part(6)
    for _ in range(depth - 1):
        value = part(6, part(1, part(1, b"k"), part(2, value)))
    return value


# --- upb ---------------------------------------------------------------------------------------


def parsed(signal: Signal, request: bytes) -> Message | None:
    try:
        return REQUEST_TYPES[signal].FromString(request)
    except DecodeError:
        return None


def meaning(signal: Signal, request: bytes) -> bytes:
    """The same bytes for all requests that say the same."""
    message = REQUEST_TYPES[signal].FromString(request)
    message.DiscardUnknownFields()
    return message.SerializeToString(deterministic=True)


def expected(signal: Signal, *requests: bytes) -> pa.RecordBatch:
    """The batch that the objects of upb make."""
    return request_batch(signal, map(REQUEST_TYPES[signal].FromString, requests))


def same(signal: Signal, one: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    """Column for column; NaN is NaN."""
    if one.equals(other):
        return True
    written = cast("list[list[bytes]]", [write_requests(signal, batch) for batch in (one, other)])
    return one.schema.equals(other.schema) and written[0] == written[1]


# --- the rules, once more ----------------------------------------------------------------------

_ID_SIZES = {"trace_id": 16, "span_id": 8, "parent_span_id": 8}
_ITEMS = ("Span", "LogRecord", "NumberDataPoint", "SummaryDataPoint", "HistogramDataPoint")
_OPTIONAL_IDS = {"LogRecord", "Exemplar"}


def breaks_a_rule(message: Message, limits: OtlpConfig, depth: int = 0) -> bool:
    """The checks, written for objects and without a thought on how long it takes."""
    if _breaks_a_rule(message, limits, depth):
        return True
    if depth:
        return False
    return _count_items(message) > limits.max_items


def _breaks_a_rule(message: Message, limits: OtlpConfig, depth: int) -> bool:
    kind = message.DESCRIPTOR.name
    depth += kind in {"ArrayValue", "KeyValueList"}
    if depth > limits.max_depth:
        return True
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        values = list(value) if field.is_repeated else [value]
        if field.message_type is not None:
            set_ = values if field.is_repeated or message.HasField(field.name) else []
            attributes = field.message_type.name == "KeyValue" and kind != "KeyValueList"
            if attributes and len(set_) > limits.max_attributes:
                return True
            if any(_breaks_a_rule(inside, limits, depth) for inside in set_):
                return True
        elif field.name in _ID_SIZES:
            sizes = {_ID_SIZES[field.name]}
            if kind in _OPTIONAL_IDS or field.name == "parent_span_id":
                sizes.add(0)
            if len(value) not in sizes:
                return True
        elif field.cpp_type == field.CPPTYPE_UINT64 and any(v >= 2**63 for v in values):
            return True
    return False


def _count_items(message: Message) -> int:
    if message.DESCRIPTOR.name.endswith(_ITEMS):
        return 1
    inside = [value for field, value in message.ListFields() if field.message_type is not None]
    return sum(
        _count_items(one)
        for value in inside
        for one in ([value] if isinstance(value, Message) else value)
        if not one.DESCRIPTOR.full_name.startswith("opentelemetry.proto.common")
    )


def with_ids(message: Message) -> Message:
    """The same with ids where spans and links must have one."""
    if message.DESCRIPTOR.name in {"Span", "Link"}:
        for name in ("trace_id", "span_id"):
            if not getattr(message, name):
                setattr(message, name, b"i" * _ID_SIZES[name])
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inside in value if field.is_repeated else [value]:
                with_ids(inside)
    return message
