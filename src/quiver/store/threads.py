"""The threads of a store: one commits, one keeps; and how they wake those who wait.

The committer takes whatever waits when it comes by, writes it with one call and syncs it with one,
and wakes the whole group together. While it syncs, the next group gathers: the slower the disk, the
larger the groups. A thread that comes when nobody waits commits its bundle itself: handing it to
the committer and back would cost it two switches of threads.

The keeper finalises segments when they are due and maintains the store, so that no ingest ever
waits for either. Errors of the disk are counted and tried again; they do not end the thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from quiver.config import Ack, Durability, StoreConfig
from quiver.errors import QuiverError, StorageAtCapacity, StoreClosed
from quiver.store.core import Clock, StoreCore
from quiver.store.intake import Intent, Receipt


class Ticket:
    """A thread that waits for its receipt."""

    __slots__ = ("_done", "_error", "_receipt")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._receipt: Receipt | None = None
        self._error: Exception | None = None

    def settle(self, receipt: Receipt | None, error: Exception | None) -> None:
        """Give the receipt, or the reason why there is none."""
        self._receipt = receipt
        self._error = error
        self._done.release()

    def wait(self) -> Receipt:
        """Block until settled."""
        self._done.acquire()
        if self._receipt is None:
            raise self._error or StoreClosed("the store was closed")
        return self._receipt


@dataclass(frozen=True, slots=True)
class AsyncTicket:
    """A task that waits for its receipt."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Receipt]


AnyTicket: TypeAlias = Ticket | AsyncTicket
_Outcome: TypeAlias = tuple[asyncio.Future[Receipt], Receipt | None, Exception | None]


def _settle_futures(outcomes: list[_Outcome]) -> None:
    for future, receipt, error in outcomes:
        if future.done():
            continue  # its task was cancelled; the bundle is stored all the same
        if receipt is not None:
            future.set_result(receipt)
        else:
            future.set_exception(error or StoreClosed("the store was closed"))


class Wakeup:
    """Wakes threads and tasks that wait for something to change."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._tasks: list[AsyncWaiter] = []
        self.generation = 0
        """Read it before looking; waiting returns at once when it has moved since."""

    def notify(self) -> None:
        """Something changed."""
        with self._condition:
            self.generation += 1
            tasks, self._tasks = self._tasks, []
            self._condition.notify_all()
        for waiter in tasks:
            waiter.wake()

    def wait(self, seen: int, timeout: float | None) -> None:
        """Block until something changed since ``seen``, or time is up."""
        with self._condition:
            self._condition.wait_for(lambda: self.generation != seen, timeout)

    async def wait_async(self, seen: int, seconds: float | None) -> None:
        """The same, for a task."""
        waiter = AsyncWaiter(asyncio.get_running_loop())
        with self._condition:
            if self.generation != seen:
                return
            self._tasks.append(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter.future
        except TimeoutError:
            pass
        finally:
            with self._condition:
                if waiter in self._tasks:
                    self._tasks.remove(waiter)


class AsyncWaiter:
    """One task that waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[None] = loop.create_future()

    def wake(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop was closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Committer:
    """The thread that commits."""

    def __init__(self, core: StoreCore, config: StoreConfig, clock: Clock, keeper: Keeper) -> None:
        self._core = core
        self._config = config
        self._clock = clock
        self._keeper = keeper
        self._condition = threading.Condition()
        self._waiting: list[tuple[Intent, AnyTicket]] = []
        self._waiting_bytes = 0
        self._is_committing = False
        self._closing = False
        self._unsynced_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="quiver-committer", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were handed in and are not written yet."""
        return self._waiting_bytes

    def commit(self, intent: Intent) -> Receipt:
        """Commit a bundle in the thread that brings it, or wait for the group that takes it."""
        ticket = Ticket()
        with self._condition:
            is_alone = not (self._is_committing or self._waiting or self._closing)
            if is_alone:
                self._is_committing = True
        if is_alone:
            self._commit([(intent, ticket)])
            self._keeper.nudge_if_due()
        else:
            self.submit(intent, ticket)
        return ticket.wait()

    def commit_to_memory(self, intent: Intent) -> Receipt | None:
        """Commit a bundle that no disk is waited for; None when it has to be submitted after all.

        For tasks: it does not block.
        """
        if self._config.durability is not Durability.SEGMENT_ONLY:
            return None
        with self._condition:
            if self._is_committing or self._waiting or self._closing:
                return None
            try:
                (receipt,) = self._core.commit([intent])
            except StorageAtCapacity:
                return None  # the committer knows how to make room
        self._keeper.nudge_if_due()
        return receipt

    def submit(self, intent: Intent, ticket: AnyTicket) -> None:
        """Put a bundle in the queue; the ticket is settled later."""
        with self._condition:
            if self._closing:
                raise StoreClosed("the store is closing and takes no more bundles")
            limit = self._config.max_waiting_bytes
            if self._waiting and self._waiting_bytes + intent.size > limit:
                raise StorageAtCapacity(
                    f"{self._waiting_bytes} bytes wait to be written and max_waiting_bytes is "
                    f"{limit}: the disk is slower than those who send"
                )
            self._waiting.append((intent, ticket))
            self._waiting_bytes += intent.size
            self._condition.notify()

    def close(self) -> None:
        """Commit what waits, sync, and end."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            group, is_last = self._next_group()
            if group:
                self._commit(group)
            self._sync_if_due(at_once=is_last)
            self._keeper.nudge_if_due()
            if is_last and not group:
                return

    def _next_group(self) -> tuple[list[tuple[Intent, AnyTicket]], bool]:
        with self._condition:
            while self._is_committing or not (self._waiting or self._closing):
                if self._unsynced_since is not None:
                    due = self._unsynced_since + self._config.wal.flush_interval
                    if not self._condition.wait(max(0.0, due - self._clock.monotonic())):
                        return [], False
                else:
                    self._condition.wait()
            size = count = 0
            for intent, _ in self._waiting:
                size += intent.size
                if count and size > self._config.max_group_bytes:
                    size -= intent.size
                    break
                count += 1
            group = self._waiting[:count]
            del self._waiting[:count]
            self._waiting_bytes -= size
            self._is_committing = bool(group)
            return group, self._closing

    def _commit(self, group: list[tuple[Intent, AnyTicket]]) -> None:
        """For whoever set ``_is_committing``: one at a time, this thread or another."""
        try:
            self._settle(group)
        finally:
            with self._condition:
                self._is_committing = False
                if self._waiting or self._closing or self._unsynced_since is not None:
                    self._condition.notify()

    def _settle(self, group: list[tuple[Intent, AnyTicket]]) -> None:
        intents = [intent for intent, _ in group]
        receipts: list[Receipt] | None = None
        failure: Exception | None = None
        try:
            try:
                receipts = self._core.commit(intents)
            except StorageAtCapacity:
                self._make_room()
                receipts = self._core.commit(intents)
        except StorageAtCapacity as error:
            if len(group) > 1:  # what does not fit together may fit one by one
                for one in group:
                    self._settle([one])
                return
            failure = error
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
            failure = error
        if receipts is not None and self._config.ack is Ack.WRITTEN and not self._unsynced_since:
            self._unsynced_since = self._clock.monotonic()
        self._wake(group, receipts, failure)

    def _make_room(self) -> None:
        """The log is full: have the open segment finalised, so that its files can go."""
        try:
            self._core.pressure = True
            self._core.metrics.count("quiver.wal.reliefs_total")
            self._keeper.finalise_now(self._config.relief_timeout)
        except (OSError, QuiverError) as error:
            raise StorageAtCapacity(f"there is no room, and none can be made: {error}") from error

    def _wake(
        self,
        group: list[tuple[Intent, AnyTicket]],
        receipts: list[Receipt] | None,
        failure: Exception | None,
    ) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
        for index, (_, ticket) in enumerate(group):
            receipt = receipts[index] if receipts is not None else None
            if isinstance(ticket, Ticket):
                ticket.settle(receipt, failure)
            else:
                outcome = (ticket.future, receipt, failure)
                by_loop.setdefault(ticket.loop, []).append(outcome)
        for loop, outcomes in by_loop.items():
            with suppress(RuntimeError):  # the loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(_settle_futures, outcomes)

    def _sync_if_due(self, *, at_once: bool) -> None:
        if self._unsynced_since is None:
            return
        due = self._unsynced_since + self._config.wal.flush_interval
        if at_once or self._clock.monotonic() >= due:
            self._unsynced_since = None
            try:
                self._core.intake.sync()
            except (OSError, QuiverError):
                self._core.metrics.count("quiver.wal.sync_failures_total")


class Keeper:
    """The thread that finalises and maintains."""

    def __init__(self, core: StoreCore, config: StoreConfig, clock: Clock) -> None:
        self._core = core
        self._config = config
        self._clock = clock
        self._condition = threading.Condition()
        self._asked = 0
        self._done = 0
        self._error: Exception | None = None
        self._closing = False
        self._next_maintenance = 0.0
        self._thread = threading.Thread(target=self._run, name="quiver-keeper", daemon=True)
        self._thread.start()

    def nudge_if_due(self) -> None:
        """Called after a commit, which may have filled the open segment."""
        if self._core.intake.due_in(self._clock.monotonic()) == 0:
            with self._condition:
                self._condition.notify_all()

    def finalise_now(self, timeout: float | None = None) -> None:
        """Finalise the open segment and maintain, and wait for it; raises what went wrong."""
        with self._condition:
            if self._closing:
                raise StoreClosed("the store is closing")
            self._asked += 1
            mine = self._asked
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._done >= mine or self._closing, timeout)
            if self._done < mine and self._closing:
                raise StoreClosed("the store was closed before its open segment was finalised")
            if self._error is not None and self._done >= mine:
                raise self._error

    def close(self) -> None:
        """End the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._closing and self._done >= self._asked:
                    self._condition.wait(self._pause())
                if self._closing:
                    return
                asked = self._asked
                at_once = asked > self._done
            error = self._work(at_once=at_once)
            with self._condition:
                self._done = asked
                self._error = error
                self._condition.notify_all()

    def _pause(self) -> float:
        if self._error is not None:
            return self._config.maintain_interval
        due = self._core.intake.due_in(self._clock.monotonic())
        pause = self._next_maintenance - self._clock.monotonic()
        return max(0.0, min(pause, self._config.maintain_interval if due is None else due))

    def _work(self, *, at_once: bool) -> Exception | None:
        """Both halves, whatever happens to the other: deleting may be what makes room to write."""
        error = self._try(lambda: self._core.finalise_due(at_once=at_once))
        if at_once or error or self._clock.monotonic() >= self._next_maintenance:
            self._next_maintenance = self._clock.monotonic() + self._config.maintain_interval
            error = self._try(self._core.maintain) or error
        return error

    def _try(self, action: Callable[[], object]) -> Exception | None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the thread must live; it is counted and told
            self._core.metrics.count("quiver.flush.failures_total")
            return error
        return None
