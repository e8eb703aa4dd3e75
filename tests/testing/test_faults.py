"""The simulated disk that fails, fills up and keeps a log of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from quiver.disk import Disk, DiskFile
from quiver.testing import Call, SimulatedDisk

ROOT = Path("/")
A, B = ROOT / "a", ROOT / "b"
EIO = os.strerror(errno.EIO)
FULL = os.strerror(errno.ENOSPC)


def disk_with_file(content: bytes = b"durable") -> tuple[SimulatedDisk, DiskFile]:
    disk = SimulatedDisk()
    file = disk.create(A)
    file.append([content])
    file.sync()
    disk.sync_dir(ROOT)
    disk.calls.clear()
    return disk, file


def read(disk: SimulatedDisk) -> bytes:
    return disk.read(A).to_pybytes()


def outcomes(disk: SimulatedDisk) -> set[bytes]:
    return {read(state) for state in disk.crash_states()}


Mutation: TypeAlias = Callable[[Disk, DiskFile], object]

MUTATIONS: dict[str, Mutation] = {
    "create": lambda disk, _: disk.create(A),
    "append": lambda _, file: file.append([b"more"]),
    "truncate": lambda _, file: file.truncate(1),
    "sync": lambda _, file: file.sync(),
    "rename": lambda disk, _: disk.rename(A, B),
    "unlink": lambda disk, _: disk.unlink(A),
    "sync_dir": lambda disk, _: disk.sync_dir(ROOT),
    "make_directory": lambda disk, _: disk.make_directory(ROOT / "sub"),
    "make_read_only": lambda disk, _: disk.make_read_only(A),
}


@pytest.mark.parametrize("kind", MUTATIONS)
def test_any_mutating_call_can_fail_once_and_changes_nothing(kind: str) -> None:
    disk, file = disk_with_file()
    disk.fail_call(1, errno.EIO)
    with pytest.raises(OSError, match=EIO) as caught:
        MUTATIONS[kind](disk, file)
    assert caught.value.errno == errno.EIO
    assert disk.list_directory(ROOT) == ["a"]
    assert not disk.is_read_only(A)
    assert outcomes(disk) == {read(disk)} == {b"durable"}
    assert file.size == 7
    assert [call.kind for call in disk.calls] == [kind]
    assert disk.faults_waiting == 0
    MUTATIONS[kind](disk, file)


def test_errors_name_the_file() -> None:
    disk, file = disk_with_file()
    for kind, mutate in MUTATIONS.items():
        disk.fail_call(1, errno.EIO)
        with pytest.raises(OSError, match=EIO) as caught:
            mutate(disk, file)
        named = {"make_directory": "/sub", "sync_dir": "/"}.get(kind, "/a")
        assert caught.value.filename == named
        assert caught.value.filename2 == ("/b" if kind == "rename" else None)


def test_the_error_waits_for_its_call() -> None:
    disk, file = disk_with_file()
    disk.fail_call(3, errno.EIO)
    disk.fail_call(2, errno.ENOSPC)
    file.append([b"1"])
    with pytest.raises(FileNotFoundError):
        disk.unlink(B)  # it could not have changed anything, and does not count
    with pytest.raises(OSError, match=FULL):
        file.append([b"2"])
    assert disk.faults_waiting == 1
    with pytest.raises(OSError, match=EIO):
        file.append([b"3"])
    file.append([b"4"])
    assert read(disk) == b"durable14"


def test_calls_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        SimulatedDisk().fail_call(0, errno.EIO)


def test_a_failed_append_may_have_written_a_part() -> None:
    disk, file = disk_with_file()
    disk.fail_call(1, errno.ENOSPC, partial=2)
    with pytest.raises(OSError, match=FULL):
        file.append([b"12", b"34"])
    assert read(disk) == b"durable12"
    assert file.size == 9
    file.sync()
    assert outcomes(disk) == {b"durable12"}


def test_no_sync_after_a_failed_one_saves_what_it_lost() -> None:
    disk, file = disk_with_file()
    file.append([b" lost"])
    disk.fail_call(1, errno.EIO)
    with pytest.raises(OSError, match=EIO):
        file.sync()
    assert read(disk) == b"durable lost", "the page cache still has it"
    assert disk.crash_state_count() == 1
    file.sync()
    assert outcomes(disk) == {b"durable"}
    file.append([b" later"])
    file.sync()
    assert read(disk) == b"durable lost later"
    assert outcomes(disk) == {b"durable\0\0\0\0\0 later"}


def test_a_failed_sync_may_have_saved_a_part() -> None:
    disk, file = disk_with_file(b"")
    file.append([b"1" * 512 + b"2" * 512])
    disk.fail_call(1, errno.EIO, partial=1)
    with pytest.raises(OSError, match=EIO):
        file.sync()
    assert outcomes(disk) == {b"1" * 512}


def test_no_directory_sync_after_a_failed_one_saves_what_it_lost() -> None:
    disk, _ = disk_with_file()
    disk.unlink(A)
    disk.create(B)
    disk.fail_call(1, errno.EIO)
    with pytest.raises(OSError, match=EIO):
        disk.sync_dir(ROOT)
    disk.sync_dir(ROOT)
    assert disk.list_directory(ROOT) == ["b"]
    assert [state.list_directory(ROOT) for state in disk.crash_states()] == [["a"]]


def test_making_directories_may_fail_halfway() -> None:
    disk = SimulatedDisk()
    disk.fail_call(2, errno.ENOSPC)
    with pytest.raises(OSError, match=FULL) as caught:
        disk.make_directory(ROOT / "x" / "y" / "z")
    assert caught.value.filename == "/x/y"
    assert disk.list_directory(ROOT / "x") == []


# --- Capacity ---------------------------------------------------------------------------------


def test_a_full_disk_takes_what_fits() -> None:
    disk = SimulatedDisk(capacity_bytes=10)
    file = disk.create(A)
    file.append([b"1234567"])
    with pytest.raises(OSError, match=FULL):
        file.append([b"89abcdef"])
    assert read(disk) == b"123456789a"
    assert file.size == 10
    assert disk.room() == 0
    file.truncate(8)
    assert file.append([b"xy"]) == 2


def test_room_comes_back_when_name_and_handle_are_gone() -> None:
    disk = SimulatedDisk(capacity_bytes=10)
    file = disk.create(A)
    file.append([b"1234567"])
    disk.unlink(A)
    assert disk.room() == 3
    file.close()
    assert disk.room() == 10


def test_a_disk_is_as_large_after_the_restart() -> None:
    disk = SimulatedDisk(capacity_bytes=10, sector_bytes=4)
    disk.create(A).append([b"1234567"])
    for state in disk.crash_states():
        assert state.sector_bytes == 4
        assert state.room() == 10 - (state.size(A) if state.exists(A) else 0)


def test_a_disk_without_a_limit_has_room() -> None:
    assert SimulatedDisk().room() > 1 << 60


# --- Log and hooks ----------------------------------------------------------------------------


def test_the_log_has_the_mutating_calls_in_order() -> None:
    disk, file = disk_with_file()
    file.append([b"123", b"45"])
    file.truncate(2)
    disk.read(A)
    disk.rename(A, B)
    disk.open_append(B).close()
    assert disk.calls == [
        Call("append", A, "5 bytes"),
        Call("truncate", A, "to 2 bytes"),
        Call("rename", A, "to /b"),
    ]
    assert str(disk.calls[0]) == "append /a 5 bytes"


def test_hooks_run_around_each_call() -> None:
    disk, file = disk_with_file()
    seen: list[str] = []
    disk.before_call = lambda call: seen.append(f"before {call.kind}: {file.size}")
    disk.after_call = lambda call: seen.append(f"after {call.kind}: {file.size}")
    file.append([b"!"])
    disk.fail_call(1, errno.EIO)
    with pytest.raises(OSError, match=EIO):
        file.truncate(0)
    assert seen == [
        "before append: 7",
        "after append: 8",
        "before truncate: 8",
        "after truncate: 8",
    ]
