"""What exporters over gRPC and HTTP share: many requests at the same time, and what is counted.

=================================================  =================================================
metric                                             what
=================================================  =================================================
``quiver.exporter.requests_total``                 requests by ``outcome``: delivered, later, never
``quiver.exporter.items_total``                    items of a pipeline that were delivered
``quiver.exporter.bytes_total``                    bytes of requests that were delivered
``quiver.exporter.rejected_items_total``           spans, records or points of ``partial_success``
``quiver.exporter.in_flight``                      requests that wait for an answer
``quiver.exporter.waiting``                        requests that wait for a place (max_in_flight)
``quiver.exporter.send_seconds``                   how long an answer takes
=================================================  =================================================
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from quiver.bundle import Signal
from quiver.errors import DeliveryError, InvalidConfig, TryLater, Undeliverable
from quiver.metrics import Metrics
from quiver.pipeline.exporters.answers import Rejected
from quiver.pipeline.item import Item

logger = logging.getLogger(__name__)

_HEADER_NAME: Final = re.compile(r"[0-9A-Za-z_.-]+")
_LOG_INTERVAL: Final = 10.0
"""Seconds between two lines about items that were rejected."""


def checked_headers(node: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Names in lower case. ``InvalidConfig`` for what cannot be sent; values may be secrets."""
    for key, value in headers.items():
        if not _HEADER_NAME.fullmatch(key) or key.lower().endswith("-bin"):
            raise InvalidConfig(f"{node}: {key!r} cannot be the name of a header")
        if not value.isascii() or not value.isprintable():
            raise InvalidConfig(
                f"{node}: the value of header {key!r} has letters that none may have"
            )
    return {key.lower(): value for key, value in headers.items()}


class Outcomes:
    """What became of requests, in numbers."""

    def __init__(self, node: str, metrics: Metrics) -> None:
        self.metrics = metrics
        self.node = node
        self._in_flight = 0
        self._waiting = 0
        self._next_line = 0.0
        self._silent = 0
        self._answered = asyncio.Event()

    def waits(self, change: int) -> None:
        """One more, or less, that waits for a place."""
        self._waiting += change
        self.metrics.set("quiver.exporter.waiting", self._waiting, node=self.node)

    def is_sent(self, change: int) -> None:
        """One more, or less, that waits for an answer."""
        self._in_flight += change
        self.metrics.set("quiver.exporter.in_flight", self._in_flight, node=self.node)
        self._answered.set()

    async def is_quiet(self) -> None:
        """Wait until no request waits for an answer."""
        while self._in_flight:
            self._answered.clear()
            await self._answered.wait()

    def request(self, outcome: str) -> None:
        """A request was answered."""
        self.metrics.count("quiver.exporter.requests_total", node=self.node, outcome=outcome)

    def delivered(self, item: Item) -> None:
        """An item was taken."""
        self.metrics.count("quiver.exporter.items_total", node=self.node)
        self.metrics.count("quiver.exporter.bytes_total", item.size, node=self.node)

    def rejected(self, signal: Signal, found: Rejected | None) -> None:
        """A request was taken without some of its items. A line now and then says why."""
        if found is None:
            return
        name = "quiver.exporter.rejected_items_total"
        self.metrics.count(name, found.items, node=self.node, signal=str(signal))
        self._silent += found.items
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + _LOG_INTERVAL
            logger.warning(
                "%s: the server took a request of %s and rejected items of it, %d since the last "
                "such line: %s",
                self.node,
                signal,
                self._silent,
                found.reason or "it gave no reason",
            )
            self._silent = 0


async def send_all(
    item: Item,
    requests: Sequence[bytes],
    places: asyncio.Semaphore,
    send: Callable[[Signal, bytes], Awaitable[None]],
    outcomes: Outcomes,
) -> None:
    """Send the requests of an item; the refusal, if there is one, when all were answered.

    One that is to be tried again goes before one that is final: the item comes back, and is judged
    when nothing is in doubt.
    """

    async def one(request: bytes) -> None:
        outcomes.waits(1)
        try:
            await places.acquire()
        finally:
            outcomes.waits(-1)
        outcomes.is_sent(1)
        began = time.perf_counter()
        try:
            await send(item.signal, request)
        finally:
            places.release()
            outcomes.is_sent(-1)
            outcomes.metrics.observe("quiver.exporter.send_seconds", time.perf_counter() - began)

    if len(requests) == 1:
        errors = [await _outcome(one(requests[0]), outcomes)]
    else:
        errors = await asyncio.gather(*(_outcome(one(each), outcomes) for each in requests))
    later = [error for error in errors if isinstance(error, TryLater)]
    never = [error for error in errors if isinstance(error, Undeliverable)]
    if later:
        waits = [error.retry_after for error in later if error.retry_after is not None]
        raise TryLater(str(later[0]), max(waits, default=None)) from later[0]
    if never:
        if len(requests) == 1:
            raise never[0]
        raise Undeliverable(
            f"{len(never)} of {len(requests)} requests were refused: {never[0]}"
        ) from never[0]
    outcomes.delivered(item)


async def _outcome(sending: Awaitable[None], outcomes: Outcomes) -> DeliveryError | None:
    try:
        await sending
    except Undeliverable as error:
        outcomes.request("never")
        return error
    except TryLater as error:
        outcomes.request("later")
        return error
    outcomes.request("delivered")
    return None
