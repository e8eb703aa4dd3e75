"""One write of the manifest for everybody who asks meanwhile: what a committer does.

Who asks waits until the write has landed that names its batches. While one is on its way all
further requests gather for the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from quiver.buffer.appender import Appender, Clock, Instant, Pending, StaleUpload
from quiver.buffer.committer_wire import Append, Done, Refused
from quiver.buffer.objects import Objects
from quiver.config import QueueConfig
from quiver.errors import QueueError, QuiverError
from quiver.metrics import Metrics

MAX_APPEND: Final = 1024


@dataclass(slots=True, eq=False)
class _Request:
    """What one producer waits for."""

    asked: Append
    pending: list[Pending]
    deadline: float
    answer: asyncio.Future[Done | Refused] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def done(self, sequences: dict[str, int]) -> None:
        """They are in the manifest."""
        places = tuple(sequences[one.entry.location] for one in self.pending)
        self._settle(Done(self.asked.request_id, places))

    def refuse(self, error: Exception) -> None:
        """They are not, or nobody knows."""
        unclear = any(one.unsure_from is not None for one in self.pending)
        self._settle(Refused(self.asked.request_id, unclear, str(error)))

    def _settle(self, answer: Done | Refused) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class GroupCommit:
    """Appends for many, as long as ``run`` runs."""

    def __init__(
        self,
        objects: Objects,
        config: QueueConfig,
        *,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        max_append: int = MAX_APPEND,
    ) -> None:
        self._clock = clock
        self._max_append = max_append
        # Producers wait for one attempt_timeout, then do it themselves: do not outlast them.
        patience = min(config.give_up_after, config.attempt_timeout / 2)
        self._appender = Appender(
            objects,
            replace(config, give_up_after=patience),
            clock=clock,
            random=random,
            metrics=metrics,
            role="committer",
        )
        self._waiting: deque[_Request] = deque()
        self._wanted = asyncio.Event()

    @property
    def conflict_rate(self) -> float:
        """How many of 100 writes of the manifest met another writer's."""
        return self._appender.conflict_rate

    async def commit(self, asked: Append) -> Done | Refused:
        """Append what a producer asks for, with what others ask for meanwhile."""
        now = self._clock.read()
        uploaded = Instant(now.loop - asked.age_ms / 1000, now.wall_ms - asked.age_ms)
        request = _Request(
            asked,
            [Pending(entry, uploaded, shared=True) for entry in asked.entries],
            now.loop + asked.patience_ms / 1000,
        )
        self._waiting.append(request)
        self._wanted.set()
        return await request.answer

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._wanted.wait()
            group = self._take_group()
            if not self._waiting:
                self._wanted.clear()
            try:
                await self._commit(group)
            except Exception as error:  # noqa: BLE001 - the next group must not wait forever
                for request in group:
                    request.refuse(error)

    def _take_group(self) -> list[_Request]:
        """As many waiting requests as one write may hold, but one at least."""
        group: list[_Request] = []
        entries = 0
        now = asyncio.get_running_loop().time()
        while self._waiting:
            request = self._waiting[0]
            if group and entries + len(request.pending) > self._max_append:
                break
            self._waiting.popleft()
            if now >= request.deadline:
                request.refuse(QueueError("the request waited for too long"))
            else:
                group.append(request)
                entries += len(request.pending)
        return group

    async def _commit(self, group: Sequence[_Request]) -> None:
        while group:
            pending = _once_each(group)
            try:
                sequences = await self._appender.append(list(pending.values()))
            except StaleUpload as error:
                stale = {one.entry.location for one in error.stale}
                for request in group:
                    if any(one.entry.location in stale for one in request.pending):
                        request.refuse(error)
                group = [request for request in group if not request.answer.done()]
            except QuiverError as error:
                for request in group:
                    request.refuse(error)
                return
            else:
                places = dict(zip(pending, sequences, strict=True))
                for request in group:
                    request.done(places)
                return


def _once_each(group: Sequence[_Request]) -> dict[str, Pending]:
    """What is asked for twice, by a producer that asks again, is appended once."""
    pending: dict[str, Pending] = {}
    for request in group:
        request.pending = [pending.setdefault(one.entry.location, one) for one in request.pending]
    return pending
