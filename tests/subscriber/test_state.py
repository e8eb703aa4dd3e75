"""The state of a subscriber, beside a model that keeps one word for each bundle."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from quiver.errors import BundleNotAvailable
from quiver.subscriber.progress import decode_progress, encode_progress
from quiver.subscriber.state import BundleRef, Claim, SubscriberState


def state_with(**segments: int) -> SubscriberState:
    state = SubscriberState()
    for name, bundle_count in segments.items():
        state.add_segment(int(name.removeprefix("s")), bundle_count)
    return state


def claim(
    state: SubscriberState,
    now: float = 0.0,
    *,
    newest_first: bool = False,
    segments: range | None = None,
    timeout: float | None = None,
) -> Claim:
    claimed = state.claim_next(now, newest_first=newest_first, segments=segments, timeout=timeout)
    assert claimed is not None
    return claimed


class Model(RuleBasedStateMachine):
    """Each bundle is pending, claimed, deferred or resolved; the oldest pending one comes next."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.state = SubscriberState()
        self.words: dict[BundleRef, str] = {}
        self.due: dict[BundleRef, float] = {}
        self.owner: dict[BundleRef, Claim] = {}
        self.now = 0.0
        self.next_segment = 0

    def pending(self) -> list[BundleRef]:
        return sorted(ref for ref, word in self.words.items() if word == "pending")

    @rule(bundle_count=st.integers(1, 4))
    def add_segment(self, bundle_count: int) -> None:
        self.state.add_segment(self.next_segment, bundle_count)
        for bundle in range(bundle_count):
            self.words[BundleRef(self.next_segment, bundle)] = "pending"
        self.next_segment += 1

    @rule(target=claims, newest_first=st.booleans(), timeout=st.none() | st.integers(1, 5))
    def claim_next(self, newest_first: bool, timeout: int | None) -> Claim | None:
        claimed = self.state.claim_next(self.now, newest_first=newest_first, timeout=timeout)
        pending = self.pending()
        if not pending:
            assert claimed is None
            return None
        assert claimed is not None
        assert claimed.ref == (pending[-1] if newest_first else pending[0])
        self.hold(claimed, timeout)
        return claimed

    def hold(self, claimed: Claim, timeout: int | None) -> None:
        self.words[claimed.ref] = "claimed"
        self.owner[claimed.ref] = claimed
        self.due[claimed.ref] = float("inf") if timeout is None else self.now + timeout

    @rule(target=claims, segment=st.integers(0, 5), bundle=st.integers(0, 4))
    def claim_one(self, segment: int, bundle: int) -> Claim | None:
        ref = BundleRef(segment, bundle)
        if self.words.get(ref) not in {"pending", "deferred"}:
            with pytest.raises(BundleNotAvailable):
                self.state.claim(ref, self.now)
            return None
        claimed = self.state.claim(ref, self.now)
        self.hold(claimed, None)
        return claimed

    @rule(held=claims, action=st.sampled_from(["resolve", "release", "defer"]))
    def give_back(self, held: Claim | None, action: str) -> None:
        if held is None:
            return
        arguments = (held, self.now + 3) if action == "defer" else (held,)
        if self.words.get(held.ref) != "claimed" or self.owner[held.ref] != held:
            with pytest.raises(BundleNotAvailable):
                getattr(self.state, action)(*arguments)
            return
        getattr(self.state, action)(*arguments)
        words = {"resolve": "resolved", "release": "pending", "defer": "deferred"}
        self.words[held.ref] = words[action]
        self.due[held.ref] = self.now + 3

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        for ref, word in self.words.items():
            if word in {"claimed", "deferred"} and self.due[ref] <= self.now:
                self.words[ref] = "pending"
        self.state.advance(self.now)

    @rule(segment=st.integers(0, 5), forget=st.booleans())
    def drop(self, segment: int, forget: bool) -> None:
        refs = [ref for ref in self.words if ref.segment == segment]
        left = [ref for ref in refs if self.words[ref] != "resolved"]
        assert self.state.drop(segment) == len(left)
        for ref in left:
            self.words[ref] = "resolved"
        if forget:
            self.state.forget(segment)
            for ref in refs:
                del self.words[ref]

    @rule()
    def restart(self) -> None:
        """Only what is resolved survives, over the bytes of a progress file."""
        data = encode_progress(self.state.to_progress())
        before = {number: self.state.is_complete(number) for number in self.state.segments}
        self.state = SubscriberState(decode_progress(data, source="f"))
        for number in before:
            count = sum(ref.segment == number for ref in self.words)
            self.state.add_segment(number, count)
        assert {n: self.state.is_complete(n) for n in self.state.segments} == before
        for ref, word in self.words.items():
            if word != "resolved":
                self.words[ref] = "pending"
        self.owner.clear()

    @invariant()
    def counts_agree(self) -> None:
        unresolved = sorted(ref for ref, word in self.words.items() if word != "resolved")
        assert list(self.state.unresolved()) == unresolved
        assert self.state.unresolved_count() == len(unresolved)
        assert self.state.oldest_unresolved() == (unresolved[0] if unresolved else None)
        words = list(self.words.values())
        assert self.state.claimed_count() == words.count("claimed")
        assert self.state.deferred_count() == words.count("deferred")

    @invariant()
    def the_next_event_is_not_missed(self) -> None:
        waiting = [self.due[r] for r, w in self.words.items() if w in {"claimed", "deferred"}]
        due = min((time for time in waiting if time < float("inf")), default=None)
        assert self.state.next_event() == due


TestModel = Model.TestCase


def test_a_deferred_bundle_does_not_hold_up_the_others() -> None:
    state = state_with(s0=3)
    state.defer(claim(state), until=10)
    assert claim(state).ref == (0, 1)
    assert claim(state).ref == (0, 2)
    assert state.claim_next(9.9) is None
    assert state.next_event() == 10
    assert claim(state, now=10.0).ref == (0, 0)


def test_a_claim_that_ran_out_cannot_be_resolved_any_more() -> None:
    state = state_with(s0=1)
    first = claim(state, timeout=5.0)
    second = claim(state, now=5.0)
    with pytest.raises(BundleNotAvailable, match="its claim ran out"):
        state.resolve(first)
    state.resolve(second)
    assert state.is_complete(0)


def test_a_range_of_segments_can_be_claimed_from() -> None:
    state = state_with(s0=1, s1=1, s2=1)
    assert claim(state, segments=range(1, 2)).ref == (1, 0)
    assert state.claim_next(0.0, segments=range(1, 2)) is None
    assert claim(state, newest_first=True).ref == (2, 0)


def test_nothing_below_the_floor_concerns_it() -> None:
    state = SubscriberState()
    state.start_at(5)
    assert not state.add_segment(4, 3)
    assert state.add_segment(5, 1)
    assert state.is_complete(4)
    assert not state.is_complete(5)
    assert state.unresolved_count() == 1


def test_the_floor_rises_over_what_is_gone_and_stops_at_what_is_not_resolved() -> None:
    state = state_with(s3=1, s4=1)
    state.raise_floor(3)
    assert state.floor == 3
    state.resolve(claim(state))
    state.raise_floor(5)
    assert state.floor == 4
    state.resolve(claim(state))
    state.raise_floor(5)
    assert state.floor == 5
    assert state.to_progress().oldest_incomplete_segment == 5


def test_progress_of_another_file_under_the_same_number_does_not_count() -> None:
    state = state_with(s0=2)
    state.resolve(claim(state))
    state.add_segment(0, 3)
    assert state.unresolved_count() == 3


def test_what_another_process_resolved_is_taken_over() -> None:
    state = state_with(s0=3)
    state.resolve_many([BundleRef(0, 0), BundleRef(0, 2), BundleRef(0, 9), BundleRef(7, 0)])
    assert list(state.unresolved()) == [(0, 1)]
