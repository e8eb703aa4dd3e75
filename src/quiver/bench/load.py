"""What the benchmark of the store puts in and takes out, and how long each call took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Final, NamedTuple

from quiver.bench.formats import make_bundles
from quiver.bundle import RecordBundle
from quiver.errors import StorageAtCapacity
from quiver.store.store import Store
from quiver.wal.entry import prepare_entry

SUBSCRIBER: Final = "bench"
PATIENCE: Final = 60.0
MANY_PRODUCERS: Final = 64
MAX_BUNDLES: Final = {1: 256, MANY_PRODUCERS: 1_024}  # short rounds, many of them: disks have moods


class Load(NamedTuple):
    """Bundles, and the same as the log has them."""

    rows: int
    producers: int
    bundles: list[RecordBundle]
    entries: list[bytes]

    @classmethod
    def make(cls, rows: int, producers: int, size: int) -> Load:
        """As many bundles as take about ``size`` bytes, or fewer; each producer has one."""
        kinds = make_bundles(rows)
        sealed = [b"".join(prepare_entry(bundle).seal(0)) for bundle in kinds]
        count = max(producers, min(size // len(sealed[0]), MAX_BUNDLES[producers]))
        return cls(
            rows,
            producers,
            list(islice(cycle(kinds), count)),
            list(islice(cycle(sealed), count)),
        )

    @property
    def size(self) -> int:
        return sum(map(len, self.entries))


@dataclass(slots=True)
class Sample:
    """One round of calls."""

    seconds: float = 0.0
    until_readable: float = 0.0
    groups: int = 1
    segments: int = 0
    refused: int = 0
    latencies: list[float] = field(default_factory=list)

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3

    @property
    def p50_ms(self) -> float:
        return self.percentile_ms(0.5)

    @property
    def p99_ms(self) -> float:
        return self.percentile_ms(0.99)

    @property
    def max_ms(self) -> float:
        return max(self.latencies) * 1e3


def least(samples: Sequence[Sample], figure: Callable[[Sample], float]) -> float:
    """The best round by one figure."""
    return min(map(figure, samples))


def produce(store: Store, load: Load, sample: Sample) -> None:
    """One thread, one call after the other."""
    for bundle in load.bundles:
        start = time.perf_counter()
        while True:
            try:
                store.ingest(bundle)
                break
            except StorageAtCapacity:
                sample.refused += 1
                time.sleep(0.001)
        sample.latencies.append(time.perf_counter() - start)


async def produce_with_tasks(store: Store, load: Load, sample: Sample) -> None:
    """As many tasks as there are producers."""
    left = iter(load.bundles)

    async def produce() -> None:
        for bundle in left:
            start = time.perf_counter()
            while True:
                try:
                    await store.ingest_async(bundle)
                    break
                except StorageAtCapacity:
                    sample.refused += 1
                    await asyncio.sleep(0.001)
            sample.latencies.append(time.perf_counter() - start)

    async with asyncio.TaskGroup() as group:
        for _ in range(load.producers):
            group.create_task(produce())


def read_all(store: Store, expected: int) -> None:
    """The subscriber: read and acknowledge until everything came."""
    count = 0
    while count < expected:
        handle = store.next_bundle(SUBSCRIBER, PATIENCE)
        if handle is None:
            break
        with handle:
            count += 1
    check_count(count, expected)


def check_count(count: int, expected: int) -> None:
    """A figure for work that was not done would be worth nothing."""
    if count != expected:
        raise RuntimeError(f"{count} bundles came back, {expected} were written")
