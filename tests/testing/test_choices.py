"""Which states are looked at: all, or the telling ones first."""

from __future__ import annotations

import itertools

from quiver.testing.choices import choices, count_choices
from quiver.testing.medium import Choice

SEED = 20261115


def first(count: int, pieces: list[int], *, limit: int, seed: int = SEED) -> list[Choice]:
    return list(itertools.islice(choices(pieces, limit=limit, seed=seed), count))


def test_all_where_that_is_few() -> None:
    everything = first(1000, [2, 3], limit=32)
    assert count_choices([2, 3]) == 32
    assert everything == list(itertools.product(range(4), range(8)))


def test_nothing_to_choose_is_one_choice() -> None:
    assert first(1000, [], limit=1) == [()]


def test_one_too_many_is_a_sample_without_end() -> None:
    assert len(first(1000, [2, 3], limit=31)) == 1000


def test_nothing_and_everything_come_first() -> None:
    assert first(2, [5, 1000], limit=2) == [(0, 0), (2**5 - 1, 2**1000 - 1)]


def test_all_corners_come_before_the_random_ones() -> None:
    corners = set(first(2 + 4 * 8, [3, 5], limit=100))
    for piece in range(3):
        alone, before = 1 << piece, (1 << piece) - 1
        assert (alone, 0) in corners, "a piece alone"
        assert (0b111 ^ alone, 0b11111) in corners, "a piece missing"
        assert (before | alone, 0) in corners, "a prefix, and nothing of the other"
        assert (before, 0b11111) in corners, "a prefix, and all of the other"


def test_half_of_the_sample_is_left_to_chance() -> None:
    def corner(choice: Choice) -> bool:
        mask = choice[0]
        missing = (1 << 1000) - 1 - mask
        prefix = mask & (mask + 1) == 0
        return prefix or min(mask.bit_count(), missing.bit_count()) <= 1

    sample = first(100, [1000], limit=100)
    assert sum(map(corner, sample[:52])) == 52
    assert not all(map(corner, sample[52:]))


def test_chance_is_not_always_half_of_the_pieces() -> None:
    shares = [choice[0].bit_count() // 100 for choice in first(300, [1000], limit=100)[52:]]
    assert set(shares) >= {0, 2, 4, 7, 10}


def test_the_seed_decides() -> None:
    pieces = [40, 40]
    assert first(500, pieces, limit=200) == first(500, pieces, limit=200)
    assert first(500, pieces, limit=200) != first(500, pieces, limit=200, seed=SEED + 1)
