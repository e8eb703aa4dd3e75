"""What a producer's caller gets back: a promise that can be looked at, or waited for."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from quiver.errors import QuiverError


class Durable(NamedTuple):
    """Entries that are in the queue: the batch they are in, and its place in the manifest."""

    location: str
    sequence: int


class Settling:
    """The fate of one batch, shared by all calls whose entries are in it."""

    def __init__(self) -> None:
        self._settled = asyncio.Event()
        self._outcome: Durable | QuiverError | None = None

    @property
    def outcome(self) -> Durable | QuiverError | None:
        """None until it is known; then it does not change."""
        return self._outcome

    def settle(self, outcome: Durable | QuiverError) -> None:
        """Say what became of it. The first word is the last."""
        if self._outcome is None:
            self._outcome = outcome
            self._settled.set()

    async def wait(self) -> Durable | QuiverError:
        """Wait until it is known."""
        await self._settled.wait()
        if self._outcome is None:
            raise AssertionError("settled without an outcome")
        return self._outcome


class DurabilityWatcher:
    """Tells when the entries of a call are durable. May be asked by any number of tasks."""

    def __init__(self, settling: Settling) -> None:
        self._settling = settling

    def result(self) -> Durable | QuiverError | None:
        """What is known now: nothing yet, where they are, or why they are not."""
        return self._settling.outcome

    async def durable(self) -> Durable:
        """Wait until they are; raises the error when they never will be."""
        outcome = await self._settling.wait()
        if isinstance(outcome, QuiverError):
            raise outcome
        return outcome


class WriteHandle(NamedTuple):
    """Entries that a producer has taken, and is going to write."""

    ingestion_time_ms: int
    watcher: DurabilityWatcher
