"""What must hold of a queue, watched from inside the store.

``CheckedObjects`` is a simulated store that shows every write of the manifest and every deletion to
a ``Ledger``, together with who made it. The ledger knows what was produced, what was reported
durable and what the sink has; whatever does not fit is a violation.

==========================  ===================================================================
a write of the manifest     adds up; keeps the entries it does not remove; never gives a
                            sequence again, or lists a location twice
by a producer, committer    removes nothing, leaves the epoch, lists only batches that are there
by a consumer               raises the epoch, or owns it; removes only what the sink has, or a
                            dead letter names
while it is reset           is not made by anybody who knows better
a deletion                  is of a batch that neither the manifest nor a dead letter names
a batch that is delivered   is the next one; once for each consumer; records as produced
"durable"                   is said of a batch that was listed, by its place
==========================  ===================================================================
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from quiver.buffer import manifest
from quiver.buffer.dead_letters import decode as decode_letter
from quiver.buffer.handles import Durable
from quiver.buffer.objects import Version
from quiver.buffer.types import Batch
from quiver.errors import FormatError
from quiver.testing.objects import Fault, Kind, SimulatedObjects

MANIFEST: Final = "ingest/manifest"
PREFIX: Final = "ingest"
LETTERS: Final = f"{PREFIX}/dead-letter/"
VANDAL: Final = "vandal"

ACTOR: ContextVar[str] = ContextVar("ACTOR", default="nobody")
"""Who acts. What a task begins, also with a timer, counts as its own."""


class Violation(AssertionError):
    """Something that must never happen did."""


class Origin(NamedTuple):
    """Where a record comes from."""

    producer: str
    number: int


class Ledger:
    """All that was seen of one queue."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.produced: dict[bytes, Origin] = {}
        self.durable: dict[bytes, Durable] = {}
        self.listed: dict[int, str] = {}  # the location of each sequence that there ever was
        self.owners: dict[int, str] = {}  # the consumer of each epoch
        self.damaged: set[str] = set()  # locations that a vandal was at
        self.history: list[bytes] = []
        self.true_manifest: bytes | None = None  # while another is in its place
        self.sink = Sink(self)

    def violated(self, what: str) -> None:
        """Remember it: raising would only reach whoever made the call."""
        self.violations.append(f"{ACTOR.get()}: {what}")

    def expect(self, condition: bool, what: str) -> None:
        """As assert."""
        if not condition:
            self.violated(what)

    # --- The manifest -------------------------------------------------------------------------

    def written(self, objects: CheckedObjects, old: bytes | None, new: bytes) -> None:
        """The manifest is replaced."""
        actor = ACTOR.get()
        if self.true_manifest is not None:
            self.violated("wrote to a manifest that was reset")
            return
        try:
            after, there = manifest.check(new, source=MANIFEST), _places(new)
        except FormatError as error:
            self.violated(f"wrote a manifest that does not add up: {error}")
            return
        before = manifest.check(old or manifest.EMPTY, source=MANIFEST)
        gone = _places(old or manifest.EMPTY)
        self.history.append(new)
        self.expect(after.next_sequence >= before.next_sequence, "took sequences back")
        self.expect(len(set(there.values())) == len(there), "listed a location twice")
        for sequence, location in there.items():
            known = self.listed.setdefault(sequence, location)
            self.expect(known == location, f"gave sequence {sequence} to another batch")
            if gone.pop(sequence, None) is None:
                self.expect(sequence >= before.next_sequence, f"put {sequence} back")
                self.expect(
                    objects.peek(location) is not None or location in self.damaged,
                    f"listed {location}, which is not there",
                )
        if actor.startswith("consumer"):
            self._written_by_consumer(objects, actor, before, after, gone)
        else:
            self.expect(not gone, f"a writer removed entries: {sorted(gone)}")
            self.expect(after.epoch == before.epoch, "a writer changed the epoch")

    def _written_by_consumer(
        self,
        objects: CheckedObjects,
        actor: str,
        before: manifest.Footer,
        after: manifest.Footer,
        gone: dict[int, str],
    ) -> None:
        if after.epoch == before.epoch:
            owner = self.owners.get(after.epoch)
            self.expect(owner == actor, f"wrote with epoch {after.epoch}, which is {owner}'s")
        else:
            self.expect(after.epoch > before.epoch, "lowered the epoch")
            owner = self.owners.setdefault(after.epoch, actor)
            self.expect(owner == actor, f"took epoch {after.epoch}, which is {owner}'s")
        buried = objects.buried()
        for sequence, location in gone.items():
            done = location in self.sink.locations or location in buried
            self.expect(done, f"removed {sequence} before it was processed")

    def deleted(self, objects: CheckedObjects, path: str) -> None:
        """An object is deleted."""
        if not path.endswith(".batch"):
            self.expect(path.startswith(LETTERS), f"deleted {path}")
            return
        data = self.true_manifest or objects.peek(MANIFEST) or manifest.EMPTY
        self.expect(path not in _places(data).values(), f"deleted {path}, which is listed")
        self.expect(path not in objects.buried(), f"deleted {path}, which a dead letter names")
        self.expect(path.count("/") == 1, f"deleted {path}, which is another queue's")

    # --- Producers ----------------------------------------------------------------------------

    def reported(self, records: Iterable[bytes], durable: Durable) -> None:
        """A watcher says that records are durable."""
        place = self.listed.get(durable.sequence)
        self.expect(
            place == durable.location,
            f"said that {durable.location} is durable at {durable.sequence}, where {place} is",
        )
        self.durable.update(dict.fromkeys(records, durable))

    # --- In the end ---------------------------------------------------------------------------

    def check_end(self, repeats_allowed: int) -> None:
        """Everything that was promised was kept; raise ``Violation`` otherwise."""
        order: dict[str, list[int]] = {}
        found: Counter[bytes] = Counter()
        for batch in self.sink.batches:
            requeued = batch.entry.location in self.damaged  # at the end of the queue, so late
            for record in batch.records:
                origin = self.produced.get(record)
                if origin is None:
                    self.violated(f"consumed {record!r}, which nobody produced")
                    continue
                found[record] += 1
                if record in self.durable and not requeued:
                    order.setdefault(origin.producer, []).append(origin.number)
        missing = [record for record in self.durable if not found[record]]
        self.expect(not missing, f"durable and not consumed: {missing[:5]}")
        twice = [record for record, times in found.items() if times > 1]
        self.expect(not twice, f"consumed twice: {twice[:5]}")
        for producer, numbers in order.items():
            self.expect(numbers == sorted(numbers), f"not in the order of {producer}: {numbers}")
        repeats = self.sink.repeats
        self.expect(
            repeats <= repeats_allowed,
            f"{repeats} batches were listed again, {repeats_allowed} of them with a reason",
        )
        self.raise_violations()

    def raise_violations(self) -> None:
        """Raise if there were some."""
        if self.violations:
            raise Violation("\n".join(self.violations[:20]))


class Sink:
    """Where consumers write. It takes a batch and its sequence in one step, or not at all."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.last: int | None = None
        self.batches: list[Batch] = []
        self.locations: set[str] = set()
        self.repeats = 0

    def write(self, batch: Batch, life: Life, buried: set[str]) -> None:
        """Take a batch, if it is the next; older ones come from consumers that started over."""
        sequence, location = batch.entry.sequence, batch.entry.location
        expect, listed = self._ledger.expect, self._ledger.listed
        expect(listed.get(sequence) == location, f"{sequence} is not {location}")
        expect(sequence > life.last, f"{sequence} was delivered after {life.last}")
        expect(location not in life.locations, f"{location} was delivered twice")
        life.last = sequence
        life.locations.add(location)
        for index, record in enumerate(batch.records):
            origin = self._ledger.produced.get(record)
            payload = origin.producer.encode() if origin else None
            expect(batch.payload_of(index) == payload, f"{record!r} came with wrong metadata")
        following = 0 if self.last is None else self.last + 1
        for skipped in range(following, sequence):
            place = listed.get(skipped, "nothing")
            expect(place in self.locations | buried, f"{skipped} at {place} was skipped")
        if sequence < following:
            return
        self.last = sequence
        if location in self.locations:
            self.repeats += 1
            return
        self.locations.add(location)
        self.batches.append(batch)


class Life:
    """What one consumer was given, from its start to its end."""

    def __init__(self) -> None:
        self.last = -1
        self.locations: set[str] = set()


class CheckedObjects(SimulatedObjects):
    """A simulated store whose writes a ledger looks at. Some actors may be cut off from it."""

    def __init__(
        self,
        random: random.Random,
        ledger: Ledger,
        **settings: Any,  # noqa: ANN401 - those of the base
    ) -> None:
        super().__init__(random, **settings)
        self._ledger = ledger
        self._cut_off: set[tuple[str, str | None]] = set()

    def plant(self, path: str, data: bytes) -> Version:
        """Also what ``put`` and ``put_if`` come to, when they arrive."""
        if path == MANIFEST and ACTOR.get() != VANDAL:
            self._ledger.written(self, self.peek(path), data)
        return super().plant(path, data)

    def remove(self, path: str) -> None:
        """Also what ``delete`` comes to."""
        if self.peek(path) is not None and ACTOR.get() != VANDAL:
            self._ledger.deleted(self, path)
        super().remove(path)

    def buried(self) -> set[str]:
        """The locations that dead letters name."""
        return {
            decode_letter(self.peek(path) or b"", source=path).entry.location
            for path in self.paths()
            if path.startswith(LETTERS)
        }

    def cut_off(self, actor: str, path: str | None) -> None:
        """Nothing that the actor writes to the path arrives from now on; None: to any."""
        self._cut_off.add((actor, path))

    def reconnect(self) -> None:
        """Everybody reaches everything again."""
        self._cut_off.clear()

    def _fault(self, kind: Kind, path: str) -> Fault | None:
        actor = ACTOR.get()
        if self._cut_off & {(actor, None)} or (kind == "put_if" and (actor, path) in self._cut_off):
            return Fault.LOST
        return super()._fault(kind, path)


def _places(data: bytes) -> dict[int, str]:
    return {entry.sequence: entry.location for entry in manifest.entries(data, source=MANIFEST)}
