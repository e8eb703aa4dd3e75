"""Bugs to plant into the queue, one at a time, for the exploration to find.

Each is a context in which the code under test does something that it must not: a check left out, a
step too early, one too many. ``BUGS`` names them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, TypeVar, cast
from unittest import mock

from ulid import ULID

from quiver.buffer import appender, collector, fetching, manifest, retrying, watch
from quiver.buffer.appender import Appender, Known, Pending, StaleUpload
from quiver.buffer.collector import Collector
from quiver.buffer.committer_wire import Append, Done
from quiver.buffer.consumer import Consumer
from quiver.buffer.dead_letters import DeadLetters
from quiver.buffer.group_commit import GroupCommit
from quiver.buffer.handles import Durable
from quiver.buffer.line import Line
from quiver.buffer.manifest import Footer
from quiver.buffer.names import ulid_time_ms
from quiver.buffer.objects import ObjectInfo, Version
from quiver.buffer.types import Batch
from quiver.buffer.uploading import OutgoingBatch, Uploader
from quiver.buffer.watch import ManifestWatch
from quiver.errors import (
    BatchLost,
    Fenced,
    ObjectNotFound,
    ObjectsUnavailable,
    QueueReset,
)
from quiver.testing.objects import SimulatedObjects

Result = TypeVar("Result")
Plant = Callable[[], AbstractContextManager[object]]
BUGS: Final[dict[str, Plant]] = {}


def _bug(name: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        BUGS[name] = plant
        return plant

    return register


def _patched(*patches: AbstractContextManager[object]) -> ExitStack:
    stack = ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def _nothing(*_args: object) -> None:
    """In place of a check."""


# --- Producers --------------------------------------------------------------------------------


@_bug("an append does not look whether it is there already")
def _no_idempotence() -> AbstractContextManager[object]:
    return mock.patch.object(Pending, "unclear", property(lambda _self: False))


@_bug("a batch whose append was not answered is appended under another name")
def _another_name() -> AbstractContextManager[object]:
    original = Appender._write

    async def write(self: Appender, known: Known, missing: Sequence[Pending]) -> dict[str, int]:
        names = [one.entry.location for one in missing]
        for one in missing:
            if one.unsure_from is not None:
                objects = cast("SimulatedObjects", self._objects)
                data = objects.peek(one.entry.location) or b""
                location = f"ingest/{ULID.from_timestamp(self._clock.now_ms() / 1000)}.batch"
                objects.plant(location, data)
                one.entry = one.entry._replace(location=location)
        added = await original(self, known, missing)
        return added | {
            name: added[one.entry.location] for name, one in zip(names, missing, strict=True)
        }

    return mock.patch.multiple(Appender, _write=write, _append_to=_append_without_looking)


async def _append_without_looking(
    self: Appender, known: Known, pending: Sequence[Pending]
) -> list[int]:
    names = [one.entry.location for one in pending]
    added = await self._write(known, pending)
    return [added[name] for name in names]


@_bug("the manifest is written without comparing")
def _no_comparison() -> AbstractContextManager[object]:
    async def put_if(
        self: SimulatedObjects, path: str, data: bytes, _expected: Version | None
    ) -> Version:
        return await self._call("put_if", path, lambda: self.plant(path, data))

    return mock.patch.object(SimulatedObjects, "put_if", put_if)


@_bug("a write that was not answered counts as done")
def _error_as_success() -> AbstractContextManager[object]:
    original = retrying.within

    async def within(seconds: float, what: str, call: Coroutine[Any, Any, Result]) -> Result:
        writes = "put_if" in repr(call)
        try:
            return await original(seconds, what, call)
        except ObjectsUnavailable:
            if writes:
                return cast("Result", Version("believed"))
            raise

    return mock.patch.object(appender, "within", within)


@_bug("a watcher says durable before the manifest is written")
def _durable_too_early() -> AbstractContextManager[object]:
    original = Line._append

    async def append(self: Line, ready: list[tuple[OutgoingBatch, Pending]]) -> None:
        for place, (batch, pending) in enumerate(ready):
            batch.settling.settle(Durable(pending.entry.location, place))
        await original(self, ready)

    return mock.patch.object(Line, "_append", append)


@_bug("a batch is appended as soon as it is uploaded, whatever is before it")
def _no_order() -> AbstractContextManager[object]:
    def take(self: Line, _at_most: int) -> list[tuple[OutgoingBatch, Pending]]:
        ready = []
        for batch in list(self._waiting):
            if batch.upload is not None and batch.upload.done():
                self._waiting.remove(batch)
                uploaded = batch.upload.result()
                if isinstance(uploaded, Pending):
                    ready.append((batch, uploaded))
                else:
                    self._settle(batch, uploaded)
        return ready[::-1]

    return mock.patch.object(Line, "_take_uploaded", take)


@_bug("a batch that was uploaded long ago is appended all the same")
def _stale_appended() -> AbstractContextManager[object]:
    return mock.patch.object(Appender, "check_fresh", _nothing)


@_bug("a batch that was uploaded long ago only counts as uploaded again")
def _no_second_upload() -> AbstractContextManager[object]:
    async def again(self: Uploader, _batch: OutgoingBatch, pending: Pending) -> None:
        pending.uploaded = self._clock.read()

    return mock.patch.object(Uploader, "upload_again", again)


@_bug("a producer accepts a manifest that was reset")
def _producer_accepts_reset() -> AbstractContextManager[object]:
    def remember(self: Appender, known: Known) -> Known:
        self._known = known
        return known

    return mock.patch.object(Appender, "_remember", remember)


@_bug("a committer answers before it has written")
def _committer_too_early() -> AbstractContextManager[object]:
    original = GroupCommit.commit
    working = set()

    async def commit(self: GroupCommit, asked: Append) -> Done:
        working.add(asyncio.ensure_future(original(self, asked)))
        first = self._appender._next_sequence
        return Done(asked.request_id, tuple(range(first, first + len(asked.entries))))

    return mock.patch.object(GroupCommit, "commit", commit)


@_bug("a committer says done when it could not write")
def _committer_forgets() -> AbstractContextManager[object]:
    original = Appender.append

    async def append(
        self: Appender, pending: Sequence[Pending], more: Callable[[], Sequence[Pending]] = tuple
    ) -> list[int]:
        try:
            return await original(self, pending, more)
        except (StaleUpload, ObjectsUnavailable):
            if self._role == "committer":
                return [self._next_sequence for _ in pending]
            raise

    return mock.patch.object(Appender, "append", append)


# --- Consumers --------------------------------------------------------------------------------


@_bug("a consumer that is fenced goes on")
def _unfenced() -> AbstractContextManager[object]:
    original = ManifestWatch._judge

    def judge(self: ManifestWatch, footer: Footer) -> None:
        try:
            original(self, footer)
        except Fenced:
            self._fenced = None

    return mock.patch.object(ManifestWatch, "_judge", judge)


@_bug("a consumer does not raise the epoch")
def _no_epoch() -> AbstractContextManager[object]:
    return mock.patch.object(manifest, "next_epoch", lambda epoch: epoch)


@_bug("a consumer removes one entry too many")
def _one_too_many() -> AbstractContextManager[object]:
    original = ManifestWatch.dequeue

    async def dequeue(self: ManifestWatch, through: int) -> None:
        await original(self, through + 1)

    return mock.patch.object(ManifestWatch, "dequeue", dequeue)


@_bug("a manifest that gets empty starts at sequence 0 again")
def _sequences_reused() -> AbstractContextManager[object]:
    original = manifest.dequeue

    def dequeue(data: bytes, through: int, *, source: str) -> bytes:
        new = original(data, through, source=source)
        footer = manifest.decode_footer(new, source=source)
        return new if footer.entry_count else Footer(0, 0, footer.epoch).encode()

    return mock.patch.object(manifest, "dequeue", dequeue)


@_bug("a consumer gives out repeats")
def _repeats() -> AbstractContextManager[object]:
    return mock.patch.object(Consumer, "_remember", _nothing)


@_bug("a consumer accepts a manifest that was reset")
def _consumer_accepts_reset() -> AbstractContextManager[object]:
    original = ManifestWatch._take_over

    async def take_over(self: ManifestWatch, last_acked: int | None) -> object:
        try:
            return await original(self, last_acked)
        except QueueReset:
            return await original(self, None)

    return mock.patch.object(ManifestWatch, "_take_over", take_over)


@_bug("a consumer that runs accepts a manifest that was reset")
def _running_consumer_accepts_reset() -> AbstractContextManager[object]:
    original = ManifestWatch._refresh

    async def refresh(self: ManifestWatch) -> None:
        try:
            await original(self)
        except QueueReset as reset:
            try:
                found = await self._objects.get(self._path)
            except ObjectNotFound:
                raise reset from None
            if found is None:
                raise
            footer = manifest.check(found.data, source=self._path)
            self._known = watch.Known(found.data, found.version, footer)
            self._position, self._offset, self._unsure = self._known.first, 0, False

    return mock.patch.object(ManifestWatch, "_refresh", refresh)


@_bug("a consumer moves on before it has the batch")
def _cursor_first() -> AbstractContextManager[object]:
    async def next_batch(self: Consumer) -> Batch | None:
        async with self._reading:
            await self._poll()
            entry = self._head()
            if entry is None:
                return None
            self._hand_out(self._waiting.popleft())
        try:
            return await self.fetch(entry)
        except (ObjectsUnavailable, BatchLost):
            return None

    return mock.patch.object(Consumer, "next_batch", next_batch)


@_bug("a consumer does not check what it fetches")
def _unchecked() -> AbstractContextManager[object]:
    return mock.patch.object(fetching, "_check", _nothing)


@_bug("a lost batch is skipped without a dead letter")
def _no_letter() -> AbstractContextManager[object]:
    async def add(_self: DeadLetters, _letter: object) -> None:
        await asyncio.sleep(0)

    return mock.patch.object(DeadLetters, "add", add)


# --- Collectors -------------------------------------------------------------------------------


def _without_grace(
    self: Collector, child: ObjectInfo, listed: collector._Listed, _now_ms: int
) -> bool:
    named_ms = ulid_time_ms(child.path, self._prefix)
    if named_ms is None or child.path in listed.locations:
        return False
    return listed.oldest_ms is None or named_ms < listed.oldest_ms


def _all_due(_self: Collector, garbage: Sequence[ObjectInfo], _now: float) -> list[ObjectInfo]:
    return list(garbage)


@_bug("a collector has no grace period")
def _no_grace() -> AbstractContextManager[object]:
    return mock.patch.multiple(Collector, _is_garbage=_without_grace, _mark=_all_due)


@_bug("a collector trusts the clocks of producers alone")
def _trusting_collector() -> AbstractContextManager[object]:
    def is_garbage(
        self: Collector, child: ObjectInfo, listed: collector._Listed, now_ms: int
    ) -> bool:
        age = now_ms - (ulid_time_ms(child.path, self._prefix) or now_ms)
        return _without_grace(self, child, listed, now_ms) and (
            age >= self._queue.gc_grace_period * 1000
        )

    return mock.patch.multiple(Collector, _is_garbage=is_garbage, _mark=_all_due)


@_bug("a collector deletes what the manifest lists")
def _collector_ignores_manifest() -> AbstractContextManager[object]:
    original = Collector._read_manifest

    async def read(self: Collector, epoch: int) -> collector._Listed:
        await original(self, epoch)
        return collector._Listed({}, None)

    return mock.patch.object(Collector, "_read_manifest", read)


@_bug("a collector deletes what dead letters name")
def _collector_ignores_letters() -> AbstractContextManager[object]:
    async def read(_self: Collector) -> set[str]:
        await asyncio.sleep(0)
        return set()

    return mock.patch.object(Collector, "_read_dead_letters", read)


@_bug("a collector lists what is below other prefixes, too")
def _recursive() -> AbstractContextManager[object]:
    async def list_all(self: SimulatedObjects, prefix: str) -> Sequence[ObjectInfo]:
        def apply() -> list[ObjectInfo]:
            return [
                ObjectInfo(path, len(stored.data), stored.modified_ms)
                for path, stored in sorted(self._objects.items())
                if path.startswith(prefix + "/")
            ]

        return await self._call("list_children", prefix, apply)

    def named_ms(location: str, _prefix: str) -> int | None:
        return ulid_time_ms(location, location.rpartition("/")[0])

    return _patched(
        mock.patch.object(SimulatedObjects, "list_children", list_all),
        mock.patch.object(collector, "ulid_time_ms", named_ms),
    )


@_bug("a collector takes a manifest that is gone for an empty one")
def _collector_accepts_reset() -> AbstractContextManager[object]:
    original = Collector._read_manifest

    async def read(self: Collector, epoch: int) -> collector._Listed:
        try:
            return await original(self, epoch)
        except (QueueReset, Fenced, ObjectNotFound):
            return collector._Listed({}, None)

    return mock.patch.object(Collector, "_read_manifest", read)
