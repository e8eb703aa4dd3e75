"""Looking into files and directories of Quiver: what is there, and what is damaged.

Nothing here writes or prints. What a path is, is told by its bytes, never by its name alone. All
bytes are untrusted: sums are checked, batches are validated in full, memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from quiver.disk import Disk
from quiver.errors import FormatError
from quiver.inspection.directory import core_names, is_store, why_no_store
from quiver.inspection.progress import ProgressDescription, describe_progress
from quiver.inspection.recognise import CURSOR, PROGRESS, SEGMENT, WAL, Format, recognise
from quiver.inspection.records import Description, FileDescription, Problem, View, stat_mode
from quiver.inspection.segment import SegmentDescription, describe_segment
from quiver.inspection.store import RootDescription, StoreDescription, describe_store
from quiver.inspection.wal import (
    CursorDescription,
    WalDescription,
    describe_cursor,
    describe_wal,
)

__all__ = [
    "CursorDescription",
    "Description",
    "FileDescription",
    "Problem",
    "ProgressDescription",
    "RootDescription",
    "SegmentDescription",
    "StoreDescription",
    "WalDescription",
    "inspect_path",
]

_DESCRIBE: Final[Mapping[Format, Callable[[View, Path], Description]]] = MappingProxyType(
    {
        WAL: describe_wal,
        CURSOR: describe_cursor,
        PROGRESS: describe_progress,
        SEGMENT: describe_segment,
    }
)


def inspect_path(
    disk: Disk,
    path: Path,
    *,
    limit: int | None = None,
    mode_of: Callable[[Path], int | None] = stat_mode,
) -> Description:
    """Describe a file or a store directory.

    ``limit`` cuts every list but those of damage; counts stay exact. ``mode_of`` gives type and
    permissions of a file, which a ``Disk`` does not know; None when nobody does.

    Raises ``FormatError`` when it is neither, with what was looked for.
    """
    view = View(disk=disk, limit=limit, mode_of=mode_of)
    if view.names(path) is None:
        return _DESCRIBE[recognise(view, path)](view, path)
    return _describe_directory(view, path)


def _describe_directory(view: View, path: Path) -> Description:
    cores = core_names(view, path)
    own = is_store(view, path)
    if not cores and not own:
        raise FormatError(str(path), 0, why_no_store(view, path))
    if not cores:
        return describe_store(view, path)
    stores = [describe_store(view, path, ignore=cores)] if own else []
    stores += [describe_store(view, path / name) for name in cores]
    return RootDescription(path=str(path), mode=view.mode(path), stores=tuple(stores))
