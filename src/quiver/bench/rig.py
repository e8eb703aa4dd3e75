"""What a benchmark of a whole store needs around it: a disk, a thread, a look at memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa

from quiver.disk import Disk, DiskFile, DiskLock

_SAMPLE_INTERVAL: Final = 0.02


class Background:
    """A thread whose error is raised where it is waited for."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - handed on, whatever it is
            self._error = error

    def finish(self) -> None:
        """Wait for the end."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class Memory:
    """How much resident memory grew at most while it was watched."""

    def __init__(self) -> None:
        self.resident_mb: float | None = None
        self.private_mb: float | None = None
        self.growth_mb: float | None = None
        """By how much the peak of the last three quarters of the time is above that of the first"""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """For as long as the ``with`` lasts."""
        start = _resident_bytes()
        if start is None:
            yield
            return
        over = threading.Event()
        samples = [start]

        def look() -> None:
            while not over.wait(_SAMPLE_INTERVAL):
                samples.append(_resident_bytes() or start)

        watcher = Background(look)
        try:
            yield
        finally:
            over.set()
            watcher.finish()
            self.resident_mb = round((max(s[0] for s in samples) - start[0]) / 1e6, 1)
            self.private_mb = round((max(s[1] for s in samples) - start[1]) / 1e6, 1)
            first = max(s[0] for s in samples[: len(samples) // 4 + 1])
            self.growth_mb = round((max(s[0] for s in samples) - first) / 1e6, 1)


def _resident_bytes() -> tuple[int, int] | None:
    """All of it, and what is not of files; None where the system does not tell."""
    try:
        counts = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    resident, shared = int(counts[1]), int(counts[2])
    return resident * page, (resident - shared) * page


class FlatDisk:
    """Puts the files of subdirectories into the directory itself, where they can be removed.

    A disk of Quiver removes no directories. ``store/wal/x`` becomes ``store~wal~x``. Open files
    are those of the disk below: writing and syncing cost nothing extra.
    """

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory

    def _at(self, path: Path) -> Path:
        return self._directory / "~".join(path.relative_to(self._directory).parts)

    def remove_all(self) -> None:
        """Remove every file."""
        for name in self._disk.list_directory(self._directory):
            self._disk.unlink(self._directory / name)

    def lock(self, path: Path, owner: str) -> DiskLock:
        return self._disk.lock(self._at(path), owner)

    def free_space(self, path: Path) -> int:  # noqa: ARG002 - there is one directory
        return self._disk.free_space(self._directory)

    def create(self, path: Path) -> DiskFile:
        return self._disk.create(self._at(path))

    def open_append(self, path: Path) -> DiskFile:
        return self._disk.open_append(self._at(path))

    def rename(self, source: Path, target: Path) -> None:
        self._disk.rename(self._at(source), self._at(target))

    def unlink(self, path: Path) -> None:
        self._disk.unlink(self._at(path))

    def make_directory(self, path: Path) -> None:
        """All files are in one that is there."""

    def sync_dir(self, path: Path) -> None:  # noqa: ARG002 - likewise
        self._disk.sync_dir(self._directory)

    def make_read_only(self, path: Path) -> None:
        self._disk.make_read_only(self._at(path))

    def exists(self, path: Path) -> bool:
        return self._disk.exists(self._at(path))

    def size(self, path: Path) -> int:
        return self._disk.size(self._at(path))

    def list_directory(self, path: Path) -> list[str]:
        prefix = self._at(path).name + "~"
        names = self._disk.list_directory(self._directory)
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return [name for name in inside if "~" not in name]

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> pa.Buffer:
        return self._disk.read(self._at(path), offset, length)

    def map(self, path: Path) -> pa.Buffer:
        return self._disk.map(self._at(path))
