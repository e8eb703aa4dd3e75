"""Where whole files go: a directory, or an object store by URL.

==================================  ==============================================================
URL                                 what
==================================  ==============================================================
``/data/spans``, ``file:///data``   a directory; files are synced, and so are their names
``s3://bucket/prefix``              and ``gs://``, ``az://``: an object store. ``endpoint`` and
                                    ``region`` may be in the query; keys come from the environment,
                                    as the vendors name them
``memory://name``                   nowhere that lasts; for tests
==================================  ==============================================================
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

import obstore
import pyarrow as pa
from obstore.exceptions import BaseError
from obstore.store import MemoryStore, from_url

from quiver.disk import Disk, RealDisk, publish
from quiver.errors import InvalidConfig, TryLater

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig

_SCHEMES: Final = frozenset({"s3", "s3a", "gs", "az", "abfs", "abfss", "azure"})
_SETTINGS: Final = frozenset({"endpoint", "region", "skip_signature", "account"})
# Whoever sends tries again anyway, and waits longer each time.
_RETRIES: Final[RetryConfig] = {"max_retries": 3, "retry_timeout": timedelta(seconds=15)}


class Files(Protocol):
    """Takes whole files."""

    async def write(self, path: str, data: pa.Buffer) -> None:
        """Return when the file is there and lasts. Raises ``TryLater`` or ``OSError``."""


class DirectoryFiles:
    """Files on a disk."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk or RealDisk()

    async def write(self, path: str, data: pa.Buffer) -> None:
        """Write, sync and rename, in a thread."""
        await asyncio.to_thread(self._publish, self._root / path, data)

    def _publish(self, file: Path, data: pa.Buffer) -> None:
        self._disk.make_directory(file.parent)
        publish(self._disk, file, [data])


class ObjectFiles:
    """Files in an object store."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name

    async def write(self, path: str, data: pa.Buffer) -> None:
        """Put the object: all of it, or nothing."""
        try:
            await obstore.put_async(self._store, path, data.to_pybytes())
        except (BaseError, OSError, ValueError) as error:
            raise TryLater(f"{self._name}/{path}: {str(error)[:300]}") from error


def open_files(url: str) -> Files:
    """Where a URL points to."""
    if "://" not in url:
        return DirectoryFiles(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path:
            raise InvalidConfig(f"url is {url!r}; a directory is written file:///absolute/path")
        return DirectoryFiles(Path(unquote(parts.path)))
    if parts.scheme == "memory":
        return ObjectFiles(MemoryStore(), url)
    if parts.scheme not in _SCHEMES or not parts.netloc:
        raise InvalidConfig(
            f"url is {url!r}; it must be a directory, or begin with file://, s3://, gs:// or az://"
        )
    settings: dict[str, Any] = dict(parse_qsl(parts.query))
    strange = sorted(set(settings) - _SETTINGS)
    if strange or parts.username or parts.password:
        raise InvalidConfig(
            f"the url of {parts.netloc.rpartition('@')[2]} may have {', '.join(sorted(_SETTINGS))} "
            "in its query; keys come from the environment"
        )
    name = f"{parts.scheme}://{parts.netloc}{parts.path}"
    is_plain = str(settings.get("endpoint", "")).startswith("http://")
    if "skip_signature" in settings:
        settings["skip_signature"] = settings["skip_signature"].lower() in {"1", "true"}
    try:
        store = from_url(
            name, client_options={"allow_http": is_plain}, retry_config=_RETRIES, **settings
        )
    except (BaseError, ValueError) as error:
        raise InvalidConfig(f"url {name!r} cannot be used: {error}") from error
    return ObjectFiles(store, name)
