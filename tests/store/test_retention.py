"""What is deleted, what is refused, and that every loss is counted before it happens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from bundles import START_NS, numbers, plain_bundle

from quiver import (
    BundleHandle,
    BundleNotAvailable,
    Choose,
    Progress,
    RecordBundle,
    RetentionConfig,
    SegmentConfig,
    SegmentProgress,
    SizeCapPolicy,
    Start,
    StorageAtCapacity,
    Store,
    StoreConfig,
    SubscriberNotFound,
    WalConfig,
)
from quiver.store.core import Clock, StoreCore
from quiver.subscriber.progress import load_progress, progress_path, store_progress
from quiver.subscriber.registry import Phase
from quiver.testing import Call, SimulatedDisk

ROOT = Path("/store")
SEGMENTS = ROOT / "segments"
LONG = 3600.0
SMALL_LOG = WalConfig(rotation_target=1, max_size=10**6)
ROWS = 1000
DROP = SizeCapPolicy.DROP_OLDEST


@dataclass
class HandClock:
    """A clock that stands still until it is moved."""

    now: float = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: START_NS + int(self.now * 1e9))


def settings(retention: RetentionConfig, log: WalConfig = SMALL_LOG) -> StoreConfig:
    return StoreConfig(
        maintain_interval=LONG,
        wal=log,
        segment=SegmentConfig(max_open_duration=LONG),
        retention=retention,
    )


@contextmanager
def opened(
    retention: RetentionConfig | None = None,
    *,
    disk: SimulatedDisk | None = None,
    clock: HandClock | None = None,
    log: WalConfig = SMALL_LOG,
) -> Iterator[Store]:
    config = settings(retention or RetentionConfig(), log)
    hand = clock or HandClock()
    with Store.open(ROOT, config, disk=disk or SimulatedDisk(), clock=hand.clock) as store:
        store.flush()
        yield store


def bundle(index: int, rows: int = ROWS) -> RecordBundle:
    """About eight kilobytes, ingested ``index`` seconds after the start."""
    return RecordBundle.from_batches(
        {30: numbers(*range(index, index + rows))},
        ingestion_time_ns=START_NS + index * 10**9,
        item_count=rows,
    )


def put(store: Store, *indices: int, rows: int = ROWS) -> None:
    """One segment for each."""
    for index in indices:
        store.ingest(bundle(index, rows))
        store.flush()


def claim(store: Store, number: int) -> BundleHandle:
    handle = store.poll_next_bundle("reader", Choose(segments=range(number, number + 1)))
    assert handle is not None
    return handle


def segments(store: Store) -> list[int]:
    return store._core.segments.numbers


def segment_size() -> int:
    with opened() as store:
        store.subscribe("reader")
        put(store, 0)
        info = store._core.segments.info(0)
        assert info is not None
        return info.size


# --- resolved -------------------------------------------------------------------------------------


def test_resolved_segments_go_in_any_order() -> None:
    disk = SimulatedDisk()
    with opened(disk=disk) as store:
        store.subscribe("reader")
        put(store, 0, 1, 2, 3)
        claim(store, 2).ack()
        store.maintain()
        assert segments(store) == [0, 1, 3]
        claim(store, 0).ack()
        store.maintain()
        assert segments(store) == [1, 3]
        assert not store.losses
    with opened(disk=disk) as store:
        assert segments(store) == [1, 3]
        store.subscribe("reader")
        assert claim(store, 1).ref.segment == 1


def test_without_a_subscriber_nothing_is_resolved() -> None:
    with opened() as store:
        put(store, 0)
        store.maintain()
        assert segments(store) == [0]


def test_the_progress_is_durable_before_the_file_goes() -> None:
    disk = SimulatedDisk()
    with opened(disk=disk) as store:
        store.subscribe("reader")
        put(store, 0, 1)
        claim(store, 0).ack()
        disk.calls.clear()
        store.maintain()
        calls = [(call.kind, call.path.name) for call in disk.calls]
    gone = next(i for i, (kind, name) in enumerate(calls) if kind == "unlink" and "qseg" in name)
    before = [call for call in calls[:gone] if call[0] == "rename"]
    assert [name for _, name in before] == ["quiver.sub.reader.tmp", "quiver.ledger.tmp"]
    assert calls[gone + 1] == ("sync_dir", "segments")


def test_headroom_keeps_the_newest_of_the_resolved() -> None:
    headroom = 2 * segment_size() + 100
    with opened(RetentionConfig(headroom=headroom)) as store:
        store.subscribe("reader")
        put(store, 0, 1, 2, 3)
        for number in range(4):
            claim(store, number).ack()
        store.maintain()
        assert segments(store) == [2, 3]


# --- size -----------------------------------------------------------------------------------------


def test_backpressure_refuses_until_somebody_resolved_something() -> None:
    with opened(RetentionConfig(size_cap=5 * segment_size())) as store:
        store.subscribe("reader")
        put(store, 0, 1)
        with pytest.raises(StorageAtCapacity) as failure:
            put(store, 2, 3, 4, 5)
        assert failure.value.retryable
        kept = segments(store)
        store.maintain()
        assert segments(store) == kept, "backpressure drops nothing"
        assert not store.losses
        claim(store, 0).ack()
        claim(store, 1).ack()
        store.maintain()
        store.ingest(bundle(6))


@pytest.mark.parametrize("policy", list(SizeCapPolicy))
def test_a_cap_below_the_rotation_target_does_not_wedge_the_store(policy: SizeCapPolicy) -> None:
    retention = RetentionConfig(size_cap=10 * segment_size(), size_cap_policy=policy)
    with opened(retention, log=WalConfig()) as store:
        store.subscribe("reader")
        for index in range(30):
            put(store, index)  # refused for good although everything is resolved
            while (handle := store.poll_next_bundle("reader")) is not None:
                handle.ack()
            store.maintain()


def test_drop_oldest_makes_room_and_counts_what_went() -> None:
    disk = SimulatedDisk()
    cap = 4 * segment_size()
    with opened(disk=disk) as store:
        store.subscribe("reader")
        put(store, *range(8))
    with opened(RetentionConfig(size_cap=cap, size_cap_policy=DROP), disk=disk) as store:
        dropped = store.losses["dropped.segments"]
        assert segments(store) == list(range(dropped, 8))
        assert 4 <= dropped <= 6, "as many as it takes, and no more"
        assert store._core.retention.used() < cap
        assert store.losses["dropped.bundles"] == dropped
        assert store.losses["dropped.bundles.reader"] == dropped
        assert store.losses["dropped.items"] == dropped * ROWS
        assert store.losses["dropped.bytes"] == dropped * segment_size()
        losses = store.losses
        rebooted = next(disk.crash_states(limit=1))
    with opened(disk=rebooted) as store:
        assert store.losses == losses
        store.subscribe("reader")
        assert store.pending_count("reader") == 8 - dropped


@pytest.mark.parametrize("subscribed", [True, False])
def test_drop_oldest_always_makes_room_for_the_next_bundle(subscribed: bool) -> None:
    retention = RetentionConfig(size_cap=4 * segment_size(), size_cap_policy=DROP)
    with opened(retention) as store:
        if subscribed:
            store.subscribe("reader")
        for index in range(12):
            try:
                store.ingest(bundle(index))
            except StorageAtCapacity:
                store.maintain()
                store.ingest(bundle(index))
            store.flush()
        assert store.losses["dropped.segments"] > 0


def test_a_drop_is_durable_before_the_file_goes() -> None:
    disk = SimulatedDisk()
    retention = RetentionConfig(size_cap=3 * segment_size(), size_cap_policy=DROP)
    with opened(disk=disk) as store:
        store.subscribe("reader")
        put(store, 0, 1, 2, 3)
    core = StoreCore(disk, ROOT, settings(retention), HandClock().clock)
    seen: list[tuple[int, int]] = []

    def look() -> None:
        for state in disk.crash_states(limit=32):
            left = [name for name in state.list_directory(SEGMENTS) if name.endswith(".qseg")]
            with opened(disk=state) as store:
                seen.append((4 - len(left), store.losses["dropped.segments"]))

    disk.before_call = lambda _call: look()
    core.maintain()
    look()
    disk.before_call = None
    core.close()
    assert max(gone for gone, _ in seen) > 0
    assert all(counted >= gone for gone, counted in seen)


def test_drop_oldest_leaves_what_somebody_works_on() -> None:
    retention = RetentionConfig(size_cap=4 * segment_size(), size_cap_policy=DROP)
    disk = SimulatedDisk()
    with opened(disk=disk) as store:
        store.subscribe("reader")
        put(store, 0, 1, 2, 3, 4, 5)
    with opened(RetentionConfig(), disk=disk) as store:
        store.subscribe("reader")
        held = claim(store, 0)
        store._core.retention.config = retention
        store.maintain()
        assert segments(store)[0] == 0
        assert 1 not in segments(store)
        held.ack()
        store.maintain()
        assert 0 not in segments(store)
        assert store.losses["dropped.bundles.reader"] == store.losses["dropped.segments"]


def test_drop_oldest_works_without_a_subscriber() -> None:
    disk = SimulatedDisk()
    with opened(disk=disk) as store:
        put(store, *range(8))
    retention = RetentionConfig(size_cap=4 * segment_size(), size_cap_policy=DROP)
    with opened(retention, disk=disk) as store:
        assert store.losses["dropped.segments"] >= 4
        store.ingest(plain_bundle(99, rows=1))


# --- age ------------------------------------------------------------------------------------------


def test_old_segments_expire_by_the_time_of_their_ingestion() -> None:
    disk = SimulatedDisk()
    hand = HandClock()
    retention = RetentionConfig(max_age=100)
    with opened(retention, disk=disk, clock=hand) as store:
        store.subscribe("reader")
        put(store, 0, 50)
        hand.now = 100.0
        store.maintain()
        assert segments(store) == [0, 1]
        hand.now = 101.0
        store.maintain()
        assert segments(store) == [1]
        assert store.losses["expired.bundles.reader"] == 1
        assert store.losses["expired.items"] == ROWS
    with opened(retention, disk=disk, clock=hand) as store:
        assert store.losses["expired.segments"] == 1


def test_age_beats_a_claim_and_the_holder_is_told() -> None:
    hand = HandClock()
    with opened(RetentionConfig(max_age=100), clock=hand) as store:
        store.subscribe("reader")
        put(store, 0)
        held = claim(store, 0)
        hand.now = 200.0
        store.maintain()
        assert segments(store) == []
        assert held.bundle.row_count == ROWS, "what was handed out stays readable"
        with pytest.raises(BundleNotAvailable):
            held.ack()
        assert store.losses["expired.bundles.reader"] == 1


def test_what_everybody_resolved_does_not_expire() -> None:
    hand = HandClock()
    with opened(RetentionConfig(max_age=100), clock=hand) as store:
        store.subscribe("reader")
        put(store, 0)
        claim(store, 0).ack()
        hand.now = 200.0
        store.maintain()
        assert segments(store) == []
        assert not store.losses, "resolved wins over too old"


def test_age_is_looked_at_before_size() -> None:
    hand = HandClock()
    retention = RetentionConfig(max_age=100, size_cap=4 * segment_size(), size_cap_policy=DROP)
    disk = SimulatedDisk()
    with opened(disk=disk, clock=hand) as store:
        store.subscribe("reader")
        put(store, 0, 1, 2, 500)
    hand.now = 300.0
    with opened(retention, disk=disk, clock=hand) as store:
        assert segments(store) == [3]
        assert store.losses["expired.segments"] == 3
        assert store.losses["dropped.segments"] == 0


# --- the file system ------------------------------------------------------------------------------


def test_a_full_file_system_refuses_bundles_until_there_is_room() -> None:
    disk = SimulatedDisk(capacity_bytes=100_000)
    with opened(RetentionConfig(min_free_space=50_000), disk=disk) as store:
        store.subscribe("reader")
        with pytest.raises(StorageAtCapacity, match="min_free_space") as failure:
            put(store, *range(20))
        assert failure.value.retryable
        assert disk.room() > 10_000, "it was refused in time"
        for number in segments(store):
            claim(store, number).ack()
        store.maintain()
        store.ingest(bundle(99))


def test_a_full_file_system_drops_the_oldest_where_that_is_the_policy() -> None:
    disk = SimulatedDisk(capacity_bytes=100_000)
    retention = RetentionConfig(min_free_space=50_000, size_cap_policy=DROP)
    with opened(retention, disk=disk) as store:
        store.subscribe("reader")
        put(store, *range(20))
        assert store.losses["dropped.segments"] > 0
        assert disk.room() > 10_000


def test_resolved_segments_are_deleted_although_a_segment_cannot_be_written() -> None:
    disk = SimulatedDisk()
    with opened(RetentionConfig(min_free_space=0), disk=disk) as store:
        store.subscribe("reader")
        put(store, 0, 1, 2)
        for number in range(3):
            claim(store, number).ack()
        store.ingest(bundle(3))
        # Room for progress and ledger, not for another segment.
        disk.capacity_bytes = 10**9
        disk.capacity_bytes = 10**9 - disk.room() + 4000
        with suppress(OSError):
            store.flush()
        with suppress(OSError):
            store.flush()
        left = segments(store)
        disk.capacity_bytes = None
    assert not {0, 1, 2} & set(left), "what nobody needs keeps the disk full"


# --- counting -------------------------------------------------------------------------------------


def test_a_loss_that_is_counted_while_the_ledger_is_written_is_not_forgotten() -> None:
    disk = SimulatedDisk()
    with opened(disk=disk) as store:
        store.subscribe("reader")
        put(store, 0, 1)
        held = [claim(store, 0), claim(store, 1)]

        def reject(call: Call) -> None:
            if call.kind == "sync" and call.path.name == "quiver.ledger.tmp" and held:
                held.pop().reject("unusable")

        held.pop().reject("unusable")
        disk.before_call = reject
        store.maintain()
        disk.before_call = None
        assert store.losses["rejected.bundles.reader"] == 2
    with opened(disk=disk) as store:
        assert store.losses["rejected.bundles.reader"] == 2


def test_two_threads_may_count_losses_at_once() -> None:
    disk = SimulatedDisk()
    with opened(disk=disk) as store, ThreadPoolExecutor(1) as pool:
        store.subscribe("reader")
        store.register("other", Start.earliest())
        put(store, 0)
        started: list[Future[int]] = []

        def meddle(call: Call) -> None:
            if call.kind == "sync" and call.path.name == "quiver.ledger.tmp" and not started:
                started.append(pool.submit(store.unregister, "other"))
                wait(started, 1)  # where it may not run beside this one, it comes after it

        claim(store, 0).reject("unusable")
        disk.before_call = meddle
        store.flush()
        assert started[0].result(60) == 1
        disk.before_call = None


# --- a subscriber in another process --------------------------------------------------------------


def test_progress_of_another_process_is_read_before_anything_is_reclaimed() -> None:
    disk = SimulatedDisk()
    path = progress_path(ROOT, "lake")
    with opened(disk=disk) as store:
        store.register("lake", Start.earliest(), external=True)
        with pytest.raises(SubscriberNotFound):
            store.activate("lake")
        store.ingest(bundle(0))
        put(store, 1, 2)
        store.maintain()
        assert segments(store) == [0, 1]
        store_progress(disk, path, Progress((SegmentProgress(0, 2, 0b01),)))
        store.maintain()
        assert segments(store) == [0, 1], "one bundle is left to do"
        assert store.pending_count("lake") == 2
        store_progress(disk, path, Progress((SegmentProgress(0, 2, 0b11),)))
        written = bytes(disk.read(path))
        store.maintain()
        assert segments(store) == [1]
        assert [info.phase for info in store.subscribers()] == [Phase.EXTERNAL]
    assert bytes(disk.read(path)) == written, "its file is its own"


def test_its_file_is_its_own_after_a_restart_too() -> None:
    disk = SimulatedDisk()
    path = progress_path(ROOT, "lake")
    first = SegmentProgress(0, 1, 1)
    with opened(disk=disk) as store:
        store.register("lake", Start.earliest(), external=True)
        put(store, 0, 1)
        store_progress(disk, path, Progress((first,)))
        rebooted = next(disk.crash_states(limit=1))
    core = StoreCore(rebooted, ROOT, settings(RetentionConfig()), HandClock().clock)
    try:
        store_progress(rebooted, path, Progress((first, SegmentProgress(1, 1, 1))))
        core.maintain()  # before the other process is registered again
        assert SegmentProgress(1, 1, 1) in load_progress(rebooted, path).entries
    finally:
        core.close()
