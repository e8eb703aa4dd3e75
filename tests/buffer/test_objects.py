"""What every object store must do, asked of all of them: memory, directory, simulated, S3."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from quiver.buffer.objects import Fetched, Objects, Version
from quiver.buffer.obstore_objects import open_objects
from quiver.errors import Conflict, InvalidName, ObjectNotFound
from quiver.testing import virtual_time
from quiver.testing.objects import SimulatedObjects

if TYPE_CHECKING:
    from s3 import S3Server  # which pytest imports itself, as a plugin

pytest_plugins = ["s3"]

_numbers = itertools.count()

PATH = "ingest/manifest"
NEVER = Version('{"e_tag": "\\"00000000000000000000000000000000\\""}')


class Place(NamedTuple):
    """An empty store, and how to run a coroutine that uses it."""

    objects: Objects
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    wall_clock: bool = True
    races: int = 5


KINDS = [
    "memory",
    "directory",
    "simulated",
    pytest.param("s3", marks=pytest.mark.xdist_group("s3")),
]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "memory":
        return Place(open_objects(f"memory://conformance-{next(_numbers)}"), asyncio.run)
    if request.param == "directory":
        return Place(open_objects((tmp_path / "objects").as_uri()), asyncio.run)
    if request.param == "simulated":
        return Place(SimulatedObjects(random.Random(1)), virtual_time.run, wall_clock=False)
    server: S3Server = request.getfixturevalue("s3_server")
    url = server.url(f"conformance-{next(_numbers)}")
    # Of those that lose a race, this server lets some wait for seconds.
    return Place(open_objects(url, **server.keys), asyncio.run, races=1)


def known(fetched: Fetched | None) -> Fetched:
    assert fetched is not None
    return fetched


# --- One after the other ----------------------------------------------------------------------


def test_an_object_is_created_once(place: Place) -> None:
    async def check(objects: Objects) -> None:
        version = await objects.put_if(PATH, b"first", None)
        with pytest.raises(Conflict):
            await objects.put_if(PATH, b"second", None)
        assert await objects.get(PATH) == Fetched(b"first", version, 5)

    place.run(check(place.objects))


def test_a_version_is_good_for_one_write(place: Place) -> None:
    async def check(objects: Objects) -> None:
        first = await objects.put_if(PATH, b"first", None)
        second = await objects.put_if(PATH, b"second", first)
        assert first != second
        with pytest.raises(Conflict):
            await objects.put_if(PATH, b"stale", first)
        assert await objects.get(PATH) == Fetched(b"second", second, 6)

    place.run(check(place.objects))


def test_a_version_of_nothing_is_a_conflict(place: Place) -> None:
    async def check(objects: Objects) -> None:
        version = await objects.put_if("ingest/other", b"x", None)
        with pytest.raises(Conflict):
            await objects.put_if(PATH, b"y", version)
        await objects.delete(["ingest/other"])
        with pytest.raises(Conflict):
            await objects.put_if("ingest/other", b"z", version)
        with pytest.raises(ObjectNotFound):
            await objects.get("ingest/other")

    place.run(check(place.objects))


def test_writes_follow_on_the_versions_that_they_return(place: Place) -> None:
    async def check(objects: Objects) -> None:
        version = None
        for number in range(10):
            version = await objects.put_if(PATH, b"%d" % number, version)
        assert await objects.get(PATH) == Fetched(b"9", version or NEVER, 1)

    place.run(check(place.objects))


def test_put_replaces_whatever_is_there(place: Place) -> None:
    async def check(objects: Objects) -> None:
        created = await objects.put_if(PATH, b"old", None)
        version = await objects.put(PATH, b"new")
        assert await objects.get(PATH) == Fetched(b"new", version, 3)
        with pytest.raises(Conflict):
            await objects.put_if(PATH, b"late", created)
        assert await objects.put_if(PATH, b"newer", version)

    place.run(check(place.objects))


def test_a_known_version_is_not_sent_again(place: Place) -> None:
    async def check(objects: Objects) -> None:
        first = await objects.put(PATH, b"first")
        assert await objects.get(PATH, unless=first) is None
        assert await objects.get_tail(PATH, 3, unless=first) is None
        second = await objects.put(PATH, b"second")
        assert await objects.get(PATH, unless=first) == Fetched(b"second", second, 6)
        assert await objects.get_tail(PATH, 3, unless=first) == Fetched(b"ond", second, 6)

    place.run(check(place.objects))


@pytest.mark.parametrize("content", [b"", b"short", b"more than the last few bytes"])
def test_the_last_bytes(place: Place, content: bytes) -> None:
    async def check(objects: Objects) -> None:
        version = await objects.put(PATH, content)
        assert await objects.get(PATH) == Fetched(content, version, len(content))
        assert await objects.get_tail(PATH, 22) == Fetched(content[-22:], version, len(content))
        assert await objects.get_tail(PATH, 22, unless=version) is None

    place.run(check(place.objects))


def test_some_bytes_of_one_version(place: Place) -> None:
    async def check(objects: Objects) -> None:
        version = await objects.put(PATH, b"0123456789")
        assert await objects.get_range(PATH, 2, 5, version=version) == (b"234", version, 10)
        assert await objects.get_range(PATH, 7, 99, version=version) == (b"789", version, 10)
        await objects.put(PATH, b"abcdefghij")
        with pytest.raises(Conflict):
            await objects.get_range(PATH, 2, 5, version=version)
        with pytest.raises(ObjectNotFound):
            await objects.get_range("ingest/none", 2, 5, version=version)
        for start, end in ((3, 3), (5, 2), (-1, 2)):
            with pytest.raises(ValueError, match="no range"):
                await objects.get_range(PATH, start, end, version=version)
        with pytest.raises(ValueError, match="cannot be asked for"):
            await objects.get_tail(PATH, 0)

    place.run(check(place.objects))


def test_what_is_not_there(place: Place) -> None:
    async def check(objects: Objects) -> None:
        await objects.put("ingest/a/b", b"x")
        for path in ("nothing", "ingest/nothing", "ingest/a", "ingest/a/b/c"):
            with pytest.raises(ObjectNotFound):
                await objects.get(path)
            with pytest.raises(ObjectNotFound):
                await objects.get_tail(path, 22)
            assert await objects.list_children("nothing") == []

    place.run(check(place.objects))


def test_only_direct_children_are_listed(place: Place) -> None:
    async def check(objects: Objects) -> None:
        for path in ("ingest/b.batch", "ingest/a.batch", "ingest/deeper/c.batch", "ingest2/d"):
            await objects.put(path, b"x" * len(path))
        before = int(time.time() * 1000) if place.wall_clock else virtual_time.now_ms()
        listed = await objects.list_children("ingest")
        assert [(info.path, info.size) for info in listed] == [
            ("ingest/a.batch", 14),
            ("ingest/b.batch", 14),
        ]
        assert all(abs(info.modified_ms - before) < 10_000 for info in listed)
        assert [info.path for info in await objects.list_children("ingest/deeper")] == [
            "ingest/deeper/c.batch"
        ]
        assert await objects.list_children("ing") == []
        assert await objects.list_children("ingest/a.batch") == []

    place.run(check(place.objects))


def test_deleting_twice_is_no_error(place: Place) -> None:
    async def check(objects: Objects) -> None:
        await objects.put("ingest/a", b"a")
        await objects.put("ingest/b", b"b")
        await objects.put("ingest/c/d", b"d")
        await objects.delete(["ingest/a", "ingest/none", "none/none"])
        await objects.delete(["ingest/a"])
        await objects.delete([])
        assert [info.path for info in await objects.list_children("ingest")] == ["ingest/b"]
        assert known(await objects.get("ingest/c/d")).data == b"d"
        assert await objects.put_if("ingest/a", b"again", None)

    place.run(check(place.objects))


@pytest.mark.parametrize(
    "path",
    ["", "/a", "a/", "a//b", "..", "a/../b", ".", "a b", "a~", "a%7E", "ä", "a\\b", "a" * 1025],
)
def test_a_path_that_a_store_would_change_is_refused(place: Place, path: str) -> None:
    async def check(objects: Objects) -> None:
        with pytest.raises(InvalidName, match="no path of an object"):
            await objects.get(path)
        with pytest.raises(InvalidName):
            await objects.get_tail(path, 22)
        with pytest.raises(InvalidName):
            await objects.get_range(path, 0, 1, version=NEVER)
        with pytest.raises(InvalidName):
            await objects.put(path, b"")
        with pytest.raises(InvalidName):
            await objects.put_if(path, b"", None)
        with pytest.raises(InvalidName):
            await objects.list_children(path)
        with pytest.raises(InvalidName):
            await objects.delete(["fine", path])

    place.run(check(place.objects))


# --- At the same time -------------------------------------------------------------------------


def test_one_of_many_creates_wins(place: Place) -> None:
    async def create(objects: Objects, path: str, number: int) -> int | None:
        try:
            await objects.put_if(path, b"%d" % number, None)
        except Conflict:
            return None
        return number

    async def check(objects: Objects) -> None:
        for round_ in range(place.races):
            path = f"race/{round_}"
            won = await asyncio.gather(*(create(objects, path, number) for number in range(16)))
            winners = [number for number in won if number is not None]
            assert len(winners) == 1
            assert known(await objects.get(path)).data == b"%d" % winners[0]

    place.run(check(place.objects))


async def increment(objects: Objects, path: str) -> int:
    """Add one; how many attempts it took."""
    for attempt in itertools.count(1):
        fetched = known(await objects.get(path))
        try:
            await objects.put_if(path, b"%d" % (int(fetched.data) + 1), fetched.version)
        except Conflict:
            continue
        return attempt
    raise AssertionError


def test_concurrent_increments_lose_nothing(place: Place) -> None:
    async def worker(objects: Objects) -> int:
        return sum([await increment(objects, PATH) for _ in range(8)])

    async def check(objects: Objects) -> None:
        await objects.put_if(PATH, b"0", None)
        attempts = await asyncio.gather(*(worker(objects) for _ in range(6)))
        assert known(await objects.get(PATH)).data == b"48"
        assert sum(attempts) > 48, "nobody ever met anybody: this shows nothing"

    place.run(check(place.objects))
