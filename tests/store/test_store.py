"""The public ``Store``: what a receipt promises, what it waits for, and when it is refused."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bundles import plain_bundle

from quiver import (
    Ack,
    Durability,
    IngestFailed,
    Receipt,
    RetentionConfig,
    SegmentConfig,
    Start,
    StorageAtCapacity,
    Store,
    StoreClosed,
    StoreConfig,
    StoreLocked,
    WalConfig,
)
from quiver.testing import Call, SimulatedDisk
from quiver.wal.entry import prepare_entry

ROOT = Path("/store")
WAL = ROOT / "wal"
ENTRY_SIZE = prepare_entry(plain_bundle(0)).size
LONG = 3600.0
BOUND = 60.0
OPEN_LONG = SegmentConfig(max_open_duration=LONG)
QUIET = StoreConfig(maintain_interval=LONG, segment=OPEN_LONG)
"""Nothing happens in the background unless a test asks for it."""


@dataclass
class Brake:
    """Holds the syncs of the log until it is let go."""

    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, call: Call) -> None:
        if call.kind == "sync" and call.path == WAL / "quiver.wal":
            self.reached.set()
            assert self.go.wait(BOUND)


@contextmanager
def opened(disk: SimulatedDisk, config: StoreConfig = QUIET) -> Iterator[Store]:
    with Store.open(ROOT, config, disk=disk) as store:
        store.subscribe("reader", Start.earliest())
        store.flush()  # the first maintenance is over: from here on the disk is silent
        disk.calls.clear()
        yield store


def drain(store: Store, subscriber: str = "reader") -> list[int]:
    """Acknowledge all that is there, and tell the bundles by their first value."""
    found = []
    while (handle := store.poll_next_bundle(subscriber)) is not None:
        batch = handle.bundle.batch(30)
        assert batch is not None
        found.append(int(batch.column(0)[0].as_py()))
        handle.ack()
    return found


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something is so; far longer than it can take."""
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def ingest_many(store: Store, indices: Iterable[int], taken: list[int]) -> None:
    for index in indices:
        store.ingest(plain_bundle(index))
        taken.append(index)


def syncs(disk: SimulatedDisk) -> int:
    return sum(call.kind == "sync" and call.path == WAL / "quiver.wal" for call in disk.calls)


def power_cut(disk: SimulatedDisk) -> SimulatedDisk:
    """The disk when nothing survives but what was made durable."""
    return next(disk.crash_states(limit=1))


def break_segments(disk: SimulatedDisk) -> None:
    """No segment can be written until ``disk.before_call`` is None again."""

    def refuse(call: Call) -> None:
        if call.kind == "create" and call.path.parent == ROOT / "segments":
            raise OSError(errno.EIO, "broken", str(call.path))

    disk.before_call = refuse


# --- receipts -------------------------------------------------------------------------------------


def test_a_receipt_comes_after_the_sync() -> None:
    disk = SimulatedDisk()
    brake = Brake()
    with opened(disk) as store, ThreadPoolExecutor() as pool:
        disk.before_call = brake
        receipt = pool.submit(store.ingest, plain_bundle(0))
        assert brake.reached.wait(BOUND)
        assert [call.kind for call in disk.calls] == ["append"]
        assert not receipt.done()
        brake.go.set()
        assert receipt.result(BOUND).sequence == 0
        assert [call.kind for call in disk.calls] == ["append", "sync"]
        rebooted = power_cut(disk)
    with opened(rebooted) as store:
        assert drain(store) == [0]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_write_or_sync_fails_the_ingest_and_the_next_one_works(failing: int) -> None:
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.ingest(plain_bundle(0))
        disk.fail_call(failing, errno.EIO)
        with pytest.raises(IngestFailed) as failure:
            store.ingest(plain_bundle(1))
        assert failure.value.retryable
        assert store.metrics.get("quiver.ingest.failures_total") == 1
        assert store.ingest(plain_bundle(2)).sequence > 1, "a number was given out twice"
        assert {"quiver.wal", "quiver.wal.1"} <= set(disk.list_directory(WAL))
        rebooted = power_cut(disk)
        store.flush()
        assert drain(store) == [0, 2]
    with opened(rebooted) as store:
        found = drain(store)
        assert found[0] == 0
        assert found[-1] == 2


def test_nothing_of_a_group_is_acknowledged_when_its_sync_fails() -> None:
    disk = SimulatedDisk()
    brake = Brake()
    with opened(disk) as store, ThreadPoolExecutor(8) as pool:
        disk.before_call = brake
        first = pool.submit(store.ingest, plain_bundle(0))
        assert brake.reached.wait(BOUND)
        group = [pool.submit(store.ingest, plain_bundle(i)) for i in range(1, 6)]
        eventually(lambda: len(store._committer._waiting) == 5)
        disk.fail_call(3, errno.EIO)  # the sync that is held, the write of the group, its sync
        brake.go.set()
        assert first.result(BOUND).sequence == 0
        assert all(isinstance(future.exception(BOUND), IngestFailed) for future in group)
        store.ingest(plain_bundle(6))
        store.flush()
        assert drain(store) == [0, 6]


def test_bundles_of_many_threads_share_a_sync() -> None:
    disk = SimulatedDisk()
    brake = Brake()
    with opened(disk) as store, ThreadPoolExecutor(8) as pool:
        disk.before_call = brake
        futures = [pool.submit(store.ingest, plain_bundle(0))]
        assert brake.reached.wait(BOUND)
        futures += [pool.submit(store.ingest, plain_bundle(i)) for i in range(1, 8)]
        eventually(lambda: len(store._committer._waiting) == 7)
        brake.go.set()
        receipts = [future.result(BOUND) for future in futures]
        assert syncs(disk) == 2
        assert sorted(receipt.sequence for receipt in receipts) == list(range(8))
        assert len({receipt.position for receipt in receipts}) == 8
        store.flush()
        assert sorted(drain(store)) == list(range(8))


def test_bundles_of_many_tasks_share_a_sync() -> None:
    disk = SimulatedDisk()
    brake = Brake()

    async def ingest_all(store: Store) -> list[Receipt]:
        tasks = [asyncio.create_task(store.ingest_async(plain_bundle(i))) for i in range(50)]
        await asyncio.sleep(0)  # all of them are in the queue now, or written
        brake.go.set()
        return await asyncio.gather(*tasks)

    with opened(disk) as store:
        disk.before_call = brake
        receipts = asyncio.run(ingest_all(store))
        assert syncs(disk) <= 2
        assert sorted(receipt.sequence for receipt in receipts) == list(range(50))
        store.flush()
        assert len(drain(store)) == 50


def test_a_cancelled_ingest_is_stored_all_the_same() -> None:
    disk = SimulatedDisk()
    brake = Brake()

    async def cancel(store: Store) -> None:
        task = asyncio.create_task(store.ingest_async(plain_bundle(0)))
        await asyncio.to_thread(brake.reached.wait, BOUND)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        brake.go.set()
        await store.ingest_async(plain_bundle(1))

    with opened(disk) as store:
        disk.before_call = brake
        asyncio.run(cancel(store))
        store.flush()
        assert drain(store) == [0, 1]


def test_ack_written_does_not_wait_for_a_sync() -> None:
    disk = SimulatedDisk()
    config = StoreConfig(
        ack=Ack.WRITTEN,
        maintain_interval=LONG,
        segment=OPEN_LONG,
        wal=WalConfig(flush_interval=LONG),
    )
    with opened(disk, config) as store:
        assert store.ingest(plain_bundle(0)).sequence == 0
        assert [call.kind for call in disk.calls] == ["append"]
    assert syncs(disk) == 1, "closing did not sync"


def test_ack_written_syncs_an_idle_tail_by_itself() -> None:
    disk = SimulatedDisk()
    config = StoreConfig(
        ack=Ack.WRITTEN,
        maintain_interval=LONG,
        segment=OPEN_LONG,
        wal=WalConfig(flush_interval=0.02),
    )
    with opened(disk, config) as store:
        receipts = [store.ingest(plain_bundle(i)) for i in range(3)]
        assert receipts == [Receipt(i, (i + 1) * ENTRY_SIZE) for i in range(3)]
        eventually(lambda: store._core.intake.wal.synced_position == 3 * ENTRY_SIZE)
        rebooted = power_cut(disk)
    with opened(rebooted) as store:
        assert drain(store) == [0, 1, 2]


# --- modes ----------------------------------------------------------------------------------------


def mode(durability: Durability) -> StoreConfig:
    return StoreConfig(durability=durability, maintain_interval=LONG, segment=OPEN_LONG)


def test_segment_only_writes_no_log() -> None:
    disk = SimulatedDisk()
    with opened(disk, mode(Durability.SEGMENT_ONLY)) as store:
        assert store.ingest(plain_bundle(0)) == Receipt(0, None)
        assert disk.calls == []
        store.flush()
        assert not [call for call in disk.calls if call.path.parent == WAL]
        store.ingest(plain_bundle(1))
        rebooted = power_cut(disk)
    with opened(rebooted, mode(Durability.SEGMENT_ONLY)) as store:
        assert drain(store) == [0], "only what was finalised survives a power cut"


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("first", list(Durability))
def test_the_mode_may_change_over_a_restart(first: Durability, crash: bool) -> None:
    """And back again; nothing is lost, nothing comes twice, no number is used twice."""
    disk = SimulatedDisk()
    second = next(m for m in Durability if m is not first)
    sequences: list[int] = []
    delivered: list[int] = []
    for turn, durability in enumerate([first, second, first]):
        with opened(disk, mode(durability)) as store:
            sequences += [store.ingest(plain_bundle(10 * turn)).sequence]
            store.flush()
            delivered += drain(store)
            store.maintain()
            sequences += [store.ingest(plain_bundle(10 * turn + 1)).sequence]
            if durability is Durability.SEGMENT_ONLY:
                store.flush()
            if crash:
                rebooted = power_cut(disk)
        disk = rebooted if crash else disk
    with opened(disk, mode(second)) as store:
        delivered += drain(store)
    assert sorted(delivered) == [0, 1, 10, 11, 20, 21]
    assert len(set(sequences)) == 6


# --- when a segment is finalised ------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        SegmentConfig(target_size=1, max_open_duration=LONG),
        SegmentConfig(max_open_duration=0.02),
        SegmentConfig(max_stream_count=1, max_open_duration=LONG),
        SegmentConfig(max_bundles=1, max_open_duration=LONG),
    ],
    ids=["target_size", "max_open_duration", "max_stream_count", "max_bundles"],
)
def test_a_segment_is_finalised_without_being_asked(limits: SegmentConfig) -> None:
    config = StoreConfig(maintain_interval=0.01, segment=limits)
    with Store.open(ROOT, config, disk=SimulatedDisk()) as store:
        store.subscribe("reader", Start.earliest())
        store.ingest(plain_bundle(7))
        handle = store.next_bundle("reader", BOUND)
        assert handle is not None
        handle.ack()


def test_no_segment_is_finalised_before_it_is_due() -> None:
    config = StoreConfig(maintain_interval=0.001, segment=OPEN_LONG)
    with opened(SimulatedDisk(), config) as store:
        store.ingest(plain_bundle(0))
        assert store.next_bundle("reader", 0.05) is None
        store.flush()
        assert drain(store) == [0]


def test_max_bundles_is_the_most_that_one_segment_gets() -> None:
    config = StoreConfig(
        maintain_interval=LONG, segment=SegmentConfig(max_bundles=2, max_open_duration=LONG)
    )
    with opened(SimulatedDisk(), config) as store:
        for index in range(5):
            store.ingest(plain_bundle(index))
        store.flush()
        segments = store._core.segments
        counts = [info.bundle_count for n in segments.numbers if (info := segments.info(n))]
        assert counts == [2, 2, 1]


def test_closing_finalises_what_is_open() -> None:
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.ingest(plain_bundle(0))
    assert len(disk.list_directory(ROOT / "segments")) == 1
    with opened(disk) as store:
        assert drain(store) == [0]


# --- full -----------------------------------------------------------------------------------------


def test_too_many_frozen_segments_refuse_bundles_until_they_are_written() -> None:
    disk = SimulatedDisk()
    limits = SegmentConfig(max_bundles=1, max_frozen=1, max_open_duration=LONG)
    with opened(disk, StoreConfig(maintain_interval=LONG, segment=limits)) as store:
        break_segments(disk)
        store.ingest(plain_bundle(0))
        with pytest.raises(StorageAtCapacity) as failure:
            store.ingest(plain_bundle(1))
        assert failure.value.retryable
        disk.before_call = None
        store.ingest(plain_bundle(2))
        store.flush()
        assert drain(store) == [0, 2]


def test_a_full_log_refuses_bundles_until_it_is_reclaimed() -> None:
    disk = SimulatedDisk()
    log = WalConfig(rotation_target=ENTRY_SIZE, max_size=6 * ENTRY_SIZE)
    config = StoreConfig(maintain_interval=LONG, segment=OPEN_LONG, wal=log)
    with opened(disk, config) as store:
        break_segments(disk)
        taken: list[int] = []
        with pytest.raises(StorageAtCapacity) as failure:
            ingest_many(store, range(10), taken)
        assert failure.value.retryable
        assert 3 <= len(taken) <= 6
        disk.before_call = None
        for index in range(10, 40):
            store.ingest(plain_bundle(index))
        assert store._core.intake.wal.size <= log.max_size
        store.flush()
        assert drain(store) == [*taken, *range(10, 40)]


def test_a_log_that_is_one_file_long_is_reclaimed_too() -> None:
    log = WalConfig(rotation_target=6 * ENTRY_SIZE, max_size=6 * ENTRY_SIZE)
    config = StoreConfig(maintain_interval=LONG, segment=OPEN_LONG, wal=log)
    with opened(SimulatedDisk(), config) as store:
        for index in range(20):
            store.ingest(plain_bundle(index))


def test_callers_may_only_queue_so_many_bytes() -> None:
    disk = SimulatedDisk()
    brake = Brake()
    config = StoreConfig(max_waiting_bytes=ENTRY_SIZE, maintain_interval=LONG, segment=OPEN_LONG)
    with opened(disk, config) as store, ThreadPoolExecutor(2) as pool:
        disk.before_call = brake
        first = pool.submit(store.ingest, plain_bundle(0))
        assert brake.reached.wait(BOUND)
        second = pool.submit(store.ingest, plain_bundle(1))
        eventually(lambda: len(store._committer._waiting) == 1)
        with pytest.raises(StorageAtCapacity, match="max_waiting_bytes") as failure:
            store.ingest(plain_bundle(2))
        assert failure.value.retryable
        brake.go.set()
        assert {first.result(BOUND).sequence, second.result(BOUND).sequence} == {0, 1}
        store.ingest(plain_bundle(3))
        store.flush()
        assert drain(store) == [0, 1, 3]


# --- one writer -----------------------------------------------------------------------------------

HOLDER = """
import sys
from quiver import Store
with Store.open(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_a_second_opener_is_told_who_has_it(tmp_path: Path) -> None:
    config = StoreConfig(retention=RetentionConfig(min_free_space=0))
    with Store.open(tmp_path, config), pytest.raises(StoreLocked, match=f"process {os.getpid()} "):
        Store.open(tmp_path)
    Store.open(tmp_path).close()


def test_a_second_process_is_told_who_has_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(StoreLocked, match=f"process {holder.pid} "):
            Store.open(tmp_path)
        holder.communicate("", timeout=BOUND)
    assert holder.returncode == 0
    Store.open(tmp_path).close()


# --- closing --------------------------------------------------------------------------------------


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.close()
    store.close()
    Store.open(tmp_path).close()


def test_a_closed_store_takes_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.close()
    with pytest.raises(StoreClosed):
        store.ingest(plain_bundle(0))
    with pytest.raises(StoreClosed):
        asyncio.run(store.ingest_async(plain_bundle(0)))
    with pytest.raises(StoreClosed):
        store.flush()


def test_both_kinds_of_with_close_the_store(tmp_path: Path) -> None:
    async def use() -> Store:
        async with Store.open(tmp_path) as store:
            store.subscribe("reader")
            await store.ingest_async(plain_bundle(0))
            await store.flush_async()
            assert store.pending_count("reader") == 1
        return store

    with pytest.raises(StoreClosed):
        asyncio.run(use()).ingest(plain_bundle(1))
    with Store.open(tmp_path) as store:
        store.subscribe("reader")
        assert drain(store) == [0]
    with pytest.raises(StoreClosed):
        store.ingest(plain_bundle(1))
