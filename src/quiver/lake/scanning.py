"""What a scan reads, and in which tasks: planned from names, sizes and statistics.

An offset says, for each store below a root, which segment comes next; for a queue, which batch:

==========  ===========================================  ======================================
source      offset                                       not in it
==========  ===========================================  ======================================
stores      ``{"<store id>": <next segment>, ...}``      a store that is new: all it has comes
queue       ``{"sequence": <next sequence>}``            0: all that the manifest has comes
==========  ===========================================  ======================================

Keys are sorted, so that equal offsets are equal texts. Finalised segments never change and their
numbers never come back, so the same two offsets always mean the same segments, packed into tasks
in the same way. A number between two offsets without a file is a segment that was deleted, or one
that a crash left unwritten.
"""

from __future__ import annotations

import heapq
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, TypeVar

from blake3 import blake3

from quiver.bundle import Signal, Slot, signal_of
from quiver.disk import Disk
from quiver.errors import FormatError, InvalidConfig
from quiver.segment.layout import segment_sequence
from quiver.segment.tables import StreamEntry
from quiver.store.ledger import FILE_NAME, load_ledger
from quiver.store.siblings import PREFIX

SEGMENTS: Final = "segments"
SEQUENCE: Final = "sequence"
_NAMED_GAPS: Final = 10
_TIMED_SLOTS: Final[Mapping[Signal, frozenset[int]]] = {
    Signal.TRACES: frozenset({Slot.SPANS}),
    Signal.METRICS: frozenset(
        {
            Slot.NUMBER_DATA_POINTS,
            Slot.SUMMARY_DATA_POINTS,
            Slot.HISTOGRAM_DATA_POINTS,
            Slot.EXP_HISTOGRAM_DATA_POINTS,
        }
    ),
}
"""Slots whose statistics bound the event times of their rows.

Not those of logs: a record without a time has the time when it was observed, and the statistics do
not tell of it."""

Offset: TypeAlias = Mapping[str, int]
Sized = TypeVar("Sized")


class StoreDirectory(NamedTuple):
    """A store below a root; ``store_id`` is None when its directory does not tell."""

    store_id: str | None
    path: Path


class Piece(NamedTuple):
    """A segment that a task reads."""

    store_id: str | None
    segment: int
    path: str
    size: int


class Tail(NamedTuple):
    """Bundles that were still in the log when a scan was planned, by their numbers in it.

    They may be in a segment above ``after_segment`` when they are read.
    """

    store_id: str | None
    root: str
    after_segment: int
    first: int
    last: int
    bundles: int


class Gap(NamedTuple):
    """Segments between two offsets that have no file: the numbers from ``first`` to ``last``."""

    store_id: str
    first: int
    last: int


class EventTimes(NamedTuple):
    """The event times that a scan asks for, in microseconds, both included."""

    earliest: int
    latest: int


# --- Where stores are --------------------------------------------------------------------------


def check_root(text: str | None) -> Path:
    """The local directory that an option names."""
    if not text:
        raise InvalidConfig("option path is missing: the directory of a store, or of several")
    if text.startswith("file:"):
        parts = urllib.parse.urlsplit(text)
        if parts.netloc or parts.query or not parts.path.startswith("/"):
            raise InvalidConfig(f"option path is {text!r}; as a URL it must be file:///directory")
        text = urllib.parse.unquote(parts.path)
    if "://" in text:
        raise InvalidConfig(f"option path is {text!r}; a store is in a directory, not behind a URL")
    path = Path(text)
    if not path.is_absolute() or "\0" in text:
        raise InvalidConfig(
            f"option path is {text!r}; it must be absolute: tasks run in other directories"
        )
    return path


def find_stores(disk: Disk, root: Path) -> list[StoreDirectory]:
    """The store at a root, or those in its directories ``core_*``; none: there are none yet.

    Raises:
        InvalidConfig: There is no such directory, or two stores have the same id.
    """
    if _is_store(disk, root):
        paths = [root]
    else:
        try:
            names = disk.list_directory(root)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InvalidConfig(f"there is no directory {root}") from error
        children = [root / name for name in sorted(names) if name.startswith(PREFIX)]
        paths = [path for path in children if _is_store(disk, path)]
    stores = [StoreDirectory(_store_id(disk, path), path) for path in paths]
    by_id: dict[str, Path] = {}
    for store_id, path in stores:
        if store_id is not None and by_id.setdefault(store_id, path) != path:
            raise InvalidConfig(
                f"{by_id[store_id]} and {path} are both store {store_id}: one is a copy; "
                "move it away, or its rows come twice"
            )
    return stores


def _is_store(disk: Disk, path: Path) -> bool:
    return disk.exists(path / FILE_NAME) or disk.exists(path / SEGMENTS)


def _store_id(disk: Disk, path: Path) -> str | None:
    try:
        ledger = load_ledger(disk, path)
    except (FormatError, FileNotFoundError):
        return None
    return None if ledger is None else ledger.store_id


def list_segments(disk: Disk, store: StoreDirectory) -> list[Piece]:
    """The finalised segments of a store, by number."""
    directory = store.path / SEGMENTS
    try:
        names = disk.list_directory(directory)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        number = segment_sequence(name)
        if number is None:
            continue
        path = directory / name
        try:
            found.append(Piece(store.store_id, number, str(path), disk.size(path)))
        except FileNotFoundError:
            continue  # every subscriber was done with it
    return sorted(found, key=lambda piece: piece.segment)


# --- Offsets of stores -------------------------------------------------------------------------


def latest_offset(pieces: Iterable[Piece], start: Offset) -> dict[str, int]:
    """Behind everything that is there; never before ``start``."""
    end = dict(start)
    for piece in pieces:
        end[_known(piece)] = max(end.get(_known(piece), 0), piece.segment + 1)
    return dict(sorted(end.items()))


def limited_offset(
    pieces: Iterable[Piece],
    start: Offset,
    end: Offset,
    *,
    max_bytes: int | None = None,
    max_segments: int | None = None,
) -> dict[str, int]:
    """As far towards ``end`` as the limits allow, and one segment at least.

    The store of which the fewest bytes are taken goes next, so a busy one does not starve others.
    """
    waiting: dict[str, list[Piece]] = {}
    for piece in _wanted(pieces, start, end):
        waiting.setdefault(_known(piece), []).append(piece)
    line = [(0, store_id, 0) for store_id in sorted(waiting)]
    taken = dict(end)
    for store_id, own in waiting.items():
        taken[store_id] = own[0].segment
    count = size = 0
    while line:
        own_bytes, store_id, index = heapq.heappop(line)
        own = waiting[store_id]
        piece = own[index]
        full = (max_segments is not None and count >= max_segments) or (
            max_bytes is not None and size + piece.size > max_bytes
        )
        if full and count:
            break
        count, size = count + 1, size + piece.size
        if index + 1 < len(own):
            taken[store_id] = own[index + 1].segment
            heapq.heappush(line, (own_bytes + piece.size, store_id, index + 1))
        else:
            taken[store_id] = end[store_id]
    return dict(sorted(taken.items()))


def capped_offset(end: Offset, start: Offset, target: Offset) -> dict[str, int]:
    """No further than ``target``, which has no store that came later; never before ``start``."""
    capped = {store_id: min(number, target.get(store_id, 0)) for store_id, number in end.items()}
    stores = sorted({*start, *(store_id for store_id in capped if store_id in target)})
    return {store_id: max(start.get(store_id, 0), capped.get(store_id, 0)) for store_id in stores}


def between(pieces: Iterable[Piece], start: Offset, end: Offset) -> tuple[list[Piece], list[Gap]]:
    """The segments from one offset to another, and those of them that have no file."""
    found = _wanted(pieces, start, end)
    numbers: dict[str, list[int]] = {}
    for piece in found:
        numbers.setdefault(_known(piece), []).append(piece.segment)
    gaps = []
    for store_id, last in sorted(end.items()):
        there = numbers.get(store_id, [])
        expected = start.get(store_id)
        if expected is None:  # a new store begins with what it has
            expected = there[0] if there else last
        for number in (*there, last):
            if number > expected:
                gaps.append(Gap(store_id, expected, number - 1))
            expected = number + 1
    return found, gaps


def describe_gaps(gaps: Sequence[Gap]) -> str:
    """``segments 3 to 5 of store 0a1b``, and so on; for messages."""
    parts = [
        f"segments {gap.first} to {gap.last} of store {gap.store_id}"
        if gap.last > gap.first
        else f"segment {gap.first} of store {gap.store_id}"
        for gap in gaps[:_NAMED_GAPS]
    ]
    more = len(gaps) - len(parts)
    return ", ".join(parts) + (f" and {more} more ranges" if more else "")


def read_offset(offset: Mapping[str, object], what: str) -> dict[str, int]:
    """An offset that came from outside: a checkpoint, or an option."""
    for key, value in offset.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidConfig(f"{what}: {key!r} is at {value!r}; an offset holds whole numbers")
        if value < 0:
            raise InvalidConfig(f"{what}: {key!r} is at {value}; it must be at least 0")
    return {key: value for key, value in sorted(offset.items()) if isinstance(value, int)}


def _wanted(pieces: Iterable[Piece], start: Offset, end: Offset) -> list[Piece]:
    found = [
        piece
        for piece in pieces
        if start.get(_known(piece), 0) <= piece.segment < end.get(_known(piece), 0)
    ]
    return sorted(found, key=lambda piece: (_known(piece), piece.segment))


def _known(piece: Piece) -> str:
    if piece.store_id is None:
        raise InvalidConfig(
            f"{piece.path} belongs to a store without an id, so nobody can say how far it was "
            "read: open the store once with this version, which gives it one"
        )
    return piece.store_id


def queue_id(url: str, manifest_path: str) -> str:
    """The name of a queue, from where it is: 32 hex digits."""
    place = urllib.parse.urlsplit(url)._replace(query="", fragment="").geturl().rstrip("/")
    return blake3(f"{place}\n{manifest_path}".encode()).hexdigest(16)


# --- Tasks -------------------------------------------------------------------------------------


def pack(
    pieces: Iterable[Sized], target_bytes: int, size_of: Callable[[Sized], int]
) -> Iterator[list[Sized]]:
    """Neighbours together until they have about so many bytes: a task costs some 30 ms."""
    group: list[Sized] = []
    size = 0
    for piece in pieces:
        weight = size_of(piece)
        if group and size + weight > target_bytes:
            yield group
            group, size = [], 0
        group.append(piece)
        size += weight
    if group:
        yield group


def may_hold(
    streams: Iterable[StreamEntry], signal: Signal | None, times: EventTimes | None = None
) -> bool:
    """Whether a segment with these streams can have rows of a signal in a range of event times.

    A row without a time is at 0. So the range must begin behind that, or nothing can be said.
    """
    if signal is None:
        return True
    own = [stream for stream in streams if signal_of([stream.slot_id]) is signal]
    if times is None or times.earliest <= 0:
        return bool(own)
    timed = _TIMED_SLOTS.get(signal, frozenset())
    requests = {Slot.OTLP_TRACES, Slot.OTLP_LOGS, Slot.OTLP_METRICS}
    if any(stream.slot_id in requests for stream in own) or not timed:
        return bool(own)
    return any(_overlaps(stream, times) for stream in own if stream.slot_id in timed)


def _overlaps(stream: StreamEntry, times: EventTimes) -> bool:
    first, last = stream.min_event_time_ns, stream.max_event_time_ns
    if first is None or last is None:
        return True
    return last // 1000 >= times.earliest and first // 1000 <= times.latest
