"""What the answer of another server means: taken, not now, or never.

OTLP says which failures may be tried again. Where it leaves data to be dropped although somebody
can mend the cause, this is more patient than OTLP: what waits can still be delivered.

================================================================  ================================
gRPC                                                              HTTP
================================================================  ================================
**not now** (``TryLater``)
CANCELLED, DEADLINE_EXCEEDED, ABORTED, OUT_OF_RANGE,              408, 429, 5xx; a connection that
UNAVAILABLE, DATA_LOSS, INTERNAL, UNKNOWN, RESOURCE_EXHAUSTED     fails or takes too long
UNAUTHENTICATED, PERMISSION_DENIED: an operator mends the key     401, 403
**never** (``Undeliverable``)
a message that is too large for the server (OUT_OF_RANGE or       413
RESOURCE_EXHAUSTED that say so): it is so the next time, too
INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS,                      other 4xx; 3xx, since a request
FAILED_PRECONDITION, UNIMPLEMENTED                                is not sent where nobody chose
================================================================  ================================

How long to wait is in ``RetryInfo`` of the details of a gRPC status, and in ``Retry-After`` of an
HTTP answer. A server that takes a request and rejects some of its items says so in
``partial_success``; OTLP forbids to send those again, so they are counted and logged.
"""

from __future__ import annotations

import email.utils
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from quiver.bundle import Signal
from quiver.errors import DeliveryError, TryLater, Undeliverable

MAX_ANSWER_BYTES: Final = 64 * 1024
"""How much of an answer is read."""
MAX_RETRY_AFTER: Final = 3600.0
"""Nobody makes us wait longer than this."""
_MAX_REASON: Final = 500
_STATUS_DETAILS: Final = "grpc-status-details-bin"
_RETRY_INFO: Final = b"type.googleapis.com/google.rpc.RetryInfo"
_NEVER: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
# As grpc in C++, Go, Java and Rust say it.
_TOO_LARGE: Final = re.compile(
    r"message larger than max|message length too large|exceeds maximum size", re.IGNORECASE
)
_MAY_BE_TOO_LARGE: Final = frozenset(
    {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OUT_OF_RANGE}
)
_NOT_NOW: Final = frozenset({401, 403, 408, 429})
_TOO_LARGE_STATUS: Final = 413
_RESPONSES: Final[Mapping[Signal, tuple[type[Message], str]]] = MappingProxyType(
    {
        Signal.TRACES: (ExportTraceServiceResponse, "rejected_spans"),
        Signal.LOGS: (ExportLogsServiceResponse, "rejected_log_records"),
        Signal.METRICS: (ExportMetricsServiceResponse, "rejected_data_points"),
    }
)


class Rejected(NamedTuple):
    """Items that a server did not take although it took the request, and why."""

    items: int
    reason: str


def rejected(signal: Signal, answer: bytes, content_type: str = "") -> Rejected | None:
    """What an answer of success says about items that were rejected; None if there are none.

    An answer that cannot be read is a success: the server said so before.
    """
    if not answer:
        return None
    kind, name = _RESPONSES[signal]
    if content_type.startswith("application/json"):
        return _rejected_in_json(answer, name)
    try:
        partial: Any = kind.FromString(answer).partial_success  # type: ignore[attr-defined]  # all have it
    except DecodeError:
        return None
    items = max(0, int(getattr(partial, name)))
    if not items and not partial.error_message:
        return None
    return Rejected(items, clipped(partial.error_message))


def _rejected_in_json(answer: bytes, name: str) -> Rejected | None:
    words = name.split("_")
    key = words[0] + "".join(word.title() for word in words[1:])
    try:
        partial = json.loads(answer).get("partialSuccess") or {}
        found = Rejected(max(0, int(partial.get(key, 0))), str(partial.get("errorMessage", "")))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None
    return Rejected(found.items, clipped(found.reason)) if any(found) else None


# --- gRPC -----------------------------------------------------------------------------------------


def grpc_refusal(
    code: grpc.StatusCode,
    details: str | None,
    trailers: Sequence[tuple[str, str | bytes]],
    where: str,
) -> DeliveryError:
    """The error that a gRPC status stands for."""
    reason = f"{where}: {code.name} {clipped(details or '')}".rstrip()
    after = retry_delay(trailers)
    if code in _MAY_BE_TOO_LARGE and after is None and _TOO_LARGE.search(details or ""):
        return Undeliverable(f"{reason}: raise the limit of that server, then replay")
    if code in _NEVER:
        return Undeliverable(reason)
    return TryLater(reason, after)


def retry_delay(trailers: Sequence[tuple[str, str | bytes]]) -> float | None:
    """The seconds of ``RetryInfo`` in the trailers of a gRPC answer."""
    for key, value in trailers:
        if key != _STATUS_DETAILS or not isinstance(value, bytes):
            continue
        for detail in _parts(value, 3):
            if _RETRY_INFO in _parts(detail, 1):
                for info in _parts(detail, 2):
                    return _seconds(info)
    return None


def _seconds(info: bytes) -> float | None:
    """``retry_delay`` of a ``google.rpc.RetryInfo``."""
    for duration in _parts(info, 1):
        numbers = dict(_fields(duration))
        seconds, nanos = numbers.get(1, 0), numbers.get(2, 0)
        if isinstance(seconds, int) and isinstance(nanos, int) and seconds < MAX_RETRY_AFTER:
            return max(0.0, seconds + nanos / 1e9)
        return MAX_RETRY_AFTER
    return None


def _parts(message: bytes, number: int) -> list[bytes]:
    """The strings, bytes or messages in a field of a protobuf message."""
    return [
        value for field, value in _fields(message) if field == number and isinstance(value, bytes)
    ]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message, up to the first that makes no sense."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:  # noqa: PLR2004 - the wire type of what has a length
            size, at = _varint(message, at)
        if size is None or size > len(message) - at:
            return
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends; beyond the message when it has no end."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:  # noqa: PLR2004 - the bit that says that more follows
            return value, at + place + 1
    return value, len(message) + 1


# --- HTTP -----------------------------------------------------------------------------------------


def http_refusal(
    status: int, headers: Mapping[str, str], body: bytes, where: str
) -> DeliveryError | None:
    """The error that an HTTP answer stands for; None when the request was taken."""
    if 200 <= status < 300:  # noqa: PLR2004 - success
        return None
    reason = f"{where}: {status} {_http_reason(headers, body)}".rstrip()
    if status >= 500 or status in _NOT_NOW:  # noqa: PLR2004 - the server failed
        return TryLater(reason, retry_after(headers.get("retry-after"), time.time()))
    if 300 <= status < 400:  # noqa: PLR2004 - redirections
        target = clipped(headers.get("location", "nowhere"))
        return Undeliverable(f"{reason}: it points to {target}; name that address as endpoint")
    if status == _TOO_LARGE_STATUS:
        return Undeliverable(f"{reason}: raise the limit of that server, then replay")
    return Undeliverable(reason)


def _http_reason(headers: Mapping[str, str], body: bytes) -> str:
    """The message of a ``google.rpc.Status``, or the text of the body."""
    if headers.get("content-type", "").startswith("application/x-protobuf"):
        body = next(iter(_parts(body, 2)), b"")
    return clipped(body.decode("utf-8", "replace"))


def retry_after(value: str | None, now: float) -> float | None:
    """The seconds that a ``Retry-After`` asks for: a number, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), MAX_RETRY_AFTER)


def clipped(text: str) -> str:
    """One line of what somebody else wrote, not too long."""
    line = " ".join(text.split())
    line = "".join(letter if letter.isprintable() else "?" for letter in line[: _MAX_REASON + 1])
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "..."
