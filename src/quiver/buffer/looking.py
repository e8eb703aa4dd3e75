"""What is in a queue, for people and programs who only look: nothing is written, nobody is fenced.

Everything is read once, one thing after the other, beside a queue that may be at work. A batch that
is listed and not found is looked for once more in a manifest that is read afterwards: a consumer
may have taken it out meanwhile.
"""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

from quiver.buffer import manifest
from quiver.buffer.bounded import BoundedObjects
from quiver.buffer.dead_letters import DeadLetter, DeadLetters
from quiver.buffer.names import ulid_time_ms
from quiver.buffer.objects import ObjectInfo, Objects, Version
from quiver.buffer.types import QueueEntry
from quiver.config import QueueConfig
from quiver.errors import LimitExceeded, ObjectsUnavailable


class QueueManifest(NamedTuple):
    """A manifest, taken apart."""

    size: int
    version: Version
    footer: manifest.Footer
    entries: tuple[QueueEntry, ...]


class QueueView(NamedTuple):
    """A queue at about one moment."""

    manifest: QueueManifest
    batches: dict[str, ObjectInfo]
    """All batches below the prefix, listed or not, by location."""
    letters: tuple[DeadLetter, ...]
    damage: tuple[str, ...]
    """What is listed and not there, or not as it is listed."""

    @property
    def unlisted(self) -> list[ObjectInfo]:
        """Batches that the manifest does not name: consumed, on their way into it, or left over."""
        listed = {entry.location for entry in self.manifest.entries}
        buried = {letter.entry.location for letter in self.letters}
        return [info for path, info in self.batches.items() if path not in listed | buried]


async def read_manifest(objects: Objects, queue: QueueConfig) -> QueueManifest:
    """The manifest as a whole; ``ObjectNotFound`` when there is none."""
    bounded = BoundedObjects(objects, queue.attempt_timeout)
    path, limit = queue.manifest_path, queue.max_manifest_bytes
    tail = await bounded.get_tail(path, manifest.FOOTER_SIZE)
    if tail is not None and tail.size > limit:
        reason = f"the manifest has {tail.size} bytes; queue.max_manifest_bytes is {limit}"
        raise LimitExceeded(path, limit, reason)
    found = await bounded.get(path)
    if found is None:
        raise ObjectsUnavailable(f"{path}: the store answered without the object")
    footer = manifest.check(found.data, source=path)
    entries = manifest.entries(found.data, source=path)
    return QueueManifest(found.size, found.version, footer, entries)


async def look(objects: Objects, queue: QueueConfig) -> QueueView:
    """Everything that belongs to a queue."""
    bounded = BoundedObjects(objects, queue.attempt_timeout)
    prefix = queue.data_path_prefix
    read = await read_manifest(objects, queue)
    batches = {
        info.path: info
        for info in await bounded.list_children(prefix)
        if ulid_time_ms(info.path, prefix) is not None
    }
    dead_letters = DeadLetters(bounded, prefix)
    letters = tuple([await dead_letters.at(path) for path in await dead_letters.paths()])
    suspects = [entry for entry in read.entries if damage_of(entry, batches) is not None]
    if suspects:
        again = {entry.sequence for entry in (await read_manifest(objects, queue)).entries}
        suspects = [entry for entry in suspects if entry.sequence in again]
    damage = tuple(
        f"batch {entry.sequence} at {entry.location}: {damage_of(entry, batches)}"
        for entry in suspects
    )
    return QueueView(read, batches, letters, damage)


def damage_of(entry: QueueEntry, batches: dict[str, ObjectInfo]) -> str | None:
    """What is wrong with the batch of an entry, as far as a listing tells."""
    info = batches.get(entry.location)
    if info is None:
        return "there is no such object"
    said = entry.facts.object_size
    if said is not None and said != info.size:
        return f"it has {info.size} bytes, the manifest says {said}"
    return None


def manifest_document(footer: manifest.Footer, entries: tuple[QueueEntry, ...]) -> dict[str, Any]:
    """A manifest as other tools for this format print it, with the facts where there are some."""
    return {
        "version": manifest.VERSION,
        "epoch": footer.epoch,
        "next_sequence": footer.next_sequence,
        "entries": [entry_document(entry) for entry in entries],
    }


def entry_document(entry: QueueEntry) -> dict[str, Any]:
    """One entry."""
    facts = {name: value for name, value in entry.facts._asdict().items() if value is not None}
    return {
        "sequence": entry.sequence,
        "location": entry.location,
        "metadata": [
            {
                "start_index": item.start_index,
                "ingestion_time_ms": item.ingestion_time_ms,
                "payload_base64": base64.b64encode(item.payload).decode(),
            }
            for item in entry.metadata
        ],
        **({"facts": facts} if facts else {}),
    }
