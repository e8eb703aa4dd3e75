"""Objects in a local directory, with a compare-and-swap that holds between processes.

An object is a file with the same name, so that other tools can read it. Beside the objects there
are only:

- ``.quiver/lock-xx``: who writes an object holds one of these; readers hold none;
- ``name.tmp``: an object that is being written, or was when the power went. Nobody reads it, and
  the next write of the same object removes it.

A write goes to the temporary name, is synced, renamed and the directory synced (``publish``), all
under the lock, so a reader sees the old object or the new one, and so does a power cut.

What a reader gets, survives a power cut, too: the directory is synced before a version is handed
out that the caller did not know. Otherwise it could act on a write that is undone afterwards. Where
that sync fails, this process writes the object again before it believes it.

The version is a hash of the bytes: a write that changes nothing does not change the version, and
every read is one of the whole file. A lock of the operating system may not hold on network file
systems; use one machine's own disks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, ParamSpec, TypeVar

from blake3 import blake3

from quiver.buffer.objects import Fetched, ObjectInfo, Version
from quiver.disk import Disk, RealDisk, publish
from quiver.errors import Conflict, InvalidName, ObjectNotFound, ObjectsUnavailable

_P = ParamSpec("_P")
_T = TypeVar("_T")

_OWN: Final = ".quiver"
_TEMPORARY: Final = ".tmp"
_PART: Final = re.compile(r"[A-Za-z0-9._-]+")
_MAX_PATH: Final = 1024  # bytes: what S3 takes
_NOT_AN_OBJECT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.05


def check_path(path: str) -> None:
    """``InvalidName`` for a path that some store changes, or that leads out of its root."""
    parts = path.split("/")
    if len(path) > _MAX_PATH or not all(
        _PART.fullmatch(part) and part.strip(".") for part in parts
    ):
        raise InvalidName(
            f"{path[:100]!r} is no path of an object: it must be names of letters, digits, '.', "
            f"'_' and '-', with '/' between them, and {_MAX_PATH} characters at most"
        )


class _Busy(NamedTuple):
    """Somebody else holds the lock."""

    holder: str


class DirectoryObjects:
    """``Objects`` in a directory, which is made when something is written.

    ``lock_timeout``: how long a write waits for another one of the same object, in seconds.
    ``modified_ms``: when a file was written, as the ``Disk`` does not know that.
    """

    def __init__(
        self,
        root: Path,
        *,
        disk: Disk | None = None,
        lock_timeout: float = 10.0,
        random: random.Random | None = None,
        modified_ms: Callable[[Path], int] | None = None,
    ) -> None:
        self.name = f"file://{root}"
        self._root = root
        self._disk = disk or RealDisk()
        self._lock_timeout = lock_timeout
        self._random = random or _new_random()
        self._modified_ms = modified_ms or _modified_ms
        self._made: set[Path] = set()
        self._unsure: set[Path] = set()

    async def get(self, path: str, *, unless: Version | None = None) -> Fetched | None:
        return await self._in_thread(self._fetch, self._file(path), 0, None, unless)

    async def get_tail(
        self, path: str, length: int, *, unless: Version | None = None
    ) -> Fetched | None:
        if length < 1:
            raise ValueError(f"the last {length} bytes of an object cannot be asked for")
        return await self._in_thread(self._fetch, self._file(path), -length, None, unless)

    async def get_range(self, path: str, start: int, end: int, *, version: Version) -> Fetched:
        if not 0 <= start < end:
            raise ValueError(f"bytes {start} to {end} are no range")
        found = await self._in_thread(self._fetch, self._file(path), start, end, None)
        if found is None or found.version != version:
            raise Conflict(f"{self.name}: {path} is not the version that was read before")
        return found

    async def put(self, path: str, data: bytes) -> Version:
        return await self._alone(self._file(path), self._write, data)

    async def put_if(self, path: str, data: bytes, expected: Version | None) -> Version:
        return await self._alone(self._file(path), self._write_if, data, expected)

    async def list_children(self, prefix: str) -> Sequence[ObjectInfo]:
        return await self._in_thread(self._list, self._file(prefix), prefix)

    async def delete(self, paths: Sequence[str]) -> None:
        files = [self._file(path) for path in paths]
        for file in files:
            await self._alone(file, self._unlink)
        for directory in {file.parent: None for file in files}:
            await self._in_thread(self._sync_names, directory)

    # --- Threads and locks --------------------------------------------------------------------

    async def _in_thread(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except OSError as error:
            self._made.clear()  # perhaps somebody removed what was made
            raise ObjectsUnavailable(f"{self.name}: {error}") from error

    async def _alone(
        self, file: Path, change: Callable[..., _T], *args: bytes | Version | None
    ) -> _T:
        """Do it under the lock of the file.

        Lock, change and release are one call in one thread: a caller that stops waiting in between
        leaves no lock behind.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._lock_timeout
        pause = _FIRST_PAUSE
        while isinstance(
            result := await self._in_thread(self._try_alone, file, change, *args), _Busy
        ):
            if loop.time() >= give_up:
                raise ObjectsUnavailable(
                    f"{self.name}: {self._path(file)} is being written by {result.holder} "
                    f"for more than {self._lock_timeout} s"
                )
            await asyncio.sleep(pause * self._random.uniform(0.5, 1))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return result

    def _try_alone(
        self, file: Path, change: Callable[..., _T], *args: bytes | Version | None
    ) -> _T | _Busy:
        self._make(self._root / _OWN)
        number = blake3(self._path(file).encode()).hexdigest()[:2]
        try:
            lock = self._disk.lock(self._root / _OWN / f"lock-{number}", _whoami())
        except BlockingIOError as error:
            return _Busy(error.strerror or "somebody")
        try:
            return change(file, *args)
        finally:
            lock.release()

    # --- Under the lock -----------------------------------------------------------------------

    def _write(self, file: Path, data: bytes) -> Version:
        self._make(file.parent)
        try:
            publish(self._disk, file, [data])
        except OSError:
            self._unsure.add(file)
            raise
        self._unsure.discard(file)
        return _version(data)

    def _write_if(self, file: Path, data: bytes, expected: Version | None) -> Version:
        try:
            current = _version(self._disk.read(file).to_pybytes())
        except _NOT_AN_OBJECT:
            current = None
        if current != expected:
            raise Conflict(f"{self.name}: {self._path(file)} is not the version that was expected")
        return self._write(file, data)

    def _write_again(self, file: Path) -> None:
        if self._disk.exists(file):
            self._write(file, self._disk.read(file).to_pybytes())

    def _unlink(self, file: Path) -> None:
        try:
            self._disk.unlink(file)
        except _NOT_AN_OBJECT:
            return
        self._unsure.discard(file)

    # --- Without it ---------------------------------------------------------------------------

    def _fetch(
        self, file: Path, start: int, end: int | None, unless: Version | None
    ) -> Fetched | None:
        try:
            data = self._disk.read(file).to_pybytes()
        except _NOT_AN_OBJECT:
            raise ObjectNotFound(f"{self.name}: there is no {self._path(file)}") from None
        version = _version(data)
        if version == unless:
            return None
        self._make_sure(file)
        return Fetched(data[start:end], version, len(data))

    def _make_sure(self, file: Path) -> None:
        """What was read must not be undone by a power cut."""
        if file in self._unsure:
            if isinstance(self._try_alone(file, self._write_again), _Busy):
                raise ObjectsUnavailable(f"{self.name}: {self._path(file)} is being written")
            return
        try:
            self._disk.sync_dir(file.parent)
        except OSError:
            self._unsure.add(file)
            raise

    def _list(self, directory: Path, prefix: str) -> list[ObjectInfo]:
        try:
            names = self._disk.list_directory(directory)
        except _NOT_AN_OBJECT:
            return []
        found = []
        for name in names:
            if name.endswith(_TEMPORARY) or not _PART.fullmatch(name):
                continue
            file = directory / name
            if self._is_directory(file):
                continue
            try:
                info = ObjectInfo(
                    f"{prefix}/{name}", self._disk.size(file), self._modified_ms(file)
                )
            except FileNotFoundError:
                continue  # deleted meanwhile
            found.append(info)
        return found

    def _is_directory(self, path: Path) -> bool:
        try:
            self._disk.list_directory(path)
        except (NotADirectoryError, FileNotFoundError):
            return False
        return True

    def _sync_names(self, directory: Path) -> None:
        with contextlib.suppress(*_NOT_AN_OBJECT):
            self._disk.sync_dir(directory)

    def _make(self, directory: Path) -> None:
        if directory not in self._made:
            self._disk.make_directory(directory)
            self._made.add(directory)

    def _file(self, path: str) -> Path:
        check_path(path)
        parts = path.split("/")
        if parts[0] == _OWN or any(part.endswith(_TEMPORARY) for part in parts):
            raise InvalidName(
                f"{path!r} is no path of an object in a directory: {_OWN!r} and names that end in "
                f"{_TEMPORARY!r} are taken"
            )
        return self._root.joinpath(*parts)

    def _path(self, file: Path) -> str:
        return file.relative_to(self._root).as_posix()


def _version(data: bytes) -> Version:
    return Version(f"{len(data)}-{blake3(data).hexdigest(16)}")


def _whoami() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _new_random() -> random.Random:
    return random.Random()  # noqa: S311 - for pauses, not for secrets


def _modified_ms(file: Path) -> int:
    return file.stat().st_mtime_ns // 1_000_000
