"""Which queue a prefix belongs to: ``{prefix}/.queue`` holds the path of its manifest.

A batch that the manifest does not name is garbage only if no other manifest names it. So a prefix
has one queue, and its first producer or consumer writes that down before anything else.
"""

from __future__ import annotations

from typing import Final

from quiver.buffer.objects import Objects
from quiver.config import QueueConfig
from quiver.errors import ObjectNotFound, QueueError

MARKER: Final = ".queue"


def marker_path(queue: QueueConfig) -> str:
    """Where the name of the owner is."""
    return f"{queue.data_path_prefix}/{MARKER}"


async def check_prefix(objects: Objects, queue: QueueConfig) -> bool:
    """Whether the prefix is this queue's already; a ``QueueError`` when it is another's."""
    path = marker_path(queue)
    try:
        found = await objects.get(path)
    except ObjectNotFound:
        return False
    owner = found.data.decode(errors="replace") if found is not None else ""
    if owner != queue.manifest_path:
        raise QueueError(
            f"the prefix {queue.data_path_prefix!r} belongs to the queue of manifest {owner!r}, "
            f"says {path}; this queue has {queue.manifest_path!r}. Garbage collection would "
            "delete the other's batches: give each queue a prefix of its own"
        )
    return True


async def claim_prefix(objects: Objects, queue: QueueConfig) -> None:
    """Write down that the prefix is this queue's, if that is not there already.

    Raises ``Conflict`` or ``ObjectsUnavailable`` when it has to be tried again.
    """
    if not await check_prefix(objects, queue):
        await objects.put_if(marker_path(queue), queue.manifest_path.encode(), None)
