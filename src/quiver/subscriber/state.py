"""What one subscriber has resolved, holds and put off: a state machine without I/O and threads.

Every bundle of every segment that concerns the subscriber is in one of four states::

                      ┌──────────── resolve ───────────▶ resolved
                      │
    pending ── claim ─┴▶ claimed ── release, timeout ──▶ pending
                      │
                      └──────────── defer ─────────────▶ deferred ── when due ──▶ pending

Resolved is final, and all that a progress file keeps; the others are pending again after a restart.
Bundles are bits of an integer for each segment, so that finding the next pending one costs the same
whether one bundle is open or sixty thousand.

Time is a number of seconds that the caller passes in and that never goes back.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from quiver.errors import BundleNotAvailable
from quiver.subscriber.progress import Progress, SegmentProgress


class BundleRef(NamedTuple):
    """The address of a bundle: its segment, and its place in it."""

    segment: int
    bundle: int

    def __str__(self) -> str:
        return f"{self.segment}:{self.bundle}"


class Claim(NamedTuple):
    """The right to resolve a bundle. A later claim of the same bundle has another number."""

    ref: BundleRef
    number: int


@dataclass(slots=True)
class _Segment:
    """The bundles of one segment, a bit each."""

    bundle_count: int
    resolved: int = 0
    claimed: int = 0
    deferred: int = 0

    @property
    def pending(self) -> int:
        """The bundles that can be claimed."""
        return ~(self.resolved | self.claimed | self.deferred) & (1 << self.bundle_count) - 1

    @property
    def unresolved_count(self) -> int:
        return self.bundle_count - self.resolved.bit_count()


@dataclass(order=True, slots=True)
class _Timer:
    """Something that happens to a bundle at a time; stale when the bundle moved on before."""

    due: float
    ref: BundleRef = field(compare=False)
    number: int = field(compare=False)


class SubscriberState:
    """The state of one subscriber. Segments below ``floor`` are none of its business."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._segments: dict[int, _Segment] = {}
        self._order: list[int] = []
        self._claims: dict[BundleRef, int] = {}
        self._deferrals: dict[BundleRef, int] = {}
        self._claim_timers: list[_Timer] = []
        self._defer_timers: list[_Timer] = []
        self._numbers = 0
        self._extension = b""
        self._flags = 0
        self.floor = 0
        self.dirty = False
        """Whether something was resolved that no progress file says yet."""
        if progress is not None:
            self._load(progress)

    def _load(self, progress: Progress) -> None:
        self.floor = progress.oldest_incomplete_segment
        self._extension = progress.extension
        self._flags = progress.flags
        for entry in progress.entries:
            self._segments[entry.segment] = _Segment(entry.bundle_count, entry.resolved)
        self._order = sorted(self._segments)

    def to_progress(self) -> Progress:
        """What the progress file has to say.

        Segments that are complete are not listed when all below them are complete too.
        """
        entries = tuple(
            SegmentProgress(number, segment.bundle_count, segment.resolved)
            for number in self._order
            if (segment := self._segments[number]).resolved
        )
        return Progress(entries, self.floor, self._flags, self._extension)

    # --- segments ---------------------------------------------------------------------------------

    @property
    def segments(self) -> list[int]:
        """The segments it knows, oldest first."""
        return list(self._order)

    def start_at(self, segment: int) -> None:
        """Nothing before ``segment`` concerns this subscriber."""
        self.floor = max(self.floor, segment)
        self.dirty = True

    def add_segment(self, number: int, bundle_count: int) -> bool:
        """A segment exists; whether it brought something to deliver."""
        if number < self.floor and number not in self._segments:
            return False
        segment = self._segments.get(number)
        if segment is None:
            self._segments[number] = _Segment(bundle_count)
            insort(self._order, number)
        elif segment.bundle_count != bundle_count:
            # The file is another one than the progress was kept for: better twice than never.
            self._let_go(number)
            self._segments[number] = _Segment(bundle_count)
            self.dirty = True
        return self._segments[number].pending != 0

    def forget(self, number: int) -> None:
        """The file is gone: nothing about the segment needs to be kept."""
        segment = self._segments.pop(number, None)
        if segment is None:
            return
        self._order.remove(number)
        self._let_go(number)
        self.dirty = True

    def raise_floor(self, oldest_existing: int) -> None:
        """Everything below ``oldest_existing`` is gone for good: new numbers are all above it."""
        oldest = next((n for n in self._order if not self.is_complete(n)), None)
        floor = oldest_existing if oldest is None else min(oldest, oldest_existing)
        if floor > self.floor:
            self.floor = floor
            self.dirty = True

    def is_complete(self, number: int) -> bool:
        """Whether nothing of the segment is left to do; true of one that never concerned it."""
        segment = self._segments.get(number)
        if segment is None:
            return number < self.floor
        return segment.unresolved_count == 0

    def drop(self, number: int) -> int:
        """Resolve what is left of a segment because a policy says so; how many bundles it was."""
        segment = self._segments.get(number)
        if segment is None:
            return 0
        dropped = segment.unresolved_count
        if dropped:
            segment.resolved = (1 << segment.bundle_count) - 1
            segment.claimed = segment.deferred = 0
            self._let_go(number)
            self.dirty = True
        return dropped

    def has_claims(self, number: int) -> bool:
        """Whether somebody is working on a bundle of the segment."""
        segment = self._segments.get(number)
        return segment is not None and segment.claimed != 0

    # --- claiming ---------------------------------------------------------------------------------

    def claim_next(
        self,
        now: float,
        *,
        newest_first: bool = False,
        segments: range | None = None,
        timeout: float | None = None,
    ) -> Claim | None:
        """Claim the oldest pending bundle, or the newest; None when nothing is pending."""
        self.advance(now)
        order = self._order if segments is None else self._within(segments)
        for number in reversed(order) if newest_first else order:
            pending = self._segments[number].pending
            if pending:
                bit = pending.bit_length() - 1 if newest_first else _lowest_bit(pending)
                return self._claim(BundleRef(number, bit), now, timeout)
        return None

    def claim(self, ref: BundleRef, now: float, timeout: float | None = None) -> Claim:
        """Claim one bundle, also a deferred one before its time."""
        self.advance(now)
        segment = self._segments.get(ref.segment)
        if segment is None or not 0 <= ref.bundle < segment.bundle_count:
            raise BundleNotAvailable(f"bundle {ref} is not there for this subscriber")
        bit = 1 << ref.bundle
        if segment.resolved & bit:
            raise BundleNotAvailable(f"bundle {ref} is resolved already")
        if segment.claimed & bit:
            raise BundleNotAvailable(f"bundle {ref} is claimed by somebody else")
        self._deferrals.pop(ref, None)
        segment.deferred &= ~bit
        return self._claim(ref, now, timeout)

    def resolve(self, claim: Claim) -> None:
        """Acknowledge or reject: the bundle is done with."""
        segment = self._held(claim)
        segment.claimed &= ~(1 << claim.ref.bundle)
        segment.resolved |= 1 << claim.ref.bundle
        del self._claims[claim.ref]
        self.dirty = True

    def release(self, claim: Claim) -> None:
        """Give the bundle back; it is pending at once."""
        self._held(claim).claimed &= ~(1 << claim.ref.bundle)
        del self._claims[claim.ref]

    def defer(self, claim: Claim, until: float) -> None:
        """Give the bundle back for later; others go on before it."""
        segment = self._held(claim)
        self.release(claim)
        segment.deferred |= 1 << claim.ref.bundle
        self._numbers += 1
        self._deferrals[claim.ref] = self._numbers
        heapq.heappush(self._defer_timers, _Timer(until, claim.ref, self._numbers))

    def advance(self, now: float) -> int:
        """Let time pass: deferred bundles come due, claims run out. How many became pending."""
        changed = 0
        for ref in _due(self._defer_timers, self._deferrals, now):
            self._segments[ref.segment].deferred &= ~(1 << ref.bundle)
            changed += 1
        for ref in _due(self._claim_timers, self._claims, now):
            self._segments[ref.segment].claimed &= ~(1 << ref.bundle)
            changed += 1
        return changed

    def next_event(self) -> float | None:
        """When ``advance`` may next have something to do."""
        for timers, current in (
            (self._defer_timers, self._deferrals),
            (self._claim_timers, self._claims),
        ):
            while timers and current.get(timers[0].ref) != timers[0].number:
                heapq.heappop(timers)
        heads = [timers[0].due for timers in (self._defer_timers, self._claim_timers) if timers]
        return min(heads, default=None)

    # --- counting ---------------------------------------------------------------------------------

    def unresolved_count(self) -> int:
        """Bundles that are pending, claimed or deferred."""
        return sum(segment.unresolved_count for segment in self._segments.values())

    def unresolved(self) -> Iterator[BundleRef]:
        """Those bundles, oldest first."""
        for number in self._order:
            segment = self._segments[number]
            left = ~segment.resolved & (1 << segment.bundle_count) - 1
            while left:
                bit = _lowest_bit(left)
                yield BundleRef(number, bit)
                left &= left - 1

    def claimed_count(self) -> int:
        """Bundles that somebody holds."""
        return len(self._claims)

    def deferred_count(self) -> int:
        """Bundles put off."""
        return len(self._deferrals)

    def oldest_unresolved(self) -> BundleRef | None:
        """The first bundle that is not resolved."""
        return next(self.unresolved(), None)

    def resolve_many(self, refs: Iterable[BundleRef]) -> None:
        """Resolve bundles that were never claimed."""
        for ref in refs:
            segment = self._segments.get(ref.segment)
            if segment is not None and 0 <= ref.bundle < segment.bundle_count:
                segment.resolved |= 1 << ref.bundle
                self.dirty = True

    def _claim(self, ref: BundleRef, now: float, timeout: float | None) -> Claim:
        self._segments[ref.segment].claimed |= 1 << ref.bundle
        self._numbers += 1
        self._claims[ref] = self._numbers
        if timeout is not None:
            heapq.heappush(self._claim_timers, _Timer(now + timeout, ref, self._numbers))
        return Claim(ref, self._numbers)

    def _let_go(self, number: int) -> None:
        for held in (self._claims, self._deferrals):
            for ref in [ref for ref in held if ref.segment == number]:
                del held[ref]

    def _held(self, claim: Claim) -> _Segment:
        if self._claims.get(claim.ref) != claim.number:
            raise BundleNotAvailable(
                f"bundle {claim.ref} is not held any more: it was resolved, given back, dropped, "
                "or its claim ran out"
            )
        return self._segments[claim.ref.segment]

    def _within(self, segments: range) -> list[int]:
        low = bisect_left(self._order, segments.start)
        return self._order[low : bisect_left(self._order, segments.stop)]


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _due(timers: list[_Timer], current: dict[BundleRef, int], now: float) -> Iterator[BundleRef]:
    """Take what is due off the heap; each timer that still stands ends its entry."""
    while timers and timers[0].due <= now:
        timer = heapq.heappop(timers)
        if current.get(timer.ref) == timer.number:
            del current[timer.ref]
            yield timer.ref
