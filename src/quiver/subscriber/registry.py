"""All subscribers of a store: who they are, how far each is, which segments nobody needs any more.

A subscriber is known by its progress file, which is written when it registers, so that from then on
nothing it has not resolved is deleted, through any restart.

===============  =================================================================================
``LOADED``       has a file from an earlier run and has not registered in this one yet
``REGISTERED``   registered, does not read yet
``ACTIVE``       reads
``ORPHAN``       was still ``LOADED`` when the store was activated; pins its data until it
                 registers after all or is dropped
``EXTERNAL``     lives in another process and writes its progress file itself
===============  =================================================================================

Safe to use from several threads. Waiting is not done here: ``on_change`` is called, outside the
lock, whenever a bundle may have become available.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from quiver.disk import Disk
from quiver.errors import (
    BundleNotAvailable,
    FormatError,
    SubscriberExists,
    SubscriberNotFound,
)
from quiver.subscriber.progress import (
    FILE_PREFIX,
    MAX_FILE_SIZE,
    Progress,
    check_subscriber_id,
    load_progress,
    progress_path,
    store_progress,
)
from quiver.subscriber.state import BundleRef, Claim, SubscriberState

CORRUPT_SUFFIX = ".corrupt"


class Phase(enum.StrEnum):
    """Where a subscriber is in its life."""

    LOADED = "loaded"
    REGISTERED = "registered"
    ACTIVE = "active"
    ORPHAN = "orphan"
    EXTERNAL = "external"


# The others may belong to another process, or will: their files are left as they are.
_WRITTEN_HERE = frozenset({Phase.REGISTERED, Phase.ACTIVE})


Skips: TypeAlias = Callable[[int], Iterable[int]]
"""The bundles of a segment that lie before the point where a subscriber starts."""


@dataclass(slots=True)
class _Subscriber:
    state: SubscriberState
    phase: Phase
    skips: Skips | None = None


@dataclass(frozen=True, slots=True)
class SubscriberInfo:
    """What can be said of a subscriber from outside."""

    subscriber_id: str
    phase: Phase
    pending: int
    claimed: int
    deferred: int
    oldest: BundleRef | None


class Registry:
    """The subscribers of one store."""

    def __init__(self, disk: Disk, root: Path, on_change: Callable[[], None]) -> None:
        self._disk = disk
        self._root = root
        self._on_change = on_change
        self._lock = threading.Lock()  # held for as long as it takes to look something up
        self._files = threading.Lock()  # held while progress files are written or removed
        self._subscribers: dict[str, _Subscriber] = {}
        self._segments: dict[int, int] = {}
        self._external: dict[str, bytes] = {}
        self._look_for_complete = True
        self._dropped: deque[tuple[str, Claim]] = deque()
        self.corrupt: list[str] = []
        """Progress files that could not be read, each with the reason and where it was put."""

    # --- a store opens ----------------------------------------------------------------------------

    def load(self, segments: Mapping[int, int], skips_of: Mapping[str, Skips]) -> None:
        """Find the progress files.

        ``segments``: number to bundle count of all that exist. ``skips_of``: what subscribers skip
        who registered with a start between bundles.
        """
        self._segments = dict(segments)
        for name in self._disk.list_directory(self._root):
            if not name.startswith(FILE_PREFIX) or name.endswith((".tmp", CORRUPT_SUFFIX)):
                continue
            subscriber_id = name.removeprefix(FILE_PREFIX)
            progress = self._read(self._root / name)
            if progress is None:
                # A file has to be there, or the subscriber would be forgotten by the next start.
                progress = Progress()
                store_progress(self._disk, self._root / name, progress)
            subscriber = _Subscriber(
                SubscriberState(progress), Phase.LOADED, skips_of.get(subscriber_id)
            )
            self._subscribers[subscriber_id] = subscriber
            self._bring_up_to_date(subscriber)

    def _read(self, path: Path) -> Progress | None:
        """A progress file; one that is damaged is set aside, and everything is delivered again."""
        try:
            return load_progress(self._disk, path)
        except FormatError as error:
            target = path.with_name(path.name + CORRUPT_SUFFIX)
            self._disk.rename(path, target)
            self._disk.sync_dir(path.parent)
            self.corrupt.append(f"{error}; kept as {target}")
            return None

    def _bring_up_to_date(self, subscriber: _Subscriber) -> None:
        """Forget segments that are gone, add those that are new."""
        known = set(subscriber.state.segments)
        for number in known - self._segments.keys():
            subscriber.state.forget(number)
        for number in sorted(self._segments.keys() - known):
            self._add(subscriber, number)

    def _add(self, subscriber: _Subscriber, number: int) -> None:
        """Let a subscriber know of a segment, without what lies before its start."""
        subscriber.state.add_segment(number, self._segments[number])
        if subscriber.skips is not None:
            skipped = subscriber.skips(number)
            subscriber.state.resolve_many(BundleRef(number, bundle) for bundle in skipped)

    @property
    def highest_segment_named(self) -> int:
        """The largest segment number that any progress file knows, -1 for none."""
        named = [
            number
            for subscriber in self._subscribers.values()
            for number in subscriber.state.segments
        ]
        floors = [subscriber.state.floor - 1 for subscriber in self._subscribers.values()]
        return max([*named, *floors], default=-1)

    # --- the life of a subscriber -----------------------------------------------------------------

    def register(
        self,
        subscriber_id: str,
        floor: int,
        skips: Skips | None = None,
        *,
        external: bool = False,
    ) -> bool:
        """Make a subscriber known, durably; whether it is new.

        One that has a progress file goes on where it was. A new one starts at segment ``floor``,
        without the bundles that ``skips`` names, also in segments to come.
        """
        check_subscriber_id(subscriber_id)
        with self._files, self._lock:
            known = self._subscribers.get(subscriber_id)
            phase = Phase.EXTERNAL if external else Phase.REGISTERED
            if known is not None:
                if known.phase in {Phase.LOADED, Phase.ORPHAN}:
                    known.phase = phase
                elif external != (known.phase is Phase.EXTERNAL):
                    raise SubscriberExists(
                        f"subscriber {subscriber_id!r} is registered as "
                        f"{'one of another process' if not external else 'one of this process'}"
                    )
                return False
            state = SubscriberState()
            state.start_at(floor)
            subscriber = _Subscriber(state, phase, skips)
            self._bring_up_to_date(subscriber)
            store_progress(
                self._disk, progress_path(self._root, subscriber_id), state.to_progress()
            )
            state.dirty = False
            self._subscribers[subscriber_id] = subscriber
            return True

    def knows(self, subscriber_id: str) -> bool:
        """Whether the subscriber registered, in this run or an earlier one."""
        with self._lock:
            return subscriber_id in self._subscribers

    def activate(self, subscriber_id: str) -> None:
        """From now on it may claim bundles."""
        with self._lock:
            self._known(subscriber_id, Phase.REGISTERED, Phase.ACTIVE).phase = Phase.ACTIVE
        self._on_change()

    def activate_all(self) -> list[str]:
        """Activate all that registered; the orphans, who did not."""
        with self._lock:
            for subscriber in self._subscribers.values():
                if subscriber.phase is Phase.REGISTERED:
                    subscriber.phase = Phase.ACTIVE
                elif subscriber.phase is Phase.LOADED:
                    subscriber.phase = Phase.ORPHAN
        self._on_change()
        return self.orphans()

    def deactivate(self, subscriber_id: str) -> None:
        """It reads no more for now; what it has not resolved stays."""
        with self._lock:
            self._known(subscriber_id, Phase.ACTIVE, Phase.REGISTERED).phase = Phase.REGISTERED

    def unresolved_count(self, subscriber_id: str) -> int:
        """How many bundles a subscriber has not resolved."""
        with self._lock:
            return self._state_of(subscriber_id).unresolved_count()

    def remove(self, subscriber_id: str) -> None:
        """Forget a subscriber and its file, durably."""
        with self._files, self._lock:
            if subscriber_id not in self._subscribers:
                raise SubscriberNotFound(f"there is no subscriber {subscriber_id!r}")
            path = progress_path(self._root, subscriber_id)
            if not self._disk.exists(path):
                # The sync of an earlier attempt failed, and another one would not help: a power
                # cut may bring the file back. One that is made anew can be removed for good.
                store_progress(self._disk, path, Progress())
            self._disk.unlink(path)
            self._disk.sync_dir(self._root)
            del self._subscribers[subscriber_id]
            self._external.pop(subscriber_id, None)
            self._look_for_complete = True

    def orphans(self) -> list[str]:
        """Subscribers with a file whom nobody registered."""
        with self._lock:
            return sorted(name for name, s in self._subscribers.items() if s.phase is Phase.ORPHAN)

    @property
    def active_count(self) -> int:
        """Subscribers that read."""
        with self._lock:
            return sum(s.phase is Phase.ACTIVE for s in self._subscribers.values())

    def infos(self) -> list[SubscriberInfo]:
        """All subscribers, by name."""
        with self._lock:
            self._take_back()
            return [
                SubscriberInfo(
                    name,
                    subscriber.phase,
                    subscriber.state.unresolved_count(),
                    subscriber.state.claimed_count(),
                    subscriber.state.deferred_count(),
                    subscriber.state.oldest_unresolved(),
                )
                for name, subscriber in sorted(self._subscribers.items())
            ]

    # --- bundles ----------------------------------------------------------------------------------

    def add_segment(self, number: int, bundle_count: int) -> None:
        """A segment was finalised."""
        with self._lock:
            self._segments[number] = bundle_count
            self._look_for_complete = True  # a subscriber that starts later has nothing to do in it
            for subscriber in self._subscribers.values():
                self._add(subscriber, number)
        self._on_change()

    @contextmanager
    def active(self, subscriber_id: str) -> Iterator[SubscriberState]:
        """The state of an active subscriber, for as long as the ``with`` lasts."""
        with self._lock:
            self._take_back()
            yield self._known(subscriber_id, Phase.ACTIVE).state

    def resolve(self, subscriber_id: str, claim: Claim) -> None:
        """Done with a bundle."""
        with self._lock:
            self._state_of(subscriber_id).resolve(claim)
            self._look_for_complete = True

    def release(self, subscriber_id: str, claim: Claim, *, until: float | None = None) -> None:
        """Give a bundle back, now or for later."""
        with self._lock:
            state = self._state_of(subscriber_id)
            if until is None:
                state.release(claim)
            else:
                state.defer(claim, until)
        self._on_change()

    def release_later(self, subscriber_id: str, claim: Claim) -> None:
        """A handle was dropped, perhaps by the garbage collector inside one of these methods.

        So no lock is taken; the bundle is given back before anybody looks for one.
        """
        self._dropped.append((subscriber_id, claim))
        self._on_change()

    def _take_back(self) -> None:
        while self._dropped:
            subscriber_id, claim = self._dropped.popleft()
            subscriber = self._subscribers.get(subscriber_id)
            if subscriber is not None:
                with suppress(BundleNotAvailable):
                    subscriber.state.release(claim)

    # --- progress and reclaiming ------------------------------------------------------------------

    def flush(self) -> int:
        """Write the progress of those who resolved something; how many files."""
        with self._files:
            with self._lock:
                changed = [
                    (name, subscriber.state, subscriber.state.to_progress())
                    for name, subscriber in self._subscribers.items()
                    if subscriber.state.dirty and subscriber.phase in _WRITTEN_HERE
                ]
                for _, state, _ in changed:
                    state.dirty = False
            for index, (name, _, progress) in enumerate(changed):
                try:
                    store_progress(self._disk, progress_path(self._root, name), progress)
                except OSError:
                    for _, state, _ in changed[index:]:
                        state.dirty = True
                    raise
        return len(changed)

    def reload_external(self) -> None:
        """Look at what subscribers in other processes have resolved meanwhile."""
        with self._files:
            for name, subscriber in list(self._subscribers.items()):
                if subscriber.phase is not Phase.EXTERNAL:
                    continue
                path = progress_path(self._root, name)
                if not self._disk.exists(path):
                    continue
                data = self._disk.read(path, 0, MAX_FILE_SIZE).to_pybytes()
                if data == self._external.get(name):
                    continue
                progress = self._read(path)
                if progress is not None:
                    self._external[name] = data
                    with self._lock:
                        subscriber.state = SubscriberState(progress)
                        self._bring_up_to_date(subscriber)
                        self._look_for_complete = True

    def complete_segments(self) -> list[int]:
        """Segments that every subscriber has resolved; none while there is no subscriber."""
        with self._lock:
            if not self._subscribers or not self._look_for_complete:
                return []
            complete = [
                number
                for number in sorted(self._segments)
                if all(s.state.is_complete(number) for s in self._subscribers.values())
            ]
            self._look_for_complete = bool(complete)
            return complete

    def drop_segment(self, number: int) -> dict[str, int]:
        """Resolve what is left of a segment for everybody; bundles by subscriber."""
        with self._lock:
            self._look_for_complete = True
            dropped = {
                name: subscriber.state.drop(number)
                for name, subscriber in self._subscribers.items()
            }
        return {name: count for name, count in dropped.items() if count}

    def has_claims(self, number: int) -> bool:
        """Whether somebody is working on a bundle of the segment."""
        with self._lock:
            self._take_back()
            return any(s.state.has_claims(number) for s in self._subscribers.values())

    def forget_segments(self, numbers: Iterable[int]) -> None:
        """Their files are gone."""
        with self._lock:
            for number in numbers:
                self._segments.pop(number, None)
                for subscriber in self._subscribers.values():
                    subscriber.state.forget(number)

    def raise_floors(self, oldest_existing: int) -> None:
        """Say in the files that everything below is done."""
        with self._lock:
            for subscriber in self._subscribers.values():
                subscriber.state.raise_floor(oldest_existing)

    def _known(self, subscriber_id: str, *phases: Phase) -> _Subscriber:
        subscriber = self._subscribers.get(subscriber_id)
        if subscriber is None or subscriber.phase not in phases:
            state = "not registered" if subscriber is None else subscriber.phase
            raise SubscriberNotFound(
                f"subscriber {subscriber_id!r} is {state}; register and activate it first"
            )
        return subscriber

    def _state_of(self, subscriber_id: str) -> SubscriberState:
        subscriber = self._subscribers.get(subscriber_id)
        if subscriber is None:
            raise SubscriberNotFound(f"there is no subscriber {subscriber_id!r}")
        return subscriber.state
