"""From a store to one destination, whatever the destination does.

Every destination has a feeder of its own, and with it its own progress, pace and troubles:

==================  ==========================================================================
it takes an item    the bundle is acknowledged
``TryLater``        the bundle is put off, longer each time, and holds up nothing behind it;
                    after several in a row the destination is left alone for a while
``Undeliverable``   the bundle goes to the dead letters, with the reason
any other error     counts as ``TryLater``: a mistake in an exporter must not lose data
==================  ==========================================================================

With ``recovery: newest_first`` fresh bundles go first and a quarter of the places is left for those
that are behind, from the oldest on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from quiver.errors import DeliveryError, QuiverError, StoreClosed, SubscriberNotFound, Undeliverable
from quiver.metrics import Metrics
from quiver.pipeline.backoff import Outage, pause
from quiver.pipeline.dead_letters import DeadLetter, DeadLetters
from quiver.pipeline.item import Item, from_bundle
from quiver.pipeline.node import Gatherer, Taker
from quiver.pipeline.settings.options import PersistenceOptions, Recovery
from quiver.store.store import OLDEST_FIRST, Choose, Store
from quiver.subscriber.handle import BundleHandle
from quiver.subscriber.state import BundleRef

logger = logging.getLogger(__name__)

_NEWEST_FIRST: Final = Choose(newest_first=True)
_BACKFILL_SHARE: Final = 4
_AGAIN_INTERVAL: Final = 2.0  # how often dead letters are looked at
_MAX_REASON: Final = 500


@dataclass(slots=True)
class _Budget:
    """Places and bytes of items that are on their way to a destination."""

    max_items: int
    max_bytes: int
    items: int = 0
    size: int = 0
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, size: int) -> None:
        while self.items >= self.max_items or (self.items and self.size + size > self.max_bytes):
            self._freed.clear()
            await self._freed.wait()
        self.items += 1
        self.size += size

    def give_back(self, size: int) -> None:
        self.items -= 1
        self.size -= size
        self._freed.set()

    async def is_empty(self) -> None:
        while self.items:
            self._freed.clear()
            await self._freed.wait()


class Feeder:
    """Reads bundles for one subscriber and hands them to its destination."""

    def __init__(
        self,
        store: Store,
        destination: Taker,
        options: PersistenceOptions,
        letters: DeadLetters,
        *,
        metrics: Metrics,
        chance: random.Random,
    ) -> None:
        self._store = store
        self._destination = destination
        self._name = destination.name
        self._options = options
        self._letters = letters
        self._metrics = metrics
        self._chance = chance
        self._outage = Outage(options.retry, chance)
        self._places = options.max_in_flight
        if isinstance(destination, Gatherer):
            self._places = max(self._places, destination.max_in_flight)
        self._budget = _Budget(self._places, options.max_in_flight_bytes)
        self._attempts: dict[BundleRef, int] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers: list[asyncio.Task[None]] = []
        self._is_draining = False

    def start(self) -> None:
        """Begin to read."""
        if self._options.recovery is Recovery.NEWEST_FIRST:
            backfill = max(1, self._places // _BACKFILL_SHARE)
            fresh = max(1, self._places - backfill)
            plans = [(_NEWEST_FIRST, fresh), (OLDEST_FIRST, backfill)]
        else:
            plans = [(OLDEST_FIRST, self._places)]
        loop = asyncio.get_running_loop()
        self._readers = [
            loop.create_task(self._read(choose, asyncio.Semaphore(places)))
            for choose, places in plans
        ]
        self._readers.append(loop.create_task(self._try_letters_again()))

    async def stop(self, deadline: float) -> None:
        """Deliver what is there until the deadline, wait for what is on its way, then end.

        What is not delivered stays in the store.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._store.pending_count(self._name) and not self._outage.is_out:
                    self._changed.clear()
                    await self._changed.wait()
                await self._budget.is_empty()
        for task in [*self._readers, *self._tasks]:
            task.cancel()
        await asyncio.gather(*self._readers, *self._tasks, return_exceptions=True)

    # --- reading ------------------------------------------------------------------------------

    async def _read(self, choose: Choose, places: asyncio.Semaphore) -> None:
        while True:
            await places.acquire()
            await self._destination_is_open()
            try:
                handle = await self._store.next_bundle_async(self._name, choose=choose)
            except (StoreClosed, SubscriberNotFound):
                return
            if handle is None:
                places.release()
                continue
            await self._pace()
            size = sum(payload.batch.nbytes for payload in handle.bundle.payloads.values())
            await self._budget.take(size)
            self._outage.sent()
            task = asyncio.get_running_loop().create_task(self._deliver(handle))
            self._tasks.add(task)
            task.add_done_callback(partial(self._done, size, places))

    def _done(self, size: int, places: asyncio.Semaphore, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._budget.give_back(size)
        self._metrics.set("quiver.export.in_flight", self._budget.items, node=self._name)
        places.release()
        if not task.cancelled() and task.exception() is not None:
            logger.error("delivering to %s failed", self._name, exc_info=task.exception())

    async def _destination_is_open(self) -> None:
        """Wait until the destination may be expected to answer."""
        loop = asyncio.get_running_loop()
        while (wait := self._outage.wait(loop.time())) != 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    async def _pace(self) -> None:
        """After an outage the destination gets the backlog at the rate that was chosen."""
        if not self._is_draining or self._options.drain_rate is None:
            return
        if self._store.pending_count(self._name) <= 1:
            self._is_draining = False
            return
        await asyncio.sleep(1 / self._options.drain_rate)

    # --- delivering ---------------------------------------------------------------------------

    async def _deliver(self, handle: BundleHandle) -> None:
        try:
            item = from_bundle(handle.bundle)
        except QuiverError as error:
            await self._give_up(handle, f"it cannot be read: {error}")
            return
        try:
            await self._send(item)
        except Undeliverable as error:
            self._outage.succeeded()  # it answered
            await self._give_up(handle, str(error))
        except asyncio.CancelledError:
            handle.defer()
            raise
        except Exception as error:  # noqa: BLE001 - whatever an exporter raises, nothing is lost
            self._put_off(handle, error)
        else:
            self._attempts.pop(handle.ref, None)
            self._is_draining |= self._outage.succeeded()
            handle.ack()
            self._changed.set()
            self._count("acked", item)

    async def _send(self, item: Item) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            await self._destination.take(item)
        finally:
            self._metrics.observe("quiver.export.seconds", loop.time() - started)

    def _put_off(self, handle: BundleHandle, error: Exception) -> None:
        attempt = self._attempts.get(handle.ref, 0) + 1
        self._attempts[handle.ref] = attempt
        retry_after = getattr(error, "retry_after", None)
        self._outage.refused(asyncio.get_running_loop().time(), retry_after)
        self._changed.set()
        delay = max(pause(self._options.retry, attempt, self._chance), retry_after or 0.0)
        handle.defer(delay)
        self._metrics.count("quiver.export.retries_total", node=self._name)
        if not isinstance(error, DeliveryError):
            logger.error("%s failed in a way it should not", self._name, exc_info=error)
        log = logger.debug if self._outage.refusals > 1 else logger.warning  # once an outage
        log("%s refused an item, again in %.1f s: %s", self._name, delay, error)

    async def _give_up(self, handle: BundleHandle, reason: str) -> None:
        """To the dead letters; when there is no room for it, it stays in the store."""
        try:
            await asyncio.to_thread(self._letters.add, self._name, handle.bundle, reason)
        except (QuiverError, OSError) as error:
            self._put_off(handle, error)
            return
        self._attempts.pop(handle.ref, None)
        handle.reject(reason[:_MAX_REASON])
        self._changed.set()
        self._metrics.count("quiver.export.dead_letters_total", node=self._name)
        logger.error("%s refuses an item for ever, it is a dead letter now: %s", self._name, reason)

    def _count(self, outcome: str, item: Item) -> None:
        self._metrics.count("quiver.export.bundles_total", node=self._name, outcome=outcome)
        if item.count:
            labels = {"node": self._name, "signal": item.signal}
            self._metrics.count("quiver.export.items_total", float(item.count), **labels)

    # --- dead letters ---------------------------------------------------------------------------

    async def _try_letters_again(self) -> None:
        """Those that somebody asked for."""
        while True:
            letters = await asyncio.to_thread(self._letters.list, self._name)
            for letter in letters:
                if letter.again:
                    await self._try_again(letter)
            await asyncio.sleep(_AGAIN_INTERVAL)

    async def _try_again(self, letter: DeadLetter) -> None:
        try:
            bundle = await asyncio.to_thread(self._letters.bundle, letter)
            await self._send(from_bundle(bundle))
        except Exception as error:  # noqa: BLE001 - it stays a dead letter, with the new reason
            await asyncio.to_thread(self._letters.refused_again, letter, str(error))
        else:
            await asyncio.to_thread(self._letters.remove, letter)
            self._metrics.count("quiver.export.replayed_total", node=self._name)
