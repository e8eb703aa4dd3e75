"""What a store costs: ``quiver bench store``.

Bundles are those of ``quiver bench formats``. They come from one thread with ``ingest``, or from 64
tasks with ``ingest_async``; one subscriber reads and acknowledges them meanwhile. Raw is the same
bytes in one file, one write and one sync for as many bundles as the store had in a group.

=====================  =======================================================================
figure                 what is measured
=====================  =======================================================================
results                by rows, then by producers: ``bundles_s`` and ``mb_s`` from the first call
                       to the last receipt; ``p50_ms``, ``p99_ms``, ``max_ms`` of a call;
                       ``raw_mb_s``; ``raw_ratio``, the speed in relation to that;
                       ``group_bundles``, the bundles of a group on average; ``refused``, how often
                       there was no room and the call was made again
fdatasync_p50_ms       by rows: one write and one sync of one bundle
latency_ratio          by rows: ``p50_ms`` of one producer in relation to that
finalise_max_ratio     ``max_ms`` of one producer while segments are finalised, in relation to that
                       of one while none is; ``finalise`` has both, and how many segments
finalise_alone_ratio   the same when the subscriber reads afterwards: what finalising costs without
                       a reader, who has something to read only when segments are finalised
segment_only_ratio     speed without a log in relation to that with one, 64 producers, 1,000 rows,
                       until the last receipt, which means less without
segment_only_readable  the same until everything is in segments, where writing them bounds both
replay_mb_s            ``Store.open`` with everything in the log and nothing in segments
backlog_rss_mb         the most that resident memory grows while ``backlog_bytes`` are written that
                       nobody acknowledges, and then read. None where the system does not tell
backlog_private_mb     the same without the pages of mapped files, which the system takes back when
                       it needs them
backlog_growth_mb      how much more is resident at most after a quarter of the time than before:
                       whether memory depends on the size of the backlog
=====================  =======================================================================

Rounds are a third of those asked for, because each takes long; the backlog, which is 16 times the
size asked for (``--megabytes 320`` for 5 GB), is written once. MB are 10^6 bytes of log.

A disk that others use syncs ten times slower from one second to the next. Where ``raw_ratio`` is
above 1 or ``latency_ratio`` below 1, that is what was measured: run it again.
"""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from quiver.bench.formats import ROW_COUNTS
from quiver.bench.load import (
    MANY_PRODUCERS,
    SUBSCRIBER,
    Load,
    Sample,
    check_count,
    least,
    produce,
    produce_with_tasks,
    read_all,
)
from quiver.bench.measure import (
    Benchmark,
    Contender,
    Plan,
    Results,
    Table,
    Tick,
    file_system_type,
    race,
)
from quiver.bench.rig import Background, FlatDisk, Memory
from quiver.config import Durability, SegmentConfig, StoreConfig, WalConfig
from quiver.disk import Disk
from quiver.store.core import Start
from quiver.store.store import Store
from quiver.wal.entry import prepare_entry
from quiver.wal.writer import WalWriter

PRODUCERS: Final = (1, MANY_PRODUCERS)
_MIDDLE_ROWS: Final = 1_000
_ROUND_SHARE: Final = 3
_BACKLOG_SHARE: Final = 16
_FINALISED_SEGMENTS: Final = 16
_UNBOUNDED: Final = 2**62
_KEEP_OPEN: Final = StoreConfig(
    wal=WalConfig(max_size=_UNBOUNDED, rotation_target=_UNBOUNDED),
    segment=SegmentConfig(target_size=_UNBOUNDED, max_open_duration=3_600.0),
)
_FACTS: Final = (
    "finalise_max_ratio",
    "finalise_alone_ratio",
    "segment_only_ratio",
    "segment_only_readable",
    "replay_mb_s",
    "backlog_rss_mb",
    "backlog_private_mb",
    "backlog_growth_mb",
)
_CIRCUMSTANCES: Final = (
    "python",
    "pyarrow",
    "isal",
    "cpu_count",
    "file_system",
    "page_cache",
    "rounds",
    "bytes",
    "backlog_bytes",
)


def run(disk: Disk, directory: Path, plan: Plan, tick: Tick) -> Results:
    """Measure in ``directory``, which is empty before and after."""
    timing = _Timing(disk, directory, plan, tick)
    loads = {
        (rows, producers): Load.make(rows, producers, plan.file_size)
        for rows in ROW_COUNTS
        for producers in PRODUCERS
    }
    # First: memory that other rounds have left behind would hide its growth.
    backlog = timing.backlog(loads[_MIDDLE_ROWS, MANY_PRODUCERS])
    results: dict[str, dict[str, dict[str, float]]] = {}
    sync_p50_ms, latency_ratio = {}, {}
    for (rows, producers), load in loads.items():
        row, raw = timing.ingest(load)
        results.setdefault(str(rows), {})[str(producers)] = row
        if producers == 1:
            sync_p50_ms[str(rows)] = round(raw.p50_ms, 4)
            latency_ratio[str(rows)] = round(row["p50_ms"] / raw.p50_ms, 3)
    figures = {
        "benchmark": BENCHMARK.name,
        "results": results,
        "fdatasync_p50_ms": sync_p50_ms,
        "latency_ratio": latency_ratio,
        **timing.finalising(loads[_MIDDLE_ROWS, 1]),
        **timing.without_log(loads[_MIDDLE_ROWS, MANY_PRODUCERS]),
        "replay_mb_s": round(timing.replay(loads[_MIDDLE_ROWS, MANY_PRODUCERS]), 1),
        **backlog,
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "isal": version("isal"),
        "cpu_count": os.cpu_count(),
        "file_system": file_system_type(directory),
        "page_cache": "warm",
        "rounds": timing.rounds,
        "bytes": loads[_MIDDLE_ROWS, MANY_PRODUCERS].size,
    }
    return Results(figures, _table(results))


def count_ticks(plan: Plan) -> int:
    """Rounds over everything that is measured, and the backlog."""
    return _rounds(plan) * (len(ROW_COUNTS) * len(PRODUCERS) + 3) + 1


def count_bytes(plan: Plan) -> int:
    """The backlog and a full log, and what the file system takes its time to free."""
    return (_BACKLOG_SHARE + 3) * plan.file_size + 400_000_000


def _rounds(plan: Plan) -> int:
    return max(1, plan.rounds // _ROUND_SHARE)


BENCHMARK: Final = Benchmark(
    name="store",
    run=run,
    count_ticks=count_ticks,
    count_bytes=count_bytes,
    facts=(*_FACTS, *_CIRCUMSTANCES),
)


class _Raw(NamedTuple):
    mb_s: float
    p50_ms: float


# --- what is timed -----------------------------------------------------------------------------


class _Timing:
    def __init__(self, disk: Disk, directory: Path, plan: Plan, tick: Tick) -> None:
        self._real = disk
        self._disk = FlatDisk(disk, directory)
        self._directory = directory
        self._root = directory / "store"
        self._plan = plan
        self._tick = tick
        self.rounds = _rounds(plan)

    def ingest(self, load: Load) -> tuple[dict[str, float], _Raw]:
        ours, raw = [], []
        for _ in range(self.rounds):
            self._tick(f"ingest, {load.rows} rows, {load.producers}")
            ours.append(self._store_round(load))
            group = round(len(load.bundles) / ours[-1].groups)
            raw.append(self._raw_round(load.entries, max(1, group)))
        seconds = least(ours, lambda s: s.seconds)
        best_raw = _Raw(
            load.size / least(raw, lambda s: s.seconds) / 1e6, least(raw, lambda s: s.p50_ms)
        )
        mb_s = load.size / seconds / 1e6
        groups = sum(sample.groups for sample in ours)
        row = {
            "bundles_s": round(len(load.bundles) / seconds, 1),
            "mb_s": round(mb_s, 1),
            "p50_ms": round(least(ours, lambda s: s.p50_ms), 3),
            "p99_ms": round(least(ours, lambda s: s.p99_ms), 3),
            "max_ms": round(least(ours, lambda s: s.max_ms), 3),
            "raw_mb_s": round(best_raw.mb_s, 1),
            "raw_ratio": round(mb_s / best_raw.mb_s, 3),
            "group_bundles": round(len(load.bundles) * len(ours) / groups, 1),
            "refused": sum(sample.refused for sample in ours),
        }
        return row, best_raw

    def finalising(self, load: Load) -> dict[str, object]:
        """The slowest call while segments are written, and while none is."""
        many = StoreConfig(
            maintain_interval=0.005,
            segment=SegmentConfig(target_size=max(1, load.size // _FINALISED_SEGMENTS)),
        )
        with_segments, without, alone = [], [], []
        for _ in range(self.rounds):
            self._tick("finalise")
            without.append(self._store_round(load, _KEEP_OPEN))
            with_segments.append(self._store_round(load, many))
            alone.append(self._store_round(load, many, read_later=True))
        slow = least(with_segments, lambda s: s.max_ms)
        quiet = least(without, lambda s: s.max_ms)
        return {
            "finalise_max_ratio": round(slow / quiet, 3),
            "finalise_alone_ratio": round(least(alone, lambda s: s.max_ms) / quiet, 3),
            "finalise": {
                "max_ms": round(slow, 3),
                "max_ms_without": round(quiet, 3),
                "segments": max(sample.segments for sample in with_segments),
            },
        }

    def without_log(self, load: Load) -> dict[str, float]:
        with_log, without = [], []
        for _ in range(self.rounds):
            self._tick("without a log")
            with_log.append(self._store_round(load))
            config = StoreConfig(durability=Durability.SEGMENT_ONLY)
            without.append(self._store_round(load, config))

        def ratio(figure: Callable[[Sample], float]) -> float:
            return round(least(with_log, figure) / least(without, figure), 3)

        return {
            "segment_only_ratio": ratio(lambda s: s.seconds),
            "segment_only_readable": ratio(lambda s: s.until_readable),
        }

    def replay(self, load: Load) -> float:
        """Megabytes per second."""
        opened: list[Store] = []

        def write_log() -> None:
            self._disk.make_directory(self._root)
            writer = WalWriter.open(self._disk, self._root / "wal", _KEEP_OPEN.wal)
            for bundle in load.bundles:
                writer.append([prepare_entry(bundle)])
            writer.close()

        def remove() -> None:
            with opened.pop() as store:
                check_count(
                    int(store.metrics.get("quiver.wal.replayed_entries_total")), len(load.bundles)
                )
            self._disk.remove_all()

        best = race(
            {
                "open": Contender(
                    lambda: opened.append(Store.open(self._root, _KEEP_OPEN, disk=self._disk)),
                    write_log,
                    remove,
                )
            },
            self.rounds,
            lambda: self._tick("replay"),
        )
        return load.size / best["open"] / 1e6

    def backlog(self, load: Load) -> dict[str, object]:
        """Memory while much is written that nobody reads, and while it is read at last."""
        self._tick("backlog")
        turns = max(1, _BACKLOG_SHARE * self._plan.file_size // load.size)
        gc.collect()
        memory = Memory()
        with memory.watched(), self._store() as store:
            store.register(SUBSCRIBER, Start.earliest())
            for _ in range(turns):
                asyncio.run(produce_with_tasks(store, load, Sample()))
            store.flush()
            store.activate(SUBSCRIBER)
            read_all(store, turns * len(load.bundles))
        return {
            "backlog_rss_mb": memory.resident_mb,
            "backlog_private_mb": memory.private_mb,
            "backlog_growth_mb": memory.growth_mb,
            "backlog_bytes": turns * load.size,
        }

    def _store_round(
        self, load: Load, config: StoreConfig | None = None, *, read_later: bool = False
    ) -> Sample:
        sample = Sample()
        with _collecting_less(), self._store(config) as store:
            store.subscribe(SUBSCRIBER)
            may_read = threading.Event()
            if not read_later:
                may_read.set()

            def read() -> None:
                may_read.wait()
                read_all(store, len(load.bundles))

            reader = Background(read)
            start = time.perf_counter()
            if load.producers == 1:
                produce(store, load, sample)
            else:
                asyncio.run(produce_with_tasks(store, load, sample))
            sample.seconds = time.perf_counter() - start
            store.flush()
            sample.until_readable = time.perf_counter() - start
            may_read.set()
            reader.finish()
            figures = store.metrics.snapshot()
        sample.groups = int(figures["quiver.commit.group_size_count"])
        sample.segments = int(figures["quiver.segment.finalised_total"])
        return sample

    def _raw_round(self, entries: Sequence[bytes], group: int) -> Sample:
        sample = Sample()
        path = self._directory / "raw"
        file = self._real.create(path)
        try:
            with _collecting_less():
                start = time.perf_counter()
                for at in range(0, len(entries), group):
                    begun = time.perf_counter()
                    file.append(entries[at : at + group])
                    file.sync()
                    sample.latencies.append(time.perf_counter() - begun)
                sample.seconds = time.perf_counter() - start
        finally:
            file.close()
            self._real.unlink(path)
        return sample

    @contextmanager
    def _store(self, config: StoreConfig | None = None) -> Iterator[Store]:
        """A fresh store."""
        try:
            with Store.open(self._root, config, disk=self._disk) as store:
                yield store
        finally:
            self._disk.remove_all()


@contextmanager
def _collecting_less() -> Iterator[None]:
    """Collections do not walk over what the benchmark holds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# --- results -----------------------------------------------------------------------------------


def _table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    columns = {
        "bundles/s": ("bundles_s", ",.0f"),
        "MB/s": ("mb_s", ",.0f"),
        "raw MB/s": ("raw_mb_s", ",.0f"),
        "speed to raw": ("raw_ratio", ".2f"),
        "p50, ms": ("p50_ms", ".2f"),
        "p99, ms": ("p99_ms", ".2f"),
        "max, ms": ("max_ms", ".2f"),
    }
    return Table(
        "Best times",
        ("", *columns),
        tuple(
            (
                f"{int(rows):,} rows, {producers} producers",
                *(format(row[key], form) for key, form in columns.values()),
            )
            for rows, by_producers in results.items()
            for producers, row in by_producers.items()
        ),
    )
