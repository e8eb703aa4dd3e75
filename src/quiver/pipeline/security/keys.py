"""API keys: made here, shown once, kept as hashes, looked up when a request comes.

A key is ``qk_<id>_<secret>``. The id finds the entry, so that one hash is compared, in constant
time; the secret has 256 random bits, so a fast hash is enough. The file is JSON::

    {"version": 1, "keys": [{"id": "3f9c...", "name": "checkout", "hash": "<blake3 of the key>",
                             "created": "2026-11-15T12:00:00Z", "revoked": null}]}

It is replaced as a whole, and read again when it changes. When it cannot be read, what was read
last goes on for a while (``GRACE_RELOADS`` looks, and at least ``MIN_GRACE`` seconds); after that
nobody can say which keys are revoked, and clients are told to come later.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from blake3 import blake3

from quiver.disk import Disk, RealDisk, publish
from quiver.errors import InvalidConfig, InvalidName
from quiver.metrics import Metrics
from quiver.pipeline.settings.options import AuthOptions

logger = logging.getLogger(__name__)

GRACE_RELOADS: Final = 12
MIN_GRACE: Final = 60.0
_VERSION: Final = 1
_MAX_FILE_BYTES: Final = 16 * 1024 * 1024
_MAX_KEY: Final = 256
_ID: Final = re.compile(r"[0-9a-f]{16}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_KEY: Final = re.compile(r"qk_([0-9a-f]{16})_[0-9a-f]{64}")
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,100}")
_NOBODY: Final = "0" * 64

JUNJO_HEADER: Final = "x-junjo-api-key"
_BEARER: Final = "bearer "


class WrongKey(Exception):
    """No key, or none that is known and in force. The message is for the client."""


class KeysUnavailable(Exception):
    """Nobody can say at the moment which keys are in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What is kept of a key."""

    id: str
    name: str
    hash: str
    created: str
    revoked: str | None = None


def hash_of(key: str) -> str:
    """What is kept instead of a key."""
    return blake3(key.encode()).hexdigest()


# --- the file ---------------------------------------------------------------------------------


def read_keys(disk: Disk, path: Path) -> dict[str, ApiKey]:
    """The keys by id; ``InvalidConfig`` when it is no file of keys, ``OSError`` without one."""
    if disk.size(path) > _MAX_FILE_BYTES:
        raise InvalidConfig(f"{path}: more than {_MAX_FILE_BYTES} bytes are no file of keys")
    try:
        document = json.loads(disk.read(path).to_pybytes())
        if document["version"] != _VERSION:
            raise InvalidConfig(f"{path}: version {document['version']!r} is not supported")
        keys = [_checked(ApiKey(**entry)) for entry in document["keys"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidConfig(
            f"{path}: it is not a file of keys ({error}); make one with: quiver keys add"
        ) from error
    by_id = {key.id: key for key in keys}
    if len(by_id) != len(keys):
        raise InvalidConfig(f"{path}: two keys have the same id")
    return by_id


def _checked(key: ApiKey) -> ApiKey:
    texts = (key.id, key.name, key.hash, key.created, key.revoked or "")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("an entry holds what is no text")
    if not _ID.fullmatch(key.id) or not _HASH.fullmatch(key.hash):
        raise ValueError("an id has 16 hex digits, a hash 64")
    return key


def write_keys(disk: Disk, path: Path, keys: Iterable[ApiKey]) -> None:
    """Replace the file."""
    document = {"version": _VERSION, "keys": [asdict(key) for key in keys]}
    publish(disk, path, [json.dumps(document, indent=1).encode() + b"\n"])


def add_key(disk: Disk, path: Path, name: str) -> tuple[ApiKey, str]:
    """A new key: what is kept, and the text for the client, which nobody can show again."""
    if not _NAME.fullmatch(name):
        raise InvalidName(
            "a key needs a name of at most 100 characters, without control characters"
        )
    with _changing(disk, path) as keys:
        key_id = next(i for i in iter(lambda: secrets.token_hex(8), "") if i not in keys)
        text = f"qk_{key_id}_{secrets.token_hex(32)}"
        key = ApiKey(id=key_id, name=name, hash=hash_of(text), created=_now())
        keys[key_id] = key
    return key, text


def revoke_key(disk: Disk, path: Path, key_id: str) -> ApiKey:
    """End a key. It stays listed; one that was revoked before stays as it is."""
    with _changing(disk, path) as keys:
        if key_id not in keys:
            raise InvalidName(f"there is no key {key_id!r}; see: quiver keys list")
        if keys[key_id].revoked is None:
            keys[key_id] = replace(keys[key_id], revoked=_now())
        return keys[key_id]


@contextlib.contextmanager
def _changing(disk: Disk, path: Path) -> Iterator[dict[str, ApiKey]]:
    """The keys, written back at the end; two commands at once wait for nobody: one is refused."""
    if not disk.exists(path.parent):
        disk.make_directory(path.parent)
    try:
        lock = disk.lock(path.with_name(path.name + ".lock"), "quiver keys")
    except BlockingIOError as error:
        raise InvalidConfig(f"{path} is being changed by another command: try again") from error
    try:
        keys = read_keys(disk, path) if disk.exists(path) else {}
        before = dict(keys)
        yield keys
        if keys != before:
            write_keys(disk, path, keys.values())
    finally:
        lock.release()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- the keys in force ------------------------------------------------------------------------


class KeyRing:
    """Tells whose key it is. ``load`` before the first request, ``watch`` as a task."""

    def __init__(
        self,
        options: AuthOptions,
        *,
        metrics: Metrics | None = None,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._metrics = metrics or Metrics()
        self._disk = disk or RealDisk()
        self._clock = clock
        self._keys: Mapping[str, ApiKey] = {}
        self._seen: object = None
        self._good_at: float | None = None
        self._failed = False
        self.headers: Final = tuple(dict.fromkeys((options.header.lower(), JUNJO_HEADER)))
        """Names of headers with a key, beside ``authorization``."""

    def load(self) -> None:
        """Read the file for the first time; ``InvalidConfig`` when that is not possible."""
        try:
            self._read()
        except OSError as error:
            raise InvalidConfig(
                f"auth: keys_file {self._options.keys_file} cannot be read ({error.strerror}); "
                "make it with: quiver keys add"
            ) from error

    async def watch(self) -> None:
        """Read the file again whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(self._options.reload_interval)
            await asyncio.to_thread(self.reload)

    def reload(self) -> None:
        """Read the file again if it changed."""
        try:
            if self._failed or self._signature() != self._seen:
                self._read()
            self._good_at = self._clock()
        except (OSError, InvalidConfig) as error:
            self._metrics.count("quiver.keys.reload_failures_total")
            if not self._failed:
                logger.error("the keys read last stay in force for now: %s", error)  # noqa: TRY400 - it says all
            self._failed = True
        else:
            self._failed = False

    def _read(self) -> None:
        seen = self._signature()
        self._keys = read_keys(self._disk, self._options.keys_file)
        self._seen = seen
        self._good_at = self._clock()
        active = sum(key.revoked is None for key in self._keys.values())
        self._metrics.set("quiver.keys.active", active)

    def _signature(self) -> object:
        stat = self._options.keys_file.stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    @property
    def is_known(self) -> bool:
        """Whether the keys in force are known, or were a short while ago."""
        grace = max(MIN_GRACE, GRACE_RELOADS * self._options.reload_interval)
        return self._good_at is not None and self._clock() - self._good_at <= grace

    def identify(self, header: Callable[[str], str | None]) -> str:
        """The id of the key in the headers, which are asked for by lower-case name.

        ``WrongKey`` or ``KeysUnavailable`` when there is none to be told.
        """
        if not self.is_known:
            raise KeysUnavailable(f"{self._options.keys_file} cannot be read")
        presented = self._presented(header)
        if presented is None:
            raise WrongKey(
                f"an API key is needed, in the header {self.headers[0]} or as authorization: Bearer"
            )
        match = _KEY.fullmatch(presented) if len(presented) <= _MAX_KEY else None
        key = self._keys.get(match[1]) if match else None
        expected = key.hash if key else _NOBODY
        if not hmac.compare_digest(hash_of(presented), expected) or key is None or key.revoked:
            raise WrongKey("the API key is not known, or was revoked")
        return key.id

    def _presented(self, header: Callable[[str], str | None]) -> str | None:
        for name in self.headers:
            value = header(name)
            if value is not None:
                return _without_bearer(value) if name == "authorization" else value.strip()
        value = header("authorization")
        return None if value is None else _without_bearer(value)


def _without_bearer(value: str) -> str | None:
    scheme, key = value[: len(_BEARER)], value[len(_BEARER) :]
    return key.strip() if scheme.lower() == _BEARER else None
