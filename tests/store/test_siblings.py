"""Several stores under one root and one cap."""

from __future__ import annotations

from pathlib import Path

from bundles import START_NS, numbers

from quiver import RecordBundle, RetentionConfig, SizeCapPolicy, StorageAtCapacity, StoreConfig
from quiver.store.core import Clock, Start, StoreCore
from quiver.store.siblings import Siblings, split_cap
from quiver.testing import SimulatedDisk

ROOT = Path("/data")
CLOCK = Clock(lambda: 0.0, lambda: START_NS)


def core(disk: SimulatedDisk, name: str, cap: int, policy: SizeCapPolicy) -> StoreCore:
    retention = RetentionConfig(size_cap=cap, size_cap_policy=policy, shared=True, min_free_space=0)
    store = StoreCore(disk, ROOT / name, StoreConfig(retention=retention), CLOCK)
    store.register("x", Start.earliest())
    return store


def put(store: StoreCore, *times: int) -> None:
    """A segment of its own for each bundle."""
    for time in times:
        bundle = RecordBundle.from_batches(
            {30: numbers(*range(200))}, ingestion_time_ns=START_NS + time
        )
        store.commit([store.prepare(bundle)])
        store.finalise_due(at_once=True)


def test_a_cap_can_be_split() -> None:
    assert split_cap(100, 3) == 33
    assert split_cap(100, 0) == 100


def test_the_store_with_the_globally_oldest_segment_drops_it() -> None:
    disk = SimulatedDisk()
    first = core(disk, "core_0", 40_000, SizeCapPolicy.DROP_OLDEST)
    second = core(disk, "core_1", 40_000, SizeCapPolicy.DROP_OLDEST)
    put(first, 10, 30)
    put(second, 20, 40)
    assert Siblings(disk, ROOT / "core_0").oldest_ns() == START_NS + 20
    total = first.segments.size + second.segments.size
    for store in (first, second):
        object.__setattr__(store.retention.config, "size_cap", total)
    second.maintain()
    assert len(second.segments.numbers) == 2
    first.maintain()
    assert [len(store.segments.numbers) for store in (first, second)] == [1, 2]
    second.maintain()
    assert len(second.segments.numbers) == 2


def test_a_store_does_not_wait_for_ever_for_one_that_does_not_run() -> None:
    disk = SimulatedDisk()
    gone = core(disk, "core_0", 10**9, SizeCapPolicy.DROP_OLDEST)
    put(gone, 10)
    gone.close()
    store = core(disk, "core_1", 1, SizeCapPolicy.DROP_OLDEST)
    object.__setattr__(store.retention.config, "size_cap", 10**9)
    put(store, 20)
    object.__setattr__(store.retention.config, "size_cap", 1)
    for _ in range(store.retention.config.patience):
        store.maintain()
        assert len(store.segments.numbers) == 1
    store.maintain()
    assert store.segments.numbers == []


def test_the_cap_counts_what_the_others_hold() -> None:
    disk = SimulatedDisk()
    first = core(disk, "core_0", 30_000, SizeCapPolicy.BACKPRESSURE)
    second = core(disk, "core_1", 30_000, SizeCapPolicy.BACKPRESSURE)
    refused = False
    for time in range(20):
        for store in (first, second):
            store.maintain()
            try:
                put(store, time)
            except StorageAtCapacity:
                refused = True
    assert refused
    used = first.retention.used() + second.retention.used()
    segment = max(info.size for info in [first.segments.info(0)] if info is not None)
    assert used <= 30_000 + 2 * segment
