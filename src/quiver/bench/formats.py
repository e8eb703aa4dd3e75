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
=========================  ===================================================================

``*_ratio`` is the speed in relation to the plain one (see ``measure``). The page cache is warm: what
is read was just written, so no figure contains the time that a disk takes to read. MB are 10^6 bytes
of file.
"""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from quiver.bench.measure import (
    Benchmark,
    Contender,
    Plan,
    Report,
    Table,
    Tick,
    file_system_type,
    race,
)
from quiver.bundle import RecordBundle, Slot
from quiver.checksum import crc32
from quiver.config import WalConfig
from quiver.disk import Disk, DiskFile, publish
from quiver.errors import QuiverError
from quiver.ipc import Validation
from quiver.segment.layout import MAX_BUNDLES_WRITTEN
from quiver.segment.reader import SegmentReader
from quiver.segment.writer import OpenSegment, write_segment
from quiver.wal.entry import prepare_entry
from quiver.wal.files import ACTIVE_NAME
from quiver.wal.replay import ReplayedEntry
from quiver.wal.writer import WalWriter

ROW_COUNTS: Final = (100, 1_000, 8_192)
_MIX = "mix"
_WORKLOADS: Final[Mapping[str, tuple[int, ...]]] = {
    **{str(rows): (rows,) for rows in ROW_COUNTS},
    _MIX: ROW_COUNTS,
}
_DISTINCT_ROWS = 2**16  # bundles repeat after this many rows: too much for a core's own cache
_IO_SIZE = 2**20
_APPEND_SHARE = 4  # appends are timed over this part of a file
_SEED = 20_240_501
_SCHEMA: Final = pa.schema(
    [("timestamp", pa.int64()), ("value", pa.int64()), ("message", pa.string())]
)
_UNBOUNDED: Final = WalConfig(max_size=2**62, rotation_target=2**62)


class _Speed(NamedTuple):
    mb_s: float
    ratio: float


def run(disk: Disk, directory: Path, plan: Plan, tick: Tick) -> Report:
    """Measure in ``directory``, which is empty before and after."""
    bundles = {rows: make_bundles(rows) for rows in ROW_COUNTS}
    appends: dict[str, dict[str, float]] = {}
    for rows in ROW_COUNTS:
        appends[str(rows)] = _time_appends(disk, directory, bundles[rows], plan, tick)
    crc_gb_s = _time_crc(plan, tick)
    replays: dict[str, _Speed] = {}
    reads: dict[str, _Speed] = {}
    for name, row_counts in _WORKLOADS.items():
        workload = list(_workload([bundles[rows] for rows in row_counts], plan.file_size))
        replays[name] = _time_replay(disk, directory, workload, plan, tick, name)
        reads[name], size = _time_segment_read(disk, directory, workload, plan, tick, name)
    write = _time_segment_write(disk, directory, workload, size, plan, tick)
    figures = {
        "benchmark": "formats",
        **_append_figures(appends),
        "crc_gb_s": round(crc_gb_s, 2),
        "segment_write_mb_s": round(write.mb_s, 1),
        "segment_write_ratio": round(write.ratio, 3),
        **_read_figures("segment_read", reads),
        **_read_figures("replay", replays),
        **_circumstances(directory, plan),
        "bytes": size,
        "bundles": len(workload),
    }
    return Report(figures, _table(figures))


def count_ticks(plan: Plan) -> int:
    """Rounds over everything that is measured."""
    return plan.rounds * (len(ROW_COUNTS) + 2 * len(_WORKLOADS) + 2)


def count_bytes(plan: Plan) -> int:
    """A segment and another in the making; the rest is tables and rounding."""
    return 2 * plan.file_size + plan.file_size // 4 + 10_000_000


BENCHMARK: Final = Benchmark(
    name="formats",
    summary="write-ahead log and segments: encode, append, replay, write, read",
    run=run,
    count_ticks=count_ticks,
    count_bytes=count_bytes,
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


def _workload(kinds: Sequence[Sequence[RecordBundle]], size: int) -> Iterator[RecordBundle]:
    """As many of each kind, in turns, as make a file of about ``size`` bytes."""
    one_of_each = sum(prepare_entry(kind[0]).size for kind in kinds)
    turns = max(1, min(size // one_of_each, MAX_BUNDLES_WRITTEN // len(kinds)))
    for turn in islice(zip(*map(cycle, kinds), strict=True), turns):
        yield from turn


# --- the write-ahead log -----------------------------------------------------------------------


class _Log:
    """A fresh log for each run."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory
        self._writer: WalWriter | None = None

    def open(self) -> None:
        self._writer = WalWriter.open(self._disk, self._directory, _UNBOUNDED)

    def append_all(self, bundles: Iterable[RecordBundle]) -> None:
        assert self._writer is not None  # noqa: S101  # opened before it is timed
        append = self._writer.append
        for bundle in bundles:
            append([prepare_entry(bundle)])

    def remove(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for name in self._disk.list_directory(self._directory):
            if name.startswith(ACTIVE_NAME):
                self._disk.unlink(self._directory / name)


class _PlainFile:
    """A fresh file for each run."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._file: DiskFile | None = None

    def open(self) -> None:
        self._file = self._disk.create(self._path)

    def append_all(self, pieces: Iterable[bytes]) -> None:
        assert self._file is not None  # noqa: S101  # opened before it is timed
        append = self._file.append
        for piece in pieces:
            append([piece])

    def remove(self) -> None:
        if self._file is not None:
            self._file.sync()  # so that writing it back does not disturb the next run
            self._file.close()
            self._file = None
            self._disk.unlink(self._path)


def _time_appends(
    disk: Disk, directory: Path, bundles: Sequence[RecordBundle], plan: Plan, tick: Tick
) -> dict[str, float]:
    """Microseconds for each bundle."""
    entries = [b"".join(prepare_entry(bundle).seal(0)) for bundle in bundles]
    count = max(1, plan.file_size // _APPEND_SHARE // len(entries[0]))
    todo = list(islice(cycle(bundles), count))
    pieces = list(islice(cycle(entries), count))

    def encode() -> None:
        for sequence, bundle in enumerate(todo):
            prepare_entry(bundle).seal(sequence)

    log = _Log(disk, directory)
    plain = _PlainFile(disk, directory / "plain")
    best = race(
        {
            "encode": Contender(encode),
            "plain": Contender(lambda: plain.append_all(pieces), plain.open, plain.remove),
            "append": Contender(lambda: log.append_all(todo), log.open, log.remove),
        },
        plan.rounds,
        lambda: tick(f"append, {bundles[0].row_count} rows"),
    )
    return {name: seconds / count * 1e6 for name, seconds in best.items()}


def _time_replay(
    disk: Disk,
    directory: Path,
    workload: Sequence[RecordBundle],
    plan: Plan,
    tick: Tick,
    name: str,
) -> _Speed:
    log = _Log(disk, directory)
    log.open()
    try:
        log.append_all(workload)
        path = directory / ACTIVE_NAME
        best = race(
            {
                "plain": Contender(_plain_reader(path)),
                "ours": Contender(lambda: _replay(disk, directory, workload)),
            },
            plan.rounds,
            lambda: tick(f"replay, {name}"),
        )
        return _speed(disk.size(path), best)
    finally:
        log.remove()


def _replay(disk: Disk, directory: Path, workload: Sequence[RecordBundle]) -> None:
    count = 0

    def take(item: ReplayedEntry) -> None:
        nonlocal count
        item.entry.bundle(Validation.LAYOUT)
        count += 1

    WalWriter.open(disk, directory, _UNBOUNDED, on_entry=take).close()
    _expect(count, workload)


# --- segments ----------------------------------------------------------------------------------


def _time_segment_read(
    disk: Disk,
    directory: Path,
    workload: Sequence[RecordBundle],
    plan: Plan,
    tick: Tick,
    name: str,
) -> tuple[_Speed, int]:
    """How fast, and the size of the file."""
    path = directory / "read.qseg"

    def read() -> None:
        reader = SegmentReader.open(disk, path)
        for index in range(reader.bundle_count):
            reader.bundle(index)
        _expect(reader.bundle_count, workload)

    try:
        size = _write_segment(disk, path, workload)
        best = race(
            {"plain": Contender(_plain_reader(path)), "ours": Contender(read)},
            plan.rounds,
            lambda: tick(f"segment read, {name}"),
        )
        return _speed(size, best), size
    finally:
        disk.unlink(path)


def _time_segment_write(
    disk: Disk,
    directory: Path,
    workload: Sequence[RecordBundle],
    size: int,
    plan: Plan,
    tick: Tick,
) -> _Speed:
    ours, plain = directory / "written.qseg", directory / "plain"
    whole, rest = divmod(size, _IO_SIZE)
    piece = random.Random(_SEED).randbytes(_IO_SIZE)
    pieces = [piece] * whole + [piece[:rest]]
    best = race(
        {
            "plain": Contender(
                lambda: publish(disk, plain, pieces, read_only=True),
                after=lambda: disk.unlink(plain),
            ),
            "ours": Contender(
                lambda: _write_segment(disk, ours, workload), after=lambda: disk.unlink(ours)
            ),
        },
        plan.rounds,
        lambda: tick("segment write"),
    )
    return _speed(size, best)


def _write_segment(disk: Disk, path: Path, workload: Iterable[RecordBundle]) -> int:
    segment = OpenSegment()
    for sequence, bundle in enumerate(workload):
        segment.append(bundle, sequence)
    return write_segment(disk, path, segment)


# --- shared ------------------------------------------------------------------------------------


def _time_crc(plan: Plan, tick: Tick) -> float:
    """Gigabytes per second."""
    data = random.Random(_SEED).randbytes(plan.file_size)
    best = race({"crc": Contender(lambda: crc32(data))}, plan.rounds, lambda: tick("checksum"))
    return len(data) / best["crc"] / 1e9


def _plain_reader(path: Path) -> Callable[[], None]:
    buffer = bytearray(_IO_SIZE)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return read


def _expect(count: int, workload: Sequence[RecordBundle]) -> None:
    """A figure for work that was not done would be worth nothing."""
    if count != len(workload):
        raise QuiverError(f"{count} bundles came back, {len(workload)} were written")


def _speed(size: int, best: Mapping[str, float]) -> _Speed:
    return _Speed(size / best["ours"] / 1e6, best["plain"] / best["ours"])


# --- results -----------------------------------------------------------------------------------


def _append_figures(appends: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    def by_rows(figure: Callable[[Mapping[str, float]], float]) -> dict[str, float]:
        return {rows: round(figure(times), 3) for rows, times in appends.items()}

    return {
        "wal_encode_us": by_rows(lambda t: t["encode"]),
        "wal_append_us": by_rows(lambda t: t["append"]),
        "wal_append_plain_write_us": by_rows(lambda t: t["plain"]),
        "wal_append_ratio": by_rows(lambda t: t["plain"] / t["append"]),
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
    def times(title: str, key: str) -> list[str]:
        return [title, *(f"{figures[key][rows]:,.1f}" for rows in map(str, ROW_COUNTS)), ""]

    def read(title: str, name: str, part: str, form: str) -> list[str]:
        by_rows = figures[f"{name}_by_rows"]
        cells = [by_rows[str(rows)][part] for rows in ROW_COUNTS] + [figures[f"{name}_{part}"]]
        return [title, *(format(cell, form) for cell in cells)]

    ratios = [f"{figures['wal_append_ratio'][str(rows)]:.2f}" for rows in ROW_COUNTS]
    empty = ["" for _ in ROW_COUNTS]
    rows = [
        times("encode a WAL entry, µs", "wal_encode_us"),
        times("encode and append it, µs", "wal_append_us"),
        times("  plain write of it, µs", "wal_append_plain_write_us"),
        ["  speed to plain", *ratios, ""],
        read("replay, MB/s", "replay", "mb_s", ",.0f"),
        read("  speed to plain", "replay", "ratio", ".2f"),
        read("segment read, MB/s", "segment_read", "mb_s", ",.0f"),
        read("  speed to plain", "segment_read", "ratio", ".2f"),
        ["segment write, MB/s", *empty, f"{figures['segment_write_mb_s']:,.0f}"],
        ["  speed to plain", *empty, f"{figures['segment_write_ratio']:.2f}"],
        ["checksum, GB/s", *empty, f"{figures['crc_gb_s']:.1f}"],
    ]
    title = (
        f"File formats: best of {figures['rounds']} rounds, page cache warm, "
        f"{figures['bytes'] / 1e6:.0f} MB files on {figures['file_system'] or 'this disk'}"
    )
    columns = ["", *(f"{count:,} rows" for count in ROW_COUNTS), _MIX]
    return Table(title, columns, rows)
