"""Which of the states after a power cut to look at, when there are too many to look at all.

Every unsettled part (a file or a directory) has a number of pieces, and a choice says for each part
which of them survive. ``n`` pieces make ``2**n`` choices: all of them where that is few, otherwise
the corners, where mistakes in ordering show, and random ones between.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from quiver.testing.medium import Choice


def count_choices(pieces: Sequence[int]) -> int:
    """How many choices there are, for parts with that many pieces each."""
    return 1 << sum(pieces)


def choices(pieces: Sequence[int], *, limit: int, seed: int | str) -> Iterator[Choice]:
    """All choices, if there are at most ``limit``; otherwise an endless stream of telling ones."""
    if count_choices(pieces) <= limit:
        yield from itertools.product(*(range(1 << count) for count in pieces))
        return
    generator = random.Random(seed)  # noqa: S311 - it must be repeatable, not secret
    yield _nothing(pieces)
    yield _everything(pieces)
    yield from _corners(pieces, limit // 2, generator)
    while True:
        yield tuple(_random_mask(count, generator) for count in pieces)


def _nothing(pieces: Sequence[int]) -> Choice:
    return (0,) * len(pieces)


def _everything(pieces: Sequence[int]) -> Choice:
    return tuple((1 << count) - 1 for count in pieces)


def _corners(pieces: Sequence[int], limit: int, generator: random.Random) -> Iterator[Choice]:
    """One piece alone or missing, one part cut short. Drawn by lot where they exceed ``limit``."""
    positions = [(part, piece) for part, count in enumerate(pieces) for piece in range(count)]
    kinds = (_alone, _missing, _prefix_alone, _prefix_with_the_rest)
    corners = [(kind, part, piece) for kind in kinds for part, piece in positions]
    if len(corners) > limit:
        corners = generator.sample(corners, limit)
    for kind, part, piece in corners:
        yield kind(pieces, part, piece)


def _alone(pieces: Sequence[int], part: int, piece: int) -> Choice:
    return _replace(_nothing(pieces), part, 1 << piece)


def _missing(pieces: Sequence[int], part: int, piece: int) -> Choice:
    everything = _everything(pieces)
    return _replace(everything, part, everything[part] ^ (1 << piece))


def _prefix_alone(pieces: Sequence[int], part: int, piece: int) -> Choice:
    return _replace(_nothing(pieces), part, (2 << piece) - 1)


def _prefix_with_the_rest(pieces: Sequence[int], part: int, piece: int) -> Choice:
    return _replace(_everything(pieces), part, (1 << piece) - 1)


def _replace(choice: Choice, part: int, mask: int) -> Choice:
    return (*choice[:part], mask, *choice[part + 1 :])


def _random_mask(count: int, generator: random.Random) -> int:
    """Some pieces: about half, few, most, the oldest, all or none.

    Even odds for each piece alone would leave about half of a long write every time.
    """
    everything = (1 << count) - 1
    some, others = generator.getrandbits(count), generator.getrandbits(count)
    oldest = everything >> generator.randrange(count)
    return generator.choice((some, some & others, some | others, oldest, everything, 0))
