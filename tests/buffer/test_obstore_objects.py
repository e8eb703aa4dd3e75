"""Object stores by URL, and what stands between ``obstore`` and ``Objects``."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import pytest
from obstore.exceptions import GenericError, NotSupportedError
from obstore.store import MemoryStore

from quiver.buffer.directory_objects import DirectoryObjects
from quiver.buffer.objects import Fetched
from quiver.buffer.obstore_objects import ObstoreObjects, open_objects
from quiver.errors import InvalidConfig, InvalidName, ObjectNotFound, ObjectsUnavailable

if TYPE_CHECKING:
    from s3 import S3Server  # which pytest imports itself, as a plugin

pytest_plugins = ["s3"]

PATH = "ingest/manifest"
SECRETS = {"access_key_id": "nobody", "secret_access_key": "hunter2"}

# --- By URL -----------------------------------------------------------------------------------


def test_a_memory_store_is_shared_by_its_name() -> None:
    async def check() -> None:
        version = await open_objects("memory://one").put(PATH, b"x")
        assert await open_objects("memory://one").get(PATH) == Fetched(b"x", version, 1)
        with pytest.raises(ObjectNotFound):
            await open_objects("memory://two").get(PATH)

    asyncio.run(check())


def test_a_url_names_the_store(tmp_path: Path) -> None:
    assert isinstance(open_objects(tmp_path.as_uri()), DirectoryObjects)
    names = {
        "s3://bucket/some/prefix?region=eu-west-1&endpoint=http://127.0.0.1:1": {},
        "gs://bucket?skip_signature=true": {},
        "az://container/prefix?account=name": {"account_key": "c2VjcmV0"},
    }
    for url, options in names.items():
        objects = open_objects(url, **options)
        assert isinstance(objects, ObstoreObjects)
        assert objects.name == url.partition("?")[0]


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("ftp://host/dir", {}, "these are: memory://name, file:///directory, s3://"),
        ("/some/dir", {}, "is no object store"),
        ("s3:bucket", {}, "is no object store"),
        ("ftp://me:hunter2@host?key=hunter2", {}, "is no object store"),
        ("s3://", {}, "is no object store"),
        ("s3:///prefix", {}, "must name a bucket"),
        ("s3://me:hunter2@bucket/prefix", {}, "must name a bucket"),
        ("s3://bucket?secret_access_key=hunter2", {}, "where only endpoint, region"),
        ("s3://bucket", {"no_such_setting": "x"}, "no_such_setting"),
        ("az://container", {}, "Account must be specified"),
        ("memory://name/prefix", {}, "must be memory://name"),
        ("memory://name?size=3", {}, "where only nothing may be"),
        ("memory://name", {"region": "x"}, "without options"),
        ("file://host/dir", {}, "must be file:///directory"),
        ("file:///", {}, "must be file:///directory"),
    ],
)
def test_a_url_that_is_wrong_is_explained(
    url: str, options: Mapping[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidConfig) as caught:
        open_objects(url, **options)
    assert reason in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_prefix_with_odd_letters_is_refused() -> None:
    with pytest.raises(InvalidName):
        open_objects("s3://bucket/pre~fix")


# --- What obstore does ------------------------------------------------------------------------


def test_a_store_that_is_down_is_unavailable() -> None:
    objects = open_objects(
        "s3://bucket/prefix?region=x&endpoint=http://127.0.0.1:1",
        **SECRETS,
    )

    async def check() -> None:
        with pytest.raises(ObjectsUnavailable, match="s3://bucket/prefix: ingest/manifest: ") as e:
            await objects.get(PATH)
        assert "hunter2" not in str(e.value)
        assert len(str(e.value).splitlines()) == 1

    asyncio.run(check())


def test_a_store_that_does_not_answer_is_given_up_on() -> None:
    async def check(port: int) -> None:
        url = f"s3://bucket?region=x&endpoint=http://127.0.0.1:{port}"
        impatient = open_objects(url, timeout=0.1, **SECRETS)
        for attempt in (impatient.get(PATH), impatient.put_if(PATH, b"", None)):
            with pytest.raises(ObjectsUnavailable, match="s3://bucket: ingest/manifest: "):
                await attempt
        patient = open_objects(url, **SECRETS)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await patient.get(PATH)

    before = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which never takes a connection
        asyncio.run(check(silent.getsockname()[1]))
    assert time.monotonic() - before < 10


@pytest.mark.xdist_group("s3")
def test_a_key_that_is_refused_is_named(s3_server: S3Server) -> None:
    objects = open_objects(s3_server.url("x"), **SECRETS)

    async def check() -> None:
        with pytest.raises(ObjectsUnavailable, match=r"403 Forbidden \(InvalidAccessKeyId\)"):
            await objects.put_if(PATH, b"", None)

    asyncio.run(check())


@pytest.mark.xdist_group("s3")
def test_a_missing_bucket_is_not_an_empty_queue(s3_server: S3Server) -> None:
    missing = s3_server._replace(bucket="not-there")
    objects = open_objects(missing.url("x"), **missing.keys)

    async def check() -> None:
        with pytest.raises(ObjectsUnavailable, match="NoSuchBucket"):
            await objects.get(PATH)

    asyncio.run(check())


@pytest.mark.xdist_group("s3")
def test_a_large_object_goes_up_in_parts(s3_server: S3Server) -> None:
    objects = open_objects(s3_server.url("large"), **s3_server.keys)
    data = random.Random(3).randbytes(20 * 1024 * 1024)

    async def check() -> None:
        version = await objects.put("batch", data)
        fetched = await objects.get("batch")
        assert fetched is not None
        assert (fetched.data == data, fetched.version, fetched.size) == (True, version, len(data))

    asyncio.run(check())


class Interposed:
    """Stands before a function of obstore, and raises instead when told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
        self.error: Callable[[Any], Exception | None] = lambda _what: None
        self.calls: list[Any] = []
        real = getattr(obstore, function)

        async def replacement(store: Any, path: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401
            what = options.get("options", path)
            self.calls.append(what)
            if error := self.error(what):
                raise error
            return await real(store, path, *args, **options)

        monkeypatch.setattr(obstore, function, replacement)


def test_a_store_without_suffixes_is_asked_for_the_size_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Azure is."""
    objects = ObstoreObjects(MemoryStore(), "azure")
    get = Interposed(monkeypatch, "get_async")
    get.error = lambda what: (
        NotSupportedError("no suffix") if isinstance(what.get("range"), dict) else None
    )

    async def check() -> None:
        version = await objects.put(PATH, b"0123456789")
        assert await objects.get_tail(PATH, 3) == Fetched(b"789", version, 10)
        assert await objects.get_tail(PATH, 30) == Fetched(b"0123456789", version, 10)
        assert await objects.get_tail(PATH, 3, unless=version) is None
        empty = await objects.put(PATH, b"")
        assert await objects.get_tail(PATH, 3) == Fetched(b"", empty, 0)
        with pytest.raises(ObjectNotFound):
            await objects.get_tail("none", 3)

    asyncio.run(check())


def test_a_store_that_stops_at_a_missing_object_is_asked_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Google's is."""
    objects = ObstoreObjects(MemoryStore(), "google")
    delete = Interposed(monkeypatch, "delete_async")
    delete.error = lambda what: (
        FileNotFoundError("x") if isinstance(what, list) or what == "a" else None
    )

    async def check() -> None:
        await objects.put("b", b"")
        await objects.delete(["a", "b"])
        assert delete.calls == [["a", "b"], "a", "b"]
        with pytest.raises(ObjectNotFound):
            await objects.get("b")

    asyncio.run(check())


def test_both_halves_of_a_version_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google compares the one that the others do not have."""
    seen: list[Any] = []

    async def put(*_args: Any, mode: Any, **_options: Any) -> dict[str, str | None]:  # noqa: ANN401
        seen.append(mode)
        return (
            {"e_tag": "tag", "version": "17"}
            if len(seen) == 1
            else {"e_tag": None, "version": None}
        )

    monkeypatch.setattr(obstore, "put_async", put)
    objects = ObstoreObjects(MemoryStore(), "google")

    async def check() -> None:
        version = await objects.put_if(PATH, b"", None)
        with pytest.raises(ObjectsUnavailable, match="gives no version"):
            await objects.put_if(PATH, b"", version)
        assert seen == ["create", {"e_tag": "tag", "version": "17"}]

    asyncio.run(check())


@pytest.mark.parametrize(
    "text",
    [
        "Error performing GET https://a.blob/c?sig=hunter2&x=1 in 3ms\n\nDebug: hunter2",
        "Error performing GET https://me:hunter2@host/c\nhunter2",
        "403 Forbidden: <?xml><Error><Code>Denied</Code><Key>hunter2</Key></Error>",
    ],
)
def test_no_key_gets_into_a_message(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    get = Interposed(monkeypatch, "get_async")
    get.error = lambda _what: GenericError(text)

    async def check() -> None:
        with pytest.raises(ObjectsUnavailable) as caught:
            await ObstoreObjects(MemoryStore(), "store").get(PATH)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__

    asyncio.run(check())
