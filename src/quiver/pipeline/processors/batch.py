"""Merges small items into large ones.

Items of the same signal and the same context are gathered until ``timeout`` has passed since the
first of them, or ``max_items`` or ``max_bytes`` are reached. What is merged is handed on as one
item: the requests stay as they are, side by side. OTAP tables are handed on alone.

Taking an item still means what it means behind this node: ``take`` returns, or raises, with what
became of the merged item. When that is refused for ever, its parts are handed on one by one, so
that one bad request does not take good ones with it.

==================================  ================================================================
metric                              what
==================================  ================================================================
``quiver.batch.flushes_total``      merged items by ``reason``: items, bytes, timeout, stop
``quiver.batch.parts``              how many items became one
``quiver.batch.waiting_bytes``      bytes that are gathered and not handed on yet
``quiver.batch.taken_apart_total``  merged items that were refused for ever
==================================  ================================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from quiver.bundle import Signal
from quiver.errors import InvalidConfig, TryLater, Undeliverable
from quiver.metrics import SIZE_BOUNDS, Metrics
from quiver.pipeline.item import Item
from quiver.pipeline.node import Port
from quiver.pipeline.settings.options import BatchOptions

_Key: TypeAlias = tuple[Signal, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class _Part:
    """An item, and whoever waits to hear what became of it."""

    item: Item
    outcome: asyncio.Future[None]

    def tell(self, error: Exception | None) -> None:
        if self.outcome.done():  # nobody waits any more
            return
        if error is None:
            self.outcome.set_result(None)
        else:
            self.outcome.set_exception(_own(error))


@dataclass(slots=True)
class _Group:
    """What is gathered for one signal and context."""

    timer: asyncio.TimerHandle
    parts: list[_Part] = field(default_factory=list)
    items: int = 0
    size: int = 0


class BatchProcessor:
    """Gathers items, and hands them on as one."""

    def __init__(
        self, name: str, options: BatchOptions, port: Port, *, metrics: Metrics | None = None
    ) -> None:
        if options.timeout <= 0 or options.max_items < 1 or options.max_bytes < 1:
            raise InvalidConfig(
                f"{name}: timeout must be above 0, max_items and max_bytes at least 1"
            )
        self.name = name
        self._options = options
        self._port = port
        self._metrics = metrics or Metrics()
        self._groups: dict[_Key, _Group] = {}
        self._deliveries: set[asyncio.Task[None]] = set()
        self._waiting_bytes = 0
        self._is_stopped = False

    async def start(self) -> None:
        """Nothing to begin: groups start with their first item."""
        self._is_stopped = False

    async def take(self, item: Item) -> None:
        """Return when the item, with others, was taken by whoever comes next."""
        if item.tables or not item.requests or self._is_stopped:
            await self._port.send(item)
            return
        part = _Part(item, asyncio.get_running_loop().create_future())
        self._add(part)
        await part.outcome

    def _add(self, part: _Part) -> None:
        item = part.item
        key = (item.signal, tuple(sorted(item.context.items())))
        items, size = _count(item), item.size
        group = self._groups.get(key)
        if group is not None:
            if group.items + items > self._options.max_items:
                self._flush(key, "items")
                group = None
            elif group.size + size > self._options.max_bytes:
                self._flush(key, "bytes")
                group = None
        if group is None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._options.timeout, self._flush, key, "timeout")
            group = self._groups[key] = _Group(timer)
        group.parts.append(part)
        group.items += items
        group.size += size
        self._waits(size)
        if group.items >= self._options.max_items:
            self._flush(key, "items")
        elif group.size >= self._options.max_bytes:
            self._flush(key, "bytes")

    def _flush(self, key: _Key, reason: str) -> None:
        group = self._groups.pop(key)
        group.timer.cancel()
        self._waits(-group.size)
        self._metrics.count("quiver.batch.flushes_total", node=self.name, reason=reason)
        self._metrics.observe("quiver.batch.parts", len(group.parts), SIZE_BOUNDS)
        task = asyncio.get_running_loop().create_task(self._deliver(group.parts))
        self._deliveries.add(task)
        task.add_done_callback(partial(self._delivered, group.parts))

    def _waits(self, change: int) -> None:
        self._waiting_bytes += change
        self._metrics.set("quiver.batch.waiting_bytes", self._waiting_bytes, node=self.name)

    # --- delivering -------------------------------------------------------------------------------

    async def _deliver(self, parts: Sequence[_Part]) -> None:
        error = await self._outcome(merged([part.item for part in parts]))
        if isinstance(error, Undeliverable) and len(parts) > 1:
            self._metrics.count("quiver.batch.taken_apart_total", node=self.name)
            errors = await asyncio.gather(*(self._outcome(part.item) for part in parts))
        else:
            errors = [error] * len(parts)
        for part, its_error in zip(parts, errors, strict=True):
            part.tell(its_error)

    def _delivered(self, parts: Sequence[_Part], task: asyncio.Task[None]) -> None:
        self._deliveries.discard(task)
        for part in parts:  # those that it could not tell before it was cut short
            part.tell(TryLater(f"{self.name} was stopped before it was taken"))

    async def _outcome(self, item: Item) -> Exception | None:
        """What became of an item; whatever it is, somebody waits to hear it."""
        try:
            await self._port.send(item)
        except Exception as error:  # noqa: BLE001 - it is raised where the item came from
            return error
        return None

    async def stop(self, deadline: float) -> None:
        """Hand on what is gathered, and wait for the answers until the deadline."""
        self._is_stopped = True
        for key in list(self._groups):
            self._flush(key, "stop")
        if not self._deliveries:
            return
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        _, late = await asyncio.wait(self._deliveries, timeout=left)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


def merged(items: Sequence[Item]) -> Item:
    """One item with the requests of all; they have one signal and one context."""
    if len(items) == 1:
        return items[0]
    counts = [item.count for item in items if item.count is not None]
    return Item(
        signal=items[0].signal,
        requests=tuple(request for item in items for request in item.requests),
        count=sum(counts) if len(counts) == len(items) else None,
        received_ns=min(item.received_ns for item in items),
        context=items[0].context,
    )


def _count(item: Item) -> int:
    """Spans, records or points; at least the requests, when nobody counted."""
    return len(item.requests) if item.count is None else item.count


def _own(error: Exception) -> Exception:
    """The same refusal for one more: an exception that many raise collects all their traces."""
    if isinstance(error, TryLater):
        made: Exception = TryLater(str(error), error.retry_after)
    elif isinstance(error, Undeliverable):
        made = Undeliverable(str(error))
    else:
        return error
    made.__cause__ = error
    return made
