"""When to try again: pauses that grow, with chance in them, for a bundle and for a destination.

A bundle that was refused waits longer each time. A destination that refused several in a row gets
nothing for a while, and then one bundle to see whether it is back: an outage costs a few attempts,
however large the backlog. One success ends it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from quiver.pipeline.settings.options import RetryOptions

REFUSALS_TO_PAUSE: Final = 3
_MAX_EXPONENT: Final = 64  # beyond this the largest pause is reached with any multiplier


def pause(options: RetryOptions, attempt: int, chance: random.Random) -> float:
    """Seconds before the next attempt; ``attempt`` counts from 1."""
    exponent = min(attempt - 1, _MAX_EXPONENT)
    full = min(options.max_interval, options.initial_interval * options.multiplier**exponent)
    return full * (1 - options.jitter * chance.random())


@dataclass(slots=True)
class Outage:
    """Whether a destination can be expected to answer."""

    options: RetryOptions
    chance: random.Random
    refusals: int = field(default=0, init=False)
    _closed_until: float = field(default=0.0, init=False)
    _is_probing: bool = field(default=False, init=False)

    @property
    def is_out(self) -> bool:
        """Whether it refused too many in a row."""
        return self.refusals >= REFUSALS_TO_PAUSE

    def wait(self, now: float) -> float | None:
        """Seconds until the next item may be sent: 0 for now, None while a probe is on its way."""
        if not self.is_out:
            return 0.0
        if self._is_probing:
            return None
        return max(0.0, self._closed_until - now)

    def sent(self) -> None:
        """An item is on its way."""
        self._is_probing = self.is_out

    def succeeded(self) -> bool:
        """It was taken; whether that ends an outage."""
        was_out = self.is_out
        self.refusals = 0
        self._is_probing = False
        return was_out

    def refused(self, now: float, retry_after: float | None) -> None:
        """It was not taken; ``retry_after`` is what the other side asked for."""
        self.refusals += 1
        self._is_probing = False
        if self.is_out:
            delay = pause(self.options, self.refusals - REFUSALS_TO_PAUSE + 1, self.chance)
            self._closed_until = max(self._closed_until, now + max(delay, retry_after or 0.0))
