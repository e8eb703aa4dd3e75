"""Defects of the reference implementation, one test each; then some that were our own."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest
from bundles import START_NS, plain_bundle

from quiver import (
    Durability,
    InvalidConfig,
    Receipt,
    RecordBundle,
    RetentionConfig,
    SegmentConfig,
    SizeCapPolicy,
    Start,
    StorageAtCapacity,
    Store,
    StoreClosed,
    StoreConfig,
    WalConfig,
)
from quiver.store.core import Clock, StoreCore
from quiver.store.intake import Intent
from quiver.store.threads import AsyncTicket, Ticket
from quiver.testing import Call, SimulatedDisk, explore
from quiver.wal.cursor import load_cursor
from quiver.wal.entry import prepare_entry
from quiver.wal.header import HEADER_SIZE

ROOT = Path("/store")
WAL = ROOT / "wal"
SEGMENTS = ROOT / "segments"
ENTRY_SIZE = prepare_entry(plain_bundle(0)).size
LONG = 3600.0
BOUND = 60.0
SMALL_LOG = WalConfig(rotation_target=2 * ENTRY_SIZE, max_size=100 * ENTRY_SIZE)
STANDING_STILL = Clock(lambda: 0.0, lambda: START_NS)


def settings(
    *,
    durability: Durability = Durability.WAL,
    segment: SegmentConfig | None = None,
    retention: RetentionConfig | None = None,
) -> StoreConfig:
    return StoreConfig(
        durability=durability,
        maintain_interval=LONG,
        wal=SMALL_LOG,
        segment=segment or SegmentConfig(max_open_duration=LONG),
        retention=retention or RetentionConfig(),
    )


@contextmanager
def opened(disk: SimulatedDisk, config: StoreConfig | None = None) -> Iterator[Store]:
    """A store in which nothing happens unless asked for; what was replayed stays open."""
    with Store.open(ROOT, config or settings(), disk=disk, clock=STANDING_STILL) as store:
        store.subscribe("reader", Start.earliest())
        yield store


def power_cut(disk: SimulatedDisk) -> SimulatedDisk:
    """The disk when nothing survives but what was made durable."""
    return next(disk.crash_states(limit=1))


def put(store: Store, *indices: int) -> None:
    for index in indices:
        store.ingest(plain_bundle(index))
    store.flush()


def drain(store: Store) -> list[int]:
    found = []
    while (handle := store.poll_next_bundle("reader")) is not None:
        batch = handle.bundle.batch(30)
        assert batch is not None
        found.append(int(batch.column(0)[0].as_py()))
        handle.ack()
    return found


def replace(disk: SimulatedDisk, path: Path, data: bytes) -> None:
    """Put other bytes in the place of a file, as a failing medium does."""
    disk.unlink(path)
    file = disk.create(path)
    file.append([data])
    file.sync()
    file.close()
    disk.sync_dir(path.parent)


def segment_files(disk: SimulatedDisk) -> list[Path]:
    names = disk.list_directory(SEGMENTS)
    return [SEGMENTS / name for name in names if name.endswith(".qseg")]


def test_defect_a() -> None:
    """After a purge, positions began at 0 again, and neither finalising nor opening worked."""
    disk = SimulatedDisk()
    expected: list[int] = []
    for cycle in range(5):
        first = 10 * cycle
        with opened(disk) as store:
            put(store, *range(first, first + 5))  # rotates, and purges what it finalised
            for index in range(first + 5, first + 9):
                store.ingest(plain_bundle(index))  # rotates, and stays in the log
            expected += range(first, first + 9)
            rebooted = power_cut(disk)
        disk = rebooted
    with opened(disk) as store:
        assert store.problems == []
        store.flush()
        assert drain(store) == expected, "lost, or in two segments"


def test_defect_b() -> None:
    """After a change from the log to segments only, every finalise failed."""
    disk = SimulatedDisk()
    with opened(disk) as store:
        put(store, 0)
        store.ingest(plain_bundle(1))
        rebooted = power_cut(disk)
    with opened(rebooted, settings(durability=Durability.SEGMENT_ONLY)) as store:
        put(store, 2)
        put(store, 3)
        assert drain(store) == [0, 1, 2, 3]
        assert store.metrics.get("quiver.flush.failures_total") == 0


def test_defect_b_and_what_was_resolved_does_not_come_again() -> None:
    """What was replayed into a segment with new bundles is behind the cursor for good."""
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.ingest(plain_bundle(0))
        rebooted = power_cut(disk)
    config = settings(durability=Durability.SEGMENT_ONLY)
    with opened(rebooted, config) as store:
        put(store, 1)  # shares its segment with what was replayed
        assert drain(store) == [0, 1]
        store.maintain()
    with opened(rebooted, config) as store:
        store.flush()
        assert drain(store) == []


def test_defect_c() -> None:
    """A finalise that failed dropped its segment, and the next one moved the cursor past it."""
    disk = SimulatedDisk()

    def refuse(call: Call) -> None:
        if call.path.parent == SEGMENTS:
            raise OSError(5, "broken", str(call.path))

    with opened(disk) as store:
        store.ingest(plain_bundle(0))
        disk.before_call = refuse
        with pytest.raises(OSError, match="broken"):
            store.flush()
        disk.before_call = None
        put(store, 1)
        rebooted = power_cut(disk)
        assert drain(store) == [0, 1]
    with opened(rebooted) as store:
        assert drain(store) == [0, 1]


def test_defect_d() -> None:
    """Two schemas with one fingerprint made an entry that no restart could get past."""
    plain = pa.schema([pa.field("value", pa.int64())])
    schemas = [
        plain,
        pa.schema([pa.field("value", pa.int64(), nullable=False)]),
        plain.with_metadata({"unit": "ms"}),
    ]
    bundles = [
        RecordBundle.from_batches(
            {30: pa.record_batch([pa.array([i], pa.int64())], schema=schema)},
            ingestion_time_ns=START_NS,
        )
        for i, schema in enumerate(schemas)
    ]
    assert len({bundle.payloads[30].fingerprint for bundle in bundles}) == 1
    disk = SimulatedDisk()
    with opened(disk) as store:
        for bundle in bundles:
            store.ingest(bundle)
        rebooted = power_cut(disk)
    with opened(rebooted) as store:
        store.flush()
        for schema in schemas:
            handle = store.next_bundle("reader", 0)
            assert handle is not None
            batch = handle.bundle.batch(30)
            assert batch is not None
            assert batch.schema.equals(schema, check_metadata=True)
            handle.ack()


def test_defect_f() -> None:
    """When all segments were deleted their numbers came again, and new data was skipped."""
    disk = SimulatedDisk()
    names: set[str] = set()
    sequences: set[int] = set()
    for cycle in range(4):
        with opened(disk) as store:
            sequences.add(store.ingest(plain_bundle(cycle)).sequence)
            store.flush()
            names |= {path.name for path in segment_files(disk)}
            assert drain(store) == [cycle]
            store.maintain()
            assert segment_files(disk) == []
            rebooted = power_cut(disk)
        disk = rebooted
    assert len(names) == 4
    assert len(sequences) == 4


def damage_middle(disk: SimulatedDisk, path: Path) -> None:
    data = bytearray(disk.read(path))
    for offset in range(8, 400):
        data[offset] ^= 0xFF
    replace(disk, path, bytes(data))


def damage_end(disk: SimulatedDisk, path: Path) -> None:
    replace(disk, path, bytes(disk.read(path))[:-3])


def lose(disk: SimulatedDisk, path: Path) -> None:
    disk.unlink(path)
    disk.sync_dir(path.parent)


@pytest.mark.parametrize("harm", [damage_middle, damage_end, lose])
def test_defect_g(harm: Callable[[SimulatedDisk, Path], None]) -> None:
    """A damaged or missing segment made polling fail, and no segment was deleted ever after."""
    disk = SimulatedDisk()
    with opened(disk) as store:
        put(store, 0, 1)
        put(store, 2)
        put(store, 3)
        held = store.poll_next_bundle("reader")
        assert held is not None
        held.ack()  # so that the progress file names the segment
    harm(disk, segment_files(disk)[0])
    with opened(disk) as store:
        assert drain(store) == [2, 3]
        if harm is damage_middle:
            assert store.losses["corrupt.bundles.reader"] == 1
        if harm is not lose:
            assert len(store.problems) == 1
        assert store.subscribers()[0].claimed == 0
        store.maintain()
        assert segment_files(disk) == []
        put(store, 4)
        assert drain(store) == [4]


def test_defect_j() -> None:
    """One entry of an unknown type, and the log could not be opened."""
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.ingest(plain_bundle(0))
        rebooted = power_cut(disk)
    body = b"\x09" + bytes(40)
    unknown = struct.pack("<I", len(body)) + body + struct.pack("<I", zlib.crc32(body))
    file = rebooted.open_append(WAL / "quiver.wal")
    file.append([unknown])
    file.sync()
    file.close()
    with opened(rebooted) as store:
        store.ingest(plain_bundle(1))
        again = power_cut(rebooted)
    with opened(again) as store:
        store.flush()
        assert drain(store) == [0, 1]


def test_defect_l() -> None:
    """A segment took more bundles than a progress file can address."""
    with pytest.raises(InvalidConfig, match="65537"):
        SegmentConfig(max_bundles=65_537)
    disk = SimulatedDisk()
    config = settings(segment=SegmentConfig(max_bundles=2, max_frozen=9, max_open_duration=LONG))
    with opened(disk) as store:
        for index in range(5):
            store.ingest(plain_bundle(index))
        rebooted = power_cut(disk)
    with opened(rebooted, config) as store:  # the limit holds for what is replayed, too
        store.flush()
        infos = [store._core.segments.info(n) for n in store._core.segments.numbers]
        assert [info.bundle_count for info in infos if info] == [2, 2, 1]
        assert drain(store) == list(range(5))


def test_defect_n() -> None:
    """One slow bundle in the oldest segment kept all segments behind it."""
    with opened(SimulatedDisk()) as store:
        put(store, 0)
        put(store, 1)
        put(store, 2)
        slow = store.poll_next_bundle("reader")
        assert slow is not None
        assert drain(store) == [1, 2]
        store.maintain()
        assert store._core.segments.numbers == [0]
        slow.ack()


def test_defect_p() -> None:
    """A bundle that was deferred did not wake those who wait for one."""
    with opened(SimulatedDisk()) as store, ThreadPoolExecutor(1) as pool:
        put(store, 0)
        held = store.poll_next_bundle("reader")
        assert held is not None
        waiting = pool.submit(store.next_bundle, "reader")
        held.defer()
        handle = waiting.result(BOUND)
        assert handle is not None
        handle.ack()


def test_defect_q() -> None:
    """A subscriber that never came back pinned all data, and nothing could be done about it."""
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.subscribe("gone")
        put(store, 0)
    with opened(disk) as store:
        assert store.activate() == ["gone"]
        put(store, 1)
        assert drain(store) == [0, 1]
        store.maintain()
        assert store._core.segments.numbers == [0, 1]
        assert store.drop_orphan("gone") == 2
        store.maintain()
        assert store._core.segments.numbers == []
        assert store.losses["unregistered.bundles.gone"] == 2


def test_defect_r() -> None:
    """Files were deleted before progress was written, and a crash left progress for no file."""

    def script(disk: SimulatedDisk, acknowledge: Callable[[int], None]) -> None:
        core = StoreCore(disk, ROOT, settings(), STANDING_STILL)
        core.register("reader", Start.earliest())
        core.registry.activate("reader")
        for index in range(3):
            core.commit([core.prepare(plain_bundle(index))])
            acknowledge(index)
            core.finalise_due(at_once=True)
        for _ in range(2):
            with core.registry.active("reader") as state:
                claim = state.claim_next(0.0)
            assert claim is not None
            core.registry.resolve("reader", claim)
        core.maintain()

    def check(disk: SimulatedDisk, acknowledged: object) -> None:
        assert isinstance(acknowledged, tuple)
        with opened(disk) as store:
            store.flush()
            found = drain(store)
            assert set(acknowledged) - {0, 1} <= set(found)
            put(store, 99)
            assert drain(store) == [99], "new data is skipped"
            store.maintain()
            assert store._core.segments.numbers == [], "something is never reclaimed"

    report = explore(script, check, limit_per_point=6)
    assert not report.violations, report


def test_defect_s() -> None:
    """The hard cap was passed, and with ``drop_oldest`` a store without subscribers was stuck."""
    disk = SimulatedDisk()
    with opened(disk) as store:
        for index in range(20):
            put(store, index)
        store.unregister("reader")
        cap = store._core.retention.used() // 2
    dropping = RetentionConfig(size_cap=cap, size_cap_policy=SizeCapPolicy.DROP_OLDEST)
    with Store.open(ROOT, settings(retention=dropping), disk=disk) as store:
        store.flush()
        assert store._core.retention.used() < cap
        assert store.losses["dropped.bundles"] > 0
    refusing = RetentionConfig(size_cap=cap)
    with Store.open(ROOT, settings(retention=refusing), disk=disk) as store:
        store.flush()
        with pytest.raises(StorageAtCapacity):
            put(store, *range(100))
        assert store._core.intake.wal.size + store._core.segments.size <= cap


def test_defect_s_with_many_callers() -> None:
    """Callers who come at the same time pass the gate together, and then the cap."""
    cap = 20 * ENTRY_SIZE
    core = StoreCore(
        SimulatedDisk(), ROOT, settings(retention=RetentionConfig(size_cap=cap)), STANDING_STILL
    )
    intents: list[Intent] = []
    with suppress(StorageAtCapacity):
        for index in range(50):
            waiting = sum(intent.size for intent in intents)
            intents.append(core.prepare(plain_bundle(index), waiting))
    core.commit(intents)
    stored = core.intake.wal.size
    core.close()
    assert stored <= cap


def test_defect_t() -> None:
    """New entries in a log that had lost its end lay before the cursor, and were not replayed."""
    disk = SimulatedDisk()
    with opened(disk) as store:
        put(store, 0, 1)
        rebooted = power_cut(disk)
    assert load_cursor(rebooted, WAL) == 2 * ENTRY_SIZE
    replace(rebooted, WAL / "quiver.wal", bytes(rebooted.read(WAL / "quiver.wal", 0, HEADER_SIZE)))
    with opened(rebooted) as store:
        assert store.ingest(plain_bundle(2)) == Receipt(2, 3 * ENTRY_SIZE)
        again = power_cut(rebooted)
    with opened(again) as store:
        store.flush()
        assert drain(store) == [0, 1, 2]


# --- our own --------------------------------------------------------------------------------------


def test_a_closed_store_does_not_touch_files_that_it_has_no_lock_for() -> None:
    disk = SimulatedDisk()
    with opened(disk) as store:
        put(store, 0)
    disk.calls.clear()
    calls: list[Callable[[], object]] = [
        lambda: store.register("late"),
        lambda: store.unregister("reader"),
    ]
    for call in calls:
        with suppress(StoreClosed):
            call()
    assert disk.calls == []


FORGETFUL = """
import gc, sys
import pyarrow as pa
from quiver import RecordBundle, Start, Store
batch = pa.record_batch({"value": pa.array([1], pa.int64())})
with Store.open(sys.argv[1]) as store:
    store.subscribe("reader", Start.earliest())
    for _ in range(100):
        store.ingest(RecordBundle.from_batches({30: batch}, ingestion_time_ns=1))
    store.flush()
    gc.set_threshold(5)
    for _ in range(300):
        handle = store.poll_next_bundle("reader")
        if handle is not None:
            handle.itself = handle  # a cycle, as a traceback makes one
        del handle
        store.subscribers()
"""


def test_a_handle_in_a_cycle_does_not_stop_the_store(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORGETFUL, str(tmp_path)]
    assert subprocess.run(command, timeout=20, check=False).returncode == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_closes_does_not_stop_the_committer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    gone, mine = AsyncTicket(loop, loop.create_future()), Ticket()
    loop.close()
    monkeypatch.setattr(loop, "is_closed", lambda: False)  # so it seemed a moment ago
    with opened(SimulatedDisk()) as store:
        committer = store._committer
        committer.submit(store._core.prepare(plain_bundle(0)), gone)
        while store._core.intake.wal.next_sequence == 0:
            time.sleep(0.001)
        committer.submit(store._core.prepare(plain_bundle(1)), mine)
        while committer._thread.is_alive() and mine._receipt is None:
            time.sleep(0.001)
        assert mine._receipt is not None, "nobody commits any more"
