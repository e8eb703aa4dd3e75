"""Appending, rotating, reclaiming, opening again: the life of a log."""

from __future__ import annotations

import errno
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import (
    ENTRY_SIZE,
    WAL,
    append_one_by_one,
    opened,
    prepared,
    values,
)

from quiver.config import WalConfig
from quiver.errors import WalAtCapacity, WalError, WalPoisoned
from quiver.testing import SimulatedDisk
from quiver.wal.cursor import load_cursor, store_cursor
from quiver.wal.files import find_files
from quiver.wal.header import WalHeader, encode_header
from quiver.wal.replay import DamagedRange, ReplayedEntry, SkippedEntry, replay
from quiver.wal.writer import WalWriter


def test_a_new_log_is_empty() -> None:
    disk = SimulatedDisk()
    writer, seen = opened(disk)
    assert seen == []
    assert (writer.end_position, writer.cursor, writer.next_sequence) == (0, 0, 0)
    assert disk.list_directory(WAL) == ["quiver.wal"]


def test_what_was_appended_is_replayed_with_its_positions() -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    appended = writer.append(prepared([0])) + writer.append(prepared([1, 2]))
    assert [a.sequence for a in appended] == [0, 1, 2]
    assert [a.position for a in appended] == [0, ENTRY_SIZE, 2 * ENTRY_SIZE]
    writer.close()
    writer, seen = opened(disk)
    assert values(seen) == [0, 1, 2]
    assert [(e.position, e.end_position) for e in seen] == [a[1:] for a in appended]
    assert writer.next_sequence == 3
    assert writer.recovery.replayed_bytes == 3 * ENTRY_SIZE


def test_a_group_is_one_write_and_one_sync() -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    disk.calls.clear()
    writer.append(prepared(range(5)))
    writer.sync()
    writer.sync()
    assert [call.kind for call in disk.calls] == ["append", "sync"]


def test_positions_go_on_over_rotated_files() -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    appended = append_one_by_one(writer, range(7))
    assert [a.position for a in appended] == [i * ENTRY_SIZE for i in range(7)]
    writer.close()
    files = find_files(disk, WAL)
    assert [f.path.name for f in files] == [
        "quiver.wal.1",
        "quiver.wal.2",
        "quiver.wal.3",
        "quiver.wal",
    ]
    assert [f.start for f in files] == [0, 2 * ENTRY_SIZE, 4 * ENTRY_SIZE, 6 * ENTRY_SIZE]
    assert disk.is_read_only(WAL / "quiver.wal.1")
    assert not disk.is_read_only(WAL / "quiver.wal")
    _, seen = opened(disk)
    assert values(seen) == list(range(7))


@given(st.integers(0, 7), st.data())
def test_replay_starts_at_any_entry_of_any_file(count: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, count))
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    append_one_by_one(writer, range(count))
    items = list(replay(disk, find_files(disk, WAL), start * ENTRY_SIZE))
    assert all(isinstance(item, ReplayedEntry) for item in items)
    found = [item for item in items if isinstance(item, ReplayedEntry)]
    assert values(found) == list(range(start, count))


@pytest.mark.parametrize("inside", [1, 30, ENTRY_SIZE - 1])
def test_replay_from_inside_an_entry_gives_the_whole_file(inside: int) -> None:
    """No cursor points there, so a position must be wrong: better again than not at all."""
    disk = SimulatedDisk()
    writer, _ = opened(disk, WalConfig())
    append_one_by_one(writer, range(4))
    items = list(replay(disk, find_files(disk, WAL), 2 * ENTRY_SIZE + inside))
    assert values(item for item in items if isinstance(item, ReplayedEntry)) == [0, 1, 2, 3]


def test_the_cursor_hides_what_is_done_and_deletes_whole_files() -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    appended = append_one_by_one(writer, range(7))
    assert writer.advance_cursor(appended[2].end_position) == [WAL / "quiver.wal.1"]
    assert load_cursor(disk, WAL) == appended[2].end_position
    writer.close()
    writer, seen = opened(disk)
    assert values(seen) == [3, 4, 5, 6]
    assert [a.position for a in append_one_by_one(writer, [7])] == [7 * ENTRY_SIZE]


def test_positions_survive_purge_rotation_and_restart() -> None:
    """The reference loses count here: it starts again at 0 when it opens a purged log."""
    disk = SimulatedDisk()
    expected = 0
    for cycle in range(5):
        writer, seen = opened(disk)
        assert [item.entry.sequence for item in seen] == [expected - 1] * bool(expected)
        appended = append_one_by_one(writer, range(expected, expected + 5))
        expected += 5
        assert appended[-1].end_position == expected * ENTRY_SIZE
        assert appended[-1].sequence == expected - 1
        writer.sync()
        writer.advance_cursor(appended[-1].position)
        if cycle % 2:
            writer.close()


def test_the_cursor_does_not_move_back_or_past_the_end() -> None:
    writer, _ = opened(SimulatedDisk())
    writer.append(prepared([0, 1]))
    writer.advance_cursor(ENTRY_SIZE)
    for position in (0, 3 * ENTRY_SIZE):
        with pytest.raises(WalError, match=f"cannot move to {position}"):
            writer.advance_cursor(position)


def test_the_last_sequence_number_is_never_purged() -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    append_one_by_one(writer, range(2))
    disk.fail_call(6, errno.ENOSPC)  # sync, rename, mode, sync_dir, create, append of the header
    with pytest.raises(WalPoisoned):
        append_one_by_one(writer, [2])
    writer, _ = opened(disk)
    writer.advance_cursor(writer.end_position)
    assert "quiver.wal.1" in disk.list_directory(WAL)
    writer, seen = opened(disk)
    assert seen == []
    assert writer.next_sequence == 2


def test_the_caller_can_raise_the_sequence() -> None:
    writer = WalWriter.open(SimulatedDisk(), WAL, next_sequence=50)
    assert writer.append(prepared([0]))[0].sequence == 50


def test_too_many_rotated_files_refuse_before_writing() -> None:
    disk = SimulatedDisk()
    config = WalConfig(rotation_target=1, max_size=100 * ENTRY_SIZE, max_rotated_files=2)
    writer, _ = opened(disk, config)
    append_one_by_one(writer, range(3))
    with pytest.raises(WalAtCapacity, match=r"wal\.max_rotated_files is 2") as caught:
        append_one_by_one(writer, [3])
    assert caught.value.retryable
    writer.advance_cursor(ENTRY_SIZE)
    assert append_one_by_one(writer, [3])[0].sequence == 3


def test_too_many_bytes_refuse_before_writing() -> None:
    disk = SimulatedDisk()
    size = 38 + 3 * ENTRY_SIZE
    writer, _ = opened(disk, WalConfig(rotation_target=size, max_size=size))
    writer.append(prepared([0, 1]))
    with pytest.raises(WalAtCapacity, match=f"wal.max_size is {size}"):
        writer.append(prepared([2, 3]))
    assert writer.append(prepared([2]))[0].sequence == 2
    assert writer.size == size


def _append_and_sync(writer: WalWriter) -> None:
    writer.append(prepared([1]))
    writer.sync()


@pytest.mark.parametrize("call", [1, 2], ids=["append", "sync"])
def test_after_a_failed_write_or_sync_the_file_is_not_trusted(call: int) -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    writer.append(prepared([0]))
    writer.sync()
    disk.fail_call(call, errno.EIO)
    with pytest.raises(WalPoisoned, match=f"since position {ENTRY_SIZE} is not safe"):
        _append_and_sync(writer)
    for action in (lambda: writer.append(prepared([2])), writer.sync):
        with pytest.raises(WalPoisoned, match="open it again"):
            action()
    writer.close()
    _, seen = opened(disk)
    assert values(seen)[0] == 0


@pytest.mark.parametrize("call", [1, 2], ids=["append", "sync"])
def test_a_new_file_is_started_after_a_failure_and_nothing_is_given_out_twice(call: int) -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    writer.append(prepared([0]))
    writer.sync()
    disk.fail_call(call, errno.EIO, partial=30)
    with pytest.raises(WalPoisoned):
        _append_and_sync(writer)
    lost_until = writer.end_position
    writer.start_over()
    appended = writer.append(prepared([2]))[0]
    writer.sync()
    assert appended.sequence == 2
    assert appended.position == lost_until > ENTRY_SIZE
    assert writer.rotated_files == 1
    for state in disk.crash_states(limit=100):
        _, seen = opened(state)
        assert {0, 2} <= set(values(seen))
        assert [item.entry.sequence for item in seen] in ([0, 2], [0, 1, 2])


def test_starting_over_can_fail_and_be_tried_again() -> None:
    for failing in range(1, 7):
        disk = SimulatedDisk()
        writer, _ = opened(disk)
        writer.append(prepared([0]))
        writer.sync()
        disk.fail_call(1, errno.EIO)
        with pytest.raises(WalPoisoned):
            _append_and_sync(writer)
        disk.fail_call(failing, errno.ENOSPC)
        with pytest.raises(OSError, match="space"):
            writer.start_over()
        with pytest.raises(WalPoisoned):
            writer.append(prepared([2]))
        writer.start_over()
        writer.append(prepared([2]))
        writer.close()
        assert values(opened(disk)[1]) == [0, 2]


def test_numbers_can_be_reserved_for_bundles_that_are_not_logged() -> None:
    writer, _ = opened(SimulatedDisk())
    assert writer.reserve_sequences(3) == 0
    assert writer.append(prepared([0]))[0].sequence == 3


def test_a_closed_log_says_so() -> None:
    writer, _ = opened(SimulatedDisk())
    writer.close()
    writer.close()
    with pytest.raises(WalPoisoned, match="was closed"):
        writer.append(prepared([0]))


def test_a_header_in_front_of_its_predecessors_end_is_not_believed() -> None:
    """It would put its entries behind the cursor, where nobody looks for them."""
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    append_one_by_one(writer, range(3))
    writer.advance_cursor(2 * ENTRY_SIZE)
    entry = bytes(disk.read(WAL / "quiver.wal"))[38:]
    file = disk.create(WAL / "quiver.wal")
    file.append([encode_header(WalHeader(0)), entry])
    disk.rename(WAL / "quiver.wal", WAL / "quiver.wal.9")
    file = disk.create(WAL / "quiver.wal.8")
    file.append([encode_header(WalHeader(2 * ENTRY_SIZE))])
    writer, seen = opened(disk)
    assert values(seen) == [2]
    assert len(writer.recovery.header_problems) == 1


def test_files_are_read_in_the_order_of_their_positions_whatever_their_numbers() -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    append_one_by_one(writer, range(7))
    writer.close()
    disk.rename(WAL / "quiver.wal.1", WAL / "quiver.wal.30")
    disk.rename(WAL / "quiver.wal.3", WAL / "quiver.wal.5")
    writer, seen = opened(disk)
    assert values(seen) == list(range(7))
    assert len(writer.recovery.header_problems) == 1
    append_one_by_one(writer, range(7, 9))
    writer.close()
    assert "quiver.wal.31" in disk.list_directory(WAL)
    assert values(opened(disk)[1]) == list(range(9))


def test_names_that_are_not_of_the_log_are_left_alone() -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    append_one_by_one(writer, range(3))
    for name in ("quiver.wal.01", "quiver.wal.x", "quiver.wal.cursor.tmp", "notes.txt"):
        disk.create(WAL / name).append([b"?"])
    assert [f.path.name for f in find_files(disk, WAL)] == ["quiver.wal.1", "quiver.wal"]
    writer, seen = opened(disk)
    assert values(seen) == [0, 1, 2]
    assert writer.rotated_files == 1


def test_replay_reports_what_it_does_not_know_or_cannot_read() -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk, WalConfig())
    writer.append(prepared([0, 1]))
    writer.close()
    file = disk.open_append(WAL / "quiver.wal")
    file.append([b"\x01\x00\x00\x00\x05", zlib.crc32(b"\x05").to_bytes(4, "little"), b"torn"])
    *_, unknown, torn = replay(disk, find_files(disk, WAL))
    assert unknown == SkippedEntry(2 * ENTRY_SIZE, 2 * ENTRY_SIZE + 9, 5)
    assert isinstance(torn, DamagedRange)
    assert (torn.torn, bytes(torn.data)) == (True, b"torn")
    assert opened(disk)[0].recovery.skipped_entries == 1


def test_a_cursor_stored_by_hand_is_used() -> None:
    disk = SimulatedDisk()
    writer, _ = opened(disk)
    append_one_by_one(writer, range(4))
    writer.close()
    store_cursor(disk, WAL, 3 * ENTRY_SIZE)
    _, seen = opened(disk)
    assert values(seen) == [3]
