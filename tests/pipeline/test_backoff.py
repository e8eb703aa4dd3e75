"""Pauses grow and stay within their bounds; an outage costs few attempts."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from quiver.pipeline.backoff import REFUSALS_TO_PAUSE, Outage, pause
from quiver.pipeline.settings.options import RetryOptions

RETRY = RetryOptions(initial_interval=1.0, max_interval=30.0, multiplier=2.0, jitter=0.5)


@given(st.integers(1, 10_000), st.integers())
def test_a_pause_is_within_its_bounds(attempt: int, seed: int) -> None:
    full = min(30.0, 2.0 ** (min(attempt, 100) - 1))
    assert full / 2 <= pause(RETRY, attempt, random.Random(seed)) <= full


def test_two_bundles_do_not_come_back_at_the_same_time() -> None:
    chance = random.Random(1)
    assert len({pause(RETRY, 5, chance) for _ in range(50)}) == 50


def test_a_few_refusals_are_no_outage() -> None:
    outage = Outage(RETRY, random.Random(1))
    for _ in range(REFUSALS_TO_PAUSE - 1):
        outage.refused(0.0, None)
        assert outage.wait(0.0) == 0
    assert not outage.succeeded()
    outage.refused(0.0, None)
    assert outage.wait(0.0) == 0


def test_in_an_outage_one_item_at_a_time_is_tried() -> None:
    outage = Outage(RETRY, random.Random(1))
    for _ in range(REFUSALS_TO_PAUSE):
        outage.refused(100.0, None)
    wait = outage.wait(100.0)
    assert wait is not None
    assert 0.5 <= wait <= 1.0
    assert outage.wait(101.0) == 0
    outage.sent()
    assert outage.wait(101.0) is None
    outage.refused(101.0, None)
    longer = outage.wait(101.0)
    assert longer is not None
    assert 1.0 <= longer <= 2.0
    outage.sent()
    assert outage.succeeded()
    assert outage.wait(101.0) == 0


def test_the_other_side_may_ask_for_a_longer_pause() -> None:
    outage = Outage(RETRY, random.Random(1))
    for _ in range(REFUSALS_TO_PAUSE):
        outage.refused(0.0, 99.0)
    assert outage.wait(0.0) == 99.0
