"""A disk in memory that can lose power: ``SimulatedDisk``.

It keeps what was written apart from what was synced, and makes every disk that a power cut may
leave. Nothing here is kinder than the contract of ``quiver.disk``, even where today's file systems
are: what happens to survive on one of them is not what Quiver may count on.

==================  =============================  ============================================
Operation           Survives a power cut when      Otherwise the disk may hold
==================  =============================  ============================================
``append``          ``sync`` of that file          any subset of its sectors, in any order; and
                                                   the new length or the old, so that the file
                                                   is short, or has zeros where data was lost
``truncate``        ``sync`` of that file          the old length, with the old bytes
``make_read_only``  ``sync`` of that file          the old mode
``create``          ``sync_dir``, for the name     no name; or a name and an empty file
``create`` of an    ``sync`` of that file: it is   the old length, with the old bytes, and what
existing file       the same file, cut to nothing  is written next on top of them
``rename``          ``sync_dir``                   the old names; it is never half done
``unlink``          ``sync_dir``                   the name and its file, as before
``make_directory``  it returns                     some of the parents, outermost first
failed ``sync``,    never, whatever syncs follow   what was durable before, while this process
``sync_dir``                                       still reads all that it wrote
==================  =============================  ============================================

Changes of one file are independent of each other, of its names, and of other files and directories:
all combinations occur. Where an earlier change is lost and a later one is kept, the later one is
applied to what is there.

Errors are those of ``RealDisk`` on Linux, for a user who is not root. Not simulated, because Quiver
does not do it: a rename between directories or of a directory, links, and other processes.
"""

from __future__ import annotations

import errno
import itertools
import posixpath
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from quiver.disk import BytesLike, DiskFile, DiskLock
from quiver.testing.calls import CallRecorder, os_error
from quiver.testing.choices import choices, count_choices
from quiver.testing.medium import Choice, Directory, Inode, Link, Medium, Move, Remove

# With more than this many attempts for each state wanted, what is left is rare or does not exist.
_ATTEMPTS_PER_STATE = 4


class SimulatedDisk(CallRecorder):
    """A ``Disk`` in memory. It starts empty, with the root directory only.

    Relative paths start at that root. ``choice`` is how this disk came out of ``crash_states``, for
    ``crash_state`` to make it again.
    """

    def __init__(
        self,
        *,
        sector_bytes: int = 512,
        capacity_bytes: int | None = None,
        medium: Medium | None = None,
        choice: Choice = (),
    ) -> None:
        super().__init__()
        self.sector_bytes = sector_bytes
        self.capacity_bytes = capacity_bytes
        self.choice = choice
        self._medium = medium or Medium()
        self._open_files: list[SimulatedFile] = []
        self._locks: dict[str, str] = {}

    # --- Disk ---------------------------------------------------------------------------------

    def lock(self, path: Path, owner: str) -> DiskLock:
        """Like a real lock it is not on the medium: after a power cut nobody holds it."""
        key = _key(path)
        self._parent(path)
        if key in self._locks:
            raise BlockingIOError(errno.EAGAIN, self._locks[key], str(path))
        self._locks[key] = owner
        return SimulatedLock(self._locks, key)

    def free_space(self, path: Path) -> int:
        self._directory(path)
        return self.room()

    def create(self, path: Path) -> DiskFile:
        directory, name = self._parent(path)
        inode = directory.live.get(name)
        if inode:
            self._writable(inode, path)
        elif self._is_directory(path):
            raise os_error(errno.EISDIR, path)
        with self.call("create", path):
            if inode:
                inode.truncate(0)
            else:
                inode = self._medium.new_inode()
                directory.change(Link(name, inode))
        return self._opened(path, inode)

    def open_append(self, path: Path) -> DiskFile:
        inode = self._file(path)
        self._writable(inode, path)
        return self._opened(path, inode)

    def rename(self, source: Path, target: Path) -> None:
        directory, name = self._parent(source, target=target)
        if posixpath.dirname(_key(target)) != posixpath.dirname(_key(source)):
            raise NotImplementedError(f"rename between directories: {source} to {target}")
        if self._is_directory(source):
            raise NotImplementedError(f"rename of a directory: {source}")
        if name not in directory.live:
            raise os_error(errno.ENOENT, source, target)
        if self._is_directory(target):
            raise os_error(errno.EISDIR, source, target)
        inode = directory.live[name]
        with self.call("rename", source, f"to {target}", target=target):
            if directory.live.get(target.name) is not inode:  # otherwise POSIX does nothing
                directory.change(Move(name, target.name, inode))

    def unlink(self, path: Path) -> None:
        self._file(path)
        directory, name = self._parent(path)
        with self.call("unlink", path):
            directory.change(Remove(name))

    def make_directory(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not self._is_directory(p)]
        for level in missing:
            if self.exists(level):
                raise os_error(errno.EEXIST if level == path else errno.ENOTDIR, path)
        if not missing:
            with self.call("make_directory", path):
                return
        for level in reversed(missing):
            with self.call("make_directory", level):
                directory, name = self._parent(level)
                directory.subdirectories.add(name)
                self._medium.directories[_key(level)] = Directory({}, ())

    def sync_dir(self, path: Path) -> None:
        directory = self._directory(path)
        with self.call(
            "sync_dir", path, on_fault=lambda partial: directory.settle((1 << partial) - 1)
        ):
            directory.settle()

    def make_read_only(self, path: Path) -> None:
        inode = self._file(path)
        with self.call("make_read_only", path):
            inode.make_read_only()

    def exists(self, path: Path) -> bool:
        if self._is_directory(path):
            return True
        where, name = posixpath.split(_key(path))
        directory = self._medium.directories.get(where)
        return directory is not None and name in directory.live

    def size(self, path: Path) -> int:
        return self._file(path).size

    def list_directory(self, path: Path) -> list[str]:
        directory = self._directory(path)
        return sorted([*directory.live, *directory.subdirectories])

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> pa.Buffer:
        inode = self._file(path)
        if offset < 0:
            raise os_error(errno.EINVAL)
        stop = None if length is None else offset + length
        return pa.py_buffer(inode.read(offset, stop))

    def map(self, path: Path) -> pa.Buffer:
        return pa.py_buffer(self._file(path).read())

    # --- What a test asks ---------------------------------------------------------------------

    def is_read_only(self, path: Path) -> bool:
        """Whether the file has mode 0440."""
        return self._file(path).read_only

    def room(self) -> int:
        """How many more bytes fit. A file takes room until its last name and handle are gone."""
        if self.capacity_bytes is None:
            return sys.maxsize
        inodes = {file.inode for file in self._open_files if not file.closed}
        for directory in self._medium.directories.values():
            inodes.update(directory.live.values())
        return max(0, self.capacity_bytes - sum(inode.size for inode in inodes))

    def crash_state_count(self) -> int:
        """How many choices a power cut has now. Different choices may leave equal disks."""
        return count_choices([part.pieces for part in self._medium.unsettled()])

    def crash_states(self, *, limit: int = 1000, seed: int | str = 0) -> Iterator[SimulatedDisk]:
        """The disks that a power cut may leave now, no two alike, ready to be recovered from.

        All of them, if ``crash_state_count()`` is at most ``limit``. Otherwise up to ``limit``:
        nothing survives, everything does, a single piece is missing or alone, a file or directory
        is cut short; and then a random sample. The same seed gives the same disks.
        """
        pieces = [part.pieces for part in self._medium.unsettled()]
        attempts = choices(pieces, limit=limit, seed=seed)
        seen: set[int] = set()
        for choice in itertools.islice(attempts, _ATTEMPTS_PER_STATE * limit):
            medium = self._medium.after_power_cut(choice)
            fingerprint = medium.fingerprint()
            if fingerprint not in seen:
                seen.add(fingerprint)
                yield self._rebooted(medium, choice)
                if len(seen) == limit:
                    return

    def crash_state(self, choice: Choice) -> SimulatedDisk:
        """The disk that a power cut leaves now, when just these pieces had reached it."""
        return self._rebooted(self._medium.after_power_cut(choice), choice)

    def _rebooted(self, medium: Medium, choice: Choice) -> SimulatedDisk:
        return SimulatedDisk(
            sector_bytes=self.sector_bytes,
            capacity_bytes=self.capacity_bytes,
            medium=medium,
            choice=choice,
        )

    # --- Names --------------------------------------------------------------------------------

    def _is_directory(self, path: Path) -> bool:
        return _key(path) in self._medium.directories

    def _parent(self, path: Path, *, target: Path | None = None) -> tuple[Directory, str]:
        where, name = posixpath.split(_key(path))
        directory = self._medium.directories.get(where)
        if directory is None:
            raise os_error(self._why_not_there(path), path, target)
        return directory, name

    def _file(self, path: Path) -> Inode:
        directory, name = self._parent(path)
        inode = directory.live.get(name)
        if inode is None:
            raise os_error(errno.EISDIR if self._is_directory(path) else errno.ENOENT, path)
        return inode

    def _directory(self, path: Path) -> Directory:
        directory = self._medium.directories.get(_key(path))
        if directory is None:
            raise os_error(self._why_not_there(path, or_file=True), path)
        return directory

    def _why_not_there(self, path: Path, *, or_file: bool = False) -> int:
        """A path that runs through a file is another error than one that runs into nothing."""
        levels = (path, *path.parents) if or_file else path.parents
        through_file = any(self.exists(p) and not self._is_directory(p) for p in levels)
        return errno.ENOTDIR if through_file else errno.ENOENT

    def _writable(self, inode: Inode, path: Path) -> None:
        if inode.read_only:
            raise os_error(errno.EACCES, path)

    def _opened(self, path: Path, inode: Inode) -> SimulatedFile:
        file = SimulatedFile(self, path, inode)
        self._open_files = [*(other for other in self._open_files if not other.closed), file]
        return file


class SimulatedLock:
    """A lock that this disk gave out."""

    def __init__(self, locks: dict[str, str], key: str) -> None:
        self._locks = locks
        self._key = key

    def release(self) -> None:
        self._locks.pop(self._key, None)


class SimulatedFile:
    """A handle. It stays usable when the file is renamed, replaced or unlinked."""

    def __init__(self, disk: SimulatedDisk, path: Path, inode: Inode) -> None:
        self.path = path
        self.inode = inode
        self.closed = False
        # Counted here, as the real one does: what another handle appends does not show.
        self.size = inode.size
        self._disk = disk

    def append(self, buffers: Sequence[BytesLike]) -> int:
        if not buffers:
            return 0
        self._check_open()
        data = b"".join(buffers)
        with self._disk.call(
            "append",
            self.path,
            f"{len(data)} bytes",
            on_fault=lambda partial: self._write(data[:partial]),
        ):
            room = self._disk.room()
            self._write(data[:room])
            if room < len(data):
                raise os_error(errno.ENOSPC, self.path)
        return len(data)

    def truncate(self, size: int) -> None:
        if size < 0:
            raise os_error(errno.EINVAL, self.path)
        self._check_open()
        with self._disk.call("truncate", self.path, f"to {size} bytes"):
            self.inode.truncate(size)
            self.size = size

    def sync(self) -> None:
        if self.closed:
            raise ValueError("sync of a closed file")
        with self._disk.call(
            "sync", self.path, on_fault=lambda partial: self.inode.settle((1 << partial) - 1)
        ):
            self.inode.settle()

    def close(self) -> None:
        self.closed = True

    def _write(self, data: bytes) -> None:
        self.inode.write(data, self._disk.sector_bytes)
        self.size += len(data)

    def _check_open(self) -> None:
        if self.closed:
            raise os_error(errno.EBADF, self.path)


def _key(path: Path) -> str:
    return posixpath.normpath("/" + path.as_posix().lstrip("/"))
