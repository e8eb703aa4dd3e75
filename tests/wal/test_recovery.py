"""Opening a damaged log: what is good is kept, what is bad is set aside and told."""

from __future__ import annotations

import pytest
from logs import (
    ENTRY_SIZE,
    WAL,
    append_one_by_one,
    flip,
    opened,
    overwrite,
    prepared,
    values,
)

from quiver.config import WalConfig
from quiver.testing import SimulatedDisk
from quiver.wal.cursor import store_cursor
from quiver.wal.files import find_files
from quiver.wal.header import HEADER_SIZE

ACTIVE = WAL / "quiver.wal"


def log_of(count: int, config: WalConfig | None = None) -> SimulatedDisk:
    disk = SimulatedDisk()
    writer, _ = opened(disk, config or WalConfig())
    append_one_by_one(writer, range(count))
    writer.close()
    return disk


@pytest.mark.parametrize("cut", [1, 4, 40, ENTRY_SIZE - 1])
def test_a_torn_tail_is_cut_and_appends_go_on(cut: int) -> None:
    disk = log_of(3)
    data = bytes(disk.read(ACTIVE))
    overwrite(disk, ACTIVE, data[: HEADER_SIZE + 2 * ENTRY_SIZE + cut])
    writer, seen = opened(disk)
    assert values(seen) == [0, 1]
    assert writer.recovery.cut_bytes == cut
    assert writer.recovery.damaged == []
    assert disk.size(ACTIVE) == HEADER_SIZE + 2 * ENTRY_SIZE
    assert writer.append(prepared([2]))[0] == (2, 2 * ENTRY_SIZE, 3 * ENTRY_SIZE)
    writer.close()
    assert values(opened(disk)[1]) == [0, 1, 2]


def test_a_damaged_entry_in_the_middle_is_quarantined_and_those_behind_it_survive() -> None:
    disk = log_of(4)
    flip(disk, ACTIVE, HEADER_SIZE + ENTRY_SIZE + 100)
    damaged = bytes(disk.read(ACTIVE, HEADER_SIZE + ENTRY_SIZE, ENTRY_SIZE))
    for _ in range(2):  # opening again reports it again and copies nothing twice
        writer, seen = opened(disk)
        assert values(seen) == [0, 2, 3]
        (report,) = writer.recovery.damaged
        assert (report.path, report.offset) == (ACTIVE, HEADER_SIZE + ENTRY_SIZE)
        assert (report.length, report.position) == (ENTRY_SIZE, ENTRY_SIZE)
        assert "checksum" in report.reason
        assert report.kept_as == WAL / "quarantine" / f"{ENTRY_SIZE:020}.bin"
        assert bytes(disk.read(report.kept_as)) == damaged
        assert disk.is_read_only(report.kept_as)
        assert disk.list_directory(WAL / "quarantine") == [report.kept_as.name]
        writer.close()


def test_a_damaged_last_entry_is_kept_aside_and_its_number_is_not_given_again() -> None:
    disk = log_of(3)
    flip(disk, ACTIVE, HEADER_SIZE + 2 * ENTRY_SIZE + 100)
    writer, seen = opened(disk)
    assert values(seen) == [0, 1]
    (report,) = writer.recovery.damaged
    assert report.kept_as is not None
    assert writer.recovery.cut_bytes == ENTRY_SIZE
    assert writer.append(prepared([9]))[0].sequence == 3


def test_damage_in_a_rotated_file_is_quarantined_and_the_file_is_left_as_it_is() -> None:
    disk = log_of(5, WalConfig(rotation_target=ENTRY_SIZE + 1))
    rotated = WAL / "quiver.wal.1"
    data = bytes(disk.read(rotated))
    disk.unlink(rotated)
    overwrite(disk, rotated, data[:-1])
    writer, seen = opened(disk)
    assert values(seen) == [0, 2, 3, 4]
    assert writer.recovery.cut_bytes == 0
    assert [report.path for report in writer.recovery.damaged] == [rotated]
    assert disk.size(rotated) == len(data) - 1


def test_more_damage_than_the_quarantine_takes_is_reported_and_not_copied() -> None:
    disk = log_of(5)
    flip(disk, ACTIVE, HEADER_SIZE + 100)
    flip(disk, ACTIVE, HEADER_SIZE + 2 * ENTRY_SIZE + 100)
    writer, seen = opened(disk, WalConfig(max_quarantine=ENTRY_SIZE))
    assert values(seen) == [1, 3, 4]
    assert [report.kept_as is None for report in writer.recovery.damaged] == [False, True]


def test_an_unreadable_cursor_means_from_the_start() -> None:
    disk = log_of(3)
    store_cursor(disk, WAL, 2 * ENTRY_SIZE)
    flip(disk, WAL / "quiver.wal.cursor", 14)
    writer, seen = opened(disk)
    assert values(seen) == [0, 1, 2]
    assert "quiver.wal.cursor" in (writer.recovery.cursor_problem or "")


def test_a_log_shorter_than_its_cursor_goes_on_behind_the_cursor() -> None:
    """Otherwise new entries would lie before the cursor, where recovery does not look."""
    disk = log_of(2)
    store_cursor(disk, WAL, 5 * ENTRY_SIZE)
    writer, seen = opened(disk)
    assert values(seen) == [0, 1]  # in case it is the position that is wrong
    assert writer.append(prepared([5]))[0].position == 5 * ENTRY_SIZE
    writer.close()
    writer, seen = opened(disk)
    assert values(seen) == [5]
    assert writer.next_sequence == 3


@pytest.mark.parametrize("size", [0, 1, HEADER_SIZE - 1])
def test_an_active_file_without_a_whole_header_is_started_again(size: int) -> None:
    disk = log_of(5, WalConfig(rotation_target=ENTRY_SIZE + 1))
    overwrite(disk, ACTIVE, bytes(disk.read(ACTIVE))[:size])
    writer, seen = opened(disk)
    assert values(seen) == [0, 1, 2, 3]
    assert writer.append(prepared([4]))[0].position == 4 * ENTRY_SIZE


def test_a_missing_active_file_is_started_where_the_log_ends() -> None:
    disk = log_of(4, WalConfig(rotation_target=ENTRY_SIZE + 1))
    disk.rename(ACTIVE, WAL / "quiver.wal.2")
    writer, seen = opened(disk)
    assert values(seen) == [0, 1, 2, 3]
    assert writer.append(prepared([4]))[0] == (4, 4 * ENTRY_SIZE, 5 * ENTRY_SIZE)


def test_entries_behind_a_damaged_header_are_saved() -> None:
    disk = log_of(4, WalConfig(rotation_target=ENTRY_SIZE + 1))
    flip(disk, ACTIVE, 3)
    for _ in range(2):
        writer, seen = opened(disk)
        assert values(seen) == [0, 1, 2, 3]
        assert any("starts with" in problem for problem in writer.recovery.header_problems)
        assert writer.end_position == 4 * ENTRY_SIZE
        writer.close()
    assert [file.rotation for file in find_files(disk, WAL)] == [1, 2, None]


def test_a_log_in_which_nothing_is_readable_opens_empty_and_keeps_the_bytes() -> None:
    disk = log_of(3)
    garbage = bytes(range(256)) * 8
    overwrite(disk, ACTIVE, garbage)
    writer, seen = opened(disk)
    assert seen == []
    assert writer.append(prepared([0]))[0].position == len(garbage) - HEADER_SIZE
    assert bytes(disk.read(WAL / "quiver.wal.1")) == garbage
    assert bytes(disk.read(WAL / "quarantine" / f"{0:020}.bin")) == garbage[HEADER_SIZE:]
