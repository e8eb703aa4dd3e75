"""A log of equal entries in a simulated disk, for tests of the WAL."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bundles import plain_bundle

from quiver.config import WalConfig
from quiver.testing import SimulatedDisk
from quiver.wal.entry import PreparedEntry, prepare_entry
from quiver.wal.replay import ReplayedEntry
from quiver.wal.writer import Appended, WalWriter

WAL = Path("/store/wal")
ENTRY_SIZE = prepare_entry(plain_bundle(0)).size
TWO_PER_FILE = WalConfig(rotation_target=ENTRY_SIZE + 1, max_size=100 * ENTRY_SIZE)


def prepared(indices: Iterable[int]) -> list[PreparedEntry]:
    return [prepare_entry(plain_bundle(i)) for i in indices]


def opened(
    disk: SimulatedDisk, config: WalConfig = TWO_PER_FILE
) -> tuple[WalWriter, list[ReplayedEntry]]:
    seen: list[ReplayedEntry] = []
    return WalWriter.open(disk, WAL, config, on_entry=seen.append), seen


def append_one_by_one(writer: WalWriter, indices: Iterable[int]) -> list[Appended]:
    return [writer.append(prepared([i]))[0] for i in indices]


def values(entries: Iterable[ReplayedEntry]) -> list[int]:
    return [_first_value(item) for item in entries]


def _first_value(item: ReplayedEntry) -> int:
    batch = item.entry.bundle().batch(30)
    assert batch is not None
    first = batch.column(0)[0].as_py()
    assert isinstance(first, int)
    return first


def overwrite(disk: SimulatedDisk, path: Path, data: bytes) -> None:
    """Put other bytes in a file, as bit rot or a foreign hand does."""
    file = disk.create(path)
    file.append([data])
    file.sync()
    file.close()


def flip(disk: SimulatedDisk, path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(disk.read(path))
    data[offset] ^= 0x10
    overwrite(disk, path, bytes(data))
