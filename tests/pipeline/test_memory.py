"""Memory pressure: a flag with a margin, looked at in the background."""

from __future__ import annotations

import asyncio
import mmap
from pathlib import Path

from receiving import eventually

from quiver.metrics import Metrics
from quiver.pipeline.memory import (
    MemoryPressure,
    give_back,
    machine_bytes,
    memory_limit,
    resident_bytes,
)


class Resident:
    """As much as it is told."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.looks = 0

    def __call__(self) -> int:
        self.looks += 1
        return self.size


def test_the_flag_goes_up_at_the_limit_and_down_well_below() -> None:
    resident = Resident(100)
    metrics = Metrics()
    pressure = MemoryPressure(100, metrics=metrics, resident=resident)
    steps = [(100, False), (101, True), (95, True), (91, True), (90, False), (95, False)]
    for size, expected in steps:
        resident.size = size
        assert pressure.look() is expected
        assert pressure() is expected
        assert metrics.get("quiver.process.resident_bytes") == size
        assert metrics.get("quiver.process.memory_pressure") == expected
    assert metrics.get("quiver.process.memory_shortages_total") == 1


def test_reading_the_flag_looks_at_nothing() -> None:
    resident = Resident(5)
    pressure = MemoryPressure(10, metrics=Metrics(), resident=resident)
    for _ in range(100):
        pressure()
    assert resident.looks == 0


def test_it_is_looked_at_again_and_again() -> None:
    async def run() -> None:
        resident = Resident(5)
        pressure = MemoryPressure(10, metrics=Metrics(), resident=resident, interval=0.01)
        pressure.start()
        assert not pressure()
        resident.size = 11
        await eventually(pressure, "pressure")
        resident.size = 5
        await eventually(lambda: not pressure(), "no pressure")
        resident.size = 11
        await eventually(pressure, "pressure")
        await pressure.stop()
        assert not pressure(), "what is stopped refuses nobody"

    asyncio.run(run())


def test_pages_of_files_are_not_counted(tmp_path: Path) -> None:
    size = 64 * 1024 * 1024
    file = tmp_path / "file"
    file.write_bytes(b"x" * size)
    before = resident_bytes()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert sum(data[at] for at in range(0, size, 4096)) > 0
        assert resident_bytes() < before + size // 2


def test_what_the_machine_says() -> None:
    before = resident_bytes()
    assert 1_000_000 < before < machine_bytes()
    block = bytearray(64 * 1024 * 1024)
    block[::4096] = b"x" * len(block[::4096])
    assert resident_bytes() > before + 32 * 1024 * 1024
    del block
    give_back()
    assert memory_limit(7, 3) == 7
    assert memory_limit(None, 2) == machine_bytes() // 4
