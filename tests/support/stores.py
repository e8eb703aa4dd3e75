"""A store without threads on a simulated disk: scripts that say what they promise, one check.

``Session`` drives a ``StoreCore`` and states a ``Fact`` for everything that must hold from then on,
whatever happens to the power. What may happen is stated before the call that may do it (a bundle is
about to be resolved, dropped, forgotten), what must hold is stated after the call returned.

A call that fails is made again, as a user of the store would: so a script goes on after an error
that ``error_loop`` put in its way, and what it acknowledges afterwards counts as well.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from bundles import numbers

from quiver.bundle import RecordBundle
from quiver.config import RetentionConfig, SegmentConfig, StoreConfig, WalConfig
from quiver.errors import QuiverError
from quiver.store.core import Clock, Start, StoreCore
from quiver.store.intake import Receipt
from quiver.subscriber.state import BundleRef
from quiver.testing import SimulatedDisk

ROOT: Final = Path("/store")
SECOND_NS: Final = 1_000_000_000
ROWS: Final = 60
CONFIG: Final = StoreConfig(
    wal=WalConfig(rotation_target=2500, max_size=1_000_000),
    segment=SegmentConfig(max_frozen=8),
    retention=RetentionConfig(min_free_space=0),
)
_STEP = 1000  # between the first values of two bundles
ATTEMPTS = 3  # how often a session makes a call that fails

Result = TypeVar("Result")


class HandClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0

    def clock(self) -> Clock:
        return Clock(lambda: float(self.seconds), lambda: self.seconds * SECOND_NS)


class Kind(enum.Enum):
    """What a fact says."""

    TAKEN = "a receipt was given for the bundle"
    SEGMENT = "the number was given to a segment"
    REGISTERED = "the subscriber registered, or was about to be asked again"
    LEAVING = "the subscriber may be forgotten from now on"
    LEFT = "the subscriber is forgotten"
    RESOLVING = "the subscriber resolved the bundle, which may become durable any time"
    DONE = "that the subscriber resolved the bundle is durable"
    DROPPING = "a policy may drop the bundle from now on, and has to count it"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that holds from now on. ``number`` is a sequence, or a segment."""

    kind: Kind
    index: int = -1
    number: int = -1
    name: str = ""


Acknowledge = Callable[[Fact], None]


def bundle(index: int) -> RecordBundle:
    """A bundle of several sectors, told from others by its values."""
    first = index * _STEP
    return RecordBundle.from_batches(
        {30: numbers(*range(first, first + ROWS))}, ingestion_time_ns=index, item_count=ROWS
    )


def index_of(found: RecordBundle) -> int:
    """Which bundle it is; it must be that bundle, to the last value."""
    batch = found.batch(30)
    assert batch is not None, "a bundle without its batch"
    values = batch.column(0).to_pylist()
    index = (values[0] or 0) // _STEP
    assert values == list(range(index * _STEP, index * _STEP + ROWS)), "the content is another one"
    return int(index)


def open_core(
    disk: SimulatedDisk, config: StoreConfig = CONFIG, clock: HandClock | None = None
) -> StoreCore:
    return StoreCore(disk, ROOT, config, (clock or HandClock()).clock())


def kill(core: StoreCore) -> None:
    """What the end of a process does: the lock is free, nothing is written."""
    core._lock.release()


def take(core: StoreCore, indices: Sequence[int]) -> list[Receipt]:
    return core.commit([core.prepare(bundle(index)) for index in indices])


def claim_all(core: StoreCore, name: str) -> Iterator[tuple[BundleRef, int]]:
    """Everything that is pending for a subscriber, read and compared."""
    core.register(name, Start.earliest())
    core.registry.activate(name)
    while True:
        with core.registry.active(name) as state:
            claim = state.claim_next(0.0)
        if claim is None:
            return
        yield claim.ref, index_of(core.segments.bundle(*claim.ref))


def again(call: Callable[[], Result]) -> Result:
    """Make a call, and make it again after an error that a user of the store is told to expect."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(OSError, QuiverError):
            return call()
    return call()


class Session:
    """A store in use. Every method states what it promises."""

    def __init__(
        self, disk: SimulatedDisk, acknowledge: Acknowledge, config: StoreConfig = CONFIG
    ) -> None:
        self.disk = disk
        self.tell = acknowledge
        self.config = config
        self.hand = HandClock()
        self._resolved: list[tuple[str, int]] = []
        self.core = again(self._open)

    def _open(self) -> StoreCore:
        return open_core(self.disk, self.config, self.hand)

    def reopen(self) -> None:
        """The process ends and the next one starts; the machine runs on."""
        kill(self.core)
        self._resolved.clear()
        self.core = again(self._open)

    def take(self, *indices: int) -> None:
        receipts = again(lambda: take(self.core, indices))
        for index, receipt in zip(indices, receipts, strict=True):
            self.tell(Fact(Kind.TAKEN, index, receipt.sequence))

    def finalise(self) -> None:
        again(lambda: self.core.finalise_due(at_once=True))
        for number in self.core.segments.numbers:
            self.tell(Fact(Kind.SEGMENT, number=number))

    def register(
        self, name: str, start: Start | None = None, *, without: Sequence[int] = ()
    ) -> None:
        """``without``: bundles that are gone already and not owed to the new subscriber."""
        for index in without:
            self.tell(Fact(Kind.RESOLVING, index, name=name))
        again(lambda: self.core.register(name, start or Start.earliest()))
        self.tell(Fact(Kind.REGISTERED, name=name))

    def unregister(self, name: str) -> None:
        self.tell(Fact(Kind.LEAVING, name=name))
        again(lambda: self.core.unregister(name))
        self.tell(Fact(Kind.LEFT, name=name))

    def resolve(self, name: str, *indices: int) -> None:
        """Acknowledge these bundles, give the others back. Durable with the next ``maintain``."""
        self.core.register(name, Start.earliest())
        self.core.registry.activate(name)
        given_back = []
        while True:
            with self.core.registry.active(name) as state:
                claim = state.claim_next(self.hand.seconds)
            if claim is None:
                break
            index = index_of(self.core.segments.bundle(*claim.ref))
            if index in indices:
                self.tell(Fact(Kind.RESOLVING, index, name=name))
                self.core.registry.resolve(name, claim)
                self._resolved.append((name, index))
            else:
                given_back.append(claim)
        for claim in given_back:
            self.core.registry.release(name, claim)

    def maintain(self, *, may_drop: Sequence[int] = ()) -> None:
        for index in may_drop:
            self.tell(Fact(Kind.DROPPING, index))
        again(self.core.maintain)
        for name, index in self._resolved:
            self.tell(Fact(Kind.DONE, index, name=name))
        self._resolved.clear()


def check(disk: SimulatedDisk, facts: Sequence[Fact]) -> None:
    """What must hold on every disk that a power cut may leave."""
    core = open_core(disk)
    core.finalise_due(at_once=True)
    core.maintain()
    known = {info.subscriber_id for info in core.registry.infos()}
    _check_subscribers(known, facts)
    delivered = {name: {index for _, index in claim_all(core, name)} for name in sorted(known)}
    _check_deliveries(delivered, facts)
    _check_numbers(core, facts)
    new = max((fact.index for fact in facts), default=0) + 1
    sequence = take(core, [new])[0].sequence
    assert sequence > max(_numbers(facts, Kind.TAKEN), default=-1), "a sequence number comes twice"
    kill(core)
    _check_goes_on(disk, known or {"newcomer"}, new, facts)


def _check_goes_on(disk: SimulatedDisk, names: set[str], new: int, facts: Sequence[Fact]) -> None:
    """One more bundle was taken; after another restart it is there, under a new number."""
    core = open_core(disk)
    core.finalise_due(at_once=True)
    number = core.segments.numbers[-1]
    assert number > max(_numbers(facts, Kind.SEGMENT), default=-1), "a segment number comes twice"
    for name in sorted(names):
        found = dict(claim_all(core, name))
        assert (number, new) in [(ref.segment, index) for ref, index in found.items()], (
            f"{name} does not get what was taken after the restart"
        )
    core.close()


def _numbers(facts: Sequence[Fact], kind: Kind) -> Iterator[int]:
    return (fact.number for fact in facts if fact.kind is kind)


def _check_subscribers(known: set[str], facts: Sequence[Fact]) -> None:
    latest = {
        fact.name: fact.kind
        for fact in facts
        if fact.kind in {Kind.REGISTERED, Kind.LEAVING, Kind.LEFT}
    }
    for name, kind in latest.items():
        if kind is Kind.REGISTERED:
            assert name in known, f"subscriber {name} is lost"
        elif kind is Kind.LEFT:
            assert name not in known, f"subscriber {name} is back"


def _of(facts: Sequence[Fact], name: str, kind: Kind) -> set[int]:
    return {fact.index for fact in facts if fact.kind is kind and fact.name == name}


def _missing(facts: Sequence[Fact], name: str, indices: set[int]) -> set[int]:
    """What was acknowledged, and the subscriber did neither resolve nor get."""
    taken = {fact.index for fact in facts if fact.kind is Kind.TAKEN}
    registered = _of(facts, name, Kind.REGISTERED)
    return taken - indices - _of(facts, name, Kind.RESOLVING) if registered else set()


def _check_deliveries(delivered: dict[str, set[int]], facts: Sequence[Fact]) -> None:
    dropping = {fact.index for fact in facts if fact.kind is Kind.DROPPING}
    for name, indices in delivered.items():
        lost = _missing(facts, name, indices) - dropping
        assert not lost, f"bundles {sorted(lost)} are lost for {name}"
        repeated = _of(facts, name, Kind.DONE) & indices
        assert not repeated, f"bundles {sorted(repeated)} are resolved for {name}, and come again"


def check_losses(disk: SimulatedDisk, facts: Sequence[Fact]) -> None:
    """What a policy or an operator dropped is counted, whenever the power goes."""
    core = open_core(disk)
    core.finalise_due(at_once=True)
    losses = core.ledger.losses
    known = {info.subscriber_id for info in core.registry.infos()}
    for name in {fact.name for fact in facts if fact.kind is Kind.REGISTERED}:
        found = {index for _, index in claim_all(core, name)} if name in known else set[int]()
        missing = len(_missing(list(_until_left(facts, name)), name, found))
        reasons = ("dropped", "expired", "unregistered")
        counted = sum(losses[f"{reason}.bundles.{name}"] for reason in reasons)
        assert missing <= counted, f"{name} misses {missing} bundles, {counted} are counted"


def _until_left(facts: Sequence[Fact], name: str) -> Iterator[Fact]:
    """What was owed to a subscriber when it was asked to leave."""
    return itertools.takewhile(lambda f: (f.kind, f.name) != (Kind.LEAVING, name), facts)


def _check_numbers(core: StoreCore, facts: Sequence[Fact]) -> None:
    """A sequence number names one bundle for ever."""
    names: dict[int, set[int]] = {}
    for fact in facts:
        if fact.kind is Kind.TAKEN:
            names.setdefault(fact.number, set()).add(fact.index)
    for number in core.segments.numbers:
        for entry in core.segments.manifest(number):
            if entry.sequence is not None:
                index = index_of(core.segments.bundle(number, entry.bundle_index))
                names.setdefault(entry.sequence, set()).add(index)
    for sequence, indices in names.items():
        assert len(indices) == 1, f"number {sequence} names the bundles {sorted(indices)}"
