"""Telling a store directory from others.

A store has ``wal/`` and ``segments/`` inside, and ``quiver.sub.<id>`` files beside them. Names are
not enough, because other databases have a ``wal/`` too: one file at least must hold what its name
says. A store that was never written to has no such file; it is known by its two directories.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from quiver.errors import FormatError
from quiver.inspection.recognise import (
    CURSOR,
    PROGRESS,
    SEGMENT,
    WAL,
    find_format,
    magics_looked_for,
    named_like,
)
from quiver.inspection.records import View

WAL_DIRECTORY: Final = "wal"
SEGMENT_DIRECTORY: Final = "segments"

_PLACES: Final = ((WAL_DIRECTORY, {WAL, CURSOR}), (SEGMENT_DIRECTORY, {SEGMENT}))
_CORE_NAME = re.compile(r"core_[0-9]+")
_SHORTER_THAN_ANY_MAGIC = 8
_MAX_SHOWN = 5


def is_store(view: View, path: Path) -> bool:
    """Whether a directory is a store."""
    names = _names(view, path)
    if not names:
        return False
    files = list(_part_files(view, path, names))
    for file in files:
        with suppress(OSError, FormatError):
            if find_format(view, file):
                return True
    has_both = {WAL_DIRECTORY, SEGMENT_DIRECTORY} <= set(names)
    return has_both and all(_is_blank(view, file) for file in files) and not _others(view, path)


def core_names(view: View, path: Path) -> list[str]:
    """The stores of a root that has one per core, by number."""
    names = [name for name in _names(view, path) or () if _CORE_NAME.fullmatch(name)]
    stores = [name for name in names if is_store(view, path / name)]
    return sorted(stores, key=lambda name: int(name.removeprefix("core_")))


def why_no_store(view: View, path: Path) -> str:
    """What was looked for in a directory, and where the store may be instead."""
    names = view.names(path) or []
    if path.absolute().name in {WAL_DIRECTORY, SEGMENT_DIRECTORY} and is_store(
        view, path.absolute().parent
    ):
        return f"a part of a store, not the store; inspect {path.absolute().parent} instead"
    below = [name for name in names if is_store(view, path / name) or core_names(view, path / name)]
    if below:
        return (
            f"no store, but there is one inside; inspect {_shown([str(path / n) for n in below])}"
        )
    found = f"it has {_shown(names)}" if names else "it is empty"
    return (
        f"not a store: {found}; looked for {WAL_DIRECTORY}/, {SEGMENT_DIRECTORY}/ and "
        f"quiver.sub.<id>, in files with {magics_looked_for()}"
    )


def _part_files(view: View, path: Path, names: list[str]) -> Iterator[Path]:
    """The files that lie where the store puts them, under a name that it gives."""
    yield from (path / name for name in names if named_like(name) is PROGRESS)
    for directory, formats in _PLACES:
        for name in _names(view, path / directory) or ():
            if named_like(name) in formats:
                yield path / directory / name


def _others(view: View, path: Path) -> bool:
    """Whether somebody else's files lie in the two directories."""
    directories = (path / WAL_DIRECTORY, path / SEGMENT_DIRECTORY)
    inside = [name for directory in directories for name in _names(view, directory) or ()]
    return any(not name.startswith("quiver.") and not named_like(name) for name in inside)


def _is_blank(view: View, file: Path) -> bool:
    with suppress(OSError):
        return view.disk.size(file) < _SHORTER_THAN_ANY_MAGIC
    return False


def _names(view: View, path: Path) -> list[str] | None:
    """The names in a directory, as far as they may be seen."""
    with suppress(PermissionError):
        return view.names(path)
    return None


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more
