"""OTLP bytes to tables and back: what the rest of Quiver, and its users, call.

==================  ====================================================================
``decode``          requests to one flat table in the lake's schema, a row an item
``encode``          such a table back to requests
``to_otap``         requests to OTAP batches
``from_otap``       an OTAP batch to a request
==================  ====================================================================

A request that cannot be read fails alone: it is in ``failures``, with the reason and the place, and
the others are not affected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from quiver.bundle import Signal, Slot
from quiver.config import OtlpConfig
from quiver.errors import InvalidRequest
from quiver.otlp.flat import Source, from_flat, to_flat
from quiver.otlp.otap.convert import batch_to_otap, otap_to_batch
from quiver.otlp.plain import TooOdd, plain_batch
from quiver.otlp.wire import read_requests, write_requests

TINY: Final[Mapping[Signal, int]] = MappingProxyType(
    {Signal.TRACES: 8_000, Signal.LOGS: 5_500, Signal.METRICS: 6_500}
)
"""Bytes up to which rows made one by one are there before the columns are."""
_DEFAULTS: Final = OtlpConfig()


@dataclass(frozen=True, slots=True)
class Decoded:
    """Items of a group of requests, as a table."""

    table: pa.RecordBatch
    requests: pa.Int32Array
    """For every row the index of its request."""
    failures: list[InvalidRequest]


@dataclass(frozen=True, slots=True)
class Converted:
    """A group of requests as OTAP batches."""

    batches: list[dict[Slot, pa.RecordBatch]]
    failures: list[InvalidRequest]


def decode(
    signal: Signal,
    requests: Sequence[bytes],
    config: OtlpConfig = _DEFAULTS,
    sources: Sequence[Source] | None = None,
) -> Decoded:
    """One row for every span, log record or data point of the requests.

    ``sources`` says where each request is kept; it becomes columns.
    """
    if sum(map(len, requests)) <= min(TINY[signal], config.max_request_bytes):
        try:
            return Decoded(*plain_batch(signal, requests, config, sources), failures=[])
        except TooOdd:
            pass
    read = read_requests(signal, requests, config)
    kept = None if sources is None else [sources[index] for index in read.requests]
    table, request_of_row = to_flat(signal, read.batch, read.requests, config.promoted, kept)
    return Decoded(table, request_of_row, read.failures)


def encode(
    signal: Signal, table: pa.Table | pa.RecordBatch, requests: pa.Int32Array | None = None
) -> list[bytes]:
    """Requests with the rows of a table in the lake's schema: one, or as ``requests`` groups."""
    return write_requests(signal, from_flat(signal, table, requests))


def to_otap(signal: Signal, requests: Sequence[bytes], config: OtlpConfig = _DEFAULTS) -> Converted:
    """The OTAP tables of the requests, by slot, in as many batches as their ids need."""
    read = read_requests(signal, requests, config)
    return Converted(batch_to_otap(signal, read.batch), read.failures)


def from_otap(signal: Signal, tables: Mapping[Slot, pa.RecordBatch]) -> bytes:
    """One request with everything of an OTAP batch; ``InvalidRequest`` when it does not add up."""
    (request,) = write_requests(signal, otap_to_batch(signal, tables))
    return request
