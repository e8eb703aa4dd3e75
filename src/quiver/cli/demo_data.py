"""Telemetry as a small shop would send it, made up from a seed: for ``quiver demo``.

Bundles come in three kinds, in turns:

===============  ========================================  ===================================
kind             slots                                     what is special
===============  ========================================  ===================================
logs             LOGS, LOG_ATTRS, RESOURCE_ATTRS ...       OTAP tables; dictionaries
traces           SPANS, SPAN_ATTRS, SPAN_EVENTS ...        OTAP tables, more of them
OTLP request     OTLP_LOGS                                 the bytes of a request, as received
===============  ========================================  ===================================
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as counting
from itertools import islice
from typing import Final

from quiver.bundle import RecordBundle, Signal
from quiver.otlp.convert import to_otap
from quiver.pipeline.item import Item, to_bundle
from quiver.testing.telemetry import Shape, Telemetry

_START_NS: Final = 1_760_000_000_000_000_000
_BETWEEN_BUNDLES_NS: Final = 250_000_000
_ITEMS: Final = 100


def make_bundles(seed: int, count: int) -> Iterator[RecordBundle]:
    """Bundles in the order in which they arrive; the same for the same seed."""
    shape = Shape(items_per_request=_ITEMS, start_time_unix_nano=_START_NS)
    return islice(_without_end(Telemetry(seed, shape)), count)


def _without_end(telemetry: Telemetry) -> Iterator[RecordBundle]:
    logs, traces = telemetry.requests(Signal.LOGS), telemetry.requests(Signal.TRACES)
    for number in counting():
        now = _START_NS + number * _BETWEEN_BUNDLES_NS
        match number % 4:
            case 0 | 2:
                item = _as_tables(Signal.LOGS, next(logs), now)
            case 1:
                item = _as_tables(Signal.TRACES, next(traces), now)
            case _:
                request = next(logs)
                item = Item(signal=Signal.LOGS, requests=(request,), count=_ITEMS, received_ns=now)
        yield to_bundle(item)


def _as_tables(signal: Signal, request: bytes, now: int) -> Item:
    (tables,) = to_otap(signal, [request]).batches
    return Item(signal=signal, tables=tables, count=_ITEMS, received_ns=now)
