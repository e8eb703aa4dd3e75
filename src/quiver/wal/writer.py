"""Appending to the log: positions, rotation, the cursor, and the limits that bound it all.

The writer knows nothing of waiting callers; whoever groups them gives it all entries of a group at
once, which makes one ``writev``, and then asks for one sync. Appending, syncing and starting over
belong to one thread; ``advance_cursor`` may be called from another one meanwhile.

Rotation is decided before an append: when the active file has reached ``rotation_target`` the next
append starts a new one. A group never straddles two files. When a rotated file would be one too
many, or the bytes more than ``max_size``, nothing is written and ``WalAtCapacity`` says so.

After a write or sync that failed, the file is not touched again (see ``quiver.disk``): every later
append raises ``WalPoisoned`` until ``start_over`` has begun a new file, or the log is opened anew.
Numbers and positions of the entries that failed are not given out again, because a part of them may
be on disk all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from quiver.config import WalConfig
from quiver.disk import BytesLike, Disk, DiskFile
from quiver.errors import WalAtCapacity, WalError, WalPoisoned
from quiver.wal.cursor import store_cursor
from quiver.wal.entry import PreparedEntry
from quiver.wal.files import (
    ACTIVE_NAME,
    WalFile,
    find_files,
    next_rotation,
    retire_file,
    rotated_path,
    start_file,
)
from quiver.wal.header import HEADER_SIZE
from quiver.wal.recovery import OnEntry, Recovery, recover


class Appended(NamedTuple):
    """Where an entry was put. Durable only after the next sync."""

    sequence: int
    position: int
    end_position: int


class _Rotated(NamedTuple):
    path: Path
    end: int
    size: int


class WalWriter:
    """The one writer of a log directory. Made by ``WalWriter.open``."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        config: WalConfig,
        files: list[WalFile],
        recovery: Recovery,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._config = config
        self._poison: str | None = None
        self._is_closed = False
        self._is_retired = False
        self._half_retired: Path | None = None
        *rotated, active = files
        self._rotated = deque(_Rotated(file.path, file.end, file.size) for file in rotated)
        self._rotated_size = sum(file.size for file in rotated)
        self._next_rotation = next_rotation(files)
        self._file: DiskFile = disk.open_append(active.path)
        self._header_size = active.header.header_size
        self._start = active.start
        self._next_sequence = recovery.next_sequence
        self._cursor = recovery.cursor
        self.synced_position = self.end_position
        self.recovery = recovery

    @classmethod
    def open(
        cls,
        disk: Disk,
        directory: Path,
        config: WalConfig | None = None,
        *,
        next_sequence: int = 0,
        on_entry: OnEntry | None = None,
    ) -> WalWriter:
        """Recover the log in ``directory`` and get ready to append.

        ``on_entry`` is given every entry behind the cursor, oldest first. ``next_sequence`` is the
        lowest number that may be given out, for callers that know of entries deleted long ago.
        """
        config = config or WalConfig()
        recovery = recover(disk, directory, config, on_entry)
        recovery.next_sequence = max(recovery.next_sequence, next_sequence)
        return cls(disk, directory, config, find_files(disk, directory), recovery)

    @property
    def end_position(self) -> int:
        """The position that the next entry will have."""
        return self._start + self._file.size - self._header_size

    @property
    def cursor(self) -> int:
        """The position before which nothing is needed any more."""
        return self._cursor

    @property
    def next_sequence(self) -> int:
        """The number that the next entry will have."""
        return self._next_sequence

    @property
    def size(self) -> int:
        """Bytes of all files on disk."""
        return self._file.size + self._rotated_size

    @property
    def rotated_files(self) -> int:
        """How many files stand beside the active one."""
        return len(self._rotated)

    def append(self, entries: Sequence[PreparedEntry]) -> list[Appended]:
        """Write a group of entries with one call to the disk; sync separately."""
        self._refuse_if_poisoned()
        size = sum(entry.size for entry in entries)
        rotate = self._file.size - self._header_size >= self._config.rotation_target
        self._preflight(size, rotate=rotate)
        if rotate:
            self._rotate()
        position = self.end_position
        buffers: list[BytesLike] = []
        appended = []
        for sequence, entry in enumerate(entries, self._next_sequence):
            buffers += entry.seal(sequence)
            appended.append(Appended(sequence, position, position + entry.size))
            position += entry.size
        self._next_sequence += len(entries)
        try:
            self._file.append(buffers)
        except OSError as error:
            self._poisoned("append to", error)
        return appended

    def reserve_sequences(self, count: int) -> int:
        """Give out numbers for bundles that do not go through the log; the first of them."""
        first = self._next_sequence
        self._next_sequence += count
        return first

    def start_over(self) -> None:
        """Leave a file that cannot be trusted as it is, and go on in a new one behind it."""
        if self._is_closed:
            self._refuse_if_poisoned()
        end, size = self.end_position, self._file.size
        self._file.close()
        if not self._is_retired:
            self._retire(end, size)
        self._begin(end)
        self._poison = None

    def sync(self) -> int:
        """Make everything appended so far durable; the position up to which it is."""
        self._refuse_if_poisoned()
        end = self.end_position
        if end != self.synced_position:
            try:
                self._file.sync()
            except OSError as error:
                self._poisoned("sync", error)
            self.synced_position = end
        return end

    def advance_cursor(self, position: int) -> list[Path]:
        """Say that everything before ``position`` is safe elsewhere; the files deleted for it."""
        if self._is_closed:
            self._refuse_if_poisoned()
        if not self._cursor <= position <= self.end_position:
            raise WalError(
                f"{self._directory}: the cursor is at {self._cursor} and the log ends at "
                f"{self.end_position}: it cannot move to {position}"
            )
        if position > self._cursor:
            store_cursor(self._disk, self._directory, position)
            self._cursor = position
        return self._purge()

    def retire_consumed(self) -> list[Path]:
        """Start a new file if the cursor is at the end, and delete all before it.

        Only for callers that remember the next sequence number elsewhere.
        """
        self._refuse_if_poisoned()
        if self._cursor != self.end_position or self._file.size <= self._header_size:
            return []
        self._rotate()
        return self._purge(keep_newest=False)

    def close(self) -> None:
        """Sync what is left and close. A second call does nothing."""
        try:
            if self._poison is None:
                self.sync()
        finally:
            self._file.close()
            self._is_closed = True
            self._poison = self._poison or "the log was closed"

    def _preflight(self, size: int, *, rotate: bool) -> None:
        if rotate and len(self._rotated) >= self._config.max_rotated_files:
            raise WalAtCapacity(
                f"{self._directory}: {len(self._rotated)} rotated files wait for their bundles to "
                f"be finalised and wal.max_rotated_files is {self._config.max_rotated_files}"
            )
        total = self.size + size + (HEADER_SIZE if rotate else 0)
        if total > self._config.max_size:
            raise WalAtCapacity(
                f"{self._directory}: the log would grow to {total} bytes and wal.max_size is "
                f"{self._config.max_size}"
            )

    def _rotate(self) -> None:
        self.sync()
        end, size = self.end_position, self._file.size
        self._file.close()
        try:
            self._retire(end, size)
            self._begin(end)
        except OSError as error:
            self._poisoned("rotate", error)

    def _retire(self, end: int, size: int) -> None:
        # Each attempt takes a new name: after a sync of the directory that failed, the name of
        # the attempt before may be gone with the next power cut, whatever is synced later.
        self._next_rotation += 1
        source = self._directory / ACTIVE_NAME
        if self._half_retired is not None and self._disk.exists(self._half_retired):
            source = self._half_retired
        self._half_retired = rotated_path(self._directory, self._next_rotation - 1)
        retire_file(self._disk, source, self._half_retired)
        self._rotated.append(_Rotated(self._half_retired, end, size))
        self._rotated_size += size
        self._half_retired = None
        self._is_retired = True

    def _begin(self, position: int) -> None:
        """Start a file; until that is done, the one before it stands for size and position."""
        self._file = start_file(self._disk, self._directory, position)
        self._start = position
        self._header_size = HEADER_SIZE
        self._is_retired = False
        self.synced_position = position

    def _purge(self, *, keep_newest: bool = True) -> list[Path]:
        """Delete rotated files that the cursor has passed.

        The newest one stays while the active file is empty: it holds the last sequence number.
        """
        newest_ends = self._rotated[-1].end if self._rotated else 0
        is_filled = self._start == newest_ends and self._file.size > self._header_size
        keep = 1 if keep_newest and not is_filled else 0
        deleted = []
        while len(self._rotated) > keep and self._rotated[0].end <= self._cursor:
            self._disk.unlink(self._rotated[0].path)
            gone = self._rotated.popleft()
            self._rotated_size -= gone.size
            deleted.append(gone.path)
        if deleted:
            self._disk.sync_dir(self._directory)
        return deleted

    def _refuse_if_poisoned(self) -> None:
        if self._poison is not None:
            raise WalPoisoned(f"{self._directory / ACTIVE_NAME}: {self._poison}; open it again")

    def _poisoned(self, action: str, error: OSError) -> NoReturn:
        self._poison = f"could not {action} it ({error.strerror or error})"
        raise WalPoisoned(
            f"{self._directory / ACTIVE_NAME}: {self._poison}; what was appended since position "
            f"{self.synced_position} is not safe; open it again"
        ) from error
