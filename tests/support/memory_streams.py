"""Connections within one event loop, for virtual time: slow, in order, and cut now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import cast

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class MemoryWriter:
    """One direction: what is written arrives a little later at the reader, in order."""

    def __init__(self, peer: asyncio.StreamReader, random: Random, loss: float) -> None:
        self._peer = peer
        self._random = random
        self._loss = loss
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._closed = False
        self.other: MemoryWriter | None = None

    def write(self, data: bytes) -> None:
        """Send it, or lose the connection instead."""
        if self._closed:
            return
        if self._random.random() < self._loss:
            self.close()
            return
        self._later(self._feed, data)

    async def drain(self) -> None:
        await asyncio.sleep(0)
        if self._closed:
            raise ConnectionResetError("the connection is gone")

    def close(self) -> None:
        """End both directions."""
        if self._closed:
            return
        self._closed = True
        self._later(self._end)
        if self.other is not None:
            self.other.close()

    def is_closing(self) -> bool:
        return self._closed

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)

    def get_extra_info(self, name: str) -> str:
        return name

    def _later(self, call: Callable[..., None], *args: bytes) -> None:
        # Timers of the same time have no order.
        when = max(self._loop.time() + self._random.uniform(0.001, 0.02), self._last + 1e-6)
        self._last = when
        self._loop.call_at(when, call, *args)

    def _feed(self, data: bytes) -> None:
        if not self._peer.at_eof() and not self._peer._eof:  # type: ignore[attr-defined] # private
            self._peer.feed_data(data)

    def _end(self) -> None:
        self._peer.feed_eof()


def connect(
    serve: Serve, random: Random, loss: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Awaitable[None]]:
    """A connection; the last is the server's side, to be run as a task."""
    here, there = asyncio.StreamReader(), asyncio.StreamReader()
    to_server, to_client = MemoryWriter(there, random, loss), MemoryWriter(here, random, loss)
    to_server.other, to_client.other = to_client, to_server
    served = serve(there, cast("asyncio.StreamWriter", to_client))
    return here, cast("asyncio.StreamWriter", to_server), served
