"""Nodes, and the ports between them.

A receiver hands items to its port and answers its client when that returns. What returning means
depends on who takes the item: a persistence node returns when it is durable, an exporter when the
other side has confirmed it. A node that cannot take an item raises ``TryLater`` or
``Undeliverable``, which travels back to whoever sent it.

Nodes live in one event loop. Whatever blocks (a disk, a long computation) they do elsewhere.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from quiver.errors import DeliveryError
from quiver.pipeline.item import Item


class Node(Protocol):
    """Anything in a pipeline."""

    @property
    def name(self) -> str:
        """As in the configuration."""
        ...

    async def start(self) -> None:
        """Begin to work. Called for destinations before those who send to them."""
        ...

    async def stop(self, deadline: float) -> None:
        """Finish what was begun, until ``deadline`` of the loop's clock at most, and end.

        Called for those who send before their destinations.
        """
        ...


class Taker(Node, Protocol):
    """A processor or an exporter: what items are sent to."""

    async def take(self, item: Item) -> None:
        """Take an item; when this returns the sender may forget it. Raises ``DeliveryError``."""
        ...


@runtime_checkable
class Gatherer(Taker, Protocol):
    """A taker that confirms many items together, and so wants many at a time."""

    max_in_flight: int


class Dispatch(enum.StrEnum):
    """Which of several destinations gets an item."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_LOADED = "least_loaded"
    BROADCAST = "broadcast"


class Port:
    """The way out of a node."""

    def __init__(
        self,
        destinations: Sequence[Taker],
        dispatch: Dispatch = Dispatch.ROUND_ROBIN,
        chance: random.Random | None = None,
    ) -> None:
        self._destinations = list(destinations)
        self._dispatch = dispatch
        self._chance = chance or random.Random()  # noqa: S311 - nothing is kept secret with it
        self._load = [0] * len(self._destinations)
        self._next = 0

    async def send(self, item: Item) -> None:
        """Hand an item on; returns when it was taken, by all in ``broadcast``."""
        if len(self._destinations) == 1:
            await self._destinations[0].take(item)
        elif self._dispatch is Dispatch.BROADCAST:
            await self._send_to_all(item)
        elif self._destinations:
            await self._send_to(self._choose(), item)

    def _choose(self) -> int:
        if self._dispatch is Dispatch.RANDOM:
            return self._chance.randrange(len(self._destinations))
        if self._dispatch is Dispatch.LEAST_LOADED:
            return min(range(len(self._load)), key=self._load.__getitem__)
        self._next = (self._next + 1) % len(self._destinations)
        return self._next

    async def _send_to(self, index: int, item: Item) -> None:
        self._load[index] += 1
        try:
            await self._destinations[index].take(item)
        finally:
            self._load[index] -= 1

    async def _send_to_all(self, item: Item) -> None:
        """All of them, at the same time; the first refusal is told when everybody has answered."""
        answers = await asyncio.gather(
            *(taker.take(item) for taker in self._destinations), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        errors.sort(key=lambda error: isinstance(error, DeliveryError))
        if errors:
            raise errors[0]
