"""Where the bytes of a lake are: a local directory, or an object store.

==============  ============================================================================
``put``         a whole file, durable when it returns
``read``        its bytes
``list``        all files below a folder, with size and time
``delete``      remove files; those that are not there are no error
``settle``      make durable what somebody else (delta-rs) has written
==============  ============================================================================

A directory is written through ``quiver.disk``. An object store is named by the URLs of
``quiver.buffer.open_objects``; keys come from the environment or as options. A place can be sent to
another process: it opens its store when it is first needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import obstore
import pyarrow as pa
from obstore.exceptions import BaseError
from obstore.store import from_url

from quiver.buffer.obstore_objects import open_objects
from quiver.disk import BytesLike, Disk, RealDisk, publish
from quiver.errors import InvalidConfig, InvalidName, ObjectNotFound, ObjectsUnavailable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

SYNC_EVERY: Final = 8 * 1024 * 1024
_PART_BYTES: Final = 16 * 1024 * 1024
_PARTS_AT_ONCE: Final = 4
_MAX_REASON: Final = 300
_OBSTORE_ERRORS: Final = (BaseError, OSError, NotImplementedError, ValueError)
# How delta-rs calls what a URL or an option names; the rest gets the vendor's prefix.
_DELTA_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "s3": {"endpoint": "AWS_ENDPOINT_URL"},
    "gs": {"endpoint": "GOOGLE_BASE_URL", "service_account": "GOOGLE_SERVICE_ACCOUNT"},
    "az": {"account": "AZURE_STORAGE_ACCOUNT_NAME", "endpoint": "AZURE_STORAGE_ENDPOINT"},
}
_DELTA_PREFIX: Final[Mapping[str, str]] = {
    "s3": "AWS_",
    "gs": "GOOGLE_",
    "az": "AZURE_STORAGE_",
}
_OBSTORE_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "s3": {},
    "gs": {"endpoint": "base_url"},
    "az": {"account": "account_name"},
}
Options: TypeAlias = Mapping[str, str]


class Placed(NamedTuple):
    """A file in a listing; ``path`` is relative to the place."""

    path: str
    size: int
    modified_ms: int


class Place(Protocol):
    """A folder of a lake. Paths are relative to it, with ``/`` between their parts."""

    @property
    def name(self) -> str:
        """For messages: no keys, no options."""

    @property
    def location(self) -> str:
        """How delta-rs and other engines call it."""

    @property
    def storage_options(self) -> dict[str, str] | None:
        """What delta-rs and Polars have to be told besides."""

    def below(self, folder: str) -> Place:
        """A folder of it."""

    def prepare(self, folder: str) -> None:
        """Make a folder for what others write, durably; an object store needs none."""

    def put(self, path: str, buffers: Sequence[BytesLike], *, contended: bool = False) -> int:
        """Write a file, durably: its size. ``contended``: others may write it now, too."""

    def read(self, path: str) -> pa.Buffer:
        """The bytes of a file; ``ObjectNotFound`` when there is none."""

    def list(self, folder: str = "") -> list[Placed]:
        """All files below a folder, by path; none when there is no such folder."""

    def delete(self, paths: Iterable[str]) -> None:
        """Remove files."""

    def settle(self, folder: str, chosen: Callable[[str], bool]) -> None:
        """Make files of a folder durable that others wrote: those whose path is chosen."""


def open_place(root: str | Path, options: Options | None = None, disk: Disk | None = None) -> Place:
    """The place at a directory or URL. Nothing is asked of it, and nothing made, yet."""
    text = str(root)
    if isinstance(root, Path) or "://" not in text:
        return LocalPlace(Path(text), disk)
    if text.startswith("file://"):
        parts = urllib.parse.urlsplit(text)
        if parts.netloc or len(parts.path) <= 1:
            raise InvalidConfig(f"{text} must be file:///directory")
        return LocalPlace(Path(urllib.parse.unquote(parts.path)), disk)
    return RemotePlace(text, options)


class LocalPlace:
    """A directory. It is made when the first file is put."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path = path.absolute()
        self._disk = disk or RealDisk()

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalPlace, (self.path,)

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def location(self) -> str:
        return str(self.path)

    @property
    def storage_options(self) -> dict[str, str] | None:
        return None

    def below(self, folder: str) -> LocalPlace:
        return LocalPlace(self._inside(folder), self._disk)

    def prepare(self, folder: str) -> None:
        self._disk.make_directory(self._inside(folder))

    def put(self, path: str, buffers: Sequence[BytesLike], *, contended: bool = False) -> int:
        target = self._inside(path)
        if not target.parent.is_dir():
            self._disk.make_directory(target.parent)
        if not contended:
            return publish(self._disk, target, buffers, sync_every=SYNC_EVERY)
        # Two that publish under one name would share a temporary file.
        alone = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
        size = publish(self._disk, alone, buffers)
        self._disk.rename(alone, target)
        self._disk.sync_dir(target.parent)
        return size

    def read(self, path: str) -> pa.Buffer:
        try:
            return self._disk.map(self._inside(path))
        except FileNotFoundError:
            raise ObjectNotFound(f"{self.name}: there is no {path}") from None

    def list(self, folder: str = "") -> list[Placed]:
        found = []
        for directory, _, names in os.walk(self._inside(folder) if folder else self.path):
            for name in names:
                file = Path(directory, name)
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    state = file.stat()
                    path = file.relative_to(self.path).as_posix()
                    found.append(Placed(path, state.st_size, state.st_mtime_ns // 1_000_000))
        return sorted(found)

    def delete(self, paths: Iterable[str]) -> None:
        folders = set()
        for path in paths:
            target = self._inside(path)
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(target)
                folders.add(target.parent)
        for folder in sorted(folders):
            self._disk.sync_dir(folder)

    def settle(self, folder: str, chosen: Callable[[str], bool]) -> None:
        directory = self._inside(folder)
        for name in self._disk.list_directory(directory):
            if not chosen(f"{folder}/{name}"):
                continue
            with contextlib.suppress(FileNotFoundError):  # cleaned up meanwhile
                file = self._disk.open_append(directory / name)
                try:
                    file.sync()
                finally:
                    file.close()
        self._disk.sync_dir(directory)

    def _inside(self, path: str) -> Path:
        return self.path / _checked(path)


class RemotePlace:
    """A prefix in an object store."""

    def __init__(self, url: str, options: Options | None = None) -> None:
        open_objects(url, **dict(options or {}))  # refuses what a queue's URL may not be, either
        parts = urllib.parse.urlsplit(url)
        self._scheme = parts.scheme
        if self._scheme not in _DELTA_NAMES:
            raise InvalidConfig(
                f"a lake cannot be at {parts.scheme}://; use a directory, s3, gs, az"
            )
        self.location = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._options = {**dict(urllib.parse.parse_qsl(parts.query)), **dict(options or {})}

    def __reduce__(self) -> tuple[Any, ...]:
        return _remote, (self.location, self._options)

    @property
    def name(self) -> str:
        return self.location

    @property
    def storage_options(self) -> dict[str, str] | None:
        names, prefix = _DELTA_NAMES[self._scheme], _DELTA_PREFIX[self._scheme]
        found = {
            names.get(key, key if key.upper().startswith(prefix) else prefix + key.upper()): value
            for key, value in self._options.items()
            if key != "timeout"
        }
        if self._plain_http:
            found["ALLOW_HTTP" if self._scheme != "s3" else "AWS_ALLOW_HTTP"] = "true"
        return found

    def below(self, folder: str) -> RemotePlace:
        return _remote(f"{self.location}/{_checked(folder)}", self._options)

    def prepare(self, folder: str) -> None:
        """Nothing to do: there are no folders."""

    def put(self, path: str, buffers: Sequence[BytesLike], *, contended: bool = False) -> int:
        del contended  # an object is there as a whole, or not
        data = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        view = memoryview(data).cast("B")
        with self._errors(path):
            obstore.put(
                self._store,
                _checked(path),
                view,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )
        return view.nbytes

    def read(self, path: str) -> pa.Buffer:
        with self._errors(path):
            return pa.py_buffer(obstore.get(self._store, _checked(path)).bytes())

    def list(self, folder: str = "") -> list[Placed]:
        with self._errors(folder):
            prefix = _checked(folder) if folder else None
            return sorted(
                Placed(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000))
                for chunk in obstore.list(self._store, prefix=prefix)
                for meta in chunk
            )

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            with contextlib.suppress(ObjectNotFound), self._errors(path):
                obstore.delete(self._store, _checked(path))

    def settle(self, folder: str, chosen: Callable[[str], bool]) -> None:
        """Nothing to do: what an object store has taken is durable."""

    @property
    def _plain_http(self) -> bool:
        return self._options.get("endpoint", "").startswith("http://")

    @cached_property
    def _store(self) -> ObjectStore:
        names = _OBSTORE_NAMES[self._scheme]
        config: Any = {names.get(k, k): v for k, v in self._options.items() if k != "timeout"}
        client: ClientConfig = {
            "timeout": timedelta(seconds=float(self._options.get("timeout", 60))),
            "allow_http": self._plain_http,
        }
        return from_url(self.location, config=config, client_options=client)

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise ObjectNotFound(f"{self.name}: there is no {path}") from None
        except _OBSTORE_ERRORS as error:
            # Not as the cause: it may print a request with its keys.
            reason = re.sub(r"\?\S+", "?...", str(error).partition("\n")[0])[:_MAX_REASON]
            raise ObjectsUnavailable(f"{self.name}: {path}: {reason}") from None


def _remote(location: str, options: Options) -> RemotePlace:
    return RemotePlace(location, options)


def _checked(path: str) -> str:
    parts = path.split("/")
    if not all(parts) or any(part in {".", ".."} for part in parts) or "\\" in path:
        raise InvalidName(f"{path[:120]!r} is no path inside a lake")
    return path
