"""Walking over the bytes of one WAL file: entries, and whatever is not an entry.

A log that was cut short by a crash ends in the middle of an entry. A log on a failing disk may be
damaged anywhere. The scan tells the two apart by what comes after: when a good entry follows, the
bytes in between are damage in the middle and the entries behind survive; when none follows, the
rest of the file is a torn tail.

How the next good entry is found. The lengths of the bad entry, and of bad ones behind it, may lead
to one. And the bytes are searched for the shape of an entry: type 0, a slot below 64, the marker
that every Arrow stream starts with. A candidate counts only when its structure closes exactly, its
checksum fits, its sequence number is past the last one seen, and it leads to the entry that the
lengths found, if they found one: log bytes inside somebody's payload are not taken for the log.
The search is limited to ``RESYNC_BUDGET`` times the bytes of the file, however hostile they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa

from quiver.checksum import crc32
from quiver.errors import ChecksumMismatch, FormatError
from quiver.wal.entry import (
    BODY_HEAD_SIZE,
    BUNDLE_TYPE,
    FRAME_SIZE,
    LENGTH,
    MAX_ENTRY_SIZE,
    WalEntry,
    decode_body,
)

RESYNC_BUDGET: Final = 4
_STEP_COST = 64  # bytes that looking at one candidate counts for, beside those summed

_LENGTH_SIZE = LENGTH.size
# The marker of an Arrow stream and a sane metadata length, then a look back over what stands before
# the first payload of an entry: type, time, sequence and bitmap, slot id, fingerprint and counts.
# The marker comes first because it can be searched for fast.
_ENTRY_SHAPE = re.compile(
    rb"\xff\xff\xff\xff.{3}\x00(?<=\x00.{24}[\x00-\x3f]\x00.{40}.{8})", re.DOTALL
)
_BODY_TO_MARKER = 67


class Found(NamedTuple):
    """A good entry at ``offset:end``."""

    offset: int
    end: int
    entry: WalEntry
    crc: int


class Skipped(NamedTuple):
    """A good entry of a type that this reader does not know."""

    offset: int
    end: int
    entry_type: int


class Damaged(NamedTuple):
    """Bytes that are no entry. ``torn``: nothing good comes after them in this file.

    When the search for something good was given up, they are not called torn.
    """

    offset: int
    end: int
    reason: str
    torn: bool


Scanned: TypeAlias = Found | Skipped | Damaged


def scan(
    data: pa.Buffer, start: int, *, source: str, after_sequence: int | None = None
) -> Iterator[Scanned]:
    """Everything from ``start`` to the end of a file, in order, without a gap.

    ``after_sequence`` is the last sequence number known from before ``start``.
    """
    return _Scanner(data, source, after_sequence).items(start)


class _Scanner:
    def __init__(self, data: pa.Buffer, source: str, last_sequence: int | None) -> None:
        self._data = data
        self._view = memoryview(data).cast("B")
        self._source = source
        self._last_sequence = last_sequence
        self._budget = RESYNC_BUDGET * len(self._view)
        self._walked_to = -1
        self._walked: dict[int, bool] = {}

    def items(self, offset: int) -> Iterator[Scanned]:
        end_of_file = len(self._view)
        while offset < end_of_file:
            item: Scanned
            try:
                item = self._read(offset)
            except FormatError as error:
                resumed = self._resync(offset)
                reason = f"at byte {error.offset}: {error.reason}"
                torn = resumed is None and self._budget >= 0
                item = Damaged(offset, resumed or end_of_file, reason, torn)
            else:
                if isinstance(item, Found):
                    self._last_sequence = item.entry.sequence
            yield item
            offset = item.end

    def _read(self, offset: int) -> Found | Skipped:
        """The entry at ``offset``, or the reason why there is none."""
        view = self._view
        body = offset + _LENGTH_SIZE
        if body > len(view):
            raise FormatError(self._source, offset, "the file ends inside an entry's length")
        length = LENGTH.unpack_from(view, offset)[0]
        if not 0 < length <= MAX_ENTRY_SIZE:
            reason = f"an entry of {length} bytes; 1 to {MAX_ENTRY_SIZE} are possible"
            raise FormatError(self._source, offset, reason)
        end = body + length
        if end + _LENGTH_SIZE > len(view):
            reason = f"an entry of {length} bytes, {len(view) - body} are left in the file"
            raise FormatError(self._source, offset, reason)
        computed = crc32(view[body:end])
        stored = LENGTH.unpack_from(view, end)[0]
        if computed != stored:
            raise ChecksumMismatch(
                self._source, end, stored=stored, computed=computed, what="an entry"
            )
        if view[body] != BUNDLE_TYPE:
            return Skipped(offset, end + _LENGTH_SIZE, view[body])
        entry = decode_body(self._data, body, end, source=self._source, view=view)
        return tuple.__new__(Found, (offset, end + _LENGTH_SIZE, entry, stored))  # as in entry

    def _resync(self, bad: int) -> int | None:
        """Where the next good entry starts after the bad one; None when there is none."""
        by_length = self._first_good(self._by_length(bad))
        by_shape = self._first_good(self._by_shape(bad, by_length))
        return by_length if by_shape is None else by_shape

    def _first_good(self, candidates: Iterator[int]) -> int | None:
        last = self._last_sequence
        for offset in candidates:
            self._budget -= _STEP_COST
            length = LENGTH.unpack_from(self._view, offset)[0]
            if length <= len(self._view) - offset - FRAME_SIZE:
                self._budget -= length
            if self._budget < 0:
                break
            try:
                item = self._read(offset)
            except FormatError:
                continue
            if isinstance(item, Skipped) or last is None or item.entry.sequence > last:
                return offset
        return None

    def _by_length(self, start: int) -> Iterator[int]:
        """The places behind ``start`` where entries begin if only bodies were damaged."""
        offset = start
        while offset + _LENGTH_SIZE <= len(self._view):
            if offset > start:
                yield offset
            length = LENGTH.unpack_from(self._view, offset)[0]
            if not BODY_HEAD_SIZE <= length <= MAX_ENTRY_SIZE:
                return
            offset += FRAME_SIZE + length

    def _by_shape(self, bad: int, target: int | None) -> Iterator[int]:
        """The places that look like the start of an entry whose structure closes.

        With a ``target``, only those before it whose lengths lead to it: a damaged length may have
        led there by chance, over good entries, while log bytes in a payload lead elsewhere.
        """
        position = bad + 1 + _LENGTH_SIZE + _BODY_TO_MARKER
        end_of_search = len(self._view) if target is None else target
        while match := _ENTRY_SHAPE.search(self._data, position, end_of_search):
            self._budget -= _STEP_COST  # also for those that are no candidates in the end
            if self._budget < 0:
                return
            position = match.start() + 1
            body = match.start() - _BODY_TO_MARKER
            end = body + LENGTH.unpack_from(self._view, body - _LENGTH_SIZE)[0]
            if end + _LENGTH_SIZE > end_of_search:
                continue
            with suppress(FormatError):
                decode_body(self._data, body, end, source=self._source, view=self._view)
                if target is None or self._leads_to(end + _LENGTH_SIZE, target):
                    yield body - _LENGTH_SIZE

    def _leads_to(self, offset: int, target: int) -> bool:
        """Whether the lengths from ``offset`` on lead to ``target``; each place is walked once."""
        if self._walked_to != target:
            self._walked_to = target
            self._walked = {target: True}
        path = []
        for hop in chain((offset,), self._by_length(offset)):
            if hop > target or hop in self._walked:
                break
            path.append(hop)
        else:
            hop = -1
        leads = self._walked.get(hop, False)
        self._walked.update(dict.fromkeys(path, leads))
        return leads
