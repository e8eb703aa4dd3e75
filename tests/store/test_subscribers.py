"""Subscribers of a ``Store``: where they start, what they are given, who wakes them."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from bundles import START_NS, plain_bundle

from quiver import (
    BundleHandle,
    BundleNotAvailable,
    BundleRef,
    Choose,
    InvalidName,
    SegmentConfig,
    Start,
    Store,
    StoreClosed,
    StoreConfig,
    SubscriberExists,
    SubscriberNotFound,
)
from quiver.store.core import Clock
from quiver.testing import SimulatedDisk

ROOT = Path("/store")
LONG = 3600.0
BOUND = 60.0
QUIET = StoreConfig(maintain_interval=LONG, segment=SegmentConfig(max_open_duration=LONG))


@dataclass
class HandClock:
    """A clock that stands still until it is moved."""

    now: float = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: START_NS + int(self.now * 1e9))


@contextmanager
def opened(disk: SimulatedDisk | None = None, clock: HandClock | None = None) -> Iterator[Store]:
    """A store in which nothing happens unless asked for."""
    disk = disk or SimulatedDisk()
    hand = clock or HandClock()
    with Store.open(ROOT, QUIET, disk=disk, clock=hand.clock) as store:
        store.flush()
        yield store


def put(store: Store, *indices: int) -> None:
    """One segment with these bundles."""
    for index in indices:
        store.ingest(plain_bundle(index))
    store.flush()


def value(handle: BundleHandle | None) -> int:
    assert handle is not None
    batch = handle.bundle.batch(30)
    assert batch is not None
    return int(batch.column(0)[0].as_py())


def drain(store: Store, subscriber: str = "reader") -> list[int]:
    found = []
    while (handle := store.poll_next_bundle(subscriber)) is not None:
        found.append(value(handle))
        handle.ack()
    return found


def claim(store: Store, choose: Choose | None = None) -> BundleHandle:
    handle = store.poll_next_bundle("reader", choose or Choose())
    assert handle is not None
    return handle


@contextmanager
def waiting(store: Store) -> Iterator[Future[BundleHandle | None]]:
    """A thread that waits in ``next_bundle``, and is known to wait when the block begins."""
    asleep = threading.Event()
    wait = store._wakeup.wait

    def noted(seen: int, timeout: float | None) -> None:
        asleep.set()
        wait(seen, timeout)

    store._wakeup.wait = noted  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(store.next_bundle, "reader")
        assert asleep.wait(BOUND)
        yield future


# --- where a subscriber starts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (None, [4]),
        (Start.latest(), [4]),
        (Start.earliest(), [0, 1, 2, 3, 4]),
        (Start.at_sequence(0), [0, 1, 2, 3, 4]),
        (Start.at_sequence(1), [1, 2, 3, 4]),
        (Start.at_sequence(2), [2, 3, 4]),
        (Start.at_time(START_NS + 3), [3, 4]),
        (Start.at_time(0), [0, 1, 2, 3, 4]),
    ],
)
def test_a_new_subscriber_begins_where_it_wants(start: Start | None, expected: list[int]) -> None:
    with opened() as store:
        put(store, 0, 1)
        put(store, 2, 3)
        assert store.register("reader", start)
        store.activate("reader")
        put(store, 4)
        assert drain(store) == expected


@pytest.mark.parametrize("start", [Start.at_sequence(2), Start.at_time(START_NS + 2)])
def test_a_start_counts_for_bundles_that_are_not_finalised_yet(start: Start) -> None:
    with opened() as store:
        for index in range(4):
            store.ingest(plain_bundle(index))
        store.subscribe("reader", start)
        store.flush()
        assert drain(store) == [2, 3]


@pytest.mark.parametrize("start", [Start.latest(), Start.earliest(), Start.at_sequence(9)])
def test_a_known_subscriber_goes_on_where_it_was(start: Start) -> None:
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.subscribe("reader")
        put(store, 0, 1, 2)
        claim(store).ack()
    with opened(disk) as store:
        assert not store.register("reader", start)
        store.activate("reader")
        assert drain(store) == [1, 2]


def test_a_registration_survives_a_power_cut_right_after_it() -> None:
    disk = SimulatedDisk()
    with opened(disk) as store:
        put(store, 0)
        store.register("reader", Start.earliest())
        for rebooted in disk.crash_states(limit=64):
            with opened(rebooted) as again:
                assert not again.register("reader", Start.latest())
                again.activate()
                assert drain(again) == [0]


def test_a_name_must_be_safe_and_of_one_kind() -> None:
    with opened() as store:
        with pytest.raises(InvalidName):
            store.register("../reader")
        store.register("lake", external=True)
        with pytest.raises(SubscriberExists):
            store.register("lake")
        with pytest.raises(SubscriberNotFound):
            store.next_bundle("nobody", 0)


# --- leaving --------------------------------------------------------------------------------------


def test_a_deactivated_subscriber_keeps_what_it_has_not_resolved() -> None:
    with opened() as store:
        store.subscribe("reader")
        put(store, 0)
        store.deactivate("reader")
        with pytest.raises(SubscriberNotFound):
            store.poll_next_bundle("reader")
        put(store, 1)
        store.activate("reader")
        assert drain(store) == [0, 1]


def test_unregistering_drops_and_counts_for_good() -> None:
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.subscribe("reader")
        put(store, 0, 1, 2)
        held = claim(store)
        claim(store).ack()
        assert store.unregister("reader") == 2
        with pytest.raises(SubscriberNotFound):
            held.ack()
        assert store.losses["unregistered.bundles.reader"] == 2
        rebooted = next(disk.crash_states(limit=1))
    with opened(rebooted) as store:
        assert store.losses["unregistered.bundles.reader"] == 2
        assert store.subscribers() == []
        assert store.register("reader"), "it was forgotten"


def test_orphans_are_named_and_dropped() -> None:
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.subscribe("reader")
        store.subscribe("gone")
        put(store, 0, 1)
    with opened(disk) as store:
        store.register("reader")
        assert store.activate() == ["gone"] == store.orphans()
        with pytest.raises(SubscriberNotFound):
            store.drop_orphan("reader")
        assert drain(store) == [0, 1]
        store.maintain()
        assert store._core.segments.numbers == [0], "the orphan still needs it"
        assert store.drop_orphan("gone") == 2
        assert store.orphans() == []
        store.maintain()
        assert store._core.segments.numbers == []
        assert store.losses["unregistered.bundles.gone"] == 2


def test_an_orphan_may_come_back() -> None:
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.subscribe("reader")
        put(store, 0)
    with opened(disk) as store:
        assert store.activate() == ["reader"]
        store.subscribe("reader")
        assert store.orphans() == []
        assert drain(store) == [0]


# --- waiting --------------------------------------------------------------------------------------


def test_waiting_ends_with_nothing_when_time_is_up() -> None:
    with Store.open(ROOT, QUIET, disk=SimulatedDisk()) as store:
        store.subscribe("reader")
        assert store.next_bundle("reader", 0) is None
        assert store.next_bundle("reader", 0.01) is None
        assert asyncio.run(store.next_bundle_async("reader", 0.01)) is None


WAKERS: dict[str, Callable[[Store, BundleHandle], object]] = {
    "finalise": lambda store, _held: put(store, 1),
    "defer": lambda _store, held: held.defer(),
    "give back": lambda store, held: store.give_back("reader", held._take(), None),
}


@pytest.mark.parametrize("waker", WAKERS)
def test_a_waiting_thread_is_woken_by(waker: str) -> None:
    with opened() as store:
        store.subscribe("reader")
        put(store, 0)
        held = claim(store)
        with waiting(store) as future:
            WAKERS[waker](store, held)
            handle = future.result(BOUND)
        assert value(handle) == (1 if waker == "finalise" else 0)


def test_a_waiting_thread_is_woken_by_a_handle_that_is_dropped() -> None:
    with opened() as store:
        store.subscribe("reader")
        put(store, 0)
        held: BundleHandle | None = claim(store)
        with waiting(store) as future:
            assert held is not None
            held = None
            assert value(future.result(BOUND)) == 0


def test_a_waiting_thread_is_woken_when_a_deferred_bundle_is_due() -> None:
    with Store.open(ROOT, QUIET, disk=SimulatedDisk()) as store:
        store.subscribe("reader")
        put(store, 0)
        claim(store).defer(0.05)
        assert store.poll_next_bundle("reader") is None
        with waiting(store) as future:
            assert value(future.result(BOUND)) == 0


def test_a_waiting_thread_is_told_that_the_subscriber_is_not_active_any_more() -> None:
    with opened() as store:
        store.subscribe("reader")
        with waiting(store) as future:
            store.deactivate("reader")
            assert isinstance(future.exception(BOUND), SubscriberNotFound)
        store.activate("reader")
        with waiting(store) as future:
            store.unregister("reader")
            assert isinstance(future.exception(BOUND), SubscriberNotFound)


def test_a_waiting_thread_is_told_that_the_store_is_closed() -> None:
    with opened() as store:
        store.subscribe("reader")
        with waiting(store) as future:
            store.close()
            assert isinstance(future.exception(BOUND), StoreClosed)


def test_a_waiting_task_is_woken_and_a_cancelled_one_claims_nothing() -> None:
    async def use(store: Store) -> None:
        store.subscribe("reader")
        cancelled = asyncio.create_task(store.next_bundle_async("reader"))
        while not store._wakeup._tasks:  # noqa: ASYNC110 - nobody says when it waits
            await asyncio.sleep(0)
        await asyncio.to_thread(put, store, 0)  # its wakeup is on the way
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        if cancelled.cancelled():
            assert store.subscribers()[0].claimed == 0
        else:  # it was faster: the handle goes with the task
            del cancelled
        gc.collect()
        handle = await store.next_bundle_async("reader", BOUND)
        assert value(handle) == 0
        assert store._wakeup._tasks == []

    with opened() as store:
        asyncio.run(use(store))


# --- choosing -------------------------------------------------------------------------------------


def test_the_oldest_comes_first_or_the_newest_or_those_of_a_range() -> None:
    with opened() as store:
        store.subscribe("reader")
        put(store, 0, 1)
        put(store, 2, 3)
        put(store, 4)
        held = [claim(store), claim(store, Choose(newest_first=True))]
        held.append(claim(store, Choose(segments=range(1, 2))))
        held.append(claim(store, Choose(newest_first=True, segments=range(2))))
        assert [value(handle) for handle in held] == [0, 4, 2, 3]
        assert store.poll_next_bundle("reader", Choose(segments=range(1, 3))) is None
        assert value(claim(store)) == 1


def test_a_claim_runs_out() -> None:
    hand = HandClock()
    with opened(clock=hand) as store:
        store.subscribe("reader")
        put(store, 0)
        late = claim(store, Choose(claim_timeout=10))
        hand.now = 9.9
        assert store.poll_next_bundle("reader") is None
        hand.now = 10.0
        second = claim(store)
        with pytest.raises(BundleNotAvailable):
            late.ack()
        second.ack()
        assert store.pending_count("reader") == 0


def test_a_bundle_can_be_claimed_by_its_address() -> None:
    with opened() as store:
        store.subscribe("reader")
        put(store, 0, 1)
        ref = claim(store).defer(LONG)
        held = store.claim_bundle("reader", ref)
        assert value(held) == 0
        for missing in [ref, BundleRef(0, 2), BundleRef(7, 0)]:
            with pytest.raises(BundleNotAvailable):
                store.claim_bundle("reader", missing)


# --- handles --------------------------------------------------------------------------------------


def test_what_was_acknowledged_or_rejected_does_not_come_again() -> None:
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.subscribe("reader")
        put(store, 0, 1, 2)
        first = claim(store)
        first.ack()
        with pytest.raises(BundleNotAvailable):
            first.ack()
        claim(store).reject("not telemetry")
        assert store.losses["rejected.bundles.reader"] == 1
    with opened(disk) as store:
        assert store.losses["rejected.bundles.reader"] == 1
        store.subscribe("reader")
        assert drain(store) == [2]


def test_a_deferred_bundle_holds_up_nothing_and_comes_when_due() -> None:
    hand = HandClock()
    with opened(clock=hand) as store:
        store.subscribe("reader")
        put(store, 0, 1)
        claim(store).defer(5)
        assert drain(store) == [1]
        assert store.subscribers()[0].deferred == 1
        hand.now = 5.0
        assert drain(store) == [0]


def test_a_with_block_acknowledges_or_gives_back() -> None:
    with opened() as store:
        store.subscribe("reader")
        put(store, 0)
        with pytest.raises(ZeroDivisionError), claim(store):
            raise ZeroDivisionError
        with claim(store) as handle:
            assert value(handle) == 0
        assert store.poll_next_bundle("reader") is None
        assert store.pending_count("reader") == 0


def test_a_forgotten_handle_gives_its_bundle_back() -> None:
    with opened() as store:
        store.subscribe("reader")
        put(store, 0)
        claim(store)
        gc.collect()
        assert drain(store) == [0]


# --- reading on and on ----------------------------------------------------------------------------


def test_iterating_ends_when_the_store_closes() -> None:
    async def use(store: Store) -> list[int]:
        found = []
        async for handle in store.subscribe("reader", Start.earliest()):
            with handle:
                found.append(value(handle))
            if len(found) == 3:
                await asyncio.to_thread(store.close)
        return found

    with opened() as store:
        put(store, 0, 1)
        put(store, 2)
        assert asyncio.run(use(store)) == [0, 1, 2]


def test_counts_and_lag_say_how_far_a_subscriber_is() -> None:
    hand = HandClock()
    with opened(clock=hand) as store:
        store.subscribe("reader")
        assert store.all_drained()
        assert store.lag("reader") == 0.0
        store.ingest(plain_bundle(0))
        assert not store.all_drained(), "it is not even finalised"
        put(store, 1)
        hand.now = 60.0
        assert store.pending_count("reader") == 2
        assert store.lag("reader") == pytest.approx(60.0)
        drain(store)
        assert store.pending_count("reader") == 0
        assert store.all_drained()
        with pytest.raises(SubscriberNotFound):
            store.lag("nobody")
        with pytest.raises(SubscriberNotFound):
            store.pending_count("nobody")


def test_two_subscribers_are_independent() -> None:
    with opened() as store:
        store.subscribe("reader")
        store.subscribe("other")
        put(store, 0, 1)
        held = claim(store)
        assert drain(store, "other") == [0, 1]
        assert (store.pending_count("reader"), store.pending_count("other")) == (2, 0)
        store.maintain()
        assert store._core.segments.numbers == [0]
        held.ack()
        assert drain(store) == [1]
        store.maintain()
        assert store._core.segments.numbers == []
