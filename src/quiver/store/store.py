"""``Store``: an embeddable, crash-safe store for one writer and any number of subscribers.

Every call that waits comes twice: a plain one that blocks its thread, and one with ``_async`` that
suspends its task. Both may be used on one store at the same time.

::

    with Store.open("./quiver_data") as store:
        store.subscribe("printer")
        receipt = store.ingest(bundle)          # returns when the bundle is durable
        store.flush()                           # subscribers see it now, not in five seconds
        with store.next_bundle("printer") as handle:
            print(handle.bundle)                # acknowledged when the block ends well
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from quiver.bundle import RecordBundle
from quiver.config import StoreConfig
from quiver.disk import Disk, RealDisk
from quiver.errors import (
    BundleNotAvailable,
    FormatError,
    SegmentNotFound,
    StoreClosed,
    SubscriberNotFound,
)
from quiver.metrics import Metrics
from quiver.store.core import Clock, Start, StoreCore
from quiver.store.intake import Intent, Receipt
from quiver.store.threads import AsyncTicket, Committer, Keeper, Wakeup
from quiver.subscriber.handle import BundleHandle
from quiver.subscriber.registry import SubscriberInfo
from quiver.subscriber.state import BundleRef, Claim

REAL_CLOCK = Clock(time.monotonic, time.time_ns)


@dataclass(frozen=True, slots=True)
class Choose:
    """Which bundle comes next: the oldest pending one, unless told otherwise.

    ``segments`` restricts to a range of segments. ``claim_timeout`` is after how many seconds a
    bundle that was neither resolved nor given back is delivered again.
    """

    newest_first: bool = False
    segments: range | None = None
    claim_timeout: float | None = None


OLDEST_FIRST = Choose()


class Store:
    """An open store. Made by ``Store.open``; safe to use from any thread and task."""

    def __init__(self, disk: Disk, root: Path, config: StoreConfig, clock: Clock) -> None:
        self._clock = clock
        self._wakeup = Wakeup()
        self._closed = False
        self._core = StoreCore(disk, root, config, clock, self._wakeup.notify)
        self._keeper = Keeper(self._core, config, clock)
        self._committer = Committer(self._core, config, clock, self._keeper)

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: StoreConfig | None = None,
        *,
        disk: Disk | None = None,
        clock: Clock = REAL_CLOCK,
    ) -> Store:
        """Open a directory for writing; it is made when it is not there.

        ``StoreLocked`` when another process has it open.
        """
        return cls(disk or RealDisk(), Path(path), config or StoreConfig(), clock)

    # --- writing ----------------------------------------------------------------------------------

    def ingest(self, bundle: RecordBundle) -> Receipt:
        """Store a bundle; returns when it is durable, unless ``ack`` or ``durability`` say less."""
        return self._committer.commit(self._prepare(bundle))

    def _prepare(self, bundle: RecordBundle) -> Intent:
        self._check_open()
        return self._core.prepare(bundle, self._committer.waiting_bytes)

    async def ingest_async(self, bundle: RecordBundle) -> Receipt:
        """Store a bundle. Cancelling the task does not take it back."""
        intent = self._prepare(bundle)
        receipt = self._committer.commit_to_memory(intent)
        if receipt is not None:
            return receipt
        loop = asyncio.get_running_loop()
        ticket = AsyncTicket(loop, loop.create_future())
        self._committer.submit(intent, ticket)
        return await ticket.future

    def flush(self) -> None:
        """Finalise the open segment now, so that subscribers see everything ingested so far."""
        self._keeper.finalise_now()

    async def flush_async(self) -> None:
        """Finalise the open segment now."""
        await asyncio.to_thread(self.flush)

    # --- subscribers ------------------------------------------------------------------------------

    def register(
        self, subscriber_id: str, start: Start | None = None, *, external: bool = False
    ) -> bool:
        """Make a subscriber known, durably; whether it is new.

        One that has a progress file goes on where it was; a new one begins at ``start``, by default
        with what is finalised from now on. An ``external`` one writes its progress file itself.
        """
        self._check_open()
        return self._core.register(subscriber_id, start or Start.latest(), external=external)

    def activate(self, subscriber_id: str | None = None) -> list[str]:
        """Let a subscriber read; without a name, all that registered. The orphans, who did not."""
        if subscriber_id is None:
            return self._core.registry.activate_all()
        self._core.registry.activate(subscriber_id)
        return self._core.registry.orphans()

    def subscribe(self, subscriber_id: str, start: Start | None = None) -> Subscription:
        """Register and activate in one step."""
        self.register(subscriber_id, start)
        self.activate(subscriber_id)
        return Subscription(self, subscriber_id)

    def deactivate(self, subscriber_id: str) -> None:
        """It reads no more for now; what it has not resolved is kept. Those who wait are woken."""
        self._core.registry.deactivate(subscriber_id)
        self._wakeup.notify()

    def unregister(self, subscriber_id: str) -> int:
        """Forget it for good; how many bundles it had not resolved. They are counted as dropped."""
        self._check_open()
        dropped = self._core.unregister(subscriber_id)
        self._wakeup.notify()
        return dropped

    def orphans(self) -> list[str]:
        """Subscribers of earlier runs that nobody registered since ``activate``."""
        return self._core.registry.orphans()

    def drop_orphan(self, subscriber_id: str) -> int:
        """Forget an orphan, and what it pins; how many bundles it had not resolved."""
        if subscriber_id not in self.orphans():
            raise SubscriberNotFound(f"{subscriber_id!r} is not an orphan")
        return self.unregister(subscriber_id)

    def subscribers(self) -> list[SubscriberInfo]:
        """All subscribers, and how far each is."""
        return self._core.registry.infos()

    def pending_count(self, subscriber_id: str) -> int:
        """Finalised bundles that it has not resolved."""
        for info in self.subscribers():
            if info.subscriber_id == subscriber_id:
                return info.pending
        raise SubscriberNotFound(f"there is no subscriber {subscriber_id!r}")

    def lag(self, subscriber_id: str) -> float:
        """How many seconds ago its oldest unresolved bundle was ingested; 0 when there is none."""
        for info in self.subscribers():
            if info.subscriber_id == subscriber_id:
                if info.oldest is None:
                    return 0.0
                manifest = self._core.segments.manifest(info.oldest.segment)
                ingested = manifest.ingestion_time_ns(info.oldest.bundle)
                return 0.0 if ingested is None else (self._clock.time_ns() - ingested) / 1e9
        raise SubscriberNotFound(f"there is no subscriber {subscriber_id!r}")

    def all_drained(self) -> bool:
        """Whether every subscriber has resolved every bundle that was ingested."""
        intake = self._core.intake
        waiting = intake.open_bytes or intake.has_frozen
        return not waiting and all(info.pending == 0 for info in self.subscribers())

    # --- bundles ----------------------------------------------------------------------------------

    def poll_next_bundle(
        self, subscriber_id: str, choose: Choose = OLDEST_FIRST
    ) -> BundleHandle | None:
        """The next bundle, claimed; None when nothing is pending."""
        while True:
            self._check_open()
            with self._core.registry.active(subscriber_id) as state:
                claim = state.claim_next(
                    self._clock.monotonic(),
                    newest_first=choose.newest_first,
                    segments=choose.segments,
                    timeout=choose.claim_timeout,
                )
            if claim is None:
                return None
            handle = self._handle(subscriber_id, claim)
            if handle is not None:
                return handle

    def next_bundle(
        self,
        subscriber_id: str,
        timeout: float | None = None,
        choose: Choose = OLDEST_FIRST,
    ) -> BundleHandle | None:
        """Wait for the next bundle; None after ``timeout`` seconds.

        Woken by new segments, by bundles that are given back or come due, by ``deactivate``,
        ``unregister`` and ``close``.
        """
        deadline = self._deadline(timeout)
        while True:
            seen = self._wakeup.generation
            handle = self.poll_next_bundle(subscriber_id, choose)
            if handle is not None:
                return handle
            pause = self._pause(subscriber_id, deadline)
            if pause is not None and pause <= 0:
                return None
            self._wakeup.wait(seen, pause)

    async def next_bundle_async(
        self,
        subscriber_id: str,
        timeout: float | None = None,  # noqa: ASYNC109 - the twin of the plain call
        choose: Choose = OLDEST_FIRST,
    ) -> BundleHandle | None:
        """Wait for the next bundle; None after ``timeout`` seconds. Cancelling claims nothing."""
        deadline = self._deadline(timeout)
        while True:
            seen = self._wakeup.generation
            handle = self.poll_next_bundle(subscriber_id, choose)
            if handle is not None:
                return handle
            pause = self._pause(subscriber_id, deadline)
            if pause is not None and pause <= 0:
                return None
            await self._wakeup.wait_async(seen, pause)

    def claim_bundle(
        self, subscriber_id: str, ref: BundleRef, claim_timeout: float | None = None
    ) -> BundleHandle:
        """Claim one bundle by its address, also before the time it was deferred to."""
        self._check_open()
        with self._core.registry.active(subscriber_id) as state:
            claim = state.claim(ref, self._clock.monotonic(), claim_timeout)
        handle = self._handle(subscriber_id, claim)
        if handle is None:
            raise BundleNotAvailable(f"bundle {ref} is in a segment that is damaged or gone")
        return handle

    def _handle(self, subscriber_id: str, claim: Claim) -> BundleHandle | None:
        """Read a claimed bundle; a segment that cannot be read is given up, for everybody."""
        try:
            bundle = self._core.segments.bundle(*claim.ref)
        except (FormatError, SegmentNotFound) as error:
            self._core.give_up_segment(claim.ref.segment, str(error))
            return None
        return BundleHandle(self, subscriber_id, claim, bundle)

    def resolve(self, subscriber_id: str, claim: Claim, rejected: str | None) -> None:
        """For handles: done with a bundle."""
        self._core.registry.resolve(subscriber_id, claim)
        if rejected is not None:
            self._core.count_rejected(subscriber_id, rejected)

    def give_back(self, subscriber_id: str, claim: Claim, delay: float | None) -> None:
        """For handles: deliver it again."""
        if delay is None:
            self._core.registry.release_later(subscriber_id, claim)
            return
        until = self._clock.monotonic() + delay if delay else None
        self._core.registry.release(subscriber_id, claim, until=until)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store was closed")

    def _deadline(self, timeout: float | None) -> float | None:
        return None if timeout is None else self._clock.monotonic() + timeout

    def _pause(self, subscriber_id: str, deadline: float | None) -> float | None:
        """How long to wait before looking again; 0 or less when time is up."""
        self._check_open()
        now = self._clock.monotonic()
        if deadline is not None and deadline <= now:
            return 0.0
        with self._core.registry.active(subscriber_id) as state:
            event = state.next_event()
        times = [t for t in (deadline, event) if t is not None]
        return max(0.001, min(times) - now) if times else None

    # --- looking after ----------------------------------------------------------------------------

    def maintain(self) -> None:
        """Do now what the background does anyway: finalise, persist progress, delete."""
        self._keeper.finalise_now()

    @property
    def metrics(self) -> Metrics:
        """Counters and gauges."""
        return self._core.metrics

    @property
    def losses(self) -> Counter[str]:
        """What was dropped since the store was made, by reason; survives restarts."""
        return Counter(self._core.ledger.losses)

    @property
    def problems(self) -> list[str]:
        """What was found damaged, and where it was put."""
        return list(self._core.problems)

    @property
    def store_id(self) -> str:
        """A name for this store that no other has."""
        return self._core.ledger.store_id

    def close(self) -> None:
        """Commit what waits, finalise, persist, let go. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._committer.close()
        self._keeper.close()
        self._wakeup.notify()
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)


class Subscription:
    """A subscriber that reads until the store is closed or it is deactivated.

    ``for`` and ``async for`` give handles, one after the other, and wait for more.
    """

    def __init__(self, store: Store, subscriber_id: str) -> None:
        self._store = store
        self.subscriber_id = subscriber_id

    def __iter__(self) -> Iterator[BundleHandle]:
        while True:
            try:
                handle = self._store.next_bundle(self.subscriber_id)
            except (StoreClosed, SubscriberNotFound):
                return
            if handle is not None:
                yield handle

    async def __aiter__(self) -> AsyncIterator[BundleHandle]:
        while True:
            try:
                handle = await self._store.next_bundle_async(self.subscriber_id)
            except (StoreClosed, SubscriberNotFound):
                return
            if handle is not None:
                yield handle
