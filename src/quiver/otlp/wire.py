"""Serialised requests to the request batch, and back.

A request that is not OTLP, or breaks a rule of :mod:`quiver.otlp.checks`, fails alone; the others
of the same call are not touched by it.

ptars turns bytes into columns; upb, the library of protobuf, has the last word on what they mean.

- A small request is parsed by upb and written again, and ptars gets that. So is one with so many
  bytes that could begin a group that ptars might not survive it: most above half a megabyte.
- For the others that takes longer than to check the columns for what ptars reads in another way:
  lists and maps that are not valid, and a ``oneof`` that is set more than once. Only if there is
  such a ``oneof`` is the request written again.
- A request that ptars refuses although upb takes it becomes a row by hand.

So with the others, and only then, some damage stays unseen, because columns do not show it:

- inside fields that OTLP does not know: groups that end under another number or are nested too
  deep, tags above 32 bits
- one to seven bytes too many behind a list of 8-byte numbers: they are dropped
- a value that is nested within ``max_depth``, yet deeper than the 100 messages of upb
- ``AnyValue`` with the *same* list or map twice: upb appends, ptars takes the last one and does
  not look at the first
- ``AnyValue`` with a string and after it an index into a profile's table: upb keeps the index

No known encoder writes any of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf.message import Message

from quiver.bundle import Signal
from quiver.config import OtlpConfig
from quiver.errors import InvalidRequest
from quiver.otlp import by_hand
from quiver.otlp.checks import check_requests
from quiver.otlp.decode import (
    Refused,
    decode,
    may_nest_groups,
    parse,
    refusal,
    undecodable,
)
from quiver.otlp.messages import RequestType, request_type

_MAX_CALL_BYTES: Final = 2**31 - 1
"""Offsets of columns have 32 bits."""
SMALL: Final = 64 * 1024
"""Bytes of a request that is always rewritten: that costs less than to look for what it mends."""
_DEFAULTS: Final = OtlpConfig()


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """The requests that were taken, as columns, and why the others were not."""

    signal: Signal
    batch: pa.RecordBatch
    """One row for each request that was taken."""
    requests: npt.NDArray[np.int32]
    """For each row the place of its request among those handed in; ascending."""
    failures: list[InvalidRequest]
    """One for each of the others, ascending by ``request``."""


def read_requests(
    signal: Signal, requests: Sequence[bytes], limits: OtlpConfig = _DEFAULTS
) -> RequestBatch:
    """Decode and check; together the requests must have less than 2 GiB."""
    if sum(map(len, requests)) > _MAX_CALL_BYTES:
        raise ValueError("the requests have 2 GiB or more together: hand them in by parts")
    kind = request_type(signal)
    failures: list[InvalidRequest] = []
    batches: list[pa.RecordBatch] = []
    taken: list[int] = []
    for group in _groups(requests, limits, failures):
        batch, rows = _read_group(kind, requests, group, limits, failures)
        batches.append(batch)
        taken += rows
    if not batches:
        batches = [pa.RecordBatch.from_pylist([], schema=kind.schema)]
    batch = batches[0] if len(batches) == 1 else _concatenated(batches)
    failures.sort(key=lambda failure: failure.request)
    return RequestBatch(signal, batch, np.array(taken, np.int32), failures)


def write_requests(signal: Signal, batch: pa.RecordBatch) -> list[bytes]:
    """One request for each row of a request batch."""
    kind = request_type(signal)
    if not batch.schema.equals(kind.schema):
        raise ValueError(f"not a batch of {signal} requests: its schema is another one")
    try:
        return _write(kind, batch)
    except Refused:
        for row in range(batch.num_rows):
            try:
                _write(kind, batch.slice(row, 1))
            except Refused as refused:
                reason = f"its columns do not make a request: {refused}"
                raise InvalidRequest(reason, request=row) from None
        raise


def _write(kind: RequestType, batch: pa.RecordBatch) -> list[bytes]:
    try:
        return cast("list[bytes]", kind.converter.record_batch_to_array(batch).to_pylist())
    except BaseException as error:  # noqa: BLE001 - a panic is not an Exception
        raise refusal(error) from None


def _concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return cast("pa.RecordBatch", pa.concat_batches(batches))  # type: ignore[attr-defined]  # is there


def _groups(
    requests: Sequence[bytes], limits: OtlpConfig, failures: list[InvalidRequest]
) -> Iterator[list[int]]:
    """Those that are not too large, in groups that are decoded in one call."""
    group: list[int] = []
    size = 0
    for index, request in enumerate(requests):
        length = len(request)
        if length > limits.max_request_bytes:
            reason = f"{length} bytes; {limits.max_request_bytes} are the most of one request: "
            failures.append(InvalidRequest(reason + "send several", request=index))
            continue
        if group and size + length > limits.max_group_bytes:
            yield group
            group, size = [], 0
        group.append(index)
        size += length
    if group:
        yield group


def _read_group(
    kind: RequestType,
    requests: Sequence[bytes],
    group: list[int],
    limits: OtlpConfig,
    failures: list[InvalidRequest],
) -> tuple[pa.RecordBatch, list[int]]:
    """The rows that are taken, and the requests that they are."""
    sources = {index: requests[index] for index in group}
    mend = [index for index in group if _is_rewritten(sources[index])]
    for index in mend:
        _rewrite(kind, sources, index, failures)
    batch = _decoded(kind, sources, failures)
    findings = check_requests(kind.signal, batch, limits, rewritten=len(mend) == len(group))
    if findings.ambiguous:
        rows = list(sources)
        for row in sorted(findings.ambiguous):
            _rewrite(kind, sources, rows[row], failures)
        batch = _decoded(kind, sources, failures)
        findings = check_requests(kind.signal, batch, limits)
    rows = list(sources)
    if findings.failures:
        for row, found in findings.failures.items():
            failures.append(InvalidRequest(found.reason, where=found.where, request=rows[row]))
        kept = [row for row in range(len(rows)) if row not in findings.failures]
        return batch.take(pa.array(kept, pa.int64())), [rows[row] for row in kept]
    return batch, rows


def _is_rewritten(request: bytes) -> bool:
    return len(request) <= SMALL or may_nest_groups(request)


def _rewrite(
    kind: RequestType, sources: dict[int, bytes], index: int, failures: list[InvalidRequest]
) -> None:
    message = _parsed(kind, sources, index, failures)
    if message is not None:
        sources[index] = message.SerializeToString(deterministic=True)


def _decoded(
    kind: RequestType, sources: dict[int, bytes], failures: list[InvalidRequest]
) -> pa.RecordBatch:
    """One row for each source; those that are no requests are taken out of the sources."""
    try:
        return decode(kind.converter, list(sources.values()))
    except Refused:
        indexes = list(sources)
    refused = [indexes[place] for place in undecodable(kind.converter, list(sources.values()))]
    parsed = {index: _parsed(kind, sources, index, failures) for index in refused}
    messages = {index: message for index, message in parsed.items() if message is not None}
    easy = [index for index in sources if index not in messages]
    batch = decode(kind.converter, [sources[index] for index in easy])
    if not messages:
        return batch
    batch = _concatenated([batch, by_hand.request_batch(kind.signal, messages.values())])
    rows = {index: row for row, index in enumerate([*easy, *messages])}
    return batch.take(pa.array([rows[index] for index in sources]))


def _parsed(
    kind: RequestType, sources: dict[int, bytes], index: int, failures: list[InvalidRequest]
) -> Message | None:
    """The request as upb reads it; if it does not, that is noted and the source taken out."""
    parsed = parse(kind.message, sources[index])
    if isinstance(parsed, Message):
        return parsed
    reason, where = parsed
    failures.append(InvalidRequest(f"not OTLP: {reason}", where=where, request=index))
    del sources[index]
    return None
