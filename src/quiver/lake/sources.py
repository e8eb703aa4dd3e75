"""Which sources a table knows: the app ids in the log of Delta, which delta-rs does not list.

They are in the newest checkpoint (column ``txn``) and in the entries after it. What was read once
is remembered, so that a later look reads the new entries only.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from quiver.errors import FormatError, ObjectNotFound
from quiver.lake.places import Place

LOG: Final = "_delta_log"
_ATTEMPTS: Final = 3
_MANY_ENTRIES: Final = 40  # from here on a checkpoint is read faster than the entries before it
_ENTRY: Final = re.compile(rf"{LOG}/(\d{{20}})\.(.+)")


def version_of_entry(path: str) -> int | None:
    """The version that a file of the log is about; None: it is not about one."""
    found = _ENTRY.fullmatch(path)
    return None if found is None else int(found[1])


class KnownSources:
    """All app ids that were ever seen in a table's log."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._seen: set[str] = set()
        self._read_to = -1

    def up_to(self, version: int) -> frozenset[str]:
        """The app ids of this version, and perhaps later ones."""
        for attempt in range(_ATTEMPTS):
            if version <= self._read_to:
                break
            try:
                self._read(version)
            except ObjectNotFound:
                # Cleaned away since it was listed; the next listing has a newer checkpoint.
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                self._read_to = version
        return frozenset(self._seen)

    def _read(self, version: int) -> None:
        entries: dict[int, str] = {}
        checkpoints: dict[int, list[str]] = {}
        for file in self._place.list(LOG):
            found = _ENTRY.fullmatch(file.path)
            if found is None or not self._read_to < int(found[1]) <= version:
                continue
            if found[2] == "json":
                entries[int(found[1])] = file.path
            elif found[2].startswith("checkpoint") and found[2].endswith(".parquet"):
                checkpoints.setdefault(int(found[1]), []).append(file.path)
        start = self._read_to
        gap = any(number not in entries for number in range(start + 1, version + 1))
        if gap or version - start > _MANY_ENTRIES:
            start = self._read_checkpoint(checkpoints, start)
        for number in range(start + 1, version + 1):
            self._read_entry(entries.get(number, f"{LOG}/{number:020d}.json"))

    def _read_checkpoint(self, checkpoints: dict[int, list[str]], start: int) -> int:
        """The newest checkpoint has what the entries up to it said."""
        if not checkpoints:
            return start
        newest = max(checkpoints)
        for path in checkpoints[newest]:
            data = pq.read_table(pa.BufferReader(self._place.read(path)), columns=["txn"])
            self._seen.update(
                app["appId"] for app in data.column("txn").to_pylist() if app and app["appId"]
            )
        return newest

    def _read_entry(self, path: str) -> None:
        lines = self._place.read(path).to_pybytes().splitlines()
        try:
            for line in lines:
                if b'"txn"' in line:
                    action: dict[str, Any] = json.loads(line)
                    if "txn" in action:
                        self._seen.add(str(action["txn"]["appId"]))
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(path, 0, f"this is no entry of a Delta log: {error!r}") from error
