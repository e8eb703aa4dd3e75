"""One table of the lake: what it holds, how far its sources have come, and how that changes.

A commit changes both at once: the files, and the position of each source that they came from. The
position is an app transaction of Delta, ``quiver/store/<id>`` or ``quiver/queue/<id>``: the number
of the next segment or batch to land.

Why no row is doubled or lost, with any number of writers:

- A commit is checked and made on the same state of the table. delta-rs refuses it when another one
  with the same app id, or one that removed the same file, or one that changed the columns, came in
  between. Then everything is read again, checked again and tried again.
- An append says which positions its work was planned from. When the table stands elsewhere, its
  rows are there already (``AlreadyThere``), or some of them are (``LakeConflict``: plan again).
- A replacement says which files it read. When one of them is gone, somebody else has rewritten or
  deleted its rows: ``LakeConflict``, plan again. delta-rs 1.6 does not see this when the other one
  changed no data, as compaction does; so a replacement is only ever made on the newest version, and
  checked again whenever somebody else was faster.
- Every commit carries a token. After an error nobody knows whether the commit happened; the token
  in the log tells.

delta-rs does not sync what it writes. In a directory, ``settle`` does it after each commit, for all
parts of the log that are new: before it, a source must not be told that its data is safe.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)
from deltalake.transaction import AddAction, RemoveAction

from quiver.bundle import Signal
from quiver.config import PromotedAttribute
from quiver.errors import InvalidConfig, LakeConflict, LakeError, LakeUnavailable
from quiver.lake.active import ActiveFile, active_files
from quiver.lake.files import NewFile
from quiver.lake.layout import APP_PREFIX, PARTITIONS, TABLES, table_schema
from quiver.lake.places import Options, Place, open_place
from quiver.lake.sources import LOG, KnownSources, version_of_entry

COMMIT_KEY: Final = "quiver.commit"
INFO_PREFIX: Final = "quiver."
GIVE_UP_AFTER: Final = 120.0
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 2.0
_HOPELESS: Final = (DeltaProtocolError, SchemaMismatchError, TableNotFoundError)
_PROPERTIES: Final[Mapping[str, str]] = {
    # By default only the first 32 columns have statistics; the promoted ones come later.
    "delta.dataSkippingNumIndexedCols": "-1",
    "delta.checkpointInterval": "20",
}
_LAST_CHECKPOINT: Final = f"{LOG}/_last_checkpoint"
_MAX_REASON: Final = 300

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Committed:
    """The commit was made: this version of the table has it."""

    version: int


@dataclass(frozen=True, slots=True)
class AlreadyThere:
    """Nothing was changed: this version of the table has the rows, from an earlier attempt."""

    version: int


class LakeTable:
    """A table, as of the last look at it. Not for several threads at once."""

    def __init__(
        self,
        place: Place,
        signal: Signal,
        table: DeltaTable,
        *,
        give_up_after: float = GIVE_UP_AFTER,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.place: Final = place
        self.signal: Final = signal
        self.give_up_after = give_up_after
        self._table = table
        self._sleep = sleep
        self._random = random.Random()  # noqa: S311 - pauses, not secrets
        self._sources = KnownSources(place)
        self._settled = -1

    @classmethod
    def open(
        cls,
        root: str | Path | Place,
        signal: Signal,
        *,
        promoted: Sequence[PromotedAttribute] = (),
        storage_options: Options | None = None,
        create: bool = True,
    ) -> LakeTable:
        """The table of a signal in the lake at ``root``; made, and given new columns, if needed.

        Raises:
            LakeError: There is none, and ``create`` is false.
            InvalidConfig: A promoted column has another type in the table.
        """
        lake = open_place(root, storage_options) if isinstance(root, str | Path) else root
        place = lake.below(TABLES[signal])
        if not DeltaTable.is_deltatable(place.location, place.storage_options):
            if not create:
                raise LakeError(f"{place.name}: there is no table; land something first")
            _create(place, signal, promoted)
        found = DeltaTable(place.location, storage_options=place.storage_options)
        table = cls(place, signal, found)
        if promoted:
            table.add_columns(table_schema(signal, promoted))
        return table

    # --- Looking ------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that was last looked at."""
        return self._table.version()

    @property
    def schema(self) -> pa.Schema:
        """Its columns, with the partitions."""
        return pa.schema(cast("Any", self._table.schema()))

    @property
    def delta(self) -> DeltaTable:
        """For engines: the table of deltalake, at this version."""
        return self._table

    def refresh(self) -> int:
        """Look again: the newest version."""
        self._table.update_incremental()
        return self.version

    def at_version(self, version: int) -> LakeTable:
        """The table as it was, on its own."""
        options = self.place.storage_options
        old = DeltaTable(self.place.location, version=version, storage_options=options)
        return LakeTable(self.place, self.signal, old)

    def position(self, app_id: str) -> int | None:
        """How far one source has come; None: nothing of it was landed."""
        return self._table.transaction_version(app_id)

    def positions(self, prefix: str = APP_PREFIX) -> dict[str, int]:
        """How far each source has come, by app id.

        They say what the table holds, not that it is durable: ``settle`` first, then tell a source.
        """
        known = self._sources.up_to(self.version)
        found = {app: self.position(app) for app in sorted(known) if app.startswith(prefix)}
        return {app: position for app, position in found.items() if position is not None}

    def files(
        self,
        *,
        first: dt.date | None = None,
        last: dt.date | None = None,
        columns: Collection[str] = (),
    ) -> list[ActiveFile]:
        """The files of the days from ``first`` to ``last``, with statistics of some columns."""
        return active_files(self._actions(), first, last, columns)

    def paths(self) -> set[str]:
        """The paths of all files, relative to the table."""
        return set(cast("list[str]", self._actions().column("path").to_pylist()))

    def history(self, limit: int | None = None) -> list[dict[str, Any]]:
        """What the commits say about themselves, newest first."""
        return self._table.history(limit)

    # --- Changing -----------------------------------------------------------------------------

    def append(
        self,
        files: Sequence[NewFile],
        positions: Mapping[str, int],
        *,
        expected: Mapping[str, int | None] | None = None,
        info: Mapping[str, str] | None = None,
    ) -> Committed | AlreadyThere:
        """Add files, and move the sources that they came from to their new positions.

        Args:
            files: What was written; none is fine, when there was nothing for this signal.
            positions: Where the sources stand after this, by app id.
            expected: Where they stood when the work was planned. By default, where they stand in
                this object now: then nobody may have called ``refresh`` since.
            info: For people who look at the history.

        Raises:
            LakeConflict: A source stands neither where it was expected nor behind this work.
            LakeUnavailable: It did not work for too long.
        """
        before = {
            app: self.position(app) if expected is None else expected.get(app) for app in positions
        }

        def check() -> AlreadyThere | None:
            return self._check_append(files, positions, before)

        transactions = [Transaction(app, position) for app, position in positions.items()]
        adds = [_add(file, data_change=True) for file in files]
        return self._commit(adds, transactions, info, check)

    def replace(
        self,
        removed: Sequence[ActiveFile],
        added: Sequence[NewFile],
        *,
        data_change: bool,
        info: Mapping[str, str] | None = None,
    ) -> Committed:
        """Put files in the place of others, at once.

        Args:
            removed: The files that were read, whose rows are in ``added`` or are to be gone.
            added: What was written instead; none, to delete.
            data_change: Whether the table has other rows afterwards. Compaction changes none.
            info: For people who look at the history.

        Raises:
            LakeConflict: One of the files is not there any more. Nothing was changed.
            LakeUnavailable: It did not work for too long.
        """
        names = {file.path for file in removed}

        def check() -> None:
            if gone := names - self.paths():
                raise LakeConflict(
                    f"{self.place.name}: {len(gone)} of {len(names)} files were replaced by "
                    f"somebody else, {min(gone)} for one: plan again"
                )

        now = time.time_ns() // 1_000_000
        removes = [
            RemoveAction(file.path, data_change, now, file.size, file.partition.values)
            for file in removed
        ]
        adds = [_add(file, data_change=data_change) for file in added]
        changes: list[AddAction | RemoveAction] = [*adds, *removes]
        return cast("Committed", self._commit(changes, [], info, check, only_on_newest=True))

    def add_columns(self, wanted: pa.Schema) -> list[str]:
        """Give the table the columns that it has not; their names. Old files have nulls there."""

        def attempt() -> list[str]:
            self.refresh()
            missing = _missing(self.schema, wanted, self.place.name)
            if missing:
                fields = Schema.from_arrow(pa.schema(missing)).fields
                self._table.alter.add_columns(fields)
                self.refresh()
                self.settle()
            return [field.name for field in missing]

        return self._retrying("columns", attempt)

    def vacuum(self, older_than: dt.timedelta, *, dry_run: bool = False) -> list[str]:
        """Delete files that do not belong to the table any more, or never did: their paths.

        Those that were removed, or written, less than ``older_than`` ago stay: queries may read
        them, and a task may be about to hand them in.
        """
        hours = -(-older_than // dt.timedelta(hours=1))
        self.refresh()
        return self._table.vacuum(
            retention_hours=hours, dry_run=dry_run, enforce_retention_duration=False, full=True
        )

    def settle(self) -> None:
        """Make the log durable up to this version."""
        version, after = self.version, self._settled

        def is_new(path: str) -> bool:
            number = version_of_entry(path)
            return path == _LAST_CHECKPOINT or (number is not None and number > after)

        self.place.settle(LOG, is_new)
        self._settled = version

    # --- Committing ---------------------------------------------------------------------------

    def _check_append(
        self,
        files: Sequence[NewFile],
        positions: Mapping[str, int],
        before: Mapping[str, int | None],
    ) -> AlreadyThere | None:
        now = {app: self.position(app) for app in positions}
        landed = [app for app, at in now.items() if at is not None and at >= positions[app]]
        if positions and len(landed) == len(positions):
            return AlreadyThere(self.version)
        if not positions and files and {file.path for file in files} <= self.paths():
            return AlreadyThere(self.version)
        moved = next((app for app in positions if now[app] != before[app]), None)
        if moved is not None:
            raise LakeConflict(
                f"{self.place.name}: {moved} stands at {now[moved]}, and this work was planned "
                f"from {before[moved]}: plan again"
            )
        if landed:
            raise LakeConflict(
                f"{self.place.name}: {landed[0]} stands at {positions[landed[0]]} or behind it "
                "already, other sources of the same work do not: plan again, without it"
            )
        return None

    def _commit(
        self,
        actions: Sequence[AddAction | RemoveAction],
        transactions: list[Transaction],
        info: Mapping[str, str] | None,
        check: Callable[[], AlreadyThere | None],
        *,
        only_on_newest: bool = False,
    ) -> Committed | AlreadyThere:
        token = uuid.uuid4().hex
        said: dict[str, Any] = {INFO_PREFIX + key: text for key, text in (info or {}).items()}
        properties = CommitProperties(
            custom_metadata={**said, COMMIT_KEY: token},
            app_transactions=transactions,
            max_commit_retries=0 if only_on_newest else None,
        )
        first = self.version

        def attempt() -> Committed | AlreadyThere:
            self.refresh()
            made = self._find(token, first)  # by an attempt that did not live to see it
            if made is None:
                there = check()
                if there is not None:
                    self.settle()
                    return there
                self._table.create_write_transaction(
                    list(actions),
                    "append",
                    self._table.schema(),
                    partition_by=list(PARTITIONS),
                    commit_properties=properties,
                )
                self.refresh()
                made = self._find(token, first)
            if made is None:
                raise LakeError(f"{self.place.name}: the log has not the commit that was made")
            self.settle()
            return Committed(made)

        return self._retrying("a commit", attempt)

    def _find(self, token: str, after: int) -> int | None:
        """The version that a commit made, if it did."""
        if self.version == after:
            return None
        for entry in self._table.history(self.version - after):
            if entry.get(COMMIT_KEY) == token:
                return int(entry["version"])
        return None

    def _retrying(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Again until it works, or has not worked for too long."""
        deadline = time.monotonic() + self.give_up_after
        pause = _FIRST_PAUSE
        while True:
            try:
                return attempt()
            except _HOPELESS:
                raise
            except (DeltaError, OSError) as error:
                if time.monotonic() > deadline:
                    raise LakeUnavailable(
                        f"{self.place.name}: {what} did not work for {self.give_up_after:g} s; "
                        f"the last attempt said: {_first_line(error)}"
                    ) from error
            self._sleep(self._random.uniform(0, pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    # --- The list of files --------------------------------------------------------------------

    def _actions(self) -> pa.Table:
        return pa.table(cast("Any", self._table.get_add_actions()))


# --- Making a table -----------------------------------------------------------------------------


def _create(place: Place, signal: Signal, promoted: Sequence[PromotedAttribute]) -> None:
    place.prepare(LOG)
    # Somebody else may make it at the same time: then theirs is the table.
    with contextlib.suppress(CommitFailedError):
        DeltaTable.create(
            place.location,
            table_schema(signal, promoted),
            mode="ignore",
            partition_by=list(PARTITIONS),
            name=TABLES[signal],
            configuration=_PROPERTIES,
            storage_options=place.storage_options,
        )


def _missing(there: pa.Schema, wanted: pa.Schema, name: str) -> list[pa.Field[Any]]:
    known = {field.name: field.type for field in there}
    folded = {field.name.lower(): field.name for field in there}
    for field in wanted:
        if field.name in known and known[field.name] != field.type:
            raise InvalidConfig(
                f"{name}: the column {field.name!r} is {known[field.name]} and cannot become "
                f"{field.type}; promote the attribute under another name"
            )
        if field.name not in known and field.name.lower() in folded:
            raise InvalidConfig(
                f"{name}: there is a column {folded[field.name.lower()]!r}, which most engines do "
                f"not tell from {field.name!r}; promote the attribute under another name"
            )
    return [field for field in wanted if field.name not in known]


def _add(file: NewFile, *, data_change: bool) -> AddAction:
    now = time.time_ns() // 1_000_000
    return AddAction(file.path, file.size, file.partition.values, now, data_change, file.stats)


def _first_line(error: Exception) -> str:
    line = re.sub(r"\?\S+", "?...", str(error).partition("\n")[0])
    return line[:_MAX_REASON]
