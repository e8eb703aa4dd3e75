"""Every durable byte goes through here: the ``Disk`` protocol and the real one.

Nothing else in Quiver opens a file for writing (``tests/test_house_rules.py`` holds that), so a
test can put ``quiver.testing.SimulatedDisk`` in its place and cut the power at every single call.

What the operations promise, and what they do not:

=================  ==================================================================
``append``         the bytes are in the page cache, in order; a power cut may lose them
``sync``           the bytes of that file, and its length, survive a power cut
``rename``         replaces the target at once for readers; may be undone by a power cut
``unlink``         likewise
``sync_dir``       what was created, renamed or unlinked in that directory survives
``publish``        all of the above in the right order: the whole file, or nothing
=================  ==================================================================

Errors are ``OSError`` and name the file. After a failed ``sync`` the kernel may have dropped the
pages and marked them clean: the file must not be synced again and believed. Callers start a new
file instead.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import pyarrow as pa

BytesLike: TypeAlias = bytes | bytearray | memoryview | pa.Buffer

# Linux, macOS and the BSDs all take at least this many buffers in one writev.
_MAX_BUFFERS_PER_WRITE = 1024
_FILE_MODE = 0o640  # telemetry is nobody else's business
_READ_ONLY_MODE = 0o440
_F_FULLFSYNC = 51  # macOS: fsync stops at the drive's cache, this one empties it
_CHMOD_NOT_SUPPORTED = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class DiskFile(Protocol):
    """A file open for appending."""

    @property
    def path(self) -> Path:
        """Where it was opened; a later rename does not change this."""

    @property
    def size(self) -> int:
        """Its length, counting what was appended and not synced."""

    def append(self, buffers: Sequence[BytesLike]) -> int:
        """Write all buffers at the end, in order; the number of bytes written.

        On ``OSError`` a part may have been written: the caller truncates, or gives the file up.
        """

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes. Needs a sync to last."""

    def sync(self) -> None:
        """Make bytes and length durable. Not the name: that takes ``sync_dir``."""

    def close(self) -> None:
        """Close without syncing. A second call does nothing."""


class DiskLock(Protocol):
    """A file that this process holds alone."""

    def release(self) -> None:
        """Let others have it. A second call does nothing."""


class Disk(Protocol):
    """All that Quiver asks of a file system."""

    def lock(self, path: Path, owner: str) -> DiskLock:
        """Hold a file alone, until released or this process ends.

        ``BlockingIOError`` when somebody else does; its reason is what that one gave as ``owner``.
        """

    def free_space(self, path: Path) -> int:
        """Bytes that can still be written to the file system of a directory."""

    def create(self, path: Path) -> DiskFile:
        """Open an empty file, replacing what was there."""

    def open_append(self, path: Path) -> DiskFile:
        """Open an existing file at its end."""

    def rename(self, source: Path, target: Path) -> None:
        """Replace ``target`` by ``source``, both in one directory."""

    def unlink(self, path: Path) -> None:
        """Remove a file; ``FileNotFoundError`` when there is none."""

    def make_directory(self, path: Path) -> None:
        """Create a directory and its parents, durably; no error when it is there."""

    def sync_dir(self, path: Path) -> None:
        """Make creations, renames and unlinks inside ``path`` durable."""

    def make_read_only(self, path: Path) -> None:
        """Mode 0440 where the file system knows modes; otherwise nothing.

        A protection against accidents, not a promise: a power cut may undo it.
        """

    def exists(self, path: Path) -> bool:
        """Whether a file or directory has that name."""

    def size(self, path: Path) -> int:
        """The length of a file in bytes."""

    def list_directory(self, path: Path) -> list[str]:
        """The names in a directory, sorted."""

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """A copy of the bytes from ``offset``; fewer than ``length`` where the file ends."""

    def map(self, path: Path) -> pa.Buffer:
        """The bytes of a file that nobody will change or cut, without copying them."""


class RealDisk:
    """The file system of this machine: Linux, macOS with full sync, Windows as far as it goes."""

    def lock(self, path: Path, owner: str) -> DiskLock:
        return _RealLock(path, owner)

    def free_space(self, path: Path) -> int:
        return shutil.disk_usage(path).free

    def create(self, path: Path) -> DiskFile:
        return _RealFile(path, os.O_CREAT | os.O_TRUNC)

    def open_append(self, path: Path) -> DiskFile:
        return _RealFile(path, 0)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def make_directory(self, path: Path) -> None:
        missing = [level for level in (path, *path.parents) if not level.exists()]
        # The deepest level that is there may have been made by a call that was cut short. Where
        # its parent may not be opened, it was made by somebody else.
        with contextlib.suppress(PermissionError):
            self.sync_dir(missing[-1].parent.parent if missing else path.parent)
        for level in reversed(missing):
            level.mkdir(exist_ok=True)
            self.sync_dir(level.parent)
        if not path.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    def sync_dir(self, path: Path) -> None:
        if sys.platform == "win32":
            return  # directories cannot be opened there; NTFS journals the names itself
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _sync_whole(descriptor)
        except OSError as error:
            raise _named(error, path) from error
        finally:
            os.close(descriptor)

    def make_read_only(self, path: Path) -> None:
        try:
            path.chmod(_READ_ONLY_MODE if os.name == "posix" else stat.S_IREAD)
        except OSError as error:
            if error.errno not in _CHMOD_NOT_SUPPORTED:
                raise

    def exists(self, path: Path) -> bool:
        return path.exists()

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def list_directory(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> pa.Buffer:
        with path.open("rb", buffering=0) as file:
            left = max(0, os.fstat(file.fileno()).st_size - offset)
            wanted = left if length is None else min(length, left)
            target = pa.allocate_buffer(wanted)
            view = memoryview(target)
            file.seek(offset)
            done = 0
            while done < wanted and (count := file.readinto(view[done:])):
                done += count
        return target.slice(0, done)

    def map(self, path: Path) -> pa.Buffer:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return pa.py_buffer(b"")
            return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class _RealFile:
    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        flags |= os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, _FILE_MODE)
        self.size = os.fstat(self._descriptor).st_size

    def append(self, buffers: Sequence[BytesLike]) -> int:
        before = self.size
        try:
            for start in range(0, len(buffers), _MAX_BUFFERS_PER_WRITE):
                self._write_all(buffers[start : start + _MAX_BUFFERS_PER_WRITE])
        except OSError as error:
            raise _named(error, self.path) from error
        return self.size - before

    def _write_all(self, buffers: Sequence[BytesLike]) -> None:
        expected = sum(b.nbytes if isinstance(b, memoryview) else len(b) for b in buffers)
        written = self._write(buffers)
        if written == expected:  # one call is the rule; what follows is for full disks and signals
            return
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            rest = rest[self._write([rest]) :]

    def _write(self, buffers: Sequence[BytesLike]) -> int:
        if hasattr(os, "writev"):
            written = os.writev(self._descriptor, buffers)
        else:
            written = os.write(self._descriptor, b"".join(buffers))
        self.size += written
        return written

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise _named(error, self.path) from error
        self.size = size

    def sync(self) -> None:
        try:
            if hasattr(os, "fdatasync"):
                os.fdatasync(self._descriptor)
            else:
                _sync_whole(self._descriptor)
        except OSError as error:
            raise _named(error, self.path) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _RealLock:
    """An advisory lock of the operating system: it ends with the process, however that ends."""

    def __init__(self, path: Path, owner: str) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR, _FILE_MODE)
        try:
            _lock_file(self._descriptor)
        except OSError as error:
            holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise BlockingIOError(error.errno, holder or "somebody", str(path)) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, owner.encode(), 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _lock_file(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        # Behind the note, so that others can read it.
        os.lseek(descriptor, 2**20, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_whole(descriptor: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, _F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def _named(error: OSError, path: Path) -> OSError:
    """The error of a call on a descriptor, which knows no name, with the name."""
    return OSError(error.errno, error.strerror, str(path))


def publish(
    disk: Disk,
    path: Path,
    buffers: Iterable[BytesLike],
    *,
    read_only: bool = False,
    sync_every: int | None = None,
) -> int:
    """Put a whole file in place, durably, or leave the old one: the number of bytes written.

    Order: temporary name, write, mode, sync, rename, directory sync. A crash leaves at most
    ``<name>.tmp``, which nothing reads and the next call removes. When the last step fails the new
    file is there to see, and may still be gone after a power cut: only a return is a success.

    ``sync_every``: sync after so many bytes already, so that a large file does not make those who
    sync small ones wait for all of it.
    """
    temporary = path.with_name(path.name + ".tmp")
    if disk.exists(temporary):
        disk.unlink(temporary)  # left by a crash; it may be read-only, so it cannot be reopened
    file = disk.create(temporary)
    try:
        try:
            for piece in _pieces(buffers, sync_every):
                file.append([piece])
                if sync_every is not None and len(piece) == sync_every:
                    file.sync()
            if read_only:
                disk.make_read_only(temporary)
            file.sync()
        finally:
            file.close()
        disk.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    disk.sync_dir(path.parent)
    return file.size


def _pieces(buffers: Iterable[BytesLike], size: int | None) -> Iterator[BytesLike]:
    if size is None:
        yield from buffers
        return
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), size):
            yield view[start : start + size]
