"""Consumers in virtual time, each test with a store of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

from memory_objects import MANIFEST, MemoryObjects, simulate

from quiver.buffer import manifest
from quiver.buffer.consumer import Consumer
from quiver.buffer.types import Batch
from quiver.config import ConsumerConfig
from quiver.metrics import Metrics
from quiver.testing.virtual_time import now_ms

Scenario = Callable[[MemoryObjects], Awaitable[None]]


def scenario(test: Scenario) -> Callable[[], None]:
    """A test that runs in virtual time, with a store of its own."""

    def run() -> None:
        async def main() -> None:
            await test(MemoryObjects())

        simulate(main())

    run.__name__ = test.__name__
    return run


def consumer(
    objects: MemoryObjects,
    **settings: Any,  # noqa: ANN401 - those of the configuration
) -> Consumer:
    config = ConsumerConfig(**settings)
    return Consumer(objects, config, metrics=Metrics(), now_ms=now_ms, random=Random(1))


async def started(
    objects: MemoryObjects,
    last_acked: int | None = None,
    **settings: Any,  # noqa: ANN401 - those of the configuration
) -> Consumer:
    it = consumer(objects, **settings)
    await it.initialize(last_acked)
    return it


async def drained(it: Consumer) -> list[int]:
    """The sequences that come until there are no more."""
    found = []
    while batch := await it.next_batch():
        found.append(batch.entry.sequence)
    return found


def footer(objects: MemoryObjects) -> manifest.Footer:
    return manifest.check(objects.data(MANIFEST), source=MANIFEST)


def sequences(objects: MemoryObjects) -> list[int]:
    return [entry.sequence for entry in manifest.entries(objects.data(MANIFEST), source=MANIFEST)]


def count(it: Consumer, name: str) -> float:
    return it._metrics.get(f"buffer.{name}", role="consumer")


async def batches(it: Consumer) -> AsyncIterator[Batch]:
    """What comes until there is no more."""
    while batch := await it.next_batch():
        yield batch
