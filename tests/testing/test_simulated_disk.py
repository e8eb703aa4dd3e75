"""What a power cut may leave of the simulated disk, and what not: the table of its model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.disk import DiskFile
from quiver.testing import SimulatedDisk

ROOT = Path("/")
A, B, C = ROOT / "a", ROOT / "b", ROOT / "c"
S = 4  # bytes in a sector, for tests that look at each of them
SEED = 20261115


def small_sectors(content: bytes | None = None) -> SimulatedDisk:
    """With a durable file ``a``, if there is content for it."""
    disk = SimulatedDisk(sector_bytes=S)
    if content is not None:
        file = disk.create(A)
        file.append([content])
        file.sync()
        disk.sync_dir(ROOT)
    return disk


def contents(disk: SimulatedDisk) -> dict[str, bytes]:
    return {name: disk.read(ROOT / name).to_pybytes() for name in disk.list_directory(ROOT)}


def outcomes(disk: SimulatedDisk, limit: int = 1 << 16) -> set[bytes | None]:
    """What ``a`` may hold after a power cut, ``None`` for no such file."""
    return {contents(state).get("a") for state in disk.crash_states(limit=limit, seed=SEED)}


def names(disk: SimulatedDisk) -> set[str]:
    """The names that may be there after a power cut, with their one-letter contents."""
    return {
        " ".join(f"{name}={data.decode()}" for name, data in contents(state).items())
        for state in disk.crash_states(limit=1 << 16, seed=SEED)
    }


def synced(disk: SimulatedDisk, path: Path, content: bytes) -> DiskFile:
    """A new file with durable content; its name is not."""
    file = disk.create(path)
    file.append([content])
    file.sync()
    return file


# --- The content of a file --------------------------------------------------------------------


def test_what_is_synced_survives() -> None:
    disk = small_sectors(b"12345678")
    assert disk.crash_state_count() == 1
    assert outcomes(disk) == {b"12345678"}


def test_an_append_may_be_lost_or_leave_zeros() -> None:
    disk = small_sectors(b"")
    disk.open_append(A).append([b"xyz"])
    assert disk.crash_state_count() == 4  # the bytes and the length, each there or not
    assert outcomes(disk) == {b"", b"\0\0\0", b"xyz"}


def test_an_append_tears_at_sectors_in_any_order() -> None:
    disk = small_sectors(b"old")
    disk.open_append(A).append([b"pqrst", b"u"])  # bytes 3 to 9: the sectors 0, 1 and 2
    assert disk.crash_state_count() == 2**4
    last_sector = {b"oldpqrstu", b"old\0qrstu", b"oldp\0\0\0\0u", b"old\0\0\0\0\0u"}
    length_only = {b"oldpqrst\0", b"old\0qrst\0", b"oldp\0\0\0\0\0", b"old\0\0\0\0\0\0"}
    neither = {b"oldpqrst", b"old\0qrst", b"oldp", b"old"}
    assert outcomes(disk) == last_sector | length_only | neither


def test_a_later_append_may_survive_an_earlier_one() -> None:
    disk = small_sectors(b"")
    file = disk.open_append(A)
    file.append([b"x"])
    file.append([b"y"])
    assert outcomes(disk) == {b"", b"\0", b"x", b"\0\0", b"x\0", b"\0y", b"xy"}


def test_a_truncate_may_be_lost_and_what_follows_kept() -> None:
    disk = small_sectors(b"abcd")
    file = disk.open_append(A)
    file.truncate(2)
    assert outcomes(disk) == {b"abcd", b"ab"}
    file.append([b"x"])
    assert outcomes(disk) == {b"abcd", b"ab", b"ab\0", b"abc", b"abxd", b"abx"}
    file.sync()
    assert outcomes(disk) == {b"abx"}


def test_create_over_a_file_may_leave_the_old_bytes_under_the_new_ones() -> None:
    disk = small_sectors(b"old")
    file = disk.create(A)
    file.append([b"n"])
    assert outcomes(disk) == {b"old", b"", b"o", b"\0", b"n", b"nld"}
    file.sync()
    assert outcomes(disk) == {b"n"}


def test_the_mode_needs_a_sync() -> None:
    disk = small_sectors(b"x")
    file = disk.open_append(A)
    disk.make_read_only(A)
    assert {state.is_read_only(A) for state in disk.crash_states()} == {False, True}
    file.sync()
    assert {state.is_read_only(A) for state in disk.crash_states()} == {True}


def test_files_do_not_wait_for_each_other() -> None:
    disk = small_sectors()
    files = [synced(disk, path, b"") for path in (A, B)]
    disk.sync_dir(ROOT)
    for file in files:
        file.append([b"x"])
    states = [contents(state) for state in disk.crash_states()]
    assert len(states) == 3 * 3
    assert {"a": b"", "b": b"x"} in states
    assert {"a": b"x", "b": b"\0"} in states


# --- Names ------------------------------------------------------------------------------------


def test_a_sync_does_not_save_the_name() -> None:
    disk = small_sectors()
    synced(disk, A, b"A")
    assert names(disk) == {"", "a=A"}
    disk.sync_dir(ROOT)
    assert names(disk) == {"a=A"}


def test_a_directory_sync_does_not_save_the_content() -> None:
    disk = small_sectors()
    disk.create(A).append([b"A"])
    disk.sync_dir(ROOT)
    assert outcomes(disk) == {b"", b"\0", b"A"}


def test_a_rename_happens_or_does_not() -> None:
    disk = small_sectors()
    synced(disk, A, b"A")
    synced(disk, B, b"B")
    disk.sync_dir(ROOT)
    disk.rename(A, B)
    assert names(disk) == {"a=A b=B", "b=A"}
    disk.sync_dir(ROOT)
    assert names(disk) == {"b=A"}


def test_a_rename_may_survive_without_the_name_that_came_before() -> None:
    disk = small_sectors()
    synced(disk, A, b"A")
    disk.rename(A, B)
    assert names(disk) == {"", "a=A", "b=A"}


def test_an_unlink_may_be_undone() -> None:
    disk = small_sectors(b"A")
    disk.unlink(A)
    assert names(disk) == {"", "a=A"}
    disk.sync_dir(ROOT)
    assert names(disk) == {""}


def test_names_change_independently_but_in_order() -> None:
    disk = small_sectors(b"A")
    disk.unlink(A)
    synced(disk, A, b"N")
    synced(disk, B, b"B")
    assert names(disk) == {"", "a=A", "a=N", "b=B", "a=A b=B", "a=N b=B"}


def test_each_directory_is_synced_for_itself() -> None:
    disk = small_sectors()
    sub = ROOT / "sub"
    disk.make_directory(sub)
    for path in (A, sub / "x"):
        synced(disk, path, b"")
    disk.sync_dir(sub)
    states = list(disk.crash_states())
    assert {state.exists(A) for state in states} == {False, True}
    assert {state.exists(sub / "x") for state in states} == {True}


def test_a_directory_is_durable_when_the_call_returns() -> None:
    disk = small_sectors(b"A")
    disk.unlink(A)
    disk.make_directory(A / "deep")
    assert [call.path for call in disk.calls[-2:]] == [A, A / "deep"]
    for state in disk.crash_states():
        assert state.list_directory(ROOT) == ["a"]
        assert state.list_directory(A) == ["deep"]


def test_a_file_without_a_name_adds_no_states() -> None:
    disk = small_sectors(b"A")
    file = disk.open_append(A)
    disk.unlink(A)
    disk.sync_dir(ROOT)
    file.append([b"nobody will read this"])
    assert disk.crash_state_count() == 1


@pytest.mark.parametrize("target", [ROOT / "sub" / "a", ROOT / "elsewhere" / "a"])
def test_renames_between_directories_are_not_simulated(target: Path) -> None:
    disk = small_sectors(b"A")
    disk.make_directory(ROOT / "sub")
    with pytest.raises(NotImplementedError):
        disk.rename(A, target)
    with pytest.raises(NotImplementedError):
        disk.rename(ROOT / "sub", ROOT / "other")


# --- The disks after a power cut --------------------------------------------------------------


def test_a_disk_after_the_restart_stands_alone() -> None:
    disk = small_sectors(b"old")
    disk.open_append(A).append([b"+"])
    first, *others = disk.crash_states()
    before = [contents(state) for state in others]
    file = first.open_append(A)
    file.append([b" changed"])
    first.unlink(A)
    synced(first, B, b"more")
    first.sync_dir(ROOT)
    assert contents(disk) == {"a": b"old+"}
    assert [contents(state) for state in others] == before
    assert outcomes(disk) == {b"old", b"old\0", b"old+"}


def test_two_names_of_one_file_stay_one_file() -> None:
    disk = small_sectors(b"x")
    disk.rename(A, B)
    disk.rename(B, C)
    both = disk.crash_state((0b10,))  # the second rename without the first
    assert contents(both) == {"a": b"x", "c": b"x"}
    both.open_append(A).append([b"!"])
    assert contents(both) == {"a": b"x!", "c": b"x!"}
    both.rename(A, C)
    assert contents(both) == {"a": b"x!", "c": b"x!"}, "POSIX: this does nothing"


def long_script(disk: SimulatedDisk) -> None:
    synced(disk, A, b"durable")
    disk.sync_dir(ROOT)
    for path in (A, B):
        file = disk.create(path)
        for i in range(10):
            file.append([bytes([65 + i]) * 10])


def test_too_many_states_are_sampled() -> None:
    disk = small_sectors()
    long_script(disk)
    assert disk.crash_state_count() > 1 << 60
    states = [contents(state) for state in disk.crash_states(limit=300, seed=SEED)]
    assert len(states) == 300
    assert {"a": b"durable"} in states, "nothing survives"
    assert contents(disk) in states, "everything survives"


def test_the_sample_holds_the_corners() -> None:
    disk = small_sectors(b"")
    disk.open_append(A).append([b"0123456789abcdef" * 2])
    whole = b"0123456789abcdef" * 2
    sampled = outcomes(disk, limit=100)
    for sector in range(8):
        start, stop = sector * S, (sector + 1) * S
        assert whole[:start] + bytes(S) + whole[stop:] in sampled, "one piece is missing"
        assert bytes(start) + whole[start:stop] in sampled, "one piece is alone"
        assert whole[:stop] in sampled, "a prefix"


def test_the_same_seed_gives_the_same_states() -> None:
    def sample(seed: int) -> list[tuple[object, ...]]:
        disk = small_sectors()
        long_script(disk)
        return [
            (state.choice, contents(state)) for state in disk.crash_states(limit=200, seed=seed)
        ]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_choice_makes_its_disk_again() -> None:
    disk = small_sectors()
    long_script(disk)
    for state in disk.crash_states(limit=50, seed=SEED):
        assert contents(disk.crash_state(state.choice)) == contents(state)


def test_thousands_of_states_in_a_second() -> None:
    disk = SimulatedDisk()
    long_script(disk)
    disk.open_append(A).append([bytes(100_000)])
    started = time.process_time()
    count = sum(1 for _ in disk.crash_states(limit=1000, seed=SEED))
    assert count == 1000
    assert time.process_time() - started < 2  # about 0.15 on a laptop


Mutation = Callable[[SimulatedDisk, dict[str, DiskFile]], object]
MUTATIONS: list[Mutation] = [
    lambda disk, open_files: open_files.update(a=disk.create(A)),
    lambda disk, open_files: open_files.update(b=disk.create(B)),
    lambda disk, open_files: open_files["a"].append([b"12345"]),
    lambda disk, open_files: open_files["b"].append([b"6"]),
    lambda disk, open_files: open_files["a"].truncate(3),
    lambda disk, open_files: open_files["a"].sync(),
    lambda disk, open_files: disk.rename(A, B),
    lambda disk, open_files: disk.rename(B, A),
    lambda disk, open_files: disk.unlink(A),
    lambda disk, open_files: disk.sync_dir(ROOT),
]


@given(st.lists(st.sampled_from(MUTATIONS), max_size=15))
def test_states_of_any_history(history: list[Mutation]) -> None:
    disk = small_sectors()
    open_files: dict[str, DiskFile] = {"a": disk.create(A), "b": disk.create(B)}
    for mutate in history:
        try:
            mutate(disk, open_files)
        except FileNotFoundError:
            continue
    states = [contents(state) for state in disk.crash_states(limit=64, seed=SEED)]
    assert contents(disk) in states, "everything may have survived"
    assert len(states) <= min(64, disk.crash_state_count())
    assert all(a != b for a, b in itertools.combinations(states, 2)), "no two are alike"
    for name in disk.list_directory(ROOT):
        disk.open_append(ROOT / name).sync()
    disk.sync_dir(ROOT)
    assert [contents(state) for state in disk.crash_states()] == [contents(disk)]
