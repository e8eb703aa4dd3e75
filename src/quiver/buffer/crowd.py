"""Making way: who got through lets others go first, the longer the more there are.

Writers that meet at the manifest cost each other a write each time. A writer that lost cannot know
when its chance comes, and must not be the one that waits: it would lose again to those who do not.
So it is the winner who waits, while more batches gather for its next write. How long, follows from
how often it met others: the fewer of them try at the same time, the fewer try in vain.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

from quiver.config import QueueConfig

PATIENCE: Final = 4.0
"""How long to wait for each conflict, in attempts."""
TOLERANCE: Final = 0.5
"""So many conflicts an append are no crowd: a consumer that removes entries makes as many."""
_WEIGHT: Final = 0.5


class Crowd:
    """How many others there seem to be, as one writer sees it."""

    def __init__(self, config: QueueConfig, random: Random) -> None:
        self._config = config
        self._random = random
        self._conflicts = 0.0
        self._attempt = 0.0
        self._not_before = 0.0

    async def make_way(self) -> None:
        """Wait until it is this writer's turn again."""
        left = self._not_before - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.sleep(left)

    def got_through(self, conflicts: int, begun: float) -> None:
        """An append is done, after so many conflicts; its last attempt began then."""
        now = asyncio.get_running_loop().time()
        self._conflicts += _WEIGHT * (conflicts - self._conflicts)
        self._attempt += _WEIGHT * (now - begun - self._attempt)
        pause = PATIENCE * max(0.0, self._conflicts - TOLERANCE) * self._attempt
        pause = min(self._config.max_backoff, pause)
        self._not_before = now + self._random.uniform(0.5, 1.0) * pause
