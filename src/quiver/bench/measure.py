"""How every benchmark measures, and what it hands back.

Contenders take turns: plain, ours, plain, ours, and so on. A slow spell of the machine then meets
all of them, and the best time of each is compared. The best, because other programs can only make a
run slower: it is the nearest to what the code itself costs.

A ratio compares speeds with those of the plain operation on the same bytes in the same run. 1.0 is
as fast, 0.5 half as fast. It means the same on a slow machine as on a fast one; a time does not.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from quiver.disk import Disk
from quiver.errors import InvalidConfig

MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})

Tick = Callable[[str], None]
"""Called with the name of what is measured next, once per round."""


class Plan(NamedTuple):
    """How much to measure."""

    rounds: int = 15
    megabytes: int = 64
    """Size of each file that is read or written as a whole."""

    @property
    def file_size(self) -> int:
        """The same in bytes."""
        return self.megabytes * 1_000_000


class Table(NamedTuple):
    """Results as text, the first column naming the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Results(NamedTuple):
    """The same figures for programs and for people."""

    figures: Mapping[str, Any]
    table: Table


@dataclass(frozen=True, slots=True)
class Benchmark:
    """An entry of the registry."""

    name: str
    run: Callable[[Disk, Path, Plan, Tick], Results]
    count_ticks: Callable[[Plan], int]
    count_bytes: Callable[[Plan], int]
    """The most that lies on disk at a time."""
    facts: tuple[str, ...]
    """The figures that describe the circumstances, to be shown beside the table."""


def _nothing() -> None:
    pass


class Contender(NamedTuple):
    """Something to be timed; ``before`` and ``after`` each run are not."""

    run: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing


def race(
    contenders: Mapping[str, Contender], rounds: int, tick: Callable[[], object] = _nothing
) -> dict[str, float]:
    """The best time of each contender, in seconds."""
    best = dict.fromkeys(contenders, float("inf"))
    gc.collect()
    gc.freeze()  # collections still happen, but do not walk over what the benchmark holds
    try:
        for _ in range(rounds):
            tick()
            for name, contender in contenders.items():
                best[name] = min(best[name], _time_once(contender))
    finally:
        gc.unfreeze()
    return best


def _time_once(contender: Contender) -> float:
    contender.before()
    try:
        start = time.perf_counter()
        contender.run()
        return time.perf_counter() - start
    finally:
        contender.after()


@contextlib.contextmanager
def scratch_directory(disk: Disk, path: Path, needed: int) -> Iterator[Path]:
    """An empty directory with enough space; the files put into it are removed at the end.

    The directory itself stays, empty: a disk of Quiver removes files only.
    """
    disk.make_directory(path)
    if disk.list_directory(path):
        raise InvalidConfig(
            f"{path} is not empty; remove what an interrupted run left there, "
            "or choose another with --directory"
        )
    free = disk.free_space(path)
    if free < needed:
        raise InvalidConfig(
            f"{path} has {free // 10**6} MB free and {needed // 10**6} MB are needed; "
            "choose another with --directory, or use less with --megabytes"
        )
    try:
        yield path
    finally:
        for name in disk.list_directory(path):
            disk.unlink(path / name)


def file_system_type(path: Path) -> str | None:
    """``ext4``, ``tmpfs`` and so on, where the system tells."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    place = path.resolve()
    found: tuple[int, str] | None = None
    for mount in mounts:
        head, _, tail = mount.partition(" - ")
        point = Path(head.split()[4].replace("\\040", " "))
        # Of two mounts at one point the later one is seen, and it is listed later.
        if place.is_relative_to(point) and (found is None or len(point.parts) >= found[0]):
            found = len(point.parts), tail.split()[0]
    return found[1] if found else None
