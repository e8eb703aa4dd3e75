"""Putting a dead letter back without its consumer: while one runs, and without fencing it.

That consumer remembers the location, and would drop it as a repeat. So the batch is copied to a new
one, which also makes it young in the eyes of the garbage collection; then it is appended as any
producer does; then the letter is removed. A crash before the last step leaves the letter, so the
batch may come twice when this is done again.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from ulid import ULID

from quiver.buffer.appender import Appender, Clock, Pending, wall_clock_ms
from quiver.buffer.bounded import BoundedObjects
from quiver.buffer.dead_letters import DeadLetters
from quiver.buffer.fetching import fetch_batch
from quiver.buffer.handles import Durable
from quiver.buffer.names import batch_location
from quiver.buffer.objects import Objects
from quiver.buffer.ownership import claim_prefix
from quiver.buffer.retrying import retrying
from quiver.buffer.types import NewEntry
from quiver.buffer.watch import patiently
from quiver.config import QueueConfig
from quiver.errors import ObjectsUnavailable
from quiver.metrics import Metrics


async def requeue_letter(
    objects: Objects,
    queue: QueueConfig,
    sequence: int,
    *,
    now_ms: Callable[[], int] = wall_clock_ms,
    random: Random | None = None,
    ulids: Callable[[], ULID] = ULID,
) -> Durable:
    """Put the batch of a dead letter at the end of the queue; where it is now.

    Raises ``ObjectNotFound`` when there is no such letter, and ``BatchLost`` when its batch cannot
    be read: it would only become a dead letter again.
    """
    random = random or Random()  # noqa: S311 - for the pauses between attempts
    bounded = BoundedObjects(objects, queue.attempt_timeout)
    clock = Clock(now_ms)
    await patiently(
        lambda: claim_prefix(bounded, queue),
        what=queue.data_path_prefix,
        config=queue,
        random=random,
    )
    letters = DeadLetters(bounded, queue.data_path_prefix)
    entry = (await letters.get(sequence)).entry
    await fetch_batch(
        objects, entry, queue.max_batch_bytes, attempt_timeout=queue.attempt_timeout
    )  # checked, and thrown away: what is copied are its bytes
    found = await bounded.get(entry.location)
    if found is None:
        raise ObjectsUnavailable(f"{entry.location}: the store answered without the object")
    location = batch_location(queue.data_path_prefix, ulids())
    uploaded = clock.read()
    await retrying(
        lambda: objects.put(location, found.data), what=location, config=queue, random=random
    )
    appender = Appender(
        objects, queue, clock=clock, random=random, metrics=Metrics(), role="producer"
    )
    new = NewEntry(location, entry.metadata, entry.facts)
    (place,) = await appender.append([Pending(new, uploaded)])
    await letters.remove(sequence)
    return Durable(location, place)
