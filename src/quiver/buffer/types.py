"""What goes through a queue, as values."""

from __future__ import annotations

from typing import NamedTuple


class Metadata(NamedTuple):
    """What a producer says of its entries: from ``start_index`` on, until the next one."""

    start_index: int
    ingestion_time_ms: int
    payload: bytes


class Facts(NamedTuple):
    """What an entry of the manifest says of its batch beyond the format; None: it does not say."""

    object_size: int | None = None
    record_count: int | None = None
    crc32c: int | None = None
    producer_id: str | None = None


class QueueEntry(NamedTuple):
    """One batch in the manifest."""

    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
    facts: Facts = Facts()


class NewEntry(NamedTuple):
    """A batch that is uploaded and not in the manifest yet, so without a sequence."""

    location: str
    metadata: tuple[Metadata, ...]
    facts: Facts = Facts()


class Batch(NamedTuple):
    """A batch that was fetched."""

    entry: QueueEntry
    records: tuple[bytes, ...]

    def payload_of(self, index: int) -> bytes | None:
        """What the producer said of a record; None for nothing."""
        found = None
        for metadata in self.entry.metadata:
            if metadata.start_index > index:
                break
            found = metadata.payload
        return found
