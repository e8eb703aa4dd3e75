"""What the file formats cost: ``quiver bench formats``.

Bundles have one slot with two int64 columns and a string of about 40 bytes, in three sizes: 100,
1,000 and 8,192 rows. ``mix`` is an equal number of each.

=========================  ===================================================================
figure                     what is timed
=========================  ===================================================================
wal_encode_us              one bundle: ``prepare_entry`` and ``seal``
wal_append_us              one bundle: the same and ``WalWriter.append``, one bundle per call; the
                           bytes are then in the page cache, there is no sync
wal_append_plain_write_us  one bundle: only the write, of bytes that were made before
crc_gb_s                   the checksum of 64 MB in memory
segment_write_mb_s         ``OpenSegment`` from bundles in memory, then ``write_segment``: encode,
                           write, sync, rename, sync the directory. Plain: a file of that size,
                           written 1 MiB at a time and published in the same way
segment_read_mb_s          ``SegmentReader.open``, then every bundle: sums verified, batches made.
                           Plain: the same file in reads of 1 MiB into one buffer
replay_mb_s                ``WalWriter.open`` on a log that was not closed: every entry found,
                           summed and decoded (``Validation.LAYOUT``). Plain: as above
replay_without_open_mb_s   the mix, with ``replay`` alone: no cursor, no counting, no directory
                           to make durable, all of which ``replay_mb_s`` has in it
wal_open_us                ``WalWriter.open`` on a log without entries. It syncs a directory, so
                           it depends on the disk
=========================  ===================================================================

``*_ratio`` is the speed in relation to the plain one (see ``measure``). MB are 10^6 bytes of file.

The page cache is warm: what is read was just written, so no figure contains the time that a disk
takes to read.
"""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

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
from quiver.bundle import RecordBundle, Slot
from quiver.checksum import crc32
from quiver.config import WalConfig
from quiver.disk import Disk, DiskFile, publish
from quiver.ipc import Validation
from quiver.segment.reader import SegmentReader
from quiver.segment.writer import OpenSegment, write_segment
from quiver.wal.entry import prepare_entry
from quiver.wal.files import ACTIVE_NAME, find_files
from quiver.wal.replay import ReplayedEntry, replay
from quiver.wal.writer import WalWriter

ROW_COUNTS: Final = (100, 1_000, 8_192)
_MIX = "mix"
_WORKLOADS: Final[Mapping[str, tuple[int, ...]]] = {
    **{str(rows): (rows,) for rows in ROW_COUNTS},
    _MIX: ROW_COUNTS,
}
_DISTINCT_ROWS = 2**16  # bundles repeat after this many rows: too much for a core's own cache
_MAX_BUNDLES = 4_096  # enough to time, where bundles are small
_IO_SIZE = 2**20
_APPEND_SHARE = 4  # appends are timed over this part of a file
_SEED = 20_240_501
_FIELDS: Final[tuple[pa.Field[Any], ...]] = (
    pa.field("timestamp", pa.int64()),
    pa.field("value", pa.int64()),
    pa.field("message", pa.string()),
)
_SCHEMA: Final = pa.schema(_FIELDS)
_UNBOUNDED: Final = WalConfig(max_size=2**62, rotation_target=2**62)


class _Speed(NamedTuple):
    mb_s: float
    ratio: float


class _AppendTimes(NamedTuple):
    """Microseconds for each bundle."""

    encode: float
    append: float
    plain: float


def run(disk: Disk, directory: Path, plan: Plan, tick: Tick) -> Results:
    """Measure in ``directory``, which is empty before and after."""
    timing = _Timing(disk, directory, plan, tick)
    bundles = {rows: make_bundles(rows) for rows in ROW_COUNTS}
    appends = {str(rows): timing.append(bundles[rows]) for rows in ROW_COUNTS}
    open_us = timing.log_open()
    crc_gb_s = timing.checksum()
    replays, bare_replays, reads = {}, {}, {}
    for name, row_counts in _WORKLOADS.items():
        workload = make_workload([bundles[rows] for rows in row_counts], plan.file_size)
        replays[name], bare_replays[name] = timing.replay(workload, name)
        reads[name] = timing.segment_read(workload, name)
    mix = make_workload(list(bundles.values()), plan.file_size)
    write, size = timing.segment_write(mix)
    figures = {
        "benchmark": BENCHMARK.name,
        **_append_figures(appends),
        "wal_open_us": round(open_us, 1),
        "crc_gb_s": round(crc_gb_s, 2),
        "segment_write_mb_s": round(write.mb_s, 1),
        "segment_write_ratio": round(write.ratio, 3),
        **_read_figures("segment_read", reads),
        **_read_figures("replay", replays),
        "replay_without_open_mb_s": round(bare_replays[_MIX].mb_s, 1),
        "replay_without_open_ratio": round(bare_replays[_MIX].ratio, 3),
        **_circumstances(directory, plan),
        "bytes": size,
        "bundles": len(mix),
    }
    return Results(figures, _table(figures))


def count_ticks(plan: Plan) -> int:
    """Rounds over everything that is measured."""
    return plan.rounds * (len(ROW_COUNTS) + 2 * len(_WORKLOADS) + 3)


def count_bytes(plan: Plan) -> int:
    """One file at a time, and as much again for what the file system takes its time to free."""
    return 2 * plan.file_size + 10_000_000


BENCHMARK: Final = Benchmark(
    name="formats",
    run=run,
    count_ticks=count_ticks,
    count_bytes=count_bytes,
    facts=(
        "python",
        "pyarrow",
        "isal",
        "cpu_count",
        "file_system",
        "page_cache",
        "rounds",
        "bytes",
    ),
)


# --- data --------------------------------------------------------------------------------------


def make_bundles(rows: int) -> list[RecordBundle]:
    """Different bundles of that many rows, the same ones each time."""
    generator = random.Random(_SEED + rows)
    count = max(2, _DISTINCT_ROWS // rows)
    return [
        RecordBundle.from_batches(
            {Slot.LOGS: _batch(generator, rows)}, ingestion_time_ns=10**18 + i, item_count=rows
        )
        for i in range(count)
    ]


def _batch(generator: random.Random, rows: int) -> pa.RecordBatch:
    start = 10**18 + generator.getrandbits(48)
    messages = [
        f"GET /api/v1/orders/{generator.getrandbits(28):09d} took {generator.random() * 900:.1f} ms"
        for _ in range(rows)
    ]
    columns: list[pa.Array[Any]] = [
        pa.array(range(start, start + 1_000 * rows, 1_000), pa.int64()),
        pa.array([generator.getrandbits(62) for _ in range(rows)], pa.int64()),
        pa.array(messages, pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def make_workload(kinds: Sequence[Sequence[RecordBundle]], size: int) -> list[RecordBundle]:
    """As many of each kind, in turns, as make a file of about ``size`` bytes, or fewer."""
    one_of_each = sum(prepare_entry(kind[0]).size for kind in kinds)
    turns = max(1, min(size // one_of_each, _MAX_BUNDLES // len(kinds)))
    return list(chain.from_iterable(islice(zip(*map(cycle, kinds), strict=True), turns)))


# --- what is timed -----------------------------------------------------------------------------


class _Timing:
    def __init__(self, disk: Disk, directory: Path, plan: Plan, tick: Tick) -> None:
        self._disk = disk
        self._directory = directory
        self._plan = plan
        self._tick = tick

    def append(self, bundles: Sequence[RecordBundle]) -> _AppendTimes:
        entries = [b"".join(prepare_entry(bundle).seal(0)) for bundle in bundles]
        count = max(1, self._plan.file_size // _APPEND_SHARE // len(entries[0]))
        todo = list(islice(cycle(bundles), count))
        pieces = list(islice(cycle(entries), count))

        def encode() -> None:
            for sequence, bundle in enumerate(todo):
                prepare_entry(bundle).seal(sequence)

        log = _Log(self._disk, self._directory)
        plain = _PlainFile(self._disk, self._directory / "plain")
        best = self._race(
            f"append, {bundles[0].row_count} rows",
            encode=Contender(encode),
            plain=Contender(lambda: plain.append_all(pieces), plain.open, plain.remove),
            append=Contender(lambda: log.append_all(todo), log.open, log.remove),
        )
        in_us = {name: seconds / count * 1e6 for name, seconds in best.items()}
        return _AppendTimes(**in_us)

    def log_open(self) -> float:
        """Microseconds."""
        log = _Log(self._disk, self._directory)
        log.open()
        try:
            best = self._race(
                "open", ours=Contender(lambda: WalWriter.open(self._disk, self._directory).close())
            )
            return best["ours"] * 1e6
        finally:
            log.remove()

    def checksum(self) -> float:
        """Gigabytes per second."""
        data = random.Random(_SEED).randbytes(self._plan.file_size)
        best = self._race("checksum", ours=Contender(lambda: crc32(data)))
        return len(data) / best["ours"] / 1e9

    def replay(self, workload: Sequence[RecordBundle], name: str) -> tuple[_Speed, _Speed]:
        """By opening the log, and without that."""
        log = _Log(self._disk, self._directory)
        log.open()
        try:
            log.append_all(workload)
            path = self._directory / ACTIVE_NAME
            best = self._race(
                f"replay, {_title(name)}",
                plain=Contender(_plain_reader(path)),
                opening=Contender(lambda: self._recover(len(workload))),
                bare=Contender(lambda: self._replay(len(workload))),
            )
            size, plain = self._disk.size(path), best["plain"]
            return _speed(size, best["opening"], plain), _speed(size, best["bare"], plain)
        finally:
            log.remove()

    def _recover(self, expected: int) -> None:
        count = 0

        def take(item: ReplayedEntry) -> None:
            nonlocal count
            item.entry.bundle(Validation.LAYOUT)
            count += 1

        WalWriter.open(self._disk, self._directory, _UNBOUNDED, on_entry=take).close()
        _check_count(count, expected)

    def _replay(self, expected: int) -> None:
        count = 0
        for item in replay(self._disk, find_files(self._disk, self._directory)):
            if isinstance(item, ReplayedEntry):
                item.entry.bundle(Validation.LAYOUT)
                count += 1
        _check_count(count, expected)

    def segment_read(self, workload: Sequence[RecordBundle], name: str) -> _Speed:
        path = self._directory / "read.qseg"

        def read() -> None:
            reader = SegmentReader.open(self._disk, path)
            for index in range(reader.bundle_count):
                reader.bundle(index)
            _check_count(reader.bundle_count, len(workload))

        size = self._write_segment(path, workload)
        try:
            best = self._race(
                f"segment read, {_title(name)}",
                plain=Contender(_plain_reader(path)),
                ours=Contender(read),
            )
            return _speed(size, best["ours"], best["plain"])
        finally:
            self._disk.unlink(path)

    def segment_write(self, workload: Sequence[RecordBundle]) -> tuple[_Speed, int]:
        """How fast, and the size of the file."""
        disk, ours, plain = self._disk, self._directory / "ours.qseg", self._directory / "plain"
        size = self._write_segment(ours, workload)
        disk.unlink(ours)
        whole, rest = divmod(size, _IO_SIZE)
        piece = random.Random(_SEED).randbytes(_IO_SIZE)
        pieces = [piece] * whole + [piece[:rest]]
        best = self._race(
            "segment write",
            plain=Contender(
                lambda: publish(disk, plain, pieces, read_only=True),
                after=lambda: disk.unlink(plain),
            ),
            ours=Contender(
                lambda: self._write_segment(ours, workload), after=lambda: disk.unlink(ours)
            ),
        )
        return _speed(size, best["ours"], best["plain"]), size

    def _write_segment(self, path: Path, workload: Iterable[RecordBundle]) -> int:
        segment = OpenSegment()
        for sequence, bundle in enumerate(workload):
            segment.append(bundle, sequence)
        return write_segment(self._disk, path, segment)

    def _race(self, label: str, **contenders: Contender) -> dict[str, float]:
        return race(contenders, self._plan.rounds, lambda: self._tick(label))


class _Log:
    """A fresh log for each run."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory
        self._writer: WalWriter

    def open(self) -> None:
        self._writer = WalWriter.open(self._disk, self._directory, _UNBOUNDED)

    def append_all(self, bundles: Iterable[RecordBundle]) -> None:
        append = self._writer.append
        for bundle in bundles:
            append([prepare_entry(bundle)])

    def remove(self) -> None:
        self._writer.close()
        for name in self._disk.list_directory(self._directory):
            if name.startswith(ACTIVE_NAME):
                self._disk.unlink(self._directory / name)


class _PlainFile:
    """A fresh file for each run."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._file: DiskFile

    def open(self) -> None:
        self._file = self._disk.create(self._path)

    def append_all(self, pieces: Iterable[bytes]) -> None:
        append = self._file.append
        for piece in pieces:
            append([piece])

    def remove(self) -> None:
        self._file.sync()  # so that writing it back does not disturb the next run
        self._file.close()
        self._disk.unlink(self._path)


def _plain_reader(path: Path) -> Callable[[], None]:
    # Aligned. A bytearray lies 16 bytes behind the start of a page as often as not, where copying
    # into it is several times slower on some processors, and ours would look better than it is.
    buffer = memoryview(pa.allocate_buffer(_IO_SIZE))

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return read


def _check_count(count: int, expected: int) -> None:
    """A figure for work that was not done would be worth nothing."""
    if count != expected:
        raise RuntimeError(f"{count} bundles came back, {expected} were written")


def _speed(size: int, ours: float, plain: float) -> _Speed:
    return _Speed(size / ours / 1e6, plain / ours)


def _title(name: str) -> str:
    return name if name == _MIX else f"{name} rows"


# --- results -----------------------------------------------------------------------------------


def _append_figures(appends: Mapping[str, _AppendTimes]) -> dict[str, dict[str, float]]:
    def by_rows(figure: Callable[[_AppendTimes], float]) -> dict[str, float]:
        return {rows: round(figure(times), 3) for rows, times in appends.items()}

    return {
        "wal_encode_us": by_rows(lambda t: t.encode),
        "wal_append_us": by_rows(lambda t: t.append),
        "wal_append_plain_write_us": by_rows(lambda t: t.plain),
        "wal_append_ratio": by_rows(lambda t: t.plain / t.append),
    }


def _read_figures(name: str, speeds: Mapping[str, _Speed]) -> dict[str, object]:
    rounded = {
        workload: {"mb_s": round(speed.mb_s, 1), "ratio": round(speed.ratio, 3)}
        for workload, speed in speeds.items()
    }
    mix = rounded.pop(_MIX)
    return {f"{name}_mb_s": mix["mb_s"], f"{name}_ratio": mix["ratio"], f"{name}_by_rows": rounded}


def _circumstances(directory: Path, plan: Plan) -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "isal": version("isal"),
        "cpu_count": os.cpu_count(),
        "file_system": file_system_type(directory),
        "page_cache": "warm",
        "rounds": plan.rounds,
    }


def _table(figures: Mapping[str, Any]) -> Table:
    names = [str(rows) for rows in ROW_COUNTS]
    only_mix = ("",) * len(names)

    def each(title: str, key: str, form: str) -> tuple[str, ...]:
        return title, *(format(figures[key][name], form) for name in names), ""

    def all_of(title: str, key: str, part: str, form: str) -> tuple[str, ...]:
        by_rows = figures[f"{key}_by_rows"]
        cells = [*(by_rows[name][part] for name in names), figures[f"{key}_{part}"]]
        return title, *(format(cell, form) for cell in cells)

    return Table(
        "Best times",
        ("", *(f"{rows:,} rows" for rows in ROW_COUNTS), _MIX),
        (
            each("encode a WAL entry, µs", "wal_encode_us", ".1f"),
            each("encode and append it, µs", "wal_append_us", ".1f"),
            each("  plain write of it, µs", "wal_append_plain_write_us", ".1f"),
            each("  speed to plain", "wal_append_ratio", ".2f"),
            all_of("replay, MB/s", "replay", "mb_s", ",.0f"),
            all_of("  speed to plain", "replay", "ratio", ".2f"),
            ("  without open", *only_mix, f"{figures['replay_without_open_ratio']:.2f}"),
            all_of("segment read, MB/s", "segment_read", "mb_s", ",.0f"),
            all_of("  speed to plain", "segment_read", "ratio", ".2f"),
            ("segment write, MB/s", *only_mix, f"{figures['segment_write_mb_s']:,.0f}"),
            ("  speed to plain", *only_mix, f"{figures['segment_write_ratio']:.2f}"),
            ("open an empty log, µs", *only_mix, f"{figures['wal_open_us']:,.0f}"),
            ("checksum, GB/s", *only_mix, f"{figures['crc_gb_s']:.1f}"),
        ),
    )
