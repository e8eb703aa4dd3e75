"""The real disk where it can be told from the simulated one: system calls, modes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from quiver.disk import RealDisk


def test_a_directory_whose_sync_failed_is_synced_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call made it and failed; the second finds it, and must still make it durable."""
    synced: list[int] = []

    def fail_then_record(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        if len(synced) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail_then_record)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        RealDisk().make_directory(tmp_path / "a" / "b")
    assert caught.value.filename == str(tmp_path)
    assert (tmp_path / "a").exists()
    synced.clear()
    synced.append(0)
    synced.append(0)
    RealDisk().make_directory(tmp_path / "a" / "b")
    assert synced[2:] == [path.stat().st_ino for path in (tmp_path, tmp_path / "a")]


def test_a_short_write_of_wide_items_is_not_taken_for_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "writev", lambda descriptor, buffers: os.write(descriptor, bytes(buffers[0])[:3])
    )
    file = RealDisk().create(tmp_path / "a")
    wide = memoryview(bytes(range(24))).cast("Q")
    assert file.append([wide]) == 24
    assert (tmp_path / "a").read_bytes() == bytes(range(24))


def test_new_files_are_not_for_everyone(tmp_path: Path) -> None:
    RealDisk().create(tmp_path / "a").close()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) & 0o007 == 0
