"""Whether memory is short: looked at twice a second, read as a flag.

Receivers refuse while the resident memory of the process is above its limit, and take again when it
is well below. While it is short, allocators are asked to give back what they hold in reserve:
otherwise a burst that is long over would be held against every request that follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pyarrow as pa

from quiver.metrics import Metrics

INTERVAL: Final = 0.5
_ENOUGH: Final = 0.9
"""The share of the limit below which there is enough again."""
_STATM: Final = Path("/proc/self/statm")
_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_KIB: Final = 1024


class MemoryPressure:
    """A flag, up to date while it is started. Calling it reads it."""

    def __init__(
        self,
        limit: int,
        *,
        metrics: Metrics,
        resident: Callable[[], int] | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self._limit = limit
        self._metrics = metrics
        self._resident = resident or resident_bytes
        self._interval = interval
        self._is_short = False
        self._task: asyncio.Task[None] | None = None

    def __call__(self) -> bool:
        return self._is_short

    def start(self) -> None:
        """Look now, and go on looking."""
        self._metrics.set("quiver.process.memory_limit_bytes", self._limit)
        self.look()
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Look no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._is_short = False

    def look(self) -> bool:
        """Bring the flag up to date."""
        resident = self._resident()
        limit = self._limit * _ENOUGH if self._is_short else self._limit
        was_short, self._is_short = self._is_short, resident > limit
        if self._is_short and not was_short:
            self._metrics.count("quiver.process.memory_shortages_total")
        self._metrics.set("quiver.process.resident_bytes", resident)
        self._metrics.set("quiver.process.memory_pressure", self._is_short)
        return self._is_short

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            if self.look():
                await asyncio.to_thread(give_back)


def resident_bytes() -> int:
    """Memory that this process holds; 0 where nobody says.

    Not counted are pages of files, as those of segments that are being read: the system takes them
    back by itself.
    """
    try:
        _, resident, of_files, *_ = map(int, _STATM.read_text().split())
    except (OSError, ValueError):
        return _largest_so_far()
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def memory_limit(chosen: int | None, processes: int) -> int:
    """What was chosen for one process; or half of the machine, shared by all of them."""
    return chosen if chosen is not None else machine_bytes() // 2 // max(1, processes)


def machine_bytes() -> int:
    """Memory of the machine, or what the container is allowed of it."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system says
        return sys.maxsize
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            whole = min(whole, int(path.read_text()))
    return whole


def give_back() -> None:
    """Have the allocators return what they hold in reserve."""
    pa.default_memory_pool().release_unused()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)


def _largest_so_far() -> int:
    try:
        import resource
    except ImportError:  # not every system has it
        return 0
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * _KIB
