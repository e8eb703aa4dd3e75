"""Why a request was not taken, and how that is said over HTTP and over gRPC.

==================  ======  ==================  ====================================================
reason              HTTP    gRPC                what a client does
==================  ======  ==================  ====================================================
``OVERLOADED``      429     RESOURCE_EXHAUSTED  sends it again after Retry-After, or RetryInfo
``UNAVAILABLE``     503     UNAVAILABLE         the same: we stop, or know no keys, or have a defect
``MALFORMED``       400     INVALID_ARGUMENT    gives it up, with the reason in its log
``TOO_LARGE``       413     INVALID_ARGUMENT    gives it up, or splits it
``UNAUTHENTICATED`` 401     UNAUTHENTICATED     gives it up
others              4xx                         HTTP only: gives it up
==================  ======  ==================  ====================================================

Whatever is not the sender's fault is one of the first two: the others make clients drop data. A
request that comes too slowly is ``UNAVAILABLE``, too, because 408 would be final.

``google.rpc.Status`` and ``RetryInfo`` are written by hand: they are four fields.
"""

from __future__ import annotations

import enum
import json
import math
from typing import Final

_MAX_MESSAGE: Final = 1000
"""Characters of a reason. Headers and trailers of gRPC have a limit, too."""
_LENGTH: Final = 2
_RETRY_INFO_URL: Final = b"type.googleapis.com/google.rpc.RetryInfo"


class Reason(enum.Enum):
    """Why a request was not taken: status in HTTP, its text, code in gRPC."""

    OVERLOADED = (429, "Too Many Requests", 8)
    UNAVAILABLE = (503, "Service Unavailable", 14)
    MALFORMED = (400, "Bad Request", 3)
    TOO_LARGE = (413, "Content Too Large", 3)
    UNAUTHENTICATED = (401, "Unauthorized", 16)
    NOT_FOUND = (404, "Not Found", 12)
    WRONG_METHOD = (405, "Method Not Allowed", 12)
    WRONG_MEDIA_TYPE = (415, "Unsupported Media Type", 3)
    HEADERS_TOO_LARGE = (431, "Request Header Fields Too Large", 3)

    def __init__(self, http_status: int, http_text: str, grpc_code: int) -> None:
        self.http_status = http_status
        self.http_text = http_text
        self.grpc_code = grpc_code


class Refusal(Exception):
    """A request that is not taken. ``retry_after`` in seconds when it may be sent again."""

    def __init__(self, reason: Reason, message: str, retry_after: float | None = None) -> None:
        self.reason = reason
        self.message = message[:_MAX_MESSAGE]
        self.retry_after = retry_after
        super().__init__(self.message)

    @property
    def whole_seconds(self) -> int:
        """For ``Retry-After``, which knows no others."""
        return max(1, math.ceil(self.retry_after or 0.0))


def status(refusal: Refusal) -> bytes:
    """``google.rpc.Status``, with ``RetryInfo`` when it may be sent again."""
    made = b"\x08" + _varint(refusal.reason.grpc_code)
    made += _field(2, refusal.message.encode(errors="replace"))
    if refusal.retry_after is not None:
        made += _field(3, _field(1, _RETRY_INFO_URL) + _field(2, retry_info(refusal.retry_after)))
    return made


def retry_info(pause: float) -> bytes:
    """``google.rpc.RetryInfo``."""
    seconds, fraction = divmod(pause, 1.0)
    delay = b"\x08" + _varint(int(seconds)) if seconds else b""
    delay += b"\x10" + _varint(int(fraction * 1e9)) if fraction else b""
    return _field(1, delay)


def status_json(refusal: Refusal) -> bytes:
    """The same as JSON, without details."""
    tree = {"code": refusal.reason.grpc_code, "message": refusal.message}
    return json.dumps(tree, separators=(",", ":")).encode()


def partial_success(rejected: int, message: str) -> bytes:
    """An ``Export*ServiceResponse``, the same for all signals: so many items were refused."""
    if not rejected and not message:
        return b""
    count = b"\x08" + _varint(rejected) if rejected else b""
    return _field(1, count + _field(2, message[:_MAX_MESSAGE].encode(errors="replace")))


# Only the number of refused items has another name in each signal.
REJECTED_NAMES: Final = {
    "traces": "rejectedSpans",
    "logs": "rejectedLogRecords",
    "metrics": "rejectedDataPoints",
}


def partial_success_json(signal: str, rejected: int, message: str) -> bytes:
    """The same as JSON."""
    if not rejected and not message:
        return b"{}"
    told = {REJECTED_NAMES[signal]: str(rejected), "errorMessage": message[:_MAX_MESSAGE]}
    return json.dumps({"partialSuccess": told}, separators=(",", ":")).encode()


def _field(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | _LENGTH,)) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits a byte
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
