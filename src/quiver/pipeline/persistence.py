"""The node that makes acknowledged mean safe: a store between those who send and those who take.

Taking an item means that it is durable. From then on every destination gets it, at least once, at
its own pace (``feeder``). Destinations are subscribers by the name of their node; one that is new
gets everything that is still there. One that is gone from the configuration keeps its data pinned
until it is dropped, because nobody can know whether it comes back.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from quiver.bundle import RecordBundle
from quiver.config import RetentionConfig, SegmentConfig, StoreConfig, WalConfig
from quiver.disk import Disk, RealDisk
from quiver.errors import (
    InvalidBundle,
    InvalidRequest,
    QuiverError,
    StorageAtCapacity,
    TryLater,
    Undeliverable,
)
from quiver.metrics import Metrics
from quiver.otlp.convert import to_otap
from quiver.pipeline.dead_letters import DeadLetters
from quiver.pipeline.feeder import Feeder
from quiver.pipeline.item import Item, to_bundle
from quiver.pipeline.node import Taker
from quiver.pipeline.settings.options import OtlpHandling, PersistenceOptions, RetentionOptions
from quiver.store.core import Start
from quiver.store.store import Store

logger = logging.getLogger(__name__)

_HOUR: Final = 3600.0
_FULL_RETRY: Final = 1.0


class ExternalTaker:
    """A destination in another process: it reads the store itself and keeps its own progress."""

    def __init__(self, name: str, subscriber: str) -> None:
        self.name = name
        self.subscriber = subscriber


class Persistence:
    """A processor with a store of its own."""

    def __init__(
        self,
        name: str,
        options: PersistenceOptions,
        destinations: Sequence[Taker | ExternalTaker],
        *,
        core: int = 0,
        metrics: Metrics | None = None,
        disk: Disk | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self.name = name
        self._options = options
        self._destinations = destinations
        self._root = options.path / f"core_{core}"
        self._metrics = metrics or Metrics()
        self._disk = disk or RealDisk()
        self._chance = chance or random.Random()  # noqa: S311 - it spreads retries, nothing more
        self._feeders: list[Feeder] = []
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """Open between ``start`` and the end of ``stop``."""
        if self._store is None:
            raise TryLater(f"{self.name} is not running")
        return self._store

    @property
    def directory(self) -> Path:
        """Where the store is."""
        return self._root

    async def start(self) -> None:
        """Open the store, which takes in what its log has, and begin to deliver."""
        store = await asyncio.to_thread(
            Store.open, self._root, store_config(self._options), disk=self._disk
        )
        self._store = store
        for problem in store.problems:
            logger.error("%s: %s", self.name, problem)
        letters = DeadLetters(self._disk, self._root, self._options.max_dead_letter_bytes)
        for destination in self._destinations:
            if isinstance(destination, ExternalTaker):
                store.register(destination.subscriber, Start.earliest(), external=True)
                continue
            store.subscribe(destination.name, Start.earliest())
            feeder = Feeder(
                store,
                destination,
                self._options,
                letters,
                metrics=self._metrics,
                chance=self._chance,
            )
            self._feeders.append(feeder)
        for orphan in store.activate():
            logger.warning(
                "%s: nobody reads as %s any more, and what it has not read is kept; "
                "see quiver subscribers",
                self.name,
                orphan,
            )
        for feeder in self._feeders:
            feeder.start()

    async def take(self, item: Item) -> None:
        """Return when the item is durable."""
        try:
            bundles = self._bundles(item)
            await asyncio.gather(*(self.store.ingest_async(bundle) for bundle in bundles))
        except (InvalidBundle, InvalidRequest) as error:
            raise Undeliverable(str(error)) from error
        except StorageAtCapacity as error:
            self._metrics.count("quiver.persistence.refused_total", node=self.name)
            raise TryLater(str(error), retry_after=_FULL_RETRY) from error
        except QuiverError as error:
            self._metrics.count("quiver.persistence.failures_total", node=self.name)
            raise TryLater(str(error)) from error

    def _bundles(self, item: Item) -> list[RecordBundle]:
        if item.requests and self._options.otlp_handling is OtlpHandling.CONVERT_TO_ARROW:
            converted = to_otap(item.signal, item.requests)
            items = [
                replace(item, requests=(), tables=tables, count=None)
                for tables in converted.batches
            ]
            if converted.failures:
                # What cannot be converted is kept as it came: whoever reads it is told why.
                odd = tuple(item.requests[failure.request] for failure in converted.failures)
                items.append(replace(item, requests=odd, count=None))
            return [to_bundle(made) for made in items]
        return [to_bundle(item)]

    async def stop(self, deadline: float) -> None:
        """Finalise, deliver until the deadline, close. What is not delivered is delivered later."""
        if self._store is None:
            return
        store, self._store = self._store, None
        try:
            await store.flush_async()
        except (QuiverError, OSError) as error:
            logger.warning("%s: what is open stays in the log for now: %s", self.name, error)
        await asyncio.gather(*(feeder.stop(deadline) for feeder in self._feeders))
        await asyncio.to_thread(store.close)


def store_config(options: PersistenceOptions) -> StoreConfig:
    """The settings of the store that a node asks for."""
    wal, segment = options.wal, options.segment
    return StoreConfig(
        durability=options.durability,
        ack=options.ack,
        wal=WalConfig(
            max_size=wal.max_size,
            rotation_target=min(wal.rotation_target, wal.max_size),
            flush_interval=wal.flush_interval,
        ),
        segment=SegmentConfig(
            target_size=segment.target_size, max_open_duration=segment.max_open_duration
        ),
        retention=_retention(options.retention),
    )


def _retention(options: RetentionOptions) -> RetentionConfig:
    hours = options.max_retain_after_ingestion_hours
    return RetentionConfig(
        size_cap=options.size_cap,
        size_cap_policy=options.size_cap_policy,
        max_age=options.max_age if hours is None else hours * _HOUR,
        min_free_space=options.min_free_space,
        shared=options.size_cap is not None,
    )
