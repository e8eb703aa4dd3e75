"""Batches that were given up: ``{prefix}/dead-letter/{sequence}.json``, one object each.

They lie one level below the batches, where no garbage collection looks.

=================  ============================================================================
``sequence``       of the entry in the manifest
``location``       of its batch
``reason``         why it was given up
``time_ms``        when
``metadata``       of the entry: a list of ``start_index``, ``ingestion_time_ms``, ``payload``
                   (base64)
``facts``          of the entry: ``object_size``, ``record_count``, ``crc32c``, ``producer_id``
=================  ============================================================================
"""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

from quiver.buffer.objects import Objects
from quiver.buffer.types import Facts, Metadata, QueueEntry
from quiver.errors import Conflict, FormatError, ObjectNotFound, ObjectsUnavailable, QueueReset


class DeadLetter(NamedTuple):
    """A batch that was given up."""

    entry: QueueEntry
    reason: str
    time_ms: int


class DeadLetters:
    """The list of a queue."""

    def __init__(self, objects: Objects, data_path_prefix: str) -> None:
        self._objects = objects
        self.prefix = f"{data_path_prefix}/dead-letter"

    def path(self, sequence: int) -> str:
        """Where the letter of a sequence is."""
        return f"{self.prefix}/{sequence:020d}.json"

    async def add(self, letter: DeadLetter) -> None:
        """Write a letter. One that is there already stays, if it is of the same batch."""
        path = self.path(letter.entry.sequence)
        try:
            await self._objects.put_if(path, encode(letter), None)
        except (Conflict, ObjectsUnavailable):
            try:
                there = await self.at(path)
            except ObjectNotFound:
                raise ObjectsUnavailable(f"{path}: nobody knows whether it was written") from None
            if there.entry.location != letter.entry.location:
                raise QueueReset(
                    f"{path} is of another batch, {there.entry.location}: the manifest was "
                    "replaced since; look after the old dead letters, then move them away"
                ) from None

    async def get(self, sequence: int) -> DeadLetter:
        """The letter of a sequence; ``ObjectNotFound`` when there is none."""
        return await self.at(self.path(sequence))

    async def at(self, path: str) -> DeadLetter:
        """The letter at a path."""
        found = await self._objects.get(path)
        if found is None:
            raise ObjectsUnavailable(f"{path}: the store answered without the object")
        return decode(found.data, source=path)

    async def paths(self) -> list[str]:
        """Where all letters are, in the order of their sequences."""
        children = await self._objects.list_children(self.prefix)
        return sorted(child.path for child in children if child.path.endswith(".json"))

    async def remove(self, sequence: int) -> None:
        """Take a letter off the list."""
        await self._objects.delete([self.path(sequence)])


def encode(letter: DeadLetter) -> bytes:
    """A letter as JSON."""
    entry = letter.entry
    fields = {
        "sequence": entry.sequence,
        "location": entry.location,
        "reason": letter.reason,
        "time_ms": letter.time_ms,
        "metadata": [
            {**item._asdict(), "payload": base64.b64encode(item.payload).decode()}
            for item in entry.metadata
        ],
        "facts": entry.facts._asdict(),
    }
    return json.dumps(fields, indent=1).encode()


def decode(data: bytes, *, source: str) -> DeadLetter:
    """A letter from its JSON."""
    try:
        return _letter(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(source, 0, f"it is not a dead letter: {error!r}") from error


def _letter(fields: dict[str, Any]) -> DeadLetter:
    metadata = tuple(
        Metadata(
            int(item["start_index"]),
            int(item["ingestion_time_ms"]),
            base64.b64decode(item["payload"], validate=True),
        )
        for item in fields["metadata"]
    )
    facts = Facts(**fields["facts"])
    numbers = (facts.object_size, facts.record_count, facts.crc32c)
    if not all(number is None or isinstance(number, int) for number in numbers):
        raise ValueError("a fact is not a number")
    if not isinstance(fields["location"], str):
        raise TypeError("the location is not a string")
    entry = QueueEntry(int(fields["sequence"]), fields["location"], metadata, facts)
    return DeadLetter(entry, str(fields["reason"]), int(fields["time_ms"]))
