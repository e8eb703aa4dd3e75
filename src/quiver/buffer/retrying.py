"""How often a call to the object store is tried again, and when it is given up.

Each attempt has ``attempt_timeout``; between two attempts is a pause that doubles up to
``max_backoff`` and is drawn at random below that bound, so that writers that met once do not meet
again. After a conflict it stays short for long: see ``step_aside``. All attempts together have
``give_up_after``. Time is the event loop's, so a simulated loop decides how fast it passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, TypeVar

from quiver.config import QueueConfig
from quiver.errors import ObjectsUnavailable, QueueError

FIRST_PAUSE: Final = 0.05
_MAX_DOUBLINGS: Final = 30
_CONFLICTS_PER_DOUBLING: Final = 64

Result = TypeVar("Result")


class Backoff:
    """The pauses between the attempts at one operation, from now until it is given up."""

    def __init__(self, config: QueueConfig, random: Random) -> None:
        self._config = config
        self._random = random
        self._deadline = asyncio.get_running_loop().time() + config.give_up_after
        self._failures = self._conflicts = 0

    @property
    def failures(self) -> int:
        """How many attempts failed so far."""
        return self._failures

    async def pause(self, error: QueueError, what: str) -> None:
        """Wait before the next attempt; raise when there is no time for one."""
        self._failures += 1
        doublings = min(self._failures - 1, _MAX_DOUBLINGS)
        await self._wait(error, what, FIRST_PAUSE * 2**doublings)

    async def step_aside(self, error: QueueError, what: str) -> None:
        """Wait a moment after meeting somebody else; raise when there is no time for more.

        The pause hardly grows: whoever lost often must not lose even more. Who wins makes way.
        """
        doublings = min(self._conflicts // _CONFLICTS_PER_DOUBLING, _MAX_DOUBLINGS)
        self._conflicts += 1
        await self._wait(error, what, FIRST_PAUSE * 2**doublings)

    async def _wait(self, error: QueueError, what: str, bound: float) -> None:
        left = self._deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise ObjectsUnavailable(
                f"{what}: given up after {self._failures + self._conflicts} attempts in "
                f"{self._config.give_up_after:g} s; the last one said: {error}"
            ) from error
        bound = min(self._config.max_backoff, bound)
        await asyncio.sleep(min(left, self._random.uniform(0, bound)))


async def within(seconds: float, what: str, call: Awaitable[Result]) -> Result:
    """Await one call; no answer in time is an ``ObjectsUnavailable``, as is any other."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError as error:
        raise ObjectsUnavailable(f"{what}: no answer within {seconds:g} s") from error


async def retrying(
    call: Callable[[], Awaitable[Result]],
    *,
    what: str,
    config: QueueConfig,
    random: Random,
    failed: Callable[[], None] | None = None,
) -> Result:
    """Call until it does not raise ``ObjectsUnavailable``; ``failed`` hears of each that does.

    Only for what may happen twice: a read, or a write of the same bytes to the same place.
    """
    backoff = Backoff(config, random)
    while True:
        try:
            return await within(config.attempt_timeout, what, call())
        except ObjectsUnavailable as error:
            if failed is not None:
                failed()
            await backoff.pause(error, what)
