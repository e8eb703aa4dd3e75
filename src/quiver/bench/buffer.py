"""What a queue in object storage costs: ``quiver bench buffer``.

Contention is measured in virtual time (see ``queue_load``): a store with the latencies of one far
away, 1 to 50 producers with 20 calls a second each, which make a batch each 100 ms, and all of them
write one manifest. Each figure is of 30 seconds, two for each round asked for.

=====================  =======================================================================
figure                 what is measured
=====================  =======================================================================
results                by design, then by producers: ``batches_s``; ``calls_s`` that became durable;
                       ``conflicts_percent`` of the writes of the manifest; ``batches_per_write``
                       that was not in vain; ``p50_s`` and ``p99_s`` from a call until it is durable
one_at_a_time          the design of the reference: one flush in flight, a read and a write of the
                       manifest for each, and after a conflict both again at once
pipelined              producers as they are, each writing the manifest
committer              the same, all asking one committer
batches_ratio          by producers: batches per second of ``pipelined`` to ``one_at_a_time``
upload                 by compression, without latency: ``mb_s`` of entries from the first call
                       until all are durable in a local directory, ``plain_mb_s`` of writing the
                       same bytes to as many files with one sync each, and ``ratio``
=====================  =======================================================================

More batches a second are not more data: compare ``calls_s`` for that. Times differ by a fifth and
more from seed to seed, and this is one. ``one_at_a_time`` is a model of that design.

A consumer takes everything out once a second: one conflict a second is its doing. MB are 10^6 bytes
of entries. Requests of spans are the entries of ``upload``, in batches of 4 MB.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

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
from quiver.bench.queue_load import (
    LATENCIES,
    Committed,
    Open,
    measure,
    one_at_a_time,
    pipelined,
)
from quiver.bench.rig import FlatDisk
from quiver.buffer.directory_objects import DirectoryObjects
from quiver.buffer.producer import Producer
from quiver.bundle import Signal
from quiver.config import BatchCompression, ProducerConfig
from quiver.disk import Disk
from quiver.testing.telemetry import Shape, Telemetry

PRODUCERS: Final = (1, 3, 10, 50)
DESIGNS: Final = ("one_at_a_time", "pipelined", "committer")
_BATCH_BYTES: Final = 4_000_000
_MAX_SECONDS: Final = 30.0
_SEED: Final = 20_261_115
_ITEMS: Final = 100
_DIFFERENT: Final = 50
_ROUND_SHARE: Final = 3
_CIRCUMSTANCES: Final = ("latencies_s", "seconds", "python", "cpu_count", "file_system", "rounds")

_Figures = dict[str, dict[str, dict[str, float]]]


def run(disk: Disk, directory: Path, plan: Plan, tick: Tick) -> Results:
    """Measure; ``directory`` is empty before and after."""
    seconds = _seconds(plan)
    results: _Figures = {design: {} for design in DESIGNS}
    for producers in PRODUCERS:
        for design in DESIGNS:
            tick(f"{producers} producers, {design}")
            load = measure(producers, _open(design), seconds=seconds)
            results[design][str(producers)] = load.figures()
    upload = _upload(disk, directory, plan, tick)
    figures: dict[str, Any] = {
        "benchmark": BENCHMARK.name,
        "results": results,
        "batches_ratio": {
            str(producers): round(
                results["pipelined"][str(producers)]["batches_s"]
                / results["one_at_a_time"][str(producers)]["batches_s"],
                2,
            )
            for producers in PRODUCERS
        },
        "upload": upload,
        "latencies_s": dict(LATENCIES),
        "seconds": seconds,
        "python": platform.python_version(),
        "obstore": version("obstore"),
        "cpu_count": os.cpu_count(),
        "file_system": file_system_type(directory),
        "rounds": plan.rounds,
    }
    return Results(figures, _table(results, upload))


def _seconds(plan: Plan) -> float:
    return min(_MAX_SECONDS, 2.0 * plan.rounds)


def _rounds(plan: Plan) -> int:
    return max(1, plan.rounds // _ROUND_SHARE)


BENCHMARK: Final = Benchmark(
    name="buffer",
    run=run,
    count_ticks=lambda plan: len(PRODUCERS) * len(DESIGNS) + len(BatchCompression) * _rounds(plan),
    count_bytes=lambda plan: 2 * plan.file_size + _BATCH_BYTES,
    facts=_CIRCUMSTANCES,
)


def _open(design: str) -> Open:
    designs: dict[str, Open] = {
        "one_at_a_time": one_at_a_time,
        "pipelined": pipelined,
        "committer": Committed(),
    }
    return designs[design]


# --- Without latency ------------------------------------------------------------------------------


def _upload(
    disk: Disk, directory: Path, plan: Plan, tick: Tick
) -> dict[str, dict[str, float | None]]:
    entries = _entries(plan.file_size)
    size = sum(map(len, entries))
    flat = FlatDisk(disk, directory)
    found: dict[str, dict[str, float | None]] = {}
    for compression in BatchCompression:
        best = race(
            {
                "plain": Contender(lambda: _write_plain(flat, directory, entries), flat.remove_all),
                "ours": Contender(
                    lambda c=compression: asyncio.run(  # type: ignore[misc] # bound at once
                        _produce(flat, directory, entries, c)
                    ),
                    flat.remove_all,
                ),
            },
            _rounds(plan),
            lambda c=compression: tick(f"upload, {c}"),  # type: ignore[misc] # likewise
        )
        flat.remove_all()
        found[str(compression)] = {
            "mb_s": round(size / best["ours"] / 1e6, 1),
            "plain_mb_s": round(size / best["plain"] / 1e6, 1),
            "ratio": round(best["plain"] / best["ours"], 3),
        }
    return found


def _entries(size: int) -> list[bytes]:
    different = Telemetry(_SEED, Shape(items_per_request=_ITEMS)).take(Signal.TRACES, _DIFFERENT)
    entries: list[bytes] = []
    total = 0
    while total < size:
        entries.append(different[len(entries) % _DIFFERENT])
        total += len(entries[-1])
    return entries


async def _produce(
    disk: Disk, directory: Path, entries: Sequence[bytes], compression: BatchCompression
) -> None:
    config = ProducerConfig(
        flush_interval=60.0, flush_size_bytes=_BATCH_BYTES, batch_compression=compression
    )
    objects = DirectoryObjects(directory / "queue", disk=disk)
    async with Producer(objects, config, threads=True) as producer:
        for entry in entries:
            await producer.produce([entry], b"\1\3\1\0")


def _write_plain(disk: Disk, directory: Path, entries: Sequence[bytes]) -> None:
    """As many files of the same entries, without anything around them."""
    held: list[bytes] = []
    size = number = 0
    for at, entry in enumerate(entries):
        held.append(entry)
        size += len(entry)
        if size >= _BATCH_BYTES or at == len(entries) - 1:
            file = disk.create(directory / f"plain-{number}")
            file.append([b"".join(held)])
            file.sync()
            file.close()
            held, size, number = [], 0, number + 1


# --- For people -----------------------------------------------------------------------------------


def _table(results: _Figures, upload: Mapping[str, Mapping[str, float | None]]) -> Table:
    rows = [
        (
            f"{producers} producers, {design.replace('_', ' ')}",
            f"{row['batches_s']:,.1f}",
            f"{row['conflicts_percent']:.0f}",
            f"{row['batches_per_write']:.1f}",
            f"{row['p50_s']:.2f}",
            f"{row['p99_s']:.2f}",
            "",
            "",
        )
        for producers in map(str, PRODUCERS)
        for design in DESIGNS
        for row in (results[design][producers],)
    ]
    rows += [
        (f"upload, {compression}", "", "", "", "", "", f"{row['mb_s']}", f"{row['ratio']}")
        for compression, row in upload.items()
    ]
    columns = ("batches/s", "conflicts %", "per write", "p50 s", "p99 s", "MB/s", "to plain")
    return Table("Batches until they are durable", ("", *columns), tuple(rows))
