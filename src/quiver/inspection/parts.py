"""Looking at one part of a store after the other, whatever happens at each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quiver.errors import FormatError, QuiverError
from quiver.inspection.recognise import TEMPORARY_SUFFIX, find_format
from quiver.inspection.records import Listing, Problems, Record, View


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownFile(Record):
    """A name that no store gives. ``looks_like`` is what its content says."""

    name: str
    looks_like: str | None


class Parts:
    """What the parts of one store have in common: where they lie, and what is wrong."""

    def __init__(self, view: View, root: Path) -> None:
        self.view = view
        self.root = root
        self.problems = Problems()
        self.leftovers = Listing[str](view.limit)
        self.unknown = Listing[UnknownFile](view.limit)

    def name_of(self, path: Path) -> str:
        """The path below the store."""
        return path.relative_to(self.root).as_posix()

    def names(self, directory: Path) -> list[str]:
        """The names in a directory; none when it is not there or may not be read."""
        names: list[str] = []
        with self.noting(directory):
            names += self.view.names(directory) or []
        return names

    @contextmanager
    def noting(self, path: Path) -> Iterator[None]:
        """Turn what goes wrong inside into a problem of ``path``."""
        try:
            yield
        except FileNotFoundError as error:
            if path.name in (self.view.names(path.parent) or ()):
                self.problems.note(self.name_of(path), error)  # a link that leads nowhere
        except (QuiverError, OSError) as error:
            self.problems.note(self.name_of(path), error)

    def set_aside(self, path: Path) -> None:
        """Note a file that is no part of the store."""
        name = self.name_of(path)
        if name.endswith(TEMPORARY_SUFFIX):
            self.leftovers.add(name)
            return
        looks_like = None
        try:
            if self.view.names(path) is None:
                found = find_format(self.view, path)
                looks_like = found.title if found else None
            else:
                name += "/"
        except (OSError, FormatError):
            pass  # whatever it is, it is not ours
        self.unknown.add(UnknownFile(name=name, looks_like=looks_like))
