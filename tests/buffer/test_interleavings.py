"""Everybody at once on one queue, among faults, in orders drawn from a seed: nothing goes wrong.

A world is described in ``queue_worlds``, what must hold in ``queue_checks``. To see one again::

    QUIVER_WORLD=<seed> pytest -n 0 tests/buffer/test_interleavings.py
"""

from __future__ import annotations

import os
from random import Random

import pytest
from queue_checks import Violation
from queue_worlds import Outcome, World, explore

FAST = 60
SLOW = int(os.environ.get("QUIVER_EXAMPLES", "5000"))


def explore_all(seeds: range | list[int]) -> list[Outcome]:
    """Each world in turn; the first that goes wrong is named, with how to see it again."""
    outcomes = []
    for seed in seeds:
        try:
            outcomes.append(explore(seed))
        except Violation as error:
            pytest.fail(
                f"world {seed} ({World(seed).script}):\n{error}\n"
                f"again: QUIVER_WORLD={seed} pytest -n 0 tests/buffer/test_interleavings.py"
            )
    return outcomes


def test_worlds() -> None:
    """The same ones each time; those of one's own choice with ``QUIVER_WORLD``."""
    if chosen := os.environ.get("QUIVER_WORLD"):
        explore_all([int(chosen)])
        return
    outcomes = explore_all(range(FAST))
    assert min(outcome.durable for outcome in outcomes) > 0
    for name in ("lives", "deleted", "manifests"):
        assert sum(getattr(outcome, name) for outcome in outcomes) > FAST, name


def test_a_world_is_the_same_each_time() -> None:
    assert [explore(seed) for seed in range(3)] == [explore(seed) for seed in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_worlds() -> None:
    """Others each time."""
    first = Random(os.environ.get("QUIVER_SEED")).getrandbits(40)
    explore_all(range(first, first + SLOW))
