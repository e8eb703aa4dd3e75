"""A whole store and a simple model of it, driven side by side: whatever is called, they agree.

The model knows bundles by their index, which is also their sequence number, and keeps three things:
which bundles are in which finalised segment, which are not finalised yet, and for each subscriber
what it is owed. A power cut may undo what a subscriber resolved since the last flush, nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from bundles import START_NS, plain_bundle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quiver import (
    BundleHandle,
    Choose,
    SegmentConfig,
    Start,
    Store,
    StoreConfig,
    SubscriberNotFound,
    WalConfig,
)
from quiver.store.core import Clock
from quiver.testing import SimulatedDisk

NAMES = st.sampled_from(["a", "b", "c"])
WHERE = st.sampled_from(["latest", "earliest", "sequence", "time"])
LONG = 3600.0
CONFIG = StoreConfig(
    maintain_interval=LONG,
    segment=SegmentConfig(max_open_duration=LONG),
    wal=WalConfig(rotation_target=2000, max_size=10**9, max_rotated_files=10**6),
)


@dataclass
class Subscriber:
    """What is owed to one subscriber, which it resolved, and what of that is durable."""

    owed: set[int]
    from_sequence: int = 0
    resolved: set[int] = field(default_factory=set)
    durable: set[int] = field(default_factory=set)
    held: dict[int, BundleHandle] = field(default_factory=dict)
    deferred: dict[int, float] = field(default_factory=dict)

    def unresolved(self) -> set[int]:
        return self.owed - self.resolved

    def available(self, now: float) -> list[int]:
        put_off = {index for index, due in self.deferred.items() if due > now}
        return sorted(self.unresolved() - self.held.keys() - put_off)


class StoreBesideModel(RuleBasedStateMachine):
    """The rules are the calls of a user, and the accidents."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next_index = 0
        self.open: list[int] = []
        self.segments: list[list[int]] = []
        self.subscribers: dict[str, Subscriber] = {}
        self.losses: Counter[str] = Counter()

    @initialize(where=WHERE, count=st.integers(1, 3))
    def begin(self, where: str, count: int) -> None:
        self.disk = SimulatedDisk()
        self.store = self.opened()
        self.ingest(count)
        self.register("a", where)
        self.ingest(count)

    def opened(self) -> Store:
        clock = Clock(lambda: self.now, lambda: START_NS + int(self.now * 1e9))
        store = Store.open("/store", CONFIG, disk=self.disk, clock=clock)
        store.flush()  # the first round of the background is over
        return store

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()

    # --- calls --------------------------------------------------------------------------------

    @rule(count=st.integers(1, 3))
    def ingest(self, count: int) -> None:
        for _ in range(count):
            assert self.store.ingest(plain_bundle(self.next_index)).sequence == self.next_index
            self.open.append(self.next_index)
            self.next_index += 1

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.after_flush()

    def after_flush(self) -> None:
        """Finalised, progress written, and what everybody has resolved is gone."""
        if self.open:
            self.segments.append(self.open)
            for subscriber in self.subscribers.values():
                subscriber.owed |= {i for i in self.open if i >= subscriber.from_sequence}
            self.open = []
        for subscriber in self.subscribers.values():
            subscriber.durable = set(subscriber.resolved)
        if self.subscribers:
            owed = set[int]().union(*(s.unresolved() for s in self.subscribers.values()))
            self.segments = [segment for segment in self.segments if owed & set(segment)]

    @rule(name=NAMES, where=WHERE)
    def register(self, name: str, where: str) -> None:
        middle = self.next_index // 2
        start = {
            "latest": Start.latest(),
            "earliest": Start.earliest(),
            "sequence": Start.at_sequence(middle),
            "time": Start.at_time(START_NS + middle),
        }[where]
        assert self.store.register(name, start) == (name not in self.subscribers)
        self.store.activate(name)
        if name in self.subscribers:
            return
        begins = middle if where in {"sequence", "time"} else 0
        finalised = set[int]() if where == "latest" else {i for s in self.segments for i in s}
        self.subscribers[name] = Subscriber({i for i in finalised if i >= begins}, begins)

    @precondition(lambda self: self.subscribers)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.subscribers)))
        dropped = self.store.unregister(name)
        gone = self.subscribers.pop(name)
        assert dropped == len(gone.unresolved())
        self.losses[f"unregistered.bundles.{name}"] += dropped

    @rule(name=NAMES, newest_first=st.booleans())
    def claim(self, name: str, newest_first: bool) -> None:
        subscriber = self.subscribers.get(name)
        if subscriber is None:
            with pytest.raises(SubscriberNotFound):
                self.store.poll_next_bundle(name)
            return
        handle = self.store.poll_next_bundle(name, Choose(newest_first=newest_first))
        available = subscriber.available(self.now)
        if not available:
            assert handle is None
            return
        assert handle is not None
        index = index_of(handle)
        assert index == (available[-1] if newest_first else available[0])
        subscriber.held[index] = handle
        subscriber.deferred.pop(index, None)

    @precondition(lambda self: any(s.held for s in self.subscribers.values()))
    @rule(data=st.data(), action=st.sampled_from(["ack", "reject", "defer", "drop"]))
    def give_back(self, data: st.DataObject, action: str) -> None:
        name = data.draw(st.sampled_from([n for n, s in self.subscribers.items() if s.held]))
        subscriber = self.subscribers[name]
        index = data.draw(st.sampled_from(sorted(subscriber.held)))
        handle = subscriber.held.pop(index)
        if action == "ack":
            handle.ack()
            subscriber.resolved.add(index)
        elif action == "reject":
            handle.reject("no good")
            subscriber.resolved.add(index)
            self.losses[f"rejected.bundles.{name}"] += 1
        elif action == "defer":
            handle.defer(5.0)
            subscriber.deferred[index] = self.now + 5.0
        else:
            del handle

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    # --- accidents ----------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        self.let_go()
        self.store.close()
        self.after_close()
        self.store = self.opened()
        self.after_flush()
        self.register_again()

    def after_close(self) -> None:
        """The open segment is finalised and progress is written; deleting is left for later."""
        subscribers, self.subscribers = self.subscribers, {}
        for subscriber in subscribers.values():
            subscriber.owed |= {i for i in self.open if i >= subscriber.from_sequence}
        self.after_flush()
        self.subscribers = subscribers

    @rule(seed=st.integers(0, 2**32))
    def cut_power(self, seed: int) -> None:
        rejected = {n: c for n, c in self.losses.items() if n.startswith("rejected")}
        self.let_go()
        rebooted = next(iter(self.disk.crash_states(limit=1, seed=seed)))
        self.store.close()
        self.disk = rebooted
        self.store = self.opened()
        for name, count in rejected.items():  # counted when the progress that says so is written
            assert self.store.losses[name] <= count
            self.losses[name] = self.store.losses[name]
        for subscriber in self.subscribers.values():
            subscriber.owed |= {i for i in self.open if i >= subscriber.from_sequence}
        self.register_again()
        for name, subscriber in self.subscribers.items():
            left = self.left_for(name)
            assert subscriber.unresolved() <= left <= subscriber.owed - subscriber.durable
            subscriber.resolved = subscriber.owed - left
        self.after_flush()

    def let_go(self) -> None:
        """Handles do not outlive their process; what was put off is pending again."""
        for subscriber in self.subscribers.values():
            subscriber.held.clear()
            subscriber.deferred.clear()

    def register_again(self) -> None:
        for name in self.subscribers:
            assert not self.store.register(name, Start.latest())
        self.store.activate()

    def left_for(self, name: str) -> set[int]:
        """Everything a subscriber can claim; it is all given back."""
        handles = []
        while (handle := self.store.poll_next_bundle(name)) is not None:
            handles.append(handle)
        return {index_of(handle) for handle in handles}

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def subscribers_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        counts = {info.subscriber_id: info.pending for info in self.store.subscribers()}
        assert counts == {name: len(s.unresolved()) for name, s in self.subscribers.items()}

    @invariant()
    def losses_agree(self) -> None:
        if hasattr(self, "store"):
            assert self.store.losses == +self.losses
            assert self.store.problems == []

    @invariant()
    def everything_is_drained_or_not(self) -> None:
        if hasattr(self, "store"):
            unresolved = any(s.unresolved() for s in self.subscribers.values())
            assert self.store.all_drained() == (not self.open and not unresolved)


def index_of(handle: BundleHandle) -> int:
    batch = handle.bundle.batch(30)
    assert batch is not None
    return int(batch.column(0)[0].as_py())


TestStoreBesideModel = StoreBesideModel.TestCase
TestStoreBesideModel.settings = settings(max_examples=150, stateful_step_count=50)


@pytest.mark.slow
def test_they_agree_for_long() -> None:
    run_state_machine_as_test(StoreBesideModel, settings=settings(stateful_step_count=80))
