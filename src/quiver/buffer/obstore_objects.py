"""Object stores by URL: S3, Google Cloud Storage, Azure and memory with ``obstore``; directories.

==============================  ================================================================
URL                             settings in its query, or as options of ``open_objects``
==============================  ================================================================
``memory://name``               none; one store for each name in this process
``file:///directory``           none; see ``directory_objects``
``s3://bucket/prefix``          ``endpoint``, ``region``, ``virtual_hosted_style_request``,
                                ``skip_signature``
``gs://bucket/prefix``          ``endpoint``, ``skip_signature``
``az://container/prefix``       ``account``, ``endpoint``, ``use_emulator``, ``skip_signature``
==============================  ================================================================

Keys and other secrets come from the environment, as the vendors name them, or as options; a URL
ends up in logs, so it is refused with one in it.

What the stores do differently, and what becomes of it here:

- Google compares generations, the others ETags: a ``Version`` holds both, as far as they are given.
- An ETag may be a hash of the bytes. A write that changes nothing then does not change the version.
- Azure knows no "last bytes": the size is asked for first.
- Nobody returns the last bytes of an empty object: the answer is an error, and the object is read.
- A bucket that is missing looks like a missing object, and is reported as unavailable.
- Large objects are uploaded in parts. Parts of an upload that was cut short stay, unseen, until a
  lifecycle rule of the bucket removes them.
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotModifiedError,
    NotSupportedError,
    PreconditionError,
)
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from quiver.buffer.directory_objects import DirectoryObjects, check_path
from quiver.buffer.objects import Fetched, ObjectInfo, Objects, Version
from quiver.errors import Conflict, InvalidConfig, ObjectNotFound, ObjectsUnavailable

if TYPE_CHECKING:
    from obstore import GetOptions, PutResult, UpdateVersion
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_PART_BYTES: Final = 16 * 1024 * 1024  # up to here in one request
_PARTS_AT_ONCE: Final = 4
_TAIL_ATTEMPTS: Final = 5
_TIMEOUT: Final = 30.0
_MAX_REASON: Final = 300
_OBSTORE_ERRORS: Final = (BaseError, OSError, NotImplementedError, ValueError)
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")

# Whoever calls tries again anyway, knows what it tries, and waits longer each time. What is
# repeated down here is only what a broken connection or a single bad answer would cost.
_RETRIES: RetryConfig = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=15),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}


class ObstoreObjects:
    """``Objects`` over a store of ``obstore``. ``name`` is for messages."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.name = name
        self._store = store

    async def get(self, path: str, *, unless: Version | None = None) -> Fetched | None:
        return await self._get(path, _unless(unless))

    async def get_tail(
        self, path: str, length: int, *, unless: Version | None = None
    ) -> Fetched | None:
        if length < 1:
            raise ValueError(f"the last {length} bytes of an object cannot be asked for")
        options = _unless(unless)
        options["range"] = {"suffix": length}
        try:
            return await self._get(path, options)
        except _EmptyRange:
            return await self.get(path, unless=unless)
        except _NoSuffix:
            return await self._tail_by_size(path, length, unless)

    async def get_range(self, path: str, start: int, end: int, *, version: Version) -> Fetched:
        if not 0 <= start < end:
            raise ValueError(f"bytes {start} to {end} are no range")
        found = await self._get(
            path, {"range": (start, end), "if_match": _parts(version).get("e_tag")}
        )
        if found is None or found.version != version:
            raise Conflict(f"{self.name}: {path} is not the version that was read before")
        return found

    async def put(self, path: str, data: bytes) -> Version:
        check_path(path)
        try:
            with self._errors(path, writing=True):
                result = await obstore.put_async(
                    self._store, path, data, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
                )
        except Conflict as error:  # nothing was compared: two writes met, and either may be there
            raise ObjectsUnavailable(str(error)) from None
        return self._version(path, result)

    async def put_if(self, path: str, data: bytes, expected: Version | None) -> Version:
        check_path(path)
        with self._errors(path, writing=True):
            result = await obstore.put_async(
                self._store, path, data, mode="create" if expected is None else _parts(expected)
            )
        return self._version(path, result)

    async def list_children(self, prefix: str) -> Sequence[ObjectInfo]:
        check_path(prefix)
        with self._errors(prefix):
            found = await obstore.list_with_delimiter_async(self._store, prefix)
        return sorted(
            ObjectInfo(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000))
            for meta in found["objects"]
        )

    async def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            check_path(path)
        if not paths:
            return
        try:
            with self._errors(paths[0]):
                await obstore.delete_async(self._store, list(paths))
        except ObjectNotFound:
            # Some stores stop at the first that is missing: then one by one.
            for path in paths:
                with contextlib.suppress(ObjectNotFound), self._errors(path):
                    await obstore.delete_async(self._store, path)

    # --- Reading ------------------------------------------------------------------------------

    async def _get(self, path: str, options: GetOptions) -> Fetched | None:
        check_path(path)
        try:
            with self._errors(path):
                result = await obstore.get_async(self._store, path, options=options)
                data = bytes(await result.bytes_async())
        except _NotModified:
            return None
        return Fetched(data, self._version(path, result.meta), result.meta["size"])

    async def _tail_by_size(self, path: str, length: int, unless: Version | None) -> Fetched | None:
        """The last bytes in two steps, again when somebody writes between them."""
        for _ in range(_TAIL_ATTEMPTS):
            with self._errors(path):
                meta = await obstore.head_async(self._store, path)
            version, size = self._version(path, meta), meta["size"]
            if version == unless:
                return None
            if size == 0:
                return Fetched(b"", version, 0)
            with contextlib.suppress(Conflict):
                return await self.get_range(path, max(0, size - length), size, version=version)
        raise ObjectsUnavailable(f"{self.name}: {path} changes faster than it can be read")

    def _version(self, path: str, given: Mapping[str, Any] | PutResult) -> Version:
        parts = {key: given[key] for key in ("e_tag", "version") if given.get(key) is not None}
        if not parts:
            raise ObjectsUnavailable(
                f"{self.name}: the store gives no version of {path}; a queue needs one that does"
            )
        return Version(json.dumps(parts, sort_keys=True))

    # --- Errors -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _errors(self, path: str, *, writing: bool = False) -> Iterator[None]:
        """Turn the errors of ``obstore`` into those of ``Objects``.

        The original ones are not kept as causes: they print whole requests, with what a URL may
        hold of keys.
        """
        try:
            yield
        except NotModifiedError:
            raise _NotModified from None
        except (AlreadyExistsError, PreconditionError):
            raise Conflict(f"{self.name}: {path} is not the version that was expected") from None
        except FileNotFoundError as error:
            # A write needs no object, so what it misses is the bucket.
            if writing or any(sign in str(error) for sign in _NO_BUCKET):
                raise ObjectsUnavailable(f"{self.name}: {path}: {_reason(error)}") from None
            raise ObjectNotFound(f"{self.name}: there is no {path}") from None
        except NotSupportedError as error:
            raise _NoSuffix(f"{self.name}: {path}: {_reason(error)}") from None
        except GenericError as error:
            kind = _EmptyRange if "416 Range Not Satisfiable" in str(error) else ObjectsUnavailable
            raise kind(f"{self.name}: {path}: {_reason(error)}") from None
        except _OBSTORE_ERRORS as error:
            raise ObjectsUnavailable(f"{self.name}: {path}: {_reason(error)}") from None


class _NotModified(Exception):
    """The object has the version that the caller knows."""


class _EmptyRange(ObjectsUnavailable):
    """The object has none of the bytes that were asked for."""


class _NoSuffix(ObjectsUnavailable):
    """The store cannot do this; of all calls, that is only known of asking for the last bytes."""


def _unless(version: Version | None) -> GetOptions:
    return {} if version is None else {"if_none_match": _parts(version).get("e_tag")}


def _parts(version: Version) -> UpdateVersion:
    parts: UpdateVersion = json.loads(version)
    return parts


def _reason(error: Exception) -> str:
    """What to tell: the first line, without documents, and without what may be a key."""
    text = str(error)
    line = text.partition("\n")[0].partition(": <")[0]
    code = re.search(r"<Code>(\w+)</Code>", text)
    line = re.sub(r"\?\S+", "?...", re.sub(r"//[^/@\s]*@", "//", line))
    return f"{line} ({code[1]})"[:_MAX_REASON] if code else line[:_MAX_REASON]


# --- Opening ----------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A URL, taken apart."""

    url: str
    bucket: str
    prefix: str | None
    settings: dict[str, Any]


# What may stand in the query, and how obstore calls it.
_SETTINGS: Final[dict[str, dict[str, str]]] = {
    "memory": {},
    "file": {},
    "s3": {
        "endpoint": "endpoint",
        "region": "region",
        "virtual_hosted_style_request": "virtual_hosted_style_request",
        "skip_signature": "skip_signature",
    },
    "gs": {"endpoint": "base_url", "skip_signature": "skip_signature"},
    "az": {
        "account": "account_name",
        "endpoint": "endpoint",
        "use_emulator": "use_emulator",
        "skip_signature": "skip_signature",
    },
}
_memory_stores: dict[str, MemoryStore] = {}


def open_objects(url: str, **options: Any) -> Objects:  # noqa: ANN401 - what obstore takes
    """The object store at a URL. Nothing is asked of it yet.

    ``options`` are settings as in the table above, or as ``obstore`` calls them (keys, for
    example), and come before those in the URL. ``timeout`` is for one request, in seconds.
    """
    timeout = float(options.pop("timeout", _TIMEOUT))
    scheme, place = _parse(url, options)
    if scheme == "memory":
        store = _memory_stores.setdefault(place.bucket, MemoryStore())
        return ObstoreObjects(store, place.url)
    if scheme == "file":
        return DirectoryObjects(Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path)))
    return ObstoreObjects(_remote_store(scheme, place, timeout), place.url)


def _parse(url: str, options: dict[str, Any]) -> tuple[str, _Place]:
    scheme, _, rest = url.partition("://")
    if not rest or scheme not in _SETTINGS:
        raise InvalidConfig(
            f"{_without_secrets(url)!r} is no object store; these are: memory://name, "
            "file:///directory, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix"
        )
    parts = urllib.parse.urlsplit(url)
    place = _without_secrets(url)
    known = _SETTINGS[scheme]
    given = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(given.keys() - known.keys()):
        raise InvalidConfig(
            f"{place} has {', '.join(unknown)} in its query, where only "
            f"{', '.join(known) or 'nothing'} may be; keys come from the environment, or as options"
        )
    if scheme == "file":
        if parts.netloc or len(parts.path) <= 1 or options:
            raise InvalidConfig(f"{place} must be file:///directory, without options")
    elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", parts.netloc):
        raise InvalidConfig(f"{place} must name a bucket, and no user or port, after {scheme}://")
    prefix = parts.path.strip("/")
    if scheme == "memory" and (prefix or options):
        raise InvalidConfig(f"{place} must be memory://name, without options")
    if prefix and scheme != "file":
        check_path(prefix)
    settings = {known.get(key, key): value for key, value in {**given, **options}.items()}
    return scheme, _Place(place, parts.netloc, prefix or None, settings)


def _remote_store(scheme: str, place: _Place, timeout: float) -> ObjectStore:
    settings = place.settings
    endpoint = str(settings.get("endpoint") or settings.get("base_url") or "")
    client: ClientConfig = {
        "timeout": timedelta(seconds=timeout),
        "connect_timeout": timedelta(seconds=min(5.0, timeout)),
        "allow_http": endpoint.startswith("http://"),
    }
    common: Any = {"client_options": client, "retry_config": _RETRIES, "config": settings}
    try:
        if scheme == "s3":
            return S3Store(place.bucket, prefix=place.prefix, **common)
        if scheme == "gs":
            return GCSStore(place.bucket, prefix=place.prefix, **common)
        return AzureStore(place.bucket, prefix=place.prefix, **common)
    except (*_OBSTORE_ERRORS, TypeError) as error:
        raise InvalidConfig(f"{place.url} cannot be opened: {_reason(error)}") from None


def _without_secrets(url: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", url.partition("?")[0])
