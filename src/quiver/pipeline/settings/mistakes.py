"""What is wrong with a configuration file, where, and what its author may have meant.

Mistakes are collected, not raised: a file is told all of them at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_LONGEST_WORD: Final = 80


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where something stands. Lines and columns count from 1."""

    source: str
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong; a warning when the file can be used all the same."""

    place: Place
    message: str
    hint: str = ""
    warning: bool = False

    def __str__(self) -> str:
        kind = "warning: " if self.warning else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.place}: {kind}{self.message}{hint}"


class Mistakes:
    """All that was found so far. The same mistake of an alias is kept once."""

    def __init__(self) -> None:
        self._found: dict[Mistake, None] = {}

    def add(self, place: Place, message: str, hint: str = "") -> None:
        """Something that keeps the file from being used."""
        self._found[Mistake(place, message, hint)] = None

    def warn(self, place: Place, message: str, hint: str = "") -> None:
        """Something that is probably not meant so."""
        self._found[Mistake(place, message, hint, warning=True)] = None

    @property
    def serious(self) -> tuple[Mistake, ...]:
        """What must be changed, in the order of the file."""
        return self._sorted(warning=False)

    @property
    def warnings(self) -> tuple[Mistake, ...]:
        """What should be looked at, in the order of the file."""
        return self._sorted(warning=True)

    def _sorted(self, *, warning: bool) -> tuple[Mistake, ...]:
        chosen = [mistake for mistake in self._found if mistake.warning is warning]
        return tuple(sorted(chosen, key=lambda mistake: mistake.place))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    plain = word[:_LONGEST_WORD].lower().replace("-", "_")
    by_plain_form = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(plain, by_plain_form, n=1)
    return by_plain_form[close[0]] if close else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'? allowed: x, y, z``."""
    names = sorted(known)
    close = nearest(word, names)
    question = f"did you mean {close!r}? " if close else ""
    return f"{question}allowed: {', '.join(names)}" if names else "nothing is allowed here"


def quoted(text: str) -> str:
    """The text as a message shows it: not too much of it."""
    return repr(text if len(text) <= _LONGEST_WORD else f"{text[:_LONGEST_WORD]}...")
