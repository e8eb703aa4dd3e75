"""Stores that nobody opens any more, because there are fewer cores than last time.

Of the directories ``core_<n>`` beside a store, those with ``n`` at or above the number of cores
belong to nobody. Core ``n`` modulo the number of cores opens each, delivers what it holds to the
same destinations, and closes it when nothing is left. Nothing new is written there. One that
another process still has open is left alone and looked at again later.

A directory that is empty is opened again when somebody asks for one of its dead letters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from quiver.disk import Disk, RealDisk
from quiver.errors import QuiverError, StoreLocked
from quiver.metrics import Metrics
from quiver.pipeline.build import SpareStore
from quiver.pipeline.dead_letters import DeadLetters
from quiver.pipeline.persistence import Persistence
from quiver.store.siblings import PREFIX

logger = logging.getLogger(__name__)

INTERVAL: Final = 5.0
_NUMBER: Final = re.compile(f"{PREFIX}(0|[1-9][0-9]{{0,5}})")


@dataclass(frozen=True, slots=True)
class _Place:
    node: str
    core: int


@dataclass(slots=True)
class Adoption:
    """Opens, drains and closes the stores that belong to nobody, between start and stop."""

    spare: Mapping[str, SpareStore]
    core: int
    cores: int
    metrics: Metrics
    interval: float = INTERVAL
    disk: Disk = field(default_factory=RealDisk)
    _open: dict[_Place, Persistence] = field(default_factory=dict)
    _drained: set[_Place] = field(default_factory=set)
    _troubles: dict[_Place, str] = field(default_factory=dict)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    @property
    def stores(self) -> list[Persistence]:
        """Those that are open now."""
        return list(self._open.values())

    @property
    def drained(self) -> int:
        """How many were emptied and closed."""
        return len(self._drained)

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self, deadline: float) -> None:
        """Deliver until the deadline, then close."""
        self._stopping.set()
        if self._task is not None:
            await self._task  # it is never cancelled: a store that is half open would stay locked
        await asyncio.gather(*(self._end(store, deadline) for store in self._open.values()))
        self._open.clear()

    async def _end(self, store: Persistence, deadline: float) -> None:
        """One that fails to end does not keep the others from it."""
        try:
            await store.stop(deadline)
        except Exception:
            logger.exception("%s did not end well", store.directory)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._step()
            except Exception:
                logger.exception("looking after left-over stores failed")
            self.metrics.set("quiver.adoption.open_stores", len(self._open))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.interval):
                    await self._stopping.wait()

    async def _step(self) -> None:
        for place in await asyncio.to_thread(self._wanted):
            if self._stopping.is_set():
                return
            await self._adopt(place)
        for place, store in list(self._open.items()):
            if not self._stopping.is_set() and await self._is_drained(place, store):
                await self._close(place, store)

    def _wanted(self) -> list[_Place]:
        found = []
        for name, spare in self.spare.items():
            for core in left_over(self.disk, spare.options.path, self.core, self.cores):
                place = _Place(name, core)
                if place in self._open:
                    continue
                if place not in self._drained or self._asked_again(place):
                    found.append(place)
        return found

    async def _adopt(self, place: _Place) -> None:
        store = self.spare[place.node].make(place.core)
        try:
            await store.start()
        except StoreLocked:
            return  # whoever has it delivers what it holds
        except (QuiverError, OSError) as error:
            await store.stop(asyncio.get_running_loop().time())
            if self._troubles.get(place) != str(error):
                self._troubles[place] = str(error)
                logger.error("%s cannot be adopted: %s", store.directory, error)  # noqa: TRY400 - it says all
            return
        self._troubles.pop(place, None)
        self._open[place] = store
        self.metrics.count("quiver.adoption.stores_total", node=place.node)
        logger.info("%s adopts %s until it is empty", place.node, store.directory)

    async def _is_drained(self, place: _Place, node: Persistence) -> bool:
        store = node.store
        try:
            await store.flush_async()
        except (QuiverError, OSError):
            return False
        orphans = set(store.orphans())
        waiting = [info for info in store.subscribers() if info.subscriber_id not in orphans]
        if any(info.pending for info in waiting):
            return False
        return not await asyncio.to_thread(self._asked_again, place)

    async def _close(self, place: _Place, store: Persistence) -> None:
        del self._open[place]
        self._drained.add(place)
        await self._end(store, asyncio.get_running_loop().time())
        logger.info("%s is empty and closed", store.directory)

    def _asked_again(self, place: _Place) -> bool:
        root = self.spare[place.node].options.path / f"{PREFIX}{place.core}"
        try:
            return any(letter.again for letter in DeadLetters(self.disk, root, 0).list())
        except (QuiverError, OSError):
            return False


def left_over(disk: Disk, root: Path, core: int, cores: int) -> list[int]:
    """Numbers of the stores under a root that belong to nobody, and that this core looks after."""
    try:
        names = disk.list_directory(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = [int(match[1]) for name in names if (match := _NUMBER.fullmatch(name))]
    return sorted(number for number in numbers if number >= cores and number % cores == core)
