"""``publish`` under power cuts and errors: the whole new file or the old one, never a mix."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from quiver.disk import publish
from quiver.testing import SimulatedDisk, error_loop, explore, replay

NAME = Path("/data/name")
TEMPORARY = Path("/data/name.tmp")
# More than a sector each, so that they can tear, and not a multiple of one another.
OLD, NEW, NEWER = b"old!" * 200, b"new." * 300, b"newer" * 150
SEED = 20261115


def disk_with_old() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_directory(NAME.parent)
    publish(disk, NAME, [OLD])
    disk.calls.clear()
    return disk


def read(disk: SimulatedDisk) -> bytes:
    return disk.read(NAME).to_pybytes()


def test_the_order_of_the_calls() -> None:
    disk = disk_with_old()
    publish(disk, NAME, [b"123", b"45"], read_only=True)
    assert [str(call) for call in disk.calls] == [
        "create /data/name.tmp",
        "append /data/name.tmp 3 bytes",
        "append /data/name.tmp 2 bytes",
        "make_read_only /data/name.tmp",
        "sync /data/name.tmp",
        "rename /data/name.tmp to /data/name",
        "sync_dir /data",
    ]


# --- Power cuts -------------------------------------------------------------------------------

Publish: TypeAlias = Callable[[SimulatedDisk, Path, Sequence[bytes]], object]


def replace_twice(put: Publish) -> Callable[[SimulatedDisk, Callable[[bytes], None]], None]:
    def script(disk: SimulatedDisk, acknowledge: Callable[[bytes], None]) -> None:
        for content in (NEW, NEWER):
            put(disk, NAME, [content[:700], content[700:]])
            acknowledge(content)

    return script


def whole_and_not_older_than_promised(disk: SimulatedDisk, acknowledged: Sequence[bytes]) -> None:
    history = [OLD, NEW, NEWER]
    promised = len(acknowledged)
    assert read(disk) in history[promised : promised + 2]


def test_a_power_cut_leaves_the_old_file_or_the_new_one() -> None:
    report = explore(
        replace_twice(publish),
        whole_and_not_older_than_promised,
        limit_per_point=4096,
        seed=SEED,
        new_disk=disk_with_old,
    )
    assert not report.violations, report
    assert report.points == 1 + 2 * (6 + 1)  # the start; six calls and the promise, twice
    assert report.states > 50


def test_a_power_cut_leaves_no_temporary_file_that_stops_the_next_call() -> None:
    def publish_again(disk: SimulatedDisk, acknowledged: Sequence[bytes]) -> None:
        publish(disk, NAME, [b"after the restart"], read_only=True)
        assert read(disk) == b"after the restart"
        assert not disk.exists(TEMPORARY)

    def script(disk: SimulatedDisk, acknowledge: Callable[[bytes], None]) -> None:
        publish(disk, NAME, [NEW], read_only=True)
        publish(disk, NAME, [NEWER], read_only=True)

    report = explore(script, publish_again, seed=SEED, new_disk=disk_with_old)
    assert not report.violations, report


def without_sync(disk: SimulatedDisk, path: Path, buffers: Sequence[bytes]) -> None:
    file = disk.create(TEMPORARY)
    file.append(buffers)
    file.close()
    disk.rename(TEMPORARY, path)
    disk.sync_dir(path.parent)


def without_sync_dir(disk: SimulatedDisk, path: Path, buffers: Sequence[bytes]) -> None:
    file = disk.create(TEMPORARY)
    file.append(buffers)
    file.sync()
    disk.rename(TEMPORARY, path)


def sync_after_rename(disk: SimulatedDisk, path: Path, buffers: Sequence[bytes]) -> None:
    file = disk.create(TEMPORARY)
    file.append(buffers)
    disk.rename(TEMPORARY, path)
    file.sync()
    disk.sync_dir(path.parent)


def sync_dir_before_rename(disk: SimulatedDisk, path: Path, buffers: Sequence[bytes]) -> None:
    file = disk.create(TEMPORARY)
    file.append(buffers)
    file.sync()
    disk.sync_dir(path.parent)
    disk.rename(TEMPORARY, path)


def sync_before_the_last_buffer(disk: SimulatedDisk, path: Path, buffers: Sequence[bytes]) -> None:
    file = disk.create(TEMPORARY)
    file.append(buffers[:-1])
    file.sync()
    file.append(buffers[-1:])
    disk.rename(TEMPORARY, path)
    disk.sync_dir(path.parent)


def in_place(disk: SimulatedDisk, path: Path, buffers: Sequence[bytes]) -> None:
    file = disk.create(path)
    file.append(buffers)
    file.sync()


def unlink_first(disk: SimulatedDisk, path: Path, buffers: Sequence[bytes]) -> None:
    disk.unlink(path)
    publish(disk, path, buffers)


@pytest.mark.parametrize(
    "wrong",
    [
        without_sync,
        without_sync_dir,
        sync_after_rename,
        sync_dir_before_rename,
        sync_before_the_last_buffer,
        in_place,
        unlink_first,
    ],
)
def test_a_wrong_order_is_found(wrong: Publish) -> None:
    script = replace_twice(wrong)
    report = explore(script, whole_and_not_older_than_promised, seed=SEED, new_disk=disk_with_old)
    assert report.violations
    with pytest.raises((AssertionError, FileNotFoundError)):
        replay(
            script,
            whole_and_not_older_than_promised,
            report.violations[0],
            new_disk=disk_with_old,
        )


# --- Errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("errno_value", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", range(1, 8))
def test_an_error_in_any_call_is_raised_and_leaves_a_whole_file(
    call: int, errno_value: int
) -> None:
    disk = disk_with_old()
    disk.fail_call(call, errno_value, partial=1)
    with pytest.raises(OSError, match=os.strerror(errno_value)):
        publish(disk, NAME, [NEW[:700], NEW[700:]], read_only=True)
    assert disk.list_directory(NAME.parent) == ["name"]
    replaced = call == 7  # the directory sync: the file is in place, only it may not stay there
    assert read(disk) == (NEW if replaced else OLD)


def test_what_was_published_survives_every_error_after_it() -> None:
    report = error_loop(
        replace_twice(publish),
        whole_and_not_older_than_promised,
        seed=SEED,
        new_disk=disk_with_old,
    )
    assert not report.violations, report
    assert report.points == 4 * 12  # two errors, two kinds of half-done, twelve calls


def test_ignoring_the_error_of_a_sync_is_found() -> None:
    def careless(disk: SimulatedDisk, path: Path, buffers: Sequence[bytes]) -> None:
        file = disk.create(TEMPORARY)
        file.append(buffers)
        try:
            file.sync()
        except OSError:
            file.sync()  # the pages are clean by now: this succeeds and does nothing
        disk.rename(TEMPORARY, path)
        disk.sync_dir(path.parent)

    script = replace_twice(careless)
    assert not explore(
        script, whole_and_not_older_than_promised, seed=SEED, new_disk=disk_with_old
    ).violations
    report = error_loop(
        script, whole_and_not_older_than_promised, seed=SEED, new_disk=disk_with_old
    )
    assert report.violations
    assert {v.injected.call for v in report.violations if v.injected} == {3, 8}
