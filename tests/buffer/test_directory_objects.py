"""Objects in a directory: between processes, after crashes, and when the disk fails."""

from __future__ import annotations

import asyncio
import errno
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quiver.buffer.directory_objects import DirectoryObjects
from quiver.buffer.objects import Fetched, Version
from quiver.disk import RealDisk
from quiver.errors import Conflict, InvalidName, ObjectNotFound, ObjectsUnavailable
from quiver.testing import SimulatedDisk, error_loop, explore

ROOT = Path("/objects")
PATH = "ingest/manifest"
FILE = ROOT / PATH
SEED = 20261115


@pytest.fixture
def objects(tmp_path: Path) -> DirectoryObjects:
    return DirectoryObjects(tmp_path)


def on(disk: SimulatedDisk) -> DirectoryObjects:
    return DirectoryObjects(
        ROOT, disk=disk, random=random.Random(SEED), lock_timeout=0.0, modified_ms=lambda _: 0
    )


# --- Files ------------------------------------------------------------------------------------


def test_an_object_is_a_file_of_its_name(objects: DirectoryObjects, tmp_path: Path) -> None:
    asyncio.run(objects.put_if(PATH, b"content", None))
    assert (tmp_path / PATH).read_bytes() == b"content"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".quiver", "ingest"]
    assert [path.name for path in (tmp_path / "ingest").iterdir()] == ["manifest"]


def test_what_a_crash_left_is_not_an_object(objects: DirectoryObjects, tmp_path: Path) -> None:
    (tmp_path / "ingest").mkdir()
    (tmp_path / "ingest/manifest.tmp").write_bytes(b"half of a manif")
    (tmp_path / "ingest/manifest.tmp").chmod(0o440)

    async def check() -> None:
        assert await objects.list_children("ingest") == []
        with pytest.raises(ObjectNotFound):
            await objects.get(PATH)
        await objects.put_if(PATH, b"whole", None)

    asyncio.run(check())
    assert [path.name for path in (tmp_path / "ingest").iterdir()] == ["manifest"]


def test_names_that_are_taken_are_refused(objects: DirectoryObjects) -> None:
    for path in (".quiver/lock-00", "ingest/x.tmp", "x.tmp/y"):
        with pytest.raises(InvalidName, match="are taken"):
            asyncio.run(objects.put(path, b""))


def test_a_directory_is_no_object_and_cannot_become_one(objects: DirectoryObjects) -> None:
    async def check() -> None:
        await objects.put("a/b", b"")
        await objects.delete(["a", "a/b/c"])
        with pytest.raises(ObjectsUnavailable, match="a"):
            await objects.put("a", b"")
        with pytest.raises(ObjectsUnavailable, match="a/b"):
            await objects.put("a/b/c", b"")
        assert [info.path for info in await objects.list_children("a")] == ["a/b"]

    asyncio.run(check())


def test_a_directory_that_was_removed_is_made_again(
    objects: DirectoryObjects, tmp_path: Path
) -> None:
    async def check() -> None:
        await objects.put("a/b", b"")
        (tmp_path / "a/b").unlink()
        (tmp_path / "a").rmdir()
        with pytest.raises(ObjectsUnavailable):
            await objects.put("a/b", b"")
        await objects.put("a/b", b"")

    asyncio.run(check())


# --- Locks ------------------------------------------------------------------------------------


class Trap(RealDisk):
    """A disk that does something, once, when an object is about to be replaced."""

    def __init__(self, trap: Callable[[], None]) -> None:
        self.trap: Callable[[], None] | None = trap

    def rename(self, source: Path, target: Path) -> None:
        if trap := self.trap:
            self.trap = None
            trap()
        super().rename(source, target)


def test_nothing_comes_between_the_look_and_the_write(tmp_path: Path) -> None:
    """Neither a ``put`` nor a ``delete``: they wait until the other one has written."""
    others: list[BaseException] = []

    def interfere() -> None:
        other = DirectoryObjects(tmp_path, lock_timeout=0.02)
        for attempt in (other.put(PATH, b"put"), other.delete([PATH])):
            try:
                asyncio.run(attempt)
            except ObjectsUnavailable as error:
                others.append(error)

    async def check() -> None:
        version = await DirectoryObjects(tmp_path).put(PATH, b"first")
        objects = DirectoryObjects(tmp_path, disk=Trap(interfere))
        await objects.put_if(PATH, b"second", version)
        assert await objects.get(PATH)

    asyncio.run(check())
    assert ["is being written by process" in str(error) for error in others] == [True, True]
    assert (tmp_path / PATH).read_bytes() == b"second"


def test_a_reader_does_not_wait(tmp_path: Path) -> None:
    seen: list[bytes] = []

    def read() -> None:
        fetched = asyncio.run(DirectoryObjects(tmp_path).get(PATH))
        seen.append(fetched.data if fetched else b"")

    async def check() -> None:
        version = await DirectoryObjects(tmp_path).put(PATH, b"first")
        await DirectoryObjects(tmp_path, disk=Trap(read)).put_if(PATH, b"second", version)

    asyncio.run(check())
    assert seen == [b"first"]


def test_a_caller_that_stops_waiting_leaves_no_lock(tmp_path: Path) -> None:
    async def check() -> None:
        objects = DirectoryObjects(tmp_path, disk=Trap(lambda: time.sleep(0.2)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await objects.put(PATH, b"first")
        await objects.put(PATH, b"second")

    asyncio.run(check())
    assert (tmp_path / PATH).read_bytes() == b"second"


WORKER = """
import asyncio, sys
from pathlib import Path
from quiver.buffer.directory_objects import DirectoryObjects
from quiver.errors import Conflict

async def main():
    objects, conflicts = DirectoryObjects(Path(sys.argv[1])), 0
    done = 0
    while done < int(sys.argv[2]):
        fetched = await objects.get("counter")
        await asyncio.sleep(0.001)
        try:
            await objects.put_if("counter", b"%d" % (int(fetched.data) + 1), fetched.version)
            done += 1
        except Conflict:
            conflicts += 1
    print(conflicts)

asyncio.run(main())
"""


def test_two_processes_increment_and_lose_nothing(
    objects: DirectoryObjects, tmp_path: Path
) -> None:
    asyncio.run(objects.put_if("counter", b"0", None))
    command = [sys.executable, "-c", WORKER, str(tmp_path), "100"]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    conflicts = [int(worker.communicate(timeout=60)[0]) for worker in workers]
    assert (tmp_path / "counter").read_bytes() == b"200"
    assert sum(conflicts), "the two never met: this shows nothing"


# --- Power cuts -------------------------------------------------------------------------------

# More than a sector each, so that they can tear.
VALUES = [bytes([65 + number]) * (600 + 100 * number) for number in range(3)]


def new_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_directory(ROOT)
    return disk


def replace_in_turn(disk: SimulatedDisk, acknowledge: Callable[[int], None]) -> None:
    async def script() -> None:
        objects, version = on(disk), None
        for number, value in enumerate(VALUES):
            version = await objects.put_if(PATH, value, version)
            acknowledge(number)

    asyncio.run(script())


def last_or_later(disk: SimulatedDisk, acknowledged: Sequence[int]) -> None:
    """The object is whole, and not older than what was acknowledged last."""
    if not disk.exists(FILE):
        assert not acknowledged, "the object is gone"
        return
    value = disk.read(FILE).to_pybytes()
    assert value in VALUES, "the object is torn"
    if acknowledged:
        assert VALUES.index(value) >= acknowledged[-1], "an acknowledged write is gone"


def test_a_power_cut_leaves_the_old_object_or_the_new_one() -> None:
    report = explore(
        replace_in_turn, last_or_later, seed=SEED, limit_per_point=32, new_disk=new_disk
    )
    assert not report.violations, report
    assert report.states > 50


def test_an_error_of_the_disk_is_no_success() -> None:
    report = error_loop(
        replace_in_turn, last_or_later, seed=SEED, limit_per_run=16, new_disk=new_disk
    )
    assert not report.violations, report
    assert report.points > 10


def test_the_next_one_can_write_after_a_power_cut() -> None:
    def check(disk: SimulatedDisk, _acknowledged: Sequence[int]) -> None:
        async def recover() -> None:
            objects = on(disk)
            try:
                fetched = await objects.get(PATH)
            except ObjectNotFound:
                fetched = None
            await objects.put_if(PATH, b"after", fetched.version if fetched else None)
            assert [info.path for info in await objects.list_children("ingest")] == [PATH]

        asyncio.run(recover())

    report = explore(replace_in_turn, check, seed=SEED, limit_per_point=8, new_disk=new_disk)
    assert not report.violations, report


def test_what_was_read_survives_a_power_cut() -> None:
    """Even when its writer was told that it failed, and the reader is what says that it did not."""

    def script(disk: SimulatedDisk, acknowledge: Callable[[int], None]) -> None:
        async def run() -> None:
            objects = on(disk)
            version = await objects.put_if(PATH, VALUES[0], None)
            acknowledge(0)
            disk.fail_call(5, errno.EIO)  # create, append, sync, rename: then the directory
            with pytest.raises(ObjectsUnavailable):
                await objects.put_if(PATH, VALUES[1], version)
            fetched = await objects.get(PATH)
            assert fetched is not None
            assert fetched.data == VALUES[1]
            acknowledge(1)

        asyncio.run(run())

    report = explore(script, last_or_later, seed=SEED, limit_per_point=32, new_disk=new_disk)
    assert not report.violations, report


def test_what_a_reader_gets_before_the_writer_is_done_survives_too() -> None:
    """A reader in another process, between the rename and the sync of the directory."""
    disk = new_disk()
    asyncio.run(on(disk).put(PATH, VALUES[0]))
    inode = disk.create(FILE.with_suffix(".tmp"))
    inode.append([VALUES[1]])
    inode.sync()
    disk.rename(FILE.with_suffix(".tmp"), FILE)
    assert disk.crash_state_count() > 1
    fetched = asyncio.run(on(disk).get(PATH))
    assert fetched is not None
    for state in disk.crash_states():
        assert state.read(FILE).to_pybytes() == fetched.data == VALUES[1]


def test_a_read_that_cannot_be_made_sure_is_no_read() -> None:
    disk = new_disk()
    objects = on(disk)

    async def check() -> None:
        version = await objects.put(PATH, VALUES[0])
        disk.fail_call(1, errno.EIO)
        with pytest.raises(ObjectsUnavailable, match="Input/output error"):
            await objects.get(PATH)
        disk.calls.clear()
        assert await objects.get(PATH, unless=version) is None
        assert disk.calls == []
        assert await objects.get(PATH) == Fetched(VALUES[0], version, len(VALUES[0]))
        assert [call.kind for call in disk.calls].count("rename") == 1
        disk.calls.clear()
        assert await objects.get(PATH) == Fetched(VALUES[0], version, len(VALUES[0]))
        assert [call.kind for call in disk.calls] == ["sync_dir"]

    asyncio.run(check())


def test_a_deleted_object_stays_deleted() -> None:
    def script(disk: SimulatedDisk, acknowledge: Callable[[str], None]) -> None:
        async def run() -> None:
            objects = on(disk)
            await objects.put("ingest/a", b"a")
            await objects.put("ingest/b", b"b")
            await objects.delete(["ingest/a", "ingest/b"])
            acknowledge("deleted")

        asyncio.run(run())

    def check(disk: SimulatedDisk, acknowledged: Sequence[str]) -> None:
        if acknowledged:
            assert disk.list_directory(ROOT / "ingest") == []

    report = explore(script, check, seed=SEED, limit_per_point=16, new_disk=new_disk)
    assert not report.violations, report


def test_a_version_is_what_the_bytes_are(objects: DirectoryObjects) -> None:
    async def check() -> list[Version]:
        versions = [await objects.put(PATH, data) for data in (b"a", b"b", b"a")]
        with pytest.raises(Conflict):
            await objects.put_if(PATH, b"c", versions[1])
        return versions

    first, second, third = asyncio.run(check())
    assert first == third != second


def test_the_lock_is_given_up_on_after_a_while(tmp_path: Path) -> None:
    disk = RealDisk()
    objects = DirectoryObjects(tmp_path, disk=disk, lock_timeout=0.05)

    async def check() -> Any:  # noqa: ANN401
        await objects.put(PATH, b"x")
        locks = [disk.lock(lock, "the test") for lock in (tmp_path / ".quiver").iterdir()]
        with pytest.raises(ObjectsUnavailable, match=r"written by the test for more than 0\.05 s"):
            await objects.put(PATH, b"y")
        for lock in locks:
            lock.release()
        return await objects.put(PATH, b"z")

    assert asyncio.run(check())
