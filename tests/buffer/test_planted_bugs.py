"""Does the exploration find bugs? Each one that is planted must show within a few worlds."""

from __future__ import annotations

from itertools import count

import pytest
from queue_bugs import BUGS
from queue_checks import Violation
from queue_worlds import explore

WORLDS = 300
"""How many worlds a bug may hide in. Most show in the first ten."""


@pytest.mark.parametrize("name", BUGS)
def test_it_is_found(name: str) -> None:
    for seed in count():
        assert seed < WORLDS, f"nobody noticed in {WORLDS} worlds that {name}"
        try:
            with BUGS[name]():
                explore(seed)
        except Violation:
            return


def test_there_are_enough() -> None:
    assert len(BUGS) >= 20
