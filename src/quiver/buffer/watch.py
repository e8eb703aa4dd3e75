"""Following the manifest as its consumer: cheaply, and never past something that is not right.

A poll asks for the last 22 bytes, and gets nothing when the manifest is still the one that is
known. When entries were added, only they are read: the consumer alone removes entries, so what it
knows is the beginning of what is there. A stretch of the known bytes is read along with them and
compared, so a manifest that was replaced by one of the same length is noticed. Everything else, a
manifest that changed while it was read for example, ends in reading it whole.

What is accepted is always a later state of what was known:

===========================================  ==============================================
the manifest ...                             then
===========================================  ==============================================
is gone, or has sequences below those known  ``QueueReset``
misses entries nobody here took out          ``QueueReset``
has other bytes where known entries were     ``QueueReset``
has the epoch of another consumer            ``Fenced``
does not add up                              ``FormatError``, again with every call
===========================================  ==============================================

Writes are compare-and-swap on the known version, whose epoch was checked: a consumer that was
fenced cannot write. After a write whose fate is unknown the manifest is looked at again.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, NamedTuple, TypeVar

from quiver.buffer import manifest
from quiver.buffer.manifest import FOOTER_SIZE, Footer
from quiver.buffer.objects import Fetched, Objects, Version
from quiver.buffer.retrying import Backoff
from quiver.buffer.types import QueueEntry
from quiver.config import QueueConfig
from quiver.errors import (
    Conflict,
    Fenced,
    LimitExceeded,
    ObjectNotFound,
    ObjectsUnavailable,
    QueueError,
    QueueReset,
)
from quiver.metrics import Metrics

OVERLAP: Final = 1024
"""Known bytes that are read again with new ones. The name of a batch is in them, mostly."""

_LENGTH = struct.Struct("<I")
Result = TypeVar("Result")


class Known(NamedTuple):
    """The manifest at some version."""

    data: bytes
    version: Version
    footer: Footer

    @property
    def first(self) -> int:
        """The sequence of the first entry, or of the next one when there is none."""
        return self.footer.next_sequence - self.footer.entry_count


async def patiently(
    call: Callable[[], Awaitable[Result]], *, what: str, config: QueueConfig, random: Random
) -> Result:
    """Call until it raises neither ``Conflict`` nor ``ObjectsUnavailable``, or time is up."""
    backoff = Backoff(config, random)
    while True:
        try:
            return await call()
        except Conflict as error:
            await backoff.step_aside(error, what)
        except ObjectsUnavailable as error:
            await backoff.pause(error, what)


class ManifestWatch:
    """The manifest as seen by one consumer. ``take_over`` comes first.

    ``objects`` must bound the time of its calls.
    """

    def __init__(
        self, objects: Objects, config: QueueConfig, *, metrics: Metrics, random: Random
    ) -> None:
        self._objects = objects
        self._config = config
        self._path = config.manifest_path
        self._metrics = metrics
        self._random = random
        self._turn = asyncio.Lock()
        self._known = Known(manifest.EMPTY, Version(""), Footer(0, 0, 0))
        self._fenced: Fenced | None = None
        self._unsure = False  # a write may have happened since
        self._removed = -1  # through where this consumer tried to remove
        self._position = 0  # the sequence that `take` gives out next
        self._offset = 0  # and where its entry starts

    @property
    def known(self) -> Known:
        """What was read or written last."""
        return self._known

    def check_fence(self) -> None:
        """Raise ``Fenced`` once it was found out. This does not look."""
        if self._fenced is not None:
            raise Fenced(str(self._fenced))

    # --- Taking over ----------------------------------------------------------------------------

    async def take_over(self, last_acked: int | None) -> tuple[QueueEntry, ...]:
        """Fence every other consumer, and remove through ``last_acked``, in one write.

        Returns what that removes. Nothing tells the epoch of one consumer from that of another
        which had the same idea: so only a write that was confirmed counts, and after any other the
        epoch is raised again.
        """
        async with self._turn:
            return await self._patiently(lambda: self._take_over(last_acked))

    async def _take_over(self, last_acked: int | None) -> tuple[QueueEntry, ...]:
        data, version = manifest.EMPTY, None
        try:
            found = await self._read_whole()
            data, version = found.data, found.version
        except ObjectNotFound:
            pass
        footer = manifest.check(data, source=self._path)
        if last_acked is not None and footer.next_sequence <= last_acked:
            raise QueueReset(
                f"{self._path}: its next sequence is {footer.next_sequence}, but {last_acked} was "
                "processed before: it was deleted or replaced by an older one. Nothing was "
                "changed; look into that, and start without the old position when it is right"
            )
        new = manifest.set_epoch(data, manifest.next_epoch(footer.epoch), source=self._path)
        removed: tuple[QueueEntry, ...] = ()
        if last_acked is not None:
            count = max(0, last_acked + 1 - (footer.next_sequence - footer.entry_count))
            removed = manifest.entries(data, source=self._path, at_most=count)
            new = manifest.dequeue(new, last_acked, source=self._path)
        written = await self._put_if(new, version)
        self._known = Known(new, written, manifest.decode_footer(new, source=self._path))
        self._unsure = False
        self._position, self._offset = self._known.first, 0
        self._removed = self._known.first - 1
        return removed

    # --- Reading --------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Look whether something changed."""
        async with self._turn:
            await self._patiently(self._refresh)

    def take(self, at_most: int) -> tuple[QueueEntry, ...]:
        """The next entries of what is known, each once."""
        known = self._known
        count = min(at_most, known.footer.next_sequence - self._position)
        if count <= 0:
            return ()
        end = _skip(known.data, self._offset, count)
        footer = known.footer._replace(entry_count=count, next_sequence=self._position + count)
        part = known.data[self._offset : end] + footer.encode()
        entries = manifest.entries(part, source=self._path)
        self._position += count
        self._offset = end
        return entries

    def between(self, after: int, through: int) -> tuple[QueueEntry, ...]:
        """The entries above ``after``, through ``through``, of what is known. It moves nothing."""
        known = self._known
        if after < known.first - 1:
            raise QueueError(
                f"{self._path}: entries after {after} are wanted, but those before {known.first} "
                "were acknowledged, and are gone"
            )
        if through >= known.footer.next_sequence:
            raise QueueReset(
                f"{self._path}: entries through {through} are wanted, but its next sequence is "
                f"{known.footer.next_sequence}: it was deleted or replaced by an older one"
            )
        count = through - after
        if count <= 0:
            return ()
        start = _skip(known.data, 0, after + 1 - known.first)
        end = _skip(known.data, start, count)
        footer = known.footer._replace(entry_count=count, next_sequence=through + 1)
        return manifest.entries(known.data[start:end] + footer.encode(), source=self._path)

    async def _refresh(self) -> None:
        known = self._known
        try:
            tail = await self._objects.get_tail(self._path, FOOTER_SIZE, unless=known.version)
            if tail is None:
                self._unsure = False
                return
            footer = manifest.decode_footer(tail.data, source=self._path)
            self._judge(footer)
            self._check_size(tail.size)
            changed = await self._extended(tail, footer) or await self._replaced()
        except ObjectNotFound as error:
            raise QueueReset(
                f"{self._path}: the manifest is gone. Producers would start a new one; look into "
                "that before anything else is consumed or collected"
            ) from error
        self._accept(changed)

    async def _extended(self, tail: Fetched, footer: Footer) -> Known | None:
        """The manifest, if it is the known one with new entries; None to read it whole."""
        known = self._known
        added = footer.next_sequence - known.footer.next_sequence
        body = len(known.data) - FOOTER_SIZE
        if footer.entry_count - known.footer.entry_count != added or tail.size < len(known.data):
            return None
        start = max(0, body - OVERLAP)
        try:
            part = await self._objects.get_range(self._path, start, tail.size, version=tail.version)
        except (Conflict, ObjectNotFound):
            return None
        overlap, new = part.data[: body - start], part.data[body - start :]
        if overlap != known.data[start:body] or len(part.data) != tail.size - start:
            return None
        # The known entries were checked. The new ones are a manifest of their own, whose sequences
        # have to begin where the known ones end.
        alone = new[:-FOOTER_SIZE] + footer._replace(entry_count=added).encode()
        if new[-FOOTER_SIZE:] != tail.data:
            return None
        manifest.check(alone, source=self._path)
        return Known(known.data[:body] + new, tail.version, footer)

    async def _replaced(self) -> Known:
        """The manifest as a whole; what it shares with the known one must be the same."""
        found = await self._read_whole()
        new = Known(found.data, found.version, manifest.check(found.data, source=self._path))
        self._judge(new.footer)
        old = self._known
        kept = old.data[_skip(old.data, 0, new.first - old.first) : -FOOTER_SIZE]
        if not new.data.startswith(kept):
            raise QueueReset(
                f"{self._path}: entries that were there before are others now: the manifest was "
                "replaced. Nothing was changed; look into that, then start the consumer again"
            )
        return new

    async def _read_whole(self) -> Fetched:
        tail = await self._objects.get_tail(self._path, FOOTER_SIZE)
        if tail is not None:
            self._check_size(tail.size)
        found = await self._objects.get(self._path)
        if found is None:
            raise ObjectsUnavailable(f"{self._path}: the store answered without the object")
        self._check_size(len(found.data))
        return found

    def _check_size(self, size: int) -> None:
        limit = self._config.max_manifest_bytes
        if size > limit:
            reason = f"the manifest has {size} bytes; queue.max_manifest_bytes allows {limit}"
            raise LimitExceeded(self._path, limit, reason)

    def _judge(self, footer: Footer) -> None:
        """Refuse a manifest that is not a later state of the known one, or somebody else's."""
        known = self._known
        first = footer.next_sequence - footer.entry_count
        before = known.footer.next_sequence
        if footer.next_sequence < before or first < known.first:
            raise QueueReset(
                f"{self._path}: it has sequences {first} to {footer.next_sequence}, before it had "
                f"{known.first} to {before}: it was deleted or replaced by an older one"
            )
        if footer.epoch != known.footer.epoch:
            if footer.epoch == 0:
                raise QueueReset(f"{self._path}: no consumer ever owned it: it is a new manifest")
            self._fenced = Fenced(
                f"{self._path}: another consumer took over: its epoch is {footer.epoch}, this one "
                f"has {known.footer.epoch}"
            )
            raise self._fenced
        if first > self._removed + 1:
            raise QueueReset(
                f"{self._path}: it starts at {first}, but this consumer, which alone may remove "
                f"entries, did so only through {self._removed}"
            )

    def _accept(self, new: Known) -> None:
        """Know this from now on, and keep the place of ``take`` in it."""
        old = self._known
        if new.first > self._position:  # they were removed without being taken
            self._position, self._offset = new.first, 0
        else:
            self._offset -= _skip(old.data, 0, new.first - old.first)
        self._known = new
        self._unsure = False

    # --- Writing --------------------------------------------------------------------------------

    async def dequeue(self, through: int) -> None:
        """Remove the entries through this sequence. Nothing is written when they are gone."""

        def without(known: Known) -> bytes | None:
            if known.first > through:
                return None
            self._removed = max(self._removed, through)
            return manifest.dequeue(known.data, through, source=self._path)

        await self.write(without)

    async def write(self, change: Callable[[Known], bytes | None]) -> None:
        """Replace the manifest by what ``change`` makes of it; None: leave it."""
        async with self._turn:
            await self._patiently(lambda: self._write(change))

    async def _write(self, change: Callable[[Known], bytes | None]) -> None:
        if self._unsure:
            await self._refresh()
        new = change(self._known)
        if new is None:
            return
        self._unsure = True
        version = await self._put_if(new, self._known.version)
        self._accept(Known(new, version, manifest.decode_footer(new, source=self._path)))

    async def _put_if(self, data: bytes, expected: Version | None) -> Version:
        self._metrics.count("buffer.manifest_writes", role="consumer")
        try:
            return await self._objects.put_if(self._path, data, expected)
        except (Conflict, ObjectNotFound) as error:
            self._metrics.count("buffer.manifest_conflicts", role="consumer")
            raise Conflict(f"{self._path}: {error}") from error

    async def _patiently(self, call: Callable[[], Awaitable[Result]]) -> Result:
        return await patiently(call, what=self._path, config=self._config, random=self._random)


def _skip(data: bytes, at: int, count: int) -> int:
    """Where the entry ``count`` after the one at ``at`` starts, in a manifest that was checked."""
    for _ in range(count):
        at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
    return at
