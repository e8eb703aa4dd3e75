"""What a store must remember for ever, whatever is deleted: its name, numbers and losses.

``quiver.ledger`` in the root of the store, replaced as a whole, one line of JSON and one with the
CRC-32 of it in hex. It is ours: the reference implementation does not look at it.

==================  ==========================================================================
``store_id``        32 hex digits, made once
``next_segment``    no segment below this number will be written again
``next_sequence``   no log entry below this number
``losses``          bundles, items, bytes and segments that were dropped, by reason and subscriber
``starts``          subscribers that start between two bundles: ``["sequence", 7]`` for the first
                    log entry they want, ``["time", 1760000000000000000]`` for the ingestion time
==================  ==========================================================================

It is written before anything is deleted, so that no number can come back. A ledger that cannot be
read is set aside and its numbers are taken from the files that are left.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from quiver.checksum import crc32
from quiver.disk import BytesLike, Disk, publish
from quiver.errors import ChecksumMismatch, FormatError, LimitExceeded

FILE_NAME: Final = "quiver.ledger"
MAX_SIZE: Final = 1024 * 1024
_VERSION = 1


class StartPoint(NamedTuple):
    """The first bundle that a subscriber wants: ``sequence`` or ``time``, and which."""

    kind: str
    value: int


@dataclass(slots=True)
class Ledger:
    """The facts, and whether they differ from the file."""

    store_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    next_segment: int = 0
    next_sequence: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    starts: dict[str, StartPoint] = field(default_factory=dict)
    dirty: bool = True
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def lost(self, counts: dict[str, int]) -> None:
        """Add to the losses. From any thread."""
        with self._counting:
            self.losses.update({name: count for name, count in counts.items() if count})
            self.dirty = True

    def start_at(self, subscriber_id: str, start: StartPoint | None) -> None:
        """Remember where a subscriber starts; None: at the beginning of a segment."""
        with self._counting:
            if self.starts.get(subscriber_id) == start:
                return
            self.starts.pop(subscriber_id, None)
            if start is not None:
                self.starts[subscriber_id] = start
            self.dirty = True

    def raise_numbers(self, next_segment: int, next_sequence: int) -> None:
        """Numbers below these were given out."""
        with self._counting:
            self.next_segment = max(self.next_segment, next_segment)
            self.next_sequence = max(self.next_sequence, next_sequence)
            self.dirty = True

    def store(self, disk: Disk, root: Path) -> None:
        """Put the ledger in place, durably, if it changed."""
        with self._writing:
            with self._counting:
                if not self.dirty:
                    return
                data = encode_ledger(self)
                self.dirty = False
            try:
                publish(disk, root / FILE_NAME, [data])
            except BaseException:
                self.dirty = True
                raise


def encode_ledger(ledger: Ledger) -> bytes:
    """The bytes of the file."""
    facts = {
        "version": _VERSION,
        "store_id": ledger.store_id,
        "next_segment": ledger.next_segment,
        "next_sequence": ledger.next_sequence,
        "losses": dict(sorted(ledger.losses.items())),
        "starts": dict(sorted(ledger.starts.items())),
    }
    body = json.dumps(facts, separators=(",", ":")).encode() + b"\n"
    return body + f"{crc32(body):08x}\n".encode()


def decode_ledger(data: BytesLike, *, source: str) -> Ledger:
    """Read a ledger."""
    raw = bytes(data)
    body, newline, stored = raw.removesuffix(b"\n").rpartition(b"\n")
    body += newline
    if stored != f"{crc32(body):08x}".encode():
        raise ChecksumMismatch(
            source,
            len(body),
            stored=int(stored, 16) if _is_hex(stored) else 0,
            computed=crc32(body),
            what="the ledger",
        )
    try:
        return _ledger_of(json.loads(body))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(source, 0, f"the ledger is not what it should be: {error!r}") from error


def _is_hex(text: bytes) -> bool:
    return re.fullmatch(rb"[0-9a-f]{8}", text) is not None


def _ledger_of(facts: dict[str, Any]) -> Ledger:
    if facts["version"] != _VERSION:
        raise ValueError(f"version {facts['version']}")
    losses = Counter({str(name): int(count) for name, count in facts["losses"].items()})
    starts = {
        str(subscriber_id): StartPoint(str(kind), int(value))
        for subscriber_id, (kind, value) in facts.get("starts", {}).items()
    }
    return Ledger(
        uuid.UUID(hex=facts["store_id"]).hex,
        int(facts["next_segment"]),
        int(facts["next_sequence"]),
        losses,
        starts,
        dirty=False,
    )


def load_ledger(disk: Disk, root: Path) -> Ledger | None:
    """The ledger of a store; None when it has none yet."""
    path = root / FILE_NAME
    if not disk.exists(path):
        return None
    size = disk.size(path)
    if size > MAX_SIZE:
        raise LimitExceeded(str(path), 0, f"{size} bytes; at most {MAX_SIZE} are read")
    return decode_ledger(disk.read(path), source=str(path))
