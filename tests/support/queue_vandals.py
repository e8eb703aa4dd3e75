"""What is drawn for a world around a queue, and what is done to it: outages, damage, resets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from queue_checks import MANIFEST, PREFIX, CheckedObjects, Ledger
from ulid import ULID

from quiver.buffer import manifest
from quiver.buffer.names import batch_location
from quiver.config import LostBatchPolicy, QueueConfig
from quiver.testing.objects import NO_FAULTS, Faults

GRACE: Final = 60.0
QUEUE: Final = QueueConfig(
    attempt_timeout=4, give_up_after=300, max_backoff=3, gc_grace_period=GRACE
)
NESTED: Final = batch_location(f"{PREFIX}/other", ULID(bytes(16)))
"""A batch of another queue, below the prefix of this one, and older than anything else."""

_WEATHER: Final = (
    NO_FAULTS,
    Faults(lost=0.02, unanswered=0.02, repeated=0.02, late=0.01, slow=0.01),
    Faults(lost=0.05, unanswered=0.1, repeated=0.1, late=0.03, slow=0.03),
    Faults(unanswered=0.25),
    Faults(repeated=0.25),
    Faults(late=0.1, slow=0.1),
)


@dataclass(frozen=True, slots=True)
class Script:
    """What is drawn once for a world."""

    producers: int
    calls: int
    pace: float
    committer: bool
    resets: bool
    damages: bool
    policy: LostBatchPolicy
    weather: Faults

    @classmethod
    def drawn(cls, random: Random) -> Script:
        """One of many."""
        special = random.choice(["committer", "resets", "damages", "none"])
        return cls(
            producers=random.randrange(2, 5),
            calls=random.randrange(8, 24),
            pace=random.choice([0.3, 3.0, 12.0]),
            committer=special == "committer",
            resets=special == "resets",
            damages=special == "damages",
            policy=random.choice(list(LostBatchPolicy)),
            weather=random.choice(_WEATHER),
        )


class Vandal:
    """Somebody who does to a store what must not happen to it, but does."""

    def __init__(
        self,
        random: Random,
        script: Script,
        objects: CheckedObjects,
        ledger: Ledger,
        *,
        producing: Callable[[], list[str]],
        known: Callable[[], int],
    ) -> None:
        self._random = random
        self._script = script
        self._objects = objects
        self._ledger = ledger
        self._producing = producing
        self._known = known
        self._damaged: dict[str, bytes] = {}

    async def run(self) -> None:
        """One deed after the other."""
        deeds: list[Callable[[], Awaitable[None]]]
        deeds = [self._have_an_outage, self._cut_somebody_off, self._cut_somebody_off]
        if self._script.damages:
            deeds = [self._damage]
        if self._script.resets:
            deeds = [self._reset]
        while True:
            await asyncio.sleep(self._random.expovariate(1 / (4 * self._script.pace)))
            await self._random.choice(deeds)()

    def repair(self) -> None:
        """Put everything back as it was."""
        if self._ledger.true_manifest is not None:
            self._objects.plant(MANIFEST, self._ledger.true_manifest)
            self._ledger.true_manifest = None
        for location in list(self._damaged):
            self._mend(location)

    async def _have_an_outage(self) -> None:
        self._objects.faults = Faults(lost=self._random.choice([0.5, 1.0]))
        await asyncio.sleep(self._random.choice([1, 10, 60]))
        self._objects.faults = self._script.weather

    async def _cut_somebody_off(self) -> None:
        """So that its batches are uploaded, and get old before they are listed."""
        actors = self._producing()
        if self._script.committer:
            actors.append("committer")
        if not actors:
            return
        paths = [MANIFEST, MANIFEST, MANIFEST, None]
        self._objects.cut_off(self._random.choice(actors), self._random.choice(paths))
        await asyncio.sleep(self._random.choice([10, 3 * GRACE, 3 * GRACE]))
        self._objects.reconnect()

    async def _damage(self) -> None:
        """Delete or change a batch that is listed, and mend it later."""
        location = self._random.choice(await self._waiting_batches())
        whole = self._objects.peek(location)
        if whole is None:
            return
        self._damaged[location] = whole
        self._ledger.damaged.add(location)
        if self._random.random() < 0.5:
            self._objects.remove(location)
        else:
            self._objects.plant(location, whole[:4] + bytes([whole[4] ^ 1]) + whole[5:])
        await asyncio.sleep(self._random.choice([5, 40, 3 * GRACE]))
        if self._script.policy is LostBatchPolicy.STOP:
            self._mend(location)

    def _mend(self, location: str) -> None:
        self._objects.plant(location, self._damaged.pop(location))

    async def _waiting_batches(self) -> list[str]:
        """Wait until there are batches that are listed and not processed; all of them."""
        while True:
            data = self._objects.peek(MANIFEST) or manifest.EMPTY
            done = self._ledger.sink.locations | self._damaged.keys()
            if locations := manifest.locations(data, source=MANIFEST).keys() - done:
                return sorted(locations)
            await asyncio.sleep(0.03)

    async def _reset(self) -> None:
        """Put an old manifest in the place of the right one for a while, or none."""
        await self._waiting_batches()
        while (known := self._known()) < 0:  # noqa: ASYNC110 - nobody tells when that changes
            await asyncio.sleep(0.3)
        old = [
            data
            for data in self._ledger.history
            if manifest.check(data, source=MANIFEST).next_sequence <= known
        ]
        true = self._objects.peek(MANIFEST)
        # Until then somebody's attempt to create it may still be on its way.
        may_be_gone = asyncio.get_running_loop().time() > GRACE
        if old and not (may_be_gone and self._random.random() < 0.3):
            self._objects.plant(MANIFEST, self._random.choice(old))
        elif may_be_gone:
            self._objects.remove(MANIFEST)
        else:
            return
        self._ledger.true_manifest = true
        await asyncio.sleep(self._random.choice([1, 10, 3 * GRACE]))
        self.repair()
